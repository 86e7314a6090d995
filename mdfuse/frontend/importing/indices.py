"""`x[i, j]` with known tensors of indices: views where they only spread dims, else rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import are_same, is_symbolic
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.constants import as_value
from mdfuse.frontend.ops.lookup_parts import at_indices

ops: Any = operations

#: The end of a slice to the end of a dim.
END = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Ramp:
    """Indices 0, 1, … below an extent that a run chooses, along one dim of their shape."""

    extent: Any
    place: int
    ndim: int


def ramp_of(node: Any, read: Callable[[Any], Any]) -> Ramp | None:
    """Return the `Ramp` of a node that counts along one dim, or None.

    Args:
        node: of a graph.
        read: gives the value of a node: an extent.
    """
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    target, args = str(node.target), node.args
    if target == "aten.arange.default":
        return Ramp(read(args[0]) if isinstance(args[0], Node) else args[0], 0, 1)
    inner = ramp_of(args[0], read) if args else None
    if inner is None:
        return None
    if target == "aten.unsqueeze.default":
        at = int(args[1]) % (inner.ndim + 1)  # type: ignore[arg-type]
        return Ramp(inner.extent, inner.place + (at <= inner.place), inner.ndim + 1)
    is_same = target == "aten.add.Tensor" and args[1] == 0 and not node.kwargs
    is_whole = target == "aten.slice.Tensor" and args[2:] == (0, END)
    return inner if is_same or is_whole else None


def take(x: Any, where: Sequence[Any]) -> Any:
    """Index a value with tensors; None takes a dim whole, as in `aten.index`.

    Raises:
        DefinitionError: a mask, or an index that is out of range.
    """
    x = as_value(x) if isinstance(x, Tensor) else x
    where = _without_masks(where)
    at = [d for d, i in enumerate(where) if i is not None]
    _check(x, [where[d] for d in at])
    if at != [*range(at[0], at[-1] + 1)]:  # torch puts indexed dims that are apart in front
        others = [d for d in range(x.ndim) if d not in at]
        x, where = ops.permute(x, (*at, *others)), [where[d] for d in at]
        at = [*range(len(at))]
    known = [_counted(x, where[d], d) for d in at]
    spread = _spread(x, at, known)
    if spread is not None:
        return spread
    if len(known) == 1 and isinstance(known[0], Handle):
        return _looked_up(x, at[0], known[0])
    if _is_one_of_each(x, at, known):
        return _one_of_each(x, at[0], known[1])
    if any(isinstance(i, Ramp) for i in known):
        raise DefinitionError(
            f"%{x.name} indexed by as many numbers as a run has",
            because="beside other indices they are known only where they take a whole dim",
            hint="torch.gather, or one dim at a time",
        )
    if any(isinstance(i, Handle) for i in known):
        given = [i if isinstance(i, Handle) else as_value(i) for i in known]
        return at_indices(x, at[0], given)
    return _rows(x, at, known)


def put(x: Any, where: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Write or add values at tensor indices; None takes a dim whole."""
    where = _without_masks(where)
    x, values = (as_value(y) if isinstance(y, Tensor) else y for y in (x, values))
    given = [as_value(i) if isinstance(i, Tensor) else i for i in where]
    return ops.index_put(x, given, values, accumulate=accumulate)


def _without_masks(where: Sequence[Any]) -> list[Any]:
    """Return indices with known masks replaced by the positions where they hold."""
    indices: list[Any] = []
    for i in where:
        is_mask = isinstance(i, Tensor) and i.dtype == torch.bool
        indices += i.nonzero(as_tuple=True) if is_mask else [i]
    return indices


def _counted(x: Handle, i: Any, dim: int) -> Any:
    """Indices counted from the first."""
    n = x.shape[dim]
    if not isinstance(i, Tensor) or is_symbolic((n,)) or not i.numel():
        return i
    least, most = int(i.min()), int(i.max())
    if least < -n or most >= n:
        raise DefinitionError(
            f"%{x.name} indexed by {most if most >= n else least} along dim {dim}",
            because=f"its indices go from {-n} to {n - 1}",
            hint="indices that are there",
        )
    return i.long() + (i < 0) * n


