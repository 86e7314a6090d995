"""Moves between memories of GPUs, all queued on one stream of the team.

The host waits for nothing. Where a rank does not come, the stream stands still, and the watchdog
says so: each post is noted, and marked behind its last move. Waits for those who read what this
rank shows have a stream of their own, so that no move waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mdfuse.backends.algorithms import Copy, Reduce
from mdfuse.backends.symmetric.cuda_memory import Lane
from mdfuse.backends.symmetric.moves import Move, Put, Show, Take
from mdfuse.backends.symmetric.posts import Buffers
from mdfuse.backends.transfers import change
from mdfuse.layouts.call import Call

#: The size of a word, bytes.
WORD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOutbox:
    """An outbox as this rank's GPU sees it: the addresses of its words and of its slots."""

    words: int
    slots: int


@dataclass(eq=False, kw_only=True)
class CudaTeam:
    """The outboxes of a team, by the index of their owner, and the queue of its moves.

    Attributes:
        own: this rank's index.
        outboxes: of all members.
        lane: where moves are queued.
        behind: where waits for readers are queued.
    """

    own: int
    outboxes: Sequence[CudaOutbox]
    lane: Lane
    behind: Lane
    _taken: tuple[int, Callable[[], None]] | None = field(default=None, init=False)

    def post(
        self,
        call: Call,
        moves: Sequence[Move],
        buffers: Callable[[], Buffers],
        notes: tuple[Callable[[], None], Callable[[], None]],
    ) -> CudaWork:
        """Queue a post, between two notes for the watchdog.

        Args:
            call: what is posted.
            moves: queued in order.
            buffers: returns the buffers; called where memory that it makes belongs to the lane, and
                to the graph that is being captured.
            notes: called before and after.
        """
        before, behind = notes
        before()
        self.lane.begin()
        given = self.lane.make(buffers)
        sent = self._queue(call, moves, given)
        received = Half(self.lane.end(), given)
        behind()
        return CudaWork(received, received if sent is None else Half(sent, given))

    def _queue(
        self, call: Call, moves: Sequence[Move], buffers: Buffers
    ) -> Callable[[], None] | None:
        """Queue moves; return what waits for all readers of what is shown, if something is."""
        lane, own, taken = self.lane, self.outboxes[self.own], None
        self._settle(moves)
        shown = [word for move in moves if isinstance(move, Show) for word in move.words]
        for move in moves:
            match move:
                case Show():
                    for word in move.words:
                        lane.wait(own.words + WORD * word, 0)
                        lane.write(own.words + WORD * word, move.tag)
                        shown.remove(word)
                    if not shown:
                        taken = self._wait_for_readers(moves)
                case Put():
                    for word in move.words:
                        lane.wait(own.words + WORD * word, 0)
                    source = buffers.address(move.piece, move.start)
                    lane.copy(own.slots + move.place, source, move.bytes)
                    for word in move.words:
                        lane.write(own.words + WORD * word, move.tag)
                case Take():
                    outbox = self.outboxes[move.owner]
                    word = outbox.words + WORD * move.word
                    lane.wait(word, move.tag)
                    target = buffers.address(move.piece, move.start)
                    slot = outbox.slots + move.place
                    lane.copy(target, slot if move.source is None else move.source, move.bytes)
                    lane.write(word, 0)
                case Copy() | Reduce():
                    lane.do(partial(change, call, (move,), buffers.elements))
        return taken

    def _settle(self, moves: Sequence[Move]) -> None:
        """Write no word before the wait for its readers has seen that it is 0."""
        era, taken = self._taken or (0, None)
        if taken is None or not any(isinstance(move, Put | Show) for move in moves):
            return
        self._taken = None
        if era == self.lane.era():  # else all of that time has come together
            self.lane.make(taken)

    def _wait_for_readers(self, moves: Sequence[Move]) -> Callable[[], None]:
        """Queue the wait until every piece that was shown is taken; return what waits for it."""
        self.behind.make(self.lane.end())
        words = {word for move in moves if isinstance(move, Show) for word in move.words}
        for word in sorted(words):
            self.behind.wait(self.outboxes[self.own].words + WORD * word, 0)
        taken = self.behind.end()
        self._taken = self.lane.era(), taken
        return taken


@dataclass(slots=True, eq=False)
class Half:
    """What was sent, or what was received; it holds the buffers until it is waited for."""

    join: Callable[[], None]
    kept: Buffers | None

    def wait(self) -> None:
        """Let the current stream wait; further calls do no harm."""
        self.join()
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.leave()


@dataclass(frozen=True, slots=True, eq=False)
class CudaWork:
    """A post under way; see `Divided`."""

    received: Half
    sent: Half

    def wait(self) -> None:
        """Let the current stream wait for both halves."""
        for half in dict.fromkeys((self.received, self.sent)):
            half.wait()
