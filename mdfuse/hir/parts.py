"""A rank's parts of the operands and the result of an op, by the types of buffers."""

from __future__ import annotations

from collections.abc import Iterable

from mdfuse.hir.program import BufferType
from mdfuse.ir.local_attributes import ExprPart


def expr_part(operands: Iterable[object], result: BufferType, rank: int) -> ExprPart:
    """Return what a rank holds of the operands and the result of an op of the table.

    Args:
        operands: their types; anything else stands for an operand that is no tensor.
        result: the type of the first result.
        rank: whose parts they are.
    """
    tensors = [k if isinstance(k, BufferType) and k.layout is not None else None for k in operands]
    first = tensors[0] if tensors else None
    return ExprPart(
        shapes=tuple(k.shape if k is not None else None for k in tensors),
        boxes=tuple(k.box(rank) if k is not None else None for k in tensors),
        shape=result.shape,
        box=result.box(rank),
        blocks=first.blocks(rank) if first is not None else {},
        cuts=result.layout.cuts if result.layout is not None else {},
        moved=first.moved if first is not None else {},
        runs=result.runs(rank),
        pieces=tuple(k.runs(rank) if k is not None else {} for k in tensors),
    )
