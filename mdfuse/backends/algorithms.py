"""Compose communications from transfers between pairs: the steps of one rank's call, as data.

For libraries that only send and receive. A rank carries out its steps in order: the
local work of a step, then all its transfers at once, and the next step when they have finished.
Between two ranks the i-th send meets the i-th receive, step after step.

One form each, chosen so that every reduction reduces once, all operands together in team order:
partial sums never travel, so narrow floats are rounded once, and results have the same bits on all
ranks in every form.

==============  ================================================================================
Allgather       ring: each rank passes on its last block; blocks cross a slow link once
ReduceScatter   every rank gets its block of every operand, and reduces: as many bytes as a ring
Allreduce       the two in turn; twice (n-1)/n of the operand arrives, the least there is
Reduce          ReduceScatter, then the blocks go to the root (Rabenseifner's form)
Broadcast       binomial tree: log2(n) steps
Gather, Scatter, AllToAll, Exchange, SendRecv
                each piece goes directly to where it is needed
==============  ================================================================================

Small communications take one step instead: every operand or block goes directly to each rank that
needs it. Communications that a library with collectives of its own lacks do so, too, at any size:
`mdfuse.backends.transfers`. Where a member's memory is open to all the others (`Sizes.is_open`),
they read from it directly: no rings and no trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from mdfuse.backends.base import check_call, root_index
from mdfuse.errors import CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import KINDS, by_kind, source_blocks

#: Elements [start, stop) of a buffer.
_Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one of the buffers of a call.

    Attributes:
        side: the buffers that are sent, those that are received, or the composition's own memory.
        start: the first element, of the buffer seen as flat.
        stop: one past the last element.
        index: which buffer of its side.
    """

    side: Literal["src", "dst", "scratch"]
    start: int
    stop: int
    index: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Transfer:
    """A piece to send to another rank, or to receive from it."""

    peer: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of elements between two buffers of this rank."""

    source: Piece
    target: Piece


@dataclass(frozen=True, slots=True)
class Reduce:
    """A reduction of rows, one per member in team order, to one row."""

    rows: Piece
    target: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One step of a composition: local work, then transfers that are under way together.

    Attributes:
        local: done first, in order.
        recvs: posted next; the step is over when all transfers have finished.
        sends: posted after `recvs`.
        is_shared: each member that sends has one piece for all the others.
    """

    local: tuple[Copy | Reduce, ...] = ()
    recvs: tuple[Transfer, ...] = ()
    sends: tuple[Transfer, ...] = ()
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """One rank's part of a communication.

    Attributes:
        steps: in order.
        scratch: the number of elements of temporary memory that the steps need.
    """

    steps: tuple[Round, ...]
    scratch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers of elements of the buffers of one post.

    Attributes:
        srcs: of each buffer that is sent.
        dsts: of each buffer that is received.
        small: how many elements may arrive at a rank in one step, rather than in several.
        is_open: each member reads directly from the memory of any other.
    """

    srcs: tuple[int, ...]
    dsts: tuple[int, ...]
    small: int = 0
    is_open: bool = False


def compose(call: Call, sizes: Sizes) -> Composition:
    """Return the steps of one rank's part of a communication; `sizes.small` is alike everywhere.

    Raises:
        CommunicationError: the kind is unknown, its root is not in the team, or the buffers do
            not have the sizes that the call needs.

    >>> call = Call(kind="Broadcast", team=(0, 1, 2), rank=1, root=0)
    >>> compose(call, Sizes(srcs=(), dsts=(4,))).steps[0].recvs
    (Transfer(peer=0, piece=Piece(side='dst', start=0, stop=4, index=0)),)
    """
    check_call(call, is_prepared=True)
    alone = len(call.team) == 1 and KINDS[call.kind].by_all  # the other kinds have no pair then
    composition = _alone(sizes) if alone else _COMPOSED[call.kind](call, sizes)
    full = map(_without_empty, composition.steps)
    steps = tuple(step for step in full if step.local or step.recvs or step.sends)
    for piece in _pieces(steps):
        _check_fits(call, sizes, piece)
    return replace(composition, steps=steps)


def _without_empty(step: Round) -> Round:
    """Leave out transfers and local work of no elements: neither side posts them."""

    def full(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(t for t in transfers if t.piece.size)

    local = tuple(x for x in step.local if x.target.size)
    return replace(step, local=local, recvs=full(step.recvs), sends=full(step.sends))


def _pieces(steps: Iterable[Round]) -> Iterable[Piece]:
    for step in steps:
        yield from (t.piece for t in (*step.recvs, *step.sends))
        for local in step.local:
            yield local.source if isinstance(local, Copy) else local.rows
            yield local.target


def _check_fits(call: Call, sizes: Sizes, piece: Piece) -> None:
    """Refuse a piece beyond its buffer: libraries see an address and a count, and check no end."""
    has = {"src": sizes.srcs, "dst": sizes.dsts}.get(piece.side)
    if has is not None and piece.stop > has[piece.index]:
        raise CommunicationError(
            f"{call.kind} on team {call.team}: rank {call.rank} has a {piece.side} of "
            f"{has[piece.index]} elements, and needs {piece.stop}",
            because="all ranks of a team post equal sizes",
        )


# -- parts of compositions -------------------------------------------------------------------------


def _index(call: Call) -> int:
    return call.team.index(call.rank)


def _others(call: Call) -> list[tuple[int, int]]:
    """Return index and rank of the other members, beginning with the one behind this rank.

    So the members do not all turn to the same one first.
    """
    i, n = _index(call), len(call.team)
    return [(j, call.team[j]) for j in ((i + s) % n for s in range(1, n))]


def _equal(k: int, n: int) -> list[_Range]:
    return [(i * k, i * k + k) for i in range(n)]


def _split(k: int, n: int) -> list[_Range]:
    """Cut `k` elements into `n` adjacent blocks whose sizes differ by one at most."""
    return list(pairwise(i * k // n for i in range(n + 1)))


def _offsets(counts: Sequence[int]) -> list[_Range]:
    return list(pairwise(accumulate(counts, initial=0)))


def _ring(call: Call, blocks: Sequence[_Range]) -> list[Round]:
    """Pass the blocks of dst round the ring; each member begins with its own block in place."""
    i, n = _index(call), len(call.team)
    left, right = call.team[i - 1], call.team[(i + 1) % n]
    return [
        Round(
            recvs=(Transfer(left, Piece("dst", *blocks[(i - t - 1) % n])),),
            sends=(Transfer(right, Piece("dst", *blocks[(i - t) % n])),),
        )
        for t in range(n - 1)
    ]


def _shared(call: Call, blocks: Sequence[_Range], piece: Piece) -> Round:
    """Bring each member's own piece into its block of dst on all the others."""
    return Round(
        recvs=tuple(Transfer(r, Piece("dst", *blocks[j])) for j, r in _others(call)),
        sends=tuple(Transfer(r, piece) for _, r in _others(call)),
        is_shared=True,
    )


