"""Drawn programs with laws, sets, blocks that are recomputed and two losses, against torch."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard
from mdfuse.frontend.handle import Handle

F = torch.nn.functional
MESHES = [
    DeviceMesh.arange(a=2), DeviceMesh.arange(a=4), DeviceMesh.arange(a=2, b=2),
    DeviceMesh.arange(a=3, b=2), DeviceMesh([2, 3, 4], ["a"]), DeviceMesh([4, 5, 0, 1], ["a"]),
]  # fmt: skip

#: Functions of values of one shape [n,n].
ONE = [
    torch.tanh, torch.sigmoid, F.gelu, lambda x: x.softmax(1),
    lambda x: F.layer_norm(x, x.shape[1:]), lambda x: x * x, lambda x: x.t(),
    lambda x: x - x.mean(0), lambda x: x + x.sum(1, keepdim=True),
    lambda x: x.reshape(-1).reshape(x.shape), lambda x: x / (1 + x.abs()), lambda x: x * 0.5 + 1,
    lambda x: torch.cat([x[1:], x[:1] * 2]), lambda x: x.amax(1, keepdim=True) + x,
    lambda x: x.log_softmax(0), lambda x: F.rms_norm(x, x.shape[1:]), lambda x: x.detach() * x,
]  # fmt: skip
TWO = [
    lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x @ y / 3, lambda x, y: x - y.t(),
    lambda x, y: F.linear(x, y) / 3, lambda x, y: torch.where(x > y, x, y * 2),
    lambda x, y: torch.maximum(x, y), lambda x, y: x * y.sum(), lambda x, y: x / (y * y + 1),
]  # fmt: skip


class Drawn:
    """One program: the same choices for tensors and for handles."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.n = draw.choice([1, 2, 4, 5, 6])
        self.meshes = draw.sample(MESHES, 2)
        self.draw = draw
        self.inputs = [self.layout(is_input=True) for _ in range(3)]
        self.steps = [self.step(3 + i) for i in range(draw.randint(3, 9))]
        self.losses = [draw.randint(3, 2 + len(self.steps)) for _ in range(2)]
        self.is_second = draw.random() < 0.2

    def layout(self, is_input: bool = False) -> tuple[DeviceMesh, dict[str, Any]]:
        mesh = self.meshes[0] if self.draw.random() < 0.85 else self.meshes[1]
        choices: list[Any] = [Shard(0), Shard(1), None]
        if is_input and self.draw.random() < 0.2:
            choices = [Partial(), None]
        found = {a: p for a in mesh.axes if (p := self.draw.choice(choices)) is not None}
        return mesh, found

    def step(self, known: int) -> tuple[Any, ...]:
        """(function, operands, how it is placed, whether a block of `recompute` is around it)."""
        at = [self.draw.randrange(max(0, known - 4), known) for _ in range(2)]
        one = self.draw.random() < 0.55
        f, operands = (self.draw.choice(ONE), at[:1]) if one else (self.draw.choice(TWO), at)
        chance = self.draw.random()
        place: Any = None
        if chance < 0.3:
            place = "set", self.layout()
        elif chance < 0.4:
            place = "law", self.layout()
        elif chance < 0.5:
            place = "like", self.draw.randrange(known)
        return f, operands, place, self.draw.random() < 0.25

    def run(self, xs: list[Any]) -> list[Any]:
        values = [*xs]
        for f, operands, place, is_recomputed in self.steps:
            is_traced = isinstance(xs[0], Handle)
            block = mf.recompute() if is_traced and is_recomputed else contextlib.nullcontext()
            with block:
                y = f(*(values[i] for i in operands))
                if is_traced and place is not None:
                    y = mf.ops.set(y) if place[0] != "law" else y * 1
                    y = y.on(values[place[1]]) if place[0] == "like" else y.on(*place[1])
            values.append(y)
        return [values[i].square().mean() for i in self.losses]


def gradients(drawn: Drawn, xs: list[Any], grad: Any) -> list[Any]:
    """Gradients of both losses, and now and then of the square of a gradient."""
    first, second = drawn.run(xs)
    found = [*grad(first, xs), *grad(second * 2 + first, xs)]
    if drawn.is_second:
        found += grad(found[0].square().sum(), xs)
    return found


def by_torch(y: Tensor, xs: list[Tensor]) -> list[Tensor]:
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in xs]
    found = torch.autograd.grad(y, xs, create_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)]


@pytest.mark.parametrize("seed", [*range(40), 145, 155, 161, 214])
def test_drawn_programs(seed: int) -> None:
    drawn = Drawn(seed)
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(drawn.n, drawn.n, generator=generator, dtype=torch.float64) for _ in range(3)]
    expected = gradients(drawn, [x.clone().requires_grad_() for x in xs], by_torch)
    with mf.FusionDefinition("drawn") as fd:
        handles = [fd.define_tensor(x.shape, x.dtype, *drawn.inputs[i]) for i, x in enumerate(xs)]
        for g in gradients(drawn, handles, mf.grad):
            fd.add_output(g)
    program = mf.compile(fd)
    check_everywhere(program, xs, [g.detach() for g in expected], schedule=seed % 3 or None)
    assert str(mf.hir.parse(str(program.host))) == str(
        mf.hir.parse(str(mf.hir.parse(str(program.host))))
    )
