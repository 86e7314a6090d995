"""States that are split where parameters are not: ZeRO, beside torch's AdamW."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, LayoutError, ProgramError, Shard, TensorSpec

SPLIT = {"dp": Shard(0)}


class Odd(nn.Module):
    """Parameters of uneven extents, of one element, and of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x))) * self.scale + self.one


def step_of(module: nn.Module, mesh: DeviceMesh, layouts: dict[str, Any], **how: Any) -> Any:
    dtype = next(module.parameters()).dtype
    x = torch.randn(12, 5, dtype=dtype)
    model = mf.from_torch(module, (x,), mesh=mesh, layouts={"input:0": SPLIT, **layouts})
    step = model.training_step(
        lambda y, target: mf.ops.mse_loss(y, target),
        extra={"target": TensorSpec((12, 3), dtype, mesh, SPLIT)},
        optimizer=partial(mf.optim.adamw, lr=0.1),
        **how,
    )
    return model, step, x, torch.randn(12, 3, dtype=dtype)


ROWS = {"first.*": {"tp": Shard(0)}, "second.weight": {"tp": Shard(1)}}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("mesh", "layouts"), [(DeviceMesh.arange(dp=3), {}), (DeviceMesh.arange(dp=2, tp=2), ROWS)]
)
def test_steps_are_those_of_adamw(
    mesh: DeviceMesh, layouts: dict[str, Any], microbatches: int
) -> None:
    module = Odd().double()
    model, step, x, t = step_of(
        module, mesh, layouts, clip=0.3, state_layouts={"*": SPLIT}, microbatches=microbatches
    )
    weights, program = model.load(), step.compile()
    state = step.state(weights)
    adamw = torch.optim.AdamW(module.parameters(), 0.1)
    for _ in range(3):
        outputs = mf.simulate(program, step.arguments(weights, state, x, t)).outputs
        state = step.updated(outputs)
        adamw.zero_grad()
        alone = F.mse_loss(module(x), t)
        alone.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        torch.testing.assert_close(outputs[:2], [alone.detach(), norm])
        adamw.step()
    for name, w in module.named_parameters():
        torch.testing.assert_close(state[name], w.detach())
        assert step.fusion.layout(name).placement("dp") != Shard(0)
        is_split = step.fusion.layout(f"{name}.m").placement("dp") == Shard(0)
        assert is_split == (w.ndim > 0)


def test_a_step_sends_what_it_sent_without() -> None:
    """A reduce-scatter and a gather of each parameter: the bytes of its all-reduce."""
    module, mesh = nn.Linear(8, 6), DeviceMesh.arange(dp=2)
    x = torch.zeros(4, 8)
    model = mf.from_torch(module, (x,), mesh=mesh, layouts={"input:0": SPLIT})

    def posts(**how: Any) -> Counter[tuple[str, tuple[int, ...]]]:
        step = model.training_step(lambda y: (y * y).mean(), optimizer=mf.optim.sgd, **how)
        return Counter((c.kind, c.shape) for c in step.compile().communications if c.shape)

    assert posts() == {("Allreduce", (6, 8)): 1, ("Allreduce", (6,)): 1}
    assert posts(state_layouts={"*": SPLIT}) == {
        (kind, shape): 1 for kind in ("ReduceScatter", "Allgather") for shape in ((6, 8), (6,))
    }


def test_masters_are_split_and_what_is_gathered_has_16_bits() -> None:
    module, mesh = Odd().bfloat16(), DeviceMesh.arange(dp=4)
    model, step, x, t = step_of(module, mesh, {}, master=True, state_layouts={"*": SPLIT})
    _, plain, _, _ = step_of(module, mesh, {}, master=True)
    weights = model.load()
    states = []
    for made in (step, plain):
        state = made.state(weights)
        for _ in range(3):
            given = made.arguments(weights, state, x, t)
            state = made.updated(mf.simulate(made.compile(), given).outputs)
        states.append(state)
    torch.testing.assert_close(*states)
    gathers = [c for c in step.compile().communications if c.kind == "Allgather" and c.shape]
    assert {c.dtype for c in gathers if c.shape != (1,)} == {torch.bfloat16}


def test_each_rank_has_its_part_of_the_state() -> None:
    module, mesh = Odd(), DeviceMesh.arange(dp=2, tp=2)
    model, step, _, _ = step_of(
        module.bfloat16(), mesh, ROWS, master=True, state_layouts={"*": SPLIT}
    )
    whole = step.state(model.load())
    for rank in range(4):
        state = step.state(model.load(rank=rank), rank=rank)
        for name, x in state.items():
            layout, shape = step.fusion.layout(name), step.fusion.values[name].shape
            part = whole[name][tuple(slice(*i) for i in layout.box(shape, rank))]
            torch.testing.assert_close(x, part)
    with pytest.raises(ProgramError, match=r"first.weight of the shape \[3, 5\]"):
        step.state(model.load(rank=1))


def test_some_parameters_and_blocks_of_one() -> None:
    """The longest pattern counts; blocks of a matrix are states of their own."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0).double()
    x, mesh = torch.randn(4, 3, 8, dtype=torch.float64), DeviceMesh.arange(dp=2)
    model = mf.from_torch(
        layer, (x,), mesh=mesh, blocks={"*.in_proj_*": {0: 3}}, layouts={"input:0": SPLIT}
    )
    step = model.training_step(
        lambda y: (y * y * y).mean(),
        optimizer=partial(mf.optim.sgd, lr=1.0, momentum=0.9),
        state_layouts={"*": SPLIT, "linear?.*": {}, "linear1.weight": {"dp": Shard(1)}},
    )
    dims = {
        "self_attn.in_proj_weight.1.v": Shard(0),
        "linear1.weight.v": Shard(1),
        "linear2.weight.v": mf.Replicate(),
    }
    assert {n: step.fusion.layout(n).placement("dp") for n in dims} == dims
    weights = model.load()
    outputs = mf.simulate(step.compile(), step.arguments(weights, step.state(weights), x)).outputs
    layer(x).pow(3).mean().backward()
    w = layer.self_attn.in_proj_weight
    assert w.grad is not None
    new = step.updated(outputs)
    torch.testing.assert_close(
        torch.cat([new[f"self_attn.in_proj_weight.{n}"] for n in range(3)]), (w - w.grad).detach()
    )


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"third.*": SPLIT}, r"state_layouts\['third.\*'\] matches nothing"),
        ({"*": {"fsdp": Shard(0)}}, "fsdp"),
        ({"first.*": {"dp": Shard(1)}}, "state_layouts.*for first.bias"),
        ({"first.weight": {"tp": Shard(1)}}, "a part of what a rank has"),
        ({"first.weight": {"dp": mf.Partial()}}, "state_layouts.*first.weight"),
    ],
)
def test_refused(said: dict[str, Any], match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        step_of(Odd(), DeviceMesh.arange(dp=2, tp=2), ROWS, state_layouts=said)
