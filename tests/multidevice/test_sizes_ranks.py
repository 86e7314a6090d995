"""Programs with sizes on real ranks: each rank fills its part up, and cuts its results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.sized import SIZES, by_torch, given, step

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("rows", "cache"),
    [({}, {"tp": Shard(0)}), ({"tp": Shard(0)}, {}), ({}, {"tp": Shard(1)})],
)
def test_runs_of_any_rows_take_the_plans_of_sizes(
    rows: Any, cache: Any, comm: mf.Communicator
) -> None:
    torch.manual_seed(0)
    mesh = DeviceMesh.arange(tp=2)
    program = mf.compile(step(mesh, rows, cache), SIZES)
    at, of_cache = Layout(mesh, rows), Layout(mesh, cache)

    def part(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        return mf.shard_tensor(x, layout, rank=comm.rank).clone().to(comm.device)

    *_, w, c, a = given(0)
    states = [part(c, of_cache), part(a, Layout(mesh))]
    for n in (3, 8, 0, 1, 5):
        ids, pos, *_ = given(n)
        c, a, y = by_torch(ids, pos, w, c, a)
        made = program.run(
            part(ids, at), part(pos, at), part(w, Layout(mesh)), *states, extents={"ids.0": n}
        )
        torch.testing.assert_close(states[0], part(c, of_cache))
        torch.testing.assert_close(states[1], part(a, Layout(mesh)))
        layout = program.fusion.layout(program.fusion.outputs[2])
        torch.testing.assert_close(made[2], part(y, layout))
    assert program.whole.plans.info().size == 3


@pytest.mark.world(2)
def test_an_input_that_is_wrong_on_one_rank_is_refused_by_all(comm: mf.Communicator) -> None:
    """No rank waits for it, and the next run goes on."""
    mesh = DeviceMesh.arange(tp=2)
    program = mf.compile(step(mesh, {}, {"tp": Shard(0)}), SIZES)
    torch.manual_seed(0)
    ids, pos, w, c, a = given(3)
    half = mf.shard_tensor(c, Layout(mesh, {"tp": Shard(0)}), rank=comm.rank).clone()
    state = [x.to(comm.device) for x in (w, half, a.clone())]
    for is_wrong, rank in ((True, 1), (False, 0), (True, comm.rank)):
        mine = pos.int() if is_wrong and comm.rank == rank else pos
        rows = [x.to(comm.device) for x in (ids, mine)]
        if is_wrong:
            with pytest.raises(mf.ProgramError, match=r"dtype torch\.int32, expected torch\.int64"):
                program.run(*rows, *state, extents={"ids.0": 3})
        else:
            made = program.run(*rows, *state, extents={"ids.0": 3})
            torch.testing.assert_close(made[2].cpu(), by_torch(ids, pos, w, c, a)[2])
