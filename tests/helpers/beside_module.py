"""An imported module beside the module: results, and the gradients of all its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.trees import flattened

#: mesh -> the axis that splits the rows of parameters, the one of inputs, what is gathered.
MESHES: Mapping[str, tuple[DeviceMesh, str, str, tuple[str, ...]]] = {
    "tp=2": (DeviceMesh.arange(tp=2), "tp", "", ()),
    "dp=2,tp=2": (DeviceMesh.arange(dp=2, tp=2), "tp", "dp", ()),
    "fsdp=4": (DeviceMesh.arange(fsdp=4), "fsdp", "fsdp", ("fsdp",)),
}


def numbers(*shape: int) -> Tensor:
    """The same numbers each time, f64."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64
    )


def check_beside(module: nn.Module, args: tuple[Tensor, ...], name: str) -> None:
    """Compare results, and a step of descent by rate 1, with the module's, on one of `MESHES`.

    Parameters are split along dim 0 where that divides, arguments where the mesh says.
    """
    mesh, axis, rows, gather = MESHES[name]
    named = dict(module.named_parameters())
    size = mesh.axis_size(axis)
    layouts = {
        key: {axis: Shard(0)} for key, w in named.items() if w.ndim and w.shape[0] % size == 0
    }
    if rows:
        layouts["input:0"] = {rows: Shard(0)}
    model = mf.from_torch(module, args, mesh=mesh, layouts=layouts, gather=gather)
    wanted = tensors(module(*args))
    found = mf.simulate(model.compile(), [*model.load(), *args]).outputs
    torch.testing.assert_close(tensors(model.outputs(found)), [y.detach() for y in wanted])
    step = model.training_step(squares, optimizer=partial(mf.optim.sgd, lr=1.0))
    weights = model.load()
    given = step.arguments(weights, step.state(weights), *args)
    state = step.updated(mf.simulate(step.compile(), given).outputs)
    squares(*wanted).backward()
    for key, w in named.items():
        assert w.grad is not None
        torch.testing.assert_close(state[key], (w - w.grad).detach())


def squares(*results: Any) -> Any:
    """A loss that all results have a part in."""
    return sum((n + 1) * ((x * x).mean() + x.mean()) for n, x in enumerate(results))


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of what a module returns."""
    return [x for _, x in flattened(tree)[0] if isinstance(x, Tensor)]