def _check(x: Handle, known: Sequence[Any]) -> None:
    """Raise DefinitionError for masks."""
    for i in known:
        if not isinstance(i, Ramp) and i.dtype == torch.bool:
            raise DefinitionError(
                f"%{x.name} indexed by a mask of shape {list(i.shape)}",
                because="how many elements it takes is no shape",
                hint="where(mask, x, 0), or positions as integers",
            )


def _is_one_of_each(x: Handle, at: Sequence[int], known: Sequence[Any]) -> bool:
    """Return whether `x[arange(n), i]` is wanted: the element of each row at an index."""
    if len(at) != 2 or not isinstance(known[1], Handle) or known[1].ndim != 1:
        return False
    rows, n = known[0], x.shape[at[0]]
    if isinstance(rows, Ramp):
        return rows.ndim == 1 and are_same(rows.extent, n)
    is_known = isinstance(rows, Tensor) and not is_symbolic((n,))
    return is_known and torch.equal(rows, torch.arange(n))


def _one_of_each(x: Handle, dim: int, index: Handle) -> Any:
    """Return the element of each row at its index along the next dim; the dim may be split."""
    index = _from_the_first(index, x.shape[dim + 1])
    shape = (*(1,) * dim, index.shape[0], *(1,) * (x.ndim - dim - 1))
    elements = ops.take_along_dim(x, ops.reshape(index, shape), dim + 1)
    return ops.squeeze(elements, dim + 1)


def _spread(x: Handle, at: Sequence[int], known: Sequence[Any]) -> Any:
    """Return a view of x where each index runs over its whole dim along a dim of its own."""
    if any(isinstance(i, Handle) for i in known):
        return None
    ndim = max(i.ndim for i in known)
    places = []
    for i, d in zip(known, at, strict=True):
        if isinstance(i, Ramp):
            if not are_same(i.extent, x.shape[d]):
                return None
            places.append(i.place + ndim - i.ndim)
            continue
        i = i.reshape((1,) * (ndim - i.ndim) + tuple(i.shape))
        long = [k for k, n in enumerate(i.shape) if n != 1]
        if is_symbolic((x.shape[d],)) or len(long) > 1:
            return None
        if not torch.equal(i.flatten(), torch.arange(x.shape[d])):
            return None
        places.append(long[0] if long else next(k for k in range(ndim) if k not in places))
    if len({*places}) < len(places) or sorted(places) != places:
        return None
    first, behind = at[0], x.ndim - 1 - at[-1]
    new = [first + k for k in range(ndim) if k not in places]
    for d in new:
        x = ops.unsqueeze(x, d)
    assert x.ndim == first + ndim + behind
    return x


def _rows(x: Handle, at: Sequence[int], known: Sequence[Tensor]) -> Any:
    """Look up rows: merge the indexed dims, and put the index's dims in their place."""
    first, *others = torch.broadcast_tensors(*(i.to(torch.int64) for i in known))
    linear: Any = first
    for i, d in zip(others, at[1:], strict=True):
        n: Any = x.shape[d]
        if type(n) is not int and isinstance(linear, Tensor):  # a run chooses it
            linear = as_value(linear)
        linear = linear * n + (i if isinstance(linear, Tensor) else as_value(i))
    return _of_table(x, at, as_value(linear) if isinstance(linear, Tensor) else linear)


def _looked_up(x: Handle, dim: int, index: Handle) -> Any:
    """Look up rows at indices that a run computes; negative ones count from the end."""
    return _of_table(x, [dim], _from_the_first(index, x.shape[dim]))


def _from_the_first(index: Handle, n: Any) -> Any:
    return ops.where(index < 0, index + n, index) if n and index.dtype.is_signed else index


def _of_table(x: Handle, at: Sequence[int], rows: Handle) -> Any:
    """Look up rows along the merged indexed dims; the rows take their place."""
    first, behind = at[0], x.shape[at[-1] + 1 :]
    if len(at) > 1:
        x = ops.reshape(x, (*x.shape[:first], math.prod(x.shape[d] for d in at), *behind))
    row = rows if rows.ndim == 1 else ops.reshape(rows, (-1,))
    looked_up = ops.index_select(x, first, row)
    if rows.ndim == 1:
        return looked_up
    return ops.reshape(looked_up, (*x.shape[:first], *rows.shape, *behind))
