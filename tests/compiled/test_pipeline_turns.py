"""Actions that overlap are taken in turns: where one waits for what it posted, the other works."""

from __future__ import annotations

import random
import re

import pytest
from helpers import sampling
from helpers.pipelines import Net, batch_of, check_orders, check_results, meshes, network

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.verify.check import verify
from mdfuse.seeing import Costs, Link, LinkKey, by_action


def turning(rows: int) -> Net:
    """Four stages that go down two rank groups and up again, tensor-parallel inside."""
    first, second = meshes(2, tp=2)
    return network([first, second, second, first], batch=rows)


def made(net: Net, count: int, schedule: str | mf.Schedule = "dualpipev") -> mf.Program:
    return mf.pipeline(net.definition, microbatches=count, batch=batch_of(net), schedule=schedule)


@pytest.mark.parametrize("count", [4, 5])
def test_results_are_those_of_torch_in_any_order_of_ranks_and_streams(count: int) -> None:
    net = turning(11)
    program = made(net, count)
    assert hir.parse(str(program)) == program.host
    check_orders(program, net, 5)


def test_blocks_are_in_pieces_that_begin_with_waits() -> None:
    program = made(turning(8), 4)
    calls = " ".join(re.findall(r"call (\S+)", str(program)))
    assert "F0(3) I3(1) F0.1(3) T01(3) I3.1(1) I3.2(1) T32(1) W3(1)" in calls
    bodies = {i.fn: i.body for i in program.host.instructions if i.op == "block"}
    posted = {i.outputs[0] for i in bodies["F0"] if i.op == "post"}
    waited = {i.reads[0] for i in bodies["F0.1"] if i.op == "wait"}
    assert posted
    assert posted == waited
    assert not any("." in fn for fn in re.findall(r"call (\S+)", str(made(turning(8), 4, "zbv"))))


def test_it_is_quicker_than_one_after_the_other() -> None:
    net, costs = turning(16), Costs(launch_s=1e-5, links={LinkKey(): Link(2e-5, 1e11)})
    pairs = mf.Schedule.named("dualpipev", stages=4, groups=2, microbatches=8)
    apart = mf.Schedule.from_rows([[str(a) for a in row] for row in pairs.actions])
    ends, both = [], []
    for schedule in (pairs, apart):
        program = made(net, 8, schedule)
        events = program.timeline(costs).events
        ends.append(max(e.stop_ns for e in events))
        assert program.schedule is not None
        lane = by_action(program.host, program.schedule, events).lanes[0]
        at = {str(slot.action): slot for slot in lane}
        both.append(at["0F3"].stop > at["3I1"].start)
    assert both == [True, False]
    assert ends[0] < 0.96 * ends[1]


def test_other_orders_of_pieces_are_refused_with_the_call_or_give_the_same() -> None:
    (only,) = meshes(1, tp=2)
    net = network([only, only], batch=4)
    lines = str(made(net, 2)).splitlines()
    at = [n for n, line in enumerate(lines) if line.startswith("  call")]
    accepted = 0
    for seed in sampling.window(60, 3):
        draw = random.Random(seed)
        i, j = draw.sample(at, 2)
        other = {
            "swap": {i: [lines[j]], j: [lines[i]]},
            "drop": {i: []},
            "twice": {j: [lines[i], lines[j]]},
        }[draw.choice(["swap", "drop", "twice"])]
        text = [x for n, line in enumerate(lines) for x in other.get(n, [line])]
        program = hir.parse("\n".join(text))
        refusal = None
        try:
            verify(program)
        except mf.ProgramError as error:
            refusal = str(error)
        if refusal is not None:
            assert re.search(r"call [FIWT]\d+(\.\d)?\(\d\)", refusal)
            continue
        accepted += 1
        check_results(program, net)
    assert accepted < 10
