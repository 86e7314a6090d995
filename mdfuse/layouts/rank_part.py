"""One rank's part of a communication: its posts and its local copies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from mdfuse.layouts.boxes import Box, Rows, box_size, has_rows, meet, nth_chunk, within
from mdfuse.layouts.call import Call
from mdfuse.layouts.endpoints import Side
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.layout import Layout


class Family(Protocol):
    """The part of `mdfuse.communication.Communication` that this module uses."""

    @property
    def kind(self) -> str: ...
    @property
    def source(self) -> Layout: ...
    @property
    def destination(self) -> Layout: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dim(self) -> int | None: ...
    @property
    def to_dim(self) -> int | None: ...
    @property
    def reduce_op(self) -> str | None: ...
    @property
    def whole_group(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...
    def team(self, rank: int) -> tuple[int, ...]: ...
    def root(self, rank: int) -> int | None: ...
    def rows(self, rank: int) -> tuple[int, int]: ...
    def front(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """One rank's part of a communication.

    Attributes:
        call: the call that the backend posts; None for nothing.
        sends: for each of `call.sends`, the box of the source buffer.
        recvs: for each of `call.recvs`, the box of the destination buffer.
        copies: (box of the source buffer, box of the destination buffer) of elements that stay on
            the rank.
        terms: ReduceExchange: for each box of the destination buffer, its terms in order, each the
            number of a receive, or of a copy, counted from -1 down.
    """

    call: Call | None = None
    sends: tuple[Box, ...] = ()
    recvs: tuple[Box, ...] = ()
    copies: tuple[tuple[Box, Box], ...] = ()
    terms: tuple[tuple[int, ...], ...] = ()


def part_of(comm: Family, rank: int) -> RankPart:
    """Return the posts and the local copies of a rank."""
    if comm.kind in ("Exchange", "ReduceExchange"):
        return _exchange(comm, rank)
    if comm.kind == "SendRecv":
        return _send_recv(comm, rank)
    team = comm.team(rank)
    if comm.kind == "AllToAll":
        return _all_to_all(comm, rank, team) if team else RankPart()
    return _with_root(comm, rank, team)


def touched(comm: Family, rank: int) -> tuple[bool, bool]:
    """Return whether a rank reads the source of an Exchange, and whether it writes its destination.

    The test stops at the first message that decides: among thousands of ranks each may have
    thousands.
    """
    source, destination = Side(comm.source, comm.shape), Side(comm.destination, comm.shape)
    exchange = Exchange(source, destination)
    held_at, needed_at = source.at(rank), destination.at(rank)
    writes = needed_at is not None and all(map(has_rows, destination.rows(needed_at)))
    if held_at is None or not _is_wanted(source.rows(held_at), destination):
        return False, writes
    reads = any(box_size(box) for _, box in exchange.sent(rank))
    if not reads and writes:
        reads = any(peer == rank and box_size(box) for peer, box, _ in exchange.received(rank))
    return reads, writes


def _is_wanted(rows: tuple[Rows, ...], destination: Side) -> bool:
    """Return whether any rank may lack some rows, judged by dims that are equal on all ranks."""
    alike = [dim for dim, axes in enumerate(destination.split) if not axes]
    return all(meet(rows[dim], destination.rows_of(dim, {})) for dim in alike)


def _whole(box: Box) -> Box:
    """Return the box of a whole buffer that holds the elements of a box."""
    return tuple((0, stop - start) for start, stop in box)


def _with_root(comm: Family, rank: int, team: tuple[int, ...]) -> RankPart:
    """Return a rank's part of a collective that sends whole buffers: of any kind but AllToAll."""
    source, destination = comm.source.mesh, comm.destination.mesh
    copies: tuple[tuple[Box, Box], ...] = ()
    parts: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    if comm.kind == "Scatter":
        receivers = destination.ranks
        lacking = [(i, r) for i, r in enumerate(receivers) if r not in source]
        parts, blocks = tuple(r for _, r in lacking), tuple(i for i, _ in lacking)
        if rank in source and rank in destination:
            copies = (_own_block(comm, receivers.index(rank)),)
    elif comm.kind == "Broadcast" and _keeps_own(comm, rank):
        box = _whole(comm.source.box(comm.shape, rank))
        copies = ((box, box),)
    elif comm.kind == "Gather":
        parts = source.ranks
    if len(team) < 2 and comm.kind in ("Broadcast", "Scatter"):
        return RankPart(copies=copies)
    if not team:
        return RankPart(copies=copies)
    call = Call(
        kind=comm.kind,
        team=team,
        rank=rank,
        root=comm.root(rank),
        reduce_op=comm.reduce_op,
        parts=parts,
        blocks=blocks,
        source_blocks=comm.size if comm.kind == "Scatter" else None,
    )
    return RankPart(call=call, copies=copies)


def _keeps_own(comm: Family, rank: int) -> bool:
    """True if a rank has the broadcast value already: as the root, or as a rank of both meshes."""
    if comm.source.mesh == comm.destination.mesh:
        return comm.root(rank) == rank
    return rank in comm.source.mesh and rank in comm.destination.mesh


