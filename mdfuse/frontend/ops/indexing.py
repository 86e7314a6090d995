"""Parts of tensors, and tensors made of parts: indexing, splitting, joining."""

from __future__ import annotations

import builtins
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent, are_same, is_symbolic, larger, smaller
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import Operation, own_place, place, record
from mdfuse.frontend.plain import brief, is_in_range, plain_number

Window = tuple[int, int, int]

_WHOLE = builtins.slice(None)

# -- indexing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What an index does.

    Attributes:
        window: starts, ends and steps; None where all of the value is taken.
        gone: dims that an integer chose one place of.
        new: places of new dims in the result.
    """

    window: tuple[tuple[int, ...], ...] | None
    gone: tuple[int, ...]
    new: tuple[int, ...]


#: Plans of indices that were met before, by shape and index.
_PLANS: dict[Hashable, Plan] = {}
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


def _key(shape: tuple[int, ...], where: Any) -> Hashable | None:
    """A shape and an index of numbers; None where there is something else in them."""
    items: list[Any] = []
    for item in where if type(where) is tuple else (where,):
        if type(item) is builtins.slice:
            items += (item.start, item.stop, item.step)
        items.append(None if type(item) is builtins.slice else item)
        items.append(type(item))
    return (shape, *items) if _PLAIN.issuperset(map(type, (*shape, *items))) else None


_PLAIN = frozenset((int, type, type(None), type(...)))


def _plan(x: Handle, where: Any) -> Plan:
    windows: list[Window] = []
    gone: list[int] = []
    new: list[int] = []
    for item in _items(x, where):
        dim = len(windows)
        if item is None:
            new.append(dim - len(gone) + len(new))
            continue
        windows.append(_window(x, item, dim))
        if not isinstance(item, builtins.slice):
            gone.append(dim)
    starts, ends, steps = zip(*windows, strict=True) if windows else ((), (), ())
    window = None if _is_whole(x, windows) else (starts, ends, steps)
    return Plan(window, tuple(gone), tuple(new))


def _items(x: Handle, where: Any) -> list[Any]:
    """One item per dim, besides the Nones: `...` is written out."""
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
            because=f"it has {x.ndim} dims",
            hint="None adds a dim",
        )
    at = 0
    while at < len(items) and items[at] is not Ellipsis:
        at += 1
    items[at : at + 1] = [_WHOLE] * (x.ndim - used)
    return items


def _plain(x: Handle, item: Any) -> Any:
    """An item with numbers of numpy as Python's, and none that 64 bits cannot hold."""
    if isinstance(item, builtins.slice):
        bounds = [_plain(x, bound) for bound in (item.start, item.stop, item.step)]
        is_whole = builtins.all(bound is None for bound in bounds)
        return _WHOLE if is_whole else builtins.slice(*bounds)
    item = plain_number(item)
    if not is_in_range(item):
        raise _no_index(x, item)
    return item


def _is_whole(x: Handle, windows: list[Window]) -> bool:
    if not is_symbolic(windows):
        return windows == [(0, n, 1) for n in x.shape]
    return builtins.all(
        are_same(start, 0) and are_same(end, n) and are_same(step, 1)
        for (start, end, step), n in zip(windows, x.shape, strict=True)
    )


def _window(x: Handle, item: Any, dim: int) -> Window:
    """Start, end and step along a dim."""
    extent = x.shape[dim]
    if item is _WHOLE:
        return 0, extent, 1
    if isinstance(item, builtins.slice):
        start, end, step = _indices(x, item, extent)
        return start, larger(start, end), step
    if not _is_integer(item):
        raise _no_index(x, item)
    if not -extent <= item < extent:
        raise DefinitionError(
            f"index {item} is out of range for dim {dim} of %{x.name}: {x.value.type_text()}",
            because=f"its indices go from {-extent} to {extent - 1}",
            hint="slices, unlike indices, may reach beyond the end",
        )
    item = item if item >= 0 else item + extent
    return item, item + 1, 1


def _is_integer(x: Any) -> bool:
    return isinstance(x, int | Extent) and not isinstance(x, bool)


