"""Which names of a host program may stand for the same memory."""

from __future__ import annotations

from mdfuse.hir.instructions import row_of
from mdfuse.hir.program import HostProgram, Instruction


def shared_operand(i: Instruction) -> str | None:
    """Return the operand whose memory the result of an instruction may share; None: there is none.

    Also where a memory order is required: an operand that lies so already is not copied.
    """
    row = row_of(i)
    return i.reads[0] if row is not None and row.is_view and i.reads else None


def storage(program: HostProgram) -> dict[str, str]:
    """Return name -> the name whose memory it may share; itself where it has memory of its own."""
    return {name: of[-1] for name, of in memories(program).items()}


def memories(program: HostProgram) -> dict[str, tuple[str, ...]]:
    """Return name -> the names in whose memory it may lie; the last one has memory of its own.

    The others are those of copies on the way to it, its own name among them: a pad, or what an
    order is required of, is a copy only where its operand lies otherwise, which ranks may differ
    in.
    """
    shared = {name: (name,) for name in program.inputs}
    for i in program.walk():
        operand = shared_operand(i)
        of = program.root(operand) if operand is not None else None
        for name in map(program.root, i.outputs if i.op != "launch" else ()):
            if name not in shared:  # later instructions write into its buffer
                held = shared.get(of, (of,)) if of is not None else ()
                may_be_own = of is None or i.order is not None or i.op == "pad"
                shared[name] = (name, *held) if may_be_own else held
    roots = {alias: program.root(alias) for alias in program.aliases}
    return {**shared, **{alias: shared.get(root, (root,)) for alias, root in roots.items()}}
