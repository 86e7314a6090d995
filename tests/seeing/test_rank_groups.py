"""What each rank group of a pipeline does and holds."""

from __future__ import annotations

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.seeing.rank_classes import rank_classes
from mdfuse.seeing.rank_groups import rank_groups


def test_each_rank_group_has_its_stages_and_its_peak() -> None:
    """A stage that doubles rows has its operand, its result, and one hand-over."""
    first, second = DeviceMesh([0, 1], axes=("dp",)), DeviceMesh([2], axes=("tp",))
    with mf.FusionDefinition("steps") as fd:
        x = fd.define_tensor([8, 16], torch.float32, first, {"dp": Shard(1)}, name="x")
        y = fd.ops.set(x + x).on(second, {})
        fd.add_output(y + y)
    step = mf.pipeline(fd, microbatches=4, batch={"x": 0}, schedule="forward")
    a, b = rank_groups(step.host, step.schedule, rank_classes(step.host))
    assert (a.name, a.ranks, a.stages, a.live) == ("m0", (0, 1), (0,), 1)
    assert (b.name, b.ranks, b.stages, b.live) == ("m1", (2,), (1,), 1)
    assert a.bubble == b.bubble == 1 / 5
    assert a.peak >= 8 * 8 * 4 + 2 * 8 * 4  # its half of the columns, and a microbatch of sums
    assert b.peak >= 8 * 16 * 4 + 2 * 16 * 4
    told = [line.strip() for line in step.explain().splitlines() if "forward on" in line]
    assert told[0].startswith("forward on m0: stage 0, idle 20 %, live 1, ") and len(told) == 2
