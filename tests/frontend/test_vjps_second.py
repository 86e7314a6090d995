"""Gradients of gradients, on one device, against torch's autograd or multiplications alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from helpers.surface_cases import operands
from torch import Tensor

import mdfuse as mf
from frontend.test_vjps import CASES, DIFFERENTIABLE, floating, listed, numbers

F = torch.nn.functional

#: torch has no second derivative, or gives NaN where there is one.
LACKING = {
    "hardsigmoid-F", "scaled_dot_product_attention", "scaled_dot_product_attention-gqa",
    "embedding_bag", "embedding_bag-weighed", "cdist", "multi_head_attention_forward-fast",
    "sinc-zero",
}  # fmt: skip


def bent(results: Any) -> Any:
    """One number, whose derivative depends on every floating result."""
    found = [y.to(torch.float64) for y in listed(results) if floating(y)]
    parts = [(y * y * 0.5 + y).sum() for y in found]
    return sum(parts[1:], parts[0])


def by_torch(f: Callable[..., Any], xs: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Tensor]:
    """What the Hessian makes of vectors."""
    leaves = [x.clone().requires_grad_() if floating(x) else x for x in xs]
    wrt = [x for x in leaves if floating(x)]
    zeros = [torch.zeros_like(x) for x in wrt]
    total = bent(f(*leaves))
    if not total.requires_grad:
        return zeros
    first = torch.autograd.grad(total, wrt, create_graph=True, allow_unused=True)
    along = [(g * v).sum() for g, v in zip(first, vs, strict=True) if g is not None]
    along = [x for x in along if x.requires_grad]
    found = torch.autograd.grad(sum(along), wrt, allow_unused=True) if along else zeros
    return [z if g is None else g for g, z in zip(found, zeros, strict=True)]


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if n not in LACKING])
def test_operations_as_torch(name: str) -> None:
    """Each operation in f64; those of 16 bits are rounded otherwise after two steps."""
    names, f = CASES[name]
    xs = [x.double() if floating(x) else x for x in operands(names)]
    vs = [numbers(*x.shape, seed=7 + i) for i, x in enumerate(x for x in xs if floating(x))]
    with mf.FusionDefinition() as fd:
        handles = [fd.define_tensor(x.shape, x.dtype) for x in xs]
        given = [fd.define_tensor(v.shape, v.dtype) for v in vs]
        wrt = [h for h in handles if floating(h)]
        first = mf.grad(bent(f(*handles)), wrt)
        along = [(g * v).sum() for g, v in zip(first, given, strict=True)]
        for out in mf.grad(sum(along[1:], along[0]), wrt):
            fd.add_output(out)
    for found, expected in zip(mf.reference(fd, [*xs, *vs]), by_torch(f, xs, vs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, equal_nan=True)


def test_sinc_at_zero() -> None:
    """Its second derivative there is -pi^2 / 3; torch says NaN."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([2], torch.float64)
        (dx,) = mf.grad(torch.sinc(x).sum(), [x])
        for out in mf.grad(dx.sum(), [x]):
            fd.add_output(out)
    (found,) = mf.reference(fd, [torch.zeros(2, dtype=torch.float64)])
    torch.testing.assert_close(found, torch.full_like(found, -(torch.pi**2) / 3))


def test_logcumsumexp_at_zero() -> None:
    """The cotangent of y^2 / 2 there is 0, and has a derivative, which torch leaves out."""
    x = torch.zeros(4, 3, dtype=torch.float64)

    def running(x: Tensor) -> Tensor:
        return torch.stack([x[: i + 1].logsumexp(0) for i in range(4)])

    (expected,) = by_torch(running, [x], [torch.ones_like(x)])
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor(x.shape, x.dtype)
        (dh,) = mf.grad(bent(h.logcumsumexp(0)), [h])
        for out in mf.grad(dh.sum(), [h]):
            fd.add_output(out)
    (found,) = mf.reference(fd, [x])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


SMOOTH: dict[str, Callable[..., Any]] = {
    "tanh": torch.tanh, "gelu": F.gelu, "softmax": lambda x: x.softmax(1), "silu": F.silu,
    "product": lambda x: x @ x.t() @ x, "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)), "power": lambda x: (x * x + 1) ** 1.5,
    "quotient": lambda x: x / (x * x + 1).sum(1, True), "norm": lambda x: x.norm(dim=0),
    "log_softmax": lambda x: x.log_softmax(0), "slices": lambda x: x[1:3] ** 3,
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_products_with_the_hessian(name: str) -> None:
    f, x, v = SMOOTH[name], numbers(4, 4), numbers(4, 4, seed=5)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)
    (expected,) = torch.autograd.grad((first * v).sum(), leaf)
    with mf.FusionDefinition() as fd:
        h, u = fd.define_tensor([4, 4], torch.float64), fd.define_tensor([4, 4], torch.float64)
        (dh,) = mf.grad(f(h).square().sum(), [h])
        for out in mf.grad((dh * u).sum(), [h]):
            fd.add_output(out)
    (found,) = mf.reference(fd, [x, v])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


