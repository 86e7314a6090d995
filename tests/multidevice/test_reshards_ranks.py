"""Changes of layout on real ranks: many pairs of layouts, meshes and dtypes, drawn from a seed."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.oracle import local_part, shares
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement

MESHES = (
    DeviceMesh([0, 1, 2, 3]),
    DeviceMesh([[0, 1], [2, 3]]),
    DeviceMesh([[3, 0], [1, 2]]),
    DeviceMesh([2, 0, 3]),
    DeviceMesh([1, 3]),
    DeviceMesh([0, 2]),
    DeviceMesh([[[1], [0]]]),
    DeviceMesh([3]),
)
MESHES_OF_2 = (
    DeviceMesh([0, 1]),
    DeviceMesh([1, 0]),
    DeviceMesh([[0], [1]]),
    DeviceMesh([[[1, 0]]]),
    DeviceMesh([0]),
    DeviceMesh([1]),
)
MESHES_OF_8 = (
    DeviceMesh.arange(x=8),
    DeviceMesh.arange(y=2, x=4),
    DeviceMesh([[7, 2, 5, 0], [1, 6, 3, 4]]),
    DeviceMesh.arange(z=2, y=2, x=2),
    DeviceMesh([6, 1, 4]),
    DeviceMesh([[0, 7], [5, 2]]),
    DeviceMesh([3]),
)
SHAPES = ((8, 4), (5, 7), (3, 2, 6), (4,), (1, 9), (2, 0, 3), (7, 4, 2, 3), ())
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64,
    torch.bool, torch.uint16, torch.float8_e5m2,
)  # fmt: skip
#: Of which torch adds none, so that the oracle has no terms of them.
WITHOUT_SUMS = (torch.bool, torch.uint16, torch.float8_e5m2)
CASES = 120


def layout(draw: random.Random, mesh: DeviceMesh, rank: int, may_be_partial: bool) -> Layout:
    choices: list[Placement] = [Shard(d) for d in range(rank)] + [Replicate()]
    if may_be_partial:
        choices.append(Partial("sum"))
    return Layout(mesh, {axis: draw.choice(choices) for axis in mesh.axes})


def whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Small integers: sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


@pytest.mark.world(4)
@pytest.mark.parametrize("seed", range(CASES))
def test_reshard(seed: int, comm: mf.Communicator) -> None:
    check_reshard(random.Random(seed), MESHES, comm)


@pytest.mark.world(2)
@pytest.mark.parametrize("seed", range(0, CASES, 2))
def test_reshard_among_2(seed: int, comm: mf.Communicator) -> None:
    check_reshard(random.Random(seed), MESHES_OF_2, comm)


@pytest.mark.world(8)
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(CASES))
def test_reshard_of_8(seed: int, comm: mf.Communicator) -> None:
    check_reshard(random.Random(seed), MESHES_OF_8, comm)


def check_reshard(
    draw: random.Random, meshes: tuple[DeviceMesh, ...], comm: mf.Communicator
) -> None:
    """Draw a tensor and two layouts, run the set between them, compare this rank's part."""
    shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
    before, after = draw.choice(meshes), draw.choice(meshes)
    source = layout(draw, before, len(shape), dtype not in WITHOUT_SUMS)
    goal = layout(draw, after, len(shape), False)
    with mf.FusionDefinition("reshard") as fd:
        x = fd.define_tensor(shape, dtype, source)
        fd.add_output(fd.ops.set(x).on(goal))
    program = mf.compile(fd, mf.Options(poison=True))
    value = whole(shape, dtype, draw.randrange(1000))
    mine = shares(value, source.normalized(len(shape))).get(comm.rank)
    (got,) = program.run(None if mine is None else mine.to(comm.device))
    if comm.rank not in after:
        assert got is None
        return
    want = local_part(value, goal, comm.rank)
    assert got.shape == want.shape, f"{source} -> {goal} of {shape}"
    both = [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (got.cpu(), want)]
    assert torch.equal(*both), f"{source} -> {goal} of {shape}"


