"""Check indices into tables: note those out of range in a run, raise on all ranks after it.

An error in the midst of a run would leave the other ranks in a communication. So indices are
checked before they are used, those out of range are replaced by a valid one, and the run goes on to
its end. There all ranks raise the error, whichever rank noted it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mdfuse.errors import IndexRangeError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.element_writes import NOWHERE
from mdfuse.ir.ops import TABLE
from mdfuse.names import base_name
from mdfuse.plan.context import Context, described
from mdfuse.plan.lines import Line, SlotRef, drop


def has_tables(program: HostProgram) -> bool:
    """Tell whether some instruction reads rows of a table by their indices."""
    rows = (TABLE.get(i.fn) for i in program.walk())
    return any(row is not None and row.indexed is not None for row in rows)


@dataclass
class IndexChecks:
    """The checks of one rank's indices.

    Attributes:
        error: the error for the first index out of range in the run under way; None: no such index.
    """

    error: IndexRangeError | None = None

    def checked(self, i: Instruction, lines: Sequence[Line], context: Context) -> list[Line]:
        """Return the calls of an instruction, preceded by a check of its indices."""
        row = TABLE[i.fn]
        if row.indexed is None:
            return [*lines]
        table = i.outputs[0] if row.indexed == "result" else i.inputs[row.indexed]
        assert isinstance(table, str)
        dims = i.kwargs.get("dims", (i.kwargs.get("along", 0),))
        before, behind = list[Line](), list[Line]()
        for indices, dim in zip(i.inputs, dims, strict=False):
            assert isinstance(indices, str)
            given, checked_indices = context.ref(indices), SlotRef(context.new_slot())
            look = self._looking(i, table, dim, context)
            before.append(Line(run=look, args=(given,), into=checked_indices.slot))
            lines = [
                replace(line, args=tuple(checked_indices if x == given else x for x in line.args))
                for line in lines
            ]
            behind.append(drop(checked_indices.slot))
        return [*before, *lines, *behind]

    def _looking(
        self, i: Instruction, table: str, dim: int, context: Context
    ) -> Callable[[Tensor], Tensor]:
        """Return the check of the indices of an instruction along a dim of a table."""
        part, kind = i.kwargs.get("part"), context.type(table)
        whole = i.kwargs["shape"] if TABLE[i.fn].indexed == "result" else kind.shape
        rows = whole[dim] if part is None else part[2]
        least = -rows if "dims" in i.kwargs else 0
        return partial(self._look, least, rows, partial(_out_of_range, i, table, rows, context))

    def _look(
        self, least: int, rows: int, error: Callable[[int], IndexRangeError], indices: Tensor
    ) -> Tensor:
        """Return indices of rows that exist, and note the first index out of range."""
        is_dropped = indices == NOWHERE
        wrong = indices[((indices < least) | (indices >= rows)) & ~is_dropped]
        if wrong.numel() and self.error is None:
            self.error = error(int(wrong[0]))
        return torch.where(is_dropped, indices, indices.clamp(least, max(rows - 1, 0)))

    def take(self) -> IndexRangeError | None:
        """Return the error of the run, and forget it."""
        error, self.error = self.error, None
        return error


def _out_of_range(
    i: Instruction, table: str, rows: int, context: Context, index: int
) -> IndexRangeError:
    return IndexRangeError(
        f"{described(i)}: index {index}, but %{base_name(table)} has {rows} rows",
        where=[f"rank {context.rank} of @{context.program.name}", *context.where(i)],
        because=f"check_indices=True: an index is at least 0, and less than {rows}",
        hint="look at the tensor that the indices come from",
    )
