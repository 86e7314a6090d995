"""Values that are outputs and are read, posted and resharded besides: each role has its needs."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import check_everywhere
from helpers.several_outputs import MESHES, many

import mdfuse as mf
from mdfuse import Partial


def test_an_output_in_another_memory_order_is_posted() -> None:
    """It is written in the order it has on one device; what is posted is a dense copy."""
    mesh = MESHES[0]
    with mf.FusionDefinition("both") as fd:
        x = fd.define_tensor([4, 6], mesh=mesh, layout={"x": Partial()})
        y = fd.ops.neg(x.permute(1, 0)).on(mesh, {"x": Partial()})
        fd.add_output(y)
        fd.add_output(fd.ops.set(y).on(mesh, {}))
    program = mf.compile(fd)
    whole = torch.randn(4, 6)
    check_everywhere(program, [whole], [-whole.T, -whole.T])
    result = mf.simulate(program, [whole])
    assert all(y.stride() == (1, 6) for y, _ in result.per_rank)


@pytest.mark.parametrize("seed", range(150))
def test_every_value_may_be_an_output(seed: int) -> None:
    fd, x, expected, merge = many(seed)
    check_everywhere(mf.compile(fd, should_merge=merge), [x], expected, exact=True)
