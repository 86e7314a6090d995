"""Segments on real ranks: run one by one they give, to the last bit, what the program gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.drawn import drawn
from helpers.oracle import is_close, local_part, shares
from helpers.segment_runs import by_hand
from helpers.symbolic_programs import defined, inputs
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Partial, Shard
from mdfuse.compiled.segments import Segment
from mdfuse.passes.segmentation import merge_local, merge_nothing


@pytest.fixture(autouse=True)
def to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler rounds less where it joins more."""
    monkeypatch.setenv("MDFUSE_COMPILE", "never")


def parts(program: mf.Program, whole: Sequence[Any], comm: mf.Communicator) -> list[Any]:
    """This rank's part of each input."""
    found = []
    for name, x in zip(program.fusion.inputs, whole, strict=True):
        layout = program.fusion.values[name].layout
        mine = x if layout is None else shares(x, layout).get(comm.rank)
        found.append(mine.to(comm.device, copy=True) if isinstance(mine, Tensor) else mine)
    return found


def run(segment: Segment, arguments: list[Any]) -> list[Any]:
    return segment.run(*arguments)


def check(
    program: mf.Program, whole: Sequence[Any], expected: Sequence[Tensor], comm: mf.Communicator
) -> None:
    """Twice, so that the second run takes what the first one prepared."""
    mine = parts(program, whole, comm)
    for _ in range(2):
        together, alone = program.run(*mine), by_hand(program, mine, run)
        for name, got, same, y in zip(
            program.fusion.outputs, alone, together, expected, strict=True
        ):
            layout = program.fusion.layout(name)
            assert (got is None) == (same is None) == (comm.rank not in layout.mesh)
            if got is not None:
                assert torch.equal(got, same), f"%{name}"
                assert layout.partial_axes or is_close(got.cpu(), local_part(y, layout, comm.rank))


def layer(mesh: DeviceMesh) -> FusionDefinition:
    """A row-parallel product, reduced, normalized; an input, and what two segments read."""
    with FusionDefinition("layer") as fd:
        x = fd.define_tensor([9, 8], mesh=mesh, layout={"tp": Shard(1)})
        w = fd.define_tensor([8, 10], mesh=mesh, layout={"tp": Shard(0)})
        n = fd.define_scalar(dtype=float)
        p = (x @ w).on(mesh, {"tp": Partial()})
        y = fd.ops.set(p).on(mesh, {"tp": Shard(0)})
        h = fd.ops.set(fd.ops.softmax(y, 1) * (n * 3)).on(mesh, {})
        fd.add_output(h)
        fd.add_output(x)
        fd.add_output(h.sum([0]) + 1)
        fd.add_output(p)
    return fd


def check_layer(mesh: DeviceMesh, merge: Any, comm: mf.Communicator) -> None:
    x, w = drawn(9, 8), drawn(8, 10) / 3
    h = torch.softmax(x @ w, 1) * (0.7 * 3)
    program = mf.compile(layer(mesh), should_merge=merge)
    check(program, [x, w, 0.7], [h, x, h.sum(0) + 1, x @ w], comm)


@pytest.mark.world(2)
@pytest.mark.parametrize("merge", [None, merge_local])
def test_layer_on_two_ranks(merge: Any, comm: mf.Communicator) -> None:
    check_layer(DeviceMesh.arange(tp=2), merge, comm)


@pytest.mark.world(4)
@pytest.mark.parametrize("merge", [None, merge_nothing])
def test_layer_on_four_ranks(merge: Any, comm: mf.Communicator) -> None:
    check_layer(DeviceMesh([2, 0, 3, 1], axes=("tp",)), merge, comm)


@pytest.mark.world(4)
def test_ranks_outside_of_a_segment(comm: mf.Communicator) -> None:
    """They run it like the others, pass None and get None."""
    here, there = DeviceMesh([0, 1], axes=("a",)), DeviceMesh([3, 1, 2], axes=("b",))
    with FusionDefinition("meshes") as fd:
        x = fd.define_tensor([7, 5], mesh=here, layout={"a": Shard(0)})
        a = fd.ops.exp(x)
        y = fd.ops.set(a).on(there, {"b": Shard(1)})
        fd.add_output(y * 2)
        fd.add_output(a)
    x = drawn(7, 5)
    check(mf.compile(fd), [x], [x.exp() * 2, x.exp()], comm)


@pytest.mark.world(4)
def test_symbolic_segments(comm: mf.Communicator) -> None:
    """Segments of the first lowering where its guards hold, those of given extents elsewhere."""
    program = mf.compile(defined("gathered"))
    for n in (8, 5, 12, 5):
        numbered = program.with_extents({"x.0": n})
        check(numbered, inputs("gathered", n), [inputs("gathered", n)[0] + 1], comm)
    for n in (8, 12, 8):
        (x,) = inputs("gathered", n)
        mine = parts(program.with_extents({"x.0": n}), [x], comm)

        def told(segment: Segment, arguments: list[Any], n: int = n) -> list[Any]:
            return segment.run(*arguments, extents={"x.0": n})

        (got,) = by_hand(program, mine, told)
        assert torch.equal(got.cpu(), x + 1)


@pytest.mark.world(2)
def test_wrong_extents_are_refused_on_all_ranks(comm: mf.Communicator) -> None:
    """Also where one rank alone is wrong; and the ranks go on together afterwards."""
    mesh = DeviceMesh.arange(tp=2)
    with FusionDefinition("told") as fd:
        x = fd.define_tensor([-1, 3], mesh=mesh, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh, {}))
    program = mf.compile(fd)
    (segment,) = program.segments
    mine = torch.ones(2, 3, device=comm.device)
    for _ in range(2):
        with pytest.raises(mf.ProgramError, match=r"x\.0 are missing|rank 1 refused"):
            segment.run(mine, extents={"x.0": 4} if comm.rank == 0 else None)
        with pytest.raises(mf.ProgramError, match=r"lowered for x\.0 mod 2 == 0"):
            segment.run(mine, extents={"x.0": 3})
    with pytest.raises(mf.ProgramError, match="no symbolic extents"):
        program.with_extents({"x.0": 4}).segments[0].run(mine, extents={"x.0": 4})
    (got,) = segment.run(mine, extents={"x.0": 4})
    assert got.shape == (4, 3)


@pytest.mark.world(2)
def test_buffers_for_the_outputs_of_a_segment(comm: mf.Communicator) -> None:
    mesh = DeviceMesh.arange(tp=2)
    with FusionDefinition("buffers") as fd:
        x = fd.define_tensor([4, 3], mesh=mesh, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.exp(x))
    (segment,) = mf.compile(fd).segments
    x = drawn(2, 3).to(comm.device)
    out = torch.empty_like(x)
    (got,) = segment.run(x, out=[out])
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out, x.exp())
