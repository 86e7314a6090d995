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
    return {name: of[-1] for name, of in owners(program).items()}


def owners(program: HostProgram) -> dict[str, tuple[str, ...]]:
    """Return name -> the names whose memory it may share, what it is a view of behind itself.

    A view of which a memory order is required may be a copy: then the memory is its own.
    """
    found = {name: (name,) for name in program.inputs}
    for i in program.walk():
        operand = shared_operand(i)
        of = program.root(operand) if operand is not None else None
        above = found.get(of, (of,)) if of is not None else ()
        for name in map(program.root, i.outputs if i.op != "launch" else ()):
            if name not in found:  # later instructions write into its buffer
                found[name] = above if above and i.order is None else (name, *above)
    roots = {alias: program.root(alias) for alias in program.aliases}
    return {**found, **{alias: found.get(root, (root,)) for alias, root in roots.items()}}
