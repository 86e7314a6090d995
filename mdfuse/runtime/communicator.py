"""The communicator: this rank, its device and backends, and its meetings with other ranks."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from mdfuse.backends.base import Backend, Interruptible, Poster, Resettable, Sharing
from mdfuse.backends.mpi import mpi_library as mpi_library
from mdfuse.backends.work import first_line
from mdfuse.config import Options, backend_choice, options_from_environment
from mdfuse.errors import BackendError, MdfuseError, ProgramError
from mdfuse.interpreter.threads import within
from mdfuse.layouts.call import Call
from mdfuse.runtime.agreement.abort_protocol import Refusals, not_open
from mdfuse.runtime.agreement.concurrent_runs import crowd, refusal
from mdfuse.runtime.agreement.rendezvous import Meetings, raise_alike
from mdfuse.runtime.backend_rows import BACKENDS, World
from mdfuse.runtime.deadline import NEVER
from mdfuse.runtime.fast_lane import Replays, track_of
from mdfuse.runtime.first_meeting import (
    CLOSING_S,
    REPORTS_S,
    Door,
    check_same,
    enter,
    not_joined,
    why_not_beside,
)
from mdfuse.runtime.interruption import Interruption
from mdfuse.runtime.membership import Membership
from mdfuse.runtime.null_world import NULL, null_arguments
from mdfuse.runtime.opening import door_of, stand_in
from mdfuse.runtime.watch.hang_report import ranks_text
from mdfuse.runtime.watch.plan_position import RunCount
from mdfuse.runtime.watch.reports import tell_torchrun, tell_torchrun_at_exit, untell_torchrun
from mdfuse.runtime.watch.watch import Watch
from mdfuse.seeing.clocks import offset
from mdfuse.torch_private import PrefixStore

_log = logging.getLogger("mdfuse.comm")

#: How long the rank that hosts the store waits at its end for ranks that still use it, seconds.
_GRACE_S = 10.0


class Communicator:
    """This rank's view of all ranks. `init` makes it; do not make one yourself.

    Attributes:
        launch: rank, size, and how the ranks were started.
        rank: this rank.
        size: the number of ranks.
        local_rank: this rank's number on its host.
        timeout_s: the deadline of its waits for other ranks, seconds.
        backend: the first backend's name; see `open` for others.
        device: where this rank's buffers are.
        store: a store shared by all ranks, under a prefix of this communicator's own.
        is_ready: programs can run: the communicator is sound, and no program that communicates is
            running.
        is_sound: False once it is closed, after a run that broke off, or that this rank refused
            (see `settle`) or left, and in a fork of this process.
        first_run: held around the first run of a program, in which all ranks meet.
        crowd: the threads of this rank that ran programs at once, where ranks differed; or "".
        serials: the numbers of programs, by their first runs on it; all ranks have the same.
        membership: the processes of the ranks, here and before a rebuild.
        is_left: survivors went on with another one: see `mdfuse.rebuild`.
        at_end: called at the begin of `close`, where all is well; by names.
    """

    def __init__(
        self,
        *,
        world: World,
        backend: Backend,
        meetings: Meetings,
        is_host: bool,
        door: Door | None = None,
    ) -> None:
        self.door = door
        self.membership = door.membership if door else Membership.first(world.launch.size)
        self.is_left = False
        self.launch = world.launch
        self.rank = world.launch.rank
        self.size = world.launch.size
        self.local_rank = world.launch.local_rank
        self.timeout_s = world.timeout_s
        self.backend = backend.name
        self.device = world.device
        self.store = world.store
        self.is_ready = self.is_sound = True
        self.first_run = threading.RLock()
        self.crowd = ""
        self.serials = itertools.count()
        self._is_fork = self._is_closed = False
        self._world = world
        self._backends = {backend.name: backend}
        self.interruption = Interruption(self)
        self._meetings = meetings
        self._is_host = is_host
        self.at_end: dict[str, Callable[[], object]] = {}
        #: how long the others may need the store that this rank hosts, seconds
        self.grace_s = _GRACE_S
        self._watch = world.watch or Watch(rank=self.rank, timeout_s=world.timeout_s)
        self._watch.abort = self._abort
        self._watch.interruption = self.interruption
        self._words = PrefixStore("watch", world.store)
        self._graphs: weakref.WeakSet[Resettable] = weakref.WeakSet()
        self._refusals = Refusals(
            store=self._words, rank=self.rank, size=meetings.size, timeout_s=world.timeout_s,
            waiting=self._watch.waiting,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"Communicator(rank={self.rank}, size={self.size}, backend={self.backend!r}, "
            f"device={str(self.device)!r}, launcher={self.launch.name!r})"
        )

    def __reduce__(self) -> NoReturn:
        raise BackendError(
            f"rank {self.rank} cannot copy or pickle its communicator",
            because="it is a connection of this process with others",
            hint="call mdfuse.init() where it is wanted",
        )

    def open(self, names: Iterable[str]) -> None:
        """Open further backends beside the first; those that are open stay as they are.

        All ranks call it, with the same names in the same order.

        Raises:
            BackendError: a rank cannot use one of them; on all ranks.
        """
        for name in names:
            if name not in self._backends:
                self._backends[name] = self._opened(name)

    def _opened(self, name: str) -> Backend:
        if self.backend == NULL:
            return self._backends[NULL]  # stands for every backend, as it carries nothing
        with self._watch.waiting(f"the opening of backend {name}"):
            problem = why_not_beside(name, self.device, self.rank)
        texts = self.all_ok(None if problem is None else str(problem))
        raise_alike(problem, texts, partial(not_joined, self.launch))
        store = PrefixStore(f"backend/{name}", self.store)
        return BACKENDS[name].open(replace(self._world, store=store, lanes=None))

    def prepare(self, teams: Iterable[Sequence[int]], backend: str | None = None) -> None:
        """Make the teams (in mesh order) that this rank is in, by default on the first backend."""
        self._check_open("prepare teams")
        try:
            with self._watch.waiting("the making of teams"):
                self._carrier(backend).prepare(tuple(team) for team in teams)
        except BackendError as error:
            raise self._watch.explain(error) from error.__cause__

    def poster(self, call: Call) -> Poster:
        """Prepare a call that will be posted many times."""
        self._check_open("bind a call")
        return self._carrier(call.backend).bind(call)

    def sharing(self) -> dict[str, Sharing]:
        """Return the backends that copy a program's values directly from its buffers."""
        return {n: x for n, x in self._backends.items() if isinstance(x, Sharing)}

    def _carrier(self, name: str | None) -> Backend:
        return self._backends[name or self.backend]

    def carriers(self) -> Collection[Backend]:
        """Return the backends that are open."""
        return dict.fromkeys(self._backends.values())

    def can_capture(self, backends: Iterable[str]) -> bool:
        """Return whether CUDA graphs can hold the posts of these backends and of the first."""
        rows = [BACKENDS[name] for name in (self.backend, *backends) if name in BACKENDS]
        return self.device.type == "cuda" and all(row.can_capture for row in rows)

    @property
    def watch(self) -> Watch:
        """The watchdog of this rank."""
        return self._watch

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks of the communicator before that are lost; () without a rebuild."""
        return self.membership.lost

    @property
    def old_rank(self) -> int | None:
        """This rank's number before the rebuild; None where it has joined since."""
        return self.membership.old_rank(self.rank)

    def new_rank(self, old: int) -> int | None:
        """Return the number of a rank of before the rebuild; None where it is lost."""
        return self.membership.new_rank(old)

    def give_up(self) -> None:
        """Give up groups, and leave the store to those that go on; see `mdfuse.rebuild`."""
        self._is_closed, self.is_left, self.is_ready, self.is_sound = True, True, False, False
        _forget(self)
        for graph in list(self._graphs):
            graph.reset()
        self._watch.leaves = "went on with those that are left"
        self._watch.close()
        for backend in self.carriers():
            within(CLOSING_S, backend.close)

    def abort(self) -> None:
        """End what is under way on this rank, and the waits of others for it in a meeting."""
        self.is_ready = self.is_sound = False
        self._abort()
        within(CLOSING_S, self._meetings.give_up)

    def _abort(self) -> bool:
        """End the waits of this rank with an error; return whether a backend could."""
        backends = [b for b in self.carriers() if isinstance(b, Interruptible)]
        return any([x.abort() for x in backends])  # noqa: C419  of a generator it would stop early

    def all_ok(self, error_text: str | None) -> tuple[str | None, ...]:
        """Tell all ranks None, or this rank's problem; return the texts of all ranks.

        All ranks call it, each the same number of times. Nothing is posted: the texts go through
        the store, in two to four messages per rank.

        Returns:
            one entry per rank, in rank order.

        Raises:
            BackendError: a rank did not come within the timeout.
        """
        self._check_open("meet the other ranks")
        try:
            with self._watch.waiting(f"meeting {self._meetings.meeting} of all ranks"):
                return self._meetings.exchange(error_text)
        except BackendError as error:
            raise self._watch.explain(error) from error.__cause__

    def refuse(self, occasion: str, reason: BaseException) -> None:
        """Leave the reason why this rank does not take part in a run that others may have begun."""
        if self._meetings.size > 1:
            self.is_ready = self.is_sound = False
            self._refusals.refuse(occasion, reason)

    def abandon(self, tally: RunCount, error: BaseException) -> None:
        """Note that an error of this rank ended a run that others may wait in."""
        if self._meetings.size > 1:
            self.is_ready = self.is_sound = False
            self._refusals.abandon(tally, error)

    def broke_off(self, tally: RunCount, error: BackendError) -> MdfuseError:
        """Note that a communication of a run broke; return the error with the reason.

        It quotes a rank that refused or left the run, or else has the positions of all ranks.
        """
        self.is_ready = self.is_sound = False
        self.abort()
        refused = self._refusals.broke_off(tally, error)
        if refused is not None:
            return refused
        error.where += tuple(filter(None, [crowd(self.rank)]))
        return self._watch.explain(error)

    def settle(self) -> None:
        """Become ready again after a run that all ranks refused.

        Raises:
            BackendError: others had begun it, or a communication broke.
        """
        self._check_open("run programs that communicate")
        self.interruption.check_goes_on()
        self._refusals.settle()
        self.is_ready = self.is_sound = True

    def crowded(self, name: str) -> ProgramError | None:
        """Return an error where another thread runs a program that communicates; else None."""
        return refusal(self.rank, name) if self._meetings.size > 1 else None

    def disown(self) -> None:
        """Leave connections, threads and the end of MPI to the parent of this fork."""
        if self._meetings.size > 1:
            self._is_fork, self.is_ready, self.is_sound = True, False, False
            atexit.unregister(self.close)
            mpi_library.leave_to_parent()

    def count(self, tally: RunCount, owner: object) -> None:
        """Add a program's count of runs to this rank's position; see `Tallies`."""
        self._watch.count(tally, owner)

    def hold(self, graph: Resettable) -> None:
        """Register a CUDA graph, for `close` to reset before the groups that it posts to.

        NCCL counts the graphs that use a communicator, and destroying it would wait for them.
        """
        self._graphs.add(graph)

    def clock_offset(self, name: str, timeout_s: float | None = None) -> tuple[int, int]:
        """Return how far this rank's clock is from rank 0's unix time, and the error, ns."""
        store = PrefixStore(name, self.store)
        with self._watch.waiting("the alignment of clocks"):
            return offset(store, self.rank, self._meetings.size, timeout_s=timeout_s)

    @property
    def has_fast_lane(self) -> bool:
        """True if posts go through NCCL's own functions."""
        return self._world.lanes is not None

    def replays(self, name: str, stream: int) -> Replays | None:
        """Return the notes of a program's graph replays; None where torch's watchdog sees them."""
        makers, team = (self._world.lanes, *self.carriers()), tuple(range(self.size))
        track = track_of(self._watch, stream, makers)
        if track is None:
            return None
        return Replays(self._watch, track, name, team, self.sharing().values())

    @property
    def is_closed(self) -> bool:
        """True once groups and store are given up, so that `init` makes a new communicator."""
        return self._is_closed

    def barrier(self) -> None:
        """Return once all ranks have called it; does not wait for work queued on devices."""
        self.all_ok(None)

    def close(self) -> None:
        """Give up groups and store; torch's default process group is left alone.

        A rank that hosts the store waits shortly for the others. A second close does nothing.
        """
        if self._is_closed or self._is_fork:
            return
        if self.is_sound and not hasattr(sys, "last_value"):
            for act in [*self.at_end.values()]:
                act()
        self._is_closed, self.is_ready, self.is_sound = True, False, False
        _forget(self)
        for graph in list(self._graphs):
            graph.reset()
        failure = getattr(sys, "last_value", None)
        tell_torchrun(failure or sys.exc_info()[1])  # others fail once this rank is gone
        if failure is not None:
            self._watch.leaves = f"ended with {type(failure).__name__}: {first_line(failure)}"
        self._watch.close()  # while the store is there: its host goes when all have left
        remaining = self._leave(self.grace_s if failure is None else REPORTS_S)
        if remaining and failure is None:
            _log.warning("rank %d closed before %s did", self.rank, ranks_text(remaining))
        for backend in self.carriers():
            backend.close()

    def _leave(self, grace_s: float) -> list[int]:
        """Say goodbye in the store, without waiting for a store that does not answer.

        Args:
            grace_s: where this rank hosts the store: seconds to wait for ranks that still need it.

        Returns:
            the ranks that still needed it afterwards.
        """
        if self._watch.is_cut_off:
            return []
        remaining, answers = list[int](), list[bool]()
        grace_s = self._watch.ending.left(grace_s if self._is_host else 0.0)

        def leave() -> None:
            try:
                remaining.extend(self._meetings.leave(grace_s))
            finally:
                answers.append(True)

        within(grace_s + self._watch.ending.left(CLOSING_S), leave)
        if not answers and self._watch.ending is NEVER:
            _log.warning("rank %d closed, and %s does not answer", self.rank, self._watch.store)
        return remaining

    def check_process(self) -> None:
        """Refuse a fork of the process that joined.

        Raises:
            BackendError: this process is a fork.
        """
        if self._is_fork:
            self._check_open("join")

    def _check_open(self, what: str) -> None:
        if self._is_fork or self._is_closed:
            raise not_open(self.rank, what, self._is_fork)


