"""Into blocks of a dim, out of them, and between them: values against slices of the whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement
from mdfuse.reshard import cost, steps, with_type

MESHES = (
    DeviceMesh.arange(a=4),
    DeviceMesh.arange(a=2, b=3),
    DeviceMesh([2, 3, 0, 1], axes=("q",)),
    DeviceMesh([[5, 4], [1, 7]], axes=("u", "v")),
    DeviceMesh.arange(p=2, q=2).with_hosts([0, 0, 1, 1]),
)
SHAPES = ((9, 2), (12, 4), (7,), (13, 9), (8, 8), (3, 1))


def sizes_of(draw: random.Random, n: int) -> list[int] | None:
    """The sizes of blocks of a dim, some of them empty; None for a plain split."""
    if draw.random() < 0.3:
        return None
    ends = sorted(draw.choices(range(n + 1), k=draw.choice([1, 2, 3])))
    equal = [n // k for k in range(2, n + 1) if n % k == 0]
    if equal and draw.random() < 0.4:
        ends = [*range(0, n, draw.choice(equal))][1:]
    return [int(size) for size in np.diff([0, *ends, n])]


def drawn(
    draw: random.Random, mesh: DeviceMesh, shape: tuple[int, ...], op: str
) -> tuple[Layout, Sizes]:
    """A layout, and the sizes of the blocks of each dim."""
    sizes = [sizes_of(draw, n) for n in shape]
    placements: dict[str, Placement] = {}
    for axis in mesh.axes:
        d = draw.randrange(len(shape))
        blocks = None if sizes[d] is None else tuple(sizes[d] or ())
        placements[axis] = draw.choice([Replicate(), *[Shard(d, blocks)] * 2, Partial(op)])
    order = {}
    for d in range(len(shape)):
        axes = [a for a, p in placements.items() if isinstance(p, Shard) and p.dim == d]
        draw.shuffle(axes)
        order.update({d: axes} if axes else {})
    return Layout(mesh, placements, order), sizes


Sizes = list[list[int] | None]


def held(whole: np.ndarray, layout: Layout, sizes: Sizes, rank: int) -> np.ndarray:
    """A rank's part, by slices of the whole, block by block; Partial axes ignored."""
    at = dict(zip(layout.mesh.axes, layout.mesh.coordinate(rank) or (), strict=True))
    for dim, axes in layout.splits:
        pieces, start = [], 0
        for size in sizes[dim] or [whole.shape[dim]]:
            piece = whole.take(range(start, start + size), dim)
            start += size
            for a in axes:
                n = -(-piece.shape[dim] // layout.mesh.axis_size(a))
                here = range(piece.shape[dim])[at[a] * n : (at[a] + 1) * n]
                piece = piece.take(here, dim)
            pieces.append(piece)
        whole = np.concatenate(pieces, dim)
    return whole


@pytest.mark.parametrize("seed", range(60))
def test_values(seed: int) -> None:
    draw = random.Random(seed)
    shape, one = draw.choice(SHAPES), draw.choice(MESHES)
    other, op = one if draw.random() < 0.6 else draw.choice(MESHES), draw.choice(["sum", "max"])
    source, _ = drawn(draw, one, shape, op)
    goal, sizes = drawn(draw, other, shape, op)
    x = torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(seed)).double()
    with mf.FusionDefinition("moved") as fd:
        fd.add_output(fd.ops.set(fd.define_tensor([*shape], x.dtype, source)).on(goal))
    program = mf.compile(fd)
    assert str(mf.hir.parse(str(program)))
    found = mf.simulate(program, [x])
    assert torch.equal(found.outputs[0], x)
    for rank in other.ranks if not goal.partial_axes else ():
        part = held(x.numpy(), goal, sizes, rank)
        assert np.array_equal(found.per_rank[rank][0].numpy(), part), rank


