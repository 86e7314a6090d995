"""ResNet-50 of torchvision, unchanged: results, and the gradients of all its parameters."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

pytestmark = pytest.mark.torchvision

#: The first convolution of each block is split by what it makes, the second by what it sums over.
CHANNELS: dict[str, Any] = {
    "layer*.conv1.weight": {"tp": Shard(0)}, "layer*.bn1.*": {"tp": Shard(0)},
    "layer*.conv2.weight": {"tp": Shard(1)},
}  # fmt: skip
ROWS: dict[str, Any] = {"*": {"fsdp": Shard(0)}, "input:0": {"fsdp": Shard(0)}}
#: mesh -> layouts, what is gathered, how many of which communication the forward posts.
MESHES: dict[str, tuple[DeviceMesh, dict[str, Any], tuple[str, ...], dict[str, int]]] = {
    "tp=2": (DeviceMesh.arange(tp=2), CHANNELS, (), {"Allreduce": 16}),
    "dp=2,tp=2": (
        DeviceMesh.arange(dp=2, tp=2), {**CHANNELS, "input:0": {"dp": Shard(0)}}, (),
        {"Allreduce": 16},
    ),
    "fsdp=4": (DeviceMesh.arange(fsdp=4), ROWS, ("fsdp",), {"Allgather": 267}),
}  # fmt: skip


def resnet() -> nn.Module:
    """The model in eval mode, f64, with statistics that are not 0 and 1."""
    from torchvision.models import resnet50

    torch.manual_seed(0)
    module: nn.Module = resnet50(num_classes=8)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(std=0.1)
            part.running_var.uniform_(0.5, 1.5)
    return module.eval().double()


@pytest.mark.parametrize("name", MESHES)
def test_resnet_50(name: str) -> None:
    mesh, layouts, gather, posts = MESHES[name]
    x = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = resnet()
    model = mf.from_torch(module, (x,), mesh=mesh, layouts=layouts, gather=gather)
    program = model.compile()
    assert Counter(c.kind for c in program.communications) == posts
    wanted = module(x)
    (found,) = mf.simulate(program, [*model.load(), x]).outputs
    torch.testing.assert_close(found, wanted.detach())
    step = model.training_step(lambda y: (y * y).mean(), optimizer=partial(mf.optim.sgd, lr=1.0))
    weights = model.load()
    given = step.arguments(weights, step.state(weights), x)
    state = step.updated(mf.simulate(step.compile(), given).outputs)
    (wanted * wanted).mean().backward()
    for key, w in module.named_parameters():
        torch.testing.assert_close(state[key], (w - w.grad).detach())
