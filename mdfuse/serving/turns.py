"""Requests that have slots and pages, requests that wait, and the integers of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mdfuse.errors import ProgramError, counted
from mdfuse.serving.requests import Continuation, Request
from mdfuse.serving.shape import StepShape

Integers = npt.NDArray[np.int64]

#: How many results of requests that are over are kept.
KEPT = 4096


class Turns:
    """The requests of an engine: those that wait, in their order, and one for each busy slot.

    A request has its slot and all of its pages from the first step to the last one, so that no
    request stops half-way for want of pages; one that has too few waits, and those behind it.
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._slots = [*range(shape.slots)][::-1]
        self.pages = [*range(1, shape.pages)][::-1]
        self._table = np.zeros((shape.slots, shape.pages_of_slot), dtype=np.int64)
        self._all: dict[int, Request] = {}
        self._over: dict[int, Continuation] = {}

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            ProgramError: all pages together are too few for it.
        """
        wanted, pages = self._pages_for(request), self.shape.pages - 1
        if self.shape.pages and wanted > pages:
            raise ProgramError(
                f"a prompt of {counted(request.prompt, 'token')} and {request.most} behind it",
                because=f"they need {counted(wanted, 'page')} of {self.shape.page_size}, and there "
                f"are {pages}",
                hint="ask for a smaller max_tokens=, or generate(..., pages=) for more",
            )
        self._all[request.number] = request
        self.waiting.append(request)
        self.admit()

    def admit(self) -> None:
        """Give slots and pages to those that wait, in their order, while there are some."""
        while self.waiting:
            first = self.waiting[0]
            wanted = self._pages_for(first)
            if not self._slots or wanted > len(self.pages):
                first.because = (
                    f"{counted(wanted, 'page')} needed, {len(self.pages)} free"
                    if self._slots
                    else f"all {self.shape.slots} slots are busy"
                )
                break
            self._start(self.waiting.popleft(), wanted)
        for request in [*self.waiting][1:]:
            request.because = "others wait before it"

    def _start(self, request: Request, pages: int) -> None:
        slot = request.slot = self._slots.pop()
        request.pages = [self.pages.pop() for _ in range(pages)]
        self._table[slot, :pages] = request.pages
        request.state, request.because = "running", ""
        self.running[slot] = request

    def _pages_for(self, request: Request) -> int:
        return (
            -(-(request.prompt + request.most) // self.shape.page_size) if self.shape.pages else 0
        )

    def cancel(self, number: int) -> None:
        """End a request, if it is not over."""
        request = self._all.get(number)
        if request is None:
            self.result(number)  # which says what is wrong with it
            return
        request.state, request.because = "cancelled", ""
        self._end(request)
        self.admit()

    def result(self, number: int) -> Continuation:
        """Return the tokens of a request so far, and its state.

        Raises:
            ProgramError: there is no such request, or it was over long ago.
        """
        if number in self._all:
            return self._all[number].result
        if number in self._over:
            return self._over[number]
        raise ProgramError(
            f"request {number!r}",
            because=f"no such one was submitted, or {KEPT:,} others have ended since",
            hint="submit() returns the number of a request",
        )

    def _end(self, request: Request) -> None:
        del self._all[request.number]
        if request.slot is None:
            self.waiting.remove(request)
        else:
            del self.running[request.slot]
            self._slots.append(request.slot)
            self.pages += request.pages
            self._table[request.slot] = 0
        self._over[request.number] = request.result
        if len(self._over) > KEPT:
            del self._over[next(iter(self._over))]

    # -- a step ------------------------------------------------------------------------------------

    def chunked(self) -> Request | None:
        """The first request that lacks more than its last token in the caches."""
        if not self.shape.chunk:
            return None
        lacks = (x for x in self.running.values() if len(x.ids) - x.done > 1)
        return min(lacks, key=lambda x: x.number, default=None)

    def integers(self, shape: StepShape, chunked: Request | None) -> Integers:
        """The integers of a step; each request with a slot is one token further, one a chunk."""
        step = np.zeros(shape.size, dtype=np.int64)
        parts = shape.parts(step)
        parts["table"][:] = self._table
        if chunked is not None:
            self._write_chunk(parts, chunked)
        for slot, request in self.running.items():
            self._write(parts, slice(slot, slot + 1), request, 1)
        for slot in self._slots:  # writes where the next request of this slot begins
            parts["rows"][slot] = 0 if shape.pages else slot
        return step

    def _write_chunk(self, parts: dict[str, Integers], request: Request) -> None:
        """Write all but the last token that a request lacks, or as many as a chunk has."""
        n, chunk = self.shape.slots, len(parts["ids"]) - self.shape.slots
        count = min(chunk, len(request.ids) - request.done - 1)
        assert request.slot is not None
        parts["slot"][:] = request.slot
        self._write(parts, slice(n, n + count), request, count)
        for name in ("ids", "positions", "rows"):  # the others do what the last one does
            parts[name][n + count :] = parts[name][n + count - 1]

    def _write(self, parts: dict[str, Integers], at: slice, request: Request, count: int) -> None:
        positions = np.arange(request.done, request.done + count)
        parts["ids"][at] = request.ids[request.done : request.done + count]
        parts["positions"][at] = positions
        parts["rows"][at] = self._rows(request, positions)
        request.done += count

    def _rows(self, request: Request, positions: Integers) -> Integers:
        """The rows of the caches for positions of a request."""
        s = self.shape
        assert request.slot is not None
        if not s.pages:
            return positions * s.slots + request.slot
        pages: Integers = self._table[request.slot, positions // s.page_size]
        return pages * s.page_size + positions % s.page_size

    @property
    def complete(self) -> dict[int, Request]:
        """By slot, requests whose last token was computed: what the step chooses follows them."""
        return {slot: x for slot, x in self.running.items() if x.done == len(x.ids)}

    def take(self, tokens: Sequence[int]) -> None:
        """Append what a step chose for each slot; give slots and pages of those that end away."""
        for slot, request in self.complete.items():
            request.take(tokens[slot])
            if request.result.is_over:
                self._end(request)
        self.admit()