def _operands(call: Call, blocks: Sequence[_Range]) -> tuple[Round, Piece]:
    """Bring each member its block of every src.

    Returns:
        the step, and the scratch rows in which this rank then has its block of each operand.
    """
    i, n = _index(call), len(call.team)
    size = blocks[i][1] - blocks[i][0]
    rows = [Piece("scratch", *row) for row in _equal(size, n)]
    step = Round(
        local=(Copy(Piece("src", *blocks[i]), rows[i]),),
        recvs=tuple(Transfer(r, rows[j]) for j, r in _others(call)),
        sends=tuple(Transfer(r, Piece("src", *blocks[j])) for j, r in _others(call)),
        is_shared=len({*blocks}) == 1,
    )
    return step, Piece("scratch", 0, n * size)


def _reduced(
    call: Call, blocks: Sequence[_Range], target: Piece, then: Iterable[Round] = ()
) -> Composition:
    """Reduce each member's own block into `target`, `then` go on."""
    step, rows = _operands(call, blocks)
    following, *last = [*then] or [Round()]
    following = replace(following, local=(Reduce(rows, target), *following.local))
    end = target.stop if target.side == "scratch" else rows.stop
    return Composition(steps=(step, following, *last), scratch=end)


# -- kinds -----------------------------------------------------------------------------------------