_live: Communicator | None = None


def _after_fork() -> None:
    if _live is not None:
        _live.disown()


os.register_at_fork(after_in_child=_after_fork)


def init(
    options: Options | None = None,
    backend: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    device: torch.device | str | None = None,
) -> Communicator:
    """Join the ranks that the launcher started; the second call returns the same communicator.

    Works under torchrun, mpirun, srun and in a single process, and beside a default process group
    of torch, which it uses to find the others and otherwise leaves alone.

    Backend "null" is for measuring and for tests of host time, never for results: this process
    stands for one rank of a world of any size, contacts nobody, and its communications are posted
    but bring nothing from other ranks, so that their results mean nothing. It must be named.

    Args:
        options: `backend` and `timeout_s` count here; by default the `MDFUSE_*` variables decide.
        backend: goes before `options.backend`.
        rank: backend "null" only: the rank this process stands for; by default the launcher's.
        size: backend "null" only: the number of ranks; by default the launcher's.
        device: backend "null" only: where buffers are, "cpu" (the default) or "cuda".

    Raises:
        BackendError: the ranks do not find each other, or one of them cannot use the backend (all
            ranks raise then), or a live communicator has another backend, or stands for another
            rank, or `rank`, `size` or `device` do not fit the backend.
    """
    global _live
    tell_torchrun_at_exit()
    options = options_from_environment(options)
    carriers = backend_choice(options.backend if backend is None else backend)
    wanted, given = carriers.usual, {"rank": rank, "size": size, "device": device}
    given["device"] = null_arguments(wanted, given)
    if _live is not None:
        _live.check_process()
        check_same(_live, wanted, given)
        return _live
    _live = (
        alone(stand_in(rank, size, device, options.timeout_s))
        if wanted == NULL
        else opened(door_of(carriers, options))
    )
    untell_torchrun()
    atexit.register(_live.close)
    return _live


