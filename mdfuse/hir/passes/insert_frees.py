"""Free each intermediate right after its last use, on every path, inside loops too.

    %h: f32[4] (tp=R) = add(%x, 1.0)                %h: f32[4] (tp=R) = add(%x, 1.0)
    %y: f32[4] (tp=R) = mul(%h, 2.0)        ->      %y: f32[4] (tp=R) = mul(%h, 2.0)
    return %y                                       free %h
                                                    return %y

What a post reads or writes is in use until its wait, and so is what that is a view of. Inputs and
outputs are the caller's. What belongs to the index of calls is freed in the block that is the last
one to use it; where that is another one for another index, in a block of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import Dataflow, dataflow
from mdfuse.hir.block_calls import blocks_of, per_index
from mdfuse.hir.instructions import BLOCKS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import fresh_name

name = "insert_frees"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with frees."""
    keep = {program.root(n) for n in (*program.inputs, *program.outputs)}
    bound = frozenset(program.inputs).union(*map(_binds, program.instructions))
    frees = _Frees(program, dataflow(program), frozenset(keep), bound)
    frees.note_calls()
    code = frees.block(frees.with_drops(), frozenset(), frozenset())
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
    flow: Dataflow
    keep: frozenset[str]
    #: names that are inputs or bound, but for those that a host unit binds for itself
    bound: frozenset[str]
    #: block -> the buffers that it uses; those of them that are bound outside of blocks; those that
    #: it frees
    used: dict[str, set[str]] = field(default_factory=dict)
    outer: dict[str, set[str]] = field(default_factory=dict)
    freed: dict[str, set[str]] = field(default_factory=dict)
    #: blocks -> what one or another of them is the last to use
    late: dict[frozenset[str], list[str]] = field(default_factory=dict)

    def note_calls(self) -> None:
        """Note which block frees what belongs to the index of a call."""
        blocks, indexed = blocks_of(self.program), per_index(self.program)
        outside = {x for i in self.program.instructions if i.op != "block" for x in self.binds(i)}
        bound = {n: self.binds(block) - outside for n, block in blocks.items()}
        for name, block in blocks.items():
            self.used[name] = {x for i in block.body for x in self.uses(i)}
            self.outer[name] = self.used[name] - indexed.union(*bound.values())
            self.freed[name] = bound[name] - indexed
        called: dict[int, list[str]] = {}
        for i in self.program.instructions:
            if i.op == "call":
                called.setdefault(i.kwargs["index"], []).append(i.fn)
        for x in sorted(indexed):
            users = frozenset(name for name in blocks if x in self.used[name])
            lasts = {next((n for n in reversed(c) if n in users), "") for c in called.values()}
            if len(lasts) == 1 and users:
                self.freed[lasts.pop()].add(x)
            elif users:
                self.late.setdefault(users, []).append(x)

    def with_drops(self) -> tuple[Instruction, ...]:
        """Return the program's code with blocks that free what no block is always the last to use.

        Their calls come behind the last one that uses it.
        """
        if not self.late:
            return self.program.instructions
        code = list(self.program.instructions)
        (index,) = next(i for i in code if i.op == "block").outputs
        drops: list[Instruction] = []
        for users, names in self.late.items():
            fn = fresh_name(self.used, f"drop{len(drops)}")
            free = Instruction(op="free", inputs=tuple(names))
            drops.append(Instruction(op="block", fn=fn, outputs=(index,), body=(free,)))
            self.used[fn], self.outer[fn], self.freed[fn] = set(names), set(), set()
            called = {
                i.kwargs["index"]: n for n, i in enumerate(code) if i.op == "call" and i.fn in users
            }
            for k, n in sorted(called.items(), key=lambda at: -at[1]):
                code.insert(n + 1, Instruction(op="call", fn=fn, attrs=(("index", k),)))
        at = 1 + max(n for n, i in enumerate(code) if i.op == "block")
        return (*code[:at], *drops, *code[at:])

    def block(
        self, block: tuple[Instruction, ...], later: frozenset[str], before: frozenset[str]
    ) -> tuple[Instruction, ...]:
        """Return a block with frees of what it binds.

        Args:
            block: the instructions.
            later: names that are used after the block.
            before: names that were bound before the block.
        """
        bound_before = self.bound_at_nested(block, before)
        done: list[Instruction] = []
        needed = set(later)  # grows as the block is read backwards
        for n, i in reversed(list(enumerate(block))):
            inner = self.nested(i, frozenset(needed), bound_before[n]) if n in bound_before else i
            used = self.used_at(i)
            gone = {name for j in inner.walk() if j.op == "free" for name in j.reads}
            alive = (needed, before, self.keep, gone)
            dying = [name for name in used if not any(name in names for names in alive)]
            if dying and i.op != "return":
                done.append(Instruction(op="free", inputs=tuple(dict.fromkeys(dying))))
            done.append(inner)
            needed.update(used)
        return tuple(reversed(done))

    def bound_at_nested(
        self, block: tuple[Instruction, ...], before: frozenset[str]
    ) -> dict[int, frozenset[str]]:
        """Return what is bound before each loop and branch of a block, by its place there."""
        bound, places = set(before), dict[int, frozenset[str]]()
        for n, i in enumerate(block):
            if i.op == "block":
                every = frozenset[str]().union(bound, *self.used.values())
                places[n] = every - self.freed[i.fn]
            elif i.op in BLOCKS:
                places[n] = frozenset(bound)
            bound.update(self.binds(i) if i.op != "block" else ())
        return places

    def used_at(self, i: Instruction) -> list[str]:
        """Return the buffers that are used where an instruction stands: of blocks, by calls."""
        if i.op == "block":
            return []
        return sorted(self.outer[i.fn]) if i.op == "call" else list(self.uses(i))

    def nested(self, i: Instruction, later: frozenset[str], before: frozenset[str]) -> Instruction:
        """Return a loop or branch with frees inside it."""
        body = self.block(i.body, later, before)
        return replace(i, body=body, orelse=self.block(i.orelse, later, before))

    def binds(self, i: Instruction) -> set[str]:
        """Return the buffers that an instruction, or one inside it, may bind."""
        return {*self.buffers(_binds(i))}

    def uses(self, i: Instruction) -> Iterable[str]:
        """Yield the buffers that an instruction, or one inside it, uses."""
        yield from self.buffers((*i.reads, *i.outputs))
        if i.op == "wait":
            names = self.flow.posts[i.reads[0]].reads
            bases = (of for x in names for of in self.flow.bases.get(x, ()) if of in self.bound)
            yield from self.buffers((*names, *bases))
        for j in (*i.body, *i.orelse) if i.op in BLOCKS else ():
            yield from self.uses(j)

    def buffers(self, names: Iterable[str]) -> Iterable[str]:
        """Yield those names that are buffers: no handles, numbers or streams."""
        for n in names:
            kind = self.program.types.get(n)
            if kind is not None and kind.layout is not None:
                yield self.program.root(n)
