"""The same cuts by hand: products, copies beside them, one CUDA graph; what a rank of two could do.

Pieces of a shard may have any lengths. Each is sent as soon as it is computed, and no product waits
for a copy that it does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from _overlap_copies import Copies
from _overlap_shapes import Parts, Shape
from torch import Tensor

#: Lengths of a shard's pieces.
Lengths = tuple[int, ...]

#: Pieces of a shard, in sixteenths: of many that were tried, those that were ever quickest.
_CUTS: tuple[Lengths, ...] = (
    (16,),
    (8, 8),
    (4, 4, 4, 4),
    (8, 6, 2),
    (1, 3, 10, 2),
    (2, 5, 5, 3, 1),
)


@dataclass(frozen=True)
class Cut:
    """A way to cut a shape.

    Attributes:
        pieces: lengths of what is sent, in sixteenths of a shard.
        own_rows: the same of the products of the own rows.
        added: how many of these rows, the last ones, are computed before, and added when the other
            rank's part is there, of a sum; the products of all others add.
    """

    pieces: Lengths
    own_rows: Lengths
    added: int = 0

    def __str__(self) -> str:
        pieces = "+".join(map(str, self.pieces))
        own_rows = (
            f", own rows {'+'.join(map(str, self.own_rows))}"
            if self.own_rows != self.pieces
            else ""
        )
        return f"{pieces}{own_rows}{f', the last {self.added} added' if self.added else ''}"


def cuts(shape: Shape) -> tuple[Cut, ...]:
    """Return the ways to cut a shape that are tried."""
    if shape.kind == "AG+MM":
        whole = (Cut(c, (16,)) for c in _CUTS if len(c) > 1)
        return (*(Cut(c, c) for c in _CUTS), *whole)
    late = (Cut(c, c, k) for c in _CUTS[1:] for k in dict.fromkeys((c[-1], 16)))
    return (*(Cut(c, c) for c in _CUTS), *late, Cut((4,) * 4, (8, 4, 4)))


@dataclass
class ByHand:
    """A shape on one of two ranks, cut by hand.

    Attributes:
        shape: what is computed.
        mine: what this rank has.
        copies: to and from the other one.
    """

    shape: Shape
    mine: Parts
    copies: Copies
    #: name -> a buffer that all cuts use
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def call(self, cut: Cut) -> Callable[[], Tensor]:
        """Return what computes the shape; its result is one buffer in all calls."""
        compute = self._gathered if self.shape.kind == "AG+MM" else self._scattered
        return lambda: compute(cut)

    def poison(self) -> None:
        """Fill what is computed, or copied, with NaN."""
        for buffer in self.buffers.values():
            buffer.fill_(float("nan"))

    def _buffer(self, name: str, rows: int, columns: int) -> Tensor:
        if name not in self.buffers:
            self.buffers[name] = self.mine.x.new_empty(rows, columns)
        return self.buffers[name]

    def _gathered(self, cut: Cut) -> Tensor:
        shape, mine, rows = self.shape, self.mine, self.shape.rows // 2
        x = self._buffer("x", shape.rows, shape.inner)
        y = self._buffer("y", shape.rows, shape.columns)
        sent: list[tuple[slice, Sequence[Callable[[], None]]]] = []
        for piece in _pieces(cut.pieces, rows):
            shape.ready(mine.x[piece], x[piece])
            sent.append(self._move(x[piece], x[rows:][piece], piece))
        for piece in _pieces(cut.own_rows, rows):
            torch.mm(x[piece], mine.w, out=y[piece])
        for piece, (arrived, _) in sent:
            arrived()
            torch.mm(x[rows:][piece], mine.w, out=y[rows:][piece])
        for _, (_, left) in sent:
            left()
        return y

    def _scattered(self, cut: Cut) -> Tensor:
        shape, mine, rows = self.shape, self.mine, self.shape.rows // 2
        p, z, q = (self._buffer(name, rows, shape.columns) for name in "pzq")
        sent: list[tuple[slice, Sequence[Callable[[], None]]]] = []
        for piece in _pieces(cut.pieces, rows):
            torch.mm(mine.x[rows:][piece], mine.w, out=p[piece])
            sent.append(self._move(p[piece], z[piece], piece))
        late = rows - rows * cut.added // 16
        if late < rows:
            torch.mm(mine.x[late:rows], mine.w, out=q[late:])
        waiting = [*sent]
        for piece in _pieces(cut.own_rows, rows):
            while waiting and waiting[0][0].start < piece.stop:
                waiting.pop(0)[1][0]()
            if piece.start >= late:
                torch.add(q[piece], z[piece], out=z[piece])
            else:
                z[piece].addmm_(mine.x[piece], mine.w)
        for _, (_, left) in sent:
            left()
        return z

    def _move(
        self, out: Tensor, into: Tensor, piece: slice
    ) -> tuple[slice, Sequence[Callable[[], None]]]:
        """Exchange a piece that has just been computed."""
        (peer,) = self.copies.incoming
        self.copies.begin()
        self.copies.send(out)
        self.copies.receive(peer, into)
        return piece, self.copies.end()


def _pieces(lengths: Lengths, rows: int) -> list[slice]:
    ends = [rows * sum(lengths[:n]) // 16 for n in range(len(lengths) + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]
