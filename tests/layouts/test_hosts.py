"""Hosts: that a rank is on one, and what collectives take from one to another, counted by hand."""

from __future__ import annotations

from itertools import product

import pytest

from mdfuse import DeviceMesh, MeshError
from mdfuse.layouts.hosts import hosts_by_rank, pairs_apart, rings

MESH = DeviceMesh([[5, 2, 7], [0, 3, 1]], axes=("a", "b"), hosts=[[0, 1, 0], [1, 1, 2]])
HOST = {5: 0, 2: 1, 7: 0, 0: 1, 3: 1, 1: 2}


def test_of_a_rank() -> None:
    found = hosts_by_rank(MESH, DeviceMesh([4, 7], hosts=[3, 0]))
    assert found.tolist() == [1, 2, 1, 1, 3, 0, -1, 0]
    assert hosts_by_rank(MESH, DeviceMesh([4])) is None


def test_a_rank_is_on_one_host() -> None:
    with pytest.raises(MeshError, match="rank 7 is on two hosts"):
        hosts_by_rank(MESH, DeviceMesh([4, 7], hosts=[3, 1]))


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b"), ("b", "a")])
def test_what_leaves_a_host(axes: tuple[str, ...]) -> None:
    teams = {tuple(sorted(MESH.team(r, *axes))) for r in MESH}
    apart = dict.fromkeys(HOST.values(), 0)
    reaching = dict.fromkeys(HOST.values(), 0)
    for team in teams:
        on = {HOST[r] for r in team}
        for host in on:
            reaching[host] += len(on) > 1
            apart[host] += sum(HOST[r] == host != HOST[s] for r, s in product(team, repeat=2))
    assert (rings(MESH, axes), pairs_apart(MESH, axes)) == (
        max(reaching.values()),
        max(apart.values()),
    )
