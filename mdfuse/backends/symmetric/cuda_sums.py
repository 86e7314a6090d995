"""Small sums on GPUs: a kernel on each rank, instead of copies and signals queued one by one.

Each rank puts its operand into the inboxes of the others, sets a flag there behind each chunk, and
adds all operands in team order once the flags in its own inbox have come. Flags count turns. A rank
is at most one turn ahead of another, whose flag it awaits, so that a chunk has two places, which
turns take alternately. Each chunk counts by itself, in memory of the GPU: posts of any size may
follow each other, and a replay of a graph counts, too.

On one rank posts follow each other in the order of its lane. A block awaits the same block of the
others alone, and GPUs begin blocks in order, so that no more of them need to be there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.algorithms import Piece
from mdfuse.hir.row_norms import CHUNK, DTYPES, MOST
from mdfuse.layouts.call import Call

#: The size of a word, bytes.
_WORD = 4

#: The size of an inbox of any team, bytes.
INBOX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Inbox:
    """The layout of an inbox: two places for a chunk of each member, a flag for each, and a turn.

    Attributes:
        members: of the team.

    >>> Inbox(2).chunks, Inbox(8).chunks
    (240, 34)
    """

    members: int

    @property
    def chunks(self) -> int:
        """The most chunks of an operand."""
        return MOST // max(self.members - 1, 1)

    @property
    def flags(self) -> int:
        """The offset of the flags, behind all places."""
        return self.chunks * 2 * self.members * CHUNK

    @property
    def turns(self) -> int:
        """The offset of the numbers of the last turns, behind the flags."""
        return self.flags + self.chunks * self.members * _WORD

    @property
    def bytes(self) -> int:
        """The bytes that are used of it."""
        return self.turns + self.chunks * _WORD

    def flag_words(self, inbox: int) -> tuple[int, int]:
        """Return the address of the flags in an inbox, and their number."""
        return inbox + self.flags, self.chunks * self.members

    def fits(self, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> bool:
        """Return whether the kernel makes a post; the same on all members."""
        if call.kind != "Allreduce" or call.reduce_op != "sum" or len(srcs) != 1 or len(dsts) != 1:
            return False
        (src,), (dst,) = srcs, dsts
        is_plain = src.dtype in DTYPES and src.dtype == dst.dtype
        return is_plain and 0 < src.numel() == dst.numel() and src.nbytes <= self.chunks * CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class OneKernel:
    """A post that is one kernel.

    Attributes:
        pieces: whole buffers of the post.
        run: queues it, with the elements of these.
    """

    pieces: tuple[Piece, ...]
    run: Callable[..., None]


@dataclass(eq=False, kw_only=True)
class Sums:
    """The inboxes of a team, as the GPU of one member sees them.

    Attributes:
        index: of this rank in the team.
        addresses: of all inboxes, in team order.
        device: of this rank.
    """

    index: int
    addresses: Sequence[int]
    device: torch.device

    def __post_init__(self) -> None:
        self.inbox = Inbox(len(self.addresses))
        self._table = torch.tensor(self.addresses, dtype=torch.int64).to(self.device)

    def post(self, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> OneKernel | None:
        """Return the move of a post; None where it takes others."""
        if not self.inbox.fits(call, srcs, dsts):
            return None
        pieces = whole(srcs, dsts)
        return OneKernel(pieces=pieces, run=self.add)

    def add(self, src: Tensor, dst: Tensor) -> None:
        """Queue the kernel, for dense operands of one dim, on the current stream."""
        inbox, count = self.inbox, CHUNK // src.itemsize
        kernels: Any = _kernels()
        with torch.cuda.device(self.device):  # Triton launches on the current one
            kernels.add_up[-(-src.numel() // count),](
                src, dst, src.numel(), self._table, inbox.flags, inbox.turns,
                INDEX=self.index, MEMBERS=inbox.members, CHUNK=count, CHUNK_BYTES=CHUNK,
                num_warps=8,
            )  # fmt: skip


def whole(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> tuple[Piece, ...]:
    """Return the pieces that are all elements of the buffers of a post."""
    sent = [Piece("src", 0, x.numel(), n) for n, x in enumerate(srcs)]
    return (*sent, *(Piece("dst", 0, x.numel(), n) for n, x in enumerate(dsts)))


def name_of(device: torch.device) -> str:
    """Return the name of a GPU that can add, which no other one has; "" without Triton."""
    if find_spec("triton") is None:
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def can_add(names: Sequence[str]) -> bool:
    """Return whether kernels of members wait for each other: each has a GPU of its own, and can.

    >>> can_add(["a", "b"]), can_add(["a", "a"]), can_add(["a", ""])
    (True, False, False)
    """
    return all(names) and len({*names}) == len(names)


@cache
def _kernels() -> Any:
    from mdfuse.backends.symmetric import cuda_sums_kernels  # Triton is not everywhere

    return cuda_sums_kernels
