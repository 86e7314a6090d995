"""Hosts of ranks, senders by host, and the inter-host volume of collectives."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mdfuse.errors import MeshError
from mdfuse.mesh import DeviceMesh


@lru_cache(maxsize=256)
def hosts_by_rank(*meshes: DeviceMesh) -> Any:
    """Return an array of the host of each rank, -1 outside of the meshes; None if some are unknown.

    Raises:
        MeshError: a rank is on two hosts.

    >>> one, other = DeviceMesh([0, 1], hosts=[0, 0]), DeviceMesh([1, 3], hosts=[0, 1])
    >>> hosts_by_rank(one, other).tolist(), hosts_by_rank(one, DeviceMesh([1, 3]))
    ([0, 0, -1, 1], None)
    """
    if any(mesh.hosts is None for mesh in meshes):
        return None
    host_of = np.full(max(mesh.last_rank for mesh in meshes) + 1, -1)
    for mesh in meshes:
        ranks, hosts = mesh.array, np.array(mesh.hosts)
        wrong = ranks[(host_of[ranks] >= 0) & (host_of[ranks] != hosts)]
        if len(wrong):
            raise MeshError(
                f"rank {wrong[0]} is on two hosts: {' and '.join(map(str, meshes))}",
                because="a rank is on one host, whichever mesh it is in",
                hint="number hosts alike in all meshes of a program",
            )
        host_of[ranks] = hosts
    return host_of


def senders(holders: Any, receivers: Any, hosts: Any) -> Any:
    """Return the sender of a part to each receiver: a holder on its host, if there is one.

    Receivers on a host take turns among the holders there, all others among all holders, where
    neighbours are on different hosts.

    Args:
        holders: the ranks that have the part, an array.
        receivers: the ranks that lack it.
        hosts: the hosts of all ranks, by rank.

    >>> on_hosts = np.array([0, 0, 1, 1, 0, 0, 0, 2, 2, 2])
    >>> senders(np.arange(4), np.arange(4, 10), on_hosts).tolist()
    [0, 1, 0, 0, 2, 1]
    """
    holder_hosts, receiver_hosts = hosts[holders], hosts[receivers]
    turn, order = _numbered(holder_hosts)
    first, last = (
        np.searchsorted(holder_hosts[order], receiver_hosts, side) for side in ("left", "right")
    )
    is_near = last > first
    spread = holders[np.lexsort((holder_hosts, turn))]  # neighbours on different hosts
    by = np.empty(len(receivers), int)
    near = first + _numbered(receiver_hosts)[0] % np.maximum(last - first, 1)
    by[is_near] = holders[order][near[is_near]]
    by[~is_near] = spread[np.arange(int((~is_near).sum())) % len(spread)]
    return by


def _numbered(groups: Any) -> tuple[Any, Any]:
    """Return the index of each entry in its group, and the order by groups."""
    order = np.argsort(groups, kind="stable")
    number, by_group = np.empty(len(groups), int), groups[order]
    number[order] = np.arange(len(groups)) - np.searchsorted(by_group, by_group)
    return number, order


@lru_cache(maxsize=256)
def _in_teams(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Return arrays (host, members of one team on it, members elsewhere)."""
    index = [mesh.axis_index(a) for a in axes]
    others = [i for i in range(mesh.ndim) if i not in index]
    hosts, at = np.unique(np.array(mesh.hosts), return_inverse=True)
    n = int(np.prod([mesh.shape[i] for i in index]))
    teams = at.reshape(mesh.shape).transpose(*others, *index).reshape(-1, n)
    pairs = np.arange(len(teams))[:, None] * len(hosts) + teams
    team_hosts, members = np.unique(pairs, return_counts=True)
    return team_hosts % len(hosts), members, n - members


@lru_cache(maxsize=256)
def rings(mesh: DeviceMesh, axes: tuple[str, ...]) -> int:
    """Return the largest number of teams on one host that span hosts.

    Ring traffic enters each host once, if ranks of one host are neighbours in the ring.

    >>> mesh = DeviceMesh.arange(dp=2, tp=4).with_hosts([0] * 4 + [1] * 4)
    >>> rings(mesh, ("dp",)), rings(mesh, ("tp",)), rings(mesh, ("dp", "tp"))
    (4, 0, 1)
    """
    host, _, elsewhere = _in_teams(mesh, axes)
    return int(np.bincount(host, elsewhere > 0).max())


@lru_cache(maxsize=256)
def pairs_apart(mesh: DeviceMesh, axes: tuple[str, ...]) -> int:
    """Return the number of team pairs with one rank on the busiest host and one elsewhere.

    >>> mesh = DeviceMesh.arange(dp=2, tp=4).with_hosts([0] * 4 + [1] * 4)
    >>> pairs_apart(mesh, ("dp",)), pairs_apart(mesh, ("tp",)), pairs_apart(mesh, ("dp", "tp"))
    (4, 0, 16)
    """
    host, members, elsewhere = _in_teams(mesh, axes)
    return int(np.bincount(host, members * elsewhere).max())