def _no_index(x: Handle, item: Any) -> DefinitionError:
    return DefinitionError(
        f"%{x.name} cannot be indexed with {brief(item)}",
        because="an index is an integer, a slice of integers, None or `...`",
        hint="to gather rows by a tensor use fd.ops.embedding(indices, table), "
        "to choose by a mask fd.ops.where(mask, a, b)",
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


def slice(
    x: Handle,
    start_indices: Sequence[int],
    end_indices: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Handle:
    """The window from start to end (exclusive) with steps, one entry per dim."""
    steps = tuple(strides) if strides is not None else (1,) * x.ndim
    if not len(start_indices) == len(end_indices) == len(steps) == x.ndim:
        raise DefinitionError(
            f"slice(%{x.name}, {list(start_indices)}, {list(end_indices)}, {list(steps)})",
            because=f"%{x.name} has {x.ndim} dims, each with one start, end and step",
            hint="or index it: x[2:5, ...]",
        )
    return index(x, tuple(map(builtins.slice, start_indices, end_indices, steps)))


def select(x: Handle, dim: int, index: int) -> Handle:
    """`x[..., index, ...]`: one place of a dim, which goes."""
    return _along(x, dim, index)


def narrow(x: Handle, dim: int, start: int, length: int) -> Handle:
    """`length` places of a dim from `start` on."""
    extent = x.shape[own_place(x, dim)]
    if start < 0:
        start = start + extent
    if start < 0 or length < 0 or start + length > extent:
        raise DefinitionError(
            f"narrow(%{x.name}, {dim}, {start}, {length}) of {x.value.type_text()}",
            because=f"dim {dim} goes from 0 to {extent}",
            hint="a slice, x[start:end], may reach beyond the end",
        )
    return _along(x, dim, builtins.slice(start, start + length))


def _along(x: Handle, dim: int, item: Any) -> Handle:
    return index(x, (*[builtins.slice(None)] * place(x, dim), item))


# -- splitting -----------------------------------------------------------------------------------


def split(x: Handle, split_size: int | Sequence[int], dim: int = 0) -> tuple[Handle, ...]:
    """Parts of a dim: of one size each (the last may be smaller), or of the sizes in a list."""
    extent = x.shape[own_place(x, dim)]
    if isinstance(split_size, Sequence):
        lengths = tuple(split_size)
    else:
        lengths = _equal_parts(x, split_size, extent)
    ends = [builtins.sum(lengths[: i + 1]) for i in range(len(lengths))]
    if not lengths or builtins.min(lengths) < 0 or ends[-1] != extent:
        raise DefinitionError(
            f"split(%{x.name}, {split_size}, dim={dim}) of {x.value.type_text()}",
            because=f"the parts make up dim {dim}, which is {extent} long",
            hint="one size for all parts, or sizes whose sum is the extent",
        )
    spans = zip([0, *ends[:-1]], ends, strict=True)
    return tuple(_along(x, dim, builtins.slice(start, end)) for start, end in spans)


def _equal_parts(x: Handle, size: int, extent: int) -> tuple[int, ...]:
    if size < 1:
        raise DefinitionError(
            f"parts of %{x.name} of size {size}",
            because="a part has at least one element",
            hint="a positive size, or a list of sizes",
        )
    whole, rest = divmod(extent, size)
    _check_parts(x, whole)
    parts = (size,) * whole  # a symbolic number of parts is fixed from here on
    return (*parts, rest) if rest or not parts else parts


def chunk(x: Handle, chunks: int, dim: int = 0) -> tuple[Handle, ...]:
    """At most `chunks` parts of a dim, all but the last of one size."""
    extent = x.shape[own_place(x, dim)]
    if chunks < 1:
        raise DefinitionError(
            f"{chunks} chunks of %{x.name}",
            because="there is at least one",
            hint="a positive number",
        )
    if chunks <= extent and extent % chunks == 0:
        _check_parts(x, chunks)
        return split(x, (extent // chunks,) * chunks, dim)
    return split(x, -(-extent // chunks), dim)


def unbind(x: Handle, dim: int = 0) -> tuple[Handle, ...]:
    """Each place of a dim."""
    extent = x.shape[own_place(x, dim)]
    _check_parts(x, extent)
    return tuple(select(x, dim, i) for i in range(extent))


def _check_parts(x: Handle, count: int) -> None:
    """Each part is an expression of the program."""
    if count > _MOST_PARTS:
        raise DefinitionError(
            f"{count} parts of %{x.name}: {x.value.type_text()}",
            because=f"each is an expression of the program, {_MOST_PARTS} at most",
            hint="larger parts",
        )


_MOST_PARTS = 1 << 14


# -- joining -------------------------------------------------------------------------------------


def cat(tensors: Sequence[Handle], dim: int = 0) -> Handle:
    """Tensors joined along a dim."""
    tensors = tuple(tensors)
    if not tensors:
        raise DefinitionError("cat of no tensors", hint="pass at least one")
    return record("cat", *tensors, dim=dim)


def stack(tensors: Sequence[Handle], dim: int = 0) -> Handle:
    """Tensors of one shape joined along a new dim."""
    tensors = tuple(tensors)
    if not tensors:
        raise DefinitionError("stack of no tensors", hint="pass at least one")
    shapes = {x.shape for x in tensors if not is_symbolic(x.shape)}
    if len(shapes) > 1:
        raise DefinitionError(
            "stack of " + ", ".join(f"%{x.name}: {x.value.type_text()}" for x in tensors),
            because="their shapes differ",
            hint="cat joins along a dim that they have",
        )
    at = place(tensors[0], dim, new=1)
    return cat([record("unsqueeze", x, dims=(at,)) for x in tensors], at)


SPELLED: tuple[Operation, ...] = (
    slice, select, narrow, split, chunk, unbind, cat, stack,
)  # fmt: skip
