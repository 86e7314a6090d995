"""Timelines by unit costs are those that one counts on one's fingers; none contradicts itself."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.example_files import SMALL, example
from helpers.host_posts import CASES
from helpers.pictures import FOLDER, PICTURES
from helpers.programs import program_text
from helpers.ring_programs import TEMPLATES, ring
from helpers.stream_cases import CASES as STREAMED

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir
from mdfuse.seeing import UNIT, Costs, Event, Link, LinkKey, Timeline
from mdfuse.seeing.curves import Curve
from mdfuse.seeing.events import busy, lanes
from mdfuse.seeing.rank_classes import Classes
from mdfuse.seeing.timeline import on_ranks, timeline

#: Uneven figures, so that what is wrong shows.
UNEVEN = Costs(
    name="uneven", launch_s=0.7, bandwidth=1e3, flops=1e4, links={LinkKey(): Link(0.3, 1e3)}
)


def check(found: Timeline) -> None:
    """Raise AssertionError where a timeline contradicts itself."""
    for (rank, lane), row in lanes(found.events).items():
        for a, b in pairwise(row):
            assert a.stop_ns <= b.start_ns, (rank, lane, a.name, b.name)
        assert busy(row) <= found.seconds * 1e9 + 0.5
    flows: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for e in found.events:
        assert 0 <= e.start_ns <= e.stop_ns
        assert (e.flow is None) == (e.part == "work")
        if e.flow is not None:
            flows[e.flow][e.rank].append(e)
    for by_rank in flows.values():
        times = set()
        for events in by_rank.values():
            posts, transfers = ([e for e in events if e.part == p] for p in ("post", "transfer"))
            assert len(posts) == len(transfers) <= 2, "a rank may send to itself"
            assert max(e.stop_ns for e in posts) <= min(e.start_ns for e in transfers)
            times |= {(e.start_ns, e.stop_ns) for e in transfers}
            waits = [e.stop_ns for e in events if e.part == "wait"]
            assert len(waits) >= len(posts), "each post is awaited"
            assert transfers[0].start_ns <= min(waits)
            assert max(waits) >= transfers[0].stop_ns
        assert len(times) == 1, "a transfer is at one time on all ranks"


def every_rank(program: hir.HostProgram) -> Classes:
    ranks = sorted({r for mesh in program.meshes for r in mesh}) or [0]
    return Classes(tuple((r,) for r in ranks), {r: r for r in ranks})


def stretch(found: Timeline) -> dict[int, list[tuple[str, str, int, int]]]:
    """Rank -> what it does and when; peers are left out, which stand for their class."""
    rows: dict[int, list[tuple[str, str, int, int]]] = {}
    for first, ranks in found.ranks.items():
        mine = [e for e in found.events if e.rank == first]
        row = sorted((e.lane.split()[0], e.name, e.start_ns, e.stop_ns) for e in mine)
        rows.update(dict.fromkeys(ranks, row))
    return rows


Make = Callable[[], hir.HostProgram]


def of_example(name: str, mesh: DeviceMesh) -> hir.HostProgram:
    return mf.compile(SMALL[name][0](mesh)[0]).host


def programs() -> dict[str, Make]:
    found: dict[str, Make] = {str(c): c.program for c in CASES}
    found |= {f"{n} {seed}": partial(ring, n, seed) for n in TEMPLATES for seed in range(4)}
    for name in SMALL:
        for mesh in (DeviceMesh.arange(tp=4), DeviceMesh.arange(dp=2, tp=3)):
            if name != "two_stages" or mesh.ndim == 1:
                found[f"{name} {mesh}"] = partial(of_example, name, mesh)
    return found | {str(c): lambda c=c: c.compile(4).host for c in STREAMED.values()}


PROGRAMS = programs()


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_overlaps_and_every_post_is_awaited(name: str) -> None:
    program = PROGRAMS[name]()
    for costs in (UNIT, UNEVEN):
        found = on_ranks(program, costs, every_rank(program))
        check(found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_rank_of_a_class_stands_for_all(name: str) -> None:
    """What the first rank of a class does is what each of them does when all are gone through."""
    program = PROGRAMS[name]()
    few, all_ = timeline(program, UNEVEN), on_ranks(program, UNEVEN, every_rank(program))
    assert stretch(few) == stretch(all_)
    assert few.seconds == all_.seconds


# -- counted by hand -------------------------------------------------------------------------------


def pipeline(stages: int, batches: int, is_ahead: bool) -> hir.HostProgram:
    """Batches go through stages of one rank each, one relu in each.

    A stage receives a batch when it is done with the one before, or asks for all of them ahead.
    """
    receives = [
        "  if coord(pp) > 0 {\n"
        f"    %r{n}: f32[4] of [{4 * stages}] (pp=S0) = alloc\n"
        f"    %c{n} = recv(%r{n}, from=coord(pp) - 1, axis=pp)\n"
        "  }"
        for n in range(batches)
    ]
    lines = receives if is_ahead else []
    for n in range(batches):
        lines += [] if is_ahead else [receives[n]]
        lines += [
            f"  if coord(pp) > 0 {{\n    wait %c{n}\n  }}",
            f"  %y{n}: f32[4] of [{4 * stages}] (pp=S0) = relu(%x)",
            f"  if coord(pp) < {stages - 1} {{",
            f"    %d{n} = send(%y{n}, to=coord(pp) + 1, axis=pp)\n  }}",
        ]
    lines += [f"  if coord(pp) < {stages - 1} {{\n    wait %d{n}\n  }}" for n in range(batches)]
    body = "\n".join(lines)
    return hir.parse(
        f"host @gpipe on mesh(pp={stages}) {{\n"
        f"  input %x: f32[4] of [{4 * stages}] (pp=S0)\n{body}\n  return %y{batches - 1}\n}}"
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("batches", [1, 3, 8])
@pytest.mark.parametrize("c", [0.0, 0.5, 1.0, 2.0])
def test_a_pipeline_has_the_bubble_of_the_textbook(stages: int, batches: int, c: float) -> None:
    """m batches through s stages take m + s - 1 (Huang et al. 2019, arXiv:1811.06965).

    A transfer of c seconds is waited for s - 1 times where it is hidden behind work, and is what
    limits the throughput where it takes longer. If asked for late, it is waited for each time.
    """
    costs = Costs(launch_s=1.0, links={LinkKey(): Link(c)})
    ahead = timeline(pipeline(stages, batches, is_ahead=True), costs)
    late = timeline(pipeline(stages, batches, is_ahead=False), costs)
    period = max(1, c) if stages > 1 else 1
    assert ahead.seconds == stages + c * (stages - 1) + (batches - 1) * period
    period = 1 + c if stages > 1 else 1
    assert late.seconds == stages + c * (stages - 1) + (batches - 1) * period
    for found in (ahead, late):
        check(found)
        assert busy([e for e in found.events if e.part == "work"]) == stages * batches * 1e9


@pytest.mark.parametrize("seed", range(6))
def test_a_ring_takes_a_transfer_and_a_relu_in_each_turn(seed: int) -> None:
    program = ring("gather", seed)
    n = program.meshes[0].axis_size("tp")
    assert timeline(program, UNIT).seconds == 2 * n


OVERLAP = program_text("timeline/overlap")


@pytest.mark.parametrize(("transfer", "total"), [(0.5, 4.0), (2.0, 4.0), (5.0, 7.0)])
def test_work_behind_a_post_hides_it(transfer: float, total: float) -> None:
    """neg, then the transfer beside two exps, then add."""
    costs = Costs(launch_s=1.0, links={LinkKey("Allreduce", "tp"): Link(transfer)})
    found = timeline(hir.parse(OVERLAP), costs)
    check(found)
    assert found.seconds == total
    waits = [e for e in found.events if e.part == "wait"]
    assert [e.stop_ns - e.start_ns for e in waits] == [max(0, transfer - 2.0) * 1e9]
    assert found.ranks == {0: (0, 1)}


@pytest.mark.parametrize(
    ("transfer", "slows", "total"),
    [(2.0, 0.25, 4.5), (0.5, 0.5, 4.25), (5.0, 0.25, 7.0), (2.0, 0.0, 4.0)],
)
def test_work_is_slower_beside_a_transfer(transfer: float, slows: float, total: float) -> None:
    """2 s at three quarters of the speed do 1.5 s of the work, and half a second is left."""
    costs = Costs(launch_s=1.0, links={LinkKey("Allreduce", "tp"): Link(transfer, slows=slows)})
    found = timeline(hir.parse(OVERLAP), costs)
    check(found)
    assert found.seconds == pytest.approx(total, abs=1e-8)


@pytest.mark.parametrize(("cache", "total"), [(0, 4.0), (64, 6.0), (32, 8.0), (16, 8.0)])
def test_a_communication_finds_little_in_a_cache_that_work_has_gone_through(
    cache: int, total: float
) -> None:
    """neg reads and writes 16 bytes each; a transfer of 2 s takes up to 4 s more behind it."""
    link = Link(2.0, cold=Curve(((1.0, 4.0),)))
    costs = Costs(launch_s=1.0, links={LinkKey("Allreduce", "tp"): link}, cache=cache)
    found = timeline(hir.parse(OVERLAP), costs)
    check(found)
    assert found.seconds == total


def test_behind_another_communication_nothing_is_cold() -> None:
    link = Link(2.0, cold=Curve(((1.0, 4.0),)))
    costs = Costs(launch_s=1.0, links={LinkKey("Allreduce", "tp"): link}, cache=32)
    found = timeline(
        hir.parse("""
