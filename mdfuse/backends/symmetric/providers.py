"""The table of providers, which make the memory of outboxes and the teams that use it.

===========  =====================================================================================
host         memory of the host that ranks share; buffers on CPUs
cuda         memory of GPUs by CUDA's IPC (see `cuda_heap`); words as above
===========  =====================================================================================
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mdfuse.backends.base import Around, Work, check_usable
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.post_notes import PostInfo, PostLog, Track
from mdfuse.backends.symmetric.cuda_heap import CudaHeap, HeapRun, Lanes, heap_of
from mdfuse.backends.symmetric.cuda_memory import CudaLane, too_few_queues
from mdfuse.backends.symmetric.cuda_norms import Norms
from mdfuse.backends.symmetric.cuda_release import check_can_end, end_waits
from mdfuse.backends.symmetric.cuda_sites import Sited, Sites
from mdfuse.backends.symmetric.cuda_sums import (
    INBOX_BYTES,
    OneKernel,
    Sums,
    can_add,
    name_of,
    whole,
)
from mdfuse.backends.symmetric.cuda_team import WORD, CudaOutbox, CudaTeam, LaneOrder
from mdfuse.backends.symmetric.heap import open_heap
from mdfuse.backends.symmetric.host_memory import Card, SharedMemory
from mdfuse.backends.symmetric.host_team import HostTeam, PendingPosts, outbox_of
from mdfuse.backends.symmetric.outbox_moves import Move, Shape
from mdfuse.backends.symmetric.post_buffers import Buffers
from mdfuse.backends.teams import no_more_posts
from mdfuse.backends.work import DONE
from mdfuse.hir.row_norms import RowNorm
from mdfuse.interpreter import threads
from mdfuse.interpreter.processes import this_process
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import KINDS
from mdfuse.torch_private import PrefixStore, Store

_MIB = 1 << 20

#: The size of a place in a heap, bytes.
_PLACE = 8

#: How many inboxes a team has: one for sums alone, one for sums with norms behind them.
_INBOXES = 2

#: Alignment of an inbox, bytes.
_ALIGNED = 256

#: How long closing waits until the others have taken this rank's pieces, seconds.
_CLOSING_S = 2.0


class PostFunction(Protocol):
    """A function that posts a call on buffers of certain sizes."""

    def __call__(
        self, moves: Sequence[Move], srcs: Sequence[Tensor], dsts: Sequence[Tensor], scratch: int
    ) -> Work:
        """Make, or begin, moves between at least one buffer, and room for elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderArgs:
    """The arguments with which a provider is opened: see `World`."""

    rank: int
    device: torch.device
    timeout_s: float
    noter: PostLog | None


