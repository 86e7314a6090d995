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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mdfuse.hir.analysis.dataflow import Dataflow, dataflow
from mdfuse.hir.edits import Edits
from mdfuse.hir.instructions import only_sends
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
    if all(s.to == s.wait for s in sends):
        return program
    flow, edits = dataflow(program), Edits(program.instructions)
    for send in sends:
        if send.to != send.wait:
            edits.move(send.wait, send.to)
    for at, to, names in sorted(_freed(flow, sends)):
        edits.unfree(at, names)
        edits.ahead[to].append(flow.code[at].changed(inputs=names))
    return replace(program, instructions=edits.result())


def _sends(code: Sequence[Instruction]) -> Iterator[_Send]:
    """Yield the posts of calls and iterations from which nothing arrives, and their waits."""
    posts: dict[str, Instruction] = {}
    next_of: dict[str, tuple[int, int]] = {}
    fresh, before = list[str](), list[str]()  # handles of sends, by whether work came behind them
    switches = 0  # of streams so far, and what else no wait is moved past
    for n, i in enumerate(code):
        if i.op in ("set_stream", "group_start", "group_end", "barrier"):
            switches += 1
        elif only_sends(i):
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


def _freed(flow: Dataflow, sends: list[_Send]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Yield (a free, where names of it are to be freed, these names): behind all waits for them."""
    waits = defaultdict[str, list[_Send]](list)
    for send in sends:
        waits[flow.memory(send.sent)].append(send)
    for memory, of in waits.items():
        last_use = -1
        for n in dict.fromkeys(n for n, _ in flow.touches[memory]):
            if flow.code[n].op == "free" and any(s.to != s.wait < n for s in of):
                to = max(s.to + (s.to == s.wait) for s in of if s.wait < n)
                if last_use < to:
                    yield n, to, tuple(x for x in flow.code[n].reads if flow.memory(x) == memory)
            last_use = n