def _alone(sizes: Sizes) -> Composition:
    """Copy each source to its destination: a team of one receives its own sends."""
    pairs = zip(sizes.srcs, sizes.dsts, strict=False)
    copies = (Copy(Piece("src", 0, k), Piece("dst", 0, k)) for k, _ in pairs)
    return Composition(steps=(Round(local=tuple(copies)),))


def _allgather(call: Call, sizes: Sizes) -> Composition:
    (k,), i, n = sizes.srcs, _index(call), len(call.team)
    blocks = _equal(k, n)
    copy = Copy(Piece("src", 0, k), Piece("dst", *blocks[i]))
    if n * k > sizes.small and not sizes.is_open:
        return Composition(steps=(Round(local=(copy,)), *_ring(call, blocks)))
    return Composition(steps=(replace(_shared(call, blocks, copy.source), local=(copy,)),))


def _reduce_scatter(call: Call, sizes: Sizes) -> Composition:
    (k,) = sizes.dsts
    return _reduced(call, _equal(k, len(call.team)), Piece("dst", 0, k))


def _allreduce(call: Call, sizes: Sizes) -> Composition:
    (k,), n = sizes.srcs, len(call.team)
    if n * k <= sizes.small:
        return _reduced(call, [(0, k)] * n, Piece("dst", 0, k))
    blocks = _split(k, n)
    piece = Piece("dst", *blocks[_index(call)])
    spread = [_shared(call, blocks, piece)] if sizes.is_open else _ring(call, blocks)
    return _reduced(call, blocks, piece, spread)


def _reduce(call: Call, sizes: Sizes) -> Composition:
    (k,), n, root = sizes.srcs, len(call.team), root_index(call)
    is_small = n * k <= sizes.small
    blocks = [(0, k if j == root else 0) for j in range(n)] if is_small else _split(k, n)
    start, stop = blocks[_index(call)]
    if call.rank == call.root:
        parts = [] if is_small else [(j, r) for j, r in _others(call)]
        recvs = tuple(Transfer(r, Piece("dst", *blocks[j])) for j, r in parts)
        return _reduced(call, blocks, Piece("dst", start, stop), [Round(recvs=recvs)])
    behind = n * (stop - start)
    target = Piece("scratch", behind, behind + stop - start)
    to_root = Round(sends=(Transfer(call.team[root], target),))
    return _reduced(call, blocks, target, [to_root])


def _broadcast(call: Call, sizes: Sizes) -> Composition:
    """Send along a binomial tree; positions in the team are counted from the root.

    A member's parent is at its own position with the lowest set bit cleared.
    """
    n, root = len(call.team), root_index(call)
    position = (_index(call) - root) % n
    held = Piece("dst" if position else "src", 0, (sizes.dsts if position else sizes.srcs)[0])
    if sizes.is_open:
        from_root = (Transfer(call.team[root], held),) if position else ()
        to_all = () if position else tuple(Transfer(r, held) for _, r in _others(call))
        return Composition(steps=(Round(recvs=from_root, sends=to_all, is_shared=True),))
    lowest = position & -position or 1 << (n - 1).bit_length()
    bits = [1 << b for b in reversed(range(lowest.bit_length() - 1))]  # the largest subtree first
    children = [call.team[(position + b + root) % n] for b in bits if position + b < n]
    parent = call.team[((position & (position - 1)) + root) % n]
    recvs = (Transfer(parent, held),) if position else ()
    sends = tuple(Transfer(child, held) for child in children)
    return Composition(steps=(Round(recvs=recvs), Round(sends=sends)))


