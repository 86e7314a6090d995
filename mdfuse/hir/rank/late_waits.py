"""Let a rank that only sends wait as late as its next send, so that its computations overlap.

    %c0 = post broadcast(%a) …                      %c0 = post broadcast(%a) …
    wait %c0                                        %b = matmul(%x, %w)
    free %a                                         wait %c0
    %b = matmul(%x, %w)                    ->       free %a
    %c1 = post broadcast(%b) …                      %c1 = post broadcast(%b) …
    wait %c1                                        wait %c1
    return                                          return

A program for all ranks waits where what arrives is used, which is nothing on a rank to which
nothing comes. There the wait stands before the next such post, so that one buffer more is alive,
or before what writes where the post reads, or at the end. It stays on its stream. Where parts of a
loop take turns it is late already: the next iteration's post stands before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mdfuse.hir.analysis.dataflow import storage
from mdfuse.hir.instructions import BLOCKS, received
from mdfuse.hir.program import HostProgram, Instruction


def run(program: HostProgram) -> HostProgram:
    """Return a projection whose waits for sends alone are moved down, in each block by itself.

    A wait for a send alone is one of a post from which nothing arrives at this rank.
    """
    if not any(i.op == "post" and _only_sends(i) for i in program.walk()):
        return program
    block = _Block(program, storage(program))
    return replace(program, instructions=block.moved(program.instructions))


def _only_sends(i: Instruction) -> bool:
    return i.op == "post" and isinstance(i.inputs[0], str) and not isinstance(i.inputs[1], str)


def _is_late(code: Sequence[Instruction], at: int) -> bool:
    """Return whether a wait stands behind what a later iteration sends by the same post."""
    handle = code[at].reads[0]
    posts = (i.outputs[0] for i in reversed(code[:at]) if i.op == "post")
    return next(h for h in posts if _base(h) == _base(handle)) != handle


def _base(handle: str) -> str:
    return handle.partition("@")[0]


@dataclass(frozen=True)
class _Block:
    """The buffers of a program, as far as moving waits in its blocks must know them."""

    program: HostProgram
    shared: Mapping[str, str]

    def memory(self, name: str) -> str:
        root = self.program.root(name)
        return self.shared.get(root, root)

    def moved(self, block: Sequence[Instruction]) -> tuple[Instruction, ...]:
        """Return a block with such waits moved down, and with them the frees of what was sent."""
        code = [self.inside(i) for i in block]
        sent = {i.outputs[0]: self.memory(i.reads[0]) for i in code if _only_sends(i)}
        late: dict[int, list[Instruction]] = defaultdict(list)
        passed: dict[str, list[range]] = defaultdict(list)  # memory -> places that waits moved past
        kept: list[Instruction | None] = list(code)
        current: Instruction | None = None
        for n, i in enumerate(code):
            current = i if i.op == "set_stream" else current
            if i.op == "wait" and not i.attrs and i.reads[0] in sent and not _is_late(code, n):
                source = sent[i.reads[0]]
                to = self.place(code, n, current, source)
                kept[n] = None
                late[to].append(i)
                passed[source].append(range(n + 1, to))
        for n, i in enumerate(code):
            if passed and i.op == "free":
                kept[n] = None
                for to, free in self.parted(i, n, passed):
                    late[to].append(free)
        done = [(*late[n], *((i,) if i is not None else ())) for n, i in enumerate([*kept, None])]
        return tuple(i for row in done for i in row)

    def inside(self, i: Instruction) -> Instruction:
        if i.op not in BLOCKS:
            return i
        return replace(i, body=self.moved(i.body), orelse=self.moved(i.orelse))

    def place(
        self, code: Sequence[Instruction], at: int, stream: Instruction | None, source: str
    ) -> int:
        """Return the position of the instruction before which a wait may stand at the latest.

        Args:
            code: the block.
            at: where it stands.
            stream: what switched to the stream that is current there.
            source: the memory that is being sent.
        """
        best, current = at + 1, stream
        for n in range(at + 1, len(code)):
            i = code[n]
            if current == stream:
                best = n
            if i.op in _STOPS or _only_sends(i) or self.writes(i, source):
                return best
            if i.op == "sync" and current != stream:
                return best  # another stream waits for all that this one waited for
            current = i if i.op == "set_stream" else current
        return len(code) if current == stream else best

    def writes(self, i: Instruction, source: str) -> bool:
        """Return whether an instruction may change what is being sent."""
        written = [n for j in i.walk() for n in (*j.outputs, *received(j))]
        return any(self.memory(n) == source for n in written)

    def parted(
        self, i: Instruction, at: int, passed: Mapping[str, list[range]]
    ) -> Iterator[tuple[int, Instruction]]:
        """Yield the parts of a free with their new places: behind the last wait for a send."""
        places: dict[int, list[str]] = defaultdict(list)
        for name in i.reads:
            moved = (r.stop for r in passed.get(self.memory(name), ()) if at in r)
            places[max(moved, default=at)].append(name)
        for to, names in places.items():
            yield to, i.changed(inputs=tuple(names))


#: Instructions that a wait is not moved past.
_STOPS = ("return", *BLOCKS, "next", "call", "barrier", "group_start")
