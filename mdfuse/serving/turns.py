"""Requests that have slots and pages, requests that wait, and the integers of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mdfuse.errors import ProgramError, counted
from mdfuse.serving.decoder import LAST
from mdfuse.serving.requests import Continuation, Request
from mdfuse.serving.shape import StepShape

Integers = npt.NDArray[np.int64]

#: How many results of requests that are over are kept.
KEPT = 4096


class Begun(NamedTuple):
    """A step that has begun.

    Attributes:
        has_chunk: whether it computes a chunk.
        integers: that it reads; the next such step overwrites them.
        requests: those with a slot.
        chosen: by slot, those that it chooses a token for.
    """

    has_chunk: bool
    integers: Integers
    requests: tuple[Request, ...]
    chosen: dict[int, Request]

    @property
    def left(self) -> int:
        """The number of its requests that nothing has ended since."""
        return sum(not x.is_over for x in self.requests)


class Turns:
    """The requests of an engine: those that wait, in their order, and one for each busy slot.

    A request has its slot and all of its pages from the first step to the last one, so that no
    request stops half-way for want of pages; one that has too few waits, and those behind it.

    A step may begin before the tokens of the last one are read: in their place stands `LAST`. Who
    has all tokens by then gives its slot away; who turns out to have ended earlier has computed a
    token more, which nobody reads, in a row of its slot or pages.
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._slots = [*range(shape.slots)][::-1]
        self.pages = [*range(1, shape.pages)][::-1]
        self._table = np.zeros((shape.slots, shape.pages_of_slot), dtype=np.int64)
        self._slot_numbers = np.arange(shape.slots)
        shapes = (replace(shape, chunk=0), shape)
        self._integers = [np.zeros(s.size, dtype=np.int64) for s in shapes]
        self._parts = [s.parts(x) for s, x in zip(shapes, self._integers, strict=True)]
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
            request = self._all[number]
            if request.state == "waiting" and request is not self.waiting[0]:
                request.because = "others wait before it"
            return request.result
        if number in self._over:
            return self._over[number]
        raise ProgramError(
            f"request {number!r}",
            because=f"no such one was submitted, or {KEPT:,} others have ended since",
            hint="submit() returns the number of a request",
        )

    def _end(self, request: Request) -> None:
        del self._all[request.number]
        if request.slot is None and request in self.waiting:
            self.waiting.remove(request)
        self._leave(request)
        self._over[request.number] = request.result
        if len(self._over) > KEPT:
            del self._over[next(iter(self._over))]

    def _leave(self, request: Request) -> None:
        """Give the slot and the pages of a request away, where it has some."""
        if request.slot is not None:
            del self.running[request.slot]
            self._slots.append(request.slot)
            self.pages += request.pages
            self._table[request.slot] = 0
            request.slot, request.pages = None, []

    # -- a step ------------------------------------------------------------------------------------

    def begin(self) -> Begun | None:
        """Take each request with a slot one token further, one a chunk; None: nobody has a slot."""
        full = [x for x in self.running.values() if x.is_full]
        for request in full:
            self._leave(request)
        if full:
            self.admit()
        if not self.running:
            return None
        chunked = self.chunked()
        integers, chosen = self.integers(chunked), self.complete
        for request in chosen.values():
            request.pending += 1
        return Begun(chunked is not None, integers, (*self.running.values(),), chosen)

    def chunked(self) -> Request | None:
        """The first request that lacks more than its last token in the caches."""
        if not self.shape.chunk:
            return None
        lacks = (x for x in self.running.values() if x.length - x.done > 1)
        return min(lacks, key=lambda x: x.number, default=None)

    def integers(self, chunked: Request | None) -> Integers:
        """The integers of a step; each request with a slot is one token further, one a chunk."""
        has_chunk, n = chunked is not None, self.shape.slots
        parts, rows = self._parts[has_chunk], self._slot_numbers
        parts["table"][:] = self._table
        if chunked is not None:
            self._write_chunk(parts, chunked)
        ids, positions = [0] * n, [0] * n  # free slots write where their next request begins
        for slot, x in self.running.items():
            ids[slot] = x.ids[x.done] if x.done < len(x.ids) else LAST
            positions[slot] = x.done
            x.done += 1
        parts["ids"][:n] = ids
        parts["positions"][:n] = positions
        parts["rows"][:n] = self._rows(rows, parts["positions"][:n])
        return self._integers[has_chunk]

    def _write_chunk(self, parts: dict[str, Integers], request: Request) -> None:
        """Write all but the last token that a request lacks, or as many as a chunk has."""
        n, start = self.shape.slots, request.done
        count = min(self.shape.chunk, request.length - start - 1)
        assert request.slot is not None
        positions = np.arange(start, start + count)
        parts["slot"][:] = request.slot
        parts["ids"][n : n + count] = request.ids[start : start + count]
        parts["positions"][n : n + count] = positions
        parts["rows"][n : n + count] = self._rows(request.slot, positions)
        for name in ("ids", "positions", "rows"):  # the others do what the last one does
            parts[name][n + count :] = parts[name][n + count - 1]
        request.done += count

    def _rows(self, slots: int | Integers, positions: Integers) -> Integers:
        """The rows of the caches for positions of slots."""
        s = self.shape
        if not s.pages:
            return positions * s.slots + slots
        pages: Integers = self._table[slots, positions // s.page_size]
        return pages * s.page_size + positions % s.page_size

    @property
    def complete(self) -> dict[int, Request]:
        """By slot, requests whose last token was computed: what the step chooses follows them."""
        return {slot: x for slot, x in self.running.items() if x.done == x.length}

    def take(self, begun: Begun, tokens: Sequence[int]) -> None:
        """Append what a step chose for each slot; give slots and pages of those that end away."""
        for slot, request in begun.chosen.items():
            if not request.is_over:
                request.pending -= 1
                if request.take(tokens[slot]):
                    self._end(request)
        self.admit()
