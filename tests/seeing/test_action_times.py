"""Events of a pipeline, by the actions of its schedule."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from helpers.pipelines import batch_of, meshes, sines

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.pipelines.actions import Action
from mdfuse.pipelines.timing import Slot, lanes
from mdfuse.seeing import Costs, Event, Link, LinkKey, by_action
from mdfuse.seeing.amounts import is_work


def step(microbatches: int, schedule: str) -> mf.Program:
    """Two stages of a matrix each, and a loss."""
    first, second = (DeviceMesh([r], axes=("tp",)) for r in (0, 1))
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([8, 4], mesh=first, name="x")
        w = fd.define_tensor([4, 4], mesh=first, name="w")
        v = fd.define_tensor([4, 4], mesh=second, name="v")
        h = fd.ops.set(fd.ops.linear(x, w)).on(second, {})
        loss = fd.ops.linear(h, v).square().sum()
        for old, grad in zip((w, v), mf.grad(loss, [w, v]), strict=True):
            fd.add_output(old - grad, reuse=old)
    return mf.pipeline(fd, microbatches=microbatches, batch={"x": 0}, schedule=schedule)


def test_actions_come_in_the_order_of_their_rows() -> None:
    for schedule in ("gpipe", "1f1b", "zb1p"):
        program = step(4, schedule)
        costs = Costs(launch_s=1e-6, links={LinkKey(): Link(1e-7, 1e12)})
        found = by_action(program.host, program.schedule, program.timeline(costs).events)
        for lane, row in zip(found.lanes, program.schedule.actions, strict=True):
            assert tuple(s.action for s in lane) == tuple(a for a in row if str(a)[:2] != "0I")
            assert all(a.stop <= b.start + 1e-9 for a, b in pairwise(lane))
        assert found.names == ("rank group 0 (m0)", "rank group 1 (m1)")


def test_an_action_is_from_its_first_work_to_its_last() -> None:
    program = step(2, "1f1b")
    made = {
        block.fn: [x for i in block.body for x in i.outputs if i.fn in ("linear", "matmul", "mul")]
        for block in program.host.instructions
        if block.op == "block"
    }
    f, b = made["F0"][0], made["B1"]
    events = [
        Event(0, "host", f"%{f}@1 = linear", 5_000, 7_000),
        Event(0, "host", f"%{f}@1 = linear", 9_000, 9_500, part="wait"),
        Event(1, "host", f"%{b[0]}@0 = mul", 8_000, 9_000),
        Event(1, "host", f"%{b[-1]}@0 = matmul", 20_000, 21_000),
        Event(1, "host", "%w = sub", 22_000, 23_000),
    ]
    found = by_action(program.host, program.schedule, events)
    assert found.lanes == (
        (Slot(Action(0, "F", 1), 0.0, 2e-6),),
        (Slot(Action(1, "B", 0), 3e-6, 16e-6),),
    )
    assert str(found).startswith("1f1b: 16 µs in all")


def test_no_events() -> None:
    program = step(2, "1f1b")
    assert by_action(program.host, program.schedule, []).makespan == 0


@pytest.mark.parametrize("schedule", ["forward", "gpipe", "1f1b", "zb1p", "interleaved", "zbv"])
def test_a_timeline_takes_what_the_schedule_takes(schedule: str) -> None:
    """Each work a second, transfers none: as long as the schedule with the works of its blocks.

    A block may begin before all that it needs is there, with what does not wait; forwards do not.
    A product that is added up is one work.
    """
    places = meshes(3)
    places += {"interleaved": places, "zbv": places[::-1]}.get(schedule, [])
    trains = schedule != "forward"
    net = sines(places, batch=12, trains=trains)
    program = mf.pipeline(net.definition, microbatches=4, batch=batch_of(net), schedule=schedule)
    costs = Costs(launch_s=1.0, links={LinkKey(): Link(0.0)})
    timeline = program.timeline(costs)
    found = by_action(program.host, program.schedule, timeline.events)
    products = {x for i in program.host.walk() if i.fn == "matmul" for x in i.outputs}
    works = {
        i.fn: float(
            sum(is_work(j) - (j.op == "accumulate" and j.reads[0] in products) for j in i.body)
        )
        for i in program.host.instructions
        if i.op == "block"
    }
    reads = {s: (s - 1,) if s else () for s in range(len(places))}
    rows = lanes(program.schedule.units, lambda a: works.get(f"{a.phase}{a.stage}") or 1e-9, reads)
    planned = max(row[-1].stop for row in rows if row)
    busiest = max(sum(s.stop - s.start for s in row) for row in rows)
    if trains:
        assert busiest - 1e-6 <= found.makespan <= planned + 1e-6
    else:
        assert timeline.seconds == pytest.approx(planned)


@pytest.mark.parametrize("compile", ["never", "always"])
def test_work_that_only_adds_to_a_sum_is_of_its_microbatch(compile: Any) -> None:
    """As the gradients of weights of a stage are, where nothing goes further back."""
    net = sines(meshes(2))
    options = mf.Options(compile=compile)
    program = mf.pipeline(
        net.definition, microbatches=3, batch=batch_of(net), schedule="zb1p", options=options
    )
    costs = Costs(launch_s=1e-6, links={LinkKey(): Link(1e-7, 1e12)})
    found = by_action(program.host, program.schedule, program.timeline(costs).events)
    for lane in found.lanes:
        assert [str(s.action)[1:] for s in lane if s.action.phase == "W"] == ["W0", "W1", "W2"]
