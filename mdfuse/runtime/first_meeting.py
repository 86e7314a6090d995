"""The first meeting of all ranks, which settles backends and devices, and their watchdogs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from mdfuse.backends.work import first_line
from mdfuse.bootstrap import Launch
from mdfuse.config import Options
from mdfuse.errors import BackendError
from mdfuse.interpreter.threads import within
from mdfuse.runtime.agreement.rendezvous import Meetings, raise_alike
from mdfuse.runtime.backend_rows import BACKENDS, World, why_not
from mdfuse.runtime.deadline import Deadline
from mdfuse.runtime.membership import Membership
from mdfuse.runtime.stores import another_connection
from mdfuse.runtime.watch.neighbours import Neighbours
from mdfuse.runtime.watch.reports import folder_of
from mdfuse.runtime.watch.watch import Watch
from mdfuse.torch_private import PrefixStore, Store, is_capturing

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator

_log = logging.getLogger("mdfuse.comm")


#: How long the rank that hosts the store waits where it ends by an error: others read the reason.
REPORTS_S = 3.0

#: How long the store may take to answer at the end, seconds.
CLOSING_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The arguments of joining.

    Attributes:
        launch: rank, size, and launcher.
        names: the backends, the first one first.
        options: of the communicator.
        base: the store that the launch shares.
        root: the prefix of the communicator that was made first.
        is_host: this process keeps the store.
        watch: the watchdog of this process.
        membership: the processes of the ranks.
    """

    launch: Launch
    names: Sequence[str]
    options: Options
    base: Store
    root: str
    is_host: bool
    watch: Watch
    membership: Membership

    @property
    def prefix(self) -> str:
        """The prefix of this communicator's keys."""
        epoch = self.membership.epoch
        return f"{self.root}/epoch/{epoch}" if epoch else self.root


def enter(door: Door) -> tuple[World, Meetings]:
    """Meet all ranks in the store; see `meet`."""
    launch, watch, timeout_s = door.launch, door.watch, door.options.timeout_s
    if launch.size > 1:
        with watch.waiting(f"the opening of {watch.store}"):
            other = another_connection(door.base, timeout_s)
        watch.connect(PrefixStore("watch", PrefixStore(door.prefix, other)))
    store = PrefixStore(door.prefix, door.base)
    meetings = Meetings(PrefixStore("agreement", store), launch.rank, launch.size, timeout_s)
    try:
        world = meet(launch, door.names, door.options, meetings, store, watch)
    except BackendError:
        watch.close()
        grace_s = watch.ending.left(REPORTS_S if door.is_host else 0.0)
        within(grace_s + watch.ending.left(CLOSING_S), lambda: meetings.leave(grace_s))
        raise
    why, name = launch.why, door.names[0]
    _log.info("rank %d of %d: %s, %s on %s", launch.rank, launch.size, why, name, world.device)
    return world, meetings


