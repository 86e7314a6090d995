"""Moves between memories of GPUs, all queued on one stream of the team.

The host waits for nothing. If a rank does not come, the stream stands still, and the watchdog
reports it: each post is noted, and marked behind its last move. Signals that show pieces are sent
on one stream, awaited on a second one, and answered, with waits for answers, on a third one: so
nothing separates the copies of consecutive posts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from mdfuse.backends.algorithms import Copy, Reduce
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.symmetric.cuda_memory import CudaLane
from mdfuse.backends.symmetric.cuda_sums import OneKernel
from mdfuse.backends.symmetric.outbox_moves import Move, Put, See, Show, Take
from mdfuse.backends.symmetric.post_buffers import Buffers
from mdfuse.backends.transfers import change
from mdfuse.layouts.call import Call

#: The size of a word, bytes.
WORD = 4


class LaneOrder:
    """The order of all work queued on the lanes of one rank, and of replays.

    Eager posts and replays of graphs take turns, in the order in which the host queues them: a
    capture of a lane is replayed on another stream, so that a lane's order alone would let both use
    the same words at once, where neither the program nor its caller orders the two.

    Args:
        device: its GPU.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._replayed = device, device.event()
        #: the stream of the last replay; None: there was none
        self._stream: int | None = None
        #: the lanes that were posted to since then
        self._posted: set[CudaLane] = set()

    def post(self, lane: CudaLane) -> None:
        """Let a lane wait for the last replay, before an eager post."""
        if lane not in self._posted and lane.era() == 0:
            self._posted.add(lane)
            if self._stream is not None:
                lane.make(self._join)

    def before(self) -> None:
        """Let the current stream wait for all work queued before, ahead of a replay on it."""
        for lane in self._posted:
            lane.end()()
        self._posted.clear()
        if self._stream not in (None, self._device.current_stream()):
            self._join()

    def behind(self) -> None:
        """Note a replay on the current stream."""
        self._stream = self._device.current_stream()
        self._device.record(self._replayed, self._device.stream(self._stream))

    def _join(self) -> None:
        device = self._device
        device.wait(device.stream(device.current_stream()), self._replayed, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOutbox:
    """An outbox as this rank's GPU sees it: the addresses of its words, slots and signals."""

    words: int
    slots: int
    signals: int


@dataclass(eq=False, kw_only=True)
class CudaTeam:
    """The outboxes of a team, by the index of their owner, and the queue of its moves.

    Attributes:
        index: this rank's index.
        outboxes: of all members.
        turns: of this rank, which eager posts and replays of graphs take.
        lane: the queue of moves.
        tell: the queue of signals that show pieces to readers.
        watch: the queue of waits for signals of others.
        behind: the queue of answers to owners, and of waits for answers of readers.
    """

    index: int
    outboxes: Sequence[CudaOutbox]
    turns: LaneOrder
    lane: CudaLane
    tell: CudaLane
    watch: CudaLane
    behind: CudaLane
    #: signal -> the wait until its reader has taken the last shown pieces, and the capture of it
    _taken: dict[int, tuple[int, Callable[[], None]]] = field(default_factory=dict, init=False)

    def post(
        self,
        call: Call,
        moves: Sequence[Move | OneKernel],
        buffers: Callable[[], Buffers],
        notes: tuple[Callable[[], None], Callable[[], None]],
    ) -> CudaWork:
        """Queue a post, between two notes for the watchdog.

        Args:
            call: the communication to post.
            moves: queued in order.
            buffers: returns the buffers; called where memory that it makes belongs to the lane, and
                to the graph that is being captured.
            notes: called before and after.
        """
        before, behind = notes
        before()
        self.turns.post(self.lane)
        self.lane.begin()
        given = self.lane.make(buffers)
        sent = self._queue(call, moves, given)
        received = Half(self.lane.end(), given)
        behind()
        return CudaWork(received, received if sent is None else Half(sent, given))

    def _queue(
        self, call: Call, moves: Sequence[Move | OneKernel], buffers: Buffers
    ) -> Callable[[], None] | None:
        """Queue moves; return the wait for all readers of shown pieces, if there are any."""
        lane, mine = self.lane, self.outboxes[self.index]
        shows = [move for move in moves if isinstance(move, Show)]
        era = self._show(shows)
        for move in moves:
            match move:
                case Put():
                    for word in move.words:
                        lane.wait(mine.words + WORD * word, 0)
                    source = buffers.address(move.piece, move.start)
                    lane.copy(mine.slots + move.place, source, move.bytes)
                    for word in move.words:
                        lane.write(mine.words + WORD * word, move.tag)
                case Take():
                    outbox = self.outboxes[move.owner]
                    word = outbox.words + WORD * move.word
                    lane.wait(word, move.tag)
                    target = buffers.address(move.piece, move.start)
                    lane.copy(target, outbox.slots + move.place, move.bytes)
                    lane.write(word, 0)
                case See():
                    answers = self.behind if shows else lane
                    self._see(move, buffers.address(move.piece, 0), answers)
                case Copy() | Reduce():
                    lane.do(partial(change, call, (move,), buffers.elements))
                case OneKernel():
                    lane.do(partial(move.run, *map(buffers.elements, move.pieces)))
        return self._sent(shows, era)

    def _show(self, shows: Sequence[Show]) -> int:
        """Queue the signals that tell readers; each is set again only when it was answered.

        Returns:
            The era of the signalling stream, which is its capture; the driver is asked once.
        """
        if not shows:
            return 0
        tell = self.tell
        self.turns.post(tell)
        self.turns.post(self.behind)
        tell.begin()
        era = tell.era()
        for show in shows:
            before, taken = self._taken.pop(show.taken, (era, None))
            if taken is not None and before == era:  # otherwise all waits of that era have joined
                tell.make(taken)
            tell.write(self.outboxes[show.reader].signals + WORD * show.shown, show.tag)
        self.behind.make(tell.end())
        return era

    def _see(self, see: See, target: int, answers: CudaLane) -> None:
        """Queue a copy, behind a wait for its owner and before an answer.

        Only the answer waits until the signal is cleared, since the next one may come behind it.
        """
        lane, watch = self.lane, self.watch
        if see.is_first:
            signal = self.outboxes[self.index].signals + WORD * see.shown
            self.turns.post(watch)
            watch.begin()
            watch.wait(signal, see.tag)
            lane.make(watch.end())
            watch.write(signal, 0)
        lane.copy(target, see.source, see.bytes)
        if see.is_last:
            if answers is not lane:
                answers.make(lane.end())
            answers.make(watch.end())
            answers.write(self.outboxes[see.owner].signals + WORD * see.taken, see.tag)

    def _sent(self, shows: Sequence[Show], era: int) -> Callable[[], None] | None:
        """Queue waits for all readers of shown pieces; return the function that awaits them."""
        if not shows:
            return None
        behind, signals = self.behind, self.outboxes[self.index].signals
        for show in shows:
            behind.wait(signals + WORD * show.taken, show.tag)
            behind.write(signals + WORD * show.taken, 0)
        sent = behind.end()
        self._taken.update({show.taken: (era, sent) for show in shows})
        return sent


@dataclass(slots=True, eq=False)
class Half:
    """One half of a post, its sends or its receives, which holds the buffers until its wait."""

    join: Callable[[], None]
    buffers: Buffers | None

    def wait(self) -> None:
        """Let the current stream wait; further calls do no harm."""
        self.join()
        buffers, self.buffers = self.buffers, None
        if buffers is not None:
            buffers.leave()


@dataclass(frozen=True, slots=True, eq=False)
class CudaWork:
    """A post under way; see `Divided`."""

    waits_again: ClassVar[bool] = True

    received: Half
    sent: Half

    def wait(self) -> None:
        """Let the current stream wait for both halves."""
        for half in dict.fromkeys((self.received, self.sent)):
            half.wait()
