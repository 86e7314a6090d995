"""Pending communications: the value of a post's slot until its wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mdfuse.backends.base import Work
from mdfuse.backends.work import Queued, Shared, leave
from mdfuse.layouts.reduction import combine

#: (destination, the dense buffer in which the data arrives)
Copies = tuple[tuple[Tensor, Tensor], ...]


@dataclass(slots=True)
class Pending:
    """A posted communication: its pieces, and copies to make once it is done."""

    works: tuple[Work, ...]
    unpack: Copies = ()
    #: the op that reduces the arrived rows of terms; None: nothing is reduced
    reduce_op: str | None = None

    def wait(self, piece: int | None = None) -> None:
        """Wait for the work, or a piece of it, then move the arrived data to its destination."""
        for work in self.works if piece is None else self.works[piece : piece + 1]:
            work.wait()
        unpack, self.unpack = self.unpack, ()
        for destination, source in unpack:
            if self.reduce_op is not None:
                rows = source.reshape(len(source), -1)  # of numbers, too
                source = combine(self.reduce_op, rows).view(destination.shape)
            destination.copy_(source)
            leave((source,))

    def is_done(self, piece: int | None = None) -> bool:
        """Tell, on the simulator, whether a wait for the post or one piece would return at once."""
        works = self.works if piece is None else self.works[piece : piece + 1]
        return all(work.is_done for work in works)  # type: ignore[attr-defined]


def halves(works: tuple[Work, ...], has_streams: bool) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Return the works that the waits of the send and of the receive wait for.

    Some backends have works whose halves can be waited for one by one (`Divided`). With other
    works, both sides wait for the whole. The library's works then need a `Shared` one, which also
    waits for all work that was queued before the first wait.
    """
    if has_streams:
        works = tuple([w if getattr(w, "waits_again", False) else Shared(w) for w in works])
    sent, received = (
        tuple([getattr(work, half, work) for work in works]) for half in ("sent", "received")
    )
    return sent, received


def nothing_posted(has_streams: bool) -> Callable[[], tuple[Work, ...]]:
    """Return the function that makes the works of posts that only copy on their own rank.

    Without streams a copy is done at once, and there is nothing to wait for.
    """
    return (lambda: (Queued(),)) if has_streams else tuple


def landing(place: Tensor) -> tuple[Tensor, Copies]:
    """Return a dense buffer to receive into, and the copy to `place` where that is not dense."""
    if place.is_contiguous():
        return place, ()
    dst = torch.empty(place.shape, dtype=place.dtype, device=place.device)
    return dst, ((place, dst),)
