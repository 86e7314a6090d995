"""Across: work that reads memory in another order than it writes it.

    %y = add(%x, %z)      %x lies row by row, %z as [1,0]: %z is read column by column

Each element read is then in another line of a cache, so bytes take longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from mdfuse.hir.instructions import op_of
from mdfuse.hir.orders import Dims
from mdfuse.hir.program import HostProgram, Instruction


def is_across(program: HostProgram, i: Instruction) -> bool:
    """Return whether elementwise work reads operands that lie in different memory orders.

    What the program does not tell lies row by row, as inputs mostly do.
    """
    op = op_of(i)
    return op is not None and op.is_elementwise and are_across(program, i.reads, i.outputs)


def are_across(program: HostProgram, reads: Iterable[str], made: Iterable[str]) -> bool:
    """Return whether what is read lies in different memory orders, of what has the shape of a
    result; what is repeated for others is read anyhow."""
    shapes = {program.local_shape(x) for x in made if _is_tensor(program, x)}
    found = (x for x in reads if _is_tensor(program, x) and program.local_shape(x) in shapes)
    return len({innermost(program, x) for x in found}) > 1


def innermost(program: HostProgram, name: str) -> int:
    """Return the dim whose elements are next to each other in a buffer; -1: there is none."""
    shape = program.local_shape(name)
    told = program.likely_orders.get(name)
    order: Dims = tuple(range(len(shape)))
    if told is not None and told.lies is not None and len(told.lies) == len(shape):
        order = told.lies
    return next((d for d in reversed(order) if shape[d] != 1), -1)


def _is_tensor(program: HostProgram, name: str) -> bool:
    kind = program.types.get(name)
    return kind is not None and kind.layout is not None and program.rank in kind.layout.mesh
