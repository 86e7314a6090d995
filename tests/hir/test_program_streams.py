"""Streams of host programs: no-ops on CPU, and real asynchrony where a schedule is drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.host_posts import CASES
from helpers.host_programs import numbers, parse, simulate
from torch import Tensor

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir import HostProgram

SEEDS = range(50)


def is_right(program: HostProgram, rows: list[dict[str, Any]], want: Any, seed: int) -> bool:
    """Whether a run in the order of a seed gives what plain torch gives."""
    given = [
        {name: x.clone() if isinstance(x, Tensor) else x for name, x in row.items()} for row in rows
    ]
    try:
        result = simulate(program, *given, schedule=seed)
    except (mf.MdfuseError, RuntimeError):
        return False
    return all(
        torch.equal(mine, theirs)
        for rank, outputs in enumerate(result.per_rank)
        for mine, theirs in zip(outputs, want(rank), strict=True)
    )


def check(text: str, rows: list[dict[str, Any]], want: Any, mesh: str = "mesh(x=1)") -> None:
    """Right in 50 orders; wrong in some of them where any one sync or wait is left out."""
    program = parse(text, mesh)
    assert hir.parse(str(program)) == program
    assert all(is_right(program, rows, want, seed) for seed in SEEDS)
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if line.strip().startswith(("sync", "wait")):
            without = parse("\n".join((*lines[:at], *lines[at + 1 :])), mesh)
            assert not all(is_right(without, rows, want, seed) for seed in SEEDS), line


# -- one rank ------------------------------------------------------------------------------------


def test_two_streams() -> None:
    body = """
      input %x: f32[4] (x=R)
      %caller = get_stream
      %h: f32[4] (x=R) = add(%x, 1.0)
      set_stream 0
      sync %caller
      %a: f32[4] (x=R) = mul(%h, 2.0)
      set_stream 1
      sync 0
      %b: f32[4] (x=R) = add(%a, %x)
      set_stream %caller
      sync 1
      %y: f32[4] (x=R) = mul(%b, 3.0)
      return %y"""
    x = numbers(4)
    check(body, [{"x": x}], lambda rank: [((x + 1) * 2 + x) * 3])


def test_a_value_that_is_overwritten_while_another_stream_reads_it() -> None:
    body = """
      input %x: f32[4] (x=R)
      %caller = get_stream
      %h: f32[4] (x=R) = add(%x, 1.0)
      set_stream 0
      sync %caller
      %a: f32[4] (x=R) = mul(%h, 2.0)
      set_stream %caller
      sync 0
      %h = mul(%h, 0.0)
      %y: f32[4] (x=R) = add(%a, %h)
      return %y"""
    x = numbers(4)
    check(body, [{"x": x}], lambda rank: [(x + 1) * 2])


ROUND_ROBIN = """
  input %x: f32[8] (x=R)
  %y: f32[8] (x=R) = alloc
  %w: f32[8] (x=R) = mul(%x, 2.0)
  %caller = get_stream
  for %i in 0..4 {
    set_stream %i mod 2
    sync %caller
    %w.i: f32[2] of [8] (x=R, chunk(0,4,%i)) = chunk(%w)
    %y.i: f32[2] of [8] (x=R, chunk(0,4,%i)) = chunk(%y)
    %h: f32[2] of [8] (x=R, chunk(0,4,%i)) = add(%w.i, %i)
    %y.i = mul(%h, 3.0)
    free %h
  }
  set_stream %caller
  sync 0
  sync 1
  %z: f32[8] (x=R) = add(%y, 1.0)
  return %z"""


def test_the_chunks_of_a_loop_in_turn() -> None:
    """The same index is the same stream; the caller's joins both."""
    x = numbers(8)
    steps = torch.arange(4.0).repeat_interleave(2)
    check(ROUND_ROBIN, [{"x": x}], lambda rank: [(2 * x + steps) * 3 + 1])


def test_a_buffer_of_each_iteration_is_its_own() -> None:
    """A name that is freed and computed again on another stream is another buffer."""
    body = """
      input %x: f32[2] (x=R)
      %caller = get_stream
      %y: f32[3,2] (x=R) = alloc
      for %i in 0..3 {
        set_stream %i
        sync %caller
        %h: f32[2] (x=R) = mul(%x, 2.0)
        %to: f32[2] (x=R) = select(%y, dim=0, index=%i)
        %to = add(%h, %i)
        free %h
      }
      set_stream %caller
      sync 0
      sync 1
      sync 2
      return %y"""
    x = numbers(2)
    want = torch.stack([2 * x + i for i in range(3)])
    program = parse(body)
    assert all(is_right(program, [{"x": x}], lambda rank: [want], seed) for seed in SEEDS)


def test_streams_cost_nothing_on_cpu() -> None:
    """Without a schedule one queue runs all, in program order."""
    x = numbers(8)
    result = simulate(parse(ROUND_ROBIN), {"x": x})
    steps = torch.arange(4.0).repeat_interleave(2)
    assert torch.equal(result.per_rank[0][0], (2 * x + steps) * 3 + 1)


