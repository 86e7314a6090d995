"""This process's requests to UCX: endpoints, tags, and progress.

UCX moves nothing by itself: each wait makes all pending communications progress, in the order of
their posts. Otherwise two ranks that wait for two communications in different orders would wait for
ever.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mdfuse.backends.ucx.ucx_library import UcxLibrary

#: A tag, from the highest bit: kind, team, sender, number of the message, its size. UCX matches by
#: tag alone, and would deliver a message into a larger buffer without an error, hence the size.
_TEAM_BITS, _SENDER_BITS, _NUMBER_BITS, _SIZE_BITS = 16, 20, 12, 12

_PRIME = 4093

#: How many teams have tags.
MOST_TEAMS = 1 << _TEAM_BITS

#: How often a wait looks, giving its core away in between, before it sleeps until something comes;
#: and the longest sleep, milliseconds. Ranks may outnumber cores: a wait that only gave its core
#: away would take time from ranks that compute (4 ranks on 2 cores, 2 of them compute while 2
#: wait: 117 ms, with sleeps 73). The first looks serve messages that are just coming.
_LOOKS, _SLEEP_MS = 20, 1

#: How long closing waits for pending communications: nanoseconds per attempt, and attempts.
_PERIOD_NS, _ATTEMPTS = 100_000_000, 5

#: How often the worker progresses to find messages that a rank sent before it ended.
_LAST_LOOKS = 10


class Ongoing(Protocol):
    """A communication that is under way."""

    def advance(self) -> bool:
        """Make progress without waiting; return whether the communication ended, well or not."""


@dataclass(slots=True)
class Channel:
    """The counts of a team's messages, which keep apart the tags of messages under way.

    Both ends count alike: the n-th message from one member to another is the n-th that is received.

    Attributes:
        number: the team's, the same on all members, below 2^16.
        rank: this rank.
    """

    number: int
    rank: int
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def tag_to(self, peer: int, kind: int, size: int) -> int:
        """Return the tag of the next message to a member, of `size` bytes."""
        self.sent[peer] += 1
        return self._tag(kind, self.rank, self.sent[peer], size)

    def tag_from(self, peer: int, kind: int, size: int) -> int:
        """Return the tag of the next message from a member, of `size` bytes."""
        self.received[peer] += 1
        return self._tag(kind, peer, self.received[peer], size)

    def _tag(self, kind: int, sender: int, n: int, size: int) -> int:
        tag = (kind << _TEAM_BITS | self.number) << _SENDER_BITS | sender
        tag = tag << _NUMBER_BITS | n % (1 << _NUMBER_BITS)
        # the modulus is a prime: sizes that differ by a power of two keep different tags
        return tag << _SIZE_BITS | size % _PRIME


class Engine:
    """The UCX worker of this process, its endpoints, and the pending communications.

    Args:
        library: UCX.
        can_sleep: all awaited events come through UCX, so that waits may sleep until an event.
        is_one_host: all ranks are on this host.
    """

    def __init__(
        self, library: UcxLibrary, *, can_sleep: bool = True, is_one_host: bool = False
    ) -> None:
        self._library = library
        self._context, self._worker = library.open_worker(is_one_host)
        self._looks = _LOOKS if can_sleep else sys.maxsize
        self._worker.init_blocking_progress_mode()
        self._events = select.poll()
        self._events.register(self._worker.epoll_file_descriptor, select.POLLIN)
        self._addresses: dict[int, bytes] = {}
        self._endpoints: dict[int, Any] = {}
        self._pending: list[Ongoing] = []
        self._failed: list[Ongoing] = []  # UCX may still write into their buffers
        self._lock = threading.RLock()
        #: how often another thread ended the waits under way
        self.aborted = 0

    @property
    def address(self) -> bytes:
        """The address by which other processes reach this one."""
        address: bytes = self._worker.address.tobytes()
        return address

    @property
    def transports(self) -> str:
        """The transports that UCX found, as it prints them."""
        names: str = self._context.info
        return names

    @property
    def error(self) -> type[Exception]:
        """The base class of UCX's errors."""
        return self._library.error

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks whose addresses are not known yet."""
        return [rank for rank in ranks if rank not in self._addresses]

    def introduce(self, rank: int, address: bytes) -> None:
        """Take another rank's address; it is contacted when it is first needed."""
        self._addresses[rank] = address

    def send(self, peer: int, buffer: Any, tag: int) -> Any:
        """Begin to send and return the request; the caller keeps the buffer until it is done."""
        lib = self._library
        return self._endpoint(peer).tag_send(lib.array(buffer), lib.api.UCXXTag(tag))

    def receive(self, peer: int, buffer: Any, tag: int) -> Any:
        """Begin to receive and return the request.

        A message that the peer sent before it ended is still received.

        Raises:
            self.error: the peer is gone, and did not send the message.
        """
        lib, endpoint = self._library, self._endpoint(peer)
        wanted = lib.api.UCXXTag(tag)
        if endpoint.alive:
            return endpoint.tag_recv(lib.array(buffer), wanted)
        for _ in range(_LAST_LOOKS):
            self._worker.progress()
        if not self._worker.tag_probe(wanted).matched:
            endpoint.raise_on_error()
            raise lib.error("its endpoint is closed")
        return self._worker.tag_recv(lib.array(buffer), wanted)

    def post(self, work: Ongoing) -> None:
        """Begin a communication, and keep it as pending unless it is over at once."""
        with self._lock:
            if not work.advance():
                self._pending.append(work)

    def is_gone(self, peer: int) -> bool:
        """Return whether a rank that was contacted before has stopped answering."""
        return peer in self._endpoints and not self._endpoints[peer].alive

    def keep(self, work: Ongoing) -> None:
        """Hold on to a communication that failed, and to its buffers."""
        self._failed.append(work)

    def drop(self, work: Ongoing) -> None:
        """Stop the progress of a communication that has no waiters any more."""
        with self._lock:
            if work in self._pending:
                self._pending.remove(work)

    def progress(self) -> bool:
        """Make everything progress once; return whether anything moved or ended."""
        with self._lock:
            has_moved = bool(self._worker.progress_once())
            if not has_moved:
                self._worker.progress()  # also ends requests to ranks that are gone
            over = [work for work in self._pending if work.advance()]
            for work in over:
                self._pending.remove(work)
        return has_moved or bool(over)

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Make everything progress until `is_over()`.

        Returns:
            False where `timeout_s` seconds passed, or another thread aborted the wait, before.
        """
        deadline, before, looks = time.monotonic() + timeout_s, self.aborted, 0
        while not is_over():
            if self.progress():
                looks = 0
                continue
            if time.monotonic() > deadline or self.aborted != before:
                return False
            looks += 1
            self._pause(looks)
        return True

    def _pause(self, looks: int) -> None:
        """Give the core away after `looks` looks in vain: ranks may outnumber cores."""
        if looks < self._looks:
            os.sched_yield()
        elif self._worker.arm():  # else something has come meanwhile
            self._events.poll(_SLEEP_MS)

    def close(self) -> None:
        """Close endpoints and worker; messages that were sent and waited for still arrive."""
        with self._lock:
            if self._pending or self._failed:
                self._worker.cancel_inflight_requests(_PERIOD_NS, _ATTEMPTS)
            for endpoint in self._endpoints.values():
                endpoint.close_blocking(_PERIOD_NS, _ATTEMPTS)
            self._endpoints.clear()
            self._pending.clear()
            self._failed.clear()
            self._worker = self._context = None

    def _endpoint(self, peer: int) -> Any:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            address = self._library.api.UCXAddress.create_from_buffer(self._addresses[peer])
            endpoint = self._worker.create_endpoint_from_worker_address(address, True)
            self._endpoints[peer] = endpoint
        return endpoint
