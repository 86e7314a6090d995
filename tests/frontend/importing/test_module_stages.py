"""Imported modules in stages on several meshes, beside torch's on one device."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import causal
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, LayoutError, MdfuseError, Shard, TensorSpec
from mdfuse.frontend.importing.module_stages import _cuts

WORDS, LENGTH, WIDTH = 11, 5, 6
ROWS = {"dp": Shard(0)}
A, B, C = (DeviceMesh([2 * n, 2 * n + 1], axes=["dp"]) for n in range(3))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.GELU()
        self.down = nn.Linear(9, WIDTH)

    def forward(self, x: Tensor, bias: Tensor, mix: Tensor) -> Tensor:
        return x + mix @ self.down(self.act(self.up(self.norm(x)))) * bias


class Tiny(nn.Module):
    """Layers between a table and a head that may be one; all read a value, and a constant."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.between = nn.Tanh()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        x, bias = self.table(ids), weights.exp().unsqueeze(-1)
        mix = torch.ones(LENGTH, LENGTH, dtype=x.dtype).tril().expand(len(ids), -1, -1)
        for n, layer in enumerate(self.layers):
            x = layer(x, bias, mix)
            if n == 1:
                x = self.between(x)
        return self.head(self.norm(x)) * self.scale


def arguments(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(WORDS, (rows, LENGTH), generator=generator)
    return ids, torch.randn(rows, LENGTH, generator=generator).double()


def imported(module: nn.Module, stages: Any, **how: Any) -> Any:
    layouts = {"input:*": ROWS, **how.pop("layouts", {})}
    return mf.from_torch(module.double(), arguments(), stages=stages, layouts=layouts, **how)


def step_of(model: Any, mesh: Any, **how: Any) -> Any:
    return model.training_step(
        lambda y, labels: mf.ops.cross_entropy(y.flatten(0, 1), labels.flatten()),
        extra={"labels": TensorSpec((8, LENGTH), torch.int64, mesh, ROWS)},
        **{"optimizer": partial(mf.optim.sgd, lr=0.5, momentum=0.9), **how},
    )


def check(
    module: nn.Module, model: Any, step: Any, clip: float = 1e9, steps: int = 2
) -> mf.Program:
    """Steps are those of torch's SGD; returns their program, which takes seconds to compile."""
    labels = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(5))
    weights, program = model.load(), step.compile()
    state, module = step.state(weights), copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.5, 0.9)
    for _ in range(steps):
        given = step.arguments(weights, state, *arguments(), labels)
        outputs = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
        state = step.updated(outputs)
        optimizer.zero_grad()
        alone = F.cross_entropy(module(*arguments()).flatten(0, 1), labels.flatten())
        alone.backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        torch.testing.assert_close(outputs[0], alone.detach())
    for name, w in module.named_parameters():
        torch.testing.assert_close(state[name], w.detach())
    return program


NAMED = [
    (A, ["table", "layers.[01]"]),
    (B, ["between"]),
    (C, ["layers.[23]", "norm", "head"]),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("stages", "how"),
    [
        ([A, B], {"microbatches": 2}),
        ([A, B, C], {"microbatches": 4, "schedule": "gpipe", "clip": 0.2}),
        ([A, B, A, B], {"microbatches": 2, "schedule": "interleaved"}),
        ([A, B, B, A], {"microbatches": 4, "schedule": "zbv"}),
        (NAMED, {"microbatches": 2}),
        ([A, B], {"clip": 0.2}),
    ],
)
def test_steps_are_those_of_torch(stages: Any, how: dict[str, Any], tied: bool) -> None:
    """A value skips a stage, a stage has no parameters, a table is a head."""
    torch.manual_seed(1)
    module = Tiny(tied=tied)
    model = imported(module, stages)
    last = stages[-1][0] if isinstance(stages[-1], tuple) else stages[-1]
    step = step_of(model, last, **how)
    program = check(module, model, step, how.get("clip", 1e9))
    if "microbatches" in how:
        assert program.schedule.stages == len(stages)
    is_over = [c for c in program.communications if c.source.mesh != c.destination.mesh]
    assert not [c for c in is_over if c.shape == (8, LENGTH, LENGTH)]  # all have the constant
    gradient = [c for c in is_over if c.shape == (WORDS, WIDTH)]
    assert len(gradient) == (2 if tied and last != A else 0)  # the table there, its gradient back


