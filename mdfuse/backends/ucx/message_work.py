"""Composed communications in flight, whose steps follow each other as messages arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.algorithms import Composition, Copy, Piece, Reduce, Round, Transfer
from mdfuse.backends.base import flat
from mdfuse.backends.transfers import change
from mdfuse.backends.ucx.ucx_engine import Channel, Engine
from mdfuse.backends.work import failure, first_line
from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import CARRIED


class UcxBuffers:
    """The buffers of a post: as tensors for local work, as bytes for UCX."""

    __slots__ = ("_bytes", "_flat")

    def __init__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], scratch: Tensor) -> None:
        sides = {"src": srcs, "dst": dsts, "scratch": (scratch,)}
        self._flat = {side: [flat(x) for x in buffers] for side, buffers in sides.items()}
        self._bytes = {side: [_bytes(x) for x in row] for side, row in self._flat.items()}

    def elements(self, piece: Piece) -> Tensor:
        """Return a piece as a tensor of one dim."""
        return self._flat[piece.side][piece.index][piece.start : piece.stop]

    def bytes(self, piece: Piece) -> Any:
        """Return a piece as bytes in the form that UCX takes."""
        n = self._flat[piece.side][piece.index].itemsize
        return self._bytes[piece.side][piece.index][piece.start * n : piece.stop * n]


def _bytes(elements: Tensor) -> Any:
    """Return elements as bytes: on the host a numpy array, which UCX reads faster than a tensor."""
    octets = elements.view(torch.uint8)
    return octets if elements.is_cuda else octets.numpy()


@dataclass(slots=True)
class _Message:
    """A transfer with its tag and, once begun, its request."""

    peer: int
    is_send: bool
    buffer: Any
    tag: int
    request: Any = None


@dataclass(eq=False)
class ComposedWork:
    """One rank's post of a composed communication; it begins when it is made.

    Attributes:
        call: the communication.
        composition: the steps of the post.
        buffers: its buffers, kept here until it is over: UCX holds no reference to them.
        channel: numbers all its messages when it is made, since both ends count in the order of
            posts.
        engine: makes it progress.
        timeout_s: how long a wait may take.
        gate: orders it with work queued on its device; None where the buffers are the host's.
    """

    call: Call
    composition: Composition
    buffers: UcxBuffers
    _: KW_ONLY
    channel: Channel
    engine: Engine
    timeout_s: float
    gate: Gate | None = None
    _is_done: bool = False
    _error: BackendError | None = None

    def __post_init__(self) -> None:
        kind, steps = KIND_NUMBERS[self.call.kind], self.composition.steps
        messages = ((s.local, _messages(s, self.buffers, self.channel, kind)) for s in steps)
        self._steps, self._in_flight = deque(messages), list[_Message]()
        self._at = self.call.rank  # the peer of the message at hand, which an error names
        self.engine.post(self)

    def wait(self) -> None:
        """Return once the buffers may be used; a second wait returns at once.

        Raises:
            BackendError: another rank is gone, or nothing came from it in time; a second wait
                raises again.
        """
        before = self.engine.aborted
        if not self._is_over() and not self.engine.wait(self._is_over, self.timeout_s):
            self.engine.drop(self)
            was_ended = self.engine.aborted != before
            self._fail(_ENDED if was_ended else self._what_is_missing())
        if self._error is not None:
            raise self._error

    def advance(self) -> bool:
        """Make progress without waiting; return whether the post is over, well or not."""
        try:
            while not self._is_over() and self._has_arrived() and self._is_ready():
                if self._steps:
                    self._begin(*self._steps.popleft())
                else:
                    self._end()
        except self.engine.error as error:
            what = "is gone" if self.engine.is_gone(self._at) else "does not get or give it"
            self._fail(f"rank {self._at} {what} ({first_line(error)})")
        return self._is_over()

    def _is_over(self) -> bool:
        return self._is_done or self._error is not None

    def _has_arrived(self) -> bool:
        """Return whether all messages of this step have arrived, or were sent."""
        while self._in_flight:
            message = self._in_flight[-1]
            if not message.request.completed:
                return False
            self._at = message.peer
            message.request.check_error()
            self._in_flight.pop()
        return True

    def _is_ready(self) -> bool:
        """Return whether the device has done the work that comes before the next step."""
        return self.gate is None or self.gate.is_open()

    def _begin(self, local: tuple[Copy | Reduce, ...], messages: list[_Message]) -> None:
        if local and self.gate is not None:
            with self.gate.local_work():
                change(self.call, local, self.buffers.elements)
            self._steps.appendleft(((), messages))  # begun once the gate is open again
            return
        change(self.call, local, self.buffers.elements)
        engine = self.engine
        for message in messages:
            self._at = message.peer
            begin = engine.send if message.is_send else engine.receive
            message.request = begin(self._at, message.buffer, message.tag)
            self._in_flight.append(message)

    def _end(self) -> None:
        self.buffers = _NOTHING
        self._is_done = True

    def _fail(self, because: str) -> None:
        self._error = failure(self.call, TimeoutError(because))
        self.engine.keep(self)  # with its buffers: UCX may still write into them

    def _what_is_missing(self) -> str:
        if not self._in_flight:
            return f"after {self.timeout_s:g} s the device has not done what was queued before it"
        late = [x.peer for x in self._in_flight if not x.request.completed]
        ranks = ", ".join(map(str, sorted(set(late))))
        return f"after {self.timeout_s:g} s nothing came from, or was taken by, rank {ranks}"


def _messages(step: Round, buffers: UcxBuffers, channel: Channel, kind: int) -> list[_Message]:
    """Return the messages of a step with their tags, receives first.

    A message that comes early then finds its buffer.
    """

    def message(t: Transfer, is_send: bool) -> _Message:
        piece = buffers.bytes(t.piece)
        tag = channel.tag_to if is_send else channel.tag_from
        return _Message(t.peer, is_send, piece, tag(t.peer, kind, len(piece)))

    return [message(t, False) for t in step.recvs] + [message(t, True) for t in step.sends]


#: A kind's number in the tags of its messages, so that posts of different kinds never match.
KIND_NUMBERS = {kind: n for n, kind in enumerate(CARRIED)}

#: The reason given by a wait that another thread ended.
_ENDED = "the wait was ended: another rank does not take part"

_NOTHING = UcxBuffers((), (), torch.empty(0))


# -- device memory in the order of streams, which UCX does not know --------------------------------


class Gate:
    """A gate that is open when UCX may use the buffers of one post.

    The gate is closed while work is under way that was queued before the post, or that belongs to
    the post's own local work. Local work has a stream of its own: any wait may make the post
    progress, and the stream that is current there may have a long queue.
    """

    __slots__ = ("_last", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._last = torch.cuda.current_stream(stream.device).record_event()

    def is_open(self) -> bool:
        """Return whether that work is done.

        The host sees its end here, so that work queued afterwards sees the result on any stream.
        """
        is_done: bool = self._last.query()
        return is_done

    @contextmanager
    def local_work(self) -> Iterator[None]:
        """Queue local work of the post in this context; the gate is closed until it is done."""
        with torch.cuda.stream(self._stream):
            yield
            self._last = self._stream.record_event()
