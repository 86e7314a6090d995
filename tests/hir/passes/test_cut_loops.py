"""Loops over chunks are cut where they wait: which are, in which order, what comes out."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.host_programs import POISON, numbers

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, ProgramError, Shard, Stream, hir
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.hir.verify.check import verify

MESH = DeviceMesh.arange(tp=2)


def perceptron(chunks: int) -> mf.Program:
    """Rows are gathered, multiplied twice, and their sums scattered, in one loop."""
    stream = Stream(0, chunks)
    with FusionDefinition("perceptron") as fd:
        x = fd.define_tensor([8, 4], mesh=MESH, layout={"tp": Shard(0)})
        a = fd.define_tensor([4, 6], mesh=MESH, layout={"tp": Shard(1)})
        b = fd.define_tensor([6, 4], mesh=MESH, layout={"tp": Shard(0)})
        h = (x @ a).on(MESH, {"tp": Shard(1)}, stream=stream)
        fd.add_output((h @ b).on(MESH, {"tp": Shard(0)}, stream=stream))
    return mf.compile(fd)


def order(program: mf.Program, rank: int) -> list[str]:
    """The posts, waits and products of a rank, as they run."""
    found = []
    for i in written_out(program.for_rank(rank)).instructions:
        if i.op in ("post", "wait"):
            found.append(f"{i.op} {(i.outputs or i.reads)[0]}")
        elif any(j.op == "matmul" for j in i.walk()):
            found.append("matmul")
    return found


def test_the_next_chunk_is_posted_before_the_work_on_this_one() -> None:
    found = order(perceptron(2), 0)
    assert found.index("post c0@2") < found.index("matmul")
    assert found.index("post c1@1") < found.index("wait c0@2") < found.index("wait c1@1")


def test_a_loop_that_posts_twice_has_three_parts() -> None:
    text = str(perceptron(2))
    body = re.split(r"for %i in .*\n", text)[1].split("\n  }")[0]
    found = re.findall(r"post|wait|\bnext\b|= matmul", body)
    assert found == [
        "post", "next", "wait", "= matmul", "= matmul", "post", "next", "wait",
    ]  # fmt: skip


@pytest.mark.parametrize("chunks", [2])
@pytest.mark.parametrize("schedule", [None, *range(6)])
def test_values_in_any_order(chunks: int, schedule: int | None) -> None:
    x, a, b = numbers(8, 4), numbers(4, 6, start=-5), numbers(6, 4, start=-3)
    found = mf.simulate(perceptron(chunks), [x, a, b], options=POISON, schedule=schedule)
    assert torch.equal(found.outputs[0], x @ a @ b)


def test_iterations_that_take_turns_have_values_of_their_own() -> None:
    program = hir.parse("""host @over on mesh(x=1) {
      input %x: f32[6] (x=R)
      %y: f32[6] (x=R) = alloc
      for %i in 0..3 {
        %x.i: f32[2] of [6] (x=R, chunk(0,3,%i)) = chunk(%x)
        %a.i: f32[2] of [6] (x=R, chunk(0,3,%i)) = exp(%x.i)
        next
        %y.i: f32[2] of [6] (x=R, chunk(0,3,%i)) = chunk(%y)
        %y.i = neg(%a.i)
      }
      return %y
    }""")
    verify(program)
    x = numbers(6) / 4
    found = mf.simulate(program, [x], options=POISON)
    assert torch.equal(found.outputs[0], -torch.exp(x))


@pytest.mark.parametrize(
    "text",
    [
        "host @h on mesh(x=1) {\n  input %x: f32[6] (x=R)\n  next\n  return %x\n}",
        "host @h on mesh(x=1) {\n  input %x: f32[6] (x=R)\n  for %i in 0..2 {\n"
        "    if %i == 0 {\n      next\n    }\n  }\n  return %x\n}",
        "host @h on mesh(x=1) {\n  input %x: f32[6] (x=R)\n  block @b(%i) {\n    next\n  }\n"
        "  call b(0)\n  return %x\n}",
    ],
)
def test_next_stands_in_the_body_of_a_loop(text: str) -> None:
    with pytest.raises(ProgramError, match="next outside of a loop"):
        verify(hir.parse(text))
