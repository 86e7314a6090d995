"""What was added up in f32 is reduced as it is, where `reduce_dtype` asks for f32.

Terms of a product have 16 bits, and are added up in f32 from one microbatch to the next; those of a
sum are f32 to begin with.
"""

from __future__ import annotations

from typing import Any

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

MESH = DeviceMesh.arange(dp=2)


def names(both: bool, dtype: torch.dtype | None) -> list[str]:
    """The functions behind the loop of a product in microbatches; `both` returns its terms, too."""
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([8, 4], torch.bfloat16, MESH, {"dp": Shard(0)}, name="x")
        y: Any = fd.ops.matmul(x.permute(1, 0), x)
        y = y.on(MESH, {"dp": mf.Partial()}) if both else y
        fd.add_output(fd.ops.set(y).on(MESH, {}))
        if both:
            fd.add_output(y)
    program = mf.pipeline(
        fd, microbatches=2, batch={"x": 0}, options=mf.Options(reduce_dtype=dtype)
    )
    return [i.fn for i in program.host.instructions if i.fn]


def test_the_product_is_rounded_behind_its_reduction() -> None:
    assert names(False, None) == ["round_terms"]
    assert names(False, torch.float32) == ["cast"]


def test_another_dtype_and_another_reader_keep_the_rounding() -> None:
    assert names(False, torch.float64) == ["round_terms", "widen", "cast"]
    assert names(True, torch.float32) == ["round_terms", "cast"]