host @twice on mesh(tp=2) {
  input %x: f32[4] (tp=P(sum))
  %a: f32[4] (tp=P(sum)) = neg(%x)
  %y: f32[4] (tp=R) = alloc
  %z: f32[4] (tp=R) = alloc
  %c0 = post allreduce[sum](%a) -> %y f32[4] (tp=P(sum)) => (tp=R) axis=tp
  %c1 = post allreduce[sum](%a) -> %z f32[4] (tp=P(sum)) => (tp=R) axis=tp
  wait %c0
  wait %c1
  return %y, %z
}"""),
        costs,
    )
    check(found)
    taken = [e.stop_ns - e.start_ns for e in found.events if e.part == "transfer"]
    assert taken == [6e9, 2e9]


@pytest.mark.parametrize("name", sorted(PROGRAMS)[::7])
def test_nothing_is_quicker_where_transfers_slow_work(name: str) -> None:
    program = PROGRAMS[name]()
    slow = replace(UNEVEN, links={LinkKey(): replace(UNEVEN.links[LinkKey()], slows=0.3)})
    free, slowed = timeline(program, UNEVEN), timeline(program, slow)
    check(slowed)
    assert free.seconds <= slowed.seconds <= free.seconds / (1 - 0.9)


def test_a_rank_in_both_meshes_hands_over_and_takes() -> None:
    """From ranks 0, 1 to 1, 2: rank 1 receives and sends at once; from 0, 1 to 2, 1 it keeps."""
    text = """
