"""Find invalid names in a host program, before it runs."""

from __future__ import annotations

from collections.abc import Iterator

from mdfuse.errors import ProgramError, shown
from mdfuse.extents.expressions import terms
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify.refusals import unbound
from mdfuse.hir.verify.structure import UNPOSTED, check_aliases


def check_names(program: HostProgram) -> None:
    """Raise ProgramError for names that are invalid on every rank.

    Invalid are inputs that are aliases, aliases in a cycle or of another type, outputs that are
    chunks or share a buffer, and names that nothing computes.
    """
    if not isinstance(program, HostProgram):
        raise ProgramError(
            f"{shown(program)} is no host program",
            hint="program.host of what mf.compile returned, or mdfuse.hir.parse(text)",
        )
    check_aliases(program)
    for name in program.outputs:
        _check_output(program, name)
    _check_outputs_apart(program)
    known = set(map(program.root, program.inputs))
    known.update(program.root(n) for i in program.walk() for n in i.outputs)
    for i in program.walk():
        for name in _names(i):
            if program.root(name) not in known and not (
                i.op == "return" and _is_elsewhere(program, name)
            ):
                raise UNPOSTED(program, i) if i.op == "wait" else unbound(program, name, i, None)


def _check_outputs_apart(program: HostProgram) -> None:
    """Raise ProgramError where two outputs are one buffer.

    A caller's write into one of them would show in the other.
    """
    seen: dict[str, str] = {}
    for name in program.outputs:
        root = program.root(name)
        if root in seen:
            twice = "returned twice" if seen[root] == name else f"an alias of output %{seen[root]}"
            raise ProgramError(
                f"@{program.name}: output %{name} is {twice}",
                because="each output is a buffer of its own, or one of the caller's",
                hint=f"return a copy: %copy = mul(%{name}, 1)",
            )
        seen[root] = name


def _names(i: Instruction) -> Iterator[str]:
    """Yield the buffers and handles that an instruction reads, or whose extent it asks for."""
    yield from i.reads
    for term in (t for index in i.indices for t in terms(index)):
        if term.kind == "extent":
            yield term.name


def _is_elsewhere(program: HostProgram, name: str) -> bool:
    """Tell whether the program is that of a rank which has no part of a buffer."""
    return program.rank is not None and not program.has(name, program.rank)


def _check_output(program: HostProgram, name: str) -> None:
    layout = program.types[name].layout if name in program.types else None
    if layout is not None and layout.stream is not None and layout.stream.index is not None:
        raise ProgramError(
            f"@{program.name} returns %{name}, which is a chunk: {layout}",
            because="an output is a whole value",
            hint="return the buffer that it is a chunk of",
        )
