"""Open the key-value store in which the ranks of a launch find each other."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import rendezvous

from mdfuse.backends.mpi import mpi_library as mpi_library
from mdfuse.backends.mpi.pending_requests import Waiting, poll
from mdfuse.bootstrap import Launch, address_of_rank_0
from mdfuse.errors import BackendError
from mdfuse.runtime.deadline import Deadline
from mdfuse.runtime.watch.watch import Watch
from mdfuse.torch_private import HashStore, Store, TCPStore, default_store

#: Linux's request for the address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915

#: Between two looks whether the store's host has come, seconds.
_PAUSE_S = 0.1


def open_store(
    launch: Launch, timeout_s: float, environment: Mapping[str, str], watch: Watch | None = None
) -> tuple[Store, bool]:
    """Open the store of a launch.

    A world of one rank needs no network: its store is a dictionary.

    Args:
        launch: how the ranks were started.
        timeout_s: deadline of all waits in here together, seconds.
        environment: the process's environment variables.
        watch: ends the process where a wait cannot be left, and knows the missing ranks.

    Returns:
        the store, and whether this process hosts it for the others.

    Raises:
        BackendError: the ranks cannot find each other.
    """
    if launch.size == 1:
        return HashStore(), False
    watch = watch or Watch(rank=launch.rank, timeout_s=timeout_s)
    meeting = Meeting(launch, environment, Deadline.after(timeout_s), watch)
    try:
        store, is_host = _STORES[launch.name](meeting)
        store.set_timeout(timedelta(seconds=timeout_s))
    except (RuntimeError, OSError, UnicodeError) as error:  # the last: an invalid host name
        failure = BackendError(
            f"rank {launch.rank} cannot reach {launch.others}",
            where=f"launcher {launch.name}: {launch.why}",
            because=str(error).split("\n", 1)[0],
            hint="check that every rank was started, and the address of rank 0's host",
        )
        raise watch.explain(failure) from error
    return store, is_host


def another_connection(store: Store, timeout_s: float) -> Store:
    """Return the same store with a connection of its own.

    torch holds Python's lock while it clones a store, so that no thread could see that the store's
    host does not answer. So only a store that torch opened for a process group is cloned.
    """
    if not isinstance(store, TCPStore):
        cloned: Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
        return cloned
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(store.host, store.port, None, False, timeout, wait_for_workers=False)


@dataclass(frozen=True, slots=True)
class Meeting:
    """The arguments of opening a store; all waits together have the one deadline."""

    launch: Launch
    environment: Mapping[str, str]
    deadline: Deadline
    watch: Watch


def _from_torchrun(meeting: Meeting) -> tuple[Store, bool]:
    """Open the store of torchrun's agent; for ranks started by hand, rank 0 keeps one.

    The address is that of torch's own rendezvous, so that a process may call `init_process_group`
    before or after.
    """
    launch, environment = meeting.launch, meeting.environment
    host, port = _address(launch, environment)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        with meeting.watch.waiting(f"the store that torchrun keeps at {host}:{port}", _STORE):
            timeout = meeting.deadline.left_for_store()
            opened = rendezvous("env://", launch.rank, launch.size, timeout=timeout)
            return next(iter(opened))[0], False
    return _at_address(meeting, host, port)


def _at_address(meeting: Meeting, host: str, port: int) -> tuple[Store, bool]:
    """Open the store that rank 0 keeps at an address that all ranks know."""
    launch = meeting.launch
    where = host, port, launch.rank, launch.size
    is_host = launch.rank == 0
    with meeting.watch.waiting(f"the store that rank 0 keeps at {host}:{port}", _STORE):
        store = _known_store(where)
        if store is None:
            store = _host_store(meeting, host, port) if is_host else _client(meeting, host, port)
            _HOSTED[where] = store
    return store, is_host


#: The name of the place where ranks meet to open the store: see `Neighbours`.
_STORE = "the store"

#: Stores that rank 0 hosts at an address that all know, by address and rank. They last as long as
#: the process: a rank that joins again at once must not meet a store that is just being closed, and
#: other ranks may ask the store of a rank that waits in MPI_Finalize.
_HOSTED: dict[tuple[object, ...], Store] = {}


def _known_store(where: tuple[object, ...]) -> Store | None:
    """Return the store of an earlier meeting, if it still answers; else None."""
    store = _HOSTED.get(where)
    with suppress(RuntimeError):
        if store is not None:
            store.check([])
            return store
    return None


def _from_mpi(meeting: Meeting) -> tuple[Store, bool]:
    """Open a store on a free port of rank 0, which MPI tells the others.

    Where MPI cannot be used, MASTER_ADDR and MASTER_PORT tell the address.
    """
    with meeting.watch.waiting("MPI_Init of all ranks", "MPI_Init"):
        world, why_not = _mpi_world(meeting.launch)
    if world is None:
        return _at_address(meeting, *_address(meeting.launch, meeting.environment, why_not))
    with meeting.watch.waiting("the first exchange of all ranks in MPI", _STORE):
        _meet_in_mpi(world, meeting.deadline)
        is_one_host = len(set(world.allgather(socket.gethostname()))) == 1
        address, store = None, None
        if meeting.launch.rank == 0:
            address, store = _offer(meeting, is_one_host)
        address = world.bcast(address, 0)
        if isinstance(address, BackendError):
            raise address
        store = store or _known_store(address) or _client(meeting, *address)
    _HOSTED[address] = store
    return store, meeting.launch.rank == 0


def _offer(meeting: Meeting, is_one_host: bool) -> tuple[Any, Store | None]:
    """Make rank 0's store, or find an earlier one.

    Returns:
        its address, or the error to tell the others; and the store, or None.
    """
    try:
        for address in _HOSTED:
            if store := _known_store(address):
                return address, store
        host = "127.0.0.1" if is_one_host else _own_address(meeting.environment)
        store = _host_store(meeting, host, 0)
        return (host, store.port), store
    except (BackendError, OSError, RuntimeError, UnicodeError) as error:
        return BackendError(f"rank 0 cannot host the store: {error}"), None


_STORES: dict[str, Callable[[Meeting], tuple[Store, bool]]] = {
    "default group": lambda meeting: (default_store(), False),
    "torchrun": _from_torchrun,
    "mpirun": _from_mpi,
    "srun": _from_mpi,
}


def _meet_in_mpi(world: Any, deadline: Deadline) -> None:
    """Wait in MPI until all ranks have come, with a deadline: MPI's blocking calls have none."""
    try:
        poll(world.Ibarrier().Test, Waiting(timeout_s=deadline.left()))
    except RuntimeError as error:
        raise RuntimeError(f"not all ranks came to MPI's barrier: {error}") from error


