"""A rank's parts of the operands and the result of an op, by the types of buffers."""

from __future__ import annotations

from collections.abc import Iterable

from mdfuse.hir.program import BufferType
from mdfuse.ir.local_attributes import ExprPart, TensorPart


def expr_part(operands: Iterable[object], result: BufferType, rank: int) -> ExprPart:
    """Return what a rank holds of the operands and the result of an op of the table.

    Args:
        operands: their types; anything else stands for an operand that is no tensor.
        result: the type of the first result.
        rank: whose parts they are.
    """
    parts = (_part(k, rank) if isinstance(k, BufferType) else None for k in operands)
    out = _part(result, rank)
    assert out is not None
    return ExprPart(tuple(parts), out)


def _part(kind: BufferType, rank: int) -> TensorPart | None:
    """Return a rank's part of a buffer; None of a number."""
    layout = kind.layout
    if layout is None:
        return None
    moved = {d: reach.first for d, reach in layout.reaches}
    return TensorPart(kind.shape, layout.box(kind.shape, rank), layout.cuts, kind.runs(rank), moved)