def watch_for(launch: Launch, options: Options, environment: Mapping[str, str]) -> Watch:
    """Return the watchdog of this rank, without a store yet, and not yet started."""
    timeout_s, reports = options.timeout_s, folder_of(options.reports)
    if launch.size == 1:
        return Watch(rank=launch.rank, timeout_s=timeout_s, reports=reports)
    is_kept_elsewhere = launch.name == "default group" or (
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    return Watch(
        rank=launch.rank,
        timeout_s=timeout_s,
        is_capturing=is_capturing,
        ranks=launch.size,
        host=None if is_kept_elsewhere else 0,
        reports=reports,
        neighbours=Neighbours(launch, environment),
    )


@contextmanager
def last_meeting(
    launch: Launch, options: Options, environment: Mapping[str, str]
) -> Iterator[None]:
    """Watch over MPI_Finalize in this context: MPI lets no rank go before all have come."""
    watch = watch_for(launch, options, environment)
    watch.start()
    with watch.waiting("MPI_Finalize of all ranks", "MPI_Finalize"):
        yield
    watch.close()


def meet(
    launch: Launch,
    names: Sequence[str],
    options: Options,
    meetings: Meetings,
    store: Store,
    watch: Watch,
) -> World:
    """Meet all ranks, which must name the same backends and be able to use the first.

    The others are checked when they are opened.

    Raises:
        BackendError: a rank does not come, names other backends, or cannot use the first one. All
            ranks raise.
    """
    name, deadline = names[0], Deadline.after(options.timeout_s)
    try:
        with watch.waiting("the first meeting of all ranks"):
            device, refusal = _device(name, launch)
            other = disagreement(store, launch, ", ".join(names), deadline)
            problem = refusal or other
            texts = meetings.exchange(None if problem is None else str(problem), deadline)
    except BackendError as error:
        raise watch.explain(error) from error.__cause__
    raise_alike(problem, texts, partial(not_joined, launch))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    lanes, agree = None, BACKENDS[name].agree
    if agree is not None and launch.size > 1:
        lanes = agree(
            options.fast_lane, rank=launch.rank, device=device, watch=watch, meetings=meetings
        )
    return World(
        launch=launch,
        device=device,
        store=store,
        timeout_s=options.timeout_s,
        lanes=lanes,
        watch=watch,
    )


def disagreement(
    store: Store, launch: Launch, names: str, deadline: Deadline
) -> BackendError | None:
    """Return an error where this rank's backends are not those of rank 0, else None.

    They may differ with "auto", which depends on the host.

    Raises:
        BackendError: rank 0 did not come.
    """
    if launch.rank == 0:
        store.set("backend", names)
        return None
    try:
        store.wait(["backend"], deadline.left_for_store())
        chosen = store.get("backend").decode()
    except RuntimeError as error:
        raise BackendError(
            f"rank {launch.rank} waited for rank 0, which did not join",
            because=first_line(error),
            hint="see the log of rank 0; raise timeout_s where it is only slow",
        ) from error
    if chosen == names:
        return None
    return BackendError(
        f"rank {launch.rank} uses backend {names!r}, rank 0 {chosen!r}",
        because="all ranks communicate by the same",
        hint="name it: Options(backend=...) or MDFUSE_BACKEND, the same on all ranks",
    )


def not_joined(launch: Launch, rank: int, text: str) -> BackendError:
    """Return the error for another rank's problem."""
    return BackendError(
        f"rank {rank} could not join {launch.others}",
        where=text.split("\n"),
    )


def _problem(name: str, rank: int) -> BackendError | None:
    """Return the reason why this process cannot use a backend, or None."""
    refusal = why_not(name)
    if refusal is None:
        return None
    because, hint = refusal
    return BackendError(f"rank {rank} cannot use backend {name!r}", because=because, hint=hint)


def why_not_beside(name: str, device: torch.device, rank: int) -> BackendError | None:
    """Return why this process cannot use a further backend on a device chosen already, or None."""
    problem = _problem(name, rank)
    if problem is not None or device.type in BACKENDS[name].devices:
        return problem
    return BackendError(
        f"rank {rank} has its buffers on {device}, and backend {name!r} does not carry these",
        because=f"{name} carries {' and '.join(BACKENDS[name].devices)} buffers",
        hint="mdfuse doctor lists what each backend carries",
    )


def _device(name: str, launch: Launch) -> tuple[torch.device, BackendError | None]:
    """Return this rank's device under a backend, and why it cannot use that backend, or None."""
    cpu = torch.device("cpu")
    problem = _problem(name, launch.rank)
    if problem is not None:
        return cpu, problem
    if BACKENDS[name].devices[0] != "cuda" or not torch.cuda.is_available():
        return cpu, None
    count = torch.cuda.device_count()
    if count > 1 and launch.local_rank >= count and launch.name != "default group":
        which_rank = f"rank {launch.rank} has local rank {launch.local_rank}"
        return cpu, BackendError(
            f"{which_rank}, but this host has {count} GPUs",
            because=f"backend {name!r} drives one GPU per rank",
            hint=f'start at most {count} ranks per host, or use backend="gloo"',
        )
    return torch.device("cuda", launch.local_rank % count), None


def check_same(live: Communicator, wanted: str, given: Mapping[str, object]) -> None:
    """Raise BackendError unless a communicator fits the request of a further `init`."""
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
