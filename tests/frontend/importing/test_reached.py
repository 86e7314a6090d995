"""Buffers that a module also reaches another way: by a list, or by a cache of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from helpers.causal import greedy, model_of, prompts
from torch import Tensor, nn

import mdfuse as mf

MESH = mf.DeviceMesh.arange(tp=2)


class Elsewhere(nn.Module):
    """Writes and reads its buffers by a list and a dict; the counter has no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(5, 4))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scale", torch.arange(4.0))
        self.held = [self.rows, {"count": self.count}]

    def forward(self, x: Tensor) -> tuple[Tensor, Any, Tensor]:
        rows, counts = self.held
        place = counts["count"] + torch.arange(len(x))
        rows.index_copy_(0, place, x)
        counts["count"].add_(len(x))
        return torch.cat([rows, x * self.scale]), counts["count"], torch.stack((rows[0], rows[4]))


def steps(module: Any, xs: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """What simulated ranks return, one run after the other."""
    model = mf.from_torch(module, xs[0], mesh=MESH)
    program, results = model.compile(), []
    weights = dict(zip(model.fusion.inputs, model.load(), strict=False))
    for x in xs:
        outputs = mf.simulate(program, [*weights.values(), *model.inputs(*x)]).outputs
        named = dict(zip(model.fusion.outputs, outputs, strict=True))
        for name, old in model.fusion.reuse.items():
            weights[old] = named.pop(name)
        results.append([*named.values()])
    return results


def test_they_stay_buffers() -> None:
    xs = [(torch.randn(2, 4),) for _ in range(2)]
    results, module = steps(Elsewhere(), xs), Elsewhere()
    for x, got in zip(xs, results, strict=True):
        wanted = module(*x)
        for a, b in zip((got[0], got[-1]), (wanted[0], wanted[2]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert module.count.item() == 4


def test_an_import_writes_nothing() -> None:
    """Not even a small tensor, which torch would write while it traces."""
    module = Elsewhere()
    model = mf.from_torch(module, (torch.ones(2, 4),), mesh=MESH)
    assert module.count.item() == 0 and not module.rows.any()
    assert {*model.fusion.reuse.values()} == {"rows", "count"}
    assert "writes 32 bytes" in str(model.compile())


class Cached(nn.Module):
    """A causal model with a static cache of transformers, whose tensors are buffers."""

    def __init__(self, model: Any, room: int) -> None:
        super().__init__()
        self.model, config = model, model.config
        self.cache = transformers.StaticCache(config=config, max_cache_len=room)
        self.cache.early_initialization(
            1, config.num_key_value_heads, config.head_dim, torch.float32, "cpu"
        )
        for n, layer in enumerate(self.cache.layers):
            for name in ("keys", "values", "cumulative_length"):
                self.register_buffer(f"{name}{n}", getattr(layer, name))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        said = {"past_key_values": self.cache, "use_cache": True}
        logits: Tensor = self.model(input_ids=ids, position_ids=positions, **said).logits
        return logits[:, -1]


def test_a_static_cache_of_transformers() -> None:
    """Written in place, a row a step: tokens are those of `generate`."""
    model = model_of("llama", num_hidden_layers=1)
    (ids,) = prompts([5])
    text = [*ids, *greedy(model, ids, 4)]
    xs = [(torch.tensor([[x]]), torch.tensor([[n]])) for n, x in enumerate(text)]
    module = Cached(model, 11)
    logits = [result for (result,) in steps(module, xs)]
    assert [int(x.argmax()) for x in logits[4:-1]] == text[5:]
    imported = mf.from_torch(module, xs[0], mesh=MESH)
    assert imported.fusion.reuse.keys() and module.cumulative_length0.item() == 0
    assert str(imported.compile()).count("writes 64 bytes") == 2
