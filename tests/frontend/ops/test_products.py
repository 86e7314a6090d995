"""Products of rows with the matrix of their expert: values, gradients, and what ranks send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, FusionDefinition, Shard, torch_private
from mdfuse.ir import groups

MESH = DeviceMesh.arange(ep=3)
#: Five experts over three ranks: 2, 2 and 1. One has no row, and the last row has no expert.
X, W = torch.randn(10, 4, dtype=torch.float64), torch.randn(5, 4, 3, dtype=torch.float64)
ENDS = torch.tensor([2, 2, 5, 8, 9])

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, tuple[int, ...]]]] = {
    "experts": ({}, {"ep": Shard(0)}, ("Allgather", (5, 4, 3))),
    "rows": ({"ep": Shard(0)}, {}, ("Allreduce", (5, 4, 3))),
    "features": ({"ep": Shard(1)}, {"ep": Shard(1)}, ("Allreduce", (10, 3))),
    "columns": ({}, {"ep": Shard(2)}, ("Allreduce", (10, 4))),
}


def plain(x: Tensor, w: Tensor) -> Tensor:
    spans = zip([0, *ENDS.tolist()], ENDS.tolist(), strict=False)
    rows = [x[a:b] @ w[g] for g, (a, b) in enumerate(spans)]
    return torch.cat([*rows, torch.zeros(1, 3, dtype=torch.float64)])


def kernel(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """As torch's on a GPU: groups begin with the first row, and what has none is not written."""
    assert offs.dtype == torch.int32
    spans = [*zip([0, *offs.tolist()], offs.tolist(), strict=False)]
    if w.ndim == 2:
        return torch.stack([x[:, a:b] @ w[a:b] for a, b in spans])
    result = torch.full((x.shape[0], w.shape[2]), torch.nan, dtype=x.dtype)
    for g, (a, b) in enumerate(spans):
        result[a:b] = x[a:b] @ w[g]
    return result


