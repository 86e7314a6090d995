"""Moves through outboxes in memory of the host: waits look at words, and copy.

Nothing moves while no rank waits or posts: a post makes the moves that it can, and a wait makes
those of all posts of this rank, each team's in the order of its posts. An idle rank gives its core
away, then sleeps for longer and longer: ranks may outnumber cores.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import Tensor

from mdfuse.backends.algorithms import Copy, Reduce
from mdfuse.backends.base import Work
from mdfuse.backends.symmetric.heap import Heap
from mdfuse.backends.symmetric.host_memory import Fence, SharedMemory
from mdfuse.backends.symmetric.outbox_moves import IN_HEAP, SLOTS, Move, Put, Shape, Take, kind_of
from mdfuse.backends.symmetric.post_buffers import Buffers
from mdfuse.backends.teams import no_more_posts
from mdfuse.backends.transfers import change
from mdfuse.backends.work import DONE, failure
from mdfuse.errors import BackendError
from mdfuse.hir.row_norms import RowNorm
from mdfuse.interpreter.processes import Process
from mdfuse.layouts.call import Call

#: How often a wait looks, giving its core away in between, before it sleeps; and its sleeps, which
#: double, seconds.
_LOOKS, _SHORTEST_S, _LONGEST_S = 50, 2e-5, 1e-3

#: How many chunks a piece has at most that goes through the outbox although it lies in the heap: as
#: many as there are slots, so that its owner need not wait for readers, which takes longer.
FEW_CHUNKS = SLOTS

#: How often a wait looks whether the processes that it waits for live, seconds.
_LIVENESS_S = 0.1


class PendingPosts:
    """The posts of this process that are under way, and the waits for them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._queues: list[deque[HostPost]] = []
        #: how often another thread ended the waits under way
        self.aborted = 0

    def new_queue(self) -> deque[HostPost]:
        """Return a new queue, whose posts are made one after the other."""
        queue: deque[HostPost] = deque()
        self._queues.append(queue)
        return queue

    def begin(self, post: HostPost) -> None:
        """Put a post into the queue of its team, and make all moves that can be made."""
        with self._lock:
            post.team.queue.append(post)
            self.look()

    def look(self) -> bool:
        """Make all moves that can be made now; return whether there was one."""
        with self._lock:
            has_moved = False
            for queue in self._queues:
                while queue and queue[0].advance():
                    queue.popleft()
                    has_moved = True
                has_moved = has_moved or bool(queue and queue[0].has_moved)
            return has_moved

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> str | None:
        """Make moves until `is_over()`; return None, or the reason why the wait ended before."""
        deadline, before, looks = time.monotonic() + timeout_s, self.aborted, 0
        while not is_over():
            if self.look():
                looks = 0
                continue
            if self.aborted != before:
                return "the wait was ended: another rank does not take part"
            if time.monotonic() > deadline:
                return ""
            looks += 1
            _pause(looks)
        return None


