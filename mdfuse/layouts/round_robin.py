"""Round-robin senders when every source shard has the same number of messages.

This holds where neither hosts nor blocks of ranks choose the sender. Each dim is then examined once
per shard of that dim, and a message costs few steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

from mdfuse.layouts.boxes import Box, Rows, common
from mdfuse.layouts.endpoints import At
from mdfuse.layouts.messages import Pattern

#: (sender, index of its share, number of shares)
Sender = tuple[int, int, int]


class _Piece(NamedTuple):
    """The contribution of one dim's source part to a box, for one receiver.

    Attributes:
        rows: the rows that the receiver needs.
        is_own: whether the receiver has them, as far as this dim tells.
        place: the holders' offset in the order of the mesh.
        first: the holders' index among the ranks that need the part.
        number: the index of the receiver's part among the destination parts that this one overlaps.
        size: the number of these destination parts.
    """

    rows: Rows
    is_own: bool
    place: int
    first: int
    number: int
    size: int


class RoundRobin:
    """The messages of all source parts; none depends on blocks or hosts."""

    def __init__(self, pattern: Pattern, reduced: tuple[str, ...]) -> None:
        self.pattern, self.source, self.destination = pattern, pattern.source, pattern.destination
        self.reduced = reduced
        self.is_one = self.source.mesh == self.destination.mesh
        self.shares = cache(pattern.shares)

    # -- received --------------------------------------------------------------------------------

    def received(
        self, rank: int, at: At, held: At | None, need: Sequence[Rows]
    ) -> Iterator[tuple[list[Box], list[list[Sender]]]]:
        """Yield the boxes that a rank needs from one source part, and the senders of each term.

        Args:
            rank: the receiver.
            at: its coordinates in the destination.
            held: its coordinates in the source; None where it is not in that mesh.
            need: the rows that it needs.
        """
        dims = [self._pieces(dim, rows, at, held) for dim, rows in enumerate(need)]
        terms = self._terms(at, held)
        n = self.destination.number(at, self.pattern.along)
        for parts in product(*dims):
            place, first, number, size, is_own = 0, 0, 0, 1, held is not None
            rows = []
            # unpacking is quicker than access by name
            for dim_rows, has, at_place, later, digit, count in parts:
                rows.append(dim_rows)
                place, first, is_own = place + at_place, first + later, is_own and has
                number, size = number * count + digit, size * count
            senders = [
                [(rank, 0, 1)]
                if is_own and is_term
                else self._senders(place + term_place, first + later, number, size, n)
                for is_term, term_place, later in terms
            ]
            yield [*product(*rows)], senders

    def _senders(self, place: int, first: int, part: int, parts: int, n: int) -> list[Sender]:
        """Return the senders of a box: its holders take turns.

        Args:
            place: the first holder's offset in the order of the mesh.
            first: its index among the ranks that need the part.
            part: the index of the part that the receiver needs.
            parts: the number of destination parts that overlap the holders' part.
            n: the receiver's index among the ranks that need the part.
        """
        pattern, ranks = self.pattern, self.source.mesh.ranks
        if not self.source.free:
            return [(ranks[place], 0, 1)]
        if pattern.lacking < pattern.all and n >= first:
            n -= pattern.each
        shares = self.shares(parts * pattern.lacking)
        turn, turns, free = (part * pattern.lacking + n) * shares, pattern.turns, self.source.free
        if shares == 1:
            return [(ranks[place + self.source.place(turn % turns, free)], 0, 1)]
        places = (place + self.source.place((turn + i) % turns, free) for i in range(shares))
        return [(ranks[at], i, shares) for i, at in enumerate(places)]

    def _pieces(self, dim: int, rows: Rows, at: At, held: At | None) -> list[_Piece]:
        source, own_items = self.source, held.items() if held is not None else {}.items()
        axes = self.destination.split[dim]
        number = self.destination.number(at, axes)
        pieces = list[_Piece]()
        for coordinates, part, both in source.meeting(dim, rows):
            met = self.pattern.met_in(dim, part)
            place, first = self._places(coordinates)
            has_rows = coordinates.items() <= own_items
            number_met = number - met.start
            pieces.append(_Piece(both, has_rows, place, first, number_met, met.size))
        return pieces

    def _terms(self, at: At, held: At | None) -> list[tuple[bool, int, int]]:
        """Return (whether the receiver has it, its holders' offset, their index) for each term."""
        kept_terms = {a: at[b] for a, b in self.pattern.staying}
        every = [
            kept_terms | self.source.numbered(n, self.reduced)
            for n in range(self.source.count(self.reduced))
        ]
        return [
            (held is not None and all(held[a] == i for a, i in term.items()), *self._places(term))
            for term in every
        ]

    def _places(self, coordinates: At) -> tuple[int, int]:
        """Return what coordinates add to the holders' offset, and to the first one's index."""
        place, first, strides, firsts = 0, 0, self.source.strides, self._firsts
        for a, i in coordinates.items():
            place += i * strides[a]
            first += i * firsts.get(a, 0)
        return place, first

    @cached_property
    def _firsts(self) -> dict[str, int]:
        """Axis that tells holders apart -> the stride of the first holder's index along it."""
        steps, step = dict[str, int](), self.pattern.each
        for a in reversed(self.pattern.apart):
            steps[a], step = step, step * self.destination.sizes[a]
        return steps

    # -- sent ------------------------------------------------------------------------------------

    def sent(self, at: At, rows: Sequence[Rows]) -> Iterator[tuple[int, list[Box], int, int]]:
        """Yield (receiver, boxes, index of the share, number of shares) for all that a rank sends.

        Args:
            at: the sender's coordinates.
            rows: the rows that it holds.
        """
        pattern, ranks = self.pattern, self.destination.mesh.ranks
        met = [pattern.met_in(dim, part_rows) for dim, part_rows in enumerate(rows)]
        parts = 1
        for m in met:
            parts *= m.size
        stride, shares = pattern.lacking, self.shares(parts * pattern.lacking)
        first = self._places({a: at[a] for a in self.source.fixed})[1]
        terms, known = {b: at[a] for a, b in pattern.staying}, -1
        begin = self.source.number(at, self.source.free) % pattern.turns
        for turn in range(begin, parts * stride * shares, pattern.turns):
            number, i = divmod(turn, shares)
            part, n = divmod(number, stride)
            if part != known:
                known, to = part, dict(terms)
                for m in reversed(met):
                    part, k = divmod(part, m.size)
                    to |= self.destination.numbered(m.start + k, m.axes)
                boxes = common(rows, self.destination.rows(to))
                place = sum(k * self.destination.strides[a] for a, k in to.items())
            if stride < pattern.all and n >= first:
                n += pattern.each
            if boxes:
                yield ranks[place + self.destination.place(n, pattern.along)], boxes, i, shares
