"""Let a rank that only sends wait no later than its next send, in what is written out.

    %c0@0 = post sendrecv(%a@0) …                   %c0@0 = post sendrecv(%a@0) …
    %a@1 = matmul(%x@1, %w)                         %a@1 = matmul(%x@1, %w)
    %c0@1 = post sendrecv(%a@1) …          ->       wait %c0@0
    wait %c0@0                                      free %a@0
    free %a@0                                       %c0@1 = post sendrecv(%a@1) …

Calls of a pipeline wait where what arrives is read, which may be many calls later; a sender would
keep all that it sends until then. Sends one right behind the other do not wait for each other. A
post whose wait moves stands before the one that it moves to in the programs of all ranks, so no
ranks wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mdfuse.hir.analysis.dataflow import storage
from mdfuse.hir.program import HostProgram, Instruction


@dataclass(frozen=True, slots=True)
class _Send:
    """A post from which nothing arrives at this rank.

    Attributes:
        sent: the name of the buffer.
        wait: where its wait stands.
        to: where that is to stand: before the instruction that stands there, or where it is.
    """

    sent: str
    wait: int
    to: int


def run(program: HostProgram) -> HostProgram:
    """Return a projection that is written out, with waits for sends alone moved up, and frees."""
    sends = [*_sends(program.instructions)]
    moved = {s.wait: s.to for s in sends if s.to != s.wait}
    if not moved:
        return program
    ahead: dict[int, list[Instruction]] = defaultdict(list)
    kept: dict[int, Instruction | None] = {}
    for wait, to in moved.items():
        ahead[to].append(program.instructions[wait])
        kept[wait] = None
    for at, to, names in _freed(program, sends):
        free = kept.get(at, program.instructions[at])
        assert free is not None
        ahead[to].append(free.changed(inputs=tuple(names)))
        left = tuple(n for n in free.reads if n not in names)
        kept[at] = free.changed(inputs=left) if left else None
    rows = ((*ahead.get(n, ()), kept.get(n, i)) for n, i in enumerate(program.instructions))
    return replace(program, instructions=tuple(i for row in rows for i in row if i is not None))


def _sends(code: tuple[Instruction, ...]) -> Iterator[_Send]:
    """Yield the posts of calls and iterations from which nothing arrives, and their waits."""
    posts: dict[str, Instruction] = {}
    next_of: dict[str, tuple[int, int]] = {}
    fresh, before = list[str](), list[str]()  # handles of sends, by whether work came behind them
    switches = 0  # of streams so far, and what else no wait is moved past
    for n, i in enumerate(code):
        if i.op in ("set_stream", "group_start", "barrier"):
            switches += 1
        elif i.op == "post" and isinstance(i.inputs[0], str) and not isinstance(i.inputs[1], str):
            next_of.update(dict.fromkeys(before, (n, switches)))
            before.clear()
            posts[i.outputs[0]] = i
            fresh += [x for x in i.outputs if "@" in x]
        elif i.op == "wait" and i.reads[0] in posts and not i.attrs:
            to, then = next_of.get(i.reads[0], (n, switches))
            yield _Send(posts[i.reads[0]].reads[0], n, to if then == switches else n)
        elif i.op not in ("post", "wait", "alloc", "free"):
            before += fresh
            fresh.clear()


def _freed(program: HostProgram, sends: list[_Send]) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (a free, where names of it are to be freed, these names): behind all waits for them."""
    shared: Mapping[str, str] = storage(program)
    waits: dict[str, list[_Send]] = defaultdict(list)
    for send in sends:
        waits[shared.get(send.sent, send.sent)].append(send)
    uses: dict[str, list[int]] = defaultdict(list)
    for n, i in enumerate(program.instructions):
        for memory in {shared.get(x, x) for x in (*i.reads, *i.outputs)}.intersection(waits):
            if i.op == "free" and any(s.to != s.wait < n for s in waits[memory]):
                to = max(s.to + (s.to == s.wait) for s in waits[memory] if s.wait < n)
                if all(use < to for use in uses[memory]):
                    yield n, to, [x for x in i.reads if shared.get(x, x) == memory]
            uses[memory].append(n)
