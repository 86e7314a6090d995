"""Rows that go to their experts on real ranks: values and gradients, for several routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

TOKENS, EXPERTS, D, H = 16, 4, 8, 6
SPLIT = {"ep": Shard(0)}


def defined(
    ep: int, dtype: torch.dtype, capacity: int | None = None, tokens: int = TOKENS
) -> mf.FusionDefinition:
    mesh = DeviceMesh.arange(ep=ep)
    with mf.FusionDefinition("ragged") as fd:
        x = fd.define_tensor([tokens, D], dtype, mesh, SPLIT, name="x")
        ids = fd.define_tensor([tokens, 2], torch.int64, mesh, SPLIT, name="ids")
        up = fd.define_tensor([EXPERTS, D, H], dtype, mesh, SPLIT, name="up")
        down = fd.define_tensor([EXPERTS, H, D], dtype, mesh, SPLIT, name="down")
        n = fd.ops.counts(ids, experts=EXPERTS, parts=ep)
        rows = fd.ops.set(fd.ops.group_rows(x, ids, n, capacity)).on(mesh, {"ep": Shard(1)})
        y = fd.ops.grouped_mm(F.silu(fd.ops.grouped_mm(rows, up)), down)
        y = fd.ops.ungroup_rows(fd.ops.set(y).on(mesh, SPLIT), ids)
        for result in (y, *mf.grad((y * y).sum(), [x, up, down])):
            fd.add_output(result)
    return fd


def routers(tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "drawn": torch.rand(tokens, EXPERTS, generator=generator).topk(2, -1).indices,
        "one": torch.full((tokens, 2), EXPERTS - 1),
        "none": torch.full((tokens, 2), -1),
    }


@pytest.mark.world(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("count", "tokens"), [(1, TOKENS), (2, TOKENS + 2)])
@pytest.mark.parametrize("counts", ["host", "device"])
def test_rows_go_and_come_back(
    comm: mf.Communicator, dtype: torch.dtype, count: int, tokens: int, counts: Any
) -> None:
    """One plan takes the counts of every run, and of every microbatch: of 5, 5, 5 and 3 tokens."""
    fd = defined(4, dtype, tokens=tokens)
    program = compiled(fd, count, counts)
    assert sum(i.op == "fetch" for i in program.host.walk()) == (counts == "host")
    torch.manual_seed(0)
    shapes = {"x": (tokens, D), "up": (EXPERTS, D, H), "down": (EXPERTS, H, D)}
    given = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    for ids in routers(tokens).values():
        check_run(program, fd, given | {"ids": ids}, comm)


def compiled(fd: mf.FusionDefinition, count: int, counts: Any) -> mf.Program:
    options = mf.Options(counts=counts, poison=True)
    if count == 1:
        return mf.compile(fd, options)
    return mf.pipeline(fd, microbatches=count, batch={"x": 0, "ids": 0}, options=options)


def check_run(
    program: mf.Program,
    fd: mf.FusionDefinition,
    given: dict[str, Tensor],
    comm: mf.Communicator,
) -> None:
    wanted = mf.reference(fd, [given[name] for name in program.fusion.inputs])
    values = program.fusion.values
    results = program.run(*parts_of(program, given, comm))
    for name, result, want in zip(program.fusion.outputs, results, wanted, strict=True):
        # sums of products of 16 bits: errors are those of the largest terms
        size = float(want.abs().max()) if want.numel() else 0.0
        is_narrow = given["x"].dtype == torch.bfloat16
        near = {"rtol": 5e-2, "atol": 0.2 + size / 256} if is_narrow else {}
        part = mf.shard_tensor(want, values[name].layout, rank=comm.rank)
        torch.testing.assert_close(result.cpu(), part, **near)


def parts_of(program: mf.Program, given: dict[str, Tensor], comm: mf.Communicator) -> list[Tensor]:
    values = program.fusion.values
    return [
        mf.shard_tensor(given[name], values[name].layout, rank=comm.rank).to(comm.device)
        for name in program.fusion.inputs
    ]


@pytest.mark.world(4)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("counts", ["host", "device"])
def test_all_ranks_refuse_more_rows_than_the_capacity(
    comm: mf.Communicator, count: int, counts: Any
) -> None:
    """The tokens of one rank alone choose an expert too often; runs around it are right."""
    fd = defined(4, torch.float64, 3)
    program = compiled(fd, count, counts)
    torch.manual_seed(0)
    shapes = {"x": (TOKENS, D), "up": (EXPERTS, D, H), "down": (EXPERTS, H, D)}
    given = {name: torch.randn(shape).double() for name, shape in shapes.items()}
    even = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]]).repeat(4, 1)
    skewed = even.clone()
    skewed[8:12] = torch.tensor([[2, 3], [1, 0], [3, 3], [3, 3]])
    for _ in range(2):
        check_run(program, fd, given | {"ids": even}, comm)
        with pytest.raises(mf.CountsError, match="rows of part 2 for expert 3, of which there may"):
            program.run(*parts_of(program, given | {"ids": skewed}, comm))
    check_run(program, fd, given | {"ids": even}, comm)
