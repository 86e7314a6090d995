"""Free each intermediate right after its last use, on every path, inside loops too.

    %h: f32[4] (tp=R) = add(%x, 1.0)                %h: f32[4] (tp=R) = add(%x, 1.0)
    %y: f32[4] (tp=R) = mul(%h, 2.0)        ->      %y: f32[4] (tp=R) = mul(%h, 2.0)
    return %y                                       free %h
                                                    return %y

What a post reads or writes is in use until its wait. Inputs and outputs are the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mdfuse.config import Options
from mdfuse.hir.program import HostProgram, Instruction

name = "insert_frees"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with frees."""
    keep = {program.root(n) for n in (*program.inputs, *program.outputs)}
    code = _Frees(program, frozenset(keep)).block(program.instructions, frozenset(), frozenset())
    return replace(program, instructions=code)


@dataclass
class _Frees:
    program: HostProgram
    keep: frozenset[str]
    #: handle -> the buffers that its post uses
    posted: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def block(
        self, block: tuple[Instruction, ...], later: frozenset[str], before: frozenset[str]
    ) -> tuple[Instruction, ...]:
        """A block with frees of what it binds.

        Args:
            block: the instructions.
            later: names that are used after the block.
            before: names that were bound before the block.
        """
        bound = [before]
        for i in block:
            self.note_posts(i)
            bound.append(bound[-1].union(self.binds(i)))
        done: list[Instruction] = []
        for i, here in zip(reversed(block), reversed(bound[:-1]), strict=True):
            inner = self.nested(i, later, here)
            used = list(self.uses(i))
            gone = {n for j in inner.walk() if j.op == "free" for n in j.reads}
            dying = [n for n in used if n not in {*later, *before, *self.keep, *gone}]
            if dying and i.op != "return":
                done.append(Instruction(op="free", inputs=tuple(dict.fromkeys(dying))))
            done.append(inner)
            later = later.union(used)
        return tuple(reversed(done))

    def nested(self, i: Instruction, later: frozenset[str], before: frozenset[str]) -> Instruction:
        """A loop or branch with frees inside it."""
        if i.op not in ("for", "if"):
            return i
        body = self.block(i.body, later, before)
        return replace(i, body=body, orelse=self.block(i.orelse, later, before))

    def note_posts(self, i: Instruction) -> None:
        if i.op in ("post", "send", "recv"):
            self.posted[i.outputs[0]] = tuple(self.buffers(i.reads))

    def binds(self, i: Instruction) -> set[str]:
        """The buffers that an instruction, or what is inside it, may bind."""
        inside = (*i.body, *i.orelse) if i.op in ("for", "if") else ()
        return {*self.buffers(i.outputs)}.union(*map(self.binds, inside))

    def uses(self, i: Instruction) -> Iterable[str]:
        """The buffers that an instruction, or what is inside it, uses."""
        yield from self.buffers((*i.reads, *i.outputs))
        if i.op == "wait":
            yield from self.posted.get(i.reads[0], ())
        for j in (*i.body, *i.orelse) if i.op in ("for", "if") else ():
            yield from self.uses(j)

    def buffers(self, names: Iterable[str]) -> Iterable[str]:
        """Those of some names that are buffers: no handles, numbers or streams."""
        for n in names:
            kind = self.program.types.get(n)
            if kind is not None and kind.layout is not None:
                yield self.program.root(n)
