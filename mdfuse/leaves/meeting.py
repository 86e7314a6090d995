"""One communication of leaves: what ranks send each other for it, and what each does with that.

A leaf posts as the rank of a program does. Once all leaves of a rank have posted, the rank sends
every other rank of the team one parcel of bytes, whatever the kind: parts are moved, and terms of
reductions are added here, in the order of `mdfuse.leaves.tree`, so that no library adds any.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from mdfuse.backends.base import flat
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import POINT_TO_POINT, source_blocks
from mdfuse.leaves import tree
from mdfuse.leaves.deal import Deal

#: Reductions of fewer bytes are not shared out: each rank adds all terms up by itself.
_SMALL = 1 << 16

#: A range of elements.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LeafPost:
    """A post of a leaf: its call, and the buffers."""

    call: Call
    srcs: Sequence[Tensor]
    dsts: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Parcels:
    """The tensors that one rank sends to others and receives from them, in one go.

    Attributes:
        team: the ranks that take part.
        sent: rank -> tensors for it.
        received: rank -> tensors from it, which are filled.
        backend: that carries it; None: the communicator's first.
    """

    team: tuple[int, ...]
    sent: Mapping[int, Sequence[Tensor]]
    received: Mapping[int, Sequence[Tensor]]
    backend: str | None = None


#: Yields what is to be sent; it was received when the generator goes on.
Rounds = Generator[Parcels, None, None]


@dataclass(frozen=True)
class LeafMeeting:
    """The communication of a team of leaves, as one rank sees it.

    Attributes:
        rank: the rank.
        posts: those of its leaves, by leaf.
        deal: who computes which leaves.
        compiles: whether a GPU may add large terms in one compiled kernel.
    """

    rank: int
    posts: Mapping[int, LeafPost]
    deal: Deal
    compiles: bool = False

    @cached_property
    def call(self) -> Call:
        return next(iter(self.posts.values())).call

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return self.deal.team(self.call.team)

    def rounds(self) -> Rounds:
        """Return what is sent and received, round by round."""
        if self.call.kind in ("Allreduce", "Reduce", "ReduceScatter"):
            return self._reduce()
        return self._move()

    def _parcels(
        self, sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, Sequence[Tensor]]
    ) -> Parcels:
        return Parcels(self.ranks, sent, received, self.call.backend)

    def _owner(self, leaf: int) -> int:
        return self.deal.ranks[leaf]

    # -- parts that are moved --------------------------------------------------------------------

    def _move(self) -> Rounds:
        sent: dict[int, list[Tensor]] = {}
        received: dict[int, list[Tensor]] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        outgoing = {leaf: _outgoing(post) for leaf, post in self.posts.items()}
        for rank in self.ranks:
            if rank == self.rank:
                continue
            for leaf in sorted(outgoing):
                to = [(d, x) for d, x in outgoing[leaf] if self._owner(d) == rank]
                sent.setdefault(rank, []).extend(_once(to, self.is_alike))
        for source in sorted(self.call.team):
            pieces = [
                (leaf, x)
                for leaf in sorted(self.posts)
                for s, x in _incoming(self.posts[leaf])
                if s == source
            ]
            if source in self.posts:
                copies += _local(outgoing[source], pieces)
                continue
            first = _once(pieces, self.is_alike)
            received.setdefault(self._owner(source), []).extend(first)
            if self.is_alike and first:
                copies += [(x, first[0]) for _, x in pieces if x is not first[0]]
        yield self._parcels(sent, received)
        for target, origin in copies:
            target.copy_(origin)

    @property
    def is_alike(self) -> bool:
        """True if a leaf sends the same to all others, so that a rank needs it once."""
        return self.call.kind in ("Allgather", "Broadcast")

    # -- terms that are added --------------------------------------------------------------------

    def _reduce(self) -> Rounds:
        call, count = self.call, len(self.call.team)
        op, compiles = call.reduce_op, self.compiles
        assert op is not None
        numbered = {call.team.index(leaf): post.srcs[0] for leaf, post in self.posts.items()}
        terms = {(n, n + 1): flat(x) for n, x in numbered.items()}
        one = next(iter(terms.values()))
        size = one.numel()
        others = [rank for rank in self.ranks if rank != self.rank]
        if call.kind == "Allreduce" and not others:
            self._sum_up((0, size), terms)
            return
        held = {rank: tree.subtrees(self._terms_of(rank), count) for rank in self.ranks}
        local = {span: tree.reduced(op, span, terms, compiles) for span in held[self.rank]}
        wanted = {rank: self._ranges(rank, size) for rank in self.ranks}
        sent = {r: [x[a:b] for x in local.values() for a, b in wanted[r]] for r in others}
        arrived = {
            r: {
                span: [tree.room(one, span, b - a) for a, b in wanted[self.rank]]
                for span in held[r]
            }
            for r in others
        }
        yield self._parcels(
            sent, {r: [x for xs in arrived[r].values() for x in xs] for r in others}
        )
        results: list[tuple[Range, Tensor]] = []
        for n, (a, b) in enumerate(wanted[self.rank]):
            known = {span: x[a:b] for span, x in local.items()}
            known |= {span: xs[n] for r in others for span, xs in arrived[r].items()}
            if call.kind == "Allreduce":
                self._sum_up((a, b), known)
            else:
                results.append(((a, b), tree.total(op, count, known, compiles)))
        if call.kind == "Allreduce":
            yield from self._given_out(wanted, size)
        else:
            self._write(results, size)

    def _sum_up(self, at: Range, known: Mapping[tree.Span, Tensor]) -> None:
        """Write a range of elements of all terms together into the buffers of this rank's leaves.

        There is one range of each rank, so that no term is read behind this.
        """
        (a, b), call = at, self.call
        assert call.reduce_op is not None
        first, *others = (dst[a:b] for dst in self._dsts)
        tree.write(first, call.reduce_op, len(call.team), known, self.compiles)
        for dst in others:
            dst.copy_(first)

    @cached_property
    def _dsts(self) -> list[Tensor]:
        return _distinct(flat(post.dsts[0]) for post in self.posts.values())

    def _write(self, results: Sequence[tuple[Range, Tensor]], size: int) -> None:
        """Write what this rank added up into the buffers of its leaves."""
        call, block = self.call, size // len(self.call.team)
        for leaf, post in self.posts.items():
            at = call.team.index(leaf) * block if call.kind == "ReduceScatter" else 0
            for (start, _), x in results:
                if post.dsts and start == at:
                    flat(post.dsts[0]).copy_(x)

    def _given_out(self, wanted: Mapping[int, Sequence[Range]], size: int) -> Rounds:
        """Let the others have what this rank added up, and take what they did."""
        if all([*ranges] == [(0, size)] for ranges in wanted.values()):
            return
        dsts, others = self._dsts, [rank for rank in self.ranks if rank != self.rank]
        mine = [dsts[0][a:b] for a, b in wanted[self.rank]]
        theirs = {r: [dsts[0][a:b] for a, b in wanted[r]] for r in others}
        yield self._parcels(dict.fromkeys(others, mine), theirs)
        for dst in dsts[1:]:
            dst.copy_(dsts[0])

    def _terms_of(self, rank: int) -> set[int]:
        return {n for n, leaf in enumerate(self.call.team) if self._owner(leaf) == rank}

    def _ranges(self, rank: int, size: int) -> list[Range]:
        """Return the ranges of elements that a rank adds up."""
        call = self.call
        if call.kind == "ReduceScatter":
            block = size // len(call.team)
            return [(n * block, (n + 1) * block) for n in sorted(self._terms_of(rank))]
        if call.kind == "Reduce":
            assert call.root is not None
            return [(0, size)] if self._owner(call.root) == rank else []
        if size * self._itemsize < _SMALL:
            return [(0, size)]
        each = -(-size // len(self.ranks))
        start = min(self.ranks.index(rank) * each, size)
        return [(start, min(start + each, size))]

    @property
    def _itemsize(self) -> int:
        return next(iter(self.posts.values())).srcs[0].itemsize


def _distinct(xs: Iterator[Tensor]) -> list[Tensor]:
    """Return tensors, those of one memory once: leaves share what they have alike."""
    return [*{x.data_ptr(): x for x in xs}.values()]


def _once(pieces: Sequence[tuple[int, Tensor]], is_alike: bool) -> list[Tensor]:
    return [x for _, x in (pieces[:1] if is_alike else pieces)]


def _local(
    outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (target, origin) for what leaves of one rank send each other: in order, for each."""
    for leaf in dict.fromkeys(d for d, _ in incoming):
        origins = [x for d, x in outgoing if d == leaf]
        targets = [x for d, x in incoming if d == leaf]
        yield from zip(targets, origins, strict=True)


