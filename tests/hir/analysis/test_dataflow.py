"""Names of one memory, and which elements of it they stand for."""

from __future__ import annotations

import pytest
from helpers.programs import program_text

from mdfuse import hir
from mdfuse.hir.analysis.dataflow import dataflow
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unroll import write

PROGRAM = program_text("dataflow/program")


@pytest.mark.parametrize("rank", [0, 1])
def test_which_views_share_elements(rank: int) -> None:
    flow = dataflow(write(project(hir.parse(PROGRAM), rank)))
    assert flow.memory("low") == flow.memory("y") == "y"
    assert flow.region("low") == ((1, 2), (4 * rank + 2, 4 * rank + 4), (0, 6))
    assert flow.region("part") == ((4 * rank + 2, 4 * rank + 4), (0, 6))
    assert flow.region("turned") is None
    apart = [("first", "last"), ("top", "half"), ("top", "low"), ("first", "low")]
    assert not any(flow.meet(*pair) for pair in apart)
    shared = [("y", "low"), ("last", "low"), ("half", "first"), ("turned", "low"), ("x", "part")]
    assert all(flow.meet(*pair) for pair in shared)


def test_a_row_of_a_split_dim_is_counted_by_the_rank() -> None:
    text = """host @rows on mesh(tp=2) {
  input %x: f32[4,6] of [8,6] (tp=S0)
  %row: f32[6] (tp=varies) = select(%x, dim=0, index=1)
  %y: f32[6] (tp=varies) = mul(%row, 2.0)
  return %x
}
"""
    flow = dataflow(write(project(hir.parse(text), 1)))
    assert flow.region("row") == ((5, 6), (0, 6))


#: A loop that fills chunks, behind a broadcast.
LOOP = program_text("dataflow/loop")


def test_uses_and_writes_of_a_program_with_a_loop() -> None:
    program = hir.parse(LOOP)
    flow = dataflow(program)
    assert flow is dataflow(program)
    ops = [i.op for i in program.instructions]
    assert ops == ["alloc", "post", "wait", "alloc", "for", "set", "permute", "return"]
    assert flow.uses["y"] == [3, 4, 5, 6] and flow.ops("a") == ["alloc", "post", "for", "set"]
    assert (flow.results("y"), flow.readers("y")) == ([3, 5], [6])
    assert flow.written_at["y"] == [3, 4, 5]  # a view that is bound writes nothing
    assert flow.written_at["a"] == [0, 1, 2]  # what arrives is written until the wait
    assert [flow.last_write("a.i", n) for n in (0, 1, 8)] == [-1, 0, 2]
    assert [flow.bound_at(x) for x in ("x", "a", "y.i")] == [-1, 0, 4]
    assert flow.bases["t"] == ("t", "y") and flow.memory("t") == "y"  # in one order it is a view
    assert {*flow.sharing["y"]} == {"y", "y.i", "t"}


@pytest.mark.parametrize(
    ("a", "b", "meet"),
    [
        (1, 2, True),  # a post and its wait
        (1, 3, False),
        (2, 4, True),  # what arrives is read
        (4, 5, True),  # both write %y
        (3, 2, False),
        (2, 6, False),
    ],
)
def test_which_instructions_keep_their_order(a: int, b: int, meet: bool) -> None:
    program = hir.parse(LOOP)
    x, y = (dataflow(program).effects(program.instructions[n]) for n in (a, b))
    assert x.meet(y) == y.meet(x) == meet
    assert (x | y).meet(x) == bool(x.writes)


def test_the_stream_that_is_current() -> None:
    text = """host @streams on mesh(t=1) {
  input %x: f32[4] (t=R)
  %c = get_stream
  set_stream 1
  sync %c
  %y: f32[4] (t=R) = neg(%x)
  set_stream %c
  sync 1
  return %y
}
"""
    streams = dataflow(hir.parse(text)).streams
    assert [None if i is None else (*i.inputs, *i.kwargs.values()) for i in streams] == [
        None, (1,), (1,), (1,), ("c",), ("c",), ("c",)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("result", "operand", "may"),
    [
        ("b", "x", False),  # the caller holds it
        ("b", "a", False),  # the post reads it until its wait
        ("c", "a", True),
        ("c", "b", False),  # its view is read later
        ("d", "b", True),
        ("d", "t", False),  # which is the memory of %b
        ("c", "all", False),  # another type
        ("d", "c", False),  # an output
    ],
)
def test_which_operands_may_be_written_over(result: str, operand: str, may: bool) -> None:
    text = """host @over on mesh(t=2) {
  input %x: f32[2] of [4] (t=S0)
  %a: f32[2] of [4] (t=S0) = neg(%x)
  %b: f32[2] of [4] (t=S0) = neg(%a)
  %all: f32[4] (t=R) = alloc
  %h = post allgather(%a) -> %all f32[4] (t=S0) => (t=R) axis=t dim=0
  %t: f32[2] of [4] (t=S0) = permute(%b, dims=[0])
  wait %h
  %c: f32[2] of [4] (t=S0) = add(%a, %b)
  %d: f32[2] of [4] (t=S0) = mul(%t, %c)
  return %c, %d, %all
}
"""
    program = hir.parse(text)
    flow = dataflow(program)
    (at,) = flow.results(result)
    assert flow.may_lie_over(result, operand, at) == may
