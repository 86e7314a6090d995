"""A communicator of the ranks that are left after some have died, and of processes that join."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mdfuse.backends.c10d.group_openers import default_group
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.bootstrap import Launch, detect
from mdfuse.config import Options, backend_choice, options_from_environment
from mdfuse.errors import BackendError, ProgramError, shown
from mdfuse.frontend.cache import FusionCache
from mdfuse.interpreter.threads import keep_ready
from mdfuse.runtime.agreement.abort_protocol import not_open
from mdfuse.runtime.agreement.epochs import Electorate, Excluded, asked
from mdfuse.runtime.communicator import Communicator, follow, init, live, opened
from mdfuse.runtime.first_meeting import Door, watch_for
from mdfuse.runtime.membership import Member, Membership, why_no_survivors
from mdfuse.runtime.null_world import NULL
from mdfuse.runtime.opening import AT_EXIT, loaded
from mdfuse.runtime.stores import open_store
from mdfuse.runtime.watch.hang_report import ranks_text
from mdfuse.runtime.watch.process import end_process
from mdfuse.runtime.watch.pulse import Pulse
from mdfuse.torch_private import PrefixStore, Store

_log = logging.getLogger("mdfuse.comm")

#: The exit status of a process that others go on without.
EXCLUDED_STATUS = 71

#: `settle_s` is so many times the age at which a rank is called gone.
_SETTLE = 2

#: The key under which a new process finds the communicator that it may join.
_ROOT = "mdfuse/rebuilt"


def rebuild(
    error: BackendError | None = None, *, settle_s: float | None = None, join: bool = False
) -> Communicator:
    """Return a communicator of the ranks that are left, after a communication broke.

    All ranks that are left call it. They agree through the store on who goes on, and are numbered
    anew, in their old order. What was under way is broken off; the communicator before is closed,
    and programs that ran on it raise. A rank that the others go on without ends with status 71.

    Args:
        error: what a run, a meeting or a save raised.
        settle_s: how long the others are waited for, seconds; one that has not come by then counts
            as lost. By default twice the age at which the watchdog calls a rank gone, and longer
            for ranks whose watchdogs still tell their positions, by at most `timeout_s`.
        join: take in new processes in the place of lost ones. All ranks call it, between two runs,
            without an error, and so do the new processes instead of `mdfuse.init`. Where none
            waits, the communicator stays.

    Returns:
        The communicator: `lost` are ranks before, `new_rank(old)` and `old_rank` say who is who.
        `mdfuse.init` returns it from now on.

    Raises:
        ProgramError: no error, or one that is no BackendError.
        BackendError: the launcher ends ranks itself; the store is gone with who kept it; there are
            no other ranks.
    """
    comm, now = live(), 0.0 if settle_s is None else settle_s
    if not isinstance(now, int | float) or isinstance(now, bool) or not 0 <= now < 1e6:
        raise ProgramError(f"rebuild with settle_s={shown(settle_s)}", hint="seconds: settle_s=8")
    if join:
        _check_no_error(error)
        return _joined(settle_s) if comm is None else _extended(comm, settle_s)
    if not isinstance(error, BackendError):
        raise ProgramError(
            "rebuild without an error" if error is None else f"rebuild after {_named(error)}",
            because="ranks are lost where a communication broke; any other error is of the program",
            hint="except mdfuse.BackendError as error: comm = mdfuse.rebuild(error)",
        )
    if comm is None or comm.door is None or comm.size == 1:
        raise BackendError(
            "rebuild of a communicator of one rank" if comm else "rebuild without a communicator",
            because="it is for ranks that have lost others",
            hint="call mdfuse.init() first",
        )
    _check_launch(comm.launch, os.environ)
    if comm.device.type == "cuda":
        comm.interruption.cancel(CudaDevice(comm.device).settle)
    comm.abort()
    return _agreed(comm, settle_s)


def _named(error: object) -> str:
    return f"{type(error).__name__}: {shown(error)}"


def _check_no_error(error: object) -> None:
    if error is not None:
        raise ProgramError(
            f"rebuild(join=True) after {_named(error)}",
            because="processes join between two runs; after an error survivors meet alone",
            hint="rebuild(error) first, and rebuild(join=True) before a later step",
        )


def _check_launch(launch: Launch, environment: Mapping[str, str]) -> None:
    """Raise BackendError where the launcher leaves no survivors alone."""
    why = why_no_survivors(launch, environment)
    if why is None:
        return
    raise BackendError(
        f"rank {launch.rank} cannot rebuild under {launch.name}",
        where=launch.why,
        because=why,
        hint="mdfuse launch leaves survivors alone; so does one agent of torchrun for each rank",
    )


def _agreed(
    comm: Communicator,
    settle_s: float | None,
    newcomers: Sequence[Member] = (),
    epoch: int | None = None,
) -> Communicator:
    """Agree with the others on who goes on, and return their communicator."""
    door, watch, before = comm.door, comm.watch, comm.membership
    assert door is not None
    pulse: Pulse[Member] | None = None
    if settle_s is None:  # a process that is slow, since its host is busy, is not lost
        rank_of = {member: rank for rank, member in enumerate(before.members)}
        pulse = Pulse(
            lambda member: watch.position_of(rank_of[member]),
            watch.patience_s,
            door.options.timeout_s,
        )
    electorate = Electorate(
        store=_epochs(door.base, door.root),
        me=before.members[comm.rank],
        before=before.members,
        newcomers=tuple(newcomers),
        settle_s=_SETTLE * watch.patience_s if settle_s is None else float(settle_s),
        pulse=pulse,
    )
    new = _entered(door, electorate, before.epoch + 1 if epoch is None else epoch, comm)
    _log.info("rank %d of before is rank %d of %d", comm.rank, new.rank, new.size)
    return new


def _entered(
    door: Door, electorate: Electorate, epoch: int, comm: Communicator | None
) -> Communicator:
    """Agree, and open the communicator; where one of the others dies meanwhile, agree again."""
    last: tuple[Member, ...] = ()
    while True:
        try:
            membership = electorate.agree(epoch)
        except Excluded as excluded:
            _end(electorate.me, excluded)
        if comm is not None and not comm.is_closed:
            comm.give_up()
            FusionCache.reset()
        try:
            new = opened(_door(door, membership, electorate.me, electorate.settle_s))
        except BackendError:
            if membership.members == last:  # it does not come of a death
                raise
            last, epoch = membership.members, membership.epoch + 1
            continue
        follow(new)
        if new.rank == 0:
            asked(door.base.set, _ROOT, door.root)
        return new


def _door(door: Door, membership: Membership, me: Member, settle_s: float) -> Door:
    """Return the arguments of joining those that go on."""
    launch, size = door.launch, len(membership.members)
    launch = replace(
        launch,
        rank=membership.members.index(me),
        size=size,
        local_size=size if launch.is_one_host else (1 if launch.local_size == 1 else None),
    )
    watch = watch_for(launch, door.options, os.environ)
    watch.start()
    return replace(door, launch=launch, watch=watch, membership=membership)


def _end(me: Member, excluded: Excluded) -> None:
    """End this process: the others go on without it."""
    others = ranks_text([place for place, _ in excluded.members])
    error = BackendError(
        f"rank {me[0]} is excluded: {others} went on without it in epoch {excluded.epoch}",
        because="it did not answer in time, and counts as lost",
        hint="a new process may join in its place: mdfuse.rebuild(join=True)",
    )
    sys.stderr.write(f"mdfuse.BackendError: {error}\n")
    end_process(EXCLUDED_STATUS)


def _epochs(base: Store, root: str) -> Store:
    return PrefixStore("epochs", PrefixStore(root, base))


# -- new processes -------------------------------------------------------------------------------


def _extended(comm: Communicator, settle_s: float | None) -> Communicator:
    """Take in the processes that wait; all ranks of a communicator call it together."""
    door = comm.door
    if door is None:
        return comm
    store = _epochs(door.base, door.root)
    text = None
    if comm.rank == 0:
        waiting = _waiting(store, comm.membership.members)
        if waiting:
            epoch = comm.membership.epoch + 1
            members = [(place, epoch) for place in waiting]
            text = json.dumps([epoch, members, comm.membership.members])
            for number in waiting.values():
                asked(store.set, f"join/{number}/call", text)
    said = comm.all_ok(text)[0]
    if said is None:
        return comm
    epoch, newcomers, _ = json.loads(said)
    joining = [(place, born) for place, born in newcomers]
    return _agreed(comm, settle_s, joining, epoch)


def _waiting(store: Store, members: Sequence[Member]) -> dict[int, int]:
    """Return the places of lost ranks that new processes wait for -> the number of the last one."""
    taken = {place for place, _ in members}
    places: dict[int, int] = {}
    for number in range(1, asked(store.add, "join/count", 0) + 1):
        key = f"join/{number}"
        is_there, is_called = (asked(store.check, [f"{key}/{x}"]) for x in ("place", "call"))
        if is_there and not is_called:
            place = int(asked(store.get, f"{key}/place"))
            if place not in taken:
                places[place] = number
    return places


def _joined(settle_s: float | None) -> Communicator:
    """Join, as a new process, those that go on; see `rebuild`."""
    options = options_from_environment(None)
    keep_ready(AT_EXIT)
    launch, names = detect(os.environ, default_group()), loaded(backend_choice(options.backend))
    if launch.size == 1 or names[0] == NULL:
        raise BackendError(
            "rebuild(join=True) in a process of its own",
            because=f"{launch.why}: there is nobody to join",
            hint="start it with the variables of the rank that was lost, as mdfuse launch does",
        )
    watch = watch_for(launch, options, os.environ)
    base, is_host = open_store(launch, options.timeout_s, os.environ, watch)
    root, call = _called(base, launch.rank, options.timeout_s)
    epoch, newcomers, before = json.loads(call)
    me = launch.rank, epoch
    door = Door(
        launch=launch, names=names, options=options, base=base, root=root, is_host=is_host,
        watch=watch, membership=Membership(()),
    )  # fmt: skip
    electorate = Electorate(
        store=_epochs(base, root),
        me=me,
        before=tuple((place, born) for place, born in before),
        newcomers=tuple((place, born) for place, born in newcomers),
        settle_s=_SETTLE * watch.patience_s if settle_s is None else float(settle_s),
    )
    return _entered(door, electorate, epoch, None)


def _called(base: Store, place: int, timeout_s: float) -> tuple[str, str]:
    """Wait until the others call this process; return the root of their keys, and the call."""
    try:
        base.wait([_ROOT])
        root = base.get(_ROOT).decode()
        store = _epochs(base, root)
        number = store.add("join/count", 1)
        store.set(f"join/{number}/place", str(place))
        store.wait([f"join/{number}/call"])
        return root, store.get(f"join/{number}/call").decode()
    except RuntimeError as error:
        raise BackendError(
            f"nobody took rank {place} in within {timeout_s:g} s",
            because=str(error).split("\n", 1)[0],
            hint="the others call mdfuse.rebuild(join=True) between two steps; raise timeout_s "
            "where steps are longer",
        ) from error


# -- programs of before ----------------------------------------------------------------------------


def members() -> tuple[Member, ...]:
    """Return the processes behind the ranks of this process's communicator; () for none."""
    communicator = live()
    return () if communicator is None else communicator.membership.members


def successor(communicator: Communicator | None, options: Options | None) -> Communicator:
    """Return the communicator of programs whose last one is closed.

    Raises:
        BackendError: ranks were lost: they are numbered anew.
    """
    if communicator is not None and communicator.is_left:
        raise not_open(communicator.rank, "run a program of before the rebuild", is_fork=False)
    return init(options)
