"""Which ranks run alike."""

from __future__ import annotations

import pytest
from helpers.example_files import example
from helpers.programs import program_text

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.check import verify
from mdfuse.seeing.costs import H100
from mdfuse.seeing.rank_classes import Classes, rank_classes
from mdfuse.seeing.timeline import on_ranks, timeline


def split(rows: int, mesh: DeviceMesh) -> hir.HostProgram:
    with mf.FusionDefinition("split") as fd:
        layout = {axis: Shard(0) for axis in mesh.axes}
        fd.add_output(fd.define_tensor([rows, 2], mesh=mesh, layout=layout) * 2)
    return mf.compile(fd).host


@pytest.mark.parametrize(
    ("rows", "classes"),
    [
        (8, [(0, 1, 2, 3)]),
        (7, [(0, 1, 2), (3,)]),  # 2, 2, 2, 1 rows
        (5, [(0, 1), (2,), (3,)]),  # 2, 2, 1, 0
        (2, [(0, 1), (2, 3)]),
    ],
)
def test_ranks_with_equally_large_parts(rows: int, classes: list[tuple[int, ...]]) -> None:
    assert [*rank_classes(split(rows, DeviceMesh.arange(tp=4))).members] == classes


def test_ranks_that_meet_others_run_apart() -> None:
    """All have equal parts; ranks 0 and 1 sum up with 2 and 3, of which 3 also meets rank 4."""
    mesh, far = DeviceMesh.arange(tp=4), DeviceMesh([3, 4], axes=("x",))
    with mf.FusionDefinition("meet") as fd:
        x = fd.define_tensor([4], mesh=mesh, layout={"tp": Shard(0)})
        y = fd.define_tensor([2], mesh=far, layout={"x": Shard(0)})
        fd.add_output(fd.ops.set(fd.ops.sum(x)).on(mesh, {}))
        fd.add_output(fd.ops.set(fd.ops.sum(y)).on(far, {}))
    assert [*rank_classes(mf.compile(fd).host).members] == [(0, 1, 2), (3,), (4,)]


def test_stages_of_a_pipeline() -> None:
    fd, _ = example("two_stages").build(DeviceMesh.arange(tp=8))
    found = rank_classes(mf.compile(fd).host)
    assert found.members == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.firsts == (0, 4) and found.of[6] == 4


def test_programs_that_ask_for_their_place_tell_ranks_apart() -> None:
    """In a grid, a ring along tp has a class for each position in it."""
    text = """
host @ring on mesh(dp=3, tp=2) {
  input %x: f32[1] of [2] (dp=R, tp=S0)
  %y: f32[1] of [2] (dp=R, tp=S0) = alloc
  group_start
  %c0 = send(%x, to=(coord(tp) + 1) mod 2, axis=tp)
  %c1 = recv(%y, from=(coord(tp) - 1) mod 2, axis=tp)
  group_end
  wait %c0
  wait %c1
  return %y
}"""
    assert rank_classes(hir.parse(text)).members == ((0, 2, 4), (1, 3, 5))
    by_rank = text.replace("coord(tp) + 1) mod 2, axis=tp", "rank + 1) mod 6").replace(
        "coord(tp) - 1) mod 2, axis=tp", "rank - 1) mod 6"
    )
    assert list(rank_classes(hir.parse(by_rank)).members) == [(r,) for r in range(6)]


def test_a_thousand_ranks_are_one_class() -> None:
    (members,) = rank_classes(split(8192, DeviceMesh.arange(dp=128, tp=64))).members
    assert len(members) == 8192


def test_one_ranks_program_is_its_own() -> None:
    local = project(split(4, DeviceMesh.arange(tp=2)), 1)
    assert rank_classes(local).members == ((1,),)


RING = program_text("rank_classes/ring")


