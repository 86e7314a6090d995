"""Steps of imported modules in microbatches: gradients are those that torch accumulates."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_models import MODELS
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, Shard, TensorSpec

ROWS = {"dp": Shard(0)}


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(5, 9), nn.Linear(9, 3), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


def stepped(
    step: Any, model: Any, *inputs: Any, program: mf.Program | None = None
) -> tuple[list[Any], dict[str, Tensor]]:
    """What a step shows, and the state after it; `program`: where a test has compiled it."""
    weights = model.load()
    given = step.arguments(weights, step.state(weights), *inputs)
    outputs = mf.simulate(program or step.compile(), given, options=mf.Options(poison=True)).outputs
    return outputs[: len(outputs) - len(step.fusion.reuse)], step.updated(outputs)


def accumulated(module: nn.Module, loss: Any, parts: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Parameters after a step of descent, with gradients of several backwards."""
    module = copy.deepcopy(module)
    for part in parts:
        loss(module, *part).backward()
    return {n: (w - w.grad).detach() for n, w in module.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_losses_of_means_and_sums(reduction: str, count: int) -> None:
    """A mean is the mean over all microbatches: each counts by its part."""
    module, mesh = Net().double(), DeviceMesh.arange(dp=2)
    x, t = torch.randn(12, 5).double(), torch.randn(12, 3).double()
    model = mf.from_torch(module, (x,), mesh=mesh, layouts={"input:0": ROWS})
    step = model.training_step(
        lambda y, t: mf.ops.mse_loss(y, t, reduction=reduction),
        extra={"t": TensorSpec((12, 3), torch.float64, mesh, ROWS)},
        optimizer=partial(mf.optim.sgd, lr=1.0),
        microbatches=count,
    )
    program = step.compile()
    (loss,), state = stepped(step, model, x, t, program=program)
    torch.testing.assert_close(loss, F.mse_loss(module(x), t, reduction=reduction).detach())
    parts = [*zip(x.chunk(count), t.chunk(count), strict=True)]
    scale = count if reduction == "mean" else 1
    wanted = accumulated(
        module, lambda m, x, t: F.mse_loss(m(x), t, reduction=reduction) / scale, parts
    )
    torch.testing.assert_close(state, wanted)
    loops = [i for i in program.host.instructions if i.op == "for"]
    assert [i.kwargs["stop"] for i in loops] == [count]
    reductions = Counter(c.shape for c in program.communications)
    assert reductions == {(): 1, (9, 5): 1, (9,): 1, (3, 9): 1, (3,): 1}  # once, behind the loop


def test_labels_that_are_ignored_count_over_the_whole_batch() -> None:
    """As with the `num_items_in_batch` of transformers: each label counts once."""
    tiny, mesh = MODELS["llama"], DeviceMesh.arange(dp=2)
    module = tiny.module().double()
    ids = torch.randint(64, (8, 7), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:3, :5], labels[6] = -100, -100
    model = mf.from_torch(
        module, (), {"input_ids": ids, "labels": labels}, mesh=mesh, layouts={"input:*": ROWS}
    )
    step = model.training_step(optimizer=partial(mf.optim.sgd, lr=1.0), microbatches=2)
    (loss,), state = stepped(step, model, ids, labels)
    rows = [torch.tensor(n) for n in ([0, 1, 4, 5], [2, 3, 6, 7])]  # those of both ranks
    count = (labels[:, 1:] != -100).sum()
    wanted = accumulated(
        module,
        lambda m, i, y: m(input_ids=i, labels=y, num_items_in_batch=count).loss,
        [(ids[r], labels[r]) for r in rows],
    )
    torch.testing.assert_close(loss, module(input_ids=ids, labels=labels).loss.detach())
    torch.testing.assert_close({n: state[n] for n in wanted}, wanted)


def test_dropout_draws_as_for_the_whole_batch() -> None:
    """So masks of microbatches differ."""
    module, x, mesh = Net(0.5).train(), torch.ones(8, 5), DeviceMesh.arange(dp=2)
    model = mf.from_torch(module, (x,), mesh=mesh, layouts={"input:0": ROWS})
    made = [
        model.training_step(
            lambda y: ((y * y).mean(), y), optimizer=partial(mf.optim.sgd, lr=0.1), microbatches=k
        )
        for k in (1, 4)
    ]
    (once, in_parts) = (stepped(step, model, x, 7) for step in made)
    torch.testing.assert_close(once, in_parts)
    assert len({*map(tuple, in_parts[0][1].tolist())}) == 8


@pytest.mark.parametrize("shards", [1, 2])
def test_one_batch_of_a_dim_that_is_named(shards: int) -> None:
    """Rows in the second dim, and an input of the loss that has them."""
    module, x = nn.GRU(3, 4).double(), torch.randn(5, 6, 3).double()
    mesh, layout = DeviceMesh.arange(dp=shards), {"dp": Shard(1)}
    model = mf.from_torch(module, (x,), mesh=mesh, layouts={"input:0": layout})

    def loss(y: Any, last: Any) -> Any:
        return (y * y).mean()

    how = {"optimizer": partial(mf.optim.sgd, lr=1.0)}
    step = model.training_step(loss, microbatches=3, batch={"input": 1}, **how)
    program = step.compile()
    assert any(i.op == "for" for i in program.host.instructions)
    torch.testing.assert_close(
        stepped(step, model, x, program=program),
        stepped(model.training_step(loss, **how), model, x),
    )


def test_rows_that_each_run_chooses() -> None:
    x, mesh = torch.randn(8, 5), DeviceMesh.arange(dp=2)
    model = mf.from_torch(
        Net(), (x,), mesh=mesh, layouts={"input:0": ROWS}, dynamic_shapes={"x": {0: "rows"}}
    )
    how = {"optimizer": partial(mf.optim.sgd, lr=1.0)}
    whole = model.training_step(lambda y: (y * y).mean(), **how)
    step = model.training_step(lambda y: (y * y).mean(), microbatches=2, **how)
    for rows in (8, 12):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(stepped(step, model, x), stepped(whole, model, x))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"microbatches": 4}, "4 microbatches of 6 rows"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"microbatches": True}, "microbatches=True"),
        ({"microbatches": 2, "batch": {"y": 0}}, "a run passes input, t"),
        ({"microbatches": 2, "batch": {"input": 2}}, "has 2 dims"),
    ],
)
def test_refused(how: dict[str, Any], match: str) -> None:
    mesh = DeviceMesh.arange(dp=2)
    model = mf.from_torch(
        nn.Linear(5, 3), (torch.zeros(12, 5),), mesh=mesh, layouts={"input:0": ROWS}
    )
    with pytest.raises(DefinitionError, match=match) as error:
        model.training_step(
            lambda y, t: (y * t).mean(),
            extra={"t": TensorSpec((12, 3), layout=ROWS)},
            optimizer=mf.optim.sgd,
            **how,
        )
    assert error.value.hint


