"""States of models with experts, saved on one mesh of experts and read on another, to the bit."""

from __future__ import annotations

import copy
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.expert_models import MODELS, ids, inside_experts, module_of
from helpers.oracle import local_part
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.frontend.importing import load as loading
from mdfuse.frontend.importing import save as saving

IDS, EP, TOKENS = ids(), {"ep": Shard(0)}, {"input:*": {"ep": Shard(0)}}
#: Name -> mesh, layouts beside those of experts, axes whose parts are gathered.
MESHES: dict[str, tuple[DeviceMesh, dict[str, Any], tuple[str, ...]]] = {
    "ep=1": (DeviceMesh.arange(ep=1), TOKENS, ()),
    "ep=2": (DeviceMesh.arange(ep=2), TOKENS, ()),
    "ep=4": (DeviceMesh.arange(ep=4), TOKENS, ()),
    "ep=3, all tokens": (DeviceMesh.arange(ep=3), {}, ()),
    "ep=2, other ranks": (DeviceMesh([3, 1], axes=["ep"]), TOKENS, ()),
    "fsdp x ep": (
        DeviceMesh.arange(fsdp=2, ep=2),
        {
            "*": {"fsdp": Shard(0)},
            "*.experts.*": {"ep": Shard(0), "fsdp": Shard(1)},
            "input:*": {"fsdp": Shard(0), "ep": Shard(0)},
        },
        ("fsdp",),
    ),
    "ep x tp": (DeviceMesh.arange(ep=2, tp=2), TOKENS, ()),
    "tp x ep": (DeviceMesh.arange(tp=3, ep=2), TOKENS, ()),
}
ADAMW = partial(mf.optim.adamw, lr=0.1, eps=0.01)


@cache
def step_on(name: str, mesh: str) -> tuple[Any, Any, mf.Program]:
    """The model, its step of AdamW and the program of the step."""
    where, layouts, gather = MESHES[mesh]
    inside = inside_experts(name) if "tp" in mesh else {"*.experts.*": EP}
    kwargs = {"input_ids": IDS, "use_cache": False}
    model = mf.from_torch(
        module_of(name), (), kwargs, mesh=where, layouts={**inside, **layouts}, gather=gather
    )
    step = model.training_step(lambda y: (y * y).mean(), optimizer=ADAMW)
    return model, step, step.compile()


def stepped(name: str, mesh: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    model, step, program = step_on(name, mesh)
    weights = model.load()
    names = model.fusion.inputs
    weights = [state.get(n, w) for n, w in zip(names, weights, strict=False)]
    given = step.arguments(weights, {**step.state(weights), **state}, IDS)
    new: dict[str, Tensor] = step.updated(mf.simulate(program, given).outputs)
    return new


def parts(fusion: Any, state: dict[str, Tensor], rank: int) -> dict[str, Tensor | None]:
    return {
        n: local_part(x, fusion.layout(n), rank) if rank in fusion.layout(n).mesh else None
        for n, x in state.items()
    }


def save(fusion: Any, state: dict[str, Tensor], folder: Path, ranks: int) -> None:
    """What ranks do, one after the other."""
    for rank in range(ranks):
        of_rank = saving.parts_of_state(fusion, parts(fusion, state, rank), rank)
        saving.write_parts(folder, of_rank, rank)
    saving.finish_state(folder, fusion, state, ranks)


def read(fusion: Any, state: dict[str, Tensor], folder: Path, ranks: int) -> None:
    """Read each rank's parts, and compare them with those of the whole."""
    for rank in range(ranks):
        wanted = parts(fusion, state, rank)
        found = {n: torch.full_like(w, 7) for n, w in wanted.items() if w is not None}
        given = {**dict.fromkeys(wanted), **found}
        there = loading.state_of(folder, fusion, [*given], False)
        loading.copy_state(there, fusion, given, rank)
        for name, w in wanted.items():
            assert w is None or torch.equal(found[name], w), (name, rank)


def exact_steps(name: str, count: int) -> dict[str, Tensor]:
    """Parameters after some steps of torch's AdamW, in f64, by a loop over experts."""
    module: Any = copy.deepcopy(module_of(name)).double()
    module.set_experts_implementation("eager")
    adamw = torch.optim.AdamW(module.parameters(), **{**ADAMW.keywords, "weight_decay": 0.01})
    for _ in range(count):
        adamw.zero_grad()
        logits = module(input_ids=IDS, use_cache=False).logits
        (logits * logits).mean().backward()
        adamw.step()
    return dict(module.named_parameters())


@pytest.mark.parametrize("first", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_state_goes_on_on_other_meshes_of_experts(name: str, first: str, tmp_path: Path) -> None:
    """Each rank's boxes are read to the bit; the next step is torch's, in f64."""
    fusion = step_on(name, first)[2].fusion
    state = stepped(name, first, {})
    save(fusion, state, tmp_path, max(r for r in MESHES[first][0].ranks) + 1)
    then = random.Random(f"{name} {first}").sample([*MESHES], 2)
    for mesh in then:
        there = step_on(name, mesh)[2].fusion
        read(there, state, tmp_path, max(r for r in MESHES[mesh][0].ranks) + 1)
    new, wanted = stepped(name, then[0], state), exact_steps(name, 2)
    for key, w in wanted.items():
        torch.testing.assert_close(new[key].double(), w.detach(), rtol=1e-3, atol=2e-4)
