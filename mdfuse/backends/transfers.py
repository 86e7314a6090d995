"""Compositions carried out: what a library has no call for, as transfers that it has.

A library that is not made of transfers alone gets those of a post in one step: its waits may come
in any order, and what a wait posted would meet what others posted before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mdfuse.backends.algorithms import Composition, Copy, Piece, Reduce, Sizes, compose
from mdfuse.backends.base import Work, flat
from mdfuse.backends.work import DONE, Posted
from mdfuse.errors import CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import REDUCING
from mdfuse.layouts.reduction import check_reduction, combine

Post = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]

#: One side of a transfer: the other rank's index in the team, elements that lie in a row.
Transfer = tuple[int, Tensor]

#: More than any buffer has.
_ANY_SIZE = 1 << 62


class Composer:
    """The compositions of a call, one per sizes of its buffers.

    Args:
        call: what is posted.
        small_bytes: what may arrive in one step rather than in several; None: anything.
    """

    __slots__ = ("_call", "_found", "_small_bytes")

    def __init__(self, call: Call, small_bytes: int | None = None) -> None:
        self._call = call
        self._small_bytes = small_bytes
        self._found: dict[object, Composition] = {}

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Composition:
        """The composition for buffers like these, of which there is one at least.

        Raises:
            CommunicationError: the buffers, the reduce op or the root do not fit the call.
        """
        dtype = (srcs or dsts)[0].dtype
        key = (dtype, *[x.numel() for x in srcs], None, *[x.numel() for x in dsts])
        found = self._found.get(key)
        if found is None:
            if self._call.kind in REDUCING:
                check_reduction(self._call.reduce_op, dtype)
            limit = self._small_bytes
            sizes = Sizes(
                srcs=tuple(x.numel() for x in srcs),
                dsts=tuple(x.numel() for x in dsts),
                small=_ANY_SIZE if limit is None else limit // dtype.itemsize,
            )
            found = compose(self._call, sizes)
            if limit is None:
                _check_one_step(self._call, found)
            self._found[key] = found
        return found


def _check_one_step(call: Call, composition: Composition) -> None:
    if any(step.recvs or step.sends for step in composition.steps[1:]):
        raise CommunicationError(
            f"{call.kind} on team {call.team} takes several steps of transfers",
            because="a post of this library is one step: no wait posts anything",
            hint="let compose() do it in one step where everything is small",
        )


def change(call: Call, local: Sequence[Copy | Reduce], elements: Callable[[Piece], Tensor]) -> None:
    """Do a step's local work; `elements` gives those of a piece, dense."""
    for one in local:
        match one:
            case Copy(source, target):
                flat(elements(target)).copy_(flat(elements(source)))
            case Reduce(rows, target):
                operands = elements(rows).view(len(call.team), -1)
                flat(elements(target)).copy_(combine(call.reduce_op or "", operands))


def transferred(
    call: Call, transfer: Callable[[list[Transfer], list[Transfer]], Sequence[Any]]
) -> Post:
    """What posts a call as transfers.

    Args:
        call: what is posted.
        transfer: begins receives and sends; there is one at least.
    """
    composer, index = Composer(call), {rank: i for i, rank in enumerate(call.team)}

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        composition = composer(srcs, dsts)
        if not composition.steps:
            return DONE
        step, *rest = composition.steps
        sides = {"src": srcs, "dst": dsts}
        if composition.scratch:
            sides["scratch"] = ((srcs or dsts)[0].new_empty(composition.scratch),)

        def elements(piece: Piece) -> Tensor:
            x = sides[piece.side][piece.index]
            if piece.size == x.numel() and x.is_contiguous():
                return x
            return flat(x)[piece.start : piece.stop]

        def finish() -> None:
            for later in rest:
                change(call, later.local, elements)

        change(call, step.local, elements)
        recvs = [(index[t.peer], elements(t.piece)) for t in step.recvs]
        sends = [(index[t.peer], elements(t.piece)) for t in step.sends]
        works = transfer(recvs, sends) if recvs or sends else ()
        if not works and not rest:
            return DONE
        return Posted(call, works, (recvs, sends), finish if rest else None)

    return post
