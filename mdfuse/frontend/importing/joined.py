"""Keep the blocks of a parameter apart, as queries, keys and values in one matrix.

A `JoinedTensors` is a deferred concatenation: a linear map gives one result per block, and a split
returns the blocks, so that each block may be split over ranks. Operations without a rule here
concatenate the blocks, which gathers them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing import indices
from mdfuse.frontend.importing.view_chains import Views

ops: Any = operations


#: Grouped matrix products: of torch, and of transformers.
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


@dataclass(frozen=True, slots=True)
class JoinedTensors:
    """Consecutive tensors along a dim.

    Attributes:
        parts: the tensors.
        dim: of the concatenation, counted from the first.
    """

    parts: tuple[Handle, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        whole = list(self.parts[0].shape)
        whole[self.dim] = sum(self.sizes)
        return tuple(whole)

    @property
    def sizes(self) -> list[int]:
        """The extent of each part along the dim."""
        return [x.shape[self.dim] for x in self.parts]

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.parts[0].ndim

    @property
    def dtype(self) -> torch.dtype:
        """The element type."""
        return self.parts[0].dtype

    def whole(self) -> Any:
        """The concatenation."""
        return ops.cat(list(self.parts), self.dim)

    def mapped(self, call: Callable[[Handle], Handle], dim: int | None = None) -> JoinedTensors:
        """Apply a function to each part; return them joined along this dim or another one."""
        return JoinedTensors(tuple(map(call, self.parts)), self.dim if dim is None else dim)


def in_one(x: Any) -> Any:
    """Return the concatenation of joined tensors; other values unchanged."""
    return x.whole() if isinstance(x, JoinedTensors) else x


def _linear(views: Views, x: Any, weight: Any, bias: Any = None) -> Any:
    is_one = isinstance(bias, Handle) or isinstance(x, JoinedTensors)
    if is_one or not isinstance(weight, JoinedTensors) or weight.dim != 0:
        return None
    biases = bias.parts if bias is not None else (None,) * len(weight.parts)
    pairs = zip(weight.parts, biases, strict=True)
    return JoinedTensors(tuple(ops.linear(x, w, b) for w, b in pairs), x.ndim - 1)


def _addmm(
    views: Views, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1
) -> Any:
    are_joined = isinstance(weight, JoinedTensors) and isinstance(bias, JoinedTensors)
    if not are_joined or weight.dim != 1 or isinstance(x, JoinedTensors) or (beta, alpha) != (1, 1):
        return None
    pairs = zip(bias.parts, weight.parts, strict=True)
    return JoinedTensors(tuple(ops.add(b, ops.matmul(x, w)) for b, w in pairs), x.ndim - 1)


def _matmul(views: Views, x: Any, weight: Any) -> Any:
    if (
        isinstance(x, JoinedTensors)
        or not isinstance(weight, JoinedTensors)
        or weight.dim != weight.ndim - 1
    ):
        return None
    return weight.mapped(lambda w: ops.matmul(x, w), max(x.ndim, weight.ndim) - 1)


def _add(views: Views, x: Any, y: Any) -> Any:
    are_alike = isinstance(x, JoinedTensors) and isinstance(y, JoinedTensors) and x.dim == y.dim
    if not are_alike or x.shape != y.shape or x.sizes != y.sizes:
        return None
    return JoinedTensors(tuple(map(ops.add, x.parts, y.parts)), x.dim)


def _bmm(views: Views, x: Any, y: Any) -> Any:
    if isinstance(x, JoinedTensors) and not isinstance(y, JoinedTensors) and x.dim == 1:
        return x.mapped(lambda part: ops.bmm(part, y))
    return _matmul(views, x, y)


def _grouped_mm(views: Views, x: Any, weight: Any, offs: Any = None, *_: Any) -> Any:
    is_by_columns = isinstance(weight, JoinedTensors) and weight.dim == 2
    if isinstance(x, JoinedTensors) or not is_by_columns or offs is None:
        return None
    return weight.mapped(lambda w: ops.grouped_mm(x, w, offs), 1)


def _index(views: Views, x: JoinedTensors, where: Sequence[Any]) -> Any:
    """Rows of a dim before the joined one."""
    at = [d for d, i in enumerate(where) if i is not None]
    if not isinstance(x, JoinedTensors) or len(at) != 1 or at[0] >= x.dim:
        return None
    return x.mapped(lambda part: indices.take(part, where), x.dim - 1 + where[at[0]].ndim)


def _reshape(views: Views, x: JoinedTensors, shape: Sequence[int]) -> Any:
    """Reshape the dims before the joined last one, or unflatten the last one into blocks."""
    last, extent = x.ndim - 1, sum(x.sizes)
    if x.dim != last:
        return None
    if shape[-1] == extent or (shape[-1] == -1 and _product(shape) == _product(x.shape[:-1])):
        front = [*shape[:-1]]
        return x.mapped(lambda p: views.reshape(p, (*front, p.shape[last])), len(front))
    return (
        _unflatten(views, x, last, shape[last:]) if [*shape[:last]] == [*x.shape[:last]] else None
    )


def _product(shape: Sequence[int]) -> int:
    n = 1
    for extent in shape:
        n *= extent if extent != -1 else 1
    return n


def _unflatten(views: Views, x: JoinedTensors, dim: int, sizes: Sequence[int]) -> Any:
    at = dim % x.ndim
    inside = {*x.sizes}
    if at != x.dim or len(sizes) != 2 or len(inside) != 1:
        return None
    (size,) = inside
    if sizes[0] not in (-1, len(x.parts)) or sizes[1] not in (-1, size):
        return None
    return x.mapped(lambda p: ops.unsqueeze(p, at))


def _split(views: Views, x: JoinedTensors, size: int | Sequence[int], dim: int = 0) -> Any:
    """Pieces that are blocks, or several of them: queries, and keys with values."""
    if dim % x.ndim != x.dim:
        return None
    extent = sum(x.sizes)
    if isinstance(size, int):
        wanted = [min(size, extent - first) for first in range(0, extent, size)]
    else:
        wanted = [*size]
    ends = [0]
    for n in wanted:
        ends.append(ends[-1] + n)
    pieces = [_whole_blocks(x, first, last) for first, last in pairwise(ends)]
    is_by_blocks = ends[-1] == extent and all(piece is not None for piece in pieces)
    return pieces if is_by_blocks else None


def _chunk(views: Views, x: JoinedTensors, chunks: int, dim: int = 0) -> Any:
    return _split(views, x, -(-sum(x.sizes) // chunks), dim)


def _whole_blocks(x: JoinedTensors, first: int, last: int) -> Handle | JoinedTensors | None:
    """Return the blocks between two elements; None if they cut a block."""
    ends = [0]
    for size in x.sizes:
        ends.append(ends[-1] + size)
    if first not in ends or last not in ends or first >= last:
        return None
    blocks = x.parts[ends.index(first) : ends.index(last)]
    return blocks[0] if len(blocks) == 1 else JoinedTensors(blocks, x.dim)


def _slice(
    views: Views, x: JoinedTensors, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """Return the blocks that a slice takes whole."""
    extent = sum(x.sizes)
    if dim % x.ndim != x.dim or step != 1:
        return None
    first, last, _ = slice(start, end).indices(extent)
    return _whole_blocks(x, first, last)


def _select(views: Views, x: JoinedTensors, dim: int, index: int) -> Any:
    is_each = dim % x.ndim == x.dim and {*x.sizes} == {1}
    return ops.squeeze(x.parts[index], x.dim) if is_each else None


def _unsqueeze(views: Views, x: JoinedTensors, dim: int) -> Any:
    at = dim % (x.ndim + 1)
    return x.mapped(lambda p: ops.unsqueeze(p, at), x.dim + (at <= x.dim))


def _squeeze(views: Views, x: JoinedTensors, dim: int) -> Any:
    at = dim % x.ndim
    if at == x.dim or x.shape[at] != 1:
        return None
    return x.mapped(lambda p: ops.squeeze(p, at), x.dim - (at < x.dim))


def _permute(views: Views, x: JoinedTensors, dims: Sequence[int]) -> Any:
    order = [d % x.ndim for d in dims]
    return x.mapped(lambda p: views.permute(p, order), order.index(x.dim))


def _transpose(views: Views, x: JoinedTensors, dim0: int, dim1: int) -> Any:
    order = [*range(x.ndim)]
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(views, x, order)


def _piece(views: Views, pieces: Any, place: int) -> Any:
    return pieces[place] if isinstance(pieces, tuple | list) else None


def _itself(views: Views, x: JoinedTensors, *_: Any, **__: Any) -> Any:
    return x


#: overload -> its rule for `JoinedTensors` arguments, which returns None to concatenate them.
RULES: dict[str, Callable[..., Any]] = {
    str(operator.getitem): _piece,
    "aten.linear.default": _linear,
    "aten.add.Tensor": _add,
    "aten.addmm.default": _addmm,
    "aten.matmul.default": _matmul,
    "aten.mm.default": _matmul,
    "aten.bmm.default": _bmm,
    **dict.fromkeys(GROUPED, _grouped_mm),
    "aten.index.Tensor": _index,
    **dict.fromkeys(("aten.view.default", "aten.reshape.default"), _reshape),
    "aten.unflatten.int": _unflatten,
    "aten.split.Tensor": _split,
    "aten.split.sizes": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _chunk,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.dim": _squeeze,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    **dict.fromkeys(
        ("aten.alias.default", "aten.contiguous.default", "aten.clone.default"), _itself
    ),
}
