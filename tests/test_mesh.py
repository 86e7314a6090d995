"""Meshes: their teams, and that programs for many ranks are made as those for few."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.verify import verify


@pytest.mark.parametrize("shape", [(1,), (6,), (2, 3), (3, 1, 4), (2, 3, 4)])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_teams_are_the_lines_of_the_mesh(shape: tuple[int, ...], is_shuffled: bool) -> None:
    size, axes = int(np.prod(shape)), ("a", "b", "c")[: len(shape)]
    ranks = range(5, 5 + size)
    listed: Sequence[int] = np.random.default_rng(0).permutation(ranks).tolist()
    mesh = DeviceMesh.of(shape, listed if is_shuffled else ranks, axes)
    whole = np.array(mesh.ranks).reshape(shape)
    for position, axis in enumerate(axes):
        for line in np.moveaxis(whole, position, -1).reshape(-1, shape[position]).tolist():
            assert [mesh.team(rank, axis) for rank in line] == [tuple(line)] * len(line)


def calls_to_lower(mesh: DeviceMesh) -> int:
    """How many calls it takes to lower and verify an all-gather and an all-reduce."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([16384, 64], mesh=mesh, layout={"tp": Shard(0)})
        w = fd.define_tensor([64, 16384], mesh=mesh, layout={"tp": Shard(1)})
        whole = fd.ops.set(x).on(mesh, {})
        fd.add_output(fd.ops.set(whole @ w).on(mesh, {"dp": Shard(0), "tp": Shard(1)}))
        fd.add_output(fd.ops.set(w @ x).on(mesh, {}))
    counted = 0

    def count(*event: object) -> None:
        nonlocal counted
        counted += 1

    sys.setprofile(count)
    try:
        verify(mf.compile(fd).host)
    finally:
        sys.setprofile(None)
    return counted


def test_a_large_mesh_takes_no_more_calls() -> None:
    """These ranks are in no other test, so that nothing of the meshes is known before."""
    meshes = [
        DeviceMesh.of((dp, tp), range(first, first + dp * tp), ("dp", "tp"))
        for dp, tp, first in ((2, 2, 300_000), (2, 4, 310_000), (64, 128, 320_000))
    ]
    _, few, many = map(calls_to_lower, meshes)
    assert many <= few * 1.01