def _forget(communicator: Communicator) -> None:
    global _live
    atexit.unregister(communicator.close)
    if _live is communicator:
        _live = None


def live() -> Communicator | None:
    """Return the communicator of this process, if it has one."""
    return _live


def follow(communicator: Communicator) -> None:
    """Make a communicator that of this process; the one before is given up."""
    global _live
    _live = communicator
    atexit.register(communicator.close)


def alone(world: World) -> Communicator:
    """Return the communicator of a rank that meets nobody: backend "null"."""
    backend, meetings = BACKENDS[NULL].open(world), Meetings(world.store, 0, 1, world.timeout_s)
    return Communicator(world=world, backend=backend, meetings=meetings, is_host=False)


def opened(door: Door) -> Communicator:
    """Meet all ranks, and return their communicator, with all backends that are named."""
    world, meetings = enter(door)
    with door.watch.waiting(f"the opening of backend {door.names[0]}"):
        backend = BACKENDS[door.names[0]].open(world)
    communicator = Communicator(
        world=world, backend=backend, meetings=meetings, is_host=door.is_host, door=door
    )
    if mpi_library.keeps_ranks_together(door.launch):
        communicator.grace_s = 0.0
    try:
        communicator.open(door.names[1:])
    except BackendError:
        communicator.close()
        raise
    return communicator