@pytest.mark.world(4)
@pytest.mark.parametrize("goal", [Shard(0, (7, 1, 5)), Shard(0), Shard(1, 3), Replicate()])
@pytest.mark.parametrize("source", [Shard(0, (4, 4, 5)), Shard(1, 3), Partial(), Replicate()])
def test_blocks(source: Placement, goal: Placement, comm: mf.Communicator) -> None:
    """Into blocks, out of them, and between them, uneven and empty pieces among them."""
    mesh, x = MESHES[0], torch.arange(13 * 9).reshape(13, 9)
    before, after = (Layout(mesh, {mesh.axes[0]: p}) for p in (source, goal))
    with mf.FusionDefinition("blocks") as fd:
        fd.add_output(fd.ops.set(fd.define_tensor(x.shape, x.dtype, before)).on(after))
    mine = mf.shard_tensor(x, before, rank=comm.rank)
    (got,) = mf.compile(fd, mf.Options(poison=True)).run(mine.to(comm.device))
    sizes = {Shard(0, (7, 1, 5)): (7, 1, 5), Shard(0): (13,), Shard(1, 3): (3, 3, 3)}.get(goal)
    dim = goal.dim if isinstance(goal, Shard) else 0
    pieces = []
    for block in x.split(sizes, dim) if sizes else ():
        n = -(-block.shape[dim] // 4)
        pieces.append(block.split(n, dim)[comm.rank : comm.rank + 1])
    flat = [piece for found in pieces for piece in found]
    want = torch.cat(flat, dim) if flat else x if sizes is None else x.narrow(dim, 0, 0)
    assert torch.equal(got.cpu(), want), f"{before} -> {after}"


OPS = {
    torch.float32: ("sum", "prod", "max", "min", "avg"),
    torch.int64: ("sum", "prod", "max", "min", "band", "bor", "bxor"),
    torch.bool: ("band", "bor"),
}


@pytest.mark.world(4)
@pytest.mark.parametrize("seed", range(CASES // 2))
def test_reduce_ops(seed: int, comm: mf.Communicator) -> None:
    """From terms to terms, elsewhere or on hosts that are known, and from these to parts."""
    draw = random.Random(seed)
    dtype, shape = draw.choice([*OPS]), draw.choice(SHAPES)
    op, hosts = Partial(draw.choice(OPS[dtype])), [draw.randrange(2) for _ in range(4)]
    meshes = [draw.choice(MESHES) for _ in range(3)]
    if draw.random() < 0.5:
        meshes = [mesh.with_hosts([hosts[r] for r in mesh.ranks]) for mesh in meshes]
    kinds: list[Placement] = [*map(Shard, range(len(shape))), Replicate()]
    source, between = (
        Layout(mesh, {axis: draw.choice([*kinds, op, op]) for axis in mesh.axes})
        for mesh in meshes[:2]
    )
    goal = Layout(meshes[2], {axis: draw.choice(kinds) for axis in meshes[2].axes})
    with mf.FusionDefinition("terms") as fd:
        terms = fd.ops.set(fd.define_tensor(shape, dtype, source)).on(between)
        fd.add_output(fd.ops.set(terms).on(goal))
    value = whole(shape, dtype, seed)
    mine = shares(value, source.normalized(len(shape))).get(comm.rank)
    (got,) = mf.compile(fd, mf.Options(poison=True)).run(
        None if mine is None else mine.to(comm.device)
    )
    if comm.rank in goal.mesh:
        want = local_part(value, goal, comm.rank)
        assert torch.allclose(got.cpu(), want), f"{source} -> {between} -> {goal} of {shape}"


@pytest.mark.world(4)
def test_backends_of_axes(comm: mf.Communicator) -> None:
    """What goes along one axis goes by symmetric memory, the rest by the usual backend."""
    mesh, x = DeviceMesh.arange(dp=2, tp=2), torch.arange(64.0).reshape(8, 8)
    both = Layout(mesh, {"dp": Shard(0), "tp": Shard(0)})
    ends = [
        (both, Layout(mesh)),
        (Layout(mesh, {"dp": Partial(), "tp": Partial()}), both),
        (Layout(mesh, {"dp": Partial(), "tp": Partial()}), Layout(mesh)),
        (Layout(mesh, {"dp": Shard(0), "tp": Shard(1)}), Layout(mesh, {"dp": Shard(1)})),
        (Layout(mesh, {"tp": Shard(0)}), Layout(mesh, {"tp": Shard(0, blocks=2)})),
        (Layout(mesh, {"tp": Shard(0, blocks=2), "dp": Shard(1)}), Layout(mesh)),
        (Layout(mesh, {"tp": Shard(0), "dp": Shard(1)}), Layout(mesh, {"tp": Shard(1)})),
    ]
    for n, (before, after) in enumerate(ends):
        with mf.FusionDefinition(f"set{n}") as fd:
            fd.add_output(fd.ops.set(fd.define_tensor([8, 8], layout=before)).on(after))
        program = mf.compile(fd, mf.Options(backend=f"{comm.backend}, tp=symmetric"))
        given = shares(x, before)[comm.rank].to(comm.device)
        (got,) = program.run(given)
        torch.testing.assert_close(got.cpu(), local_part(x, after, comm.rank))
