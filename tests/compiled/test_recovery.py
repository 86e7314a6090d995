"""A state on the ranks that are left: who sends which box, and which boxes nobody holds."""

from __future__ import annotations

import random
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.drawn import drawn
from helpers.oracle import POISON, local_part
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Replicate, Shard
from mdfuse.compiled.recovery import (
    Holding,
    ValueAt,
    _chosen,
    _holding_text,
    planned,
    renumbered,
)
from mdfuse.runtime.membership import Membership

#: Meshes, each with every set of ranks that it may lose.
LOSSES = [
    (shape, lost)
    for shape in ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2))
    for n in range(1, torch.Size(shape).numel() + 1)
    for lost in combinations(range(torch.Size(shape).numel()), n)
]


def layout(draw: random.Random, mesh: DeviceMesh, ndim: int) -> Layout:
    """A drawn layout, the order of axes that split one dim included."""
    choices = [Replicate(), *map(Shard, range(ndim))]
    placements = {a: draw.choice(choices) for a in mesh.axes}
    order = {}
    for d in range(ndim):
        axes = [a for a, p in placements.items() if p == Shard(d)]
        if axes:
            order[d] = draw.sample(axes, len(axes))
    return Layout(mesh, placements, order)


def goal_mesh(draw: random.Random, alive: int) -> DeviceMesh:
    """A mesh of some of the ranks that are left, in any order."""
    shape = draw.choice([s for s in ((1,), (2,), (3,), (2, 2), (7,)) if _size(s) <= alive])
    return DeviceMesh.of(shape, draw.sample(range(alive), _size(shape)), (*"abc"[: len(shape)],))


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