def _pause(looks: int) -> None:
    """Give the core away after so many looks in vain."""
    if looks < _LOOKS:
        os.sched_yield()
    else:
        time.sleep(min(_SHORTEST_S * 2 ** min(looks - _LOOKS, 10), _LONGEST_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutbox:
    """An outbox: its words with their places, its slots and their addresses, its owner's heap."""

    words: Any
    places: Any
    slots: Any
    address: int
    heap: SharedMemory | None


@dataclass(eq=False, kw_only=True)
class HostTeam:
    """The outboxes of a team, by the index of their owner, and the posts that go through them.

    Attributes:
        ranks: of the team.
        index: this rank's index.
        outboxes: of all members.
        processes: of all members.
        progress: of this process.
        timeout_s: how long a wait may take.
        heap: of this process; None where it has none.
        is_broken: a post failed, so that members may be at different ones.
    """

    ranks: tuple[int, ...]
    index: int
    outboxes: Sequence[HostOutbox]
    processes: Sequence[Process]
    progress: PendingPosts
    timeout_s: float
    heap: Heap | None = None
    is_broken: bool = False
    queue: deque[HostPost] = field(init=False)

    def __post_init__(self) -> None:
        self.queue = self.progress.new_queue()
        self._fence = Fence()

    def joined(self, call: Call, norm: RowNorm, rows: int) -> None:
        """Return no post of a sum and a norm: hosts make them one after the other."""

    def poster(self, call: Call, size: int, sited: object) -> Callable[..., Work]:
        """Return the function that begins posts of a call; see `Team`."""

        def post(
            moves: Sequence[Move], srcs: Sequence[Tensor], dsts: Sequence[Tensor], scratch: int
        ) -> Work:
            if not moves:
                return DONE
            self.check_usable(call)
            begun = HostPost(call, moves, Buffers.of(srcs, dsts, scratch), team=self)
            self.progress.begin(begun)
            return begun

        return post

    def check_usable(self, call: Call) -> None:
        """Refuse a post on a team that failed before.

        Raises:
            BackendError: it is refused.
        """
        if self.is_broken:
            raise no_more_posts(call)

    def readers_of(self, put: Put) -> list[int]:
        """Return the readers that have not taken the last piece from a piece's place."""
        words = self.outboxes[self.index].words
        pairs = zip(put.readers, put.words, strict=True)
        return [reader for reader, word in pairs if words[word]]

    def put(self, move: Put, source: int) -> None:
        """Copy bytes at an address into this rank's outbox, and tell the readers.

        Not by torch, whose threads wait for each other: where ranks outnumber cores, a copy of
        1 MiB then took 100 ms.
        """
        outbox = self.outboxes[self.index]
        self._fence()
        ctypes.memmove(outbox.address + move.place, source, move.bytes)
        self._fence()
        for word in move.words:
            outbox.words[word] = move.tag

    def take(self, move: Take, target: int) -> None:
        """Copy bytes out of a member's outbox to an address, and tell it."""
        outbox = self.outboxes[move.owner]
        self._fence()
        ctypes.memmove(target, outbox.address + move.place, move.bytes)
        self._fence()
        outbox.words[move.word] = 0

    def show(self, move: Put, place: int) -> None:
        """Tell the readers of a piece where all of it lies in this rank's heap."""
        outbox = self.outboxes[self.index]
        for word in move.words:
            outbox.places[word] = place
        self._fence()
        for word in move.words:
            outbox.words[word] = move.tag | IN_HEAP

    def take_shown(self, move: Take, target: int, size: int) -> bool:
        """Copy a whole piece out of a member's heap; return whether it was there until the end."""
        outbox = self.outboxes[move.owner]
        assert outbox.heap is not None  # its owner said where a piece lies there
        self._fence()
        ctypes.memmove(target, outbox.heap.address + outbox.places[move.word], size)
        self._fence()
        is_there = bool(outbox.words[move.word])
        outbox.words[move.word] = 0
        return is_there

    def withdraw(self, shown: Sequence[Put]) -> None:
        """Tell readers that a piece is no longer there."""
        for word in (word for move in shown for word in move.words):
            self.outboxes[self.index].words[word] = 0

    def word_of(self, move: Take) -> int:
        """Return the word that shows whether a piece was put."""
        word: int = self.outboxes[move.owner].words[move.word]
        return word

    def close(self) -> None:
        """Give up the outboxes; members keep their open ones until they close, too."""
        self.is_broken = True
        for post in self.queue:
            post.withdraw()
        self.outboxes, self.heap = (), None


class _Withdrawn(Exception):
    """A piece that a member had shown was withdrawn."""


def _piece(move: Move) -> tuple[object, ...]:
    """Return the key that the parts of one piece share, between the same ranks."""
    match move:
        case Put():
            return Put, move.piece, move.readers
        case Take():
            return Take, move.piece, move.owner
    return (move,)


@dataclass(eq=False)
class HostPost:
    """A post under way.

    Attributes:
        call: the communication.
        moves: still to be made, in order.
        buffers: kept until then.
        has_moved: the last look made a move, and did not end the post.
    """

    call: Call
    moves: Sequence[Move]
    buffers: Buffers | None
    _: KW_ONLY
    team: HostTeam
    has_moved: bool = False
    error: BackendError | None = None

    def __post_init__(self) -> None:
        self._steps = self._steps_of_moves()
        self._is_done = False
        self._shown: list[Put] = []  # pieces in the heap that readers may not have taken yet
        self._whole: set[tuple[object, ...]] = set()  # the pieces that went as a whole
        self._late: list[int] = []  # the members that the next move waits for
        self._told = 0  # the word seen where the next move expects another one
        self._looked_at = time.monotonic()

    def wait(self) -> None:
        """Return once the buffers may be used; a second wait returns at once.

        Raises:
            BackendError: another rank is gone, or did not come in time; a second wait raises again.
        """
        if not self._is_over():
            why = self.team.progress.wait(self._is_over, self.team.timeout_s)
            if why is not None:
                self._fail(why or self._what_is_missing())
        if self.error is not None:
            raise self.error

    def advance(self) -> bool:
        """Make the moves that can be made now; return whether the post is over, well or not."""
        if not self._is_over():
            if self.team.is_broken:
                self._fail("an earlier communication of this team failed, or it was closed")
                return True
            try:
                self.has_moved = next(self._steps, None) is True
            except _Withdrawn as withdrawn:
                self._fail(str(withdrawn))
                return True
            if not (self._is_done or self.has_moved):
                self._see_whether_they_live()
        return self._is_over()

    def _is_over(self) -> bool:
        return self._is_done or self.error is not None

    def _steps_of_moves(self) -> Iterator[bool]:
        """Make the moves; yield, where the next one cannot be made, whether others were."""
        buffers, has_moved = self.buffers, False
        assert buffers is not None
        for move in self.moves:
            if _piece(move) in self._whole:
                continue
            while not self._can(move):
                yield has_moved
                has_moved = False
            has_moved = True
            match move:
                case Put():
                    self._put(move, buffers)
                case Take():
                    self._take(move, buffers)
                case Copy() | Reduce():
                    change(self.call, (move,), buffers.elements)
        for put in self._shown:
            while not self._can(put):  # it is being read
                yield has_moved
                has_moved = False
        self._shown = []
        self._is_done, self.buffers, self._late = True, None, []

    def _put(self, move: Put, buffers: Buffers) -> None:
        """Put a part of a piece into the outbox, or show the whole piece in the heap."""
        address, place = buffers.address(move.piece, move.start), None
        is_large = move.start == 0 and buffers.size(move.piece) > FEW_CHUNKS * move.bytes
        if self.team.heap is not None and is_large and buffers.stays(move.piece):
            place = self.team.heap.place(address)
        if place is None:
            self.team.put(move, address)
        else:
            self.team.show(move, place)
            self._shown.append(move)
            self._whole.add(_piece(move))

    def _take(self, move: Take, buffers: Buffers) -> None:
        """Take a part of a piece out of an outbox, or the whole piece out of the heap."""
        address = buffers.address(move.piece, move.start)
        if not self._told & IN_HEAP:
            self.team.take(move, address)
            return
        self._whole.add(_piece(move))
        if not self.team.take_shown(move, address, buffers.size(move.piece)):
            raise _Withdrawn(f"rank {self._named([move.owner])} has given up")

    def withdraw(self) -> None:
        """Withdraw shown buffers that others have not read: they may be reused."""
        self.team.withdraw(self._shown)
        self._shown = []

    def _can(self, move: Move) -> bool:
        match move:
            case Put():
                self._late, self._told = self.team.readers_of(move), 0
                return not self._late
            case Take():
                self._told = self.team.word_of(move)
                is_there = self._told & ~IN_HEAP == move.tag
                self._late = [] if is_there else [move.owner]
                return not self._late
        return True

    def _see_whether_they_live(self) -> None:
        """Fail if an awaited member has ended, and made no further move before."""
        now = time.monotonic()
        if now - self._looked_at < _LIVENESS_S:
            return
        self._looked_at, late = now, list(self._late)
        gone = [i for i in late if self.team.processes[i].has_ended()]
        if gone and next(self._steps, None) is False and self._late == late:
            self._fail(f"rank {self._named(gone)} is gone")

    def _fail(self, because: str) -> None:
        self.error = failure(self.call, TimeoutError(because))
        self.withdraw()
        self.team.is_broken = True

    def _what_is_missing(self) -> str:
        after = f"after {self.team.timeout_s:g} s"
        if self.team.queue and self.team.queue[0] is not self:
            first = self.team.queue[0]
            return f"an earlier {first.call.kind} is not over: {first._what_is_missing()}"
        who = self._named(self._late)
        if self._told:
            kind = kind_of(self._told)
            what = f"{kind} in its place" if kind != self.call.kind else "another size"
            return f"{after} rank {who} has posted {what}"
        return f"{after} nothing came from, or was taken by, rank {who}"

    def _named(self, members: Sequence[int]) -> str:
        return ", ".join(str(self.team.ranks[i]) for i in sorted(members))


def outbox_of(
    memory: SharedMemory, shape: Shape, start: int, heap: SharedMemory | None
) -> HostOutbox:
    """Return an outbox whose slots lie in shared memory of the host."""
    slots = (ctypes.c_char * shape.bytes).from_buffer(memory.memory, start)
    return HostOutbox(
        words=memory.words(shape.words),
        places=memory.places(shape.words),
        slots=slots,
        address=ctypes.addressof(slots),
        heap=heap,
    )
