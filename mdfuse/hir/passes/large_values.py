"""Values that are a large part of a program's memory, and how long they live."""

from __future__ import annotations

from mdfuse.config import Options
from mdfuse.extents.extent import is_symbolic
from mdfuse.hir.analysis.dataflow import Dataflow
from mdfuse.hir.passes.form_fusion_groups import is_grouped
from mdfuse.hir.program import HostProgram

#: Bytes from which on passes look at the life of a value: others are little of a program's memory.
LEAST = 16 << 20


def has_units_in_order(program: HostProgram, options: Options) -> bool:
    """Tell whether a program gets launches, and runs its instructions one after the other."""
    return is_grouped(options) and all(
        i.op not in ("set_stream", "block") for i in program.instructions
    )


def has_numbers(program: HostProgram) -> bool:
    """Tell whether all extents are numbers: to compare others would decide about a run's."""
    return not any(is_symbolic(n) for kind in program.types.values() for n in kind.shape)


def is_large(program: HostProgram, x: str) -> bool:
    """Tell whether a value is large."""
    return program.types[x].layout is not None and program.types[x].nbytes() >= LEAST


def is_own(flow: Dataflow, x: str) -> bool:
    """Tell whether a name has plain memory of its own."""
    binder = flow.binders.get(x)
    is_plain = binder is not None and not (binder.op == "alloc" and binder.attrs)
    return is_plain and flow.memory(x) == x


def pinned(program: HostProgram) -> frozenset[str]:
    """Return the names that are in use whoever reads them: inputs, outputs, what shares a place."""
    aliases = {*program.aliases, *map(program.root, program.aliases)}
    return frozenset({*program.inputs, *program.outputs, *aliases})


def last_uses(flow: Dataflow) -> dict[str, int]:
    """Return memory, and each name, -> the position where it is used last."""
    lasts = dict[str, int]()
    for n, i in enumerate(flow.code):
        effects = flow.effects(i)
        lasts.update(dict.fromkeys((*effects.reads, *effects.writes), n))
    return lasts
