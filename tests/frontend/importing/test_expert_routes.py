"""Rows that a module sorts by their experts: never sorted, so that they stay split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # defines the operation of `grouped`
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP = 12, 4, 6, 4, 2
grouped = torch.ops.transformers.grouped_mm_fallback


def back_by_inverse(rows: Tensor, perm: Tensor) -> Tensor:
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(len(perm))
    return rows[inverse].view(-1, TOP, WIDTH).sum(1)


def back_by_argsort(rows: Tensor, perm: Tensor) -> Tensor:
    return rows.index_select(0, perm.argsort()).unflatten(0, (-1, TOP)).sum(1)


def back_by_writing(rows: Tensor, perm: Tensor) -> Tensor:
    whole = torch.zeros_like(rows)
    whole[perm] = rows
    return whole.view(-1, TOP, WIDTH).sum(1)


def back_by_adding(rows: Tensor, perm: Tensor) -> Tensor:
    tokens = torch.arange(TOKENS).repeat_interleave(TOP)
    return torch.zeros(TOKENS, WIDTH, dtype=rows.dtype).index_add(0, tokens[perm], rows)


BACK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "inverse": back_by_inverse, "argsort": back_by_argsort,
    "written": back_by_writing, "added": back_by_adding,
}  # fmt: skip


class Experts(nn.Module):
    """The best experts of each token, with biases and a norm; `back` restores the order."""

    def __init__(self, back: str) -> None:
        super().__init__()
        self.back = back
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP, -1)
        ids, perm = ids.flatten().sort()
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        y = grouped(x[perm // TOP], self.up, ends) + self.up_bias[ids]
        gate, up = y[:, ::2], y[:, 1::2]
        y = torch.cat([gate * up.sigmoid().clamp(max=0.9), up], -1).chunk(2, 1)[0]
        y = self.norm(grouped(y, self.down.mT, ends))
        return BACK[self.back](y * weights.flatten()[perm].unsqueeze(-1), perm)


class Looking(nn.Module):
    """What needs the rows as they are sorted, or as they are between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        ids = (x[:, 0] * 3).long().clamp(0, EXPERTS - 1)
        found, perm = ids.sort(stable=True)
        ends = torch.histc(found.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        y = grouped(x[perm], self.up, ends) + 1
        inverse = perm.argsort()
        return y[inverse], y.cumsum(0), found, perm, inverse, ends, y * found.unsqueeze(-1)


def x() -> Tensor:
    return torch.randn(
        TOKENS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )


SPLIT = {name: {"ep": Shard(0)} for name in ("up", "down")}
ROWS = {"input:x": {"dp": Shard(0)}}
#: mesh, layouts, what a forward posts along which axis.
PLACES: dict[str, tuple[DeviceMesh, dict[str, Any], dict[tuple[str, str], int]]] = {
    "rows": (DeviceMesh.arange(dp=3), ROWS, {}),
    "experts": (DeviceMesh.arange(ep=2), SPLIT, {("Allreduce", "ep"): 1}),
    "rows and experts": (
        DeviceMesh.arange(dp=2, ep=2), {**SPLIT, **ROWS}, {("Allreduce", "ep"): 1}
    ),
    "one axis": (
        DeviceMesh.arange(ep=4), {**SPLIT, "input:x": {"ep": Shard(0)}},
        {("Allgather", "ep"): 1, ("AllToAll", "ep"): 2},  # of counts, and of rows
    ),
}  # fmt: skip


def made(of: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return of().to(torch.float64)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("back", BACK)
def test_rows_stay_where_they_are(back: str, place: str) -> None:
    mesh, layouts, posts = PLACES[place]
    module = made(partial(Experts, back))
    model = mf.from_torch(module, (x(),), mesh=mesh, layouts=layouts)
    program = model.compile()
    assert "sort" not in {e.op for e in model.fusion.exprs}
    if back == "inverse":
        assert Counter((c.kind, *c.axes) for c in program.communications) == posts
    wanted = module(x())
    (found,) = mf.simulate(program, [*model.load(), x()]).outputs
    torch.testing.assert_close(found, wanted.detach())
    step = model.training_step(lambda y: (y * y).mean(), optimizer=partial(mf.optim.sgd, lr=1.0))
    weights = model.load()
    given = step.arguments(weights, step.state(weights), x())
    state = step.updated(mf.simulate(step.compile(), given).outputs)
    (wanted * wanted).mean().backward()
    for name, w in module.named_parameters():
        assert w.grad is not None
        torch.testing.assert_close(state[name], (w - w.grad).detach())


@pytest.mark.parametrize("place", PLACES)
def test_who_asks_for_the_order_gets_it(place: str) -> None:
    mesh, layouts, _ = PLACES[place]
    module = made(Looking)
    layouts = {pattern: said for pattern, said in layouts.items() if pattern != "down"}
    model = mf.from_torch(module, (x(),), mesh=mesh, layouts=layouts)
    found = mf.simulate(model.compile(), [*model.load(), x()]).outputs
    torch.testing.assert_close(model.outputs(found), tuple(y.detach() for y in module(x())))


def test_experts_that_ranks_do_not_divide() -> None:
    module = made(partial(Experts, "inverse"))
    layouts = {name: {"ep": Shard(0)} for name in ("up", "down")}
    model = mf.from_torch(module, (x(),), mesh=DeviceMesh.arange(ep=3), layouts=layouts)
    (found,) = mf.simulate(model.compile(), [*model.load(), x()]).outputs
    torch.testing.assert_close(found, module(x()).detach())
