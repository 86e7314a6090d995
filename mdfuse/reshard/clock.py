"""The time of a step if hosts are known: a latency per message, plus bytes over bandwidth.

The constants are those of one kind of machine on purpose: the choice of steps depends on hosts
alone, and is the same wherever a program is lowered.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from mdfuse.communication import Communication
from mdfuse.layouts.endpoints import Side
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.hosts import hosts_by_rank, pairs_apart, rings
from mdfuse.layouts.inter_host_volume import crossing, messages
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.recv_volume import UNIT, arriving, is_special, part_size
from mdfuse.mesh import DeviceMesh

EXCHANGES = ("Exchange", "ReduceExchange")

#: Latency of a message, nanoseconds.
MESSAGE = 10_000
#: Bandwidth into a rank, bytes per nanosecond: 60 % of an H100 SXM's 450 GB/s.
LINK = 270
#: Bandwidth of a host's network, bytes per nanosecond.
NETWORK = 27


def nanoseconds(messages: int, arriving: int, crossing: int, itemsize: int) -> int:
    """Return the time of a step in nanoseconds, rounded up.

    Args:
        messages: the message count of the busiest rank; a collective counts as one.
        arriving: `UNIT` times the elements that the busiest rank receives.
        crossing: the elements through the busiest host's network.
        itemsize: bytes of an element.

    >>> nanoseconds(1, 2700 * UNIT, 2700, 4), nanoseconds(1, 27000 * UNIT, 270, 4)
    (10400, 10400)
    """
    inside = -(-arriving * itemsize // (UNIT * LINK))
    between = -(-crossing * itemsize // NETWORK)
    return MESSAGE * messages + (inside if inside > between else between)


def is_timed(source: Layout, destination: Layout, shape: tuple[int, ...]) -> bool:
    """Return whether costs are times: hosts are known, and extents are numbers."""
    one, other = source.mesh, destination.mesh
    is_known = one.hosts is not None and (one is other or hosts_by_rank(one, other) is not None)
    return is_known and not is_special(source, destination, shape)


def messages_of(comm: Communication, shape: tuple[int, ...]) -> int:
    """Return the message count of the busiest rank."""
    return messages(_exchange(comm, shape)) if comm.kind in EXCHANGES else 1


def crossing_of(comm: Communication, shape: tuple[int, ...]) -> int:
    """Return the elements through the busiest host's network."""
    if comm.kind in EXCHANGES:
        return crossing(_exchange(comm, shape))
    before, after = (part_size(x, shape) for x in (comm.source, comm.destination))
    if comm.is_along_axes:
        return along(comm.kind, comm.source.mesh, comm.axes, before, after)
    return _between(comm, before, after)


def _exchange(comm: Communication, shape: tuple[int, ...]) -> Exchange:
    return Exchange(_side(comm.source, shape), _side(comm.destination, shape))


_side = lru_cache(maxsize=1024)(Side)


def along(kind: str, mesh: DeviceMesh, axes: tuple[str, ...], before: int, after: int) -> int:
    """Return the elements through the busiest host's network in a collective along axes."""
    find = pairs_apart if kind == "AllToAll" else rings
    n = math.prod(map(mesh.axis_size, axes))
    return through_teams(kind, find(mesh, axes), n, before, after)


def through_teams(kind: str, teams: int, n: int, before: int, after: int) -> int:
    """Return the same from the number of teams of n ranks, or of pairs, that span hosts."""
    if kind == "AllToAll":
        return -(-before * teams // n)
    return teams * -(-arriving(kind, n, before, after) // UNIT) if teams else 0


def _between(comm: Communication, before: int, after: int) -> int:
    """Return the same for a collective, or for pairs, from one mesh to another."""
    source, destination = comm.source.mesh, comm.destination.mesh
    hosts = hosts_by_rank(source, destination)
    source_hosts, destination_hosts = (hosts[mesh.array] for mesh in (source, destination))
    if comm.kind == "SendRecv":
        apart = source_hosts != destination_hosts
        return before * max(
            int(np.bincount(side[apart], minlength=1).max())
            for side in (source_hosts, destination_hosts)
        )
    is_in = comm.kind in ("Gather", "Reduce")
    far = int(
        (source_hosts != destination_hosts[0]).sum()
        if is_in
        else (destination_hosts != source_hosts[0]).sum()
    )
    return (before if is_in else after) * (far if comm.kind in ("Gather", "Scatter") else far > 0)