host @over on m0=mesh(x=2), m1=mesh(x=2: RANKS) {
  input %x: f32[2] of [4] m0(x=S0)
  %y: f32[2] of [4] m1(x=S0) = alloc
  %c = post sendrecv(%x) -> %y f32[4] m0(x=S0) => m1(x=S0)
  wait %c
  %z: f32[2] of [4] m1(x=S0) = exp(%y)
  return %z
}"""
    for ranks, lanes_of_1 in (("1 2", {"from 0", "to 2", "wait", "host"}), ("2 1", {"host"})):
        found = timeline(hir.parse(text.replace("RANKS", ranks)), UNIT)
        check(found)
        assert found.seconds == 2
        assert {e.lane for e in found.events if e.rank == 1} == lanes_of_1


def test_streams_go_on_side_by_side() -> None:
    """Two exps on a stream of their own, three on the caller's: 3 s, and the sync and a neg."""
    program = hir.parse("""
host @streams on mesh(x=1) {
  input %x: f32[2] (x=R)
  %caller = get_stream
  set_stream 0
  %a: f32[2] (x=R) = exp(%x)
  %b: f32[2] (x=R) = exp(%a)
  set_stream %caller
  %c: f32[2] (x=R) = exp(%x)
  %d: f32[2] (x=R) = exp(%c)
  %e: f32[2] (x=R) = exp(%d)
  sync 0
  %y: f32[2] (x=R) = add(%b, %e)
  return %y
}""")
    found = timeline(program, UNIT)
    assert found.seconds == 4
    assert {lane: len(row) for (_, lane), row in lanes(found.events).items()} == {
        "host": 4,
        "stream 0": 2,
    }


