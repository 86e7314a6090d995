"""`x[...]`: slices, integers, None and `...`."""

from __future__ import annotations

import builtins
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from mdfuse.errors import DefinitionError, counted
from mdfuse.extents.extent import Extent, are_same, is_symbolic, larger, smaller
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import place, record
from mdfuse.frontend.plain import brief, is_in_range, plain_number

Window = tuple[int, int, int]

_WHOLE = builtins.slice(None)


@dataclass(frozen=True, slots=True)
class Indexing:
    """The effect of an index on a value.

    Attributes:
        window: starts, ends and steps; None if the whole value is taken.
        gone: dims that an integer index removes.
        new: positions of new dims in the result.
    """

    window: tuple[tuple[int, ...], ...] | None
    gone: tuple[int, ...]
    new: tuple[int, ...]


#: Plans of earlier indices, by shape and index.
_PLANS: dict[Hashable, Indexing] = {}
_LIMIT = 4096


def index(x: Handle, where: Any) -> Handle:
    """`x[where]` with slices, integers, None and `...`."""
    key = _key(x.shape, where)
    plan = _PLANS.get(key) if key is not None else None
    if plan is None:
        plan = _plan(x, where)
        if key is not None and len(_PLANS) < _LIMIT:
            _PLANS[key] = plan
    result = x
    if plan.window is not None:
        starts, ends, steps = plan.window
        result = record("slice", x, starts=starts, ends=ends, steps=steps)
    if plan.gone:
        result = record("squeeze", result, dims=plan.gone)
    if plan.new:
        result = record("unsqueeze", result, dims=plan.new)
    return record("set", x) if result is x else result


def along(x: Handle, dim: int, item: Any) -> Handle:
    """`x[..., item, ...]`: what an index or a slice takes of one dim."""
    return index(x, (*[_WHOLE] * place(x, dim), item))


def _key(shape: tuple[int, ...], where: Any) -> Hashable | None:
    """Return a key of a shape and an index of numbers; None for other indices."""
    items: list[Any] = []
    for item in where if type(where) is tuple else (where,):
        if type(item) is builtins.slice:
            items += (item.start, item.stop, item.step)
        items.append(None if type(item) is builtins.slice else item)
        items.append(type(item))
    return (shape, *items) if _PLAIN.issuperset(map(type, (*shape, *items))) else None


_PLAIN = frozenset((int, type, type(None), type(...)))


def _plan(x: Handle, where: Any) -> Indexing:
    windows: list[Window] = []
    gone: list[int] = []
    new: list[int] = []
    for item in _items(x, where):
        dim = len(windows)
        if item is None:
            new.append(dim - len(gone) + len(new))
            continue
        windows.append(window_of(x, item, dim))
        if not isinstance(item, builtins.slice):
            gone.append(dim)
    starts, ends, steps = zip(*windows, strict=True) if windows else ((), (), ())
    window = None if _is_whole(x, windows) else (starts, ends, steps)
    return Indexing(window, tuple(gone), tuple(new))


def _items(x: Handle, where: Any) -> list[Any]:
    """Return one item per dim, and the Nones, with `...` expanded."""
    items = [_plain(x, i) for i in (where if isinstance(where, tuple) else (where,))]
    dots = used = 0
    for item in items:
        if item is Ellipsis:
            dots += 1
        elif item is not None:
            used += 1
    if dots > 1:
        raise DefinitionError(
            f"%{x.name}[{brief(where)}]: two `...`",
            because="one stands for all dims that are not indexed",
            hint="write : for a dim that is taken whole",
        )
    if used > x.ndim:
        raise DefinitionError(
            f"%{x.name}[{brief(where)}]: {used} indices for {x.value.type_text()}",
            because=f"it has {counted(x.ndim, 'dim')}",
            hint="None adds a dim",
        )
    at = 0
    while at < len(items) and items[at] is not Ellipsis:
        at += 1
    items[at : at + 1] = [_WHOLE] * (x.ndim - used)
    return items


def _plain(x: Handle, item: Any) -> Any:
    """Return an item with Python numbers for numpy's; refuse numbers beyond 64 bits."""
    if isinstance(item, builtins.slice):
        bounds = [_plain(x, bound) for bound in (item.start, item.stop, item.step)]
        is_whole = builtins.all(bound is None for bound in bounds)
        return _WHOLE if is_whole else builtins.slice(*bounds)
    item = plain_number(item)
    if not is_in_range(item):
        raise _no_index(x, item)
    return item


def _is_whole(x: Handle, windows: list[Window]) -> bool:
    if not is_symbolic(windows) and not is_symbolic(x.shape):
        return windows == [(0, n, 1) for n in x.shape]
    return builtins.all(
        are_same(start, 0) and are_same(end, n) and are_same(step, 1)
        for (start, end, step), n in zip(windows, x.shape, strict=True)
    )


def window_of(x: Handle, item: Any, dim: int) -> Window:
    """Start, end and step along a dim."""
    extent = x.shape[dim]
    if item is _WHOLE:
        return 0, extent, 1
    if isinstance(item, builtins.slice):
        start, end, step = _indices(x, item, extent)
        return start, larger(start, end), step
    if not _is_integer(item):
        raise _no_index(x, item)
    check_in_range(x, item, dim)
    item = item if item >= 0 else item + extent
    return item, item + 1, 1


def check_in_range(x: Handle, item: Any, dim: int) -> None:
    """Raise DefinitionError if an index is out of range."""
    extent = x.shape[dim]
    if not -extent <= item < extent:
        of = f"%{x.name}: {x.value.type_text()}"
        raise DefinitionError(
            f"index {brief(item)} is out of range for dim {dim} of {of}",
            because=f"its indices go from {-extent} to {extent - 1}" if extent else "it has none",
            hint="slices, unlike indices, may reach beyond the end",
        )


def _is_integer(x: Any) -> bool:
    return isinstance(x, int | Extent) and not isinstance(x, bool)


def _no_index(x: Handle, item: Any) -> DefinitionError:
    return DefinitionError(
        f"%{x.name} cannot be indexed with {brief(item)}",
        because="an index is a value of integers, an integer, a slice of integers, None or `...`",
        hint="make a tensor of indices a value: fd.ops.tensor([2, 0]); to choose by a mask use "
        "fd.ops.where(mask, a, b)",
    )


def _indices(x: Handle, item: builtins.slice, extent: int) -> Window:
    """`slice.indices`, which takes numbers only."""
    for bound in (item.start, item.stop, item.step):
        if bound is not None and not _is_integer(bound):
            raise _no_index(x, item)
    if item.step is not None and item.step < 1:
        raise DefinitionError(
            f"%{x.name}[{item}]", because="steps are positive, as in torch", hint="x[::2]"
        )
    if not is_symbolic((extent, item.start, item.stop)):
        return item.indices(extent)

    def at(bound: Any, default: int) -> int:
        if bound is None:
            return default
        return larger(bound + extent, 0) if bound < 0 else smaller(bound, extent)

    return at(item.start, 0), at(item.stop, extent), 1 if item.step is None else item.step
