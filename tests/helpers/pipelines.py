"""Networks over several meshes, with what a training step has, and what torch makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir_lowering
from mdfuse.hir_lowering import Batch
from mdfuse.pipelines.stages import Stages, find

WIDTH, HIDDEN = 8, 16


@dataclass(frozen=True)
class Net:
    """A definition, its inputs, and torch's loss, outputs and gradients."""

    definition: mf.FusionDefinition
    inputs: list[Tensor]
    wanted: list[Tensor]


def meshes(stages: int, tp: int = 1) -> list[DeviceMesh]:
    """Disjoint meshes of `tp` ranks each."""
    return [DeviceMesh(range(s * tp, (s + 1) * tp), axes=("tp",)) for s in range(stages)]


def batch_of(net: Net) -> dict[str, int]:
    """The dims of the batch."""
    return {name: 0 for name in ("x", "t") if name in net.definition.fusion.inputs}


def check_orders(program: mf.Program, net: Net, seeds: int) -> None:
    """In the order of the text, and in others of ranks and streams, results are torch's."""
    for seed in (None, *range(seeds)):
        check_results(program, net, seed)


def check_results(program: Any, net: Net, seed: int | None = None) -> None:
    """What simulated ranks make of poisoned buffers is torch's; inputs may be written."""
    given, options = [x.clone() for x in net.inputs], mf.Options(poison=True)
    found = mf.simulate(program, given, options=options, schedule=seed).outputs
    for got, want in zip(found, net.wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _layer(x: Any, w: Any, v: Any, ops: Any) -> Any:
    return x + ops.linear(ops.gelu(ops.linear(x, w)), v)


def network(places: list[DeviceMesh], *, batch: int = 12, trains: bool = True) -> Net:
    """A layer per stage; a loss on the last one, and an update of every weight."""
    dtype, splits = torch.float64, bool(places[0].size > 1)
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([batch, WIDTH], dtype, places[0], name="x")
        t = fd.define_tensor([batch, WIDTH], dtype, places[-1], name="t")
        weights = []
        h: Any = x
        for n, mesh in enumerate(places):
            into, out = ({"tp": Shard(0)}, {"tp": Shard(1)}) if splits else ({}, {})
            w = fd.define_tensor([HIDDEN, WIDTH], dtype, mesh, into, name=f"w{n}")
            v = fd.define_tensor([WIDTH, HIDDEN], dtype, mesh, out, name=f"v{n}")
            weights += [w, v]
            h = h if n == 0 else fd.ops.set(h).on(mesh, {"tp": Shard(1)} if splits else {})
            h = _layer(h, w, v, fd.ops)
        if trains:
            loss = fd.ops.mse_loss(h, t)
            fd.add_output(loss)
            for w, dw in zip(weights, mf.grad(loss, weights), strict=True):
                fd.add_output(w - 0.1 * dw, reuse=w)
        else:
            fd.add_output(h)
    generator = torch.Generator().manual_seed(0)
    shapes = [[batch, WIDTH]] * 2 + [[HIDDEN, WIDTH], [WIDTH, HIDDEN]] * len(places)
    inputs = [torch.randn(s, generator=generator, dtype=dtype) / 2 for s in shapes]
    return Net(fd, inputs, torch_makes(inputs, trains))


def sines(places: list[DeviceMesh], *, batch: int = 6, width: int = 4, trains: bool = True) -> Net:
    """A stage is `sin(h w)`, rows as wide everywhere; a loss, and the gradient of every weight."""
    dtype = torch.float64
    with mf.FusionDefinition("sines") as fd:
        h: Any = fd.define_tensor([batch, width], dtype, places[0], name="x")
        t = fd.define_tensor([batch, width], dtype, places[-1], name="t")
        weights = []
        for n, mesh in enumerate(places):
            weights.append(fd.define_tensor([width, width], dtype, mesh, name=f"w{n}"))
            h = fd.ops.set(h).on(mesh, {}) if n else h
            h = fd.ops.sin(h @ weights[-1])
        loss = (h * t).sum()
        for value in (loss, *(mf.grad(loss, weights) if trains else ())):
            fd.add_output(value)
    generator = torch.Generator().manual_seed(0)
    shapes = [[batch, width]] * 2 + [[width, width]] * len(places)
    inputs = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    y, t, *leaves = [x.clone().requires_grad_() for x in inputs]
    for w in leaves:
        y = torch.sin(y @ w)
    (found := (y * t).sum()).backward()
    grads = [w.grad for w in leaves if w.grad is not None and trains]
    return Net(fd, inputs, [found.detach(), *grads])


def torch_makes(inputs: list[Tensor], trains: bool = True) -> list[Tensor]:
    """The outputs of `network` for some inputs, by torch's autograd."""
    h, t, *leaves = [x.clone().requires_grad_() for x in inputs]
    for w, v in zip(leaves[::2], leaves[1::2], strict=True):
        h = _layer(h, w, v, F)
    if not trains:
        return [h.detach()]
    loss = F.mse_loss(h, t)
    loss.backward()
    return [loss.detach(), *((w - 0.1 * w.grad).detach() for w in leaves)]


def stages_of(fd: mf.FusionDefinition, *names: str, at_sets: bool = False) -> Stages:
    """The stages of a definition whose inputs of these names have the batch in dim 0."""
    batch = Batch(dict.fromkeys(names or ("x",), 0), 2)
    return find(hir_lowering.prepare(fd.fusion, batch=batch), at_sets)


def chain(order: list[int], trains: bool = True) -> mf.FusionDefinition:
    """A layer per stage, each on the mesh of that number."""
    every = meshes(1 + max(order))
    with mf.FusionDefinition("chain") as fd:
        h: Any = fd.define_tensor([8, 4], mesh=every[order[0]], name="x")
        weights = []
        for n, place in enumerate(order):
            weights.append(fd.define_tensor([4, 4], mesh=every[place], name=f"w{n}"))
            h = fd.ops.set(h).on(every[place], {}) if n else h
            h = fd.ops.linear(h, weights[-1])
        loss = h.tanh().sum()
        fd.add_output(loss)
        for dw in mf.grad(loss, weights) if trains else ():
            fd.add_output(dw)
    return fd
