"""The messages of an exchange: each rank receives exactly the boxes that it lacks.

The holders of a source part take turns: its messages are numbered, and holder n sends the messages
n, n + holders, and so on. Numbers follow from coordinates, not from a walk over ranks, so that a
rank's part costs one step per message. If the holders' message counts would differ, messages are
cut into shares. If hosts are known, holders on the receiver's host come first, and all messages of
a part are examined; so they are where holders are lost, which send and keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product, starmap
from typing import Any

import numpy as np

from mdfuse.layouts.boxes import Box, Rows, common, has_rows
from mdfuse.layouts.endpoints import At, Side
from mdfuse.layouts.hosts import hosts_by_rank, senders
from mdfuse.layouts.layout import Layout, Partial
from mdfuse.layouts.messages import Messages, Pattern, nth_share


@dataclass(frozen=True)
class Exchange:
    """An exchange of a tensor: each rank receives its missing elements of each term.

    Along Partial axes of both layouts, each term goes to its own ranks; along the other Partial
    axes, which are reduced, all terms go to each rank.
    """

    source: Side
    destination: Side

    @cached_property
    def staying(self) -> tuple[tuple[str, str], ...]:
        """Pairs of axes of the source and the destination along which terms stay apart."""
        return kept_terms(self.source.layout, self.destination.layout)

    @cached_property
    def reduced(self) -> tuple[str, ...]:
        """The axes of the source along which the receiver reduces."""
        kept_axes = [a for a, _ in self.staying]
        return tuple(a for a in self.source.layout.partial_axes if a not in kept_axes)

    # -- messages --------------------------------------------------------------------------------

    def received(self, rank: int) -> Iterator[tuple[int, Box, int]]:
        """Yield (holder, box, number of the term) for all elements that a rank needs, in order."""
        at = self.destination.at(rank)
        need = self.destination.rows(at) if at is not None else ()
        if at is None or not all(map(has_rows, need)):
            return
        held = self._held(rank, at)
        for holders, box, n in self._needed(at, need):
            for sender, share in self._senders(holders, rank, at, held, box):
                yield sender, share, n

    def missing(self, rank: int) -> Iterator[Box]:
        """Yield the boxes that a rank needs and only lost ranks hold."""
        at = self.destination.at(rank)
        need = self.destination.rows(at) if at is not None else ()
        if at is not None and self.source.mesh.lost and all(map(has_rows, need)):
            held = self._held(rank, at)
            for holders, box, _ in self._needed(at, need):
                if not any(self._senders(holders, rank, at, held, box)):
                    yield box

    def _needed(self, at: At, need: tuple[Rows, ...]) -> Iterator[tuple[At, Box, int]]:
        """Yield (coordinates of its holders, box, number of the term) for each needed box."""
        source, terms = self.source, {a: at[b] for a, b in self.staying}
        every = [
            terms | source.numbered(n, self.reduced) for n in range(source.count(self.reduced))
        ]
        for parts in product(*starmap(source.meeting, enumerate(need))):
            part = {a: i for coordinates, *_ in parts for a, i in coordinates.items()}
            for box in product(*[rows for *_, rows in parts]):
                for n, term in enumerate(every):
                    yield {**part, **term}, box, n

    def sent(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield (receiver, box) for each box that a rank sends to others."""
        at = self.source.at(rank)
        rows = self.source.rows(at) if at is not None else ()
        if at is None or rank in self.source.mesh.lost or not all(map(has_rows, rows)):
            return
        holders = {a: at[a] for a in self.source.fixed}
        for to, i, shares in self._receivers(rank, at, holders):
            boxes = common(rows, self.destination.rows(to))
            receiver = self.destination.rank(to) if boxes else rank
            if boxes and not _is_at(self._held(receiver, to), holders):
                shared_boxes = (nth_share(box, shares, i) for box in boxes)
                yield from ((receiver, share) for share in shared_boxes if share is not None)

    def _receivers(self, rank: int, at: At, holders: At) -> Iterator[tuple[At, int, int]]:
        """Yield (receiver's coordinates, index of the share, number of shares) for one sender.

        Some of these receivers lack nothing.

        Args:
            rank: the sender.
            at: its coordinates.
            holders: the coordinates of all ranks that hold the same part.
        """
        if self.by_host:
            receivers, by = self._turns(holders)
            for to in map(self.destination.at, receivers[by == rank].tolist()):
                if to is not None:
                    yield to, 0, 1
            return
        messages, turns = self._messages(holders), self.pattern.turns
        first = (self.source.number(at, self.source.free) - messages.turn) % turns
        shares = messages.shares
        for turn in range(first, messages.count * shares, turns):
            n, i = divmod(turn, shares)
            to = messages.receiver(n)
            if to is not None:
                yield to, i, shares

    def _held(self, rank: int, at: At) -> At | None:
        """Return a rank's coordinates in the source, from its coordinates in the destination."""
        if self.is_one:
            return at
        return None if rank in self.source.mesh.lost else self.source.at(rank)

    @cached_property
    def is_one(self) -> bool:
        """True if both sides are on one mesh."""
        return self.source.mesh == self.destination.mesh

    def _senders(
        self, holders: At, receiver: int, at: At, held: At | None, block: Box
    ) -> Iterator[tuple[int, Box]]:
        """Yield (sender, share) of a box that a rank needs; a holder is its own sender.

        Args:
            holders: the coordinates of all ranks that hold the box.
            receiver: the rank.
            at: its coordinates in the destination.
            held: its coordinates in the source.
            block: the box.
        """
        source = self.source
        if _is_at(held, holders):
            yield receiver, block
        elif self.by_host:
            receivers, by = self._turns(holders)
            for sender in by[receivers == receiver].tolist():  # none where all holders are lost
                yield sender, block
        elif not source.free:
            yield source.rank(holders), block
        else:
            messages = self._messages(holders)
            first = messages.turn + messages.number(at) * messages.shares
            for i in range(messages.shares):
                share = nth_share(block, messages.shares, i)
                if share is not None:
                    turn = source.numbered((first + i) % self.pattern.turns, source.free)
                    yield source.rank({**holders, **turn}), share

    @cached_property
    def by_host(self) -> bool:
        """True if hosts decide who sends, or lost ranks do: parts have several holders, or none."""
        is_known = hosts_by_rank(self.source.mesh, self.destination.mesh) is not None
        has_several = is_known and self.source.count(self.source.free) > 1
        return has_several or bool(self.source.mesh.lost)

    def senders(self) -> Any:
        """Return the ranks that have a turn, by hosts; some ranks occur several times."""
        sizes = (range(self.source.mesh.axis_size(a)) for a in self.source.fixed)
        parts = (dict(zip(self.source.fixed, at, strict=True)) for at in product(*sizes))
        full = (p for p in parts if all(map(has_rows, self.source.rows(p))))
        return np.concatenate([self._turns(p)[1] for p in full] or [np.array([], int)])

    def _turns(self, holders: At) -> tuple[Any, Any]:
        """Return (ranks that lack a part, the sender to each), by hosts."""
        key = tuple(holders[a] for a in self.source.fixed)
        if key not in self._known:
            source = self.source
            have = source.grid[
                tuple(holders.get(a, slice(None)) for a in source.mesh.axes)
            ].reshape(-1)
            have = have[~np.isin(have, [*source.mesh.lost])]
            lack = self._messages(holders).receivers()
            lack = lack[~np.isin(lack, have)] if len(have) else lack[:0]
            hosts = hosts_by_rank(source.mesh, self.destination.mesh)
            if hosts is None:
                last = max(source.mesh.last_rank, self.destination.mesh.last_rank)
                hosts = np.zeros(last + 1, int)
            self._known[key] = lack, senders(have, lack, hosts)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[Any, Any]]:
        return {}

    def _messages(self, holders: At) -> Messages:
        return Messages(self.pattern, holders)

    @cached_property
    def pattern(self) -> Pattern:
        """The message pattern that all source parts share."""
        may_share = not (self.by_host or self.reduced)
        return Pattern(self.source, self.destination, self.staying, may_share)