#: Elementwise ops of which one kernel gives what comes back, some with settings of their own.
BENT: dict[str, Callable[..., Any]] = {
    "elu": lambda x: F.elu(x, 0.7), "gelu": F.gelu, "hardswish": F.hardswish, "mish": F.mish,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"), "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid, "silu": F.silu, "softplus": lambda x: F.softplus(x, 1.5, 2.0),
    "tanh": torch.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", BENT)
def test_third_derivatives_of_kernels(name: str) -> None:
    """Each time of the square of what came before, so that cotangents are differentiated, too."""
    x, f = numbers(5, 4) * 2, BENT[name]
    made, leaf = [], x.clone().requires_grad_()
    of = f(leaf)
    for _ in range(3):
        (of,) = torch.autograd.grad(of.square().sum(), leaf, create_graph=True)
        made.append(of.detach())
    with mf.FusionDefinition() as fd:
        h = fd.define_tensor(x.shape, x.dtype)
        y = f(h)
        for _ in range(3):
            (y,) = mf.grad(y.square().sum(), [h])
            fd.add_output(y)
    rough = 1e-6 if name == "hardswish" else 1e-10  # torch rounds 1/6 to f32
    for found, expected in zip(mf.reference(fd, [x]), made, strict=True):
        torch.testing.assert_close(found, expected, rtol=rough, atol=rough)


def multiplied(x: Tensor) -> Tensor:
    """The running products along dim 1, by multiplications alone."""
    found = [x[:, 0]]
    for i in range(1, x.shape[1]):
        found.append(found[-1] * x[:, i])
    return torch.stack(found, 1)


PRODUCTS_OF_ALL: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "prod": (lambda x: x.prod(1), lambda x: multiplied(x)[:, -1]),
    "cumprod": (lambda x: x.cumprod(1), multiplied),
    "scatter": (
        lambda x: torch.scatter_reduce(x[:, :2] + 2, 1, (x * 0).long(), x, "prod"),
        lambda x: torch.stack([(x[:, 0] + 2) * multiplied(x)[:, -1], x[:, 1] + 2], 1),
    ),
}


def third(name: str, zeros: Sequence[int]) -> tuple[list[Tensor], Sequence[Tensor]]:
    """Operands with so many zeros in each row, and by torch the first three derivatives."""
    xs = [numbers(3, 5, seed=5 * n) for n in range(3)]
    for row, count in enumerate(zeros):
        xs[0][row, torch.randperm(5, generator=torch.Generator().manual_seed(row))[:count]] = 0
    leaf = xs[0].clone().requires_grad_()
    total = (PRODUCTS_OF_ALL[name][1](leaf) + 1).square().sum()
    expected = torch.autograd.grad(total, leaf, create_graph=True)
    for v in xs[1:]:
        along = (expected[-1] * v).sum()
        expected += torch.autograd.grad(along, leaf, create_graph=True)
    return xs, [y.detach() for y in expected]


def derivatives(name: str, *where: Any) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        h, *vs = (fd.define_tensor([3, 5], torch.float64, *where) for _ in range(3))
        found = mf.grad((PRODUCTS_OF_ALL[name][0](h) + 1).square().sum(), [h])
        for v in vs:
            found += mf.grad((found[-1] * v).sum(), [h])
        for out in found:
            fd.add_output(out)
    return fd


@pytest.mark.parametrize("zeros", range(5))
@pytest.mark.parametrize("name", PRODUCTS_OF_ALL)
def test_derivatives_of_products_at_zeros(name: str, zeros: int) -> None:
    xs, expected = third(name, [zeros] * 3)
    for y, of in zip(mf.reference(derivatives(name), xs), expected, strict=True):
        torch.testing.assert_close(y, of, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["prod", "cumprod"])
def test_derivatives_of_products_whose_factors_are_split(name: str) -> None:
    """The zeros of a row lie on several ranks, of which some have one factor."""
    xs, expected = third(name, [1, 2, 3])
    mesh = mf.DeviceMesh.arange(a=2, b=2, c=2)
    layout = {"a": mf.Shard(1), "b": mf.Shard(1), "c": mf.Shard(0)}
    check_everywhere(mf.compile(derivatives(name, mesh, layout)), xs, expected)
