"""What was added up in f32 is reduced as it is, where `reduce_dtype` asks for f32."""

from __future__ import annotations

from typing import Any

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

MESH = DeviceMesh.arange(dp=2)


def names(both: bool, dtype: torch.dtype | None) -> list[str]:
    """The functions behind the loop of a sum in microbatches; one that is read by itself, too."""
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([8, 4], torch.bfloat16, MESH, {"dp": Shard(0)}, name="x")
        y: Any = x.sum(0)
        y = y.on(MESH, {"dp": mf.Partial()}) if both else y
        fd.add_output(fd.ops.set(y).on(MESH, {}))
        if both:
            fd.add_output(y)
    program = mf.pipeline(
        fd, microbatches=2, batch={"x": 0}, options=mf.Options(reduce_dtype=dtype)
    )
    return [i.fn for i in program.host.instructions if i.fn]


def test_the_sum_is_rounded_behind_its_reduction() -> None:
    assert names(False, None) == ["round_terms"]
    assert names(False, torch.float32) == ["cast"]


def test_another_dtype_and_another_reader_keep_the_rounding() -> None:
    assert names(False, torch.float64) == ["round_terms", "widen", "cast"]
    assert names(True, torch.float32) == ["round_terms", "cast"]