def test_ranks_of_an_even_ring_run_alike_but_for_where_they_begin() -> None:
    even = hir.parse(RING.replace("ROWS", "2").replace("SIZE", "4"))
    assert rank_classes(even).members == ((0, 2, 4), (1, 3, 5))
    assert rank_classes(even, are_rings_alike=True).members == ((0, 1, 2, 3, 4, 5),)
    uneven = hir.parse(RING.replace("ROWS", "2").replace("SIZE", "3"))
    assert rank_classes(uneven, are_rings_alike=True) == rank_classes(uneven)
    first = RING.replace("(coord(tp) - %i) mod 2", "coord(tp)").replace(
        "(coord(tp) + %i) mod 2, axis", "coord(tp), axis"
    )
    own = hir.parse(first.replace("ROWS", "2").replace("SIZE", "4"))
    assert rank_classes(own, are_rings_alike=True) == rank_classes(own)


@pytest.mark.parametrize("are_rings_alike", [False, True])
@pytest.mark.parametrize("extent", [3, 5, 7, 8, 9])
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}, {"dp": 2, "tp": 3}])
def test_ranks_whose_neighbours_have_other_parts_run_apart(
    sizes: dict[str, int], extent: int, are_rings_alike: bool
) -> None:
    """Ranks 0 and 1 have two of 7 columns each over 2 x 2, and hear from ranks with 2 and 1."""
    mesh = DeviceMesh.arange(**sizes)
    with mf.FusionDefinition("rings") as fd:
        x = fd.define_tensor([8, 8], mesh=mesh, layout={"dp": Shard(0)})
        w = fd.define_tensor([extent, 8], mesh=mesh, layout={"dp": Shard(0), "tp": Shard(0)})
        ring = mf.Stream(0, mesh.axis_size("dp"), rotate="dp")
        places = {"dp": Shard(1), "tp": Shard(1)}
        fd.add_output((x * 0.5 @ w.transpose(0, 1)).on(mesh, places, stream=ring))
    host = mf.compile(fd, mf.Options(overlap="never")).host
    assert any(i.op == "send" for i in host.walk())
    found = rank_classes(host, are_rings_alike=are_rings_alike)
    each = Classes(tuple((r,) for r in mesh.ranks), {r: r for r in mesh.ranks})
    assert on_ranks(host, H100, found).seconds == on_ranks(host, H100, each).seconds


def test_peers_that_are_numbers_tell_ranks_apart() -> None:
    """Both send to rank 2, which receives twice; no term says who is who."""
    text = """
host @pairs on m0=mesh(z=3), m1=mesh(y=1: 2) {
  input %x: f32[1] m0(z=varies)
  input %z: f32[1] m1(y=R)
  %y: f32[1] m0(z=varies) = alloc(fill=0)
  if coord(y) {
    %c0 = send(%x, to=2)
    wait %c0
  } else {
    for %i in 0..2 {
      %c1 = recv(%y, from=%i)
      wait %c1
    }
  }
  return %y
}"""
    host = hir.parse(text)
    verify(host)
    assert [*rank_classes(host).members] == [(0,), (1,), (2,)]
    assert timeline(host, H100).seconds > 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_takes_as_long_as_each_of_its_ranks(ranks: int) -> None:
    """Also where it sums up what it multiplies, and passes that on."""
    mesh = DeviceMesh.arange(tp=ranks)
    with mf.FusionDefinition("rings") as fd:
        x = fd.define_tensor([4096, 8192], mesh=mesh, layout={"tp": Shard(0)})
        w1 = fd.define_tensor([8192, 8192], mesh=mesh, layout={"tp": Shard(1)})
        w2 = fd.define_tensor([8192, 8192], mesh=mesh, layout={"tp": Shard(0)})
        ring = mf.Stream(0, 2 * ranks, rotate="tp")
        h = (x * 0.5 @ w1).on(mesh, {"tp": Shard(1)}, stream=ring)
        fd.add_output(fd.ops.set(h.relu() @ w2).on(mesh, {"tp": Shard(0)}))
    host = mf.compile(fd, mf.Options(overlap="auto", costs="h100")).host
    alike = rank_classes(host, are_rings_alike=True)
    assert len(alike.members) == 1 and len(rank_classes(host).members) == ranks
    assert on_ranks(host, H100, alike).seconds == timeline(host, H100).seconds
