"""Ids: the numbers of values and of inputs' extents, by which segments name them.

Values have the ids 0, 1, 2, … in the order of the definition; the extents of its inputs' dims have
-1, -2, … in order of the inputs and their dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count

from mdfuse.extents.expressions import Poly
from mdfuse.extents.extent import are_same, is_symbolic, poly_from
from mdfuse.ir import attention_dims, dims
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.ops import TABLE
from mdfuse.passes.strategy import dim_map

#: A value's name, and one of its dims.
Dim = tuple[str, int]

#: Rules that say nothing of dims which must be whole, though these are those of the first operand.
_WHOLE_DIMS_STAY: tuple[dims.Rule, ...] = (
    dims.rowwise, dims.ranked, dims.layer_norm, attention_dims.attention,
)  # fmt: skip


def with_ids(fusion: Fusion) -> Fusion:
    """Return the fusion with an id for each value: those without one get the next ones."""
    ids = dict(fusion.ids)
    following = count(max(ids.values(), default=-1) + 1)
    for name in (*fusion.inputs, *fusion.producers):
        if name not in ids:
            ids[name] = next(following)
    return replace(fusion, ids=ids)


def input_extents(fusion: Fusion) -> dict[Dim, int]:
    """Return (input, dim) -> the id of its extent, for a fusion's inputs.

    >>> import mdfuse as mf
    >>> with mf.FusionDefinition() as fd:
    ...     x, w = fd.define_tensor([8, 4]), fd.define_tensor([4])
    >>> list(input_extents(fd.fusion).values())
    [-1, -2, -3]
    """
    shapes = ((name, fusion.values[name].shape) for name in fusion.inputs)
    named = ((name, dim) for name, shape in shapes for dim in range(len(shape)))
    return {dim: -1 - i for i, dim in enumerate(named)}


def extent_ids(fusion: Fusion) -> dict[Dim, int]:
    """Return (value, dim) -> the id of the input's extent that the dim's length comes from.

    That is read off the labels of the ops' dims: equal extents alone do not show it. Symbolic
    extents are known by their expression as well.
    """
    id_of = input_extents(fusion)
    by_symbol: dict[Poly, int] = {}
    for (name, dim), i in id_of.items():
        extent = fusion.values[name].shape[dim]
        if is_symbolic(extent):
            by_symbol.setdefault(poly_from(extent), i)
    for expr in fusion.exprs:
        if not fusion.values[expr.outputs[0]].is_tensor:
            continue
        labels = dim_map(expr, fusion.values)
        for at, name in enumerate(expr.outputs):
            for dim, n in enumerate(fusion.values[name].shape):
                sources = _sources(expr, fusion.values, labels, at, dim)
                ids = [id_of[d] for d in sources if d in id_of]
                if is_symbolic(n):
                    ids += filter(None, [by_symbol.get(poly_from(n))])
                if ids:
                    id_of[name, dim] = ids[0]
    return id_of


def _sources(
    expr: Expr, values: Mapping[str, Value], labels: dims.DimMap, at: int, dim: int
) -> Iterator[Dim]:
    """Yield the operands' dims that have the label and the extent of a result's dim."""
    shape = values[expr.outputs[at]].shape
    label = labels.results[at][dim]
    for x, operand_labels in zip(expr.inputs, labels.operands, strict=True):
        if not isinstance(x, str):
            continue
        for d, other in enumerate(operand_labels):
            is_one = other == label if label is not None else _stays(expr, values[x], d, dim, shape)
            if is_one and are_same(values[x].shape[d], shape[dim]):
                yield x, d


def _stays(expr: Expr, operand: Value, d: int, dim: int, shape: tuple[int, ...]) -> bool:
    """True if a dim without a label is the first operand's in the same place from the right."""
    is_first = expr.inputs[0] == operand.name and TABLE[expr.op].rule in _WHOLE_DIMS_STAY
    return is_first and len(operand.shape) - d == len(shape) - dim