@pytest.mark.parametrize(
    ("before", "after", "kinds", "share"),
    [
        (Shard(0, 3), Replicate(), ["Exchange"], 0.5),
        (Replicate(), Shard(0, 3), ["Exchange"], 0),
        (Shard(0, 3), Shard(0), ["Exchange"], 1 / 6),
        (Shard(0, 3), Shard(1), ["Exchange"], 1 / 4),
        (Partial(), Shard(0, 3), ["ReduceExchange"], 0.5),
        (Shard(0, 3), Shard(0, 3), [], 0),
    ],
)
def test_at_the_bound(before: Placement, after: Placement, kinds: list[str], share: float) -> None:
    mesh, shape = DeviceMesh.arange(tp=2), (12, 8)
    source, goal = Layout(mesh, {"tp": before}), Layout(mesh, {"tp": after})
    assert [step.kind for step in steps(source, goal, shape)] == kinds
    elements = cost(source, goal, shape) / cost(Layout(mesh, {"tp": Shard(0)}), Layout(mesh), (2,))
    assert elements == share * 96


def test_blocks_that_stay_are_no_matter() -> None:
    mesh = DeviceMesh.arange(dp=2, tp=2)
    source = Layout(mesh, {"dp": Partial(), "tp": Shard(0, 3)})
    for goal, text in (
        (Replicate(), "Allreduce[sum] axis=dp"),
        (Shard(1), "ReduceScatter[sum] axis=dp dim=1"),
    ):
        found = steps(source, source.with_placement("dp", goal), (12, 8))
        assert [str(step) for step in found] == [text]


@pytest.mark.parametrize("blocks", [3, (24, 12, 12)])
@pytest.mark.parametrize(("axis", "bytes_"), [("a", 144), ("b", 96)])
def test_ranks_that_hold_the_same_terms_reduce_a_share_each(
    axis: str, bytes_: int, blocks: int | tuple[int, ...]
) -> None:
    """Three more terms of an eighth of 192 bytes, and then the rest of a half or a quarter."""
    mesh = DeviceMesh.arange(a=2, b=4)
    source, goal = Layout(mesh, {"b": Partial()}), Layout(mesh, {axis: Shard(0, blocks)})
    found = [with_type(step, (48, 4), torch.uint8) for step in steps(source, goal, (48, 4))]
    each = [sum(x.bytes_received(rank) for x in found) for rank in mesh.ranks]
    assert each == [bytes_] * 8


@pytest.mark.parametrize(
    "axes", [{"dp": 2, "fsdp": 4, "tp": 2}, {"fsdp": 3, "dp": 4, "tp": 2}], ids=str
)
def test_a_sum_along_an_axis_that_stays_whole_carries_parts_alone(axes: dict[str, int]) -> None:
    """That axis may join hosts: all others split the terms before."""
    mesh = DeviceMesh.arange(**axes)
    split = {"tp": Shard(0, 2)}
    source = Layout(mesh, {"dp": Partial(), "fsdp": Partial(), **split})
    goal = Layout(mesh, {"fsdp": Shard(0, 2), **split}, {0: ("tp", "fsdp")})
    path = steps(source, goal, (96, 4))
    assert [x.kind for x in path] == ["ReduceExchange", "Allreduce"]
    assert [x.source.placement("fsdp") for x in path] == [Partial(), Shard(0, 2)]


def test_a_written_gather_of_blocks_is_refused() -> None:
    text = """
    host @gather on mesh(tp=2) {
      input %x: f32[6] of [12] (tp=S0/3)
      %y: f32[12] (tp=R) = alloc
      %c = post allgather(%x) -> %y f32[12] (tp=S0/3) => (tp=R) axis=tp dim=0
      wait %c
      return %y
    }"""
    with pytest.raises(mf.ProgramError, match="dim 0 is in blocks"):
        mf.hir.verify.check.verify(mf.hir.parse(text))
    narrow = """
    host @cut on mesh(tp=2) {
      input %x: f32[12] (tp=R)
      %y: f32[6] of [12] (tp=S0/3) = narrow(%x)
      return %y
    }"""
    with pytest.raises(mf.ProgramError, match="0:2 4:6 8:10"):
        mf.hir.verify.check.verify(mf.hir.parse(narrow))