def _own_block(comm: Family, i: int) -> tuple[Box, Box]:
    """Return a Scatter's i-th block of the padded, permuted source, and the whole destination."""
    assert comm.dim is not None
    _, chunk = comm.rows(comm.source.mesh.first)

    def rows(start: int, stop: int) -> Box:
        local = comm.source.local_shape(comm.shape)
        return tuple((start, stop) if d == comm.dim else (0, local[d]) for d in comm.front())

    return rows(i * chunk, (i + 1) * chunk), rows(0, chunk)


def _all_to_all(comm: Family, rank: int, team: tuple[int, ...]) -> RankPart:
    """Return a rank's part of an AllToAll: for each member, its rows of `dim` x their `to_dim`."""
    assert comm.dim is not None and comm.to_dim is not None
    box = comm.source.box(comm.shape, rank)
    after = comm.destination.box(comm.shape, rank)
    n = len(team)
    shared = after[comm.dim]
    target = box[comm.to_dim]
    others = math.prod(
        stop - start for d, (start, stop) in enumerate(box) if d not in (comm.dim, comm.to_dim)
    )
    rows, mine = _length(box[comm.dim]), _length(after[comm.to_dim])
    call = Call(
        kind="AllToAll",
        team=team,
        rank=rank,
        send_counts=tuple(rows * others * _length(nth_chunk(target, n, i)) for i in range(n)),
        recv_counts=tuple(mine * others * _length(nth_chunk(shared, n, i)) for i in range(n)),
    )
    return RankPart(call=call)


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def _send_recv(comm: Family, rank: int) -> RankPart:
    """Send the i-th sender's part to the i-th receiver."""
    sends: list[tuple[int, Box]] = []
    recvs: list[tuple[int, Box]] = []
    copies: list[tuple[Box, Box]] = []
    meshes = comm.source.mesh, comm.destination.mesh
    positions = {p for mesh in meshes if (p := mesh.position(rank)) is not None}
    for position in sorted(positions):
        sender, receiver = (mesh.ranks[position] for mesh in meshes)
        box = _whole(comm.source.box(comm.shape, sender))
        if not box_size(box):
            continue
        if sender == receiver:
            copies.append((box, box))
        elif rank == sender:
            sends.append((receiver, box))
        else:
            recvs.append((sender, box))
    return _point_to_point(comm, rank, sends, recvs, copies)


def _exchange(comm: Family, rank: int) -> RankPart:
    """Return a rank's part of an Exchange: it receives each box that it lacks from one holder.

    Along axes that stay Partial, each term is exchanged by itself. Along reduced axes, a rank
    receives each box of each term.
    """
    source, destination = Side(comm.source, comm.shape), Side(comm.destination, comm.shape)
    exchange = Exchange(source, destination)
    held_at, needed_at = source.at(rank), destination.at(rank)
    have = source.rows(held_at) if held_at is not None else ()
    need = destination.rows(needed_at) if needed_at is not None else ()
    pieces = [*exchange.received(rank)]
    sends = _within([*exchange.sent(rank)], have)
    recvs = [(peer, within(box, need)) for peer, box, _ in pieces if peer != rank]
    copies = [(within(b, have), within(b, need)) for peer, b, _ in pieces if peer == rank]
    part = _point_to_point(comm, rank, sends, recvs, copies)
    if comm.kind == "Exchange":
        return part
    recv, copy, terms = count(), count(), list[int]()
    for peer, _, _ in pieces:
        terms.append(-1 - next(copy) if peer == rank else next(recv))
    n = source.count(exchange.reduced)
    return replace(part, terms=tuple(tuple(terms[i : i + n]) for i in range(0, len(terms), n)))


def _within(sent: list[tuple[int, Box]], have: tuple[Rows, ...]) -> list[tuple[int, Box]]:
    """Return a rank's sends as boxes of its part; many receivers in a row get the same box."""
    sends, last, part = list[tuple[int, Box]](), None, Box()
    for peer, box in sent:
        if box is not last:
            last, part = box, within(box, have)
        sends.append((peer, part))
    return sends


def _point_to_point(
    comm: Family,
    rank: int,
    sends: list[tuple[int, Box]],
    recvs: list[tuple[int, Box]],
    copies: list[tuple[Box, Box]],
) -> RankPart:
    """Return a rank's part of sends and receives between pairs, without empty boxes."""
    own_copies = tuple(copies)
    if not sends and not recvs:
        return RankPart(copies=own_copies)
    call = Call(
        kind="Exchange" if comm.kind == "ReduceExchange" else comm.kind,
        team=comm.whole_group,
        rank=rank,
        sends=tuple(peer for peer, _ in sends),
        recvs=tuple(peer for peer, _ in recvs),
    )
    return RankPart(
        call=call,
        sends=tuple(box for _, box in sends),
        recvs=tuple(box for _, box in recvs),
        copies=own_copies,
    )
