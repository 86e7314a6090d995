"""Pending communications: what the slot of a post holds until its wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mdfuse.backends.base import Work
from mdfuse.backends.work import Queued, Shared, leave
from mdfuse.layouts.reduction import combine

#: (where data belongs, the dense buffer in which it arrives)
Copies = tuple[tuple[Tensor, Tensor], ...]


@dataclass(slots=True)
class Pending:
    """A posted communication: its pieces, and copies to make once it is done."""

    works: tuple[Work, ...]
    unpack: Copies = ()
    #: what arrived is reduced: rows of terms, by this op
    reduce_op: str | None = None

    def wait(self, piece: int | None = None) -> None:
        """Wait for the work, or a piece of it, then move what arrived to where it belongs."""
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
    """Return what is to be waited for where something is sent, and where it is received.

    Some backends have works whose halves can be waited for one by one (`Divided`). Of others both
    sides wait for the whole. A `Shared` one, which the library's works need for that, also waits
    for all that was queued, where the first wait stood, before that.
    """
    if has_streams:
        works = tuple([w if getattr(w, "waits_again", False) else Shared(w) for w in works])
    sent, received = (
        tuple([getattr(work, half, work) for work in works]) for half in ("sent", "received")
    )
    return sent, received


def nothing_posted(has_streams: bool) -> Callable[[], tuple[Work, ...]]:
    """Return what makes the works of posts that only copy on their own rank.

    Without streams a copy is done at once, and there is nothing to wait for.
    """
    return (lambda: (Queued(),)) if has_streams else tuple


def landing(place: Tensor) -> tuple[Tensor, Copies]:
    """Return a dense buffer to receive into, and the copy to `place` where that is not dense."""
    if place.is_contiguous():
        return place, ()
    dst = torch.empty(place.shape, dtype=place.dtype, device=place.device)
    return dst, ((place, dst),)
