"""Examine this host: processor, shared memory, network."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from mdfuse.bootstrap import address_of_rank_0
from mdfuse.cli.doctor.findings import Finding
from mdfuse.cli.rich_tables import size_text
from mdfuse.errors import BackendError

SHARED_MEMORY = Path("/dev/shm")

#: The bytes of shared memory that Docker gives by default. NCCL and MPI need some per rank.
_SMALL = 64 << 20

_LARGER = "docker run --shm-size=1g; in Kubernetes an emptyDir with medium: Memory on /dev/shm"

#: Seconds after which a connection of this process to itself is given up.
_CONNECT_S = 2.0


def findings(environment: Mapping[str, str]) -> list[Finding]:
    """Return everything about this host on which a run depends."""
    return [processor(), shared_memory(SHARED_MEMORY), *network(environment)]


def processor() -> Finding:
    """Return how many cores this process may use, and how many threads torch uses."""
    cores = len(os.sched_getaffinity(0))
    return Finding(name="processor", what=f"{cores} cores, {torch.get_num_threads()} used")


def shared_memory(folder: Path) -> Finding:
    """Return how much is free of the memory that ranks of one host share."""
    try:
        stats = os.statvfs(folder)
    except OSError as error:
        return Finding(name="shared memory", what=f"none: {error}", remedy=_LARGER)
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    what = f"{size_text(free)} of {size_text(total)} free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(name="shared memory", what=f"{folder} cannot be written", remedy=_LARGER)
    remedy = _LARGER if free <= _SMALL else None
    return Finding(name="shared memory", what=what, remedy=remedy)


def network(environment: Mapping[str, str]) -> list[Finding]:
    """Return findings on loopback, ports, interfaces, and the address of rank 0 where given."""
    names = ", ".join(name for _, name in socket.if_nameindex()) or "none"
    checks = [loopback(), Finding(name="interfaces", what=names), host_name(socket.gethostname())]
    chosen = environment.get("GLOO_SOCKET_IFNAME", "")
    return [*checks, *_chosen_interfaces(chosen), *_rank_0(environment)]


def loopback() -> Finding:
    """Try a connection over 127.0.0.1, by which ranks of one host find each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), _CONNECT_S).close()
    except OSError as error:
        return Finding(
            name="ports",
            what=f"no connection over 127.0.0.1 ({error})",
            remedy="ip link set lo up, and let processes listen there",
            is_problem=True,
        )
    return Finding(name="ports", what=f"free ones on 127.0.0.1{_port_range()}")


def _port_range() -> str:
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return ", of {} to {}".format(*file.read_text().split()) if file.exists() else ""


def host_name(name: str) -> Finding:
    """Look up the address of this host's name, by which other hosts reach it by default."""
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding(
            name="host name",
            what=f"{name} has no address ({error})",
            remedy="set GLOO_SOCKET_IFNAME for ranks on several hosts",
        )
    is_local = address.startswith("127.")
    remedy = "set GLOO_SOCKET_IFNAME for ranks on several hosts" if is_local else None
    return Finding(name="host name", what=f"{name} is {address}", remedy=remedy)


def _chosen_interfaces(names: str) -> list[Finding]:
    there = {name for _, name in socket.if_nameindex()}
    missing = [n for n in (name.strip() for name in names.split(",")) if n and n not in there]
    return [
        Finding(
            name="GLOO_SOCKET_IFNAME",
            what=f"there is no interface {name}",
            remedy="name one of the interfaces above, or unset it",
            is_problem=True,
        )
        for name in missing
    ]


def _rank_0(environment: Mapping[str, str]) -> list[Finding]:
    host = environment.get("MASTER_ADDR")
    if not host:
        return []
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:  # the second: it cannot be a name
        return [
            Finding(
                name="MASTER_ADDR",
                what=f"{host} has no address ({error})",
                remedy="set it to the address of rank 0's host",
                is_problem=True,
            )
        ]
    try:
        address = address_of_rank_0(environment)
    except BackendError as error:
        return [Finding(name="MASTER_PORT", what=error.what, remedy=error.hint, is_problem=True)]
    return [Finding(name="rank 0", what=f"{host}, {address[1] if address else 'no port'}")]
