"""Buffers: those of checkpoints are read, the others are known, on the meta device made again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.tiny_models import MODELS
from safetensors.torch import save_file
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, Shard

TP = DeviceMesh.arange(tp=2)


class Scaled(nn.Module):
    """A buffer that is kept, one that is not, and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(1.0, 5.0))
        self.register_buffer("offset", torch.tensor([4.0, 2.0, 9.0, 7.0]), persistent=False)
        self.register_buffer("steps", torch.tensor([1, 1, 1, 1]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.offset.sqrt() * self.steps


class Reset(Scaled):
    """It can set what is not kept."""

    def reset_parameters(self) -> None:
        self.offset.copy_(torch.tensor([4.0, 2.0, 9.0, 7.0]))


def test_a_kept_buffer_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    x, module = torch.randn(2, 4), Scaled()
    model = mf.from_torch(module, (x,), mesh=TP, layouts={"scale": {"tp": Shard(0)}})
    assert model.fusion.inputs[0] == "scale" and "steps" not in model.fusion.inputs
    trained = {"scale": torch.tensor([5.0, -1.0, 2.0, 3.0]), "steps": torch.tensor([1, 1, 1, 1])}
    save_file(trained, tmp_path / "model.safetensors")
    found = model.load(tmp_path)
    (y,) = mf.simulate(model.compile(), [*found, x]).outputs
    torch.testing.assert_close(y, x * trained["scale"] + torch.tensor([4.0, 2.0, 9.0, 7.0]).sqrt())
    assert "not read" not in model.report()


def test_what_is_not_kept_must_be_known() -> None:
    with torch.device("meta"):
        bare, able = Scaled(), Reset()
    x = torch.randn(2, 4)
    with pytest.raises(DefinitionError, match="the buffer offset has no numbers"):
        mf.from_torch(bare, (x,), mesh=TP)
    said = {"offset": torch.tensor([1.0, 1.0, 4.0, 9.0]), "steps": torch.tensor([1, 1, 1, 1])}
    model = mf.from_torch(bare, (x,), mesh=TP, buffers=said)
    (y,) = mf.simulate(model.compile(), [*model.load({"scale": torch.ones(4)}), x]).outputs
    torch.testing.assert_close(y, x + torch.tensor([1.0, 1.0, 2.0, 3.0]))
    model = mf.from_torch(able, (x,), mesh=TP, buffers={"steps": said["steps"]})
    (y,) = mf.simulate(model.compile(), [*model.load({"scale": torch.ones(4)}), x]).outputs
    torch.testing.assert_close(y, x + torch.tensor([4.0, 2.0, 9.0, 7.0]).sqrt())
    assert able.offset.is_meta  # the module is as it was


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "vit"])
def test_models_on_the_meta_device(name: str) -> None:
    """Rotary frequencies and positions are made again; numbers come from the checkpoint."""
    tiny = MODELS[name]
    module = tiny.module()
    with torch.device("meta"):
        empty = tiny.make().eval().double()
    model = mf.from_torch(
        empty, tiny.args, tiny.kwargs, mesh=TP, layouts=tiny.layouts(), blocks=tiny.blocks
    )
    weights = model.load(module.state_dict())
    given = [*weights, *model.inputs(*tiny.args, **tiny.kwargs)]
    result = model.outputs(mf.simulate(model.compile(), given).outputs)
    with torch.no_grad():
        wanted = module(*tiny.args, **tiny.kwargs)
    torch.testing.assert_close(result[0], wanted[0], rtol=1e-6, atol=1e-9)