def memory_size(shape: Shape, has_slots: bool) -> tuple[int, int]:
    """Return the offset of slots in memory of the host, behind words and places, and its size.

    >>> memory_size(Shape(members=4, slot=1 << 20), True)[0] % 4096
    0
    """
    behind = -(-shape.words * WORD // _PLACE) * _PLACE + shape.words * _PLACE
    start = -(-behind // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, start + (shape.bytes if has_slots else 0)


class HostProvider:
    """A maker of outboxes in memory of the host.

    Attributes:
        slot: bytes of a slot.
    """

    #: memory takes room once it is written to: at most four slots for each team of a rank
    slot = _MIB

    def __init__(self, place: ProviderArgs) -> None:
        self._progress, self._timeout_s = PendingPosts(), place.timeout_s
        self._heap = open_heap()
        #: the heaps of members, which teams keep open
        self._heaps: WeakValueDictionary[Card, SharedMemory] = WeakValueDictionary()

    def arena(self, size: int) -> None:
        """Return memory for buffers of a program, see `Sharing`; here the heap has it."""

    def offer(self, shape: Shape) -> tuple[SharedMemory, Card]:
        """Make this rank's outbox, and return its card for the others."""
        memory = SharedMemory(memory_size(shape, True)[1])
        heap = (self._heap.memory.file, self._heap.memory.size) if self._heap else (0, 0)
        return memory, Card(process=this_process(), file=memory.file, heap=heap)

    def _heap_of(self, card: Card) -> SharedMemory | None:
        """Open a member's heap; None where it has none."""
        file, size = card.heap
        if not size:
            return None
        key = replace(card, file=file)
        memory = self._heaps.get(key) or SharedMemory.of(key, size)
        memory.close()  # the memory stays
        self._heaps[key] = memory
        return memory

    def team(
        self,
        ranks: tuple[int, ...],
        index: int,
        shape: Shape,
        members: Sequence[tuple[SharedMemory, Card]],
        store: Store,
    ) -> HostTeam:
        """Return the team, from the outboxes of all members in team order.

        Raises:
            OSError: this rank cannot see another's memory.
        """
        start, _ = memory_size(shape, True)
        return HostTeam(
            ranks=ranks,
            index=index,
            outboxes=tuple(
                outbox_of(memory, shape, start, self._heap_of(card)) for memory, card in members
            ),
            heap=self._heap,
            processes=tuple(card.process for _, card in members),
            progress=self._progress,
            timeout_s=self._timeout_s,
        )

    def abort(self) -> bool:
        """End the waits of this rank; return whether that was possible."""
        self._progress.aborted += 1
        return True

    def track(self, stream: int) -> None:
        """Return a new track of the work queued on a stream; None where nothing is queued."""

    def around(self) -> None:
        """Return the calls before and behind replays of graphs; see `Sharing`."""

    def close(self) -> None:
        """Release the resources that teams share."""
        self._heap = None


class CudaProvider:
    """A maker of outboxes in memory of this rank's GPU, which the others have addresses of.

    Its methods are those of `HostProvider`.
    """

    #: larger copies go no faster; a team takes four slots of each rank's memory
    slot = 8 * _MIB

    def __init__(self, place: ProviderArgs) -> None:
        check_usable("symmetric", too_few_queues())
        torch.cuda.set_device(place.device)
        torch.cuda.synchronize(place.device)  # makes its context current, which the driver asks for
        self._place = place
        self._heap, self._device = heap_of(place.device), CudaDevice(place.device)
        self._turns = LaneOrder(self._device)
        #: handle -> the run offered to a team that is not made yet
        self._outboxes: dict[str, HeapRun] = {}

    def arena(self, size: int) -> Tensor:
        return self._heap.arena(size)

    def offer(self, shape: Shape) -> tuple[SharedMemory, Card]:
        memory = SharedMemory(memory_size(shape, False)[1])
        inbox = _inbox_at(shape)
        end = inbox + _INBOXES * INBOX_BYTES
        run = self._heap.take(end)
        self._heap.memory.clear(run.address + shape.bytes, end - shape.bytes)
        torch.cuda.synchronize(self._place.device)  # the others may begin once they have the card
        self._outboxes[run.handle] = run
        gpu = name_of(self._place.device)
        return memory, Card(process=this_process(), file=memory.file, device=run.handle, gpu=gpu)

    def team(
        self,
        ranks: tuple[int, ...],
        index: int,
        shape: Shape,
        members: Sequence[tuple[SharedMemory, Card]],
        store: Store,
    ) -> CudaOutboxes:
        size = memory_size(shape, False)[1]
        words = [ctypes.addressof(memory.words(shape.words)) for memory, _ in members]
        seen = [self._heap.memory.register(address, size) for address in words]
        slots = [self._heap.open(card.device) for _, card in members]
        outboxes = tuple(
            CudaOutbox(words=w, slots=s, signals=s + shape.bytes)
            for w, s in zip(seen, slots, strict=True)
        )
        lanes = self._heap.take_lanes(self._device)
        lane, tell, watch, behind = lanes
        sums, norms, device = None, None, self._place.device
        if can_add([card.gpu for _, card in members]):
            inboxes, others = ([s + _inbox_at(shape, n) for s in slots] for n in range(_INBOXES))
            sums = Sums(index=index, addresses=inboxes, device=device)
            norms = Norms(
                team=ranks, index=index, addresses=others, device=device,
                store=PrefixStore("norms", store), timeout_s=self._place.timeout_s,
            )  # fmt: skip
        return CudaOutboxes(
            queue=CudaTeam(
                index=index,
                outboxes=outboxes,
                turns=self._turns,
                lane=lane,
                tell=tell,
                watch=watch,
                behind=behind,
            ),
            device=self._device,
            heap=self._heap,
            sites=Sites(
                index=index,
                heap=self._heap,
                store=PrefixStore("sites", store),
                timeout_s=self._place.timeout_s,
            ),
            sums=sums,
            norms=norms,
            lanes=lanes,
            track=self._device.track(int(lane.stream.cuda_stream)),
            noter=self._place.noter,
            words=words,
            referenced=members,
            own_words=members[index][0].words(shape.words),
            outbox=self._outboxes.pop(members[index][1].device),
        )

    def abort(self) -> bool:
        return False

    def track(self, stream: int) -> Track:
        return self._device.track(stream)

    def around(self) -> Around:
        return self._turns.before, self._turns.behind

    def close(self) -> None:
        """Give back the outboxes of teams that could not be made; the others are their team's."""
        while self._outboxes:
            self._heap.give(self._outboxes.popitem()[1])


@dataclass(eq=False, kw_only=True)
class CudaOutboxes:
    """A team of ranks with buffers on GPUs; `sums` and `norms` are None where no kernel adds."""

    queue: CudaTeam
    device: CudaDevice
    heap: CudaHeap
    sites: Sites
    sums: Sums | None
    norms: Norms | None
    lanes: Lanes
    track: Track
    noter: PostLog | None
    words: Sequence[int]
    referenced: object
    own_words: Any
    outbox: HeapRun
    is_released: bool = field(default=False, init=False)

    def release(self, all_know: bool) -> None:
        """End posts on the device; see `Releasing`."""
        check_can_end(all_know)
        if not self.is_released:
            self.is_released = True
            kernels = (x for x in (self.sums, self.norms) if x is not None)
            flags = [x.inbox.flag_words(x.addresses[x.index]) for x in kernels]
            new_lane = partial(CudaLane, self.device, self.heap.number)
            end = partial(end_waits, self.device, self.lanes, flags, new_lane)
            threads.start(end, "mdfuse-release")

    def joined(self, call: Call, norm: RowNorm, rows: int) -> Callable[..., Work] | None:
        """Return the function that posts a sum and a norm of its rows; see `Joining`."""
        run = None if self.norms is None else self.norms.kernel(call, norm, rows)
        if run is None:
            return None
        notes = self._notes(call, rows * norm.width * norm.dtype.itemsize)

        def post(*given: Tensor | None) -> Work:
            self._check_usable(call)
            srcs, dsts = ([x for x in some if x is not None] for some in (given[:3], given[3:]))
            kernel = OneKernel(pieces=whole(srcs, dsts), run=run)
            return self.queue.post(call, (kernel,), partial(Buffers.of, srcs, dsts, 0), notes)

        return post

    def _notes(self, call: Call, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
        if self.noter is None:
            return _silent, _silent
        return self.noter.prepare(_subject(call, size), self.track)

    def poster(self, call: Call, size: int, sited: Sited | None) -> PostFunction:
        notes = self._notes(call, size)

        def post(
            moves: Sequence[Move], srcs: Sequence[Tensor], dsts: Sequence[Tensor], scratch: int
        ) -> Work:
            self._check_usable(call)
            sum_up = None if self.sums is None else self.sums.post(call, srcs, dsts)
            if sum_up is not None:
                buffers = partial(Buffers.of, srcs, dsts, 0)
                return self.queue.post(call, (sum_up,), buffers, notes)
            if sited is not None:  # the others wait for its addresses, even if it moves nothing
                moves = self.sites.moves(sited, tuple(moves), srcs, dsts)
            if not moves:
                return DONE
            return self.queue.post(call, moves, partial(Buffers.of, srcs, dsts, scratch), notes)

        return post

    def _check_usable(self, call: Call) -> None:
        if self.is_released:
            raise no_more_posts(call)

    def close(self) -> None:
        """Give the memory up once all pieces were taken; leave it if a member does not take one.

        Memory and streams of posts that were ended are left: others may still write there.
        """
        if self.is_released:
            return
        until = time.monotonic() + _CLOSING_S
        while any(self.own_words) or not all(lane.stream.query() for lane in self.lanes):
            if time.monotonic() > until:
                return
            time.sleep(1e-3)
        self.heap.give(self.outbox)
        self.heap.give_lanes(self.lanes)
        for word in self.words:
            self.heap.memory.unregister(word)


def _inbox_at(shape: Shape, number: int = 0) -> int:
    """Return the offset of an inbox in the memory of a team on a GPU, behind its signals."""
    first = -(-(shape.bytes + shape.signals * WORD) // _ALIGNED) * _ALIGNED
    return first + number * INBOX_BYTES


def _silent() -> None:
    """Note nothing."""


def _subject(call: Call, size: int) -> PostInfo:
    is_shared = KINDS[call.kind].by_all
    return PostInfo(
        kind=call.kind,
        team=call.team,
        bytes=size,
        where="",
        family=f"symmetric {'collectives' if is_shared else 'transfers'}",
        is_shared=is_shared,
    )


#: How many bytes each rank has for each of its teams, by the device that buffers are on.
OUTBOX_BYTES = {
    "cpu": Shape(members=1, slot=HostProvider.slot).bytes,
    "cuda": Shape(members=1, slot=CudaProvider.slot).bytes + _INBOXES * INBOX_BYTES,
}

#: A team whose members have opened each other's outboxes.
SymmetricTeam = HostTeam | CudaOutboxes

#: By the device that buffers are on.
PROVIDERS: Mapping[str, Callable[[ProviderArgs], HostProvider | CudaProvider]] = {
    "cpu": HostProvider,
    "cuda": CudaProvider,
}
