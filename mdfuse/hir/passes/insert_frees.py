"""Free each intermediate right after its last use, on every path, inside loops too.

    %h: f32[4] (tp=R) = add(%x, 1.0)                %h: f32[4] (tp=R) = add(%x, 1.0)
    %y: f32[4] (tp=R) = mul(%h, 2.0)        ->      %y: f32[4] (tp=R) = mul(%h, 2.0)
    return %y                                       free %h
                                                    return %y

What a post reads or writes is in use until its wait, and so is what that is a view of. Inputs and
outputs are the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mdfuse.config import Options
from mdfuse.hir.instructions import BLOCKS, POSTS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.storage import storage

name = "insert_frees"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with frees."""
    keep = {program.root(n) for n in (*program.inputs, *program.outputs)}
    made = frozenset(program.inputs).union(*map(_binds, program.instructions))
    shared = {name: of for name, of in storage(program).items() if of in made}
    frees = _Frees(program, frozenset(keep), shared)
    code = frees.block(program.instructions, frozenset(), frozenset())
    return replace(program, instructions=code)


def _binds(i: Instruction) -> set[str]:
    """Return the names that an instruction, or one of its block, binds.

    What a host unit binds inside is its own, and not among them.
    """
    inside = (*i.body, *i.orelse) if i.op in BLOCKS else ()
    return set(i.outputs).union(*map(_binds, inside))


@dataclass
class _Frees:
    program: HostProgram
    keep: frozenset[str]
    #: name -> the name whose memory it may share
    shared: Mapping[str, str]
    #: handle -> the buffers that its post uses
    posted: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def block(
        self, block: tuple[Instruction, ...], later: frozenset[str], before: frozenset[str]
    ) -> tuple[Instruction, ...]:
        """Return a block with frees of what it binds.

        Args:
            block: the instructions.
            later: names that are used after the block.
            before: names that were bound before the block.
        """
        here = self.bound_at_nested(block, before)
        done: list[Instruction] = []
        needed = set(later)  # grows as the block is read backwards
        for n, i in reversed(list(enumerate(block))):
            inner = self.nested(i, frozenset(needed), here[n]) if n in here else i
            used = list(self.uses(i))
            gone = {name for j in inner.walk() if j.op == "free" for name in j.reads}
            kept = (needed, before, self.keep, gone)
            dying = [name for name in used if not any(name in names for names in kept)]
            if dying and i.op != "return":
                done.append(Instruction(op="free", inputs=tuple(dict.fromkeys(dying))))
            done.append(inner)
            needed.update(used)
        return tuple(reversed(done))

    def bound_at_nested(
        self, block: tuple[Instruction, ...], before: frozenset[str]
    ) -> dict[int, frozenset[str]]:
        """Return what is bound before each loop and branch of a block, by its place there."""
        bound, found = set(before), dict[int, frozenset[str]]()
        for n, i in enumerate(block):
            self.note_posts(i)
            if i.op in BLOCKS:
                found[n] = frozenset(bound)
            bound.update(self.binds(i))
        return found

    def nested(self, i: Instruction, later: frozenset[str], before: frozenset[str]) -> Instruction:
        """Return a loop or branch with frees inside it."""
        body = self.block(i.body, later, before)
        return replace(i, body=body, orelse=self.block(i.orelse, later, before))

    def note_posts(self, i: Instruction) -> None:
        if i.op in POSTS:
            owners = (self.shared[x] for x in i.reads if x in self.shared)
            self.posted[i.outputs[0]] = tuple(self.buffers((*i.reads, *owners)))

    def binds(self, i: Instruction) -> set[str]:
        """Return the buffers that an instruction, or one inside it, may bind."""
        return {*self.buffers(_binds(i))}

    def uses(self, i: Instruction) -> Iterable[str]:
        """Yield the buffers that an instruction, or one inside it, uses."""
        yield from self.buffers((*i.reads, *i.outputs))
        if i.op == "wait":
            yield from self.posted.get(i.reads[0], ())
        for j in (*i.body, *i.orelse) if i.op in BLOCKS else ():
            yield from self.uses(j)

    def buffers(self, names: Iterable[str]) -> Iterable[str]:
        """Yield those names that are buffers: no handles, numbers or streams."""
        for n in names:
            kind = self.program.types.get(n)
            if kind is not None and kind.layout is not None:
                yield self.program.root(n)
