"""The buffers of a post: elements for local work, addresses for copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mdfuse.backends.algorithms import Piece
from mdfuse.backends.base import flat
from mdfuse.backends.work import leave


class Buffers:
    """The buffers of a post and its scratch, which live as long as this object."""

    __slots__ = ("_flat",)

    def __init__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], scratch: Tensor) -> None:
        sides = {"src": srcs, "dst": dsts, "scratch": (scratch,)}
        self._flat = {side: [flat(x) for x in buffers] for side, buffers in sides.items()}

    @classmethod
    def of(cls, srcs: Sequence[Tensor], dsts: Sequence[Tensor], scratch: int) -> Buffers:
        """Return the buffers of a post, at least one, with room for so many elements."""
        return cls(srcs, dsts, (*srcs, *dsts)[0].new_empty(scratch))

    def leave(self) -> None:
        """Let the allocator reuse their memory only behind the work queued on this stream now."""
        leave(x for side in self._flat.values() for x in side)

    def elements(self, piece: Piece) -> Tensor:
        """Return a piece as a tensor of one dim."""
        return self._flat[piece.side][piece.index][piece.start : piece.stop]

    def size(self, piece: Piece) -> int:
        """Return the bytes of a piece."""
        return piece.size * self._flat[piece.side][piece.index].itemsize

    def stays(self, piece: Piece) -> bool:
        """Return whether the post itself does not write into the memory of a piece."""
        return piece.side == "src" and not any(map(self._shares(piece), self._flat["dst"]))

    def _shares(self, piece: Piece) -> Callable[[Tensor], bool]:
        start = self.address(piece, 0)
        stop = start + self.size(piece)
        return lambda x: x.data_ptr() < stop and start < x.data_ptr() + x.nbytes

    def address(self, piece: Piece, start: int) -> int:
        """Return the address of a piece's `start`-th byte."""
        tensor = self._flat[piece.side][piece.index]
        return tensor.data_ptr() + piece.start * tensor.itemsize + start


def bytes_of(buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return dense buffers as their bytes, in memory order."""
    return [flat(x).view(torch.uint8) for x in buffers]
