"""Communications of host programs: what meets what, pieces, groups, and what does not meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.host_programs import numbers, parse, simulate

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.rank.pipelines import project

SEEDS = [None, *range(5)]


def run(body: str, ranks: int, schedule: int | None = None, **more: Any) -> list[list[Any]]:
    """Each rank passes %x: two numbers of its own."""
    program = parse(body, f"mesh(x={ranks})")
    rows = [{"x": numbers(2, start=10 * rank), **more} for rank in range(ranks)]
    return list(simulate(program, *rows, schedule=schedule).per_rank)


HEAD = "input %x: f32[2] (x=R) %y: f32[2] (x=R) = alloc"


# -- send and receive ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_ring(ranks: int, seed: int | None) -> None:
    """On one rank it sends to itself."""
    body = f"""{HEAD}
      group_start
      %s = send(%x, to=(rank + 1) mod {ranks})
      %r = recv(%y, from=(rank - 1) mod {ranks})
      group_end
      wait %s
      wait %r
      return %y"""
    got = run(body, ranks, seed)
    for rank in range(ranks):
        assert torch.equal(got[rank][0], numbers(2, start=10 * ((rank - 1) % ranks)))


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_ring_along_an_axis(axis: str) -> None:
    """Positions count along the axis, in the mesh's own order of ranks."""
    mesh = mf.DeviceMesh([[3, 1, 4], [0, 5, 2]], axes=("dp", "tp"))
    n = mesh.axis_size(axis)
    body = f"""
      input %x: f32[2] (dp=R, tp=R)
      %y: f32[2] (dp=R, tp=R) = alloc
      group_start
      %s = send(%x, to=(coord({axis}) + 1) mod {n}, axis={axis})
      %r = recv(%y, from=(coord({axis}) - 1) mod {n}, axis={axis})
      group_end
      wait %s
      wait %r
      return %y"""
    program = parse(body, "mesh(dp=2, tp=3: 3 1 4 0 5 2)")
    rows = [{"x": numbers(2, start=10 * rank)} for rank in range(6)]
    result = simulate(program, *rows)
    for rank in range(6):
        team = mesh.team(rank, axis)
        assert torch.equal(result.per_rank[rank][0], rows[team[team.index(rank) - 1]]["x"])
        local = project(program, rank)
        assert hir.parse(str(local)) == local
        peers = [i.kwargs for i in local if i.op in ("send", "recv")]
        assert all("axis" not in p and p.keys() <= {"to", "from"} for p in peers)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_to_oneself(is_grouped: bool, seed: int | None) -> None:
    """First sent, first received; what was sent is as it was when it was sent."""
    start, end = ("group_start", "group_end") if is_grouped else ("", "")
    body = f"""{HEAD}
      %z: f32[2] (x=R) = alloc
      %h: f32[2] (x=R) = mul(%x, 1.0)
      {start}
      %s0 = send(%h, to=rank)
      %s1 = send(%x, to=rank)
      {end}
      wait %s0
      %h = mul(%h, 0.0)
      {start}
      %r0 = recv(%y, from=rank)
      %r1 = recv(%z, from=rank)
      {end}
      wait %r1
      wait %r0
      wait %s1
      %z = add(%z, 1.0)
      return %y, %z"""
    for rank, (y, z) in enumerate(run(body, 2, seed)):
        assert torch.equal(y, numbers(2, start=10 * rank))
        assert torch.equal(z, numbers(2, start=10 * rank) + 1)


