"""Find functions of a module with a custom backward, which export does not capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function

_FUNCTION: Any = Function


@contextmanager
def own_backwards() -> Iterator[dict[str, None]]:
    """Note the names of called `torch.autograd.Function`s, except torch's own."""
    names: dict[str, None] = {}
    plain = vars(Function)["apply"]

    def noted(kind: type, *args: Any, **kwargs: Any) -> Any:
        if not kind.__module__.startswith("torch."):
            names[kind.__name__] = None
        return plain.__get__(None, kind)(*args, **kwargs)

    _FUNCTION.apply = classmethod(noted)
    try:
        yield names
    finally:
        _FUNCTION.apply = plain