def _mpi_world(launch: Launch) -> tuple[Any, str]:
    """Return MPI's world where it is that of the launch, else None and the reason."""
    refusal = mpi_library.why_not_in(launch)
    return (mpi_library.library().COMM_WORLD, "") if refusal is None else (None, refusal[0])


def _address(launch: Launch, environment: Mapping[str, str], why: str = "") -> tuple[str, int]:
    address = address_of_rank_0(environment)
    if address is None:
        raise BackendError(
            f"rank {launch.rank} of {launch.size} does not know where rank 0 is",
            where=f"launcher {launch.name}: {launch.why}",
            because=f"{why and why + ', and '}MASTER_ADDR and MASTER_PORT are not both set",
            hint="install mpi4py for the MPI that starts the ranks (srun: --mpi=pmix), or set "
            "MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there",
        )
    return address


def _client(meeting: Meeting, host: str, port: int) -> TCPStore:
    """Open the store that another rank keeps; that may come later.

    torch doubles its pauses, so that it would come up to half as late again as the host.
    """
    while _is_refused(host, port):
        if not meeting.deadline.left():
            raise RuntimeError(f"nobody listens at {host}:{port}")
        time.sleep(_PAUSE_S)
    timeout = meeting.deadline.left_for_store()
    return TCPStore(host, port, meeting.launch.size, False, timeout, wait_for_workers=False)


def _is_refused(host: str, port: int) -> bool:
    """Return whether nobody listens at an address yet."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):  # torch says what is wrong
        return False
    return False


def _host_store(meeting: Meeting, host: str, port: int) -> TCPStore:
    """Open a store on this host, which listens on the address of `host` alone if it can.

    torch's own rendezvous in this process finds the store at the same port.

    Args:
        meeting: of all ranks.
        host: the name or address by which other ranks reach this host.
        port: 0: any free one.
    """
    size = meeting.launch.size
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
    listener = _listener(meeting.launch, host, port)
    if listener is not None:
        host, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
        options["master_listen_fd"] = listener.detach()
    return TCPStore(host, port, size, True, meeting.deadline.left_for_store(), **options)


def _listener(launch: Launch, host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the address of `host`; None where torch is to choose.

    torch chooses if `host` is a loopback address on this host only, as in Debian's /etc/hosts, if
    it is a translated address and so not one of this host's, and if the port is in use, perhaps by
    a store that torch keeps already.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_loopback = ipaddress.ip_address(address[0]).is_loopback
    if is_loopback and not launch.is_one_host and not _means_loopback(host):
        return None
    backlog = max(128, launch.size)
    try:
        return socket.create_server((str(address[0]), port), family=family, backlog=backlog)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None  # torch raises if the port belongs to another process
        raise


def _means_loopback(host: str) -> bool:
    """Return whether a host's name or address is the loopback on every host."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _own_address(environment: Mapping[str, str]) -> str:
    """Return an address by which other hosts reach this one: the user's choice, else a guess.

    Raises:
        BackendError: no address is found.
    """
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
    """Return the source address of a packet to another network, or None.

    The destination is in TEST-NET-1 (RFC 5737); connecting a UDP socket sends nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