def test_one_link_carries_one_communication_at_a_time() -> None:
    """Two posts along tp follow each other, one along dp goes on beside them."""
    program = hir.parse("""
host @links on mesh(dp=2, tp=2) {
  input %x: f32[4] (dp=P(sum), tp=P(sum))
  input %a: f32[4] (dp=R, tp=P(sum))
  input %b: f32[4] (dp=R, tp=P(sum))
  input %c: f32[4] (dp=P(sum), tp=R)
  %a1: f32[4] (dp=R, tp=R) = alloc
  %b1: f32[4] (dp=R, tp=R) = alloc
  %c1: f32[4] (dp=R, tp=R) = alloc
  %h0 = post allreduce[sum](%a) -> %a1 f32[4] (dp=R, tp=P(sum)) => (dp=R, tp=R) axis=tp
  %h1 = post allreduce[sum](%b) -> %b1 f32[4] (dp=R, tp=P(sum)) => (dp=R, tp=R) axis=tp
  %h2 = post allreduce[sum](%c) -> %c1 f32[4] (dp=P(sum), tp=R) => (dp=R, tp=R) axis=dp
  wait %h0
  wait %h1
  wait %h2
  return %a1, %b1, %c1
}""")
    found = timeline(program, UNIT)
    check(found)
    moved = [(e.lane, e.start_ns, e.stop_ns) for e in found.events if e.part == "transfer"]
    s = 10**9
    assert sorted(moved) == [("dp", 0, s), ("tp", 0, s), ("tp", s, 2 * s)]


