"""Iterations that are written out as one: parts that are added up, communications, views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.microbatches import added_up
from helpers.mutants import check_verdicts, is_right, loops

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard, Stream
from mdfuse.hir import HostProgram
from mdfuse.hir.verify.folded import folded

MESH = DeviceMesh.arange(dp=2, tp=2)


def microbatches(count: int) -> HostProgram:
    return added_up(6 * count, count)


def chunks(count: int) -> HostProgram:
    """Uneven chunks, each all-reduced."""
    stream = Stream(0, count)
    with mf.FusionDefinition("chunks") as fd:
        x = fd.define_tensor([2 * count - 1, 4], torch.float32, MESH, {"tp": Shard(1)})
        w = fd.define_tensor([4, 4], torch.float32, MESH, {"tp": Shard(0)})
        fd.add_output(fd.ops.relu(fd.ops.set(x @ w).on(MESH, stream=stream)))
    return mf.compile(fd, Options(verify=False)).host


@pytest.mark.parametrize("make", [microbatches, chunks])
def test_what_is_written_out_does_not_grow(make: Callable[[int], HostProgram]) -> None:
    lengths = set()
    for count in (8, 32):
        found = folded(make(count).project(0))
        assert found is not None
        lengths.add(len(found))
    assert len(lengths) == 1


@pytest.mark.parametrize("make", [microbatches, chunks])
def test_faults_in_iterations(make: Callable[[int], HostProgram]) -> None:
    """The verdict is the one on all iterations written out."""
    program = make(5)
    assert is_right(program, False) and is_right(program, True)
    check_verdicts(program, loops(program), 0, 50)
