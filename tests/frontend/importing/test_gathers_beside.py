"""Positions split beside other axes, in stages, microbatches and recompute: a step is torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import mdfuse as mf
from frontend.importing.test_gathers_positions import SMALL, transformers
from mdfuse import DeviceMesh, Options, Shard

FSDP = {"layouts": {"model.*": {"cp": Shard(0)}}, "gather": "cp"}
_ATTENTION = "model.layers.*.self_attn"
TP = {"layouts": {f"{_ATTENTION}.{x}_proj.weight": {"tp": Shard(int(x == "o"))} for x in "qkvo"}}
AGAIN = {"recompute": ["model.layers.*"]}
#: axes, of each stage; rows of the batch; what the import, the step and the compiler are told.
CASES: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {
    "parameters, ring, again": ({"cp": 2}, 1, {**FSDP, **AGAIN, "context": "ring"}),
    "parameters, heads": ({"cp": 2}, 1, {**FSDP, "context": "heads"}),
    "logits in chunks": ({"cp": 2}, 1, {**AGAIN, "context": "ring", "logits_bytes": 512}),
    "three, again": ({"cp": 3}, 1, {**AGAIN, "context": "ring"}),
    "plain, again": ({"cp": 3}, 1, {**AGAIN, "context": "ring", "plain": True}),
    "tp inside": ({"cp": 2, "tp": 2}, 1, {**TP, "context": "ring"}),
    "tp outside": ({"tp": 2, "cp": 2}, 1, {**TP, "context": "heads"}),
    "dp": ({"dp": 2, "cp": 2}, 3, {"context": "ring"}),
    "microbatches": ({"cp": 2}, 4, {"microbatches": 2, "context": "heads"}),
    "stages": ({"cp": 2}, 1, {"stages": 2, "context": "ring", "plain": True}),
    "stages, microbatches, again": ({"cp": 2}, 4, {**AGAIN, "stages": 2, "microbatches": 2}),
}


def module_of(layers: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": layers})
    return transformers.LlamaForCausalLM(config).double().train()


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_torchs(name: str) -> None:
    """Documents in each row; lengths that the ranks do not divide."""
    axes, batch, told = CASES[name]
    module, count = module_of(told.get("stages", 1)), told.get("microbatches")
    zigzag = not told.get("plain")
    ids = torch.randint(3, 48, (batch, 11), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in (4, 1, 6)]).expand(batch, -1).contiguous()
    given = {"input_ids": ids, "labels": ids, "position_ids": positions}
    split = {"cp": Shard(1, zigzag=zigzag), **({"dp": Shard(0)} if "dp" in axes else {})}
    layouts = {"input:*": split, "output:logits": split, **told.get("layouts", {})}
    ranks = np.arange(12).reshape(-1, *axes.values())
    meshes = [DeviceMesh(x.tolist(), axes=(*axes,)) for x in ranks]
    where = {"stages": meshes[:2]} if "stages" in told else {"mesh": meshes[0]}
    where |= {k: told[k] for k in ("gather", "recompute") if k in told}
    model = mf.from_torch(module, (), {**given, "use_cache": False}, layouts=layouts, **where)
    batches = {"microbatches": count, "batch": dict.fromkeys(given, 0)} if count else {}
    step = model.training_step(
        lambda loss, logits: loss, optimizer=partial(mf.optim.sgd, lr=1.0), **batches
    )
    how = {k: told[k] for k in ("context", "logits_bytes") if k in told}
    program, weights = step.compile(options=Options(**how)), model.load()
    ran = mf.simulate(program, step.arguments(weights, step.state(weights), *given.values()))
    for part in zip(*(x.chunk(count or 1) for x in given.values()), strict=True):
        loss = module(**dict(zip(given, part, strict=True)), use_cache=False).loss
        (loss / (count or 1)).backward()
    for parameter, w in module.named_parameters():
        assert w.grad is not None and w.grad.isfinite().all()
        updated = step.updated(ran.outputs)[parameter]
        torch.testing.assert_close(updated, w.detach() - w.grad, atol=2e-7, rtol=2e-7)
    asked = f"{told['context']}, as context= asks" if "context" in told else "gather"
    assert f"positions split along cp: {asked}" in program.explain()
