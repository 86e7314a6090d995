"""The communicator: this rank among the others, its device, its backend."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from mdfuse.backends import ucx_library
from mdfuse.backends.base import Interruptible, Poster
from mdfuse.backends.c10d_groups import HashStore, PrefixStore
from mdfuse.backends.work import first_line
from mdfuse.config import Carriers, Options, carriers_of, options_from_environment
from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call
from mdfuse.runtime.agreement import Agreement
from mdfuse.runtime.backend_rows import BACKENDS, OpenBackend, World, auto
from mdfuse.runtime.bootstrap import detect
from mdfuse.runtime.bulletin import within
from mdfuse.runtime.fast_lane import Replays
from mdfuse.runtime.joining import meet, problem_elsewhere, watch_for, why_not_beside
from mdfuse.runtime.null_world import NULL, check_null_arguments, null_device, null_launch
from mdfuse.runtime.refusals import Refusals
from mdfuse.runtime.running import Tally
from mdfuse.runtime.stores import open_store
from mdfuse.runtime.watch import Watch

_log = logging.getLogger("mdfuse.comm")

#: How long the rank that hosts the store waits at its end for ranks that still use it, seconds.
_GRACE_S = 10.0

#: The same where it ends by an error: the others may be asking what went wrong.
_REPORTS_S = 3.0

#: How long the store may take to answer where a communication broke already, seconds.
_ANSWER_S = 1.0


class Resettable(Protocol):
    """Something that uses the groups of a communicator, and does not any more once it is reset."""

    def reset(self) -> None: ...


class Communicator:
    """This rank's view of all ranks. `init` makes it; do not make one yourself.

    Attributes:
        launch: rank, size, and how the ranks were started.
        rank: this rank.
        size: the number of ranks.
        local_rank: this rank's number on its host.
        backend: the first backend's name; see `open` for others.
        device: where this rank's buffers are.
        store: a store shared by all ranks, under a prefix of this communicator's own.
        is_ready: programs can run; not so once it is closed, or after a run that broke off or that
            this rank refused, see `settle`.
    """

    def __init__(
        self, *, world: World, backend: OpenBackend, agreement: Agreement, is_host: bool
    ) -> None:
        self.launch = world.launch
        self.rank = world.launch.rank
        self.size = world.launch.size
        self.local_rank = world.launch.local_rank
        self.backend = backend.name
        self.device = world.device
        self.store = world.store
        self.is_ready = True
        self._world = world
        self._backends = {backend.name: backend}
        self._agreement = agreement
        self._is_host = is_host
        self._is_closed = False
        self._watch = world.watch or Watch(rank=self.rank, timeout_s=world.timeout_s)
        self._watch.abort = self._abort
        self._words = PrefixStore("watch", world.store)
        self._graphs: weakref.WeakSet[Resettable] = weakref.WeakSet()
        self._refusals = Refusals(
            self._words,
            rank=self.rank,
            size=agreement.size,
            timeout_s=world.timeout_s,
            waiting=self._watch.waiting,
        )

    def __repr__(self) -> str:
        return (
            f"Communicator(rank={self.rank}, size={self.size}, backend={self.backend!r}, "
            f"device={str(self.device)!r}, launcher={self.launch.name!r})"
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

    def _opened(self, name: str) -> OpenBackend:
        if self.backend == NULL:
            return self._backends[NULL]  # it carries nothing, whoever should
        problem = why_not_beside(name, self.device, self.rank)
        texts = self.all_ok(None if problem is None else str(problem))
        if any(texts):
            raise problem or problem_elsewhere(texts, self.launch)
        store = PrefixStore(f"backend/{name}", self.store)
        return BACKENDS[name].open(replace(self._world, store=store, lanes=None))

    def prepare(self, teams: Iterable[Sequence[int]], backend: str | None = None) -> None:
        """Make the teams this rank is in; every rank passes its own, all in one global order.

        Args:
            teams: of ranks.
            backend: whose; one that is open, by default the first.
        """
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

    def _carrier(self, name: str | None) -> OpenBackend:
        return self._backends[name or self.backend]

    def can_capture(self, backends: Iterable[str]) -> bool:
        """Whether CUDA graphs can hold what these post, and the first one."""
        rows = [BACKENDS[name] for name in (self.backend, *backends) if name in BACKENDS]
        return self.device.type == "cuda" and all(row.can_capture for row in rows)

    def _abort(self) -> bool:
        """End what this rank waits for with an error, where that can be; see `Interruptible`."""
        found = [b for b in self._backends.values() if isinstance(b, Interruptible)]
        were_ended = [backend.abort() for backend in found]  # all, whatever the first one says
        return any(were_ended)

    def all_ok(self, error_text: str | None) -> tuple[str | None, ...]:
        """Tell all ranks whether this one is well (None) or not (why); get what each one said.

        All ranks call it, each the same number of times. Nothing is posted: it goes through the
        store. Two to four messages per rank.

        Returns:
            one entry per rank, in rank order.

        Raises:
            BackendError: a rank did not come within the timeout.
        """
        self._check_open("meet the other ranks")
        try:
            with self._watch.waiting(f"meeting {self._agreement.meeting} of all ranks"):
                return self._agreement.exchange(error_text)
        except BackendError as error:
            raise self._watch.explain(error) from error.__cause__

    def refuse(self, occasion: str, reason: str) -> None:
        """Leave word why this rank does not take part in a run that the others may have begun.

        Args:
            occasion: the same on all ranks, used once.
            reason: what the others are told when their communication breaks.
        """
        if self._agreement.size > 1:
            self.is_ready = False
            self._refusals.refuse(occasion, reason)

    def broke_off(self, occasion: str, error: BackendError) -> str | None:
        """A communication of a run broke; what a rank said that refused the run, if one did."""
        self.is_ready = False
        return self._refusals.broke_off(occasion, error)

    def settle(self) -> None:
        """Become ready again after a run that all ranks refused.

        Raises:
            BackendError: others had begun it, or a communication broke.
        """
        self._refusals.settle()
        self.is_ready = True

    def explained(self, error: BackendError) -> BackendError:
        """An error of a communication, with the positions of all ranks."""
        return self._watch.explain(error)

    def count(self, tally: Tally) -> None:
        """Count the runs of a program among what tells where this rank is."""
        self._watch.count(tally)

    def hold(self, graph: Resettable) -> None:
        """Give up a CUDA graph before the groups whose communications it repeats.

        NCCL counts the graphs that use a communicator, and destroying it would wait for them.
        """
        self._graphs.add(graph)

    @property
    def has_fast_lane(self) -> bool:
        """Posts go through NCCL's own functions."""
        return self._world.lanes is not None

    def replays(self, name: str, stream: int) -> Replays | None:
        """What notes the replays of a program's graphs; None where torch's own watchdog is all.

        Args:
            name: the same on all ranks, used for one program alone.
            stream: the handle of the stream on which they are replayed.
        """
        lanes = self._world.lanes
        if lanes is None:
            return None
        return Replays(lanes, name, tuple(range(self.size)), stream)

    @property
    def is_closed(self) -> bool:
        """Its groups and store are given up; `init` makes a new one."""
        return self._is_closed

    def barrier(self) -> None:
        """Return once all ranks have called it; does not wait for work queued on devices."""
        self.all_ok(None)

    def close(self) -> None:
        """Give up groups and store; a process group that was there before is left alone.

        Rank 0 waits shortly for the others where it hosts their store. A second close does nothing.
        """
        if self._is_closed:
            return
        self._is_closed, self.is_ready = True, False
        _forget(self)
        for graph in list(self._graphs):
            graph.reset()
        failure = getattr(sys, "last_value", None)
        if failure is not None:
            self._watch.leaves = f"ended with {type(failure).__name__}: {first_line(failure)}"
        self._watch.close()  # while the store is there: whoever hosts it goes when all have left
        has_left = self._leave(_GRACE_S if failure is None else _REPORTS_S)
        if not has_left and failure is None:
            _log.warning("rank %d closed before all other ranks did", self.rank)
        for backend in dict.fromkeys(self._backends.values()):
            backend.close()

    def _leave(self, grace_s: float) -> bool:
        """Say goodbye; a store whose host is stopped does not keep this rank.

        Args:
            grace_s: where this rank hosts the store: how long the others may still need it.

        Returns:
            False where they still did.
        """
        found: list[bool] = []
        limit = grace_s + _ANSWER_S if self._is_host else _ANSWER_S
        if within(limit, lambda: found.append(self._agreement.leave(grace_s, self._is_host))):
            return found[0]
        _log.info("rank %d: the store was closed first, or does not answer", self.rank)
        return True

    def _check_open(self, what: str) -> None:
        if self._is_closed:
            raise BackendError(
                f"rank {self.rank} cannot {what}: its communicator is closed",
                because="close() gave up its groups and its store",
                hint="call mdfuse.init() again, on all ranks",
            )


