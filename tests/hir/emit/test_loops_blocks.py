"""Streams outside of a split: each chunk of the whole dim is split, as blocks of the dim are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Shard, Stream, hir
from mdfuse.hir.verify.check import verify

GRID = DeviceMesh.arange(a=2, b=3)
BOTH = {"a": Shard(0), "b": Shard(0)}
SOURCES = ({}, {"a": Shard(0), "b": Shard(1)}, {"b": Partial()}, {"b": Shard(0, 3)})


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b"), ("b", "a")], ids=str)
@pytest.mark.parametrize(("rows", "chunks"), [(12, 2), (15, 5), (3, 3), (9, 1)])
def test_values(rows: int, chunks: int, axes: tuple[str, ...], source: dict[str, Any]) -> None:
    """Uneven and empty pieces among them."""
    blocks = source.get("b")
    if isinstance(blocks, Shard) and blocks.blocks and rows % 3:
        source = {}
    x = torch.randint(-4, 5, (rows, 4), generator=torch.Generator().manual_seed(rows)).double()
    where = GRID, {a: Shard(0) for a in axes}, {0: ("stream", *axes)}, Stream(0, chunks)
    with mf.FusionDefinition("outside") as fd:
        given = fd.define_tensor(x.shape, x.dtype, Layout(GRID, source))
        y = (fd.ops.set(given).on(*where) * 3).on(*where)
        fd.add_output(y)
        fd.add_output(y.sum(0))
        fd.add_output(fd.ops.set(y).on(GRID, {"b": Shard(0)}))
        fd.add_output(fd.ops.set(fd.ops.matmul(y.permute(1, 0), y)).on(GRID))
    program = mf.compile(fd)
    wants = [x * 3, (x * 3).sum(0), x * 3, 9 * x.T @ x]
    check_everywhere(program, [x], wants, exact=True)
    text = str(program.host)
    assert str(hir.parse(str(hir.parse(text)))) == str(hir.parse(text))
    verify(hir.parse(text))


def test_it_is_the_same_layout_as_blocks() -> None:
    """And each rank of an axis does a piece of every chunk, in order."""
    layout = Layout(GRID, BOTH, {0: ("stream", "b", "a")}, Stream(0, 2))
    blocks = {a: Shard(0, blocks=2) for a in "ab"}
    assert layout == Layout(GRID, blocks, {0: ("b", "a")}, Stream(0, 2))
    assert layout.rows((24,), 1) == (((4, 6), (16, 18)),)  # a=0, b=1
    for i, rows in enumerate((((4, 6), (12, 12)), ((0, 0), (16, 18)))):
        (found,) = layout.with_stream(Stream(0, 2, index=i)).rows((24,), 1)
        assert [r for r in found if r[0] < r[1]] == [r for r in rows if r[0] < r[1]]


def test_a_picture_counts_chunks() -> None:
    layout = Layout(DeviceMesh.arange(tp=2), {"tp": Shard(0)}, {0: ("stream", "tp")}, Stream(0, 2))
    (grid,) = layout.picture([8]).grids
    assert str(layout.picture([8])).count("#0") == 2, grid


def test_chunks_of_the_whole_do_not_fit_unequal_ones() -> None:
    with mf.FusionDefinition("uneven") as fd:
        x = fd.define_tensor([7], mesh=GRID)
        with pytest.raises(mf.LayoutError, match="7 rows are not 2 equal blocks"):
            fd.ops.set(x).on(GRID, BOTH, {0: ("stream", "a", "b")}, Stream(0, 2))


def test_a_chunk_of_a_part_is_not_one_of_the_whole() -> None:
    text = """
host @bad on mesh(tp=2) {
  input %x: f32[4] of [8] (tp=S0/2)
  %y: f32[4] of [8] (tp=S0/2) = alloc
  for %i in 0..2 {
    %x.i: f32[2] of [8] (tp=S0/2, chunk(0,2,%i)) = chunk(%x)
    %y.i: f32[2] of [8] (tp=S0/2, chunk(0,2,%i)) = chunk(%y)
    %y.i = set(%x.i)
    free %x.i, %y.i
  }
  return %y
}"""
    verify(hir.parse(text))
    for name in ("x", "y"):
        wrong = text.replace(
            f"%{name}.i: f32[2] of [8] (tp=S0/2,", f"%{name}.i: f32[2] of [8] (tp=S0,"
        )
        with pytest.raises(mf.MdfuseError):
            verify(hir.parse(wrong))
    with pytest.raises(mf.MdfuseError):
        verify(hir.parse(text.replace("0..2", "0..1")))
