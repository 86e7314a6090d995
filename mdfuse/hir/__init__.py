"""The host IR: what the host executes, for all ranks at once or projected onto one."""

from __future__ import annotations

from mdfuse.hir.program import BufferType, HostProgram, Instruction


def parse(text: str) -> HostProgram:
    """Return the program that `str(program)` printed; see `mdfuse.hir.text.parser`."""
    from mdfuse.hir.text.parser import parse as read  # imports lark only where text is read

    return read(text)


__all__ = ["BufferType", "HostProgram", "Instruction", "parse"]
