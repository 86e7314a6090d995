"""Reshards from mesh to mesh, each on hosts of its own, and how long they would take there.

The cases are those of AlpaComm (Zhuang et al. 2022, On Optimizing the Communication of Model
Parallelism): nine of several senders, seven of one. A row of a mesh is a host.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _reshard_pairs import bound, posts

from mdfuse import DeviceMesh, Layout, Shard
from mdfuse.communication import Communication
from mdfuse.layouts.boxes import box_size
from mdfuse.layouts.hosts import hosts_by_rank
from mdfuse.layouts.kinds import POINT_TO_POINT
from mdfuse.layouts.layout import Placement
from mdfuse.reshard.lower_bounds import cells_of, coordinates, cut_in_cells
from mdfuse.reshard.steps import steps

#: Constants of the model: ns per message, bytes per ns within a host, and between hosts.
_MESSAGE_NS, _LINK, _NETWORK = 10_000, 270, 27
_ITEMSIZE = 4

_Placements = dict[str, Placement]
_R: _Placements = {}
_A = [{"a": Shard(d)} for d in range(3)]
_B = [{"b": Shard(d)} for d in range(3)]
_BOTH = [{"a": Shard(d), "b": Shard(d)} for d in range(3)]
_CUBE = (1024, 1024, 512)

#: name -> sizes of the source's mesh and of the destination's, extents, placements
CASES: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, ...], object, object]] = {
    "1": ((2, 4), (2, 4), _CUBE, _A[0], _A[0]),
    "2": ((2, 4), (2, 4), _CUBE, _R, _A[0]),
    "3": ((2, 4), (2, 4), _CUBE, _A[1], _A[0]),
    "4": ((2, 4), (2, 4), _CUBE, _BOTH[1], _BOTH[0]),
    "5": ((2, 4), (2, 4), _CUBE, _B[0], _A[0]),
    "6": ((2, 4), (3, 4), (3072, 1024, 170), _A[0], _A[0]),
    "7": ((1, 4), (2, 4), _CUBE, _B[0], _R),
    "8": ((1, 4), (2, 4), _CUBE, _B[0], _R),
    "9": ((2, 4), (2, 4), _CUBE, _A[1], _A[2]),
}
CASES |= {
    f"1 to {a} x {b}": ((1, 1), (a, b), (1 << 28,), _R, _R)
    for a, b in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2))
}


@dataclass(frozen=True)
class Timed:
    """One case: what goes through the busiest host's network, and the time in microseconds."""

    case: str
    steps: str
    crossing: int
    least_crossing: float
    microseconds: float
    least_microseconds: float
    without_hosts: float

    @property
    def ratio(self) -> float:
        """The time over what it must take."""
        return self.microseconds / self.least_microseconds


