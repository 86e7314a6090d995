"""Values that are a large part of a program's memory, and how long they live."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from mdfuse.config import Options
from mdfuse.extents.extent import is_symbolic
from mdfuse.hir.analysis.dataflow import Dataflow
from mdfuse.hir.instructions import may_share, op_of
from mdfuse.hir.once import once
from mdfuse.hir.passes.form_fusion_groups import is_grouped
from mdfuse.hir.program import BufferType, HostProgram, Instruction

#: Bytes from which on passes look at the life of a value: others are little of a program's memory.
LEAST = 16 << 20

#: Norms of rows, whose operands are of their size.
NORMS = ("layer_norm", "rms_norm")

#: Bytes of the widest element.
_WIDEST = torch.complex128.itemsize


def has_units_in_order(program: HostProgram, options: Options) -> bool:
    """Tell whether a program gets launches, and runs its instructions one after the other."""
    return is_grouped(options) and all(
        i.op not in ("set_stream", "block") for i in program.instructions
    )


def has_numbers(program: HostProgram) -> bool:
    """Tell whether all extents are numbers: to compare others would decide about a run's."""
    return not any(is_symbolic(n) for shape in _shapes(program) for n in shape)


def has_large(program: HostProgram, options: Options) -> bool:
    """Tell whether passes on the lives of large values have something to do in a program."""
    if not has_units_in_order(program, options) or not has_numbers(program):
        return False
    return any(_WIDEST * prod(shape) >= LEAST for shape in _shapes(program))


def _shapes(program: HostProgram) -> Sequence[tuple[Any, ...]]:
    """Return the shapes of all values, most of them once: many values have the same one."""
    return [*{id(kind.shape): kind.shape for kind in program.types.values()}.values()]


def is_large(program: HostProgram, x: str) -> bool:
    """Tell whether a value is large."""
    return program.types[x].layout is not None and nbytes(program, x) >= LEAST


def nbytes(program: HostProgram, x: str) -> int:
    """Return the bytes of a value's part, the largest."""
    sizes = _sizes(program)
    if x not in sizes:
        kind = program.types[x]
        has_symbols = any(map(is_symbolic, kind.shape))
        sizes[x] = kind.nbytes() if has_symbols else _nbytes(kind)
    return sizes[x]


@once
def _sizes(_: HostProgram) -> dict[str, int]:
    return {}


@lru_cache(maxsize=1024)
def _nbytes(kind: BufferType) -> int:
    return kind.nbytes()


def lies_as_planned(flow: Dataflow, x: str, i: Instruction) -> bool:
    """Tell whether a plan knows the strides of a value, which a unit must that writes over it.

    Those of a compiled unit's results it is told, and other buffers are the plan's, unless torch
    makes them. How many rows the host counts in a run it does not know.

    Args:
        flow: of the program.
        x: the value.
        i: what makes it.
    """
    counts = flow.binders.get(flow.types[x].counts or "")
    if counts is not None and counts.op == "fetch":
        return False
    if i.op == "launch":
        if len([j for j in i.body if not may_share(j)]) > 1:
            return True
        i = next(j for j in i.body if x in j.outputs)  # a call alone is not compiled
    if i.op == "alloc" or i.order is not None:
        return True
    op, first = op_of(i), i.inputs[0] if i.inputs else None
    if op is None or op.results > 1 or not isinstance(first, str):
        return False
    is_filled = op.writes.form is not None and (op.writes.is_exact or op.writes.is_product)
    return is_filled and flow.types[first].layout is not None
