"""What a running step says of its speed, and how it takes its part of a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mdfuse as mf
from mdfuse import DeviceMesh, ProgramError, Shard
from mdfuse.compiled.step_stats import StepStats, flops_of
from mdfuse.compiled.training import TrainingStep

ROWS, LENGTH, CLASSES, WIDTH = 6, 5, 11, 4


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.emb(ids))
        return out


def training(size: int, **how: Any) -> tuple[Any, TrainingStep, torch.Tensor]:
    split = {"dp": Shard(0)}
    ids = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % CLASSES
    model = mf.from_torch(
        Words(), (ids,), mesh=DeviceMesh.arange(dp=size), layouts={"input:0": split}
    )
    step = model.training_step(
        lambda y, labels: mf.ops.cross_entropy(y.flatten(0, 1), labels.flatten()),
        optimizer=mf.optim.sgd,
        extra={"labels": mf.TensorSpec((ROWS, LENGTH), torch.int64, layout=split)},
        **how,
    )
    return model, step, ids


def test_figures_of_a_running_step() -> None:
    model, step, ids = training(1, skip_nonfinite=True)
    running = step.start(model.load())
    with pytest.raises(ProgramError, match=r"stats of no step(.|\n)*but for the first"):
        running.stats()
    for _ in range(4):
        running(ids, ids, torch.tensor(0.1))
    stats = running.stats(peak=1e9)
    products = 2 * 3 * ROWS * LENGTH * CLASSES * WIDTH  # y, the gradients of x and of the weight
    assert (stats.steps, stats.flops, stats.skipped) == (3, products, 0)
    assert stats.tokens_per_s == pytest.approx(ROWS * LENGTH / stats.seconds)
    assert stats.mfu == pytest.approx(products / stats.seconds / 1e9)
    assert stats.memory is None and "3 steps of" in str(stats) and "MFU" in str(stats)
    with pytest.raises(ProgramError, match="stats of no step"):
        running.stats()
    broken = [None if w is None else w * torch.nan for w in running.weights]
    for name, w in zip(("emb.weight", "head.weight"), broken, strict=True):
        running.state[name].copy_(w)  # type: ignore[union-attr,arg-type]
    running(ids, ids, torch.tensor(0.1))
    again = running.stats(tokens=7, flops=100.0)
    assert (again.steps, again.flops, again.mfu, again.skipped) == (1, 100.0, None, 1)
    assert again.tokens_per_s == pytest.approx(7 / again.seconds)
    assert "1 skipped" in str(again) and "MFU" not in str(again)


def test_text() -> None:
    stats = StepStats(steps=1, seconds=1.0, tokens_per_s=None, flops=0, mfu=None,
                      memory=1 << 30, skipped=0)  # fmt: skip
    assert str(stats) == "1 step of 1000 ms, 1.00 GiB"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations_are_those_of_a_rank(size: int) -> None:
    """In chunks, and with a head that is computed again, they are as many."""
    _, step, _ = training(size)
    products = 2 * 3 * (ROWS // size) * LENGTH * CLASSES * WIDTH
    for most in (0, 200):
        assert flops_of(step.compile(mf.Options(logits_bytes=most)).host, 0) == products
    with mf.FusionDefinition("again") as fd:
        x, w = fd.define_tensor([3, 4]), fd.define_tensor([5, 4])
        with mf.recompute():
            y = mf.ops.tanh(mf.ops.linear(x, w))
        for out in (y, *mf.grad((y * y).sum(), [x, w])):
            fd.add_output(out)
    assert flops_of(mf.compile(fd).host, 0) == 3 * 2 * 3 * 4 * 5


def test_parts_of_a_batch() -> None:
    _, step, ids = training(3)
    for rank in range(3):
        rows = slice(2 * rank, 2 * rank + 2)
        part, labels = step.shard(ids, ids[rows], rank=rank)
        assert part is not None and labels is not None
        assert torch.equal(part, ids[rows]) and torch.equal(labels, ids[rows])
    lr = torch.tensor(0.1)
    assert step.shard(ids, ids, lr, rank=1)[2] is not None
    assert step.shard(ids, rank=7) == [None]


def test_a_seed_stays_a_number() -> None:
    x, split = torch.ones(6, 4), {"dp": mf.Shard(0)}
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)).train()
    model = mf.from_torch(module, (x,), mesh=mf.DeviceMesh.arange(dp=1), layouts={"input:0": split})
    step = model.training_step(lambda y: (y * y).sum(), optimizer=mf.optim.sgd)
    batch = {"input": x, "seed": 7, "lr": torch.tensor(0.1)}
    running = step.start(model.load())
    parts = running.shard(*(batch[name] for name in step.inputs))
    assert parts[step.inputs.index("seed")] == 7
    assert running(*parts).shape == ()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (torch.zeros(3, LENGTH),),
            r"input is Tensor \[3, 5\](.|\n)*part of rank 0 is \[2, 5\]|ids",
        ),
        ((torch.zeros(ROWS, LENGTH - 1),), r"\[6, 4\](.|\n)*whole has \[6, 5\]"),
        ((5,), "ids is int"),
        ((), "shard of 0 tensors"),
        ((torch.zeros(ROWS, LENGTH),) * 5, "shard of 5 tensors"),
    ],
)
def test_batches_of_wrong_sizes(batch: Any, message: str) -> None:
    _, step, _ = training(3)
    with pytest.raises(ProgramError, match=message):
        step.shard(*batch, rank=0)


def test_a_running_step_takes_its_part() -> None:
    model, step, ids = training(1)
    running = step.start(model.load())
    loss = running(*running.shard(ids, ids), torch.tensor(0.1))
    assert loss.shape == ()
    with pytest.raises(ProgramError, match="keeps none"):
        _ = running.averages


def test_averages_of_a_running_step() -> None:
    model, _, ids = training(1)
    step = model.training_step(
        lambda y: (y * y).mean(),
        optimizer=mf.optim.averaged(partial(mf.optim.sgd, lr=0.1), decay=0.5),
    )
    running = step.start(model.load())
    running(ids)
    first = [None if w is None else w.clone() for w in running.weights]
    running(ids)
    for average, before, now in zip(running.averages, first, running.weights, strict=True):
        assert average is not None and before is not None and now is not None
        torch.testing.assert_close(average, (before + now) / 2)