BORDER = [
    (A, ["table", "layers.0", "layers.1.norm", "layers.1.up"]),
    (B, ["layers.1.act", "layers.1.down", "layers.[23]", "norm", "head"]),
]


@pytest.mark.parametrize(
    ("stages", "schedule", "again"),
    [
        (BORDER, "1f1b", "layers.*"),
        ([A, B, B, A], "zbv", lambda op: op not in ("linear", "matmul")),
        ([A, B], "gpipe", 200),
    ],
)
def test_blocks_end_where_stages_do(stages: Any, schedule: str, again: Any) -> None:
    """A hand-over is kept, also inside of a block; work on both sides is done again."""
    torch.manual_seed(1)
    module = Tiny(tied=True)
    last = stages[-1][0] if isinstance(stages[-1], tuple) else stages[-1]
    how: dict[str, Any] = {"microbatches": 2, "schedule": schedule}
    model = imported(module, stages, recompute=again)
    program = check(module, model, step_of(model, last, **how))
    programs = program, step_of(imported(module, stages), last, **how).compile()
    sent = [[c.source.mesh != c.destination.mesh for c in p.communications] for p in programs]
    assert sum(sent[0]) == sum(sent[1]) and "(recomputed)" in str(programs[0])


def test_each_stage_has_axes_of_its_own() -> None:
    """fsdp in one, tp in the other; states are split where parameters are not."""
    first = DeviceMesh([[0, 1], [2, 3]], axes=["dp", "fsdp"])
    second = DeviceMesh([[4, 5], [6, 7]], axes=["dp", "tp"])
    module = Tiny(2)
    layouts = {
        "*.weight": {"fsdp": Shard(0)},
        "*.up.weight": {"fsdp": Shard(0), "tp": Shard(0)},
        "*.up.bias": {"tp": Shard(0)},
        "*.down.weight": {"fsdp": Shard(0), "tp": Shard(1)},
    }
    model = imported(
        module,
        [(first, ["table", "layers.0"]), (second, ["layers.1", "norm", "head"])],
        layouts=layouts,
        gather=["fsdp"],
    )
    assert model.layout("layers.0.up.weight").placement("fsdp") == Shard(0)
    assert model.layout("layers.1.up.weight").placement("tp") == Shard(0)
    step = step_of(model, second, microbatches=2, state_layouts={"*": ROWS}, clip=0.3)
    assert step.fusion.layout("layers.0.norm.bias.v").placement("dp") == Shard(0)
    check(module, model, step, 0.3)


def test_a_report_lists_stages_and_ranks_hold_their_own() -> None:
    model = imported(Tiny(), [A, B])
    lines = [line.strip() for line in model.report().splitlines() if " stage " in line]
    assert lines == [
        "stage 0 on mesh(dp=2) (from rank 0): 13 parameters, table, layers.0, layers.1",
        "stage 1 on mesh(dp=2: 2 3) (from rank 2): 16 parameters, between, layers.2, layers.3, "
        "norm, head",
    ]
    held = [[w is not None for w in model.load(rank=r)] for r in (1, 2)]
    assert [sum(x) for x in held] == [14, 17]  # and a constant
    step = step_of(model, B)
    state = step.state(model.load(rank=1), rank=1)
    assert state["table.weight"] is not None and state["head.weight.v"] is None


