"""Views of views: equal to torch's, and made from where they begin."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.frontend.importing.view_chains import Views


def drawn_shape(size: int, draw: random.Random) -> list[int]:
    """Extents with a product, ones among them."""
    shape, left = [], size
    while left > 1:
        n = draw.choice([d for d in range(1, left + 1) if left % d == 0])
        shape.append(n)
        left //= n
    return shape[:6] if math.prod(shape[:6]) == size else [size]


@pytest.mark.parametrize("seed", range(60))
def test_chains_are_those_of_torch(seed: int) -> None:
    draw = random.Random(seed)
    shape = draw.choice([(4, 6, 2), (12,), (2, 3, 4, 5), (8, 1, 6), (1,), (3, 1, 1)])
    x = torch.arange(math.prod(shape)).reshape(shape)
    wanted = [x]
    with mf.FusionDefinition("chain") as fd:
        handle = fd.define_tensor(shape, torch.int64)
        views, made = Views(), [handle]
        for _ in range(6):
            at = draw.randrange(len(made))
            v, y = made[at], wanted[at]
            kind = draw.choice(["reshape", "permute", "transpose", "flatten", "unflatten"])
            if kind == "reshape" or not y.ndim:
                new = drawn_shape(y.numel(), draw)
                made.append(views.reshape(v, new))
                wanted.append(y.reshape(new))
            elif kind == "permute":
                order = draw.sample(range(y.ndim), y.ndim)
                made.append(views.permute(v, order))
                wanted.append(y.permute(order))
            elif kind == "transpose":
                made.append(views.transpose(v, 0, -1))
                wanted.append(y.transpose(0, -1))
            elif kind == "flatten":
                first = draw.randrange(y.ndim)
                made.append(views.flatten(v, first, -1))
                wanted.append(y.flatten(first, -1))
            else:
                dim = draw.randrange(y.ndim)
                sizes = [-1, 2] if y.shape[dim] % 2 == 0 else [1, -1]
                made.append(views.unflatten(v, dim, sizes))
                wanted.append(y.unflatten(dim, sizes))
        outputs = {h.id: (h, y) for h, y in zip(made, wanted, strict=True)}
        for h, _ in outputs.values():
            fd.add_output(h)
    for found, (_, y) in zip(mf.reference(fd, [x]), outputs.values(), strict=True):
        assert found.shape == y.shape and torch.equal(found, y)


class Chain(nn.Module):
    """A function as a module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(x)


def merged(x: Tensor) -> Tensor:
    """Batch and heads as one dim for a while, as torch's attention has them."""
    s, b, e = x.shape
    y = x.view(s, b * 4, e // 4).transpose(0, 1)
    return y.view(b, 4, s, e // 4).exp()


def rows(x: Tensor) -> Tensor:
    """A matrix of all rows, and back, as a Conv1D of GPT-2 has it."""
    y = x.permute(1, 0, 2).reshape(-1, x.shape[-1])
    return torch.mm(y, torch.eye(8)).view(x.shape[1], x.shape[0], 8)


@pytest.mark.parametrize("call", [merged, rows])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_dims_that_are_joined_for_a_while_stay_split(call: Any, dim: int) -> None:
    if call is rows and dim == 2:
        return  # what the product sums over
    x = torch.randn(4, 6, 8)
    layouts = {"input:x": {"tp": Shard(dim)}}
    model = mf.from_torch(Chain(call), (x,), mesh=DeviceMesh.arange(tp=2), layouts=layouts)
    program = model.compile()
    assert not program.communications
    (found,) = mf.simulate(program, [*model.load(), x]).outputs
    torch.testing.assert_close(found, call(x))


def test_what_has_no_elements() -> None:
    call = Chain(lambda x: x.view(3, 0).transpose(0, 1).reshape(2, 0))
    model = mf.from_torch(call, (torch.zeros(0, 3),), mesh=DeviceMesh.arange(tp=2))
    assert mf.simulate(model.compile(), [torch.zeros(0, 3)]).outputs[0].shape == (2, 0)
