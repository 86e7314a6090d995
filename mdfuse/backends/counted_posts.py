"""Posts whose counts a run computes: a bound call with the counts of one run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdfuse.backends.base import Poster
from mdfuse.backends.staging import Staged
from mdfuse.layouts.call import Call


def counted(poster: Any, call: Call) -> Poster:
    """Return a poster with the counts of a run in place of those with which it was bound.

    All posters are data classes of a call and a team; what they keep for one call is left behind.

    Args:
        poster: as a backend bound it.
        call: the same call, with other counts.
    """
    if isinstance(poster, Staged) and hasattr(poster.post, "call"):
        return replace(poster, call=call, post=counted(poster.post, call))
    bound: Poster = replace(poster, call=call)
    return bound
