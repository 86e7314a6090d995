"""The host IR: what the host executes, for all ranks at once or projected onto one."""

from __future__ import annotations

from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.rank.pipelines import as_run, project
from mdfuse.hir.rank.unrolled import written_out


def parse(text: str) -> HostProgram:
    """Return the program that `str(program)` printed; see `mdfuse.hir.text.parser`."""
    from mdfuse.hir.text.parser import parse as read  # imports lark only where text is read

    return read(text)


__all__ = [
    "BufferType",
    "HostProgram",
    "Instruction",
    "as_run",
    "parse",
    "project",
    "written_out",
]
