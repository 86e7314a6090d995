"""The host IR: what the host executes, for all ranks at once or projected onto one."""

from mdfuse.hir.program import BufferType, HostProgram, Instruction

__all__ = ["BufferType", "HostProgram", "Instruction"]
