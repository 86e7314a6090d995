"""Instructions that a CUDA graph cannot hold: they depend on a number known only in a run.

A replay repeats the same kernels on the same addresses. Numbers (host scalars of an input, and what
is computed from them) go into a kernel's launch, and copies between the host's memory and the
device's would be repeated from an address that is not the plan's to keep.
"""

from __future__ import annotations

from collections.abc import Iterator

from mdfuse.hir.instructions import BLOCKS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.names import base_name


class HostValues:
    """A walk over instructions in order that knows which names stand for values on the host."""

    def __init__(self, program: HostProgram) -> None:
        self.program = program
        loops = {n for i in program.walk() if i.op in BLOCKS for n in i.outputs}
        #: name of a value on the host -> its description in a reason
        self.known: dict[str, str] = {
            n: f"%{n}, a number of each run"
            for n in program.inputs
            if n not in loops and self._is_number(n)
        }

    def why_eager(self, i: Instruction) -> str | None:
        """Return why an instruction cannot be captured; None where it can."""
        if i.op == "alloc" and i.kwargs.get("memory", "device") in ("host", "pinned"):
            reason = f"%{base_name(i.outputs[0])}, which lies in host memory"
            self.known[i.outputs[0]] = reason
            return f"it allocates {reason}"
        if i.op == "free":
            return None
        if i.op == "fetch":
            self.known[i.outputs[0]] = f"%{base_name(i.outputs[0])}, which the host waits for"
            return f"it fetches {self.known[i.outputs[0]]}"
        counted = (n for n in (*i.reads, *i.outputs) if self._is_counted(n))
        for name in counted:
            return f"it has rows of %{base_name(name)}, as many as a run counts"
        names = map(self._root, (*i.reads, *i.outputs))
        read = next((self.known[n] for n in names if n in self.known), None)
        if read is None:
            return None
        for name in i.outputs:
            if self._is_number(name):
                self.known[name] = f"%{base_name(name)}, computed from {read}"
        return f"it uses {read}"

    def _root(self, name: str) -> str:
        return self.program.root(name)

    def _is_counted(self, name: str) -> bool:
        kind = self.program.types.get(self._root(name))
        return kind is not None and kind.counts in self.known

    def _is_number(self, name: str) -> bool:
        kind = self.program.types.get(self._root(name))
        return kind is not None and kind.layout is None


def eager(program: HostProgram) -> Iterator[tuple[Instruction, str]]:
    """Yield the instructions that no graph can hold, each with the reason."""
    values = HostValues(program)
    for i in program.walk():
        if i.op in (*BLOCKS, "call", "launch", "return"):
            continue
        why = values.why_eager(i)
        if why is not None:
            yield i, why
