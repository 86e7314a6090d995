"""Which ranks run alike."""

from __future__ import annotations

import pytest
from helpers.example_files import example

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir
from mdfuse.seeing.rank_classes import rank_classes


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
    local = split(4, DeviceMesh.arange(tp=2)).project(1)
    assert rank_classes(local).members == ((1,),)
