"""A small network with everything that a training step has, on several layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir

_DP, _BOTH = DeviceMesh.arange(dp=2), DeviceMesh.arange(dp=2, tp=2)
_LAYERS = 2

#: name -> mesh, layout of the batch, of the weights in, of those out, whether weights are gathered.
LAYOUTS: dict[str, tuple[DeviceMesh, Any, Any, Any, bool]] = {
    "one": (DeviceMesh.arange(dp=1), {}, {}, {}, False),
    "dp": (_DP, {"dp": Shard(0)}, {}, {}, False),
    "dp tp": (_BOTH, {"dp": Shard(0)}, {"tp": Shard(0)}, {"tp": Shard(1)}, False),
    "dp sp": (_BOTH, {"dp": Shard(0), "tp": Shard(1)}, {"tp": Shard(0)}, {"tp": Shard(1)}, False),
    "fsdp": (_DP, {"dp": Shard(0)}, {"dp": Shard(0)}, {"dp": Shard(0)}, True),
}


def added_up(rows: int, count: int) -> hir.HostProgram:
    """A training step in microbatches, not verified: gradients are added up, and an all-reduce is
    in each iteration."""
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([rows, 4], torch.float32, _BOTH, {"dp": Shard(0)}, name="x")
        w1 = fd.define_tensor([8, 4], torch.float32, _BOTH, {"tp": Shard(0)})
        w2 = fd.define_tensor([4, 8], torch.float32, _BOTH, {"tp": Shard(1)})
        y = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, w1)), w2)
        loss = fd.ops.set(y).on(_BOTH, {"dp": Shard(0)}).square().mean()
        for g in mf.grad(loss, [w1, w2]):
            fd.add_output(g)
    options = mf.Options(verify=False)
    return mf.pipeline(fd, microbatches=count, batch={"x": 0}, options=options).host


@dataclass(frozen=True)
class Net:
    """A definition, its inputs, and what torch makes of them."""

    definition: mf.FusionDefinition
    inputs: list[Tensor]
    keeps: bool

    def wanted(self) -> list[Tensor]:
        x, t, *rest = self.inputs
        leaves = [w.clone().requires_grad_() for w in rest]
        h = _forward(x, leaves, F)
        loss = F.mse_loss(h, t)
        loss.backward()
        gradients = [w.grad for w in leaves if w.grad is not None]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        news = [w - 0.1 * g / norm for w, g in zip(leaves, gradients, strict=True)]
        made = [loss, norm, *news, *([h] if self.keeps else [])]
        return [y.detach() for y in made]


def _forward(x: Any, weights: list[Any], ops: Any) -> Any:
    n = len(weights) // 3
    for w, v, g in zip(weights[:n], weights[n : 2 * n], weights[2 * n :], strict=True):
        x = x + ops.linear(ops.gelu(ops.linear(ops.rms_norm(x, [8], g), w)), v)
    return x


def network(name: str, *, keeps: bool = True, batch: int = 12) -> Net:
    """Two blocks, a loss, its gradients, their global norm, and an update by it."""
    mesh, where, into, out, gathers = LAYOUTS[name]
    dtype = torch.float64
    shapes = [[16, 8]] * _LAYERS, [[8, 16]] * _LAYERS, [[8]] * _LAYERS
    with mf.FusionDefinition("net") as fd:
        x, t = (fd.define_tensor([batch, 5, 8], dtype, mesh, where, name=n) for n in "xt")
        weights = [
            fd.define_tensor(shape, dtype, mesh, layout)
            for group, layout in zip(shapes, (into, out, {}), strict=True)
            for shape in group
        ]
        used = [fd.ops.set(w).on(mesh, {}) if gathers else w for w in weights]
        h = _forward(x, used, fd.ops)
        loss = fd.ops.mse_loss(h, t)
        gradients = mf.grad(loss, weights)
        norm = sum((g * g).sum() for g in gradients).sqrt()  # type: ignore[union-attr]
        fd.add_output(loss)
        fd.add_output(norm)
        for w, g in zip(weights, gradients, strict=True):
            fd.add_output(w - 0.1 * g / norm, reuse=w)
        if keeps:
            fd.add_output(h)
    generator = torch.Generator().manual_seed(0)
    given = [[batch, 5, 8]] * 2 + [shape for group in shapes for shape in group]
    inputs = [torch.randn(s, generator=generator, dtype=dtype) for s in given]
    return Net(fd, inputs, keeps)