def mesh_of(sizes: tuple[int, int], first: int, host: int) -> DeviceMesh:
    """A mesh of which each row is a host."""
    n = math.prod(sizes)
    hosts = [host + i // sizes[1] for i in range(n)]
    return DeviceMesh.of(sizes, range(first, first + n), ("a", "b"), hosts)


def network(comm: Communication, hosts: dict[int, int]) -> int:
    """The bytes through the busiest host's network: into it, or out of it."""
    into, out = Counter[int](), Counter[int]()
    if comm.kind in POINT_TO_POINT:
        for r in hosts:
            part = comm.part(r)
            peers = part.call.recvs if part.call is not None else ()
            for peer, piece in zip(peers, part.recvs, strict=True):
                if hosts[peer] != hosts[r]:
                    into[hosts[r]] += box_size(piece)
                    out[hosts[peer]] += box_size(piece)
        return max((0, *into.values(), *out.values()))
    for team in {comm.team(r) for r in hosts if comm.team(r)}:
        got: dict[int, list[int]] = defaultdict(list)
        for r in team:
            got[hosts[r]].append(comm.bytes_received(r))
        if len(got) > 1 and comm.kind in ("Gather", "Scatter"):
            home = hosts[comm.root(team[0]) or 0]
            far = [r for r in team if hosts[r] != home]
            parts = (comm.destination if comm.kind == "Scatter" else comm.source,)
            into[home] += sum(math.prod(parts[0].local_shape(comm.shape, r)) for r in far)
        elif len(got) > 1:  # what goes round comes to each host once
            into.update({host: max(max(times) for times in got.values()) for host in got})
    return max((0, *into.values()))


def crossing_bound(source: Layout, goal: Layout, shape: tuple[int, ...]) -> float:
    """Return a lower bound of the elements through the network of the busiest host.

    A host receives at least the elements that its ranks need and cannot compute, and sends those
    that others need and no other host has. On average hosts send as much as
    they receive.
    """
    hosts = hosts_by_rank(source.mesh, goal.mesh)
    kept_axes = [a for a in source.partial_axes if a in goal.partial_axes]
    reduced = [a for a in source.partial_axes if a not in kept_axes]
    cuts, volume = cut_in_cells(source, goal, shape)
    terms: dict[Any, dict[int, Any]] = defaultdict(dict)  # term -> host -> mask of its cells
    for r in source.mesh.ranks:
        there = terms[coordinates(source, r, kept_axes), coordinates(source, r, reduced)]
        there[hosts[r]] = there.get(hosts[r], False) | cells_of(source, shape, cuts, r)
    needs: dict[Any, dict[int, Any]] = defaultdict(dict)
    for r in goal.mesh.ranks:
        there = needs[coordinates(goal, r, kept_axes)]
        there[hosts[r]] = there.get(hosts[r], False) | cells_of(goal, shape, cuts, r)
    into, out = Counter[int](), Counter[int]()
    for group, need in needs.items():
        held = [cells_by_host for (at, _), cells_by_host in terms.items() if at == group]
        for h, cells in need.items():
            complete = np.all(
                [cells_by_host.get(h, np.zeros_like(cells)) for cells_by_host in held], axis=0
            )
            into[h] += int((volume * (cells & ~complete)).sum())
        for h in {h for cells_by_host in held for h in cells_by_host}:
            elsewhere = np.any([c for g, c in need.items() if g != h] or [volume < 0], axis=0)
            alone = np.any([_only(cells_by_host, h, elsewhere) for cells_by_host in held], axis=0)
            out[h] += int((volume * (alone & elsewhere)).sum())
    average = sum(into.values()) / len({*into, *out})
    return max(average, *into.values(), *out.values())


def _only(by_host: dict[int, Any], host: int, like: Any) -> Any:
    """Return a mask of the cells of a term that one host alone holds."""
    others = np.any([c for h, c in by_host.items() if h != host] or [like & False], axis=0)
    return by_host.get(host, like & False) & ~others


def nanoseconds(steps: Sequence[Communication], hosts: dict[int, int]) -> float:
    """The time of some posts, one after the other."""
    total = 0.0
    for comm in steps:
        parts = [comm.part(r) for r in hosts] if comm.kind in POINT_TO_POINT else []
        messages = max((max(len(p.sends), len(p.recvs)) for p in parts), default=1)
        arrives = max(comm.bytes_received(r) for r in hosts)
        slowest = max(arrives / _LINK, network(comm, hosts) / _NETWORK)
        total += _MESSAGE_NS * messages + slowest * _ITEMSIZE
    return total


def timed(case: str) -> Timed:
    """Plan a case where hosts are known, and where they are not."""
    source_sizes, goal_sizes, shape, before, after = CASES[case]
    one = mesh_of(source_sizes, 0, 0)
    other = mesh_of(goal_sizes, one.size, source_sizes[0])
    source, goal = Layout(one, before), Layout(other, after)  # type: ignore[arg-type]
    hosts = dict(zip((*one, *other), (*(one.hosts or ()), *(other.hosts or ())), strict=True))
    comms = posts(steps(source, goal, shape, _ITEMSIZE), shape)
    unknown = [Layout(x.mesh.with_hosts(None), x.by_axis()) for x in (source, goal)]
    without = posts(steps(*unknown, shape), shape)
    crossing = crossing_bound(source, goal, shape)
    least = max(bound(source, goal, shape).worst / _LINK, crossing / _NETWORK) * _ITEMSIZE
    return Timed(
        case=case,
        steps="; ".join(map(str, comms)),
        crossing=sum(network(comm, hosts) for comm in comms) * _ITEMSIZE,
        least_crossing=crossing * _ITEMSIZE,
        microseconds=nanoseconds(comms, hosts) / 1e3,
        least_microseconds=(_MESSAGE_NS + least) / 1e3,
        without_hosts=nanoseconds(without, hosts) / 1e3,
    )
