"""Pipelines on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import local_part
from helpers.pipelines import batch_of, meshes, network

import mdfuse as mf


def check(places: list[mf.DeviceMesh], schedule: str, comm: mf.Communicator) -> None:
    net = network(places, batch=16)
    program = mf.pipeline(net.definition, microbatches=4, batch=batch_of(net), schedule=schedule)
    layouts = [program.fusion.layout(name) for name in program.fusion.inputs]
    for _ in range(3):  # the second run has a plan, or is captured; then it is replayed
        given: list[Any] = [
            mf.shard_tensor(x.clone(), layout, rank=comm.rank).to(comm.device)
            if comm.rank in layout.mesh
            else None
            for x, layout in zip(net.inputs, layouts, strict=True)
        ]
        found = program.run(*given)
        for name, got, want in zip(program.fusion.outputs, found, net.wanted, strict=True):
            layout = program.fusion.layout(name)
            if comm.rank in layout.mesh:
                part = local_part(want, layout, comm.rank)
                torch.testing.assert_close(got.cpu(), part, rtol=1e-12, atol=1e-12)
            else:
                assert got is None


@pytest.mark.world(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p"])
def test_two_stages(schedule: str, comm: mf.Communicator) -> None:
    check(meshes(2), schedule, comm)


@pytest.mark.world(2)
@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "dualpipev"])
def test_four_stages_on_two_ranks(schedule: str, comm: mf.Communicator) -> None:
    a, b = meshes(2)
    check([a, b, a, b] if schedule == "interleaved" else [a, b, b, a], schedule, comm)


@pytest.mark.world(4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p"])
@pytest.mark.parametrize("tp", [1, 2])
def test_stages_on_four_ranks(tp: int, schedule: str, comm: mf.Communicator) -> None:
    check(meshes(4 // tp, tp), schedule, comm)


@pytest.mark.world(4)
def test_actions_in_turns(comm: mf.Communicator) -> None:
    a, b = meshes(2, tp=2)
    check([a, b, b, a], "dualpipev", comm)


@pytest.mark.world(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p"])
def test_each_rank_has_two_stages_on_streams_of_their_own(
    schedule: str, comm: mf.Communicator
) -> None:
    groups = [mf.DeviceMesh([rank], axes=[axis]) for axis in "ab" for rank in range(2)]
    check(groups, schedule, comm)


@pytest.mark.world(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p"])
def test_both_stages_lie_on_both_ranks(schedule: str, comm: mf.Communicator) -> None:
    check([mf.DeviceMesh([0, 1], axes=["tp"]), mf.DeviceMesh([1, 0], axes=["tp"])], schedule, comm)
