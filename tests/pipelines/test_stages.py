"""Which stage and phase an expression is in, asked of the graph."""

from __future__ import annotations

import pytest
from helpers.pipelines import chain, meshes, stages_of

import mdfuse as mf
from mdfuse.pipelines.stages import Part, Stages


def named(stages: Stages) -> list[str]:
    return sorted({str(part) for part in stages.parts.values()})


def test_parts_of_a_chain() -> None:
    stages = stages_of(chain([0, 1]))
    assert named(stages) == ["F0", "F1", "I1", "T01", "T10", "W0", "W1"]
    assert named(stages.whole_backward()) == ["B0", "B1", "F0", "F1", "T01", "T10"]
    assert stages.groups == (0, 1)
    assert stages.reads is None
    assert stages.has_backward
    assert not stages_of(chain([0, 1], trains=False)).has_backward


def test_a_mesh_may_have_several_stages() -> None:
    assert stages_of(chain([0, 1, 0])).groups == (0, 1, 0)
    assert stages_of(chain([0, 1, 1, 0])).groups == (0, 1, 0)
    assert stages_of(chain([0, 1, 1, 0]), at_sets=True).groups == (0, 1, 1, 0)


def test_what_labels_give_is_in_the_stage_that_reads_it() -> None:
    a, b, c = meshes(3)
    with mf.FusionDefinition("labels") as fd:
        x = fd.define_tensor([8, 4], mesh=a, name="x")
        t = fd.define_tensor([8, 4], mesh=c, name="t")
        second = fd.ops.set(x.exp()).on(b, {}).exp()
        fd.add_output((fd.ops.set(second).on(c, {}) * t.exp()).sum())
    stages = stages_of(fd, "x", "t")
    assert stages.groups == (0, 1, 2)
    assert named(stages) == ["F0", "F1", "F2", "T01", "T12"]


def test_stages_that_read_several() -> None:
    a, b, c = meshes(3)
    with mf.FusionDefinition("towers") as fd:
        x, z = (fd.define_tensor([8, 4], mesh=m, name=n) for m, n in ((a, "x"), (b, "z")))
        first, second = (fd.ops.set(y.exp()).on(c, {}) for y in (x, z))
        fd.add_output((first * second).sum())
    stages = stages_of(fd, "x", "z")
    assert stages.reads == {0: [], 1: [], 2: [0, 1]}


def test_names_of_many_stages() -> None:
    assert str(Part(9, "T", 10)) == "T9_10"
    assert str(Part(10, "F")) == "F10"


def test_what_is_computed_again_is_no_hand_over() -> None:
    a, b = meshes(2)
    with mf.FusionDefinition("again") as fd:
        x = fd.define_tensor([8, 4], mesh=a, name="x")
        w = fd.define_tensor([4, 4], mesh=b, name="w")
        with mf.recompute():
            h = fd.ops.linear(fd.ops.set(x.exp()).on(b, {}), w)
        (dw,) = mf.grad(h.square().sum(), [w])
        fd.add_output(dw)
    with pytest.raises(mf.LoweringError, match="cannot be computed in a pipeline") as error:
        stages_of(fd)
    assert "leave hand-overs out of recompute()" in str(error.value)
