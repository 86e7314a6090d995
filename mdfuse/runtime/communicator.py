"""The communicator: this rank among the others, its device, its backend."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from mdfuse.backends import mpi_library
from mdfuse.backends.base import Backend, Call, Poster
from mdfuse.backends.c10d import C10dBackend
from mdfuse.backends.c10d_groups import LIBRARIES, HashStore, PrefixStore, Store
from mdfuse.backends.mpi import MpiBackend
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import BackendError
from mdfuse.runtime.agreement import Agreement
from mdfuse.runtime.bootstrap import Launch, detect, gloo_devices
from mdfuse.runtime.fast_lane import Lanes, Replays, agree_on_lanes
from mdfuse.runtime.null_world import NULL, check_null_arguments, null_device, null_launch
from mdfuse.runtime.stores import open_store

_log = logging.getLogger("mdfuse.comm")

#: How long the rank that hosts the store waits at its end for ranks that still use it, seconds.
_GRACE_S = 10.0


class Resettable(Protocol):
    """Something that uses the groups of a communicator, and does not any more once it is reset."""

    def reset(self) -> None: ...


class _OpenBackend(Backend, Protocol):
    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Underway:
    """The run that is under way, for backends whose waits outlive the ranks they wait for.

    Attributes:
        store: where ranks say that they refuse a run.
        run: (number of the evaluator, number of its run); None before the first.
    """

    store: Store
    run: tuple[int, int] | None = None

    def why_refused(self) -> str | None:
        """What a rank said that refused this run; None where none did, or nobody can tell."""
        if self.run is None:
            return None
        try:
            return refusal(self.store, "{}/{}".format(*self.run))
        except RuntimeError as error:  # it went with the rank that kept it, which may be done
            _log.info("the store is gone while this rank waits: %s", error)
            return None


def refusal(store: Store, occasion: str) -> str | None:
    """What a rank said that refused; None where none did."""
    key = f"refused/{occasion}"
    return store.get(key).decode() if store.check([key]) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a backend is opened with.

    Attributes:
        launch: rank, size, and how the ranks were started.
        device: where this rank's buffers are.
        store: shared by all ranks, for this backend alone.
        timeout_s: deadline of a communication, seconds.
        underway: the run that is under way.
        lanes: opens the fast lanes of teams, where all ranks have them.
    """

    launch: Launch
    device: torch.device
    store: Store
    timeout_s: float
    underway: Underway
    lanes: Lanes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """A backend that `Options.backend` may name.

    Attributes:
        devices: device types whose buffers it carries, the preferred one first.
        why_not: a reason why this process cannot use it and a remedy, or None.
        open: makes it.
        can_capture: what it posts can be captured in CUDA graphs.
    """

    devices: tuple[str, ...]
    why_not: Callable[[], tuple[str, str] | None]
    open: Callable[[World], _OpenBackend]
    can_capture: bool = True


def _c10d_row(name: str) -> BackendRow:
    def open_c10d(world: World) -> _OpenBackend:
        return C10dBackend(
            name,
            rank=world.launch.rank,
            device=world.device,
            store=world.store,
            timeout_s=world.timeout_s,
            network=gloo_devices(os.environ, world.launch),
            lanes=world.lanes,
        )

    library = LIBRARIES[name]
    return BackendRow(devices=library.devices, why_not=library.why_not, open=open_c10d)


def _open_mpi(world: World) -> _OpenBackend:
    return MpiBackend(
        rank=world.launch.rank,
        device=world.device,
        store=world.store,
        timeout_s=world.timeout_s,
        why_refused=world.underway.why_refused,
    )


BACKENDS: dict[str, BackendRow] = {
    **{name: _c10d_row(name) for name in LIBRARIES},
    "mpi": BackendRow(
        devices=("cuda", "cpu"),
        why_not=mpi_library.why_not,
        open=_open_mpi,
        can_capture=False,
    ),
}