def _is_at(at: At | None, holders: At) -> bool:
    """Return whether a rank is one of the holders at some coordinates."""
    return at is not None and holders.items() <= at.items()


def kept_terms(source: Layout, destination: Layout) -> tuple[tuple[str, str], ...]:
    """Return pairs of Partial axes of both layouts whose terms correspond.

    On one mesh these are the same axes. On two, all Partial axes are, in their order, if they have
    the same sizes and reduce ops; () where they do not.

    >>> from mdfuse import DeviceMesh, Partial
    >>> one, other = DeviceMesh.arange(a=2, b=4), DeviceMesh([[8, 9], [6, 7]], axes=("p", "q"))
    >>> kept_terms(Layout(one, {"a": Partial("max")}), Layout(other, {"q": Partial("max")}))
    (('a', 'q'),)
    """
    if not source.partial_axes or not destination.partial_axes:
        return ()
    if source.mesh == destination.mesh:
        axes = zip(source.mesh.axes, source.mesh.shape, strict=True)
        both = zip(axes, source.placements, destination.placements, strict=True)
        return tuple((a, a) for (a, n), p, q in both if n > 1 and isinstance(p, Partial) and p == q)
    terms = [
        [
            (a, x.mesh.axis_size(a), x.placement(a))
            for a in x.partial_axes
            if x.mesh.axis_size(a) > 1
        ]
        for x in (source, destination)
    ]
    if [t[1:] for t in terms[0]] != [t[1:] for t in terms[1]]:
        return ()
    return tuple((a, b) for (a, *_), (b, *_) in zip(*terms, strict=True))