def test_to_oneself_what_is_freed_before_it_is_received() -> None:
    body = f"""{HEAD}
      %h: f32[2] (x=R) = mul(%x, 2.0)
      %s = send(%h, to=rank)
      wait %s
      free %h
      %r = recv(%y, from=rank)
      wait %r
      return %y"""
    ((got,),) = run(body, 1)
    assert got.tolist() == [0, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_both_ways_in_one_group(seed: int | None) -> None:
    """The i-th send to a rank meets the i-th receive there, whatever stands between."""
    body = f"""{HEAD}
      %z: f32[2] (x=R) = alloc
      %h: f32[2] (x=R) = add(%x, 100.0)
      group_start
      %r0 = recv(%y, from=1 - rank)
      %s0 = send(%x, to=1 - rank)
      %r1 = recv(%z, from=1 - rank)
      %s1 = send(%h, to=1 - rank)
      group_end
      wait %r1
      wait %r0
      wait %s0
      wait %s1
      return %y, %z"""
    for rank, (y, z) in enumerate(run(body, 2, seed)):
        assert torch.equal(y, numbers(2, start=10 * (1 - rank)))
        assert torch.equal(z, numbers(2, start=10 * (1 - rank)) + 100)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_some_ranks_send(seed: int | None) -> None:
    body = f"""{HEAD}
      %y = mul(%x, 1.0)
      if rank == 0 {{
        %s = send(%x, to=2)
        wait %s
      }}
      if rank == 2 {{
        %r = recv(%y, from=0)
        wait %r
      }}
      return %y"""
    got = run(body, 3, seed)
    assert [y.tolist() for (y,) in got] == [[0, 1], [10, 11], [0, 1]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_receive_into_a_column_is_delivered_once(seed: int | None) -> None:
    """The wait for another member of the group does not deliver again."""
    body = """
      input %x: f32[2] (x=R)
      %m: f32[2,3] (x=R) = alloc
      %y: f32[2] (x=R) = select(%m, dim=1, index=1)
      group_start
      %s = send(%x, to=1 - rank)
      %r = recv(%y, from=1 - rank)
      group_end
      wait %r
      %y = mul(%y, 2.0)
      wait %s
      return %y"""
    for rank, (y,) in enumerate(run(body, 2, seed)):
        assert torch.equal(y, 2 * numbers(2, start=10 * (1 - rank)))


# -- the same post again, groups, pieces, barriers -----------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_post_that_runs_several_times(seed: int | None) -> None:
    body = f"""
      input %x: f32[2] (x=P(sum))
      {HEAD.split("(x=R)", 1)[1]}
      %h: f32[2] (x=P(sum)) = mul(%x, 1.0)
      for %i in 0..3 {{
        %c = post allreduce[sum](%h) -> %y f32[2] (x=P(sum)) => (x=R) axis=x
        wait %c
        %h = mul(%y, 0.5)
      }}
      return %y"""
    total = 3 * numbers(2) + 30
    for (y,) in run(body, 3, seed):
        assert torch.equal(y, total * 1.5 * 1.5)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_handle_twice(seed: int | None) -> None:
    body = """
      input %x: f32[2] (x=P(sum))
      %y: f32[2] (x=R) = alloc
      %z: f32[2] (x=R) = alloc
      %c = post allreduce[sum](%x) -> %y f32[2] (x=P(sum)) => (x=R) axis=x
      wait %c
      %c = post allreduce[max](%x) -> %z f32[2] (x=P(max)) => (x=R) axis=x
      wait %c
      return %y, %z"""
    for y, z in run(body, 3, seed):
        assert (y.tolist(), z.tolist()) == ([30, 33], [20, 21])


@pytest.mark.parametrize("seed", SEEDS)
def test_posts_in_a_group(seed: int | None) -> None:
    body = """
      input %x: f32[2] (x=P(sum))
      %y: f32[2] (x=R) = alloc
      %z: f32[2] (x=R) = alloc
      %v: f32[2] (x=P(sum)) = alloc
      group_start
      %c = post allreduce[sum](%x) -> %y f32[2] (x=P(sum)) => (x=R) axis=x
      %s = send(%x, to=1 - rank)
      %d = post allreduce[max](%x) -> %z f32[2] (x=P(max)) => (x=R) axis=x
      %r = recv(%v, from=1 - rank)
      group_end
      wait %d
      wait %r
      wait %c
      wait %s
      %w: f32[2] (x=R) = alloc
      %w = set(%v)
      return %y, %z, %w"""
    for rank, (y, z, w) in enumerate(run(body, 2, seed)):
        assert (y.tolist(), z.tolist()) == ([10, 12], [10, 11])
        assert torch.equal(w, numbers(2, start=10 * (1 - rank)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["allreduce[sum]", "reduce[sum]", "broadcast"])
def test_pieces(kind: str, pieces: int, seed: int | None) -> None:
    """Three rows in pieces: uneven ones, and empty ones."""
    source = "(x=R)" if kind == "broadcast" else "(x=P(sum))"
    target = "m1(x=R)" if kind.startswith("reduce") else "m0(x=R)"
    body = f"""
      input %x: f32[3,2] m0{source}
      %y: f32[3,2] {target} = alloc
      %c = post {kind}(%x) -> %y f32[3,2] m0{source} => {target} pieces={pieces}
      for %i in 0..{pieces} {{
        wait %c[%i]
      }}
      return %y"""
    if kind == "broadcast":
        body = body.replace("input %x: f32[3,2] m0", "input %x: f32[3,2] m1")
        body = body.replace(f"m0{source} =>", f"m1{source} =>")
    program = parse(body, "m0=mesh(x=3), m1=mesh(x=1)")
    assert hir.parse(str(program)) == program
    rows = [{"x": numbers(3, 2, start=10 * rank)} for rank in range(3)]
    want = sum((row["x"] for row in rows), torch.zeros(3, 2))
    if kind == "broadcast":
        want = rows[0]["x"]
        rows[1:] = [{}, {}]
    for rank, (y,) in enumerate(simulate(program, *rows, schedule=seed).per_rank):
        if kind.startswith("reduce") and rank:
            assert y is None
        else:
            assert torch.equal(y, want)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("axis", ["", "axis=dp", "axis=tp"])
def test_a_barrier(axis: str, seed: int | None) -> None:
    body = f"""
      input %x: f32[2] (dp=R, tp=R)
      for %i in 0..2 {{
        barrier (dp=R, tp=R) {axis}
      }}
      %y: f32[2] (dp=R, tp=R) = add(%x, 1.0)
      return %y"""
    program = parse(body, "mesh(dp=2, tp=2)")
    for printed in (program, project(program, 3)):
        assert hir.parse(str(printed)) == printed
    result = simulate(program, *[{"x": numbers(2)}] * 4, schedule=seed)
    assert all(y.tolist() == [1, 2] for (y,) in result.per_rank)


def test_a_barrier_that_a_rank_never_reaches() -> None:
    body = """
      input %x: f32[2] (x=R)
      if rank != 1 {
        barrier (x=R)
      }
      return %x"""
    with pytest.raises(mf.CommunicationError, match="no rank can go on") as caught:
        run(body, 3)
    text = str(caught.value)
    assert "rank 0 waits at barrier" in text
    assert "only ranks [0, 2] arrived" in text


# -- what does not meet --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("if rank == 0 { %s = send(%x, to=1) wait %s }", "rank 0 sent to rank 1, which did not"),
        ("if rank == 1 { %s = recv(%y, from=0) wait %s }", "rank 1 awaits rank 0, which did not"),
        ("if rank == 0 { %s = send(%x, to=1) }", "rank 0 sent to rank 1, which did not receive"),
        ("%s = recv(%y, from=1 - rank) wait %s", "rank 0 waits at wait %s"),
        (
            "%k: i64[2] (x=R) = cast(%x, dtype=i64) "
            "if rank == 0 { %s = send(%k, to=1) wait %s } "
            "if rank == 1 { %s = recv(%y, from=0) wait %s }",
            "rank 0 sends 2 x torch.int64 to rank 1, which expects 2 x torch.float32",
        ),
        (
            "%k: f32[1] (x=R) = alloc "
            "if rank == 0 { %s = send(%x, to=1) wait %s } "
            "if rank == 1 { %s = recv(%k, from=0) wait %s }",
            "rank 0 sends 2 x torch.float32 to rank 1, which expects 1 x torch.float32",
        ),
    ],
)
def test_transfers_that_do_not_meet(code: str, words: str, seed: int | None) -> None:
    with pytest.raises(mf.CommunicationError) as caught:
        run(f"{HEAD} %y = mul(%x, 1.0) {code} return %y", 2, seed)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("%s = send(%x, to=2) wait %s", "send %x to rank 2 on rank 0"),
        ("%s = send(%x, to=rank - 1) wait %s", "send %x to rank -1 on rank 0"),
        ("%s = send(%x, to=2, axis=x) wait %s", "send %x has to=2 along x"),
        ("%s = send(%x, to=0, axis=y) wait %s", "no axis 'y'"),
        ("%s = recv(%y, from=rank) wait %s", "receives from itself what it has not sent"),
        ("%s = send(%x, to=rank) wait %s", "sends to itself what it does not receive"),
        ("group_start %s = send(%x, to=1 - rank)", "return inside a group"),
        ("group_end", "group_end without a group_start in the same block"),
        ("group_start group_start group_end group_end", "group_start inside a group"),
        (
            "%k: f32[3] (x=R) = alloc %s = send(%x, to=rank) wait %s "
            "%r = recv(%k, from=rank) wait %r",
            r"sends f32\[2\] to itself and receives f32\[3\]",
        ),
        ("%s = send(%x, to=1 - rank) wait %s wait %s", "wait %s, which was waited for before"),
        (
            "%c = post allgather(%x) -> %y f32[2] (x=S0) => (x=R) axis=x dim=0 pieces=2 wait %c",
            "in 2 pieces",
        ),
        (
            "%c = post allreduce[sum](%x) -> %y f32[2] (x=P(sum)) => (x=R) axis=x pieces=0 wait %c",
            "post with pieces=0",
        ),
        (
            "%c = post allreduce[sum](%x) -> %y f32[2] (x=P(sum)) => (x=R) axis=x pieces=2 "
            "wait %c[2]",
            r"wait %c\[2\]: there is no such piece to wait for",
        ),
    ],
)
def test_what_is_refused(code: str, words: str) -> None:
    with pytest.raises(mf.MdfuseError, match=words):
        run(f"{HEAD} %y = mul(%x, 1.0) {code} return %y", 2)


def test_posts_of_different_kinds() -> None:
    body = """
      input %x: f32[2] (x=P(sum))
      %y: f32[2] (x=R) = alloc
      if rank == 0 {
        %c = post allreduce[sum](%x) -> %y f32[2] (x=P(sum)) => (x=R) axis=x
        wait %c
      } else {
        %d = post allreduce[max](%x) -> %y f32[2] (x=P(max)) => (x=R) axis=x
        wait %d
      }
      return %y"""
    with pytest.raises(mf.CommunicationError, match="rank 1 posts Allreduce with reduce_op=max"):
        run(body, 2)


def test_a_buffer_that_is_not_dense() -> None:
    body = """
      input %x: f32[2] (x=P(sum))
      %m: f32[2,2] (x=R) = alloc
      %y: f32[2] (x=R) = select(%m, dim=1, index=0)
      %c = post allreduce[sum](%x) -> %y f32[2] (x=P(sum)) => (x=R) axis=x pieces={pieces}
      wait %c
      return %y"""
    for pieces in (1, 2):
        with pytest.raises(mf.CommunicationError, match=r"has strides \(2,\)"):
            run(body.format(pieces=pieces), 2)
