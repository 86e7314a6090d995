"""`x[…]` with tensors of indices among slices, integers, None and `...`."""

from __future__ import annotations

import builtins
from typing import Any

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, indexing, views
from mdfuse.frontend.ops.lookup_parts import at_indices


def index(x: Handle, where: Any) -> Handle:
    """`x[where]`; a list of integers stands for a tensor of them.

    Slices and integers are applied first. Then the tensors, broadcast to one shape, replace their
    dims; if these are not adjacent, the new dims come first.
    """
    items = [where] if not isinstance(where, tuple) else [*where]
    if not any(isinstance(item, Handle | list) for item in items):
        return indexing.index(x, where)
    items = _without_dots(x, items)
    _check_numbers(x, items)
    items = [creations.tensor(item) if _is_list(item) else item for item in items]
    y = indexing.index(
        x, tuple(builtins.slice(None) if isinstance(i, Handle) else i for i in items)
    )
    at, places, indices = 0, [], []
    for item in items:
        if isinstance(item, Handle):
            places.append(at)
            indices.append(item)
        at += item is None or isinstance(item, Handle | builtins.slice)
    if places != [*range(places[0], places[0] + len(places))]:
        y, places = views.movedim(y, places, [*range(len(places))]), [0]
    return at_indices(y, places[0], indices)


def _check_numbers(x: Handle, items: list[Any]) -> None:
    """Check the integers of lists; those of tensors are only known in a run."""
    dims = [item for item in items if item is not None]
    for dim, item in enumerate(dims[: x.ndim]):
        for i in item if _is_list(item) else ():
            indexing.check_in_range(x, i, dim)


def _is_list(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(i) is int for i in item)


def _without_dots(x: Handle, items: list[Any]) -> list[Any]:
    """Replace `...` and missing items by a slice for each dim."""
    used = sum(item is not None and item is not Ellipsis for item in items)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    slices = [builtins.slice(None)] * max(x.ndim - used, 0)
    return [*items[:at], *slices, *items[at + 1 :]]
