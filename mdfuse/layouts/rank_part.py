"""One rank's part of a communication: what it posts, and what it copies by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from mdfuse.layouts.boxes import Box, box_size, intersect, nth_chunk, relative
from mdfuse.layouts.call import Call
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh


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
        call: what the backend posts; None for nothing.
        sends: for each of `call.sends`, the box of the source buffer.
        recvs: for each of `call.recvs`, the box of the destination buffer.
        copies: (box of the source buffer, box of the destination buffer) of elements that stay on
            the rank.
    """

    call: Call | None = None
    sends: tuple[Box, ...] = ()
    recvs: tuple[Box, ...] = ()
    copies: tuple[tuple[Box, Box], ...] = ()


def part_of(comm: Family, rank: int) -> RankPart:
    """Return what a rank posts, and what it copies by itself."""
    team = comm.team(rank)
    if comm.kind == "Exchange":
        return _exchange(comm, rank)
    if comm.kind == "SendRecv":
        return _send_recv(comm, rank)
    if comm.kind == "AllToAll":
        return _all_to_all(comm, rank, team) if team else RankPart()
    return _with_root(comm, rank, team)


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
        box = _whole(comm.source.intervals(comm.shape, rank))
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
    """Whether a rank has what is broadcast already: as the root, or as a rank of both meshes."""
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
    here = comm.source.intervals(comm.shape, rank)
    after = comm.destination.intervals(comm.shape, rank)
    n = len(team)
    shared = after[comm.dim]
    target = here[comm.to_dim]
    rest = math.prod(
        stop - start for d, (start, stop) in enumerate(here) if d not in (comm.dim, comm.to_dim)
    )
    rows, mine = _length(here[comm.dim]), _length(after[comm.to_dim])
    call = Call(
        kind="AllToAll",
        team=team,
        rank=rank,
        send_counts=tuple(rows * rest * _length(nth_chunk(target, n, i)) for i in range(n)),
        recv_counts=tuple(mine * rest * _length(nth_chunk(shared, n, i)) for i in range(n)),
    )
    return RankPart(call=call)


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def _send_recv(comm: Family, rank: int) -> RankPart:
    """Send the i-th sender's part to the i-th receiver."""
    sends: list[tuple[int, Box]] = []
    recvs: list[tuple[int, Box]] = []
    copies: list[tuple[Box, Box]] = []
    pairs = zip(comm.source.mesh.ranks, comm.destination.mesh.ranks, strict=True)
    for sender, receiver in pairs:
        if rank not in (sender, receiver):
            continue
        box = _whole(comm.source.intervals(comm.shape, sender))
        if sender == receiver:
            copies.append((box, box))
        elif rank == sender:
            sends.append((receiver, box))
        else:
            recvs.append((sender, box))
    return _point_to_point(comm, rank, sends, recvs, copies)


def _exchange(comm: Family, rank: int) -> RankPart:
    """Return a rank's part of an Exchange: it receives each box that it lacks from one holder.

    Along axes along which the value stays Partial, each term is exchanged by itself, among the
    ranks at one coordinate.
    """
    source, destination, shape = comm.source, comm.destination, comm.shape
    sends: list[tuple[int, Box]] = []
    recvs: list[tuple[int, Box]] = []
    copies: list[tuple[Box, Box]] = []
    have = source.intervals(shape, rank) if rank in source.mesh else None
    if rank in destination.mesh:
        need = destination.intervals(shape, rank)
        index = destination.mesh.ranks.index(rank)
        for holders, block in _holders(source, shape, need, _layer(source, rank)):
            inside = relative(block, need)
            if rank in holders:
                assert have is not None
                copies.append((relative(block, have), inside))
            else:
                recvs.append((_choose(holders, index), inside))
    if have is not None and box_size(have):
        for index, receiver in enumerate(destination.mesh.ranks):
            wanted = intersect(have, destination.intervals(shape, receiver))
            if wanted is None or receiver == rank:
                continue
            if source.partial_axes and _layer(source, receiver) != _layer(source, rank):
                continue
            holders = _holders_at(source, rank)
            if receiver not in holders and _choose(holders, index) == rank:
                sends.append((receiver, relative(wanted, have)))
    return _point_to_point(comm, rank, sends, recvs, copies)


def _layer(source: Layout, rank: int) -> dict[str, int]:
    """Return which term of a Partial value a rank has a part of: Partial axis -> coordinate."""
    coordinate = source.mesh.coordinate(rank)
    if coordinate is None:
        return {}
    return {a: coordinate[source.mesh.axis_index(a)] for a in source.partial_axes}


def _holders(
    source: Layout, shape: Sequence[int], need: Box, layer: dict[str, int]
) -> Iterator[tuple[list[int], Box]]:
    """Cut a needed box as the source layout does; yield (ranks that hold it, box) for each."""
    chunks = []
    for dim, extent in enumerate(shape):
        start, stop = need[dim]
        chunks.append(
            [
                (dict(zip(source.split_axes(dim), choice, strict=True)), interval)
                for choice, interval in source.chunks_of(dim, extent)
                if max(start, interval[0]) < min(stop, interval[1])
            ]
        )
    for pieces in product(*chunks):
        fixed = {axis: i for choice, _ in pieces for axis, i in choice.items()} | layer
        block = intersect(tuple(interval for _, interval in pieces), need)
        if block is not None:
            yield _ranks_with(source.mesh, fixed), block


def _holders_at(source: Layout, rank: int) -> list[int]:
    """Return the ranks that hold the same part as `rank`."""
    coordinate = source.mesh.coordinate(rank)
    assert coordinate is not None
    here = dict(zip(source.mesh.axes, coordinate, strict=True))
    split = {a: here[a] for _, axes in source.splits for a in axes}
    return _ranks_with(source.mesh, split | _layer(source, rank))


def _ranks_with(mesh: DeviceMesh, fixed: dict[str, int]) -> list[int]:
    """Return the ranks of a mesh at fixed coordinates along some axes."""
    ranges = [
        (fixed[a],) if a in fixed else range(n) for a, n in zip(mesh.axes, mesh.shape, strict=True)
    ]
    return [mesh.rank_at(c) for c in product(*ranges)]


def _choose(holders: list[int], index: int) -> int:
    """Return the holder from which the index-th receiver gets a box: all of them take turns."""
    return holders[index % len(holders)]


def _point_to_point(
    comm: Family,
    rank: int,
    sends: list[tuple[int, Box]],
    recvs: list[tuple[int, Box]],
    copies: list[tuple[Box, Box]],
) -> RankPart:
    """Return a rank's part of sends and receives between pairs; empty boxes are left out."""
    sends = [(peer, box) for peer, box in sends if box_size(box)]
    recvs = [(peer, box) for peer, box in recvs if box_size(box)]
    kept = tuple(pair for pair in copies if box_size(pair[0]))
    if not sends and not recvs:
        return RankPart(copies=kept)
    call = Call(
        kind=comm.kind,
        team=comm.whole_group,
        rank=rank,
        sends=tuple(peer for peer, _ in sends),
        recvs=tuple(peer for peer, _ in recvs),
    )
    return RankPart(
        call=call,
        sends=tuple(box for _, box in sends),
        recvs=tuple(box for _, box in recvs),
        copies=kept,
    )