_live: Communicator | None = None

#: How many communicators this process made: all ranks make the same ones in the same order, so
#: the number keeps their keys apart in a store that outlives them.
_generations = itertools.count()


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
    but bring nothing from other ranks, so that what they return means nothing. It must be named.

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
    options = options_from_environment(options)
    carriers = carriers_of(backend or options.backend)
    wanted = carriers.usual
    given = {"rank": rank, "size": size, "device": device}
    check_null_arguments(wanted, given)
    if _live is not None:
        return _same(_live, wanted, given | {"device": device and null_device(device)})
    if wanted == NULL:
        _live = _stand_in(rank, size, device, options.timeout_s)
    else:
        _live = _join(carriers, options)
    atexit.register(_live.close)
    return _live


def _stand_in(
    rank: int | None, size: int | None, device: torch.device | str | None, timeout_s: float
) -> Communicator:
    """A rank without a world: its store is a dictionary, and it agrees with itself alone."""
    store = HashStore()
    world = World(
        launch=null_launch(os.environ, _default_group(), rank, size),
        device=null_device(device),
        store=store,
        timeout_s=timeout_s,
    )
    agreement = Agreement(world.store, 0, 1, timeout_s)
    opened = BACKENDS[NULL].open(world)
    return Communicator(world=world, backend=opened, agreement=agreement, is_host=False)