def test_parts_are_equal() -> None:
    assert _cuts([0, 4, 4, 4, 0, 7], 2) == [3]
    assert _cuts([5, 1, 1, 1, 1, 1], 2) == [1]
    assert _cuts([1, 0, 1, 0, 1], 3) in ([1, 3], [2, 4], [1, 4], [2, 3])


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ([(A, ["table", "nothing.*"]), (B, ["head"])], r"stages\[0\]\['nothing.\*'\] matches no"),
        ([(A, ["table"]), (B, ["layers.*", "head"])], "norm of Tiny: in no stage"),
        ([(A, ["table", "layers.0"]), (B, ["layers.*", "norm", "head"])],
         "layers.0 .* in stages 0 and 1"),
        ([(A, ["table", "layers.[12]"]), (B, ["layers.[03]", "norm", "head"])],
         "layers.1.* is in stage 0, and reads what layers.0.* gives in stage 1"),
        ([A, B, C] * 4, "Tiny in 12 stages"),
        ([(A, ["table", "layers.*", "norm", "head"]), (B, ["between.act"])], "matches no sub"),
        ([(A, ["*", "layers.*"]), (B, [])], "stage 1 of Tiny computes nothing"),
        ([A, (B, ["head"])], "stages are meshes, or pairs"),
        ([(A, "table"), (B, ["head"])], "stages are meshes, or pairs"),
        ([], "stages are meshes, or pairs"),
    ],
)  # fmt: skip
def test_refused(stages: Any, match: str) -> None:
    with pytest.raises((DefinitionError, LayoutError), match=match) as error:
        imported(Tiny(), stages)
    assert error.value.hint


def test_a_mesh_or_stages() -> None:
    for how in ({}, {"mesh": A, "stages": [A, B]}):
        with pytest.raises(DefinitionError, match="mesh= and stages="):
            mf.from_torch(Tiny(), arguments(), **how)
    with pytest.raises(LayoutError, match="tp"):
        imported(Tiny(), [A, B], layouts={"*.up.weight": {"tp": Shard(0)}})
    with pytest.raises(MdfuseError):
        step_of(imported(Tiny(), [A, B]), A, microbatches=2).compile()


@pytest.mark.parametrize(
    ("name", "window", "axes", "how"),
    [
        ("gemma3", 3, {"cp": 2}, {"microbatches": 2, "schedule": "1f1b"}),
        ("mistral", 1, {"dp": 2, "cp": 2}, {}),
        ("mistral", 6, {"cp": 3}, {"microbatches": 4, "schedule": "gpipe"}),
    ],
)
def test_windows_in_stages(
    name: str, window: int, axes: dict[str, int], how: dict[str, Any], monkeypatch: Any
) -> None:
    """Positions are split within each stage; keys' gradients come in halos there."""
    monkeypatch.setitem(causal.MODELS, "mistral", ("MistralForCausalLM", "MistralConfig", {}))
    module = causal.model_of(name, sliding_window=window).double()
    n, where = math.prod(axes.values()), {"dp": Shard(0), "cp": Shard(1)}
    stages = [
        DeviceMesh(torch.arange(at, at + n).reshape(*axes.values()).tolist(), axes=[*axes])
        for at in (0, n)
    ]
    ids, labels = (torch.tensor(causal.prompts([8] * 4, seed)) for seed in (1, 2))
    split = {axis: where[axis] for axis in axes}
    given = {"input_ids": ids, "use_cache": False}
    model = mf.from_torch(module, (), given, stages=stages, layouts={"input:*": split})
    step = model.training_step(
        lambda y, labels: mf.ops.cross_entropy(y.flatten(0, 1), labels.flatten()),
        extra={"labels": TensorSpec(labels.shape, torch.int64, stages[-1], split)},
        optimizer=partial(mf.optim.sgd, lr=0.5, momentum=0.9),
        **how,
    )
    program, weights = step.compile(), model.load()
    assert "attention_halo_grad" in str(program)
    outputs = mf.simulate(program, step.arguments(weights, step.state(weights), ids, labels))
    state = step.updated(outputs.outputs)
    alone = F.cross_entropy(module(**given).logits.flatten(0, 1), labels.flatten())
    alone.backward()
    torch.testing.assert_close(outputs.outputs[0], alone.detach())
    for key, w in module.named_parameters():
        torch.testing.assert_close(state[key], w.detach() - 0.5 * w.grad)
