"""Check calls of blocks: each index once, and after the calls that make what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mdfuse.errors import ProgramError
from mdfuse.hir.block_calls import chunks_of, per_index
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify.error_report import ErrorText

INSIDE = ErrorText(
    "{shown} inside of {of.op}",
    "blocks and calls stand by themselves, not in loops, branches or units",
    "write one call per index",
)
ONE_NAME = ErrorText(
    "two blocks are named {i.fn}", "a call names its block", "name one of them otherwise"
)
NO_BLOCK = ErrorText("{shown}, but there is no block {i.fn}", hint="one of {names}")
NO_SUCH_INDEX = ErrorText(
    "{shown}: there is no such index of block {i.fn}{chunks}",
    "the index of a call is a number, which counts from 0",
    "{indices}",
)
TWICE = ErrorText(
    "{shown} for the second time",
    "what a block makes for an index is made once, and added up once",
    "leave one of the calls out",
)
TOO_EARLY = ErrorText(
    "{shown} reads %{name}, which {other} makes, {when}",
    "what belongs to an index is there when the block that makes it has run for it",
    "{other} before",
)
MISSING = ErrorText(
    "call {i.fn}({index}) is missing",
    "block {i.fn} is about {count} chunks, each of which runs once",
    "add call {i.fn}({index})",
)


def check_calls(program: HostProgram) -> None:
    """Raise ProgramError where calls of blocks are missing, doubled, or in a wrong order."""
    if any(i.op in ("block", "call") for i in program.walk()):
        _Calls(program).run()


@dataclass
class _Calls:
    program: HostProgram
    blocks: dict[str, Instruction] = field(default_factory=dict)
    #: (block, index) -> its call
    done: dict[tuple[str, int], Instruction] = field(default_factory=dict)

    def run(self) -> None:
        program = self.program
        for i in program.instructions:
            self.check_place(i)
        calls = [i for i in program.instructions if i.op == "call"]
        needs = dict(self.needs())
        planned = {(i.fn, i.kwargs["index"]): i for i in calls}
        for i in calls:
            self.check_call(i)
            index = i.kwargs["index"]
            for name, maker in needs.get(i.fn, {}).items():
                if (maker, index) not in self.done and maker != i.fn:
                    raise self.too_early(i, name, maker, planned.get((maker, index)))
            self.done[i.fn, index] = i
        for name in self.blocks:
            for n in range(chunks_of(self.program, self.blocks[name]) or 0):
                if (name, n) not in self.done:
                    raise self.missing(name, n)

    def check_place(self, i: Instruction) -> None:
        """Note a block; raise ProgramError for a block or a call at a wrong position."""
        inside = [j for inner in (*i.body, *i.orelse) for j in inner.walk()]
        for j in inside:
            if j.op in ("block", "call"):
                raise INSIDE(self.program, j, shown=_shown(j), of=i)
        if i.op == "block" and i.fn in self.blocks:
            raise ONE_NAME(self.program, i, self.blocks[i.fn])
        if i.op == "block":
            self.blocks[i.fn] = i

    def check_call(self, i: Instruction) -> None:
        if i.fn not in self.blocks:
            names = ", ".join(self.blocks) or "those that are written before"
            raise NO_BLOCK(self.program, i, shown=_shown(i), names=names)
        index, count = i.kwargs["index"], chunks_of(self.program, self.blocks[i.fn])
        if not isinstance(index, int) or index < 0 or (count is not None and index >= count):
            chunks = "" if count is None else f": it is about {count} chunks"
            indices = f"from 0 to {count - 1}" if count else "a number from 0 on"
            raise NO_SUCH_INDEX(self.program, i, shown=_shown(i), chunks=chunks, indices=indices)
        if (i.fn, index) in self.done:
            raise TWICE(self.program, i, self.done[i.fn, index], shown=_shown(i))

    def needs(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield (block, name that it reads -> the block that makes it)."""
        root, of_index = self.program.root, per_index(self.program)
        makers: dict[str, str] = {}
        for block in self.blocks.values():
            inside = [j for i in block.body for j in i.walk()]
            read = dict.fromkeys(n for i in inside for n in map(root, i.reads) if n in of_index)
            yield block.fn, {n: makers[n] for n in read if n in makers}
            for n in (n for i in inside for n in map(root, i.outputs)):
                makers.setdefault(n, block.fn)

    def too_early(
        self, i: Instruction, name: str, maker: str, later: Instruction | None
    ) -> ProgramError:
        other = f"call {maker}({i.kwargs['index']})"
        when = "later" if later is not None else "but there is no such call"
        also = [later] if later is not None else []
        return TOO_EARLY(self.program, i, *also, shown=_shown(i), name=name, other=other, when=when)

    def missing(self, name: str, index: int) -> ProgramError:
        others = [i for (block, _), i in self.done.items() if block == name]
        count = chunks_of(self.program, self.blocks[name])
        return MISSING(self.program, self.blocks[name], *others[:1], index=index, count=count)


def _shown(i: Instruction) -> str:
    return f"call {i.fn}({i.kwargs.get('index')})" if i.op == "call" else f"block {i.fn}"