def _same(live: Communicator, wanted: str, given: Mapping[str, object]) -> Communicator:
    has = {"rank": live.rank, "size": live.size, "device": live.device}
    if wanted not in ("auto", live.backend):
        raise BackendError(
            f"backend {wanted!r} is wanted, but this process already communicates by "
            f"{live.backend!r}",
            because="a process has one communicator at a time",
            hint="close() the first on all ranks, or name the backend in the first init()",
        )
    other = [f"{k}={v}" for k, v in given.items() if v is not None and str(v) != str(has[k])]
    if other:
        raise BackendError(
            f"{', '.join(other)} wanted, but this process stands for rank {live.rank} of "
            f"{live.size} on {live.device}",
            because="a process has one communicator at a time",
            hint="close() the first",
        )
    return live


def _forget(communicator: Communicator) -> None:
    global _live
    atexit.unregister(communicator.close)
    if _live is communicator:
        _live = None


def _join(carriers: Carriers, options: Options) -> Communicator:
    timeout_s = options.timeout_s
    launch = detect(os.environ, _default_group())
    if "ucx" in carriers.names:
        ucx_library.why_not()  # loads it: UCX must come before MPI, by which ranks may meet
    base, is_host = open_store(launch, timeout_s, os.environ)
    store = PrefixStore(f"mdfuse/{next(_generations)}", base)
    agreement = Agreement(PrefixStore("agreement", store), launch.rank, launch.size, timeout_s)
    name = auto()[0] if carriers.usual == "auto" else carriers.usual
    watch = watch_for(launch, name, store, timeout_s, os.environ)
    try:
        world = meet(launch, (name, *carriers.others), options, agreement, store, watch)
    except BackendError:
        within(_GRACE_S, lambda: agreement.leave(_GRACE_S, wait=is_host))
        watch.close()
        raise
    _log.info(
        "rank %d of %d: %s, %s on %s", launch.rank, launch.size, launch.why, name, world.device
    )
    opened = BACKENDS[name].open(world)
    made = Communicator(world=world, backend=opened, agreement=agreement, is_host=is_host)
    try:
        made.open(carriers.others)
    except BackendError:
        made.close()
        raise
    return made


def _default_group() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None
