"""Every rank in one process: posts are matched and bytes are moved between the ranks' buffers.

It sees what any backend sees, never a layout. A mismatch is an error at once; a rank that never
arrives is one as soon as nobody else can go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mdfuse.backends.base import POINT_TO_POINT, Call, Poster
from mdfuse.backends.reduction import combine
from mdfuse.errors import CommunicationError


@dataclass(slots=True)
class SimWork:
    """A post of one rank; done once every piece of it was matched."""

    call: Call
    missing: int = 1

    @property
    def is_done(self) -> bool:
        return self.missing == 0

    def wait(self) -> None:
        """Return at once: whoever steps the ranks asks `is_done` first."""
        if not self.is_done:
            raise CommunicationError(f"rank {self.call.rank} waits for a post that is not done")


@dataclass(slots=True)
class _Posted:
    call: Call
    srcs: Sequence[Tensor]
    dsts: Sequence[Tensor]
    work: SimWork


@dataclass(slots=True)
class SimNetwork:
    """Where the simulated ranks meet."""

    #: (team, how many-th post of it) -> rank -> post
    meetings: dict[tuple[tuple[int, ...], int], dict[int, _Posted]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    counts: dict[tuple[tuple[int, ...], int], int] = field(default_factory=lambda: defaultdict(int))
    #: (sender, receiver) -> pieces under way, and places that wait for one
    sent: dict[tuple[int, int], list[tuple[Tensor, SimWork]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    awaited: dict[tuple[int, int], list[tuple[Tensor, SimWork]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def backend(self, rank: int) -> SimBackend:
        """The backend of one simulated rank."""
        return SimBackend(self, rank)

    def post(self, posted: _Posted) -> None:
        """Take a post; move bytes where it was the last that was missing."""
        if posted.call.kind in POINT_TO_POINT:
            self._post_pieces(posted)
            return
        team, rank = posted.call.team, posted.call.rank
        nth = self.counts[team, rank]
        self.counts[team, rank] += 1
        meeting = self.meetings[team, nth]
        meeting[rank] = posted
        if len(meeting) < len(team):
            return
        del self.meetings[team, nth]
        _check(team, meeting)
        _MOVES[posted.call.kind]([meeting[r] for r in team])
        for p in meeting.values():
            p.work.missing = 0

    def _post_pieces(self, posted: _Posted) -> None:
        call, rank = posted.call, posted.call.rank
        posted.work.missing = len(call.sends) + len(call.recvs)
        for peer, src in zip(call.sends, posted.srcs, strict=True):
            self.sent[rank, peer].append((src, posted.work))
            self._meet(rank, peer)
        for peer, dst in zip(call.recvs, posted.dsts, strict=True):
            self.awaited[peer, rank].append((dst, posted.work))
            self._meet(peer, rank)

    def _meet(self, sender: int, receiver: int) -> None:
        key = sender, receiver
        while self.sent[key] and self.awaited[key]:
            (src, sending), (dst, receiving) = self.sent[key].pop(0), self.awaited[key].pop(0)
            if src.numel() != dst.numel() or src.dtype != dst.dtype:
                raise CommunicationError(
                    f"rank {sender} sends {src.numel()} x {src.dtype} to rank {receiver}, which "
                    f"expects {dst.numel()} x {dst.dtype}",
                    because="a send and its receive have one size and one dtype",
                )
            dst.copy_(src.reshape(dst.shape))
            sending.missing -= 1
            receiving.missing -= 1

    def leftovers(self) -> list[str]:
        """Posts that never met their counterpart."""
        left = [
            f"{p.call.kind} of team {team}: only ranks {sorted(meeting)} arrived"
            for (team, _), meeting in self.meetings.items()
            for p in list(meeting.values())[:1]
        ]
        left += [
            f"rank {s} sent to rank {r}, which did not receive"
            for (s, r), q in self.sent.items()
            if q
        ]
        left += [
            f"rank {r} awaits rank {s}, which did not send"
            for (s, r), q in self.awaited.items()
            if q
        ]
        return left


class SimBackend:
    """One simulated rank's way to the network."""

    name = "sim"

    def __init__(self, network: SimNetwork, rank: int) -> None:
        self.network, self.rank = network, rank

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        """Nothing to make."""

    def bind(self, call: Call) -> Poster:
        """Prepare a call."""

        def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> SimWork:
            work = SimWork(call)
            self.network.post(_Posted(call, srcs, dsts, work))
            return work

        return post


