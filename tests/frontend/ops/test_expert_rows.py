"""Rows grouped by expert: values and gradients beside a loop over tokens, layouts, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, FusionDefinition, LayoutError, Shard

D, H = 3, 5
EP = {n: DeviceMesh.arange(ep=n) for n in (1, 2, 3, 4)}
S0, S1 = {"ep": Shard(0)}, {"ep": Shard(1)}

#: (ranks, tokens, experts, the experts of each token): which run counts which rows.
ROUTES: dict[str, tuple[int, int, int, Callable[[int, int], Tensor]]] = {
    "one rank": (1, 5, 4, lambda t, e: drawn(t, e, 2)),
    "two ranks": (2, 8, 4, lambda t, e: drawn(t, e, 2)),
    "all to one expert": (2, 6, 4, lambda t, e: torch.full((t, 1), 3)),
    "an expert without tokens": (2, 6, 4, lambda t, e: drawn(t, e - 1, 2) + 1),
    "every expert": (2, 6, 4, lambda t, e: torch.arange(e).expand(t, e)),
    "one choice": (4, 8, 4, lambda t, e: drawn(t, e, 1)),
    "uneven experts": (3, 7, 5, lambda t, e: drawn(t, e, 2)),
    "ranks without tokens": (4, 2, 4, lambda t, e: drawn(t, e, 2)),
    "ranks without experts": (4, 9, 3, lambda t, e: drawn(t, e, 2)),
    "rows of no expert": (2, 6, 4, lambda t, e: drawn(t, e + 1, 2) - 1),
    "one token": (3, 1, 3, lambda t, e: drawn(t, e, 2)),
}


def drawn(t: int, e: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(t + 8 * e + 64 * k)
    return torch.rand(t, e, generator=generator).topk(k, -1).indices


def operands(t: int, e: int, k: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (t, D), (t, k), (e, D, H), (e, H), (e, H, D)
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def by_loop(ids: Tensor, x: Tensor, p: Tensor, w1: Tensor, b: Tensor, w2: Tensor) -> Tensor:
    rows = [torch.zeros(D, dtype=x.dtype) for _ in x]
    for t, chosen in enumerate(ids.tolist()):
        for k, e in enumerate(chosen):
            if 0 <= e < len(w1):
                rows[t] = rows[t] + p[t, k] * (F.gelu(x[t] @ w1[e] + b[e]) @ w2[e])
    return torch.stack(rows) + 0 * x


def layer(mesh: DeviceMesh, ids: Tensor, given: list[Tensor]) -> mf.Program:
    """Dispatch, two products with a bias between them, and combine; with gradients."""
    laid = (S0, S0, S0, S0, S0)
    with FusionDefinition("experts") as fd:
        numbers = fd.define_tensor(ids.shape, ids.dtype, mesh, S0)
        x, p, w1, b, w2 = (
            fd.define_tensor(t.shape, t.dtype, mesh, at) for t, at in zip(given, laid, strict=True)
        )
        n = fd.ops.counts(numbers, experts=len(given[2]), parts=mesh.size)
        rows = fd.ops.set(fd.ops.group_rows(x, numbers, n)).on(mesh, S1)
        h = F.gelu(fd.ops.grouped_mm(rows, w1) + b.unsqueeze(1))
        back = fd.ops.set(fd.ops.grouped_mm(h, w2)).on(mesh, S0)
        y = fd.ops.ungroup_rows(back, numbers, p)
        for result in (y, *mf.grad((y * y).sum(), [x, p, w1, b, w2])):
            fd.add_output(result)
    return mf.compile(fd)


@pytest.mark.parametrize("name", ROUTES)
def test_a_layer_beside_a_loop(name: str) -> None:
    ranks, t, e, route = ROUTES[name]
    ids = route(t, e)
    given = operands(t, e, ids.shape[1])
    program = layer(EP[ranks], ids, given)
    leaves = [x.clone().requires_grad_() for x in given]
    y = by_loop(ids, *leaves)
    gradients = torch.autograd.grad((y * y).sum(), leaves)
    check_everywhere(program, [ids, *given], [y.detach(), *gradients])


def test_equal_scores_go_where_torch_sends_them() -> None:
    scores, x = torch.zeros(4, 6), torch.randn(4, D)
    with FusionDefinition("ties") as fd:
        s = fd.define_tensor(scores.shape, scores.dtype, EP[2], S0)
        v = fd.define_tensor(x.shape, x.dtype, EP[2], S0)
        _, ids = s.topk(2, -1)
        n = fd.ops.counts(ids, experts=6, parts=2)
        fd.add_output(n)
        fd.add_output(fd.ops.ungroup_rows(fd.ops.group_rows(v, ids, n), ids))
    ids = scores.topk(2, -1).indices
    counted = torch.stack([part.flatten().bincount(minlength=6) for part in ids.chunk(2)])
    check_everywhere(mf.compile(fd), [scores, x], [counted, 2 * x])


def test_rows_over_the_capacity_come_back_as_zeros() -> None:
    ids, x = torch.tensor([1, 1, 0, 1, 1, 1]), torch.randn(6, D)
    with FusionDefinition("capacity") as fd:
        i = fd.define_tensor(ids.shape, ids.dtype, EP[2], S0)
        v = fd.define_tensor(x.shape, x.dtype, EP[2], S0)
        n = fd.ops.counts(i, experts=2, parts=2)
        rows = fd.ops.set(fd.ops.group_rows(v, i, n, capacity=1, drop=True)).on(EP[2], S1)
        fd.add_output(fd.ops.ungroup_rows(fd.ops.set(rows * 2).on(EP[2], S0), i))
    is_there = torch.tensor([1, 0, 1, 1, 0, 0]).unsqueeze(1)
    check_everywhere(mf.compile(fd), [ids, x], [2 * x * is_there])


OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Tensor]]] = {
    "silu": (lambda ops, r: F.silu(r), F.silu),
    "times": (lambda ops, r: r * 2 * r, lambda x: 2 * x * x),
    "added": (lambda ops, r: r + 1, lambda x: x + 1),
    "a row": (lambda ops, r: r - ops.tensor([1.0, 2, 3]), lambda x: x - torch.tensor([1.0, 2, 3])),
    "square root": (lambda ops, r: (r * r + 1).sqrt() - 1, lambda x: (x * x + 1).sqrt() - 1),
    "columns": (
        lambda ops, r: ops.cat([r[..., 1:], r[..., :1]], -1),
        lambda x: torch.cat([x[:, 1:], x[:, :1]], 1)),
    "every second": (
        lambda ops, r: r * r[..., ::2].sum(-1, keepdim=True),
        lambda x: x * x[:, ::2].sum(1, keepdim=True)),
    "sigmoid": (lambda ops, r: r * torch.sigmoid(r * 2), lambda x: x * torch.sigmoid(x * 2)),
    "extremes": (lambda ops, r: r.clamp(-0.5, 0.5), lambda x: x.clamp(-0.5, 0.5)),
    "linear": (
        lambda ops, r: F.linear(r, ops.ones(3, 3), ops.ones(3)),
        lambda x: x.sum(1, keepdim=True).expand(-1, 3) + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_rows(name: str) -> None:
    """What each row becomes, and what comes back; beyond the rows all stays zero."""
    on_rows, plain = OPERATIONS[name]
    ids, x = torch.tensor([[1, 0], [1, 2], [2, 1], [1, 0], [1, 2]]), torch.randn(5, 3)
    with FusionDefinition("rows") as fd:
        i = fd.define_tensor(ids.shape, ids.dtype, EP[2], S0)
        v = fd.define_tensor(x.shape, x.dtype, EP[2], S0)
        rows = fd.ops.group_rows(v, i, fd.ops.counts(i, experts=3, parts=2))
        result = on_rows(fd.ops, rows)
        y = fd.ops.ungroup_rows(result, i)
        for output in (y, result.sum(2), result.sum(), mf.grad((y * y).sum(), [v])[0]):
            fd.add_output(output)
    leaf = x.clone().requires_grad_()
    each = plain(leaf.repeat_interleave(2, 0))
    total = each.unflatten(0, (-1, 2)).sum(1)
    (gradient,) = torch.autograd.grad((total * total).sum(), leaf)
    keys = (torch.arange(5) // 3 * 3).unsqueeze(1) + ids
    sums = torch.zeros(6, 3).index_add_(0, keys.flatten(), each.detach()).view(2, 3, 3)
    wanted = [total.detach(), sums, each.detach().sum(), gradient]
    check_everywhere(mf.compile(fd), [ids, x], wanted)


REFUSED: dict[str, tuple[type[Exception], str, Callable[..., Any]]] = {
    "exp": (DefinitionError, "something else of zeros", lambda fd, r, i: fd.ops.exp(r)),
    "a quotient": (DefinitionError, "something else of zeros", lambda fd, r, i: 1 / r),
    "experts": (DefinitionError, "rows of different experts", lambda fd, r, i: r.softmax(1)),
    "places": (DefinitionError, "rows of different experts", lambda fd, r, i: r.flip(2)),
    "a view": (DefinitionError, "rows of different experts", lambda fd, r, i: r.flatten(0, 2)),
    "a sum": (DefinitionError, "rows are summed, over dim 2", lambda fd, r, i: r.sum(1)),
    "a mean": (DefinitionError, "rows of different experts", lambda fd, r, i: r.mean(2)),
    "each place": (DefinitionError, "each place", lambda fd, r, i: r * fd.ops.ones(12, 1)),
    "other ids": (
        DefinitionError, "not the counts", lambda fd, r, i: fd.ops.ungroup_rows(r, i + 0)),
    "other rows": (
        DefinitionError, "rows of their own",
        lambda fd, r, i: r + fd.ops.group_rows(
            fd.ops.ones(6, 2), i, fd.ops.counts(i, experts=3, parts=2))),
    "plain rows": (
        DefinitionError, "that `group_rows` grouped",
        lambda fd, r, i: fd.ops.grouped_mm(fd.ops.ones(2, 3, 4, 2), fd.ops.ones(3, 2, 2))),
    "split rows": (
        LayoutError, "no axis splits them",
        lambda fd, r, i: fd.ops.set(r).on(EP[2], {"ep": Shard(2)})),
    "fractions": (DefinitionError, "ids are integers", lambda fd, r, i: fd.ops.counts(i * 0.5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line(name: str) -> None:
    error, because, call = REFUSED[name]
    with FusionDefinition("refused") as fd:
        i = fd.define_tensor([6, 2], torch.int64, EP[2], S0)
        n = fd.ops.counts(i, experts=3, parts=2)
        rows = fd.ops.group_rows(fd.ops.ones(6, 2), i, n)
        with pytest.raises(error) as refused:
            call(fd, rows, i)
        fd.add_output(n)
    assert because in str(refused.value), str(refused.value)
    assert "test_expert_rows.py" in str(refused.value)