def test_batch_norm_is_that_of_the_whole_batch() -> None:
    """Statistics, and what is written of them, are those of all rows: a loop for each."""
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, mesh = torch.randn(12, 5).double(), DeviceMesh.arange(dp=2)
    model = mf.from_torch(module, (x,), mesh=mesh, layouts={"input:0": ROWS})
    how = {"optimizer": partial(mf.optim.sgd, lr=1.0)}
    step = model.training_step(lambda y: (y * y).mean(), microbatches=3, **how)
    program = step.compile()
    _, state = stepped(step, model, x, program=program)
    wanted = accumulated(module, lambda m: m(x).pow(2).mean(), [()])
    torch.testing.assert_close({n: state[n] for n in wanted}, wanted)
    module(x)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            torch.testing.assert_close(state[name], buffer)
    assert "loops, one after the other" in program.explain()


def test_what_comes_once_is_explained() -> None:
    x, mesh = torch.randn(8, 5), DeviceMesh.arange(fsdp=2)
    split = {"fsdp": Shard(0)}
    model = mf.from_torch(
        Net(), (x,), mesh=mesh, layouts={"*": split, "input:0": split}, gather=["fsdp"]
    )
    step = model.training_step(
        lambda y: (y * y).mean(), optimizer=partial(mf.optim.sgd, lr=1.0), microbatches=2
    )
    text = [line.strip() for line in step.compile().explain().splitlines()]
    lines = [line for line in text if line.startswith("microbatches: ")]
    assert lines == [  # 9 and 3 rows come in two even blocks: 100 elements
        "microbatches: 4 gathers once, before them: 400 B on a rank stay until they are read last",
        "microbatches: 5 values added up, 340 B on a rank; 5 reductions once, behind them",
    ]
    assert "microbatches: 2, along dim 0 of x" in step.report()