def _outgoing(post: LeafPost) -> list[tuple[int, Tensor]]:
    """Return (leaf, what it is sent) of a post, itself included; in the order of leaves."""
    call, me = post.call, post.call.rank
    if call.kind in POINT_TO_POINT:
        return sorted(zip(call.sends, map(flat, post.srcs), strict=True), key=lambda x: x[0])
    team = sorted(call.team)
    match call.kind:
        case "Allgather":
            return [(leaf, flat(post.srcs[0])) for leaf in team]
        case "Broadcast":
            others = [leaf for leaf in team if leaf != call.root]
            return [(leaf, flat(post.srcs[0])) for leaf in others] if me == call.root else []
        case "Gather":
            assert call.root is not None
            return [(call.root, flat(post.srcs[0]))] if me in call.parts else []
        case "Scatter":
            if me != call.root:
                return []
            blocks = flat(post.srcs[0]).chunk(source_blocks(call))
            return sorted(
                ((d, blocks[n]) for d, n in zip(call.parts, call.blocks, strict=True)),
                key=lambda x: x[0],
            )
    parts = flat(post.srcs[0]).split([*call.send_counts])
    return sorted(zip(call.team, parts, strict=True), key=lambda x: x[0])


def _incoming(post: LeafPost) -> list[tuple[int, Tensor]]:
    """Return (leaf, where what it sends goes) of a post, itself included."""
    call, me = post.call, post.call.rank
    if call.kind in POINT_TO_POINT:
        return [*zip(call.recvs, map(flat, post.dsts), strict=True)]
    if not post.dsts:
        return []
    dst = flat(post.dsts[0])
    match call.kind:
        case "Allgather":
            return [*zip(call.team, dst.chunk(len(call.team)), strict=True)] if len(dst) else []
        case "Broadcast":
            return [(call.root, dst)] if me != call.root and call.root is not None else []
        case "Gather":
            return [*zip(call.parts, dst.chunk(len(call.parts)), strict=True)] if len(dst) else []
        case "Scatter":
            is_part = me in call.parts and call.root is not None
            return [(call.root, dst)] if is_part and call.root is not None else []
    return [*zip(call.team, dst.split([*call.recv_counts]), strict=True)]
