"""Stages that few programs have: without work, with a loss of their own, two on one mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.pipelines import meshes
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

D = torch.float64
POISON = mf.Options(poison=True)

#: value, number of its stage -> the value there
Move = Callable[[Any, int], Any]
#: what a model computes, of x, aims, weights, and how to hand over
Model = Callable[[Any, list[Any], list[Any], Move], Any]


def loss_of_an_early_stage(x: Any, aims: list[Any], w: list[Any], move: Move) -> Any:
    """Its gradient begins on the mesh of the last stage, too."""
    h = F.rms_norm(x, [4], w[0][0])
    y = F.linear(move(h, 1), w[1])
    return (h - aims[0]).abs().sum() + F.mse_loss(y, aims[1])


def labels(x: Any, aims: list[Any], w: list[Any], move: Move) -> Any:
    """Their mesh has two stages; the gradient computes again what follows from them alone."""
    h = F.linear(x, w[0])
    y = F.linear(move(h, 1), w[1]).sin()
    z = F.linear(move(y, 2), w[2]) * move(h, 2).cos()
    return F.mse_loss(y, aims[1]) + F.cross_entropy(z, (aims[2][:, 0] > 0).to(torch.int64))


def stages_without_work(x: Any, aims: list[Any], w: list[Any], move: Move) -> Any:
    h = F.linear(move(x, 1), w[1])
    return F.mse_loss(move(move(h, 2), 3), aims[3])


def inputs_on_their_way(x: Any, aims: list[Any], w: list[Any], move: Move) -> Any:
    return F.mse_loss(F.linear(move(move(x, 1), 2), w[2]), aims[2])


#: Model, the mesh of each stage, and the stages with weights.
CASES: dict[str, tuple[Model, list[int], list[int]]] = {
    "a loss of its own": (loss_of_an_early_stage, [0, 0], [0, 1]),
    "labels": (labels, [0, 1, 1], [0, 1, 2]),
    "no work in the middle": (stages_without_work, [0, 1, 2, 3], [1]),
    "an input on its way": (inputs_on_their_way, [0, 1, 2], [2]),
}


def define(name: str, rows: int) -> tuple[mf.FusionDefinition, list[Tensor]]:
    model, places, trained = CASES[name]
    every = [meshes(1 + max(places))[n] for n in places]
    generator = torch.Generator().manual_seed(0)
    shapes = [[rows, 4], *[[rows, 4]] * len(every), *[[4, 4]] * len(every)]
    given = [torch.randn(s, generator=generator, dtype=D) for s in shapes]
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([rows, 4], D, every[0], name="x")
        aims = [fd.define_tensor([rows, 4], D, m, name=f"aim{n}") for n, m in enumerate(every)]
        weights = [fd.define_tensor([4, 4], D, m, name=f"w{n}") for n, m in enumerate(every)]
        loss = model(x, aims, weights, lambda h, n: fd.ops.set(h).on(every[n], {}))
        for y in (loss, *mf.grad(loss, [weights[n] for n in trained])):
            fd.add_output(y)
    return fd, given


def check(name: str, program: mf.Program, given: list[Tensor]) -> None:
    model, places, trained = CASES[name]
    x, *rest = (g.clone().requires_grad_() for g in given)
    aims, weights = rest[: len(places)], rest[len(places) :]
    loss = model(x, aims, weights, lambda h, _: h)
    wanted = [loss.detach(), *torch.autograd.grad(loss, [weights[n] for n in trained])]
    for seed in (None, 0):
        found = mf.simulate(program, given, options=POISON, schedule=seed).outputs
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def in_turn(places: list[int], back: str) -> mf.Schedule:
    """One microbatch after the other; gradients of weights last, where they are by themselves."""
    rows: list[list[str]] = [[] for _ in range(1 + max(places))]
    for k in (0, 1):
        for s, place in enumerate(places):
            rows[place].append(f"{s}F{k}")
        for s, place in reversed([*enumerate(places)]):
            rows[place].append(f"{s}{back[0]}{k}")
    for s, place in enumerate(places if len(back) > 1 else []):
        rows[place] += [f"{s}W0", f"{s}W1"]
    return mf.Schedule.from_rows(rows)


@pytest.mark.parametrize("back", ["B", "IW"])
@pytest.mark.parametrize("name", CASES)
def test_stages(name: str, back: str) -> None:
    fd, given = define(name, 5)
    batch = {n: 0 for n in fd.fusion.inputs if not n.startswith("w")}
    table = in_turn(CASES[name][1], back)
    check(name, mf.pipeline(fd, microbatches=2, batch=batch, schedule=table), given)


def test_stages_without_work_are_a_chain() -> None:
    name = "no work in the middle"
    fd, given = define(name, 6)
    batch = {"x": 0, "aim3": 0}
    check(name, mf.pipeline(fd, microbatches=3, batch=batch, schedule="1f1b"), given)


@pytest.mark.parametrize(("schedule", "waits"), [("1f1b", 9), ("interleaved", 2)])
def test_what_hand_overs_add_to_a_step(schedule: str, waits: int) -> None:
    """One way for each microbatch, and the way back; where more are begun, of the first alone."""
    first, second = meshes(2)
    with mf.FusionDefinition("net") as fd:
        x, t = (fd.define_tensor([64, 8], D, m, name=n) for m, n in ((first, "x"), (second, "t")))
        w, v = (fd.define_tensor([8, 8], D, m) for m in (first, second))
        loss = (F.linear(fd.ops.set(F.linear(x, w)).on(second, {}), v) * t).sum()
        for y in (loss, *mf.grad(loss, [x, w, v])):
            fd.add_output(y)
    program = mf.pipeline(fd, microbatches=8, batch={"x": 0, "t": 0}, schedule=schedule)
    unit, away = 2.0 * 8 * 8 * 8, 20.0  # operations of a product, a second each
    link = mf.seeing.Link(away, 1e30)
    links = {mf.seeing.LinkKey(): link}
    costs = mf.seeing.Costs(launch_s=0.0, flops=1.0, bandwidth=1e30, links=links)
    products = 3 * 8 + 3  # of a stage, and of the idle time
    assert program.timeline(costs).seconds == pytest.approx(products * unit + waits * away)


def test_what_a_rank_hands_over_as_it_is_takes_no_memory() -> None:
    fd, given = define("an input on its way", 6)
    batch = {"x": 0, "aim2": 0}
    table = in_turn(CASES["an input on its way"][1], "B")
    program = mf.pipeline(fd, microbatches=2, batch=batch, schedule=table)
    x, aim, *_, w = (g.nbytes for g in given)
    first, second, _ = mf.simulate(program, given).peak_bytes
    assert first == x + aim + w
    assert second == x + aim + w  # one microbatch goes while the next one comes


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sum_that_the_backward_waits_for_is_in_no_bucket(reduction: str) -> None:
    """As the count of a mean, with which it would wait for the loss."""
    a, b = (mf.DeviceMesh(ranks, axes=["dp"]) for ranks in ([0, 1], [2, 3]))
    split = {"dp": mf.Shard(0)}
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([8, 4], D, a, split, name="x")
        aim = fd.define_tensor([8], torch.int64, b, split, name="aim")
        w, v = fd.define_tensor([4, 4], D, a), fd.define_tensor([4, 4], D, b)
        u = fd.define_tensor([5, 4], D, b)
        h = fd.ops.set(F.linear(x, w)).on(b, split)
        loss = F.cross_entropy(F.linear(F.linear(h, v), u), aim, reduction=reduction)
        for y in (loss, *mf.grad(loss, [w, v, u])):
            fd.add_output(y)
    options = mf.Options(bucket_bytes=1 << 20)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0, "aim": 0}, options=options)
    x, aim = torch.randn(8, 4, dtype=D), torch.tensor([0, 2, 1, 3, 2, 2, 4, 0])
    w, v, u = (torch.randn(n, 4, dtype=D, requires_grad=True) for n in (4, 4, 5))
    want = F.cross_entropy(F.linear(F.linear(F.linear(x, w), v), u), aim, reduction=reduction)
    wanted = [want.detach(), *torch.autograd.grad(want, [w, v, u])]
    given = [x, aim, *(g.detach() for g in (w, v, u))]
    for got, right in zip(mf.simulate(program, given).outputs, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    sums = [c for c in program.communications if c.kind == "Allreduce"]
    # dw, and dv and du together: with the loss, if nothing reads it before; else that and a count
    assert len(sums) == {"sum": 2, "mean": 4}[reduction]


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_input_that_is_handed_over_to_an_output(goes_on: bool) -> None:
    """No stage computes anything of it."""
    first, second, third = meshes(3)
    with mf.FusionDefinition("handed") as fd:
        x = fd.define_tensor([4, 3], mesh=first, name="x")
        h = fd.ops.set(x).on(second, {})
        fd.add_output(h)
        if goes_on:
            fd.add_output(fd.ops.set(h).on(third, {}))
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0})
    whole = torch.arange(12.0).reshape(4, 3)
    for result in mf.simulate(program, [whole]).outputs:
        assert torch.equal(result, whole)


def test_a_sum_of_nothing_that_nobody_sends() -> None:
    """All microbatches add to it, though nothing reads it behind the calls."""
    mesh = DeviceMesh.arange(x=3)
    with mf.FusionDefinition("nothing") as fd:
        x = fd.define_tensor([4, 3], D, mesh, {"x": Shard(1)}, name="x")
        w = fd.define_tensor([0, 3], D, mesh, name="w")
        for slope in mf.grad(F.linear(x.unsqueeze(1), w).sum(), [x, w]):
            fd.add_output(slope)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0}, schedule="gpipe")
    whole = torch.randn(4, 3, dtype=D)
    dx, dw = mf.simulate(program, [whole, whole[:0]], options=POISON).outputs
    assert torch.equal(dx, torch.zeros(4, 3, dtype=D)) and dw.shape == (0, 3)
