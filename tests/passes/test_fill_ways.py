"""What is computed while rows are on their way to their experts, and back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Shard
from mdfuse.hir.instructions import counts_of
from passes.test_count_rows import router

EP, SPLIT, THERE = DeviceMesh.arange(ep=2), {"ep": Shard(0)}, {"ep": Shard(1)}
T, E, D, H = 8, 4, 6, 5
SHAPES = (T, D), (E, D, H), (E, H, D), (D, H), (H, D)


def defined(shared: str) -> mf.FusionDefinition:
    """Experts with a shared one, which the text has before them, behind them or not at all."""
    with FusionDefinition("shared") as fd:
        layouts = SPLIT, SPLIT, SPLIT, {}, {}
        x, up, down, a, b = (
            fd.define_tensor(s, torch.float64, EP, at)
            for s, at in zip(SHAPES, layouts, strict=True)
        )
        ids = fd.define_tensor([T, 2], torch.int64, EP, SPLIT, name="ids")
        beside = F.silu(x @ a) @ b if shared == "before" else None
        n = fd.ops.counts(ids, experts=E, parts=2)
        rows = fd.ops.set(fd.ops.group_rows(x, ids, n)).on(EP, THERE)
        y = fd.ops.grouped_mm(F.silu(fd.ops.grouped_mm(rows, up)), down)
        y = fd.ops.ungroup_rows(fd.ops.set(y).on(EP, SPLIT), ids)
        beside = F.silu(x @ a) @ b if shared == "behind" else beside
        y = y if beside is None else y + beside
        weights = [x, up, down, *([a, b] if beside is not None else [])]
        for result in (y, *mf.grad((y * y).sum(), weights)):
            fd.add_output(result)
    return fd


def by_loop(shared: str, ids: Tensor, given: list[Tensor]) -> list[Tensor]:
    x, up, down, a, b = leaves = [v.clone().requires_grad_() for v in given]
    rows = [sum(F.silu(x[i] @ up[e]) @ down[e] for e in row) for i, row in enumerate(ids.tolist())]
    y = torch.stack(rows)
    y = y if shared == "none" else y + F.silu(x @ a) @ b
    return [y.detach(), *torch.autograd.grad((y * y).sum(), leaves[: 3 if shared == "none" else 5])]


def meanwhile(program: mf.Program) -> list[list[str]]:
    """Return the products between the post and the wait of each way, in order."""
    filled, open_ways = list[list[str]](), dict[str, list[str]]()
    for i in program.host.walk():
        if i.op == "post" and counts_of(i) is not None:
            filled.append([])
            open_ways[i.outputs[0]] = filled[-1]
        elif i.op == "wait":
            open_ways.pop(i.reads[0], None)
        elif i.fn in ("matmul", "rows_mm", "rows_mm_grad"):
            for way in open_ways.values():
                way.append(str(i.fn))
    return filled


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shared", ["before", "behind", "none"])
def test_values_beside_a_loop(shared: str, count: int) -> None:
    fd = defined(shared)
    batch = {"in": 0, "ids": 0}
    program = mf.compile(fd) if count == 1 else mf.pipeline(fd, microbatches=2, batch=batch)
    torch.manual_seed(0)
    values, ids = [torch.randn(*s, dtype=torch.float64) for s in SHAPES], router(T, E, 2)
    given = [ids if x == "ids" else values.pop(0) for x in program.fusion.inputs]
    torch.manual_seed(0)
    values = [torch.randn(*s, dtype=torch.float64) for s in SHAPES]
    check_everywhere(program, given, by_loop(shared, ids, values))


def test_a_shared_expert_fills_both_ways() -> None:
    """Forward a product each; backward those of the shared expert, then the experts' gradients."""
    there, back, *backward = meanwhile(mf.compile(defined("behind")))
    assert (there, back) == (["matmul"], ["matmul"])
    assert backward == [["matmul"] * 4, ["rows_mm_grad"] * 2]


def test_gradients_of_matrices_fill_the_way_back() -> None:
    assert meanwhile(mf.compile(defined("none"))) == [[], [], [], ["rows_mm_grad"] * 2]
