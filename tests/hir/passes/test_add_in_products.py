"""A rank's own product adds to what arrived as it writes."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import POISON

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream, simulate

#: dtype -> what a sum of so few numbers may be off, relative to the largest.
OFF = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}


def ring(
    ranks: int, pieces: int, dtype: torch.dtype, product: str, shape: tuple[int, ...]
) -> mf.Program:
    """A product whose rows are summed in a ring, in so many pieces for each rank."""
    mesh = DeviceMesh.arange(tp=ranks)
    *batch, rows, inner, columns = shape
    last = len(batch) + 1
    with mf.FusionDefinition("ring") as fd:
        x = fd.define_tensor([*batch, rows, inner], dtype, mesh, {"tp": Shard(last)})
        stream = Stream(last - 1, ranks * pieces, rotate="tp")
        if product == "linear":
            w = fd.define_tensor([columns, inner], dtype, mesh, {"tp": Shard(1)})
            y = fd.ops.linear(x, w)
        else:
            own = batch if product == "batches" else []
            w = fd.define_tensor([*own, inner, columns], dtype, mesh, {"tp": Shard(len(own))})
            y = x @ w
        fd.add_output(y.on(mesh, {"tp": Shard(last - 1)}, stream=stream))
    return mf.compile(fd, mf.Options(compile="never"))


def sums(program: mf.Program, rank: int) -> list[str]:
    """What is added, and how, in what a rank runs."""
    code = program.for_rank(rank).as_run.instructions
    return [i.fn for i in code if i.fn in ("add", "addmm")]


@pytest.mark.parametrize("product", ["matmul", "linear", "batches"])
@pytest.mark.parametrize("dtype", OFF, ids=str)
@pytest.mark.parametrize("ranks, pieces", [(2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("batch", [(), (1,), (3,)], ids=str)
def test_values(
    ranks: int, pieces: int, dtype: torch.dtype, product: str, batch: tuple[int, ...]
) -> None:
    shape = (*batch, 48, 24, 10)
    program = ring(ranks, pieces, dtype, product, shape)
    torch.manual_seed(ranks + pieces)
    x = torch.randn(*batch, 48, 24, dtype=torch.float64).to(dtype)
    w = torch.randn(*(batch if product == "batches" else ()), 24, 10, dtype=torch.float64).to(dtype)
    given = w.mT.contiguous() if product == "linear" else w
    (got,) = simulate(program, [x, given], options=POISON).outputs
    right = x.double() @ w.double()
    scale = (x.double().abs() @ w.double().abs()).amax()
    assert got.dtype == dtype
    assert (got.double() - right).abs().amax() <= OFF[dtype] * scale
    is_wide = ranks > 2 and dtype == torch.bfloat16  # added up in f32
    own = 0 if pieces == 1 or is_wide else pieces
    assert [sums(program, r).count("addmm") for r in range(ranks)] == [own] * ranks
