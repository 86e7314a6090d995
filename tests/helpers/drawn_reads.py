"""Drawn programs in which several products read a value, or views of it, each as it is split."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

MESHES = (
    {"tp": 4}, {"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}, {"fsdp": 2, "tp": 3},
    {"a": 2, "b": 2, "c": 2},
)  # fmt: skip


class Reads:
    """A program, its inputs, and the same on whole tensors; each seed is another one."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.mesh = DeviceMesh.arange(**self.draw.choice(MESHES))
        self.given: list[Tensor] = []
        self.leaves: list[tuple[Any, Tensor]] = []
        with mf.FusionDefinition("reads") as self.definition:
            self.expected = self._record()

    def _record(self) -> list[Tensor]:
        draw = self.draw
        shape = draw.choice([1, 2, 4, 5, 6]), draw.choice([6, 7, 8, 12, 24]), draw.choice([8, 12])
        x, whole = self._input(shape)
        pool = [(x.sin(), whole.sin()) if draw.random() < 0.6 else (x, whole)]
        ends = []
        for _ in range(draw.randint(2, 5)):
            read = draw.choice(pool)
            for _ in range(draw.randint(0, 3)):
                read = self._viewed(*read)
            ends.append(self._used(*read))
            if draw.random() < 0.4:
                pool.append(ends[-1])
        if draw.random() < 0.4:
            outputs = [(mf.ops.set(y).on(self.mesh, self._split(y.ndim)), v) for y, v in ends]
        else:
            outputs = self._gradients(ends)
        for y, _ in outputs:
            self.definition.add_output(y)
        return [v.detach() for _, v in outputs]

    def _input(self, shape: tuple[int, ...]) -> tuple[Any, Tensor]:
        seed = len(self.given)
        t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.given.append(t)
        x = self.definition.define_tensor(shape, t.dtype, self.mesh, self._split(len(shape)))
        self.leaves.append((x, t.clone().requires_grad_()))
        return self.leaves[-1]

    def _split(self, ndim: int) -> dict[str, Shard]:
        axes = [a for a in self.mesh.axes if self.draw.random() < 0.7]
        return {a: Shard(self.draw.randrange(ndim)) for a in axes}

    def _viewed(self, x: Any, whole: Tensor) -> tuple[Any, Tensor]:
        """A view of a value, or what an elementwise op makes of it."""
        shape, kind = tuple(whole.shape), self.draw.randrange(7)
        dim = self.draw.randrange(len(shape))
        n = shape[dim]
        to: tuple[int, ...] = (math.prod(shape[:-1]), shape[-1])
        if kind == 1:
            to = (*shape[:dim], 1, *shape[dim:])
        if kind == 2 and n % 2 == 0:
            to = (*shape[:dim], 2, n // 2, *shape[dim + 1 :])
        if kind < 3:
            return x.reshape(to), whole.reshape(to)
        if kind == 3:
            dims = self.draw.sample(range(len(shape)), len(shape))
            return x.permute(dims), whole.permute(dims)
        if kind == 4 and n > 2:
            where = (*[slice(None)] * dim, slice(self.draw.choice([0, n // 2]), n))
            return x[where], whole[where]
        return (x.cos(), whole.cos()) if kind == 5 else (x, whole)

    def _used(self, x: Any, whole: Tensor) -> tuple[Any, Tensor]:
        """A product with a weight, or with a factor of the last dim."""
        last = whole.shape[-1]
        if self.draw.random() < 0.75:
            w, v = self._input((self.draw.choice([8, 12, 16]), last))
            return mf.ops.linear(x, w), torch.nn.functional.linear(whole, v)
        w, v = self._input((last,))
        return x * w, whole * v

    def _gradients(self, ends: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
        loss: Any = sum((y * y).sum() for y, _ in ends)
        whole: Any = sum(v.square().sum() for _, v in ends)
        handles, tensors = zip(*self.leaves, strict=True)
        grads = zip(mf.grad(loss, handles), torch.autograd.grad(whole, tensors), strict=True)
        return [(loss, whole), *grads]
