"""Fused parameters as one input in blocks: posts, values, and parts of checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_models import MODELS
from torch import nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.frontend.importing import save as saving

TP = DeviceMesh.arange(tp=2)


def gpt2(module: nn.Module) -> Any:
    tiny = MODELS["gpt2"]
    layouts = tiny.layouts() | {
        "*.c_attn.weight": {"tp": Shard(1, blocks=3)},
        "*.c_attn.bias": {"tp": Shard(0, blocks=3)},
    }
    return mf.from_torch(module, tiny.args, tiny.kwargs, mesh=TP, layouts=layouts)


def test_a_fused_matrix_takes_two_reductions_per_layer() -> None:
    tiny = MODELS["gpt2"]
    module = tiny.module().eval()
    model = gpt2(module)
    program = model.compile()
    assert Counter(c.kind for c in program.communications) == {"Allreduce": 5}  # one looks up ids
    (logits,) = mf.simulate(program, [*model.load(), *tiny.args]).outputs[:1]
    torch.testing.assert_close(logits, module(*tiny.args).logits.detach())


def test_a_rank_reads_and_writes_its_pieces(tmp_path: Path) -> None:
    model = gpt2(MODELS["gpt2"].module())
    names = list(model.fusion.inputs)
    at = next(i for i, name in enumerate(names) if name.endswith("c_attn.weight"))
    whole = model.load()[at]
    q, k, v = whole.chunk(3, 1)
    for rank in range(2):
        mine = torch.cat([x.chunk(2, 1)[rank] for x in (q, k, v)], 1)
        assert torch.equal(model.load(rank=rank)[at], mine)
        saving.write(tmp_path, model.model, model.load(rank=rank), rank)
    saving.finish(tmp_path, model.model, 2)
    assert torch.equal(model.load(tmp_path)[at], whole)


class GatedUp(nn.Module):
    """A fused gate-up projection, and the projection back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, raised = self.up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * raised)


def test_a_fused_gate_takes_one_reduction() -> None:
    x, module = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), GatedUp()
    model = mf.from_torch(
        module, (x,), mesh=TP,
        layouts={"up.*": {"tp": Shard(0, blocks=2)}, "down.weight": {"tp": Shard(1)}},
    )  # fmt: skip
    program = model.compile()
    assert [c.kind for c in program.communications] == ["Allreduce"]
    torch.testing.assert_close(
        mf.simulate(program, [*model.load(), x]).outputs[0], module(x).detach()
    )