def test_a_rank_has_one_way_in_and_one_way_out() -> None:
    """Two receives follow each other, and so do two sends; those go on beside these."""
    program = hir.parse("""
host @ways on mesh(tp=3) {
  input %x: f32[4] of [12] (tp=S0)
  %a: f32[4] of [12] (tp=S0) = alloc
  %b: f32[4] of [12] (tp=S0) = alloc
  group_start
  %s1 = send(%x, to=(rank + 1) mod 3, axis=tp)
  %r1 = recv(%a, from=(rank + 2) mod 3, axis=tp)
  %s2 = send(%x, to=(rank + 2) mod 3, axis=tp)
  %r2 = recv(%b, from=(rank + 1) mod 3, axis=tp)
  group_end
  wait %s1
  wait %r1
  wait %s2
  wait %r2
  return %a, %b
}""")
    for found in (timeline(program, UNIT), on_ranks(program, UNIT, every_rank(program))):
        check(found)
        assert found.seconds == 2
        rows = lanes(e for e in found.events if e.part == "transfer")
        seconds = {lane: [e.start_ns // 10**9 for e in rows[0, lane]] for _, lane in rows}
        assert seconds == {"out": [0, 1], "in": [0, 1]}


def test_teams_of_other_meshes_have_links_of_their_own() -> None:
    """Rank 1 is in two teams along x: what they do goes on side by side, whoever comes first."""
    program = hir.parse("""
host @teams on m0=mesh(x=2), m1=mesh(x=2: 1 2) {
  input %a: f32[4] m0(x=P(sum))
  input %b: f32[4] m1(x=P(sum))
  %a1: f32[4] m0(x=R) = alloc
  %b1: f32[4] m1(x=R) = alloc
  %h0 = post allreduce[sum](%a) -> %a1 f32[4] m0(x=P(sum)) => m0(x=R) axis=x
  %h1 = post allreduce[sum](%b) -> %b1 f32[4] m1(x=P(sum)) => m1(x=R) axis=x
  wait %h0
  wait %h1
  return %a1, %b1
}""")
    found = timeline(program, UNIT)
    check(found)
    moved = {(e.rank, e.lane): e.stop_ns for e in found.events if e.part == "transfer"}
    assert {*moved} == {(0, "x"), (1, "x"), (1, "x 2"), (2, "x")}
    assert {*moved.values()} == {10**9}


def test_pieces_arrive_one_by_one() -> None:
    """The first half is there after 2 of 4 s, and worked on while the second is under way."""
    program = hir.parse("""
host @pieces on mesh(tp=2) {
  input %x: f32[4] (tp=P(sum))
  %y: f32[4] (tp=R) = alloc
  %z: f32[4] (tp=R) = alloc
  %c0 = post allreduce[sum](%x) -> %y f32[4] (tp=P(sum)) => (tp=R) axis=tp pieces=2
  for %i in 0..2 {
    wait %c0[%i]
    %y.i: f32[2] of [4] (tp=R, chunk(0,2,%i)) = chunk(%y)
    %z.i: f32[2] of [4] (tp=R, chunk(0,2,%i)) = chunk(%z)
    %z.i = mul(%y.i, 10.0)
    free %y.i, %z.i
  }
  free %y
  return %z
}""")
    costs = Costs(launch_s=1.0, links={LinkKey(): Link(4.0)})
    works = [e for e in timeline(program, costs).events if e.part == "work"]
    assert [e.start_ns for e in works] == [2 * 10**9, 4 * 10**9]


def test_ranks_that_wait_for_each_other_are_named() -> None:
    program = hir.parse("""
host @stuck on mesh(x=2) {
  input %x: f32[1] of [2] (x=S0)
  %y: f32[1] of [2] (x=S0) = alloc
  %c = recv(%y, from=1 - rank)
  wait %c
  %d = send(%x, to=1 - rank)
  wait %d
  return %y
}""")
    with pytest.raises(mf.CommunicationError, match=r"rank 1 waits at wait %c"):
        timeline(program, UNIT)


# -- costs -----------------------------------------------------------------------------------------


def test_work_takes_its_operations_or_its_bytes() -> None:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("mm") as fd:
        x = fd.define_tensor([8, 16], mesh=mesh)
        w = fd.define_tensor([16, 32], mesh=mesh, layout={"tp": Shard(1)})
        fd.add_output(fd.ops.relu(x @ w))
    program = mf.compile(fd)

    def of(costs: Costs) -> list[float]:
        events = program.timeline(costs).events
        return [(e.stop_ns - e.start_ns) / 1e9 for e in events]

    operations = 2 * 8 * 16 * 16  # this rank's half of the columns
    assert of(Costs(flops=1e3)) == [operations / 1e3]
    read = 4 * (8 * 16 + 16 * 16 + 8 * 16)
    assert of(Costs(bandwidth=1e3)) == [read / 1e3, 4 * 2 * 8 * 16 / 1e3]
    assert of(Costs(launch_s=0.25, flops=1e9)) == [0.25, 0.25]


#: what is computed of operands of these shapes -> multiplications and additions, counted by hand
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "contraction": (
        lambda x, y: torch.einsum("bij,bjk->ik", x, y), ((2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    "convolution": (
        F.conv2d, ((2, 4, 6, 5), (6, 4, 3, 2)), 2 * (2 * 6 * 4 * 4) * (4 * 3 * 2)),
    "in groups": (
        lambda x, w: F.conv2d(x, w, groups=2), ((2, 4, 6, 5), (6, 2, 3, 2)),
        2 * (2 * 6 * 4 * 4) * (2 * 3 * 2)),
    "transposed": (
        F.conv_transpose2d, ((2, 4, 6, 5), (4, 6, 3, 2)), 2 * (2 * 4 * 6 * 5) * (6 * 3 * 2)),
    "groups of rows": (
        lambda x, w: mf.ops.grouped_mm(x, w, mf.ops.tensor([3, 8])), ((8, 4), (2, 4, 5)),
        2 * 8 * 4 * 5),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_count_their_operations(name: str) -> None:
    build, shapes, count = PRODUCTS[name]
    with mf.FusionDefinition("product") as fd:
        fd.add_output(build(*(fd.define_tensor(s, mesh=DeviceMesh([0])) for s in shapes)))
    found = mf.compile(fd).timeline(Costs(flops=1e3)).events
    assert max((e.stop_ns - e.start_ns) / 1e9 for e in found) == count / 1e3


def test_bytes_of_a_communication_are_those_that_it_brings() -> None:
    """An all-reduce of 4 f32 on 2 ranks by the ring: 2 * (2 - 1) / 2 * 16 bytes."""
    found = timeline(hir.parse(OVERLAP), Costs(links={LinkKey(axes="tp"): Link(0.0, 8.0)}))
    (transfer,) = [e for e in found.events if e.part == "transfer"]
    assert transfer.nbytes == 16 and transfer.stop_ns - transfer.start_ns == 2 * 10**9
    assert transfer.detail == "(tp=P(sum)) -> (tp=R)"


def test_attention_counts_its_products() -> None:
    with mf.FusionDefinition("attend") as fd:
        q, k, v = (fd.define_tensor([2, 4, 6, 8], mesh=DeviceMesh([0])) for _ in range(3))
        fd.add_output(fd.ops.scaled_dot_product_attention(q, k, v))
    seconds = mf.compile(fd).timeline(Costs(flops=1.0)).seconds
    assert seconds == 2 * (2 * 2 * 4 * 6 * 6 * 8)


def test_a_name_is_no_table_of_costs() -> None:
    with mf.FusionDefinition() as fd:
        fd.add_output(fd.define_tensor([2], mesh=DeviceMesh.arange(x=1)) * 2.0)
    with pytest.raises(mf.ProgramError, match=r"a timeline by 'h100'(?s:.)*mdfuse\.seeing\.H100"):
        mf.compile(fd).timeline("h100")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Costs(launch_s=-1.0), r"launch_s=-1.0"),
        (lambda: Costs(multiprocessors=-1), r"multiprocessors=-1"),
        (lambda: Costs(cache=1.5), r"cache=1.5"),  # type: ignore[arg-type]
        (lambda: Costs(flops=0), r"flops=0"),
        (lambda: Costs(launch_s=1e300), r"launch_s=1e\+300(.|\n)*from 0 to 1e\+09"),
        (lambda: Link(1e-6, 1e-300), r"bandwidth=1e-300(.|\n)*from 1e-09"),
        (lambda: Link(float("inf")), "latency_s=inf"),
        (lambda: Link(slows=0.96), r"slows=0.96"),
        (lambda: Link(slows=True), r"slows=True"),
        (lambda: Costs(bandwidth=float("nan")), "bandwidth=nan"),
        (lambda: Link(bandwidth=True), "bandwidth=True"),
        (lambda: Costs(links={LinkKey(): 3.0}), r"links\[.*\] is 3.0"),  # type: ignore[dict-item]
        (lambda: Costs(links={"tp": Link()}), r"links\['tp'\] is"),  # type: ignore[dict-item]
    ],
)
def test_figures_that_mean_nothing_are_refused(make: object, what: str) -> None:
    with pytest.raises(mf.ProgramError, match=what):
        make()  # type: ignore[operator]


def test_the_most_special_link_counts() -> None:
    links = {"*": 1.0, "tp": 2.0, "Allreduce": 3.0, "Allreduce tp": 4.0}
    costs = Costs(links={LinkKey.of(key): Link(latency) for key, latency in links.items()})
    found = [costs.link(*x).latency_s for x in (("Allreduce", "tp"), ("Allgather", "tp"))]
    found += [costs.link(*x).latency_s for x in (("Allreduce", "dp"), ("Gather", "dp"))]
    assert found == [4.0, 2.0, 3.0, 1.0]


# -- programs --------------------------------------------------------------------------------------


def test_a_symbolic_program_has_a_timeline_for_some_extents() -> None:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("rows") as fd:
        x = fd.define_tensor([-1, 4], mesh=mesh, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(x * 2).on(mesh, {}))
    program = mf.compile(fd)
    costs = Costs(bandwidth=1.0)
    seconds = [program.timeline(costs, {"x.0": n}).seconds for n in (4, 8)]
    assert seconds[1] == 2 * seconds[0] > 0
    with pytest.raises(mf.ProgramError, match="missing"):
        program.timeline(costs)


def test_a_thousand_ranks_that_run_alike_are_gone_through_once() -> None:
    mesh = DeviceMesh.arange(dp=128, tp=8)
    with mf.FusionDefinition("layers") as fd:
        x = fd.define_tensor([256, 32, 64], mesh=mesh, layout={"dp": Shard(0)}, name="x")
        for n in range(8):
            a = fd.define_tensor([64, 256], mesh=mesh, layout={"tp": Shard(1)}, name=f"a{n}")
            b = fd.define_tensor([256, 64], mesh=mesh, layout={"tp": Shard(0)}, name=f"b{n}")
            x = fd.ops.set(x + fd.ops.relu(x @ a) @ b).on(mesh, {"dp": Shard(0)})
        fd.add_output(x)
    found = mf.compile(fd).timeline(UNIT)
    assert [len(r) for r in found.ranks.values()] == [1024]
    check(found)
    assert found.seconds == 8 * (4 + 1)  # two products, relu, sum; a reduction


def test_what_a_run_takes_comes_on_top() -> None:
    """Once, however much there is to do; no event is about it."""
    program = mf.compile(two_products(), mf.Options(compile="never"))
    costs = Costs(launch_s=1.0, run_s=0.25, links={LinkKey(): Link(1.0)})
    found, plain = program.timeline(costs), program.timeline(replace(costs, run_s=0.0))
    assert found.events == plain.events and found.seconds == plain.seconds + 0.25 == 3.25


def test_what_a_run_takes_more_that_communicates_comes_on_top_once() -> None:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("alone") as fd:
        fd.add_output(fd.ops.exp(fd.define_tensor([4], mesh=mesh)))
    costs = Costs(launch_s=1.0, run_s=0.25, posting_s=0.5, links={LinkKey(): Link(1.0)})
    alone = mf.compile(fd, mf.Options(compile="never")).timeline(costs)
    assert alone.seconds == 1.25
    with mf.FusionDefinition("sums") as fd:
        x = fd.define_tensor([4], mesh=mesh, layout={"tp": mf.Partial()})
        fd.add_output(fd.ops.set(x).on(mesh, {}))
        fd.add_output(
            fd.ops.set(fd.ops.exp(fd.define_tensor([4], mesh=mesh, layout={"tp": Shard(0)}))).on(
                mesh, {}
            )
        )
    found = mf.compile(fd, mf.Options(compile="never")).timeline(costs)
    sent = sum(e.part == "transfer" and e.rank == 0 for e in found.events)
    assert sent == 2 and found.seconds - 0.75 == max(e.stop_ns for e in found.events) / 1e9


def two_products() -> mf.FusionDefinition:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("two") as fd:
        x = fd.define_tensor([4, 8], mesh=mesh)
        a = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(1)})
        b = fd.define_tensor([6, 8], mesh=mesh, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(x @ a @ b).on(mesh, {}))
    return fd


def test_a_timeline_prints_in_a_line() -> None:
    mesh = DeviceMesh.arange(tp=4)
    with mf.FusionDefinition("short") as fd:
        fd.add_output(fd.define_tensor([8], mesh=mesh) * 2 + 1)
    found = mf.compile(fd, mf.Options(compile="never")).timeline(UNIT)
    assert repr(found) == "<Timeline of @short on 4 ranks: 2 s, 2 events>"


def test_the_example_of_training_has_a_timeline() -> None:
    fd, _ = example("train_llama").build(DeviceMesh.arange(dp=2, tp=2))
    found = mf.compile(fd).timeline(UNEVEN)
    check(found)
    assert found.ranks == {0: (0, 1, 2, 3)}
    assert {e.lane for e in found.events} >= {"host", "dp", "tp", "wait"}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_readme_are_made_by_the_examples(name: str) -> None:
    made = PICTURES[name]()
    assert (FOLDER / name).read_text(encoding="utf-8") == made + "\n"
    assert f"docs/images/{name}" in (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    assert ET.fromstring(made).tag == "{http://www.w3.org/2000/svg}svg"
