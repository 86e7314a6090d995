"""Gradients of operations on drawn meshes and layouts, against torch's on whole tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.oracle import check_everywhere
from helpers.surface_cases import operands
from torch import Tensor

import mdfuse as mf
from frontend.test_vjps import (
    BROADCAST,
    CASES,
    DIFFERENTIABLE,
    LINEAR,
    PRODUCTS,
    ROUGH,
    SPECIAL,
    TWO,
    floating,
    gradients_of_torch,
    listed,
    loss,
    numbers,
    seeds,
    with_zeros,
)
from mdfuse import DeviceMesh, Partial, Shard

F = torch.nn.functional
MESHES = [
    DeviceMesh.arange(a=1), DeviceMesh.arange(a=2), DeviceMesh.arange(a=3), DeviceMesh.arange(a=4),
    DeviceMesh.arange(a=2, b=2), DeviceMesh.arange(a=2, b=3), DeviceMesh([3, 0, 2, 1], ["a"]),
]  # fmt: skip


def drawn(draw: random.Random, mesh: DeviceMesh, x: Tensor) -> dict[str, Any]:
    """Placements of a tensor; sums of floating ones may be left open."""
    found: dict[str, Any] = {}
    for axis in mesh.axes:
        choices: list[Any] = [*map(Shard, range(x.ndim)), None]
        if floating(x) and draw.random() < 0.2:
            choices = [Partial()]
        placement = draw.choice(choices)
        if placement is not None:
            found[axis] = placement
    return found


def check(seed: str, f: Callable[..., Any], xs: Sequence[Tensor]) -> None:
    draw = random.Random(seed)
    mesh = draw.choice(MESHES)
    expected = gradients_of_torch(f, xs)
    with torch.no_grad():
        cotangents = seeds(listed(f(*xs)))
    with mf.FusionDefinition("gradients") as fd:
        handles = [fd.define_tensor(x.shape, x.dtype, mesh, drawn(draw, mesh, x)) for x in xs]
        given = [fd.define_tensor(c.shape, c.dtype, mesh, drawn(draw, mesh, c)) for c in cotangents]
        total = loss(f(*handles), given, lambda y: y.to(torch.float64))
        wrt = [h for h in handles if floating(h)]
        for g in mf.grad(total, wrt):
            fd.add_output(g)
    program = mf.compile(fd)
    for x, g in zip(wrt, program.fusion.outputs, strict=True):
        placements = program.fusion.layout(x.name).by_axis()
        whole = {a: p for a, p in placements.items() if not isinstance(p, Partial)}
        assert program.fusion.layout(g) == mf.Layout(mesh, whole).normalized(x.ndim)
    check_everywhere(program, [*xs, *cotangents], expected)


#: Torch itself, or the sum of shares of a Partial, rounds these otherwise.
EXACT = [n for n in DIFFERENTIABLE if n not in ROUGH and "h" not in CASES[n][0].split()]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("round_", range(sampling.of(2, 1)))
def test_operations(name: str, round_: int) -> None:
    names, f = CASES[name]
    check(f"{name} {round_}", f, operands(names))


@pytest.mark.parametrize("name", SPECIAL)
def test_where_derivatives_are_special(name: str) -> None:
    check(name, SPECIAL[name], [with_zeros(4, 4)])


@pytest.mark.parametrize(("a", "b"), PRODUCTS, ids=str)
@pytest.mark.parametrize("round_", range(sampling.of(3, 1)))
def test_products(a: tuple[int, ...], b: tuple[int, ...], round_: int) -> None:
    check(f"{a} {b} {round_}", torch.matmul, [numbers(*a), numbers(*b, seed=1)])


@pytest.mark.parametrize("shapes", LINEAR, ids=str)
@pytest.mark.parametrize("round_", range(sampling.of(3, 1)))
def test_linear(shapes: Sequence[tuple[int, ...]], round_: int) -> None:
    xs = [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
    check(f"{shapes} {round_}", F.linear, xs)


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("shapes", BROADCAST, ids=str)
def test_operands_that_repeat(name: str, shapes: Sequence[tuple[int, ...]]) -> None:
    xs = [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
    check(f"{name} {shapes}", TWO[name], xs)


@pytest.mark.parametrize("round_", range(6))
def test_embedding(round_: int) -> None:
    """Repeated indices, a vocabulary that is split unevenly."""
    indices = torch.tensor([[1, 1, 4, 6], [0, 1, 4, 6]])
    check(f"embedding {round_}", lambda i, t: F.embedding(i, t), [indices, numbers(7, 3)])
