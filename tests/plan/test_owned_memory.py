"""Where a plan's buffers lie: packed, apart while both are in use, in place of what dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.text.parser import parse
from mdfuse.ir.ops import itself
from mdfuse.plan.build import Plan, build
from mdfuse.plan.lines import Line, NewBuffer, SlotRef
from mdfuse.plan.owned_memory import ALIGNMENT, WORTH, in_place, lives, taken
from mdfuse.plan.packing import MANY, LiveRange, peak, place, size_of

CPU = torch.device("cpu")


def life(slot: int, start: int, stop: int, size: int) -> LiveRange:
    new = NewBuffer(shape=(size,), strides=(1,), dtype=torch.uint8, device=CPU)
    return LiveRange(slot=slot, new=new, nbytes=size, start=start, stop=stop)


spans = st.tuples(st.integers(0, 30), st.integers(0, 8), st.integers(0, 1000))


@given(st.lists(spans, max_size=25), st.sampled_from([1, 64, 512]))
@settings(max_examples=300)
def test_what_is_in_use_together_lies_apart(drawn: list[tuple[int, int, int]], step: int) -> None:
    found = [life(n, start, start + more, size) for n, (start, more, size) in enumerate(drawn)]
    offsets = place(found, step)
    assert all(at % step == 0 for at in offsets.values())
    for a in found:
        for b in found:
            together = a.start <= b.stop and b.start <= a.stop
            first, second = sorted((offsets[x.slot], x.nbytes, x.slot) for x in (a, b))
            if a.slot < b.slot and together and a.nbytes and b.nbytes:
                assert first[0] + first[1] <= second[0]
    in_use = [sum(x.nbytes for x in found if x.start <= t <= x.stop) for t in range(40)]
    assert peak(found) == max(in_use, default=0)
    assert size_of(found, offsets) >= peak(found)


def test_large_buffers_change_places_around_small_ones() -> None:
    """Gathered and product, then a small shard, in turns: packed without a gap."""
    found, slot = [], 0
    for n in range(8):
        at = 3 * n
        for start, stop, size in ((at, at + 1, 16), (at + 1, at + 2, 16), (at + 2, at + 3, 2)):
            found.append(life(slot, start, stop, 64 * size))
            slot += 1
    assert size_of(found, place(found, 64)) == peak(found) == 64 * 32


def test_many_buffers_take_each_others_place() -> None:
    found = [life(n, n, n + 1, 64) for n in range(MANY + 10)]
    offsets = place(found, 64)
    assert size_of(found, offsets) == 128
    assert all(offsets[n] != offsets[n + 1] for n in range(MANY))


# -- plans ---------------------------------------------------------------------------------------


def refuse(call: Any) -> Any:
    raise AssertionError("nothing is posted here")


def plan_of(body: str, *arguments: Any) -> Plan:
    local = project(parse(f"host @small on mesh(x=1) {{ {body} }}"), 0)
    return build(local, refuse, CPU, False, arguments)


def addresses(plan: Plan) -> dict[str, int]:
    return {plan.names[slot][1:]: x.data_ptr() for slot, x in plan.owned.buffers.items()}


def test_elementwise_results_take_the_place_of_what_dies() -> None:
    body = """
      input %x: f32[8,8] (x=R)
      %a: f32[8,8] (x=R) = exp(%x)
      %b: f32[8,8] (x=R) = add(%a, 1.0)
      %c: f32[8,8] (x=R) = matmul(%b, %a)
      %d: f32[8,8] (x=R) = tanh(%c)
      %y: f32[8,8] (x=R) = mul(%d, 2.0)
      return %y"""
    x = torch.randn(8, 8)
    plan = plan_of(body, x)
    where = addresses(plan)
    assert where["a"] != where["b"]  # read again by the matmul
    assert where["c"] == where["d"]
    assert len({where["a"], where["b"], where["c"]}) == 3
    a = torch.exp(x)
    for _ in range(2):
        assert torch.equal(plan.run([x])[0], torch.tanh((a + 1) @ a) * 2)


def test_views_keep_their_buffer() -> None:
    body = """
      input %x: f32[4,4] (x=R)
      %a: f32[4,4] (x=R) = exp(%x)
      %t: f32[4,4] (x=R) = permute(%a, dims=[1,0])
      free %a
      %b: f32[4,4] (x=R) = exp(%x)
      %c: f32[4,4] (x=R) = matmul(%b, %t)
      %y: f32[4,4] (x=R) = add(%c, %b)
      return %y"""
    x = torch.randn(4, 4)
    plan = plan_of(body, x)
    where = addresses(plan)
    assert where["t"] == where["a"] != where["b"]
    e = torch.exp(x)
    assert torch.equal(plan.run([x])[0], e @ e.t() + e)


@pytest.mark.parametrize(
    ("view", "read"),
    [
        ("%v: f32[4,4] (x=R) = permute(%a, dims=[1,0])", lambda a: a.t()),
        (
            "%v: f32[1,4] (x=R) = slice(%a, starts=[0,0], ends=[1,4], steps=[1,1])",
            lambda a: a[:1],
        ),
    ],
)
def test_an_operand_that_is_read_through_a_view_too_keeps_its_place(view: str, read: Any) -> None:
    body = f"""
      input %x: f32[4,4] (x=R)
      %a: f32[4,4] (x=R) = exp(%x)
      {view}
      %b: f32[4,4] (x=R) = add(%a, %v)
      %y: f32[4,4] (x=R) = mul(%b, 2.0)
      return %y"""
    x = torch.randn(4, 4)
    plan = plan_of(body, x)
    where = addresses(plan)
    assert where["a"] != where["b"]
    a = torch.exp(x)
    for _ in range(2):
        assert torch.equal(plan.run([x])[0], (a + read(a)) * 2)


def test_results_of_another_size_or_dtype_have_their_own_place() -> None:
    body = """
      input %x: f32[4,4] (x=R)
      %a: f32[4,4] (x=R) = exp(%x)
      %b: f64[4,4] (x=R) = cast(%a, dtype=f64)
      %c: f32[4,4] (x=R) = cast(%b, dtype=f32)
      %y: f32[4,4] (x=R) = add(%c, 1.0)
      return %y"""
    x = torch.randn(4, 4)
    plan = plan_of(body, x)
    where = addresses(plan)
    assert len({where["a"], where["b"]}) == 2
    assert torch.equal(plan.run([x])[0], torch.exp(x) + 1)


def sum_of(between: Line | None = None, before: Line | None = None) -> list[Line]:
    """A buffer 1 that is reduced into a new buffer 2; 3 is the handle of that, 4 of a post before.

    Args:
        between: what is done between post and wait.
        before: what is posted before, and waited for at the end.
    """
    new = NewBuffer(shape=(4,), strides=(1,), dtype=torch.float32, device=CPU)
    a, b = SlotRef(1), SlotRef(2)
    lines = [
        Line(run="empty", into=1, new=new),
        Line(run="fill_", args=(a, 1.0)),
        before,
        Line(run="empty", into=2, new=new),
        Line(run="record"),
        Line(run="all_reduce", args=(a, b), in_place=True),
        Line(run="mark", into=3, shares=(1, 2)),
        between,
        Line(run="wait", ends=(3,)),
        Line(run=None, into=(3, 1)),
        Line(run="mul", args=(b, 2.0), into=5, makes=16),
        Line(run="wait", ends=(4,)) if before is not None else None,
    ]
    return [line for line in lines if line is not None]


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({}, True),
        ({"between": Line(run="exp", args=(SlotRef(9),), into=6, makes=16)}, True),
        ({"between": Line(run="exp", args=(SlotRef(1),), into=6, makes=16)}, False),
        ({"between": Line(run="view", args=(SlotRef(1),), into=6, shares=(1,))}, False),
        ({"before": Line(run="send", args=(SlotRef(1),), into=4, shares=(1,))}, False),
    ],
)
def test_a_sum_takes_the_place_of_what_is_reduced(changes: dict[str, Line], is_taken: bool) -> None:
    """Where nobody else reads that before the wait, nor has begun to send it."""
    lines = sum_of(**changes)
    found = [life for life in lives(lines, [5]) if life.new is not None]
    assert taken(lines, found) == ({2: 1} if is_taken else {})


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_buffers_in_one_place_the_later_one_is_not_made(is_first: bool) -> None:
    """Whichever that is: the sum, or what is reduced."""
    lines = sum_of()
    if is_first:
        lines.insert(0, lines.pop(2))
    found = in_place(lines, [5])
    made = [line.targets[0] for line in found if line.new is not None]
    stand = {line.targets[0]: line.args[0].slot for line in found if line.run is itself}
    assert (made, stand) == (([2], {1: 2}) if is_first else ([1], {2: 1}))


def test_poisoned_buffers_are_poisoned_in_each_run() -> None:
    """Nothing takes the place of an operand then: the poison would go over it."""
    body = """
      input %x: f32[4] (x=R)
      %a: f32[4] (x=R) = exp(%x)
      %b: f32[4] (x=R) = alloc
      %c: f32[4] (x=R) = add(%a, %b)
      %y: f32[4] (x=R) = add(%c, 1.0)
      return %y"""
    local = project(parse(f"host @small on mesh(x=1) {{ {body} }}"), 0)
    plan = build(local, refuse, CPU, True, [torch.randn(4)])
    for _ in range(3):
        assert plan.run([torch.randn(4)])[0].isnan().all()


def test_memory_that_packs_badly_is_owned_in_part() -> None:
    """What torch allocates and what the plan would own peak at different times."""
    with mf.FusionDefinition("two_phases") as fd:
        x = fd.define_tensor([64, 64], mesh=DeviceMesh([0]), layout={})
        first = [fd.ops.tanh(x * float(n)) for n in range(1, 9)]
        total = first[0]
        for h in first[1:]:
            total = total @ h
        second = [fd.ops.relu(total + float(n)) for n in range(8)]
        y = second[0]
        for h in second[1:]:
            y = y @ h
        fd.add_output(y)
    program, x = mf.compile(fd), torch.randn(64, 64) / 8
    plan = build(project(program.host, 0), refuse, CPU, False, [x])
    at_once = plan.owned.nbytes + peak(lives(plan.owned.lines, plan.outputs))
    assert at_once <= WORTH * peak(lives(plan.lines, plan.outputs)) + ALIGNMENT["cpu"]
    assert plan.owned.nbytes < 8 * 64 * 64 * 4
    (want,) = mf.reference(fd, [x])
    assert torch.equal(plan.run([x])[0], want)


def test_a_part_is_owned_where_what_torch_allocates_comes_at_another_time() -> None:
    """Three buffers of the plan's at once, later one of them beside one of torch's."""
    with mf.FusionDefinition("apart") as fd:
        x = fd.define_tensor([64, 64], mesh=DeviceMesh([0]), layout={})
        a, b = fd.ops.tanh(x), fd.ops.sin(x)
        c = fd.ops.relu(a @ b)
        fd.add_output(c @ c)
    program, x = mf.compile(fd), torch.randn(64, 64) / 8
    plan = build(project(program.host, 0), refuse, CPU, False, [x])
    assert plan.owned.nbytes == 2 * 64 * 64 * 4
    h, g = x.tanh(), x.sin()
    want = (h @ g).relu() @ (h @ g).relu()
    for _ in range(2):
        assert torch.allclose(plan.run([x])[0], want)


@pytest.mark.parametrize("op", ["relu", "layer_norm"])
def test_what_torch_allocates_counts(op: str) -> None:
    """A chain of one kind holds as much as its two buffers."""
    with mf.FusionDefinition("chain") as fd:
        h = x = fd.define_tensor([16, 16], mesh=DeviceMesh([0]), layout={})
        for _ in range(4):
            h = fd.ops.relu(h) if op == "relu" else fd.ops.layer_norm(h, [16])
            h = fd.ops.tanh(h @ x)
        fd.add_output(h * 2.0)
    program = mf.compile(fd)
    plan = build(project(program.host, 0), refuse, CPU, False, [torch.randn(16, 16)])
    assert plan.owned.nbytes == 16 * 16 * 4


def test_what_a_reshape_has_to_copy_is_in_use_no_longer() -> None:
    """Two buffers at once: what is copied and the copy, then the copy and a product."""
    with mf.FusionDefinition("copied") as fd:
        x = fd.define_tensor([64, 64], mesh=DeviceMesh([0]), layout={})
        turned = fd.ops.tanh(x).permute(1, 0).reshape(32, 128)
        product = turned.reshape(64, 64) @ x
        fd.add_output(product * 2.0)
    program, x = mf.compile(fd), torch.randn(64, 64) / 8
    plan = build(project(program.host, 0), refuse, CPU, False, [x])
    assert peak(lives(plan.lines, plan.outputs)) == plan.owned.nbytes == 2 * 64 * 64 * 4
    want = (x.tanh().T.reshape(64, 64) @ x) * 2
    for _ in range(2):
        assert torch.allclose(plan.run([x])[0], want)
