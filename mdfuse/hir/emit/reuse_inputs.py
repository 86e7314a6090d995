"""Write outputs that reuse an input into the input's buffer, after every read of the old value.

    %y: f32[4] (tp=R) = add(%x, 1.0)                alias %y: f32[4] (tp=R) = %x
    return %y                              ->       %x = add(%x, 1.0)
                                                    return %y

Where the old value is read later, or by the instruction itself otherwise than element by element,
the result is computed elsewhere and written when all have read:

    %y: f32[4] (tp=R) = add(%x, 1.0)                alias %y: f32[4] (tp=R) = %x
    %z: f32[4] (tp=R) = mul(%x, 2.0)                %y.new: f32[4] (tp=R) = add(%x, 1.0)
    return %y, %z                          ->       %z: f32[4] (tp=R) = mul(%x, 2.0)
                                                    %y = set(%y.new)
                                                    return %y, %z
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.storage import storage
from mdfuse.ir.graph import fresh_name
from mdfuse.ir.ops import ELEMENTWISE

#: What nests others.
_BLOCKS = ("launch", "for", "if")


def run(program: HostProgram, reuse: Mapping[str, str]) -> HostProgram:
    """Return the program with an alias and a write for each output that reuses an input."""
    if not reuse:
        return program
    types, code = dict(program.types), list(program.instructions[:-1])
    shared = storage(program)
    for i in program.walk():  # what a post reads, it reads until its wait
        if i.op in ("post", "send"):
            shared[i.outputs[0]] = shared.get(i.reads[0], i.reads[0])
    for output in program.outputs:
        if output not in program.inputs and shared.get(output) in reuse.values():
            code = [_copied(i, output, types[output]) for i in code]
            shared[output] = output
    for output in program.outputs:
        if output in reuse:
            code = _Write(output, reuse[output], shared).into(code, types)
    return replace(
        program,
        types=types,
        instructions=(*code, program.instructions[-1]),
        aliases={**program.aliases, **reuse},
    )


def _copied(i: Instruction, output: str, kind: BufferType) -> Instruction:
    """A view of an input that is overwritten, asked for an order: then it is a copy."""
    if i.op in _BLOCKS:
        return replace(i, body=tuple(_copied(j, output, kind) for j in i.body))
    if output not in i.outputs or i.order is not None:
        return i
    return replace(i, order=tuple(range(len(kind.shape))))


def _renamed(i: Instruction, old: str, new: str) -> Instruction:
    return replace(
        i,
        inputs=tuple(new if x == old else x for x in i.inputs),
        outputs=tuple(new if x == old else x for x in i.outputs),
        body=tuple(_renamed(j, old, new) for j in i.body),
        orelse=tuple(_renamed(j, old, new) for j in i.orelse),
    )


@dataclass(frozen=True)
class _Write:
    """An output that is to be written into an input.

    Attributes:
        output: its name.
        buffer: that of the input.
        shared: name -> the name whose memory it may share.
    """

    output: str
    buffer: str
    shared: Mapping[str, str]

    def into(self, code: list[Instruction], types: dict[str, BufferType]) -> list[Instruction]:
        """The code with the write in it."""
        if self.is_in_place(code):
            return [_renamed(self.unordered(i), self.output, self.buffer) for i in code]
        new = fresh_name(types, f"{self.output}.new")
        types[new] = types[self.output]
        waits = {x for i in code for j in i.walk() if _receives(j, self.output) for x in j.outputs}
        used = [self.makes(i) or self.reads_old(i.walk()) or _waits(i, waits) for i in code]
        at = 1 + max(n for n, is_used in enumerate(used) if is_used)
        source = next((i.source for i in code if self.makes(i)), None)
        write = Instruction(
            op="set", fn="set", inputs=(new,), outputs=(self.output,), source=source
        )
        code = [_renamed(i, self.output, new) for i in code]
        return [*code[:at], write, *code[at:]]

    def makes(self, i: Instruction) -> bool:
        """The instruction has to do with making the output."""
        used = (self.output in j.outputs or _receives(j, self.output) for j in i.walk())
        return any(used)

    def reads_old(self, code: Iterable[Instruction]) -> bool:
        """Some of these read what the input was."""
        return any(self.shared.get(x, x) == self.buffer for i in code for x in i.reads)

    def is_in_place(self, code: list[Instruction]) -> bool:
        """One instruction computes the output, and may write it where the input is."""
        makers = [n for n, i in enumerate(code) if self.makes(i)]
        if len(makers) != 1 or code[makers[0]].op in ("for", "if"):
            return False
        (at,) = makers
        inner = code[at].body if code[at].op == "launch" else (code[at],)
        place = next(n for n, i in enumerate(inner) if self.output in i.outputs)
        return self.may_write(inner[place]) and not (
            self.reads_old(inner[place + 1 :])
            or self.reads_old(j for i in code[at + 1 :] for j in i.walk())
        )

    def may_write(self, i: Instruction) -> bool:
        """It reads nothing of the old value, or each element before it writes that one."""
        old = {x for x in i.reads if self.shared.get(x, x) == self.buffer}
        return i.op != "alloc" and (not old or (i.op in ELEMENTWISE and old == {self.buffer}))

    def unordered(self, i: Instruction) -> Instruction:
        """What writes the output, which lies as the input does, whatever order was asked for."""
        if i.op == "launch":
            return replace(i, body=tuple(map(self.unordered, i.body)))
        return replace(i, order=None) if self.output in i.outputs else i


def _receives(i: Instruction, name: str) -> bool:
    return i.op in ("post", "recv") and name in i.reads[-1:]


def _waits(i: Instruction, handles: set[str]) -> bool:
    return any(j.op == "wait" and j.reads[0] in handles for j in i.walk())
