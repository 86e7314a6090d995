"""Where the ranks of a launch find each other: one key-value store that all of them reach."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import rendezvous

from mdfuse.backends import mpi_library
from mdfuse.backends.c10d_groups import HashStore, Store, TCPStore
from mdfuse.backends.mpi_requests import Waiting, poll
from mdfuse.errors import BackendError
from mdfuse.runtime.bootstrap import Launch, address_of_rank_0
from mdfuse.torch_private import default_store

#: Linux's request for the address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915


def open_store(
    launch: Launch, timeout_s: float, environment: Mapping[str, str]
) -> tuple[Store, bool]:
    """Open the store of this launch; also tell whether this process hosts it for the others.

    A world of one rank needs no network: its store is a dictionary.

    Raises:
        BackendError: the ranks cannot find each other.
    """
    if launch.size == 1:
        return HashStore(), False
    try:
        return _STORES[launch.name](launch, timedelta(seconds=timeout_s), environment)
    except (RuntimeError, OSError, UnicodeError) as error:  # the last: a name that cannot be one
        raise BackendError(
            f"rank {launch.rank} cannot reach the other {launch.size - 1} ranks",
            where=f"launcher {launch.name}: {launch.why}",
            because=str(error).split("\n", 1)[0],
            hint="check that every rank was started, and the address of rank 0's host",
        ) from error


def _from_default_group(
    launch: Launch, timeout: timedelta, environment: Mapping[str, str]
) -> tuple[Store, bool]:
    return default_store(), False


def _from_torchrun(
    launch: Launch, timeout: timedelta, environment: Mapping[str, str]
) -> tuple[Store, bool]:
    """Torchrun's agent keeps the store; started by hand, rank 0 does.

    torch's own rendezvous, so that the same process may call `init_process_group` before or after.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _met(launch, timeout), False
    where = _address(launch, environment), launch.rank, launch.size
    store = _HOSTED.get(where)
    if store is None or not _answers(store):
        store = _HOSTED[where] = _met(launch, timeout)
    store.set_timeout(timeout)
    return store, launch.rank == 0


#: Stores that rank 0 hosts at an address that all know, by address and rank. They last as long as
#: the process: a rank that joins again at once must not meet a store that is just being closed.
_HOSTED: dict[tuple[object, ...], Store] = {}


def _met(launch: Launch, timeout: timedelta) -> Store:
    found = next(iter(rendezvous("env://", launch.rank, launch.size, timeout=timeout)))
    store: Store = found[0]
    return store


def _answers(store: Store) -> bool:
    """Whether a store is still there: the process that hosted it may have ended."""
    try:
        store.check([])
    except RuntimeError:
        return False
    return True


def _from_mpi(
    launch: Launch, timeout: timedelta, environment: Mapping[str, str]
) -> tuple[Store, bool]:
    """Rank 0 binds a free port and MPI tells the others which; without MPI, MASTER_ADDR does."""
    world, why_not = _mpi_world(launch)
    if world is None:
        return _from_address(launch, timeout, environment, why_not)
    _meet_in_mpi(world, timeout)
    is_one_host = len(set(world.allgather(socket.gethostname()))) == 1
    store: TCPStore | None = None
    told: tuple[str, int] | BackendError
    if launch.rank == 0:
        try:
            host = "127.0.0.1" if is_one_host else _own_address(environment)
            store, told = _host_store(host, launch.size, timeout)
        except (BackendError, OSError, RuntimeError, UnicodeError) as error:
            told = BackendError(f"rank 0 cannot host the store: {error}")
        world.bcast(told, 0)
    else:
        told = world.bcast(None, 0)
    if isinstance(told, BackendError):
        raise told
    host, port = told
    return store or _client(host, port, launch.size, timeout), launch.rank == 0


_Opener = Callable[[Launch, timedelta, Mapping[str, str]], tuple[Store, bool]]

_STORES: dict[str, _Opener] = {
    "default group": _from_default_group,
    "torchrun": _from_torchrun,
    "mpirun": _from_mpi,
    "srun": _from_mpi,
}


def _meet_in_mpi(world: Any, timeout: timedelta) -> None:
    """Return once all ranks have come; MPI's calls that block would wait for them for ever."""
    try:
        poll(world.Ibarrier().Test, Waiting(timeout_s=timeout.total_seconds()))
    except RuntimeError as error:
        raise RuntimeError(f"not all ranks came to MPI's barrier: {error}") from error


def _mpi_world(launch: Launch) -> tuple[Any, str]:
    """MPI's world where mpi4py sees this launch, else None and why not."""
    try:
        world = mpi_library.library().COMM_WORLD
    except BackendError as error:
        return None, f"{error.what} ({error.because})"
    if (world.Get_rank(), world.Get_size()) != (launch.rank, launch.size):
        return None, (
            f"mpi4py sees rank {world.Get_rank()} of {world.Get_size()}, {launch.name} says rank "
            f"{launch.rank} of {launch.size}: it was built for another MPI, or the launcher does "
            "not speak its PMI"
        )
    return world, ""


def _from_address(
    launch: Launch, timeout: timedelta, environment: Mapping[str, str], why_not: str
) -> tuple[Store, bool]:
    (host, port), is_host = _address(launch, environment, f"{why_not}, and "), launch.rank == 0
    return _client(host, port, launch.size, timeout, is_master=is_host), is_host


def _address(launch: Launch, environment: Mapping[str, str], why: str = "") -> tuple[str, int]:
    address = address_of_rank_0(environment)
    if address is None:
        raise BackendError(
            f"rank {launch.rank} of {launch.size} does not know where rank 0 is",
            where=f"launcher {launch.name}: {launch.why}",
            because=f"{why}MASTER_ADDR and MASTER_PORT are not both set",
            hint="install mpi4py for the MPI that starts the ranks (srun: --mpi=pmix), or set "
            "MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there",
        )
    return address


def _client(
    host: str, port: int, size: int, timeout: timedelta, *, is_master: bool = False
) -> TCPStore:
    return TCPStore(host, port, size, is_master, timeout, wait_for_workers=False)


def _host_store(host: str, size: int, timeout: timedelta) -> tuple[TCPStore, tuple[str, int]]:
    """A store on a free port of `host`'s address alone; left to itself it listens on every one."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server((address[0], 0), family=family, backlog=max(128, size))
    host, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, (host, port)


def _own_address(environment: Mapping[str, str]) -> str:
    """An address of this host that other hosts reach: what the user says, else a good guess."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    interface = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _address_of_interface(interface)
    for guess in (_address_of_name, _address_of_route):
        address = guess()
        if address and not address.startswith("127."):
            return address
    raise BackendError(
        f"{socket.gethostname()} does not know an address by which other hosts reach it",
        because="its name resolves to loopback, and it has no default route",
        hint="set MASTER_ADDR to its address, or GLOO_SOCKET_IFNAME to a network interface",
    )


def _address_of_interface(name: str) -> str:
    import fcntl  # POSIX only

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", os.fsencode(name)[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def _address_of_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _address_of_route() -> str | None:
    """The source address of a packet to elsewhere (TEST-NET-1; connecting UDP sends nothing)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