@pytest.mark.parametrize("number", range(sampling.of(8 * len(LOSSES), 32)))
def test_boxes_come_from_survivors_or_are_listed(number: int) -> None:
    """Each rank gets what a survivor holds, and what nobody holds is listed, box by box."""
    draw = random.Random(number)
    shape, lost = draw.choice(LOSSES) if not sampling.is_whole() else LOSSES[number // 8]
    size = _size(shape)
    if len(lost) == size:
        size += 1  # a rank outside of the mesh is left
    old = [*range(size)]
    draw.shuffle(old)
    alive = [r for r in range(size) if r not in lost]
    numbers = {r: n for n, r in enumerate((*alive, *lost))}
    mesh = DeviceMesh.of(shape, [r for r in old if r < _size(shape)], (*"xyz"[: len(shape)],))
    extents = [tuple(draw.randint(0, 7) for _ in range(draw.randint(0, 2))) for _ in range(2)]
    goal = goal_mesh(draw, len(alive))
    before, after, wholes = {}, {}, {}
    for name, extent in zip("ab", extents, strict=True):
        source = layout(draw, mesh, len(extent))
        marked = renumbered(source, numbers, [numbers[r] for r in lost])
        before[name] = ValueAt(extent, torch.float32, marked)
        after[name] = before[name]._replace(layout=layout(draw, goal, len(extent)))
        wholes[name] = torch.arange(float(_size(extent))).reshape(extent)
    recovery = planned(before, after)
    given: list[dict[str, Tensor]] = [{} for _ in alive]
    for rank, name in product(range(len(alive)), "ab"):
        if rank in before[name].layout.mesh:
            given[rank][name] = local_part(wholes[name], before[name].layout, rank).clone()
    outputs = mf.simulate(recovery.program, per_rank=given, options=POISON).per_rank
    arriving = 0
    for index, name in enumerate("ab"):
        held = [local_part(wholes[name], before[name].layout, r) for r in range(len(alive))
                if r in before[name].layout.mesh]  # fmt: skip
        there = {x for part in held for x in part.flatten().tolist()}
        for rank in goal.ranks:
            want, got = local_part(wholes[name], after[name].layout, rank), outputs[rank][index]
            is_there = torch.tensor([x in there for x in want.flatten().tolist()], dtype=bool)
            assert torch.equal(got.flatten()[is_there], want.flatten()[is_there]), f"{recovery}"
            boxes = recovery.missing.get(name, {}).get(rank, [])
            listed = [x for box in boxes for x in _elements(wholes[name], box)]
            assert sorted(listed) == want.flatten()[~is_there].tolist()
            own = set(given[rank][name].flatten().tolist()) if name in given[rank] else set()
            arriving += sum(x in there and x not in own for x in want.flatten().tolist())
    total = sum(recovery.program.bytes_received(r) for r in range(len(alive)))
    assert total == 4 * arriving, f"{recovery}"


def _elements(whole: Tensor, box: tuple[tuple[int, int], ...]) -> list[float]:
    elements: list[float] = whole[tuple(slice(*span) for span in box)].flatten().tolist()
    return elements


def test_the_plan_is_printed() -> None:
    """A recovery is a program; what is missing stands below it."""
    four = DeviceMesh.arange(dp=2, tp=2).with_lost([1, 3])
    whole = Layout(DeviceMesh.arange(dp=1))
    before = {"w": ValueAt((4,), torch.float32, Layout(four, {"tp": Shard(0)}))}
    recovery = planned(before, {"w": before["w"]._replace(layout=whole)})
    text = str(recovery)
    assert "mesh(dp=2, tp=2 lost 1 3)" in text
    assert text.endswith("%w: no rank holds [2:4]")
    assert "post exchange(%w) -> %new_w f32[4] m0(dp=R, tp=S0) => m1(dp=R)" in text
    read = mf.hir.parse(str(recovery.program))
    assert read.meshes[0].lost == {1, 3} and read.last_rank == 2


# -- one process ---------------------------------------------------------------------------------


def program(layout: dict[str, Shard] | None = None, extent: int = 4) -> mf.Program:
    with mf.FusionDefinition("count") as fd:
        w = fd.define_tensor([extent], name="w", mesh=DeviceMesh.arange(dp=1), layout=layout or {})
        by = fd.define_tensor([extent], name="by", mesh=DeviceMesh.arange(dp=1))
        fd.add_output(w.sum())
        fd.add_output(w + by, reuse=w)
    return mf.compile(fd)


@pytest.mark.parametrize("is_double", [False, True])
def test_a_step_goes_on_with_its_version(is_double: bool) -> None:
    step = mf.Step(program(), {"w": torch.zeros(4)}, double_buffer=is_double)
    one = torch.ones(4)
    for _ in range(3):
        step(one)
    assert step.version == 3
    after = mf.recover(step, program({"dp": Shard(0)}))
    assert after.version == 3 and after.state["w"].tolist() == [3.0] * 4
    assert float(after(one)) == 12.0 and after.version == 4


def test_a_run_that_broke_off_counts_as_half_written() -> None:
    """A state that may be half written is not passed on; the set before the run is."""
    fd_program = program()
    steps = [mf.Step(fd_program, {"w": torch.zeros(4)}, double_buffer=d) for d in (False, True)]
    for step in steps:
        step(torch.ones(4))
        step._versions.begin()
        step.state["w"][:2] = 9.0
        step._versions.is_whole = False
    with pytest.raises(mf.ProgramError) as error:
        mf.recover(steps[0], program())
    assert "half written on ranks [0]" in str(error.value)
    assert "%w: no rank holds [0:4]" in str(error.value)
    after = mf.recover(steps[1], program())
    assert after.state["w"].tolist() == [1.0] * 4 and after.version == 1


@pytest.mark.parametrize(("lasts", "version"), [([None, None], 5), ([None, 4], 4), ([5, 4], 4)])
def test_a_version_is_one_that_all_devices_had_made(lasts: list[int | None], version: int) -> None:
    """A rank whose posts another one ended may have garbage in a run that its device finished."""
    old, new = DeviceMesh.arange(dp=3), DeviceMesh.arange(dp=2)
    value = ValueAt((4,), torch.float32, Layout(old))
    members = [(n, 0) for n in range(3)]
    states = [{4: {}, 5: {}}, {4: {}}]
    holdings = [
        Holding({"w": value}, [], members, state, {}, {}, last)
        for state, last in zip(states, lasts, strict=True)
    ]
    membership = Membership(tuple(members[:2]), tuple(members), 1)
    texts = [_holding_text(x) for x in holdings]
    goal = {"w": value._replace(layout=Layout(new))}
    comm: Any = SimpleNamespace(membership=membership)
    assert _chosen(holdings[0], goal, texts, comm, None).version == version


@pytest.mark.parametrize(
    ("saved", "is_read"),
    [({"/b": 0}, False), ({"/a": 0}, True), ({"/b": 0, "/a": 0}, True), ({"/b": 1}, True)],
    ids=["of it", "not known", "a load came after", "another version"],
)
def test_ranks_complete_a_checkpoint_of_their_version(saved: dict[str, int], is_read: bool) -> None:
    """One of another state would give the rows of two states; all are read from it."""
    value = ValueAt((4,), torch.float32, Layout(DeviceMesh.arange(dp=2), {"dp": Shard(0)}))
    members = ((0, 0), (1, 0))
    holding = Holding({"w": value}, [], members, {0: {}}, {}, saved)
    comm: Any = SimpleNamespace(membership=Membership(members[:1], members, 1))
    goal = {"w": value._replace(layout=Layout(DeviceMesh.arange(dp=1)))}
    choice = _chosen(holding, goal, [_holding_text(holding)], comm, "/b")
    assert choice.read == (["w"] if is_read else ())
    assert choice.version == saved.get("/b", 0)


def test_boxes_that_nobody_holds_are_read(tmp_path: Path) -> None:
    step = mf.Step(program(), {"w": drawn(4)})
    step(torch.ones(4))
    step.save(tmp_path / "one", portable=True)
    saved = step.state["w"].clone()
    step(torch.ones(4))
    step._versions.is_whole = False
    after = mf.recover(step, program(), or_from=tmp_path / "one")
    assert torch.equal(after.state["w"], saved)
    assert after.version == 1 and after.recovery is None


@pytest.mark.parametrize("begins", ["saved", "loaded"])
def test_a_checkpoint_is_of_the_same_version_in_each_recovery(begins: str, tmp_path: Path) -> None:
    """A loop that asks for the version would else count from 0 again, on a state of later steps."""
    step = mf.Step(program(), {"w": drawn(4)})
    step(torch.ones(4))
    step.save(tmp_path / "one", portable=True)
    saved = step.state["w"].clone()
    if begins == "loaded":
        step = mf.Step(program(), {"w": drawn(4)})
        step(torch.ones(4))
        step.load(tmp_path / "one")
    for _ in range(3):
        step(torch.ones(4))
        step._versions.is_whole = False
        step = mf.recover(step, program(), or_from=tmp_path / "one")
        assert torch.equal(step.state["w"], saved) and step.version == 1


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    step = mf.Step(program(), {"w": torch.zeros(4)})
    with pytest.raises(mf.ProgramError, match=r"%w is f32 \[5\], and was f32 \[4\]"):
        mf.recover(step, program(extent=5))
    with pytest.raises(mf.ProgramError, match="recover with program="):
        mf.recover(step, "program")
    with pytest.raises(mf.ProgramError, match="no rank has a state"):
        mf.recover(None, program())
    step._versions.is_whole = False
    other = mf.Step(_named("v"), {"v": torch.zeros(4)})
    other.save(tmp_path / "other", portable=True)
    with pytest.raises(mf.ProgramError, match="the checkpoint lacks 1 of 1 tensors: w"):
        mf.recover(step, program(), or_from=tmp_path / "other")
    with pytest.raises(mf.ProgramError, match="double_buffer"):
        mf.Step(program(), {"w": torch.zeros(4)}, double_buffer=1)


def _named(name: str) -> mf.Program:
    with mf.FusionDefinition("named") as fd:
        v = fd.define_tensor([4], name=name, mesh=DeviceMesh.arange(dp=1))
        fd.add_output(v + 1, reuse=v)
    return mf.compile(fd)


# -- imported models -----------------------------------------------------------------------------


def training(layout: dict[str, Shard]) -> tuple[mf.TrainingStep, list[Tensor | None]]:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    for x in module[0].parameters():
        x.requires_grad_(False)
    mesh = DeviceMesh.arange(dp=1)
    model = mf.from_torch(
        module, (torch.ones(8, 4),), mesh=mesh, layouts={"input:0": {"dp": Shard(0)}, "*": layout}
    )
    step = model.training_step(
        lambda y: (y * y).mean(), optimizer=mf.optim.adamw, microbatches=2 if layout else 1
    )
    return step, model.load()


@pytest.mark.parametrize("is_new_form", [False, True])
def test_a_step_of_an_imported_model_goes_on(is_new_form: bool) -> None:
    """Trained parameters, moments, the count of steps, and parameters that are not trained."""
    step, weights = training({})
    x, lr = drawn(8, 4), torch.tensor(0.1)
    whole, first = step.start(weights), step.start(weights, double_buffer=True)
    losses = [float(whole(x, lr)) for _ in range(4)]
    begun = [float(first(x, lr)) for _ in range(2)]
    other, _ = training({"dp": Shard(0)} if is_new_form else {})
    for after in (first.recovered(other), mf.recover(first, other)):
        assert after.step.version == 2 and after.step.is_double
        assert {*after.fixed} == {"0.weight", "0.bias"}
        state = {n: None if y is None else y.clone() for n, y in after.state.items()}
        assert begun + [float(after(x, lr)) for _ in range(2)] == pytest.approx(losses, abs=1e-6)
        for n, y in after.state.items():
            if y is not None:
                y.copy_(state[n])  # where nothing moves, both share it
    with pytest.raises(mf.ProgramError, match=r"recovered of @Sequential\.step with a Program"):
        first.recovered(other.compile())
