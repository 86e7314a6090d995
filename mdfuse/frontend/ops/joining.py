"""Tensors side by side: as rows and columns, on one grid, along a diagonal, each with each."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from functools import reduce
from typing import Any

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent, is_symbolic, repeated
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import parts, views
from mdfuse.frontend.ops.indexing import index
from mdfuse.frontend.ops.moves import pad
from mdfuse.frontend.ops.recording import Integers, listed, own_place, record, shown


def _each(name: str, tensors: Sequence[Any], one: Any) -> Any:
    """Return the result for a single tensor, or a tuple for several."""
    shaped = tuple(map(one, listed(name, tensors)))
    return shaped[0] if len(tensors) == 1 and isinstance(tensors[0], Handle) else shaped


def _at_least(ndim: int) -> Any:
    def widened(x: Handle) -> Handle:
        if x.ndim >= ndim:
            return record("set", x)
        if ndim == 3 and x.ndim:  # as in torch: the new dim of a matrix is the last one
            return views.reshape(x, (1, *x.shape, 1) if x.ndim == 1 else (*x.shape, 1))
        return views.reshape(x, (*(1,) * (ndim - x.ndim), *x.shape))

    return widened


def atleast_1d(*tensors: Handle | Sequence[Handle]) -> Any:
    """Numbers as vectors of one element; others as they are."""
    return _each("atleast_1d", tensors, _at_least(1))


def atleast_2d(*tensors: Handle | Sequence[Handle]) -> Any:
    """Numbers and vectors as matrices of one row; others as they are."""
    return _each("atleast_2d", tensors, _at_least(2))


def atleast_3d(*tensors: Handle | Sequence[Handle]) -> Any:
    """At least three dims: [n] as [1,n,1], [n,m] as [n,m,1]."""
    return _each("atleast_3d", tensors, _at_least(3))


def hstack(tensors: Sequence[Handle]) -> Handle:
    """Joined along dim 1, vectors along dim 0."""
    wide = [_at_least(1)(x) for x in _some("hstack", tensors)]
    return parts.cat(wide, 0 if wide[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Handle]) -> Handle:
    """Joined along dim 0; vectors are rows."""
    return parts.cat([_at_least(2)(x) for x in _some("vstack", tensors)], 0)


def dstack(tensors: Sequence[Handle]) -> Handle:
    """Joined along dim 2."""
    return parts.cat([_at_least(3)(x) for x in _some("dstack", tensors)], 2)


def column_stack(tensors: Sequence[Handle]) -> Handle:
    """Joined along dim 1; numbers and vectors are columns."""
    wide = [views.reshape(x, (-1, 1)) if x.ndim < 2 else x for x in _some("column_stack", tensors)]
    return parts.cat(wide, 1)


def _some(name: str, tensors: Sequence[Handle]) -> Sequence[Handle]:
    if not tensors:
        raise DefinitionError(f"{name} of no tensors", hint="pass at least one")
    return tensors


def tensor_split(x: Handle, indices_or_sections: Integers, dim: int = 0) -> tuple[Handle, ...]:
    """Parts of a dim: so many of nearly one size, or those between the places in a list."""
    at = own_place(x, dim)
    n, said = x.shape[at], indices_or_sections
    if isinstance(said, int | Extent):
        if said < 1:
            raise DefinitionError(
                f"{said} parts of {shown(x)}", because="there is at least one", hint="1 or more"
            )
        if not is_symbolic((n, said)):
            size, longer = divmod(n, said)
            return parts.split(x, [size + (i < longer) for i in range(said)], at)
        sizes = [(n + said - 1 - i) // said for i in range(said)]  # the first ones are the longer
        said = [builtins.sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    window = [builtins.slice(None)] * at
    ends = [*said, None]
    starts = [None, *said]
    return tuple(
        index(x, (*window, builtins.slice(a, b))) for a, b in zip(starts, ends, strict=True)
    )


def meshgrid(*tensors: Handle | Sequence[Handle], indexing: str = "ij") -> tuple[Handle, ...]:
    """Vectors repeated over one grid, each along a dim of its own.

    Args:
        tensors: vectors or numbers, or one list of them.
        indexing: "ij", or "xy" with the first two dims swapped.
    """
    given = listed("meshgrid", tensors)
    if indexing not in ("ij", "xy") or any(x.ndim > 1 for x in given):
        raise DefinitionError(
            f"meshgrid of {', '.join(map(shown, given))} with indexing={indexing!r}",
            because="each is a vector or a number",
            hint='indexing="ij" or "xy"',
        )
    flat = [_at_least(1)(x) for x in given]
    shape = tuple(x.shape[0] for x in flat)
    grids = tuple(
        views.expand(views.reshape(x, (-1, *(1,) * (len(flat) - 1 - d))), shape)
        for d, x in enumerate(flat)
    )
    is_swapped = indexing == "xy" and len(grids) > 1
    return tuple(views.transpose(x, 0, 1) for x in grids) if is_swapped else grids


def broadcast_tensors(*tensors: Handle | Sequence[Handle]) -> tuple[Handle, ...]:
    """Tensors repeated to the shape that they have together."""
    given = listed("broadcast_tensors", tensors)
    ndim = builtins.max((x.ndim for x in given), default=0)
    shape = []
    for d in range(-ndim, 0):
        shape.append(reduce(repeated, (x.shape[d] for x in given if x.ndim >= -d)))
    return tuple(views.expand(x, tuple(shape)) for x in given)


def block_diag(*tensors: Handle) -> Handle:
    """Matrices along the diagonal of one of zeros; vectors are rows."""
    given = [_at_least(2)(x) for x in _some("block_diag", tensors)]
    if any(x.ndim > 2 for x in given):
        raise DefinitionError(
            f"block_diag of {', '.join(map(shown, tensors))}",
            because="they have two dims at most",
            hint="matrices, vectors and numbers",
        )
    width, before, rows = sum(x.shape[1] for x in given), 0, []
    for x in given:
        rows.append(pad(x, (before, width - before - x.shape[1])))
        before = before + x.shape[1]
    return parts.cat(rows, 0)


def kron(x: Handle, other: Handle) -> Handle:
    """Each element of x times the whole of the other, in its place (Kronecker product)."""
    ndim = builtins.max(x.ndim, other.ndim)
    a, b = ((*(1,) * (ndim - y.ndim), *y.shape) for y in (x, other))
    left = views.reshape(x, [n for extent in a for n in (extent, 1)])
    right = views.reshape(other, [n for extent in b for n in (1, extent)])
    return views.reshape(left * right, [n * m for n, m in zip(a, b, strict=True)])
