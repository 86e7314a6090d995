"""Bags of embedding rows as aten passes them: a vector of indices, and offsets of bags."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.constants import as_value

ops: Any = operations

_MODES = ("sum", "mean", "max")


def embedding_bag(
    weight: Handle,
    indices: Handle,
    offsets: Handle | Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    factors: Handle | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Reduce rows weight[v,d] at indices[n] to one per bag; sparse only concerns torch's dw.

    Args:
        weight: the table.
        indices: of rows.
        offsets: the first index of each bag; if they are known and all bags have one size, the bags
            become rows of a matrix.
        mode: 0 sum, 1 mean, 2 max; `factors` of each row go with a sum.
    """
    if padding_idx is not None or scale_grad_by_freq:
        raise DefinitionError(
            "embedding_bag with padding_idx or scale_grad_by_freq",
            because="rows count alike, in the bag and in the gradient",
            hint="per_sample_weights of 0 leave rows out of a sum",
        )
    size = _size(offsets, indices.shape[0], include_last_offset)
    if size is not None:
        matrix = ops.reshape(indices, (-1, size))
        factors = None if factors is None else ops.reshape(factors, (-1, size))
        joined = ops.embedding_bag(matrix, weight, mode=_MODES[mode], per_sample_weights=factors)
        return joined, None, None, None
    if mode == _MODES.index("max"):
        raise DefinitionError(
            "embedding_bag with mode='max' of bags of several sizes",
            because="bags of several sizes are added up",
            hint="indices of two dims without offsets, or mode='sum'",
        )
    starts = as_value(offsets) if isinstance(offsets, Tensor) else offsets
    bags = starts.shape[0] - include_last_offset
    starts = ops.narrow(starts, 0, 0, bags)
    places = ops.arange(indices.shape[0], dtype=torch.int64)
    bag = ops.searchsorted(starts, places, right=True) - 1
    rows = ops.embedding(indices, weight)
    rows = rows if factors is None else rows * ops.unsqueeze(factors, -1)
    nothing = ops.zeros((bags, weight.shape[1]), dtype=rows.dtype)
    joined = ops.index_add(nothing, 0, bag, rows)
    if _MODES[mode] == "mean":
        ones = ops.ones((indices.shape[0],), dtype=rows.dtype)
        counts = ops.index_add(ops.zeros((bags,), dtype=rows.dtype), 0, bag, ones)
        joined = joined / ops.unsqueeze(ops.clamp_min(counts, 1), -1)
    return joined, None, None, None


def wanted(weight: Any, indices: Any, offsets: Any, *given: Any, **named: Any) -> list[Any]:
    """Return the operands that must be values: the offsets, unless all bags have one size."""
    factors = given[3] if len(given) > 3 else named.get("per_sample_weights")
    with_last = given[4] if len(given) > 4 else named.get("include_last_offset", False)
    n = None if indices.shape is None else indices.shape[0]
    known = n is not None and _size(offsets, n, with_last) is not None
    return [weight, indices, factors, *([] if known else [offsets])]


def _size(offsets: Any, n: int, include_last_offset: bool) -> int | None:
    """Return the number of rows of each bag, if it is known and equal for all."""
    if not isinstance(offsets, Tensor):
        return None
    starts = offsets[:-1] if include_last_offset else offsets
    ends = torch.cat([starts, torch.tensor([n])])
    sizes = ends.diff().tolist()
    return sizes[0] if len({*sizes}) == 1 and starts[0] == 0 and sizes[0] else None
