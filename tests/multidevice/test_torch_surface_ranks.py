"""A transformer block as one writes it for torch, on real ranks and on plain tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import is_close, local_part

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Replicate, Shard

DIM, HIDDEN, HEAD = 16, 24, 4

#: argument -> its shape, and which dim the axis tp splits.
WEIGHTS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "wq": ((DIM, DIM), 0), "wk": ((DIM, DIM), 0), "wv": ((DIM, DIM), 0), "wo": ((DIM, DIM), 1),
    "up": ((HIDDEN, DIM), 0), "gate": ((HIDDEN, DIM), 0), "down": ((DIM, HIDDEN), 1),
    "scale": ((DIM,), None), "shift": ((DIM,), None),
}  # fmt: skip


def block(
    x: Any, wq: Any, wk: Any, wv: Any, wo: Any, up: Any, gate: Any, down: Any, scale: Any,
    shift: Any,
) -> Any:  # fmt: skip
    b, l, d = x.shape  # noqa: E741
    y = F.rms_norm(x, (d,), scale, 1e-6)
    q, k, v = (F.linear(y, w).view(b, l, -1, HEAD).transpose(1, 2) for w in (wq, wk, wv))
    scores = q @ k.mT / math.sqrt(q.size(-1))
    weights = torch.softmax(scores.double(), dim=-1).type_as(q)
    joined = (weights @ v).transpose(1, 2).contiguous().view(b, l, d)
    x = x + F.linear(joined, wo)
    y = F.layer_norm(x, x.shape[-1:], weight=scale, bias=shift)
    x = x + (F.silu(F.linear(y, gate)) * F.linear(y, up)) @ down.t()
    first, last = x[:, 0], x.select(1, -1)
    pooled = torch.cat([first, last], dim=-1).masked_fill(x.amax((1, 2), keepdim=True)[0] < 0, 0.0)
    return x, pooled, torch.logsumexp(x, dim=-1), x.var(dim=(0, 1)).clamp(max=10)


def run_on(mesh: DeviceMesh, comm: mf.Communicator) -> None:
    layouts = {"x": Layout(mesh, {"dp": Shard(0)} if "dp" in mesh.axes else {})} | {
        name: Layout(mesh, {"tp": Replicate() if dim is None else Shard(dim)})
        for name, (_, dim) in WEIGHTS.items()
    }
    shapes = {"x": (3, 5, DIM)} | {name: shape for name, (shape, _) in WEIGHTS.items()}
    generator = torch.Generator().manual_seed(1)
    inputs = {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}
    specs = {n: mf.TensorSpec(shapes[n], mesh=layout) for n, layout in layouts.items()}
    program = mf.compile(mf.fusion(block).define(**specs))
    parts = [local_part(x, layouts[n], comm.rank).to(comm.device) for n, x in inputs.items()]
    outputs = program.run(*parts)
    for name, mine, whole in zip(program.fusion.outputs, outputs, block(**inputs), strict=True):
        layout = program.fusion.layout(name)
        assert not layout.partial_axes, f"%{name} {layout}"
        assert is_close(mine.cpu(), local_part(whole, layout, comm.rank)), f"%{name}\n{program}"


@pytest.mark.world(2)
def test_tensor_parallel(comm: mf.Communicator) -> None:
    run_on(DeviceMesh.arange(tp=2), comm)


@pytest.mark.world(4)
def test_data_and_tensor_parallel(comm: mf.Communicator) -> None:
    run_on(DeviceMesh.arange(dp=2, tp=2), comm)


@pytest.mark.world(4)
def test_neighbours_exchange_rows_of_images(comm: mf.Communicator) -> None:
    mesh = DeviceMesh.arange(tp=4)
    layout = Layout(mesh, {"tp": Shard(2)})
    x, w = (torch.randn(s, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            for s in ((2, 3, 11, 5), (4, 3, 3, 3)))  # fmt: skip

    def image(x: Any, w: Any) -> Any:
        return F.max_pool2d(F.conv2d(x, w, padding=1), 3, 2, 1)

    with mf.FusionDefinition("image") as fd:
        handles = [fd.define_tensor(x.shape, x.dtype, layout), fd.define_tensor(w.shape, w.dtype)]
        y = image(*handles)
        for made in (y, *mf.grad((y * y).sum(), handles)):
            fd.add_output(made)
    part = local_part(x, layout, comm.rank)
    outputs = mf.compile(fd).run(part.to(comm.device), w.to(comm.device))
    whole = [x.requires_grad_(), w.requires_grad_()]
    y = image(*whole)
    wanted = [y.detach(), *torch.autograd.grad((y * y).sum(), whole)]
    for mine, all_of_it, split in zip(outputs, wanted, (True, True, False), strict=True):
        own = local_part(all_of_it, layout, comm.rank) if split else all_of_it
        torch.testing.assert_close(mine.cpu(), own)
