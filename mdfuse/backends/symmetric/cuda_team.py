"""Moves through outboxes in memory of GPUs, all queued on one stream of the team.

The host waits for nothing. Where a rank does not come, the stream stands still, and the watchdog
says so: each post is noted, and marked behind its last move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mdfuse.backends.algorithms import Copy, Reduce
from mdfuse.backends.symmetric.cuda_memory import Lane
from mdfuse.backends.symmetric.moves import Move, Put, Take
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
    """

    own: int
    outboxes: Sequence[CudaOutbox]
    lane: Lane

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
        self._queue(call, moves, given)
        join = self.lane.end()
        behind()
        return CudaWork(join, given)

    def _queue(self, call: Call, moves: Sequence[Move], buffers: Buffers) -> None:
        lane, own = self.lane, self.outboxes[self.own]
        for move in moves:
            match move:
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
                    lane.copy(target, outbox.slots + move.place, move.bytes)
                    lane.write(word, 0)
                case Copy() | Reduce():
                    lane.do(partial(change, call, (move,), buffers.elements))


@dataclass(slots=True, eq=False)
class CudaWork:
    """A post that holds its buffers until it is waited for."""

    join: Callable[[], None]
    kept: Buffers | None

    def wait(self) -> None:
        """Let the current stream wait; further calls do no harm."""
        self.join()
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.leave()
