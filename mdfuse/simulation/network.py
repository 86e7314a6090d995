"""The network of simulated ranks: match their posts, and move bytes between their buffers.

The network sees what any backend sees, never a layout. A mismatch is an error at once; a post that
a rank never makes is one as soon as no rank can go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mdfuse.backends.base import PostSite
from mdfuse.errors import CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import COLLECTIVE, POINT_TO_POINT, by_kind, source_blocks
from mdfuse.layouts.reduction import combine


@dataclass(slots=True)
class SimWork:
    """The work of a post of one rank; done once every piece of the post was moved."""

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


#: One side of a transfer between two ranks: a buffer, and the post that it belongs to.
_Piece = tuple[Tensor, SimWork]


@dataclass(slots=True)
class SimNetwork:
    """The network of the simulated ranks: it matches posts and moves the bytes.

    Posts of a team meet in the order in which each rank's host issues (`announce`s) them, as in
    the libraries; they begin once all of them have arrived. What is ready to move is moved at once,
    or, with `is_late`, when `move` is called.
    """

    is_late: bool = False
    ready: list[Callable[[], None]] = field(default_factory=list)
    #: (team, how many-th post of it) -> rank -> post
    meetings: dict[tuple[tuple[int, ...], int], dict[int, _Posted]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    counts: dict[object, int] = field(default_factory=lambda: defaultdict(int))
    #: (sender, receiver, how many-th) -> the piece under way, and the place that waits for it
    sent: dict[tuple[int, int, int], _Piece] = field(default_factory=dict)
    #: rank -> bytes of counted rows that reached it from others
    arrived: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    awaited: dict[tuple[int, int, int], _Piece] = field(default_factory=dict)

    def bind(self, call: Call) -> SimPoster:
        """Prepare a call of one of the ranks; teams need no resources here."""
        return SimPoster(self, call)

    def announce(self, call: Call) -> list[int]:
        """Take the numbers of a post in the order of posts.

        A collective has one number, in its team; of sends and receives each piece has one, between
        its two ranks.
        """
        if call.kind not in POINT_TO_POINT:
            return [self._next((call.team, call.rank))]
        outgoing = [self._next(("send", call.rank, peer)) for peer in call.sends]
        return outgoing + [self._next(("recv", peer, call.rank)) for peer in call.recvs]

    def _next(self, key: object) -> int:
        self.counts[key] += 1
        return self.counts[key] - 1

    def post(self, posted: _Posted, numbers: list[int]) -> None:
        """Take a post, and begin the transfers that waited for it."""
        if posted.call.kind in POINT_TO_POINT:
            self._post_pieces(posted, numbers)
            return
        team = posted.call.team
        meeting = self.meetings[team, numbers[0]]
        meeting[posted.call.rank] = posted
        if len(meeting) < len(team):
            return
        del self.meetings[team, numbers[0]]
        _check(team, meeting)
        for rank, p in meeting.items():
            if p.call.is_counted:
                mine = p.call.recv_counts[team.index(rank)]
                self.arrived[rank] += (sum(p.call.recv_counts) - mine) * p.dsts[0].itemsize
        self._begin(lambda: _move(team, meeting))

    def _begin(self, transfer: Callable[[], None]) -> None:
        if self.is_late:
            self.ready.append(transfer)
        else:
            transfer()

    def move(self, n: int) -> None:
        """Carry out one of the transfers that are ready."""
        self.ready.pop(n)()

    def _post_pieces(self, posted: _Posted, numbers: list[int]) -> None:
        call, rank = posted.call, posted.call.rank
        posted.work.missing = len(call.sends) + len(call.recvs)
        outgoing, incoming = numbers[: len(call.sends)], numbers[len(call.sends) :]
        for peer, src, n in zip(call.sends, posted.srcs, outgoing, strict=True):
            self.sent[rank, peer, n] = (src, posted.work)
            self._meet((rank, peer, n))
        for peer, dst, n in zip(call.recvs, posted.dsts, incoming, strict=True):
            self.awaited[peer, rank, n] = (dst, posted.work)
            self._meet((peer, rank, n))

    def _meet(self, key: tuple[int, int, int]) -> None:
        if key not in self.sent or key not in self.awaited:
            return
        (src, sending), (dst, receiving) = self.sent.pop(key), self.awaited.pop(key)
        if src.numel() != dst.numel() or src.dtype != dst.dtype:
            sender, receiver, _ = key
            raise CommunicationError(
                f"rank {sender} sends {src.numel()} x {src.dtype} to rank {receiver}, which "
                f"expects {dst.numel()} x {dst.dtype}",
                because="a send and its receive have one size and one dtype",
            )

        def transfer() -> None:
            dst.copy_(src.reshape(dst.shape))
            sending.missing -= 1
            receiving.missing -= 1

        self._begin(transfer)

    def check_finished(self, stuck: Sequence[str]) -> None:
        """Raise CommunicationError where ranks are stuck (a line each), or posts are left over."""
        left = self._leftovers()
        if stuck or left:
            raise CommunicationError(
                "no rank can go on" if stuck else "posts that nobody answered",
                where=[*stuck, *left],
                because="each waits for a communication that another rank has not posted",
            )

    def _leftovers(self) -> list[str]:
        """Return a line for each post that never met its counterpart."""
        left = [
            f"{p.call.kind} of team {team}: only ranks {sorted(meeting)} arrived"
            for (team, _), meeting in self.meetings.items()
            for p in list(meeting.values())[:1]
        ]
        left += [f"rank {s} sent to rank {r}, which did not receive" for s, r, _ in self.sent]
        left += [f"rank {r} awaits rank {s}, which did not send" for s, r, _ in self.awaited]
        return left


def _move(team: tuple[int, ...], meeting: dict[int, _Posted]) -> None:
    _MOVES[meeting[team[0]].call.kind]([meeting[r] for r in team])
    for p in meeting.values():
        p.work.missing = 0


@dataclass(slots=True)
class SimPoster:
    """A call bound to one simulated rank."""

    network: SimNetwork
    call: Call
    numbers: list[int] | None = None

    def announce(self) -> None:
        """Take the next place in the order of posts, for the post that follows."""
        self.numbers = self.network.announce(self.call)

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> SimWork:
        if self.numbers is None:
            self.announce()
        numbers, self.numbers = self.numbers, None
        assert numbers is not None
        work = SimWork(self.call)
        self.network.post(_Posted(self.call, srcs, dsts, work), numbers)
        return work

    def prepare(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite) -> None:
        """Do nothing: there is no library to be told of buffers."""


def _check(team: tuple[int, ...], meeting: dict[int, _Posted]) -> None:
    """Raise CommunicationError unless all members post the same kind, reduce op, root and dtype."""
    first = meeting[team[0]]
    for rank in team:
        posted = meeting[rank]
        for what in ("kind", "reduce_op", "root"):
            mine, theirs = getattr(posted.call, what), getattr(first.call, what)
            if mine != theirs:
                raise CommunicationError(
                    f"team {team}: rank {rank} posts {posted.call.kind} with {what}={mine}, "
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


def _reduced(posts: list[_Posted]) -> Tensor:
    op = posts[0].call.reduce_op
    assert op is not None
    return combine(op, _joined(posts))


def _spread(whole: Callable[[list[_Posted]], Tensor], posts: list[_Posted]) -> None:
    """Fill the destination of each rank that has one with the same elements."""
    elements = whole(posts)
    for p in posts:
        for dst in p.dsts:
            _fill(dst, elements, p)


def _reduce_scatter(posts: list[_Posted]) -> None:
    total = _reduced(posts)
    for p, block in zip(posts, total.reshape(len(posts), -1), strict=True):
        _fill(p.dsts[0], block, p)


def _gather(posts: list[_Posted]) -> None:
    root = _at_root(posts)
    by_rank = {p.call.rank: p for p in posts}
    _fill(root.dsts[0], _joined([by_rank[r] for r in root.call.parts]), root)


def _scatter(posts: list[_Posted]) -> None:
    root = _at_root(posts)
    by_rank = {p.call.rank: p for p in posts}
    n = source_blocks(root.call)
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


_MOVES: dict[str, Callable[[list[_Posted]], None]] = by_kind(
    {
        "Allgather": partial(_spread, _joined),
        "Allreduce": partial(_spread, _reduced),
        "Reduce": partial(_spread, _reduced),
        "ReduceScatter": _reduce_scatter,
        "Broadcast": partial(_spread, lambda posts: _at_root(posts).srcs[0]),
        "Gather": _gather,
        "Scatter": _scatter,
        "AllToAll": _all_to_all,
    },
    COLLECTIVE,
)
