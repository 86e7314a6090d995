"""Carry out compositions as sends and receives, for communications that a library lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from mdfuse.backends import algorithms
from mdfuse.backends.algorithms import Composition, Copy, Piece, Reduce, Round, Sizes
from mdfuse.backends.base import Work, flat
from mdfuse.backends.work import DONE, Posted, leave, queued
from mdfuse.errors import CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import REDUCING
from mdfuse.layouts.reduction import check_reduction, combine_into

Post = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]
Made = TypeVar("Made")

#: One side of a transfer: the other rank's index in the team, and dense elements.
Transfer = tuple[int, Tensor]

#: More elements than any buffer has.
_ANY_SIZE = 1 << 62

#: How many sizes of buffers a call's compositions are kept for, as many as a program keeps plans.
_SIZES_KEPT = 32


def composer(
    call: Call,
    make: Callable[[Composition, Sizes], Made],
    small_bytes: int | None = None,
    *,
    is_open: bool = False,
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Made]:
    """Return a function of srcs and dsts that returns `make`'s result for their sizes, cached.

    At least one buffer is needed. The results for the last used sizes are kept. The
    function raises CommunicationError where the buffers, the reduce op or the root do not fit.

    Args:
        call: the communication.
        make: called with each new composition and the sizes that it is for.
        small_bytes: the most bytes that may arrive at a rank in one step; with more it takes
            several. None: any number.
        is_open: see `Sizes`.
    """

    @lru_cache(_SIZES_KEPT)
    def composed_for(count: int, dtype: torch.dtype, *numels: int) -> Made:
        if call.kind in REDUCING:
            check_reduction(call.reduce_op, dtype)
        small = _ANY_SIZE if small_bytes is None else small_bytes // dtype.itemsize
        srcs, dsts = numels[:count], numels[count:]
        sizes = Sizes(srcs=srcs, dsts=dsts, small=small, is_open=is_open)
        return make(algorithms.compose(call, sizes), sizes)

    def composed(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Made:
        buffers = (*srcs, *dsts)
        return composed_for(len(srcs), buffers[0].dtype, *map(Tensor.numel, buffers))

    return composed


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """A composition whose transfers are all posted together.

    Libraries with collectives of their own need this form. Waits may come in any order, so that a
    transfer posted by a wait could meet one that another rank posted for something else.

    Attributes:
        copies: done first.
        recvs: posted next.
        sends: posted after `recvs`.
        after: local work, done when all transfers have finished.
    """

    copies: tuple[Copy, ...]
    recvs: tuple[algorithms.Transfer, ...]
    sends: tuple[algorithms.Transfer, ...]
    after: tuple[Copy | Reduce, ...]

    @property
    def pieces(self) -> Iterator[Piece]:
        """Yield every piece that is copied, received or sent."""
        yield from (t.piece for t in (*self.recvs, *self.sends))
        yield from (piece for copy in self.copies for piece in (copy.source, copy.target))


def in_one_step(call: Call, composition: Composition) -> OneStep:
    """Return a composition as one step of transfers.

    Raises:
        CommunicationError: there are transfers in later steps, or a reduction in the first.
    """
    first, *later = composition.steps or (Round(),)
    copies = tuple(x for x in first.local if isinstance(x, Copy))
    if copies != first.local or any(step.recvs or step.sends for step in later):
        raise CommunicationError(
            f"{call.kind} on team {call.team} takes several steps of transfers",
            because="here a post is one step: no wait posts anything",
            hint="let compose() do it in one step where everything is small",
        )
    after = tuple(local for step in later for local in step.local)
    return OneStep(copies=copies, recvs=first.recvs, sends=first.sends, after=after)


def change(call: Call, local: Sequence[Copy | Reduce], elements: Callable[[Piece], Tensor]) -> None:
    """Do the local work of a step.

    Args:
        call: the communication.
        local: copies and reductions, done in order.
        elements: returns the elements of a piece as a tensor of one dim.
    """
    for one in local:
        match one:
            case Copy(source, target):
                elements(target).copy_(elements(source))
            case Reduce(rows, target):
                operands = elements(rows).view(len(call.team), -1)
                combine_into(call.reduce_op or "", operands, elements(target))


def transferred(
    call: Call, transfer: Callable[[list[Transfer], list[Transfer]], Sequence[Any]]
) -> Post:
    """Return a function that posts a call as transfers.

    Args:
        call: the communication.
        transfer: begins receives and sends, at least one of both together; returns their works.
    """
    bound = composer(call, lambda composition, sizes: _bound(call, composition, sizes, transfer))
    return lambda srcs, dsts: bound(srcs, dsts)([*srcs, *dsts])


def _bound(
    call: Call,
    composition: Composition,
    sizes: Sizes,
    transfer: Callable[[list[Transfer], list[Transfer]], Sequence[Any]],
) -> Callable[[list[Tensor]], Work]:
    """Return a function that posts buffers of the given sizes.

    Buffers are numbered: srcs first, then dsts, then the scratch.
    """
    step, scratch = in_one_step(call, composition), composition.scratch
    extents = (*sizes.srcs, *sizes.dsts, scratch)
    first = {"src": 0, "dst": len(sizes.srcs), "scratch": len(extents) - 1}
    pieces: dict[int, list[Piece]] = {}
    for piece in step.pieces:
        pieces.setdefault(first[piece.side] + piece.index, []).append(piece)
    cuts: list[tuple[int, _Cut]] = []
    part: dict[Piece, tuple[int, int]] = {}  # index into `cuts`, index of the part there
    for number, cut_pieces in pieces.items():
        cut, places = _cut(extents[number], [(piece.start, piece.stop) for piece in cut_pieces])
        part.update((piece, (len(cuts), i)) for piece, i in zip(cut_pieces, places, strict=True))
        cuts.append((number, cut))
    copies = [(part[copy.source], part[copy.target]) for copy in step.copies]
    incoming = [(call.team.index(t.peer), *part[t.piece]) for t in step.recvs]
    outgoing = [(call.team.index(t.peer), *part[t.piece]) for t in step.sends]

    def finish(buffers: list[Tensor]) -> None:
        def elements(piece: Piece) -> Tensor:
            return flat(buffers[first[piece.side] + piece.index])[piece.start : piece.stop]

        change(call, step.after, elements)
        leave(buffers[len(sizes.srcs) + len(sizes.dsts) :])  # the scratch

    def post(buffers: list[Tensor]) -> Work:
        if scratch:
            buffers.append(buffers[0].new_empty(scratch))
        parts = [cut(buffers[number]) for number, cut in cuts]
        for (a, i), (b, j) in copies:
            in_a_row(parts[b][j]).copy_(in_a_row(parts[a][i]))
        recvs = [(peer, parts[n][i]) for peer, n, i in incoming] if incoming else []
        sends = [(peer, parts[n][i]) for peer, n, i in outgoing] if outgoing else []
        works = transfer(recvs, sends) if recvs or sends else ()
        if copies and not works:  # without a work of the library
            works = queued(buffers)
        if step.after:
            return Posted(call, works, buffers, partial(finish, buffers))
        return Posted(call, works, (recvs, sends)) if works else DONE

    return post


#: Cuts a buffer into parts.
_Cut = Callable[[Tensor], Sequence[Tensor]]


def _cut(size: int, ranges: Sequence[tuple[int, int]]) -> tuple[_Cut, list[int]]:
    """Return a function that cuts a buffer into parts, and the index of each range's part."""
    bounds = sorted({0, size, *(bound for r in ranges for bound in r)})
    parts, split = list(pairwise(bounds)), torch.split_with_sizes
    if len(parts) == 1:
        return _whole, [0] * len(ranges)
    if not set(ranges) <= set(parts):
        return lambda x: [in_a_row(x)[a:b] for a, b in ranges], list(range(len(ranges)))
    sizes = [b - a for a, b in parts]  # one split takes a quarter of the time of slices
    return lambda x: split(in_a_row(x), sizes), [parts.index(r) for r in ranges]


def _whole(tensor: Tensor) -> tuple[Tensor]:
    return (tensor if tensor.is_contiguous() else in_a_row(tensor),)


def in_a_row(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in memory order, of one dim.

    A tensor that has this form is returned as it is, since a view takes 0.7 us.
    """
    if tensor.dim() == 1:
        return tensor
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))
