"""Dims in blocks: what is said, printed, read back, cut, put together, and refused."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import mdfuse as mf
from mdfuse import (
    DeviceMesh,
    Layout,
    LayoutError,
    Partial,
    Shard,
    hir,
    shard_tensor,
    unshard_tensor,
)
from mdfuse.hir.text.values import placement_of
from mdfuse.layouts.blocks import part_of_blocks

TP = DeviceMesh.arange(tp=2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "S0/3"),
        ([4, 2, 2], "S0/[4,2,2]"),
        ((5, 5), "S0/2"),
        (1, "S0"),
        ([7], "S0"),
        ([3, 0], "S0"),
    ],
)
def test_one_form_each_printed_and_read_back(given: object, text: str) -> None:
    shard = Shard(0, given)  # type: ignore[arg-type]
    assert str(shard) == text
    assert placement_of(text) == shard
    assert repr(Shard(2)) == "Shard(dim=2)"
    assert eval(repr(shard)) == shard


@pytest.mark.parametrize("given", [0, -1, [], [0], [2, -1], "3", 2.0, True, [1.5]])
def test_what_no_blocks_are(given: object) -> None:
    with pytest.raises(LayoutError, match="blocks="):
        Shard(0, given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("blocks", "shape"), [(3, (8,)), ((4, 2), (8,))])
def test_blocks_that_are_not_as_long_as_the_dim(blocks: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="of a dim with 8 rows"):
        shard_tensor(torch.ones(shape), TP, {"tp": Shard(0, blocks)}, rank=0)


def test_axes_of_one_dim_agree_on_its_blocks() -> None:
    with pytest.raises(LayoutError, match="split dim 0 in different blocks"):
        Layout(DeviceMesh.arange(a=2, b=2), {"a": Shard(0, 3), "b": Shard(0)})


def test_a_stream_does_not_cut_blocks() -> None:
    with pytest.raises(LayoutError, match="which tp split in blocks"):
        Layout(TP, {"tp": Shard(0, 2)}, stream=mf.Stream(0, 2))


def test_what_has_no_box() -> None:
    with pytest.raises(LayoutError, match="is no box"):
        Layout(TP, {"tp": Shard(0, 2)}).intervals((4,), 0)


def test_a_part_is_a_piece_of_every_block_in_order() -> None:
    x = torch.arange(12)
    parts = [shard_tensor(x, TP, {"tp": Shard(0, blocks=[6, 3, 3])}, rank=r) for r in range(2)]
    assert [p.tolist() for p in parts] == [[0, 1, 2, 6, 7, 9, 10], [3, 4, 5, 8, 11]]
    assert torch.equal(unshard_tensor(parts, TP, {"tp": Shard(0, blocks=[6, 3, 3])}), x)


def rows(blocks: list[int], sizes: list[int], at: list[int]) -> list[int]:
    """The rows of a dim that a rank has, by numpy: each block by each axis in turn."""
    found, start = [], 0
    for size in blocks:
        piece = np.arange(start, start + size)
        for n, i in zip(sizes, at, strict=True):
            length = -(-len(piece) // n)
            piece = piece[i * length : (i + 1) * length]
        found += piece.tolist()
        start += size
    return found


@pytest.mark.parametrize("seed", range(60))
def test_drawn_parts_are_those_of_numpy(seed: int) -> None:
    draw = random.Random(seed)
    mesh = draw.choice([TP, DeviceMesh.arange(a=2, b=3), DeviceMesh.arange(a=4)])
    blocks = [draw.randint(0, 5) for _ in range(draw.randint(1, 4))]
    if not any(blocks):
        blocks[0] = 1
    axes = draw.sample(mesh.axes, len(mesh.axes))
    layout = Layout(mesh, dict.fromkeys(axes, Shard(0, blocks)), {0: axes})
    x = torch.arange(sum(blocks) * 2).reshape(-1, 2)
    parts = [shard_tensor(x, layout, rank=r) for r in mesh]
    for rank, part in zip(mesh, parts, strict=True):
        at = dict(zip(mesh.axes, mesh.coordinate(rank) or (), strict=True))
        want = rows(blocks, [mesh.axis_size(a) for a in axes], [at[a] for a in axes])
        assert torch.equal(part, x[want])
        assert layout.local_shape(x.shape, rank) == tuple(part.shape)
    assert torch.equal(unshard_tensor(parts, layout), x)


def test_whole_blocks_of_blocks() -> None:
    assert part_of_blocks((4, 2, 2), 8, (4, 8)) == 2
    assert part_of_blocks((4, 2, 2), 8, (0, 6)) == (4, 2)
    assert part_of_blocks((4, 2, 2), 8, (2, 6)) == 0


def test_a_program_is_read_back() -> None:
    with mf.FusionDefinition("blocks") as fd:
        x = fd.define_tensor([8, 4], layout=Layout(TP, {"tp": Shard(0, blocks=[4, 2, 2])}))
        fd.add_output(fd.ops.set(x * 2).on(TP, {"tp": Shard(0, blocks=4)}))
    host = mf.compile(fd).host
    bare = [line.partition(" # ")[0].rstrip() for line in str(host).splitlines()]
    assert any("S0/[4,2,2]" in line for line in bare) and any("S0/4" in line for line in bare)
    assert str(hir.parse(str(host))).splitlines() == bare


def test_a_picture_shows_each_piece() -> None:
    text = str(Layout(TP, {"tp": Shard(0, blocks=2)}).picture([4]))
    assert text.splitlines()[3].split("│")[1:5] == ["  0  ", "  1  ", "  0  ", "  1  "]


def kinds(fd: mf.FusionDefinition) -> Counter[str]:
    return Counter(c.kind for c in mf.compile(fd).communications)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (16, 4, 4)], ids=["equal", "grouped"])
def test_a_fused_attention_is_one_all_reduce(sizes: tuple[int, int, int]) -> None:
    """Queries, keys and values by one projection; heads of 2 features, whole ones on each rank."""
    with mf.FusionDefinition("qkv") as fd:
        x = fd.define_tensor([2, 6, 8], layout=Layout(TP))
        w = fd.define_tensor([sum(sizes), 8], layout=Layout(TP, {"tp": Shard(0, blocks=sizes)}))
        b = fd.define_tensor([sum(sizes)], layout=Layout(TP, {"tp": Shard(0, blocks=sizes)}))
        o = fd.define_tensor([8, sizes[0]], layout=Layout(TP, {"tp": Shard(1)}))
        q, k, v = (
            y.reshape(2, 6, n // 2, 2).transpose(1, 2)
            for y, n in zip(F.linear(x, w, b).split(sizes, 2), sizes, strict=True)
        )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=sizes[1] < sizes[0])
        fd.add_output(F.linear(y.transpose(1, 2).reshape(2, 6, sizes[0]), o))
    assert kinds(fd) == {"Allreduce": 1}


def test_a_fused_gate_and_up_is_one_all_reduce() -> None:
    with mf.FusionDefinition("mlp") as fd:
        x = fd.define_tensor([6, 8], layout=Layout(TP))
        w = fd.define_tensor([32, 8], layout=Layout(TP, {"tp": Shard(0, blocks=2)}))
        down = fd.define_tensor([8, 16], layout=Layout(TP, {"tp": Shard(1)}))
        gate, up = F.linear(x, w).chunk(2, 1)
        fd.add_output(F.linear(F.silu(gate) * up, down))
    assert kinds(fd) == {"Allreduce": 1}


def test_blocks_that_are_contracted_are_partial() -> None:
    with mf.FusionDefinition("contracted") as fd:
        x = fd.define_tensor([4, 12], layout=Layout(TP, {"tp": Shard(1, blocks=3)}))
        y = fd.define_tensor([5, 12], layout=Layout(TP, {"tp": Shard(1, blocks=3)}))
        z = F.linear(x, y)
        fd.add_output(fd.ops.set(z).on(TP, {"tp": Partial()}))
    assert kinds(fd) == {}
