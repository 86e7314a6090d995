"""Ops of operands in blocks: values as torch has them, and what needs no communication."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor
from torch.nn import functional as F

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard
from mdfuse.layouts.layout import Placement

TP = DeviceMesh.arange(tp=2)
MESHES = (TP, DeviceMesh.arange(a=2, b=2), DeviceMesh([[3, 0, 5], [1, 2, 4]], axes=("p", "q")))

#: ops of x [4, 12], y [4, 12], w [12, 12] and b [12]
OPS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, w, b: x * 2 + y,
    "bias": lambda x, y, w, b: F.gelu(x + b),
    "linear": lambda x, y, w, b: F.linear(x, w, b),
    "matmul": lambda x, y, w, b: x @ w,
    "contracted": lambda x, y, w, b: x @ y.T,
    "softmax": lambda x, y, w, b: torch.softmax(x, 1),
    "softmax rows": lambda x, y, w, b: torch.softmax(x, 0),
    "norm": lambda x, y, w, b: F.layer_norm(x, [12], b, b),
    "sum": lambda x, y, w, b: x.sum(1) + x.sum(0).sum(),
    "mean": lambda x, y, w, b: x.mean(1),
    "max": lambda x, y, w, b: x.amax(1, keepdim=True) * y,
    "argmax": lambda x, y, w, b: x.argmax(1),
    "cumsum": lambda x, y, w, b: x.cumsum(1),
    "sort": lambda x, y, w, b: torch.sort(x, 1)[0],
    "topk": lambda x, y, w, b: torch.topk(x, 2, 1)[1],
    "flip": lambda x, y, w, b: x.flip(1),
    "tril": lambda x, y, w, b: torch.tril(w),
    "cat": lambda x, y, w, b: torch.cat([x, y], 1),
    "stack": lambda x, y, w, b: torch.stack([x, y], 1),
    "transpose": lambda x, y, w, b: x.T @ x,
    "chunk": lambda x, y, w, b: x.chunk(3, 1)[1] * y.chunk(3, 1)[2],
    "halves": lambda x, y, w, b: F.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1],
    "split": lambda x, y, w, b: x.split([6, 2, 4], 1)[2],
    "slice": lambda x, y, w, b: x[1:, 3:11],
    "steps": lambda x, y, w, b: x[:, 1::2],
    "view": lambda x, y, w, b: x.reshape(4, 3, 4),
    "heads": lambda x, y, w, b: x.reshape(4, 3, 2, 2)[:, 1],
    "unbind": lambda x, y, w, b: x.reshape(4, 2, 6).unbind(1)[1],
    "flatten": lambda x, y, w, b: w.reshape(-1),
    "regroup": lambda x, y, w, b: w.reshape(6, 2, 12),
    "rows": lambda x, y, w, b: w.reshape(3, 4, 12),
    "there and back": lambda x, y, w, b: (x.reshape(4, 3, 4) * 2).reshape(4, 12) + y,
    "heads of three": lambda x, y, w, b: x.reshape(4, 3, 2, 2).transpose(2, 3).reshape(4, 12),
    "merged": lambda x, y, w, b: torch.stack([x, y]).reshape(8, 12) * 2,
    "merged rows": lambda x, y, w, b: w.reshape(2, 6, 3, 4).transpose(0, 2).reshape(18, 8),
    "embedding": lambda x, y, w, b: F.embedding(x.argmax(1), w),
    "where": lambda x, y, w, b: torch.where(x > 0, x, y),
    "expand": lambda x, y, w, b: b.expand(3, 12) * 1.0,
}


def placed(draw: random.Random, mesh: DeviceMesh, shape: tuple[int, ...]) -> Layout:
    blocks: list[Any] = [
        draw.choice([None, 2, [1, n - 1], [n // 2, n // 4, n // 4]]) for n in shape
    ]
    if shape[-1] == 12:
        blocks[-1] = draw.choice([None, 2, 3, 3, [6, 2, 4]])
    dims: list[Placement] = [Shard(d, blocks[d]) for d in range(len(shape))]
    placements = {a: draw.choice([*dims, dims[-1], Replicate(), Partial()]) for a in mesh.axes}
    order = {d: draw.sample(axes, len(axes)) for d, axes in Layout(mesh, placements).splits}
    for d, axes in order.items():
        if draw.random() < 0.5:  # the inner ones go through all blocks as one
            placements |= dict.fromkeys(axes[1:], Shard(d))
    return Layout(mesh, placements, order)


def drawn(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).double()


SHAPES = ((4, 12), (4, 12), (12, 12), (12,))


@pytest.mark.parametrize("name", OPS)
def test_drawn_operands(name: str) -> None:
    for seed in range(12):
        draw = random.Random(f"{name} {seed}")
        mesh = draw.choice(MESHES)
        layouts = [placed(draw, mesh, shape) for shape in SHAPES]
        given = [drawn(seed + i, shape) for i, shape in enumerate(SHAPES)]
        with mf.FusionDefinition("ops") as fd:
            handles = [
                fd.define_tensor(x.shape, x.dtype, layout)
                for x, layout in zip(given, layouts, strict=True)
            ]
            fd.add_output(OPS[name](*handles))
        program = mf.compile(fd)
        check_everywhere(program, given, [OPS[name](*given)])