def test_integers_that_are_not_there_yet() -> None:
    """What is queued may divide by a result that is still 0."""
    body = """
      input %x: i64[4] (x=R)
      %caller = get_stream
      set_stream 0
      sync %caller
      %h: i64[4] (x=R) = add(%x, 1)
      %y: i64[4] (x=R) = floor_divide(%x, %h)
      set_stream %caller
      sync 0
      %z: i64[4] (x=R) = floor_divide(%y, %h)
      return %z"""
    x = torch.arange(4) * 10
    want = x // (x + 1) // (x + 1)
    program = parse(body)
    assert all(is_right(program, [{"x": x}], lambda rank: [want], seed) for seed in SEEDS)


# -- several ranks -------------------------------------------------------------------------------


def test_posts_on_a_stream_of_their_own() -> None:
    body = """
      input %x: f32[2] of [4] (x=S0)
      %all: f32[4] (x=R) = alloc
      %caller = get_stream
      %h: f32[2] of [4] (x=S0) = mul(%x, 2.0)
      set_stream 0
      sync %caller
      %c = post allgather(%h) -> %all f32[4] (x=S0) => (x=R) axis=x dim=0
      wait %c
      set_stream %caller
      sync 0
      %y: f32[4] (x=R) = add(%all, 1.0)
      return %y"""
    rows = [{"x": numbers(2, start=10 * rank)} for rank in range(2)]
    whole = 2 * torch.cat([row["x"] for row in rows]) + 1
    check(body, rows, lambda rank: [whole], "mesh(x=2)")


def test_a_ring_on_two_streams() -> None:
    """Transfers on one stream, the sum on another."""
    body = """
      input %x: f32[2] (x=R)
      %y: f32[2] (x=R) = mul(%x, 1.0)
      %next: f32[2] (x=R) = alloc
      %caller = get_stream
      for %i in 0..2 {
        set_stream 0
        sync %caller
        group_start
        %s = send(%x, to=(rank + %i + 1) mod 3)
        %r = recv(%next, from=(rank - %i - 1) mod 3)
        group_end
        wait %r
        set_stream %caller
        sync 0
        %y = add(%y, %next)
      }
      return %y"""
    rows = [{"x": numbers(2, start=10 * rank)} for rank in range(3)]
    total = sum((row["x"] for row in rows), torch.zeros(2))
    program = parse(body, "mesh(x=3)")
    assert all(is_right(program, rows, lambda rank: [total], seed) for seed in SEEDS)
    for left_out in ("wait %r", "sync 0", "sync %caller"):
        without = parse(body.replace(left_out, "", 1), "mesh(x=3)")
        assert not all(is_right(without, rows, lambda rank: [total], seed) for seed in SEEDS)


def test_pieces_that_are_waited_for_one_by_one() -> None:
    body = """
      input %x: f32[4] (x=P(sum))
      %y: f32[4] (x=R) = alloc
      %c = post allreduce[sum](%x) -> %y f32[4] (x=P(sum)) => (x=R) axis=x pieces=2
      wait %c[0]
      %a: f32[2] of [4] (x=R, chunk(0,2,0)) = chunk(%y)
      %b: f32[2] of [4] (x=R, chunk(0,2,1)) = chunk(%y)
      %s: f32[] (x=R) = sum(%a)
      wait %c[1]
      %t: f32[] (x=R) = sum(%b)
      return %s, %t"""
    rows = [{"x": numbers(4, start=10 * rank)} for rank in range(2)]
    total = rows[0]["x"] + rows[1]["x"]
    check(body, rows, lambda rank: [total[:2].sum(), total[2:].sum()], "mesh(x=2)")


@pytest.mark.parametrize(
    "case", [c for c in CASES if "sync" in c.text or "wait" in c.text], ids=str
)
def test_the_cases_in_many_orders(case: Any) -> None:
    rows = [case.inputs(rank) for rank in range(case.ranks)]
    program = case.program()
    for seed in range(10):
        result = simulate(program, *rows, schedule=seed)
        for rank, outputs in enumerate(result.per_rank):
            for mine, want in zip(outputs, case.expected(rank), strict=True):
                assert mine is None if want is None else torch.equal(mine, want)


def test_a_caller_who_does_not_wait_sees_what_is_there() -> None:
    """The outputs are read by the caller's stream: without a join they may be missing."""
    body = """
      input %x: f32[2] (x=R)
      set_stream 0
      %y: f32[2] (x=R) = mul(%x, 2.0)
      return %y"""
    x = numbers(2)
    outcomes = {is_right(parse(body), [{"x": x}], lambda rank: [2 * x], seed) for seed in SEEDS}
    assert outcomes == {True, False}


def test_a_rotation_along_an_axis_of_one_rank() -> None:
    """All ranks of such an axis are at one chunk, whichever team a post has."""
    mesh = mf.DeviceMesh.arange(a=3, b=1, c=2)
    turn = mf.Stream(0, 2, rotate="b")
    with mf.FusionDefinition("turns") as fd:
        x = fd.define_tensor([3, 1, 1], torch.float64, mesh, {"a": mf.Shard(2)})
        y = fd.ops.set(x).on(mesh, {"c": mf.Shard(2)})
        fd.add_output(fd.ops.set(y).on(mesh, {}, stream=turn))
    x = torch.randn(3, 1, 1, dtype=torch.float64)
    (result,) = mf.simulate(mf.compile(fd), [x], options=mf.Options(poison=True)).outputs
    assert torch.equal(result, x)