class Communicator:
    """This rank's view of all ranks. `init` makes it; do not make one yourself.

    Attributes:
        launch: rank, size, and how the ranks were started.
        rank: this rank.
        size: the number of ranks.
        local_rank: this rank's number on its host.
        backend: the backend's name.
        device: where this rank's buffers are.
        store: a store shared by all ranks, under a prefix of this communicator's own.
        underway: the run that is under way; whoever runs something says so.
        can_capture: communications can be captured in CUDA graphs here.
    """

    def __init__(
        self, *, world: World, backend: _OpenBackend, agreement: Agreement, is_host: bool
    ) -> None:
        self.launch = world.launch
        self.rank = world.launch.rank
        self.size = world.launch.size
        self.local_rank = world.launch.local_rank
        self.backend = backend.name
        self.device = world.device
        self.store = world.store
        self.underway = world.underway
        self.can_capture = world.device.type == "cuda" and BACKENDS[backend.name].can_capture
        self._backend = backend
        self._agreement = agreement
        self._is_host = is_host
        self._is_closed = False
        self._lanes = world.lanes
        self._graphs: weakref.WeakSet[Resettable] = weakref.WeakSet()

    def __repr__(self) -> str:
        return (
            f"Communicator(rank={self.rank}, size={self.size}, backend={self.backend!r}, "
            f"device={str(self.device)!r}, launcher={self.launch.name!r})"
        )

    def prepare(self, teams: Iterable[Sequence[int]]) -> None:
        """Make the teams this rank is in; every rank passes its own, all in one global order."""
        self._check_open("prepare teams")
        self._backend.prepare(tuple(team) for team in teams)

    def poster(self, call: Call) -> Poster:
        """Prepare a call that will be posted many times."""
        self._check_open("bind a call")
        return self._backend.bind(call)

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
        return self._agreement.exchange(error_text)

    def refuse(self, occasion: str, reason: str) -> None:
        """Leave word why this rank does not take part in what the others may have begun.

        Args:
            occasion: the same on all ranks, used once.
            reason: what the others are told when their communication breaks.
        """
        if self.size > 1:
            self.store.set(f"refused/{occasion}", f"rank {self.rank}: {reason}")

    def why_refused(self, occasion: str) -> str | None:
        """What a rank that refused said; None where none did."""
        return refusal(self.store, occasion)

    def hold(self, graph: Resettable) -> None:
        """Give up a CUDA graph before the groups whose communications it repeats.

        NCCL counts the graphs that use a communicator, and destroying it would wait for them.
        """
        self._graphs.add(graph)

    @property
    def has_fast_lane(self) -> bool:
        """Posts go through NCCL's own functions."""
        return self._lanes is not None

    def replays(self, name: str, stream: int) -> Replays | None:
        """What notes the replays of a program's graphs; None where torch's own watchdog is all.

        Args:
            name: the same on all ranks, used for one program alone.
            stream: the handle of the stream on which they are replayed.
        """
        if self._lanes is None:
            return None
        return Replays(self._lanes, name, tuple(range(self.size)), stream)

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
        self._is_closed = True
        _forget(self)
        for graph in list(self._graphs):
            graph.reset()
        has_failed = any(name in vars(sys) for name in ("last_exc", "last_value"))
        try:
            if not self._agreement.leave(_GRACE_S, wait=self._is_host and not has_failed):
                _log.warning("rank %d closed before all other ranks did", self.rank)
        except RuntimeError as error:
            _log.info("rank %d: the store was closed first: %s", self.rank, error)
        self._backend.close()

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
    wanted = backend or options.backend
    given = {"rank": rank, "size": size, "device": device}
    check_null_arguments(wanted, given)
    if _live is not None:
        return _same(_live, wanted, given | {"device": device and null_device(device)})
    if wanted == NULL:
        _live = _stand_in(rank, size, device, options.timeout_s)
    else:
        _live = _join(wanted, options)
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
        underway=Underway(store=store),
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


def _join(wanted: str, options: Options) -> Communicator:
    timeout_s = options.timeout_s
    launch = detect(os.environ, _default_group())
    base, is_host = open_store(launch, timeout_s, os.environ)
    store = PrefixStore(f"mdfuse/{next(_generations)}", base)
    agreement = Agreement(PrefixStore("agreement", store), launch.rank, launch.size, timeout_s)
    name = _auto() if wanted == "auto" else wanted
    disagreement = _disagreement(store, launch, name)
    device, refusal = _device(name, launch)
    problem = refusal or disagreement
    texts = agreement.exchange(None if problem is None else str(problem))
    if any(texts):
        agreement.leave(_GRACE_S, wait=is_host)
        raise problem or _problem_elsewhere(texts, launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    lanes = None
    if name == "nccl" and launch.size > 1:
        watch = PrefixStore("watch", store)
        try:
            lanes = agree_on_lanes(
                options.fast_lane,
                rank=launch.rank,
                device=device,
                store=watch,
                timeout_s=timeout_s,
                agreement=agreement,
            )
        except BackendError:
            agreement.leave(_GRACE_S, wait=is_host)
            raise
    world = World(
        launch=launch,
        device=device,
        store=store,
        timeout_s=timeout_s,
        underway=Underway(store=store),
        lanes=lanes,
    )
    _log.info("rank %d of %d: %s, %s on %s", launch.rank, launch.size, launch.why, name, device)
    return Communicator(
        world=world, backend=BACKENDS[name].open(world), agreement=agreement, is_host=is_host
    )


def _default_group() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def _auto() -> str:
    return "gloo" if BACKENDS["nccl"].why_not() else "nccl"


def _device(name: str, launch: Launch) -> tuple[torch.device, BackendError | None]:
    """This rank's device under a backend, or why it cannot use that backend."""
    cpu = torch.device("cpu")
    if name not in BACKENDS:
        return cpu, BackendError(
            f"backend {name!r} is unknown",
            because=f"backends are auto, {', '.join(BACKENDS)}",
            hint='leave it at "auto": nccl where this rank drives a GPU, gloo elsewhere',
        )
    row = BACKENDS[name]
    refusal = row.why_not()
    if refusal:
        because, hint = refusal
        what = f"rank {launch.rank} cannot use backend {name!r}"
        return cpu, BackendError(what, because=because, hint=hint)
    if row.devices[0] != "cuda" or not torch.cuda.is_available():
        return cpu, None
    count = torch.cuda.device_count()
    if count > 1 and launch.local_rank >= count and launch.name != "default group":
        return cpu, BackendError(
            f"rank {launch.rank} has local rank {launch.local_rank}, but this host {count} GPUs",
            because=f"backend {name!r} drives one GPU per rank",
            hint=f'start at most {count} ranks per host, or use backend="gloo"',
        )
    return torch.device("cuda", launch.local_rank % count), None


def _disagreement(store: Store, launch: Launch, name: str) -> BackendError | None:
    """Compare this rank's backend with rank 0's; "auto" may mean another one on another host."""
    if launch.rank == 0:
        store.set("backend", name)
        return None
    chosen = store.get("backend").decode()
    if chosen == name:
        return None
    return BackendError(
        f"rank {launch.rank} uses backend {name!r}, rank 0 {chosen!r}",
        because="all ranks communicate by one backend",
        hint="name it: Options(backend=...) or MDFUSE_BACKEND, the same on all ranks",
    )


def _problem_elsewhere(texts: Sequence[str | None], launch: Launch) -> BackendError:
    rank, text = next((r, text) for r, text in enumerate(texts) if text is not None)
    return BackendError(
        f"rank {rank} could not join the other {launch.size - 1} ranks", where=text.split("\n")
    )
