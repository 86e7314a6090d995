"""Programs that move as many rows as a run counts: on the simulator, as text, and their figures."""

from __future__ import annotations

import pytest
import torch
from helpers.counted_programs import CASES, Counted, skewed
from helpers.fake_graphs import FakeRecorder
from helpers.host_programs import POISON

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.traffic import received
from mdfuse.hir.verify.check import verify
from mdfuse.plan.build import build
from mdfuse.plan.graphs import GraphPlan
from mdfuse.seeing.cost_keys import LinkKey
from mdfuse.seeing.costs import Costs, Link
from mdfuse.seeing.timeline import timeline
from mdfuse.simulation.network import SimNetwork


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_come_back_whatever_is_counted(case: Counted) -> None:
    program = case.program()
    for seed, counts in enumerate(skewed(case).values()):
        x, n = case.inputs(counts, seed)
        for schedule in (None, seed):
            got = mf.simulate(program, [x, n], options=mf.Options(poison=True), schedule=schedule)
            assert torch.equal(got.outputs[0], case.expected(x, n)), counts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_text_reads_back(case: Counted) -> None:
    program = case.program()
    for printed in (program, *(project(program, r) for r in range(case.ranks))):
        assert hir.parse(str(printed)) == printed
        assert str(hir.parse(str(printed))) == str(printed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_projections_run(case: Counted) -> None:
    local = [hir.parse(str(project(case.program(), rank))) for rank in range(case.ranks)]
    verify(dict(enumerate(local)))
    x, n = case.inputs(skewed(case)["drawn"])
    rows = [{"x": x[r : r + 1], "n": n[r : r + 1]} for r in range(case.ranks)]
    got = mf.simulate(local, per_rank=rows, options=POISON).per_rank
    assert torch.equal(torch.cat([y for (y,) in got]), case.expected(x, n))


@pytest.mark.parametrize(
    ("place", "number", "what"),
    [((1, 0), 7, "counts 7 rows of part 1"), ((0, 3), -1, "counts -1 rows")],
)
def test_counts_over_the_bound(place: tuple[int, int], number: int, what: str) -> None:
    """Every rank refuses them, before rows are posted."""
    case = CASES[0]
    n = torch.zeros(2, 4, dtype=torch.int64)
    n[place] = number
    with pytest.raises(mf.ProgramError, match=what):
        mf.simulate(case.program(), [*case.inputs(n)])


def test_counts_over_the_bound_of_ranks_that_know_their_part() -> None:
    """Only those that exchange the rows see them, so that the run ends on all ranks."""
    case = Counted(axes=(2, 2), experts=3, most=5, is_near=True)
    n = torch.zeros(4, 3, dtype=torch.int64)
    n[3, 1] = 6
    what = "counts 6 rows of part 3, of which there may be 5"
    with pytest.raises(mf.ProgramError, match=what) as refused:
        mf.simulate(case.program(), [*case.inputs(n)])
    assert "the ranks that exchange these rows" in str(refused.value)


def test_memory_is_that_of_the_rows() -> None:
    """Few rows take little, though there might be many."""
    case = Counted(most=1024, width=64)
    few, many = (
        mf.simulate(case.program(), [*case.inputs(skewed(case)[kind])]).peak_bytes
        for kind in ("few", "one")
    )
    row = 64 * 4
    bound = 1024 * row
    assert max(few) <= 2 * bound + 8 * row  # x and y
    assert many[1] >= 3 * bound  # x, and the rows of both parts at the last expert


def test_bytes_that_arrive() -> None:
    """Expected: an equal share of full parts; at worst: all rows of all others, or all of mine."""
    case = Counted(axes=(4,), experts=8, most=16, width=4)
    program, row, counts = case.program(), 4 * 4, 3 * 8 * 8
    sizes = [size for _, size in received(program, 1)]
    assert sizes == [counts, 3 * 16 // 4 * row, 3 * 16 // 4 * row]
    at_worst = [size for _, size in received(program, 1, at_worst=True)]
    assert at_worst == [counts, 3 * 16 * row, 16 * row]
    one = mf.simulate(program, [*case.inputs(skewed(case)["one"])])
    back = counts + 16 * row
    assert one.bytes_received == (back, back, back, counts + 3 * 16 * row)
    few = mf.simulate(program, [*case.inputs(skewed(case)["few"])])  # of part 3, at rank 2
    assert few.bytes_received == (counts, counts, counts + row, counts + row)


def test_time_that_passes() -> None:
    """Transfers and work take as long as their rows; at worst one expert has all of them."""
    case = Counted(axes=(4,), experts=4, most=1024, width=64)
    costs = Costs(bandwidth=1e9, links={LinkKey(): Link(0.0, 1e9)})
    expected, worst = (timeline(case.program(), costs, x).seconds for x in (False, True))
    part = 1024 * 64 * 4 / 1e9
    # one transfer there and back, of three quarters of a part, and a pass over as much as a part
    assert expected > 2 * 3 / 4 * part and worst > (3 + 1) * part
    assert worst > 2 * expected


IN_A_LOOP = """
host @in_a_loop on mesh(ep=2) {
  input %x: f32[2,1,3,2] of [2,2,3,2] (ep=S1)
  input %n: i64[2,2,2] (ep=R)
  %y: f32[2,1,3,2] of [2,2,3,2] (ep=S1) = alloc
  for %i in 0..2 {
    %x.i: f32[1,3,2] of [2,3,2] (ep=S0) = select(%x, dim=0, index=%i)
    %n.i: i64[2,2] (ep=R) = select(%n, dim=0, index=%i)
    %c: i64[2,2] (ep=R) = fetch(%n.i, most=3)
    %s: f32[<=3:%c,2] of [2,2,3,2] (ep=S0) = pack_rows(%x.i, %c)
    %r: f32[<=6:%c,2] of [2,2,3,2] (ep=S1) = alloc(%c)
    %h = post alltoall(%s) -> %r f32[2,2,3,2] (ep=S0) => (ep=S1) axis=ep dim=0 to_dim=1 counts=%c
    wait %h
    %q: f32[<=6:%c,2] of [2,2,3,2] (ep=S1) = neg(%r)
    %b: f32[<=3:%c,2] of [2,2,3,2] (ep=S0) = alloc(%c)
    %k = post alltoall(%q) -> %b f32[2,2,3,2] (ep=S1) => (ep=S0) axis=ep dim=1 to_dim=0 counts=%c
    wait %k
    %y.i: f32[1,3,2] of [2,3,2] (ep=S0) = select(%y, dim=0, index=%i)
    %u: f32[1,3,2] of [2,3,2] (ep=S0) = unpack_rows(%b, %c)
    %y.i = set(%u)
    free %x.i, %n.i, %s, %r, %q, %b, %u, %y.i, %c
  }
  return %y
}"""


def test_each_iteration_counts_its_own_rows() -> None:
    program = hir.parse(IN_A_LOOP)
    n = torch.tensor([[[1, 2], [0, 0]], [[0, 3], [1, 1]]])
    x = torch.randn(2, 2, 3, 2, generator=torch.Generator().manual_seed(1))
    there = torch.arange(3) < n.sum(2, keepdim=True)
    wanted = torch.where(there[..., None], -x, torch.zeros(()))
    for schedule in (None, 1, 2):
        got = mf.simulate(program, [x, n], options=mf.Options(poison=True), schedule=schedule)
        assert torch.equal(got.outputs[0], wanted)


def test_what_may_be_captured() -> None:
    """Counts are gathered in a graph; the fetch and all rows are not."""
    eager = {i.fn or i.op: why for i, why in hir.uncapturable.eager(project(CASES[0].program(), 0))}
    assert "which the host waits for" in eager["fetch"]
    assert {*eager} == {"fetch", "pack_rows", "alloc", "post", "mul", "wait", "unpack_rows"} - {
        "wait"
    }


AROUND = """
host @around on mesh(ep=1) {
  input %x: f32[1,6,4] (ep=R)
  input %n: i64[1,3] (ep=R)
  %g: f32[1,6,4] (ep=R) = mul(%x, 2.0)
  %k: i64[1,3] (ep=R) = mul(%n, 1)
  %c: i64[1,3] (ep=R) = fetch(%k, most=6)
  %s: f32[<=6:%c,4] of [1,3,6,4] (ep=R) = pack_rows(%g, %c)
  %q: f32[<=6:%c,4] of [1,3,6,4] (ep=R) = neg(%s)
  %u: f32[1,6,4] (ep=R) = unpack_rows(%q, %c)
  %y: f32[1,6,4] (ep=R) = add(%u, 1.0)
  return %y
}"""


def test_what_lies_around_a_fetch_is_captured() -> None:
    """Each run counts other rows; graphs on both sides of the fetch are replayed in all of them."""
    program = project(hir.parse(AROUND), 0)
    verify(program)
    draw = torch.Generator().manual_seed(2)
    runs = [
        (torch.randn(1, 6, 4, generator=draw), torch.tensor([n]))
        for n in ([1, 2, 0], [0, 6, 0], [0, 0, 0], [2, 2, 2])
    ]
    plan, recorder = (
        build(program, SimNetwork().bind, torch.device("cpu"), True, runs[0]),
        FakeRecorder(),
    )
    graphs = GraphPlan(plan, lambda: plan, recorder, {})
    assert [r.eager is None for r in graphs.regions] == [True, False, True]
    for x, n in runs:
        (y,) = graphs.run([x, n])
        there = (torch.arange(6) < n.sum())[:, None]
        assert torch.equal(y, torch.where(there, 1 - 2 * x, torch.ones(())))
    assert [r.count for r in recorder.made] == [4, 4]
