"""JSON from other programs: every fault in it is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

#: Makes the value of an object of its names and values.
Pairs = Callable[[list[tuple[str, Any]]], Any]

#: How many lists and objects may stand one inside the other.
DEEPEST = 64


def from_json(text: str | bytes, *, pairs: Pairs | None = None) -> Any:
    """Return the value of a text.

    Args:
        text: JSON.
        pairs: makes the value of an object of its names and values; None: a dict, the last value
            of a name that stands twice.

    Raises:
        ValueError: it is no JSON, or nested so deeply that Python cannot go through it.

    >>> from_json("[1, {}]")
    [1, {}]
    >>> from_json("[" * 100000)
    Traceback (most recent call last):
    ...
    ValueError: more than 64 brackets are one inside the other
    """
    try:
        parsed = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise _too_deep() from None
    level = [x for x in (parsed,) if isinstance(x, dict | list)]
    for _ in range(DEEPEST):
        inside = (y for x in level for y in (x.values() if isinstance(x, dict) else x))
        level = [y for y in inside if isinstance(y, dict | list)]
    if level:
        raise _too_deep()
    return parsed


def _too_deep() -> ValueError:
    return ValueError(f"more than {DEEPEST} brackets are one inside the other")