def _gather(call: Call, sizes: Sizes) -> Composition:
    root = call.team[root_index(call)]
    piece = Piece("src", 0, sizes.srcs[0] if call.rank in call.parts else 0)
    if call.rank != root:
        return Composition(steps=(Round(sends=(Transfer(root, piece),)),))
    size = sizes.dsts[0] // max(len(call.parts), 1)
    blocks = zip(call.parts, (Piece("dst", *b) for b in _equal(size, len(call.parts))), strict=True)
    local, others = _local_part(call, blocks)
    step = Round(
        local=tuple(Copy(piece, block) for block in local),
        recvs=tuple(Transfer(r, block) for r, block in others),
    )
    return Composition(steps=(step,))


def _scatter(call: Call, sizes: Sizes) -> Composition:
    root = call.team[root_index(call)]
    piece = Piece("dst", 0, sizes.dsts[0] if call.rank in call.parts else 0)
    if call.rank != root:
        return Composition(steps=(Round(recvs=(Transfer(root, piece),)),))
    count = source_blocks(call)
    size = sizes.srcs[0] // max(count, 1)
    pieces = (Piece("src", b * size, b * size + size) for b in call.blocks)
    local, others = _local_part(call, zip(call.parts, pieces, strict=True))
    step = Round(
        local=tuple(Copy(block, piece) for block in local),
        sends=tuple(Transfer(r, block) for r, block in others),
    )
    return Composition(steps=(step,))


def _local_part(
    call: Call, blocks: Iterable[tuple[int, Piece]]
) -> tuple[list[Piece], list[tuple[int, Piece]]]:
    """Separate the pieces that stay on this rank from those of other ranks, each with its rank."""
    pairs = [*blocks]
    return [b for r, b in pairs if r == call.rank], [(r, b) for r, b in pairs if r != call.rank]


def _alltoall(call: Call, sizes: Sizes) -> Composition:
    """Send each member its block directly; without counts the blocks are equal."""
    i, n = _index(call), len(call.team)
    sends = [Piece("src", *b) for b in _offsets(call.send_counts or (sizes.srcs[0] // n,) * n)]
    recvs = [Piece("dst", *b) for b in _offsets(call.recv_counts or (sizes.dsts[0] // n,) * n)]
    step = Round(
        local=(Copy(sends[i], recvs[i]),),
        recvs=tuple(Transfer(r, recvs[j]) for j, r in _others(call)),
        sends=tuple(Transfer(r, sends[j]) for j, r in _others(call)),
    )
    return Composition(steps=(step,))


def _exchange(call: Call, sizes: Sizes) -> Composition:
    def transfers(
        side: Literal["src", "dst"], peers: Sequence[int], counts: Sequence[int]
    ) -> tuple[Transfer, ...]:
        pairs = enumerate(zip(peers, counts, strict=True))
        return tuple(Transfer(peer, Piece(side, 0, k, i)) for i, (peer, k) in pairs)

    step = Round(
        recvs=transfers("dst", call.recvs, sizes.dsts),
        sends=transfers("src", call.sends, sizes.srcs),
    )
    return Composition(steps=(step,))


_Composer = Callable[[Call, Sizes], Composition]

#: The function that composes each kind.
_COMPOSED: dict[str, _Composer] = by_kind(
    {
        "Allgather": _allgather,
        "ReduceScatter": _reduce_scatter,
        "Allreduce": _allreduce,
        "AllToAll": _alltoall,
        "Broadcast": _broadcast,
        "Reduce": _reduce,
        "Gather": _gather,
        "Scatter": _scatter,
        "SendRecv": _exchange,
        "Exchange": _exchange,
    }
)