def _check(team: tuple[int, ...], meeting: dict[int, _Posted]) -> None:
    """All members post the same kind, reduce op, root and dtype."""
    first = meeting[team[0]]
    for rank in team:
        here = meeting[rank]
        for what in ("kind", "reduce_op", "root"):
            mine, theirs = getattr(here.call, what), getattr(first.call, what)
            if mine != theirs:
                raise CommunicationError(
                    f"team {team}: rank {rank} posts {here.call.kind} with {what}={mine}, "
                    f"rank {team[0]} posts {first.call.kind} with {what}={theirs}",
                    because="all ranks of a team post the same communications in the same order",
                )
    dtypes = {b.dtype for p in meeting.values() for b in (*p.srcs, *p.dsts)}
    if len(dtypes) > 1:
        raise CommunicationError(f"team {team}: {first.call.kind} of dtypes {dtypes}")


def _fill(dst: Tensor, src: Tensor, posted: _Posted) -> None:
    if dst.numel() != src.numel():
        raise CommunicationError(
            f"{posted.call.kind} on team {posted.call.team}: rank {posted.call.rank} has room for "
            f"{dst.numel()} elements where {src.numel()} arrive",
            because="all ranks of a team post equal sizes",
        )
    dst.copy_(src.reshape(dst.shape))


def _at_root(posts: list[_Posted]) -> _Posted:
    return next(p for p in posts if p.call.rank == p.call.root)


def _joined(posts: list[_Posted]) -> Tensor:
    sizes = {p.srcs[0].numel() for p in posts}
    if len(sizes) > 1:
        raise CommunicationError(
            f"{posts[0].call.kind} on team {posts[0].call.team}: blocks of {sorted(sizes)} "
            "elements",
            because="all ranks of a team post equal sizes",
        )
    return torch.stack([p.srcs[0].reshape(-1) for p in posts])


def _allgather(posts: list[_Posted]) -> None:
    everything = _joined(posts)
    for p in posts:
        _fill(p.dsts[0], everything, p)


def _reduced(posts: list[_Posted]) -> Tensor:
    op = posts[0].call.reduce_op
    assert op is not None
    return combine(op, _joined(posts))


def _allreduce(posts: list[_Posted]) -> None:
    total = _reduced(posts)
    for p in posts:
        _fill(p.dsts[0], total, p)


def _reduce(posts: list[_Posted]) -> None:
    total, root = _reduced(posts), _at_root(posts)
    _fill(root.dsts[0], total, root)


def _reduce_scatter(posts: list[_Posted]) -> None:
    total = _reduced(posts)
    for p, block in zip(posts, total.reshape(len(posts), -1), strict=True):
        _fill(p.dsts[0], block, p)


def _broadcast(posts: list[_Posted]) -> None:
    src = _at_root(posts).srcs[0]
    for p in posts:
        if p.call.rank != p.call.root:
            _fill(p.dsts[0], src, p)


def _gather(posts: list[_Posted]) -> None:
    root = _at_root(posts)
    by_rank = {p.call.rank: p for p in posts}
    _fill(root.dsts[0], _joined([by_rank[r] for r in root.call.parts]), root)


def _scatter(posts: list[_Posted]) -> None:
    root = _at_root(posts)
    by_rank = {p.call.rank: p for p in posts}
    n = root.call.source_blocks or max(root.call.blocks) + 1
    blocks = root.srcs[0].reshape(n, -1)
    for rank, i in zip(root.call.parts, root.call.blocks, strict=True):
        _fill(by_rank[rank].dsts[0], blocks[i], by_rank[rank])


def _all_to_all(posts: list[_Posted]) -> None:
    outgoing = [p.srcs[0].reshape(-1).split(list(p.call.send_counts)) for p in posts]
    for i, p in enumerate(posts):
        pieces = [blocks[i] for blocks in outgoing]
        if [b.numel() for b in pieces] != list(p.call.recv_counts):
            raise CommunicationError(f"AllToAll on team {p.call.team}: counts do not match")
        _fill(p.dsts[0], torch.cat(pieces), p)


_MOVES = {
    "Allgather": _allgather,
    "Allreduce": _allreduce,
    "Reduce": _reduce,
    "ReduceScatter": _reduce_scatter,
    "Broadcast": _broadcast,
    "Gather": _gather,
    "Scatter": _scatter,
    "AllToAll": _all_to_all,
}
