"""Let all pieces of a shard be under way in a ring, in what is written out.

    send %p@1, recv %a@1                            send %p@1, recv %a@1
    send %p@2, recv %a@2                            send %p@2, recv %a@2
    wait, free %p@1                                 send %p@3, recv %a@3
    send %p@3, recv %a@3                   ->       send %p@4, recv %a@4
    wait, free %p@2                                 wait, free %p@1
    send %p@4, recv %a@4                            send %p@5, recv %a@5
    wait, free %p@3                                 wait, free %p@2

Iterations of a loop take turns, so that one post is ahead of the waits of the one before. Of rings
that send shards in pieces more may be: a piece is told of, copied and answered for in about the
same time, however small it is, and what is posted behind a wait is not told of before. Waits behind
which nothing is done but freeing are put off until as much is under way as if shards went whole.
They stay on their stream, behind no use of what they free, and in their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mdfuse.hir.instructions import TRANSFERS, row_of
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.regions import Regions


@dataclass(frozen=True, slots=True)
class _Release:
    """Waits for a send, a receive or both, and frees behind them.

    Attributes:
        start, stop: where they stand.
        transfers: what is waited for.
    """

    start: int
    stop: int
    transfers: tuple[Instruction, ...]


def run(program: HostProgram) -> HostProgram:
    """Return a projection that is written out, whose rings have more pieces under way."""
    code = program.instructions
    if not any(i.op == "send" for i in code):
        return program
    rows: dict[int, Sequence[Instruction]] = {}
    regions = Regions(program)
    for found in _families(code).values():
        ahead = 2 * (_pieces(found) - 1)
        if ahead and all(_may_move(regions, r, found, n + ahead) for n, r in enumerate(found)):
            rows.update(_moved(code, found, ahead))
    kept = (rows.get(n, (i,)) for n, i in enumerate(code))
    return replace(program, instructions=tuple(i for row in kept for i in row)) if rows else program


def _families(code: Sequence[Instruction]) -> Mapping[object, list[_Release]]:
    """Return the releases of the same posts of a loop on the same stream, in order."""
    posts = {i.outputs[0]: i for i in code if i.op in TRANSFERS}
    found: defaultdict[object, list[_Release]] = defaultdict(list)
    stream: object = None
    for is_release, some in groupby(enumerate(code), key=lambda x: x[1].op in ("wait", "free")):
        places = [*some]
        if not is_release:
            streams = [(i.inputs, i.attrs) for _, i in places if i.op == "set_stream"]
            stream = streams[-1] if streams else stream
            continue
        handles = [i.reads[0] for _, i in places if i.op == "wait" and not i.attrs]
        if stream is not None and handles and all(h in posts and "@" in h for h in handles):
            key = stream, tuple(h.partition("@")[0] for h in handles)
            transfers = tuple(posts[h] for h in handles)
            found[key].append(_Release(places[0][0], places[-1][0] + 1, transfers))
    return found


def _pieces(found: Sequence[_Release]) -> int:
    """Return how many transfers in a row go to one rank, or come from it, at most."""
    peers = (next(v for k, v in r.transfers[0].attrs if k in ("to", "from")) for r in found)
    return max(len([*some]) for _, some in groupby(peers))


def _may_move(regions: Regions, one: _Release, found: Sequence[_Release], to: int) -> bool:
    """Tell whether nothing between a release and where it goes needs it."""
    code = regions.code
    last = found[min(to, len(found) - 1)]
    gone = {x for i in code[one.start : one.stop] if i.op == "free" for x in i.reads}
    ours = {n for r in found for n in range(r.start, r.stop)}
    for n in range(one.stop, last.start):
        i = code[n]
        if n in ours:
            continue
        if not gone.isdisjoint((*i.reads, *i.outputs)):
            return False
        if any(_needs(regions, i, transfer) for transfer in one.transfers):
            return False
    return True


def _needs(regions: Regions, i: Instruction, transfer: Instruction) -> bool:
    """Tell whether an instruction writes what is sent, or touches what is received."""
    row = row_of(i)
    if i.op in ("alloc", "free", "own") or (row is not None and row.is_pure_view):
        return False
    (name,) = transfer.reads
    names = (*i.outputs, *(i.reads if transfer.op == "recv" or i.op == "recv" else ()))
    return any(regions.meet(x, name) for x in names if regions.memory(x) == regions.memory(name))


def _moved(
    code: Sequence[Instruction], found: Sequence[_Release], ahead: int
) -> Iterator[tuple[int, Sequence[Instruction]]]:
    """Yield what stands in the place of releases: those of so many posts before."""
    for r in found:
        yield from ((n, ()) for n in range(r.start, r.stop))
    last = len(found) - 1
    for n, r in enumerate(found):
        first = n - ahead
        here = range(max(first, 0), (last if n == last else first) + 1)
        yield r.start, [i for x in here for i in code[found[x].start : found[x].stop]]
