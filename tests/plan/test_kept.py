"""Plans that are not kept any more: nothing that belongs to them lives on, and the user is told."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.plan.build import Plan
from mdfuse.runtime.watch.plan_position import RunCount

pytestmark = pytest.mark.usefixtures("unjoined")

LIMIT = 3


def program_of(shape: list[int], limit: int = LIMIT) -> mf.Program:
    with mf.FusionDefinition("many") as fd:
        mesh = DeviceMesh.arange(tp=2)
        x = fd.define_tensor(shape, mesh=mesh, layout={"tp": Shard(1)}, name="x")
        fd.add_output((x * 2.0).sum(1) + 1.0)
    return mf.compile(fd, Options(plans=limit))


def alive(kind: type) -> list[Any]:
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is kind]


def run(program: mf.Program, x: torch.Tensor, times: int) -> list[weakref.ref[Any]]:
    for _ in range(times):
        program.run(x)
    return [weakref.ref(program.plans.recent)]


@pytest.mark.parametrize("times", [1, 3])  # the third run takes the shortest way
def test_what_a_plan_has_goes_with_it(times: int) -> None:
    """Other strides are other plans of one program."""
    mf.init(backend="null", rank=0, size=2)
    program, seen = program_of([4, 6]), []
    for stride in range(3, 23):
        seen += run(program, torch.ones(4, stride)[:, :3], times)
    gc.collect()
    assert [x() is not None for x in seen] == [False] * (20 - LIMIT) + [True] * LIMIT
    assert program.plans.info().evictions == 20 - LIMIT


@pytest.mark.parametrize("times", [1, 3])
def test_what_runs_of_an_extent_have_goes_too(times: int) -> None:
    """Extents of a run are programs with plans of their own."""
    mf.init(backend="null", rank=0, size=2)
    before = len(alive(Plan)), len(alive(RunCount))
    program, seen = program_of([-1, 6]), []
    for rows in range(2, 62):
        seen += run(program, torch.ones(rows, 3), times)
    assert len(alive(Plan)) == before[0] + LIMIT
    # each of the programs that are kept has its own
    assert len(alive(RunCount)) <= before[1] + len(program._evaluators._values) <= before[1] + 32
    assert sum(x() is not None for x in seen) == LIMIT


def test_the_first_plan_that_goes_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    mf.init(backend="null", rank=0, size=2)
    program = program_of([4, 6], limit=2)
    with caplog.at_level(logging.WARNING, "mdfuse"):
        for stride in (3, 4):
            program.run(torch.ones(4, stride)[:, :3])
        assert not caplog.messages
        for stride in range(5, 12):
            program.run(torch.ones(4, stride)[:, :3])
    (told,) = caplog.messages
    assert told.startswith("@many: a plan was dropped, since 2 are kept")
    assert "plans=" in told and "MDFUSE_PLANS" in told


def test_plans_that_a_program_gives_up_itself_are_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    comm = mf.init(backend="null", rank=0, size=2)
    program = program_of([4, 6])
    program.run(torch.ones(4, 3))
    comm.close()
    with caplog.at_level(logging.WARNING, "mdfuse"):
        mf.init(backend="null", rank=0, size=2)
        program.run(torch.ones(4, 3))
    assert not caplog.messages and program.plans.info().evictions == 0