@pytest.fixture(params=["spans", "masks", "kernel"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By spans that the host knows, as on CPUs; by masks, or by a kernel, as on GPUs."""
    monkeypatch.setattr(groups, "may_look", lambda x: request.param == "spans")
    if request.param == "kernel":
        monkeypatch.setattr(torch_private, "grouped_mm", kernel)
        monkeypatch.setattr(torch_private, "has_grouped_kernel", lambda x, *_: not x[0].is_meta)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_by_their_experts(name: str) -> None:
    of_x, of_w, first = LAYOUTS[name]
    with FusionDefinition("experts") as fd:
        x = fd.define_tensor(X.shape, X.dtype, MESH, of_x)
        w = fd.define_tensor(W.shape, W.dtype, MESH, of_w)
        ends = fd.define_tensor(ENDS.shape, ENDS.dtype, MESH)
        y = F.grouped_mm(x, w, offs=ends)
        dx, dw = mf.grad(y.square().sum(), [x, w])
        (again,) = mf.grad((dw * dw).sum(), [x])
        for result in (y, dx, dw, again):
            fd.add_output(result)
    program = mf.compile(fd)
    a, b = X.clone().requires_grad_(), W.clone().requires_grad_()
    found = torch.autograd.grad(plain(a, b).square().sum(), [a, b], create_graph=True)
    (twice,) = torch.autograd.grad((found[1] * found[1]).sum(), a)
    expected = [plain(X, W), *(g.detach() for g in found), twice]
    check_everywhere(program, [X, W, ENDS], expected)
    assert first in [(c.kind, tuple(c.shape)) for c in program.communications]


#: Numbers of rows, of eight experts in four parts; two rows have none.
IDS = torch.tensor([3, 0, 7, 3, 8, 1, 4, -1, 7, 0])
UP, DOWN = (torch.randn(4, 2, *s, dtype=torch.float64) for s in ((4, 6), (6, 4)))
PARTS = DeviceMesh.arange(ep=2)
#: Layouts of rows, matrices up and down; what a product up and one down post.
ROUTES: dict[str, tuple[DeviceMesh, Any, Any, Any, list[str]]] = {
    "whole": (PARTS, {}, {}, {}, []),
    "rows": (MESH, {"ep": Shard(0)}, {}, {}, []),
    "parts": (PARTS, {}, {"ep": Shard(0)}, {"ep": Shard(0)}, ["Allreduce"]),
    "uneven parts": (MESH, {}, {"ep": Shard(0)}, {"ep": Shard(0)}, ["Allreduce"]),
    "columns": (PARTS, {}, {"ep": Shard(3)}, {"ep": Shard(2)}, ["Allreduce"]),
    "both": (
        PARTS, {"ep": Shard(0)}, {"ep": Shard(0)}, {"ep": Shard(0)},
        ["Allgather", "Allgather", "ReduceScatter"],
    ),
}  # fmt: skip


def by_numbers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each row by itself."""
    rows = []
    for row, n in zip(x, IDS.tolist(), strict=True):
        is_there = 0 <= n < 8
        made = (row @ up.flatten(0, 1)[n]).sin() @ down.flatten(0, 1)[n] if is_there else row * 0
        rows.append(made)
    return torch.stack(rows)


def by_routes(fd: FusionDefinition, name: str) -> tuple[list[Any], Any]:
    """Define operands, and two products in a row of each row with the matrices of its number."""
    mesh, *layouts, _ = ROUTES[name]
    given = [fd.define_tensor(t.shape, t.dtype, mesh, layout)
             for t, layout in zip((X, UP, DOWN), layouts, strict=True)]  # fmt: skip
    ids = fd.define_tensor(IDS.shape, IDS.dtype, mesh, layouts[0])
    apart = mf.ops.routed_mm(given[0], given[1], ids)
    return given, mf.ops.routed_mm(apart.sin(), given[2], ids)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("name", ROUTES)
def test_rows_by_their_numbers(name: str) -> None:
    mesh, *layouts, posts = ROUTES[name]
    with FusionDefinition("routes") as fd:
        fd.add_output(fd.ops.set(by_routes(fd, name)[1]).on(mesh, layouts[0]))
    forward = mf.compile(fd)
    assert sorted(c.kind for c in forward.communications) == posts
    check_everywhere(forward, [X, UP, DOWN, IDS], [by_numbers(X, UP, DOWN)])


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("name", ROUTES)
def test_gradients_of_rows_by_their_numbers(name: str) -> None:
    with FusionDefinition("routes") as fd:
        given, y = by_routes(fd, name)
        first = mf.grad(y.square().sum(), given)
        again = mf.grad(sum((g * g).sum() for g in first), given)
        for g in (*first, *again):
            fd.add_output(g)
    leaves = [t.clone().requires_grad_() for t in (X, UP, DOWN)]
    wanted = torch.autograd.grad(by_numbers(*leaves).square().sum(), leaves, create_graph=True)
    twice = torch.autograd.grad(sum((g * g).sum() for g in wanted), leaves)
    expected = [g.detach() for g in (*wanted, *twice)]
    check_everywhere(mf.compile(fd), [X, UP, DOWN, IDS], expected)


@pytest.mark.parametrize("name", ["rows", "parts", "matrices", "dtypes", "fractions", "vectors"])
def test_rows_and_numbers_that_do_not_fit(name: str) -> None:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([10, 4]), fd.define_tensor([4, 2, 4, 6])
        ids = fd.define_tensor([10], torch.int64)
        wrong: dict[str, tuple[Any, ...]] = {
            "rows": (x[:9], w, ids), "parts": (mf.ops.stack([x, x]), w, ids),
            "matrices": (x, w[0], ids), "dtypes": (x, w.double(), ids),
            "fractions": (x, w, ids * 0.5), "vectors": (x[0], w, ids),
        }  # fmt: skip
        with pytest.raises(DefinitionError, match=r"ids has t integers"):
            mf.ops.routed_mm(*wrong[name])


def test_it_is_what_torch_computes() -> None:
    x, w = X.float(), W.float()
    ends = torch.tensor([2, 2, 5, 8, 10], dtype=torch.int32)
    with FusionDefinition("torch") as fd:
        given = [fd.define_tensor(t.shape, t.dtype) for t in (x, w, ends)]
        fd.add_output(F.grouped_mm(given[0], given[1], offs=given[2]))
    wide = F.pad(w, (0, 5, 0, 4)), F.pad(x, (0, 4))  # torch wants extents of whole 16 bytes
    wanted = F.grouped_mm(wide[1], wide[0], offs=ends)[:, :3]
    torch.testing.assert_close(mf.reference(fd, [x, w, ends])[0], wanted)


def test_what_is_wrong_is_said() -> None:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([10, 4]), fd.define_tensor([5, 4, 3])
        ends = fd.define_tensor([5], torch.int32)
        for wrong in ((x, w, ends[:4]), (x.T, w, ends), (x, w.double(), ends), (x, w, ends * 0.5)):
            with pytest.raises(DefinitionError, match="offs has e integers"):
                fd.ops.grouped_mm(*wrong)
        with pytest.raises(DefinitionError, match="takes it with 3 dims"):
            fd.ops.grouped_mm(x, w[0], ends)
        with pytest.raises(DefinitionError, match="without offs"):
            F.grouped_mm(x, w[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factors", [(1, 1), (0.5, 1), (1, 0.3), (0, 1)])
@pytest.mark.parametrize("name", ["addmm", "addmm of a bias", "addmv", "baddbmm"])
def test_sums_with_products_round_once(
    name: str, factors: tuple[float, float], dtype: torch.dtype
) -> None:
    shapes = {
        "addmm": ((7, 6), (7, 5), (5, 6)), "addmm of a bias": ((6,), (7, 5), (5, 6)),
        "addmv": ((7,), (7, 5), (5,)), "baddbmm": ((3, 7, 6), (3, 7, 5), (3, 5, 6)),
    }[name]  # fmt: skip
    draws = torch.Generator().manual_seed(3)
    xs = [torch.randn(shape, generator=draws).mul(3).to(dtype) for shape in shapes]
    beta, alpha = factors
    x, a, b = (x.double() for x in xs)
    expected = ((beta * x if beta else 0) + alpha * (a @ b)).to(dtype)
    with mf.FusionDefinition("once") as fd:
        mesh = DeviceMesh.arange(x=2)
        handles = [fd.define_tensor(x.shape, dtype, mesh, {"x": Shard(0)}) for x in xs]
        f = getattr(torch, name.split()[0])
        fd.add_output(f(*handles, beta=beta, alpha=alpha))
    (found,) = mf.simulate(mf.compile(fd), xs).outputs
    assert found.dtype == dtype
    # by f32 or by f64, a number half way between two may go to either
    assert (found != expected).sum() <= 1, (found - expected).abs().max()
