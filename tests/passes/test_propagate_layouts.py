"""Layouts that users state for one value twice."""

from __future__ import annotations

import pytest

import mdfuse as mf
from mdfuse import DeviceMesh, Shard


def written(mesh: DeviceMesh) -> mf.FusionDefinition:
    """A result that is written into an input which lies otherwise."""
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([4, 4], mesh=mesh, layout={"a": Shard(0)}, name="x")
        fd.add_output((x * 2.0).on(mesh, {"a": Shard(1)}), reuse=x)
    return fd


def test_a_result_lies_as_the_input_that_it_is_written_into() -> None:
    with pytest.raises(mf.LayoutError, match="but it is written into %x"):
        mf.compile(written(DeviceMesh.arange(a=2)))


def test_axes_of_one_rank_split_nothing() -> None:
    """The definition is printed as it is stated, and compiles."""
    fd = written(DeviceMesh.arange(a=1))
    assert "(a=S0)! = input" in str(fd) and "(a=S1)! = mul" in str(fd)
    assert mf.compile(fd).host.last_rank == 0
