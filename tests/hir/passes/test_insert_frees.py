"""Memory of host programs: what is alive at once, by hand, with the frees that compile inserts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.host_programs import POISON, numbers, parse, simulate
from helpers.programs import program_text

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard, hir
from mdfuse.hir.passes import insert_frees
from mdfuse.hir.verify.check import verify

ROW = 4 * 4  # bytes of f32[4]


def peak(body: str, mesh: str = "mesh(x=1)", frees: bool = True, **inputs: Any) -> int:
    program = parse(body, mesh)
    program = insert_frees.run(program, POISON) if frees else program
    rows = [inputs] * (program.last_rank + 1)
    peaks = set(simulate(program, *rows).peak_bytes)
    assert len(peaks) == 1
    return peaks.pop()


def chain(n: int) -> str:
    """n ops in a row; the last one makes the output."""
    lines = ["input %x: f32[4] (x=R)", "%h0: f32[4] (x=R) = add(%x, 1.0)"]
    lines += [f"%h{i}: f32[4] (x=R) = add(%h{i - 1}, 1.0)" for i in range(1, n)]
    return "\n".join((*lines, f"return %h{n - 1}"))


def test_a_chain() -> None:
    """The input, and two values at once: the one that is read and the one that is made."""
    assert peak(chain(10), x=numbers(4)) == 3 * ROW
    assert peak(chain(10), x=numbers(4), frees=False) == 11 * ROW


@pytest.mark.parametrize("is_merged", [True, False])
def test_a_chain_that_is_compiled(is_merged: bool) -> None:
    """As one host unit, or as ten instructions: the inner values go after their last use."""
    mesh = DeviceMesh([0, 1])
    with mf.FusionDefinition("chain") as fd:
        x = fd.define_tensor([8], layout=Layout(mesh, {"x": Shard(0)}))
        h = x
        for _ in range(10):
            h = fd.ops.relu(h) + 1.0
        fd.add_output(h)
    program = mf.compile(fd, should_merge=None if is_merged else lambda *_: False)
    result = mf.simulate(program, [numbers(8)], options=POISON)
    assert torch.equal(result.outputs[0], numbers(8) + 10)
    assert result.peak_bytes == (3 * ROW, 3 * ROW)


def test_a_host_unit() -> None:
    """Inputs, outputs, and of what is inside at most two values at once."""
    inner = "\n".join(f"%h{i}: f32[4] (x=R) = add(%h{i - 1}, 1.0)" for i in range(1, 10))
    body = f"""
      input %x: f32[4] (x=R)
      launch unit(%x) -> %y, %z {{
        %y: f32[4] (x=R) = add(%x, 1.0)
        %h0: f32[4] (x=R) = add(%y, 1.0)
        {inner}
        %z: f32[4] (x=R) = add(%h9, %y)
      }}
      return %y, %z"""
    assert peak(body, x=numbers(4)) == 4 * ROW


def test_a_view_keeps_its_buffer() -> None:
    body = """
      input %x: f32[4] (x=R)
      %h: f32[4] (x=R) = add(%x, 1.0)
      %v: f32[2,2] (x=R) = reshape(%h, shape=[2,2])
      %s: f32[2] (x=R) = select(%v, dim=0, index=1)
      free %h
      free %v
      %t: f32[4] (x=R) = add(%x, 2.0)
      free %t
      %y: f32[2] (x=R) = add(%s, 1.0)
      free %s
      return %y"""
    assert peak(body, frees=False, x=numbers(4)) == 3 * ROW


def test_a_loop() -> None:
    """Each iteration's values go before the next one begins."""
    body = """
      input %x: f32[4] (x=R)
      %y: f32[4] (x=R) = alloc
      %y = set(%x)
      for %i in 0..8 {
        %h: f32[4] (x=R) = mul(%x, %i)
        %g: f32[4] (x=R) = add(%h, 1.0)
        %y = add(%y, %g)
      }
      return %y"""
    assert peak(body, x=numbers(4)) == 4 * ROW
    assert peak(body, x=numbers(4), frees=False) == (2 + 16) * ROW


def test_a_value_that_is_not_computed_from_the_index() -> None:
    body = """
      input %x: f32[4] (x=R)
      %y: f32[4] (x=R) = alloc
      %y = set(%x)
      for %i in 0..8 {
        %h: f32[4] (x=R) = mul(%x, 2.0)
        %y = add(%y, %h)
      }
      return %y"""
    assert peak(body, x=numbers(4)) == 3 * ROW
    assert peak(body, x=numbers(4), frees=False) == 3 * ROW


def test_chunks_in_a_loop() -> None:
    """Only one chunk of a streamed intermediate is alive."""
    body = """
      input %x: f32[8,4] (x=R)
      %y: f32[8,4] (x=R) = alloc
      for %i in 0..4 {
        %x.i: f32[2,4] of [8,4] (x=R, chunk(0,4,%i)) = chunk(%x)
        %h.i: f32[2,4] of [8,4] (x=R, chunk(0,4,%i)) = mul(%x.i, 2.0)
        %y.i: f32[2,4] of [8,4] (x=R, chunk(0,4,%i)) = chunk(%y)
        %y.i = add(%h.i, 1.0)
      }
      return %y"""
    assert peak(body, x=numbers(8, 4)) == (8 + 8 + 2) * ROW


def test_a_communication() -> None:
    """A posted buffer is in use until the wait."""
    body = """
      input %x: f32[4] (x=P(sum))
      %h: f32[4] (x=P(sum)) = mul(%x, 2.0)
      %s: f32[4] (x=R) = alloc
      %c = post allreduce[sum](%h) -> %s f32[4] (x=P(sum)) => (x=R) axis=x
      {before}
      %g: f32[4] (x=P(sum)) = mul(%x, 2.0)
      %k: f32[4] (x=P(sum)) = mul(%g, 2.0)
      {after}
      %y: f32[4] (x=P(sum)) = add(%k, %s)
      return %y"""
    late = peak(body.format(before="", after="wait %c"), "mesh(x=2)", x=numbers(4))
    soon = peak(body.format(before="wait %c", after=""), "mesh(x=2)", x=numbers(4))
    assert (late, soon) == (5 * ROW, 4 * ROW)


def test_what_may_be_a_copy_outlives_a_post_of_it() -> None:
    """A rank with a full block posts %t itself, which lies in %h only where that is in order."""
    program = parse(
        """
      input %x: f32[2,3] of [3,3] (tp=S0)
      %h: f32[2,3] of [3,3] (tp=S0) = add(%x, 1.0)
      %t: f32[2,3] of [3,3] (tp=S0) = stride_order(%h, order=[0,1]) contiguous
      %b: f32[2,3] of [3,3] (tp=S0) pad=block(dim=0,parts=2,axis=tp) = pad(%t, dim=0)
      %r: f32[4,3] of [3,3] (tp=R) pad=team(dim=0,parts=2) = alloc
      %c0 = post allgather(%b) -> %r f32[3,3] (tp=S0) => (tp=R) axis=tp dim=0
      %u: f32[2,3] of [3,3] (tp=S0) = add(%t, 1.0)
      wait %c0
      %w: f32[3,3] (tp=R) = narrow(%r)
      %y: f32[3,3] (tp=R) = add(%w, 1.0)
      return %y, %u""",
        "mesh(tp=2)",
    )
    program = insert_frees.run(program, POISON)
    code = [f"{i.op} {' '.join(i.reads)}" for i in program if i.op in ("wait", "free")]
    assert code == ["wait c0", "free b t h", "free r", "free w"]
    verify(program)
    rows = [{"x": numbers(3, 3)[:2]}, {"x": numbers(3, 3)[2:]}]
    for outputs in simulate(program, *rows).per_rank:
        assert torch.equal(outputs[0], numbers(3, 3) + 2)


def test_parts_of_global_inputs_count_as_much_as_they_are() -> None:
    body = """
      input %x: f32[4] of [8] (x=S0)
      %y: f32[4] of [8] (x=S0) = add(%x, 1.0)
      return %y"""
    result = mf.simulate(parse(body, "mesh(x=2)"), [numbers(8)], options=POISON)
    assert result.peak_bytes == (2 * ROW, 2 * ROW)


def test_branches() -> None:
    body = """
      input %x: f32[4] (x=R)
      %h: f32[4] (x=R) = add(%x, 1.0)
      if rank == 0 {
        %g: f32[4] (x=R) = add(%h, 1.0)
        %y: f32[4] (x=R) = add(%g, 1.0)
      } else {
        %k: f32[4] (x=R) = add(%x, 1.0)
        %l: f32[4] (x=R) = add(%k, %h)
        %y: f32[4] (x=R) = add(%l, 0.0)
      }
      return %y"""
    program = insert_frees.run(parse(body, "mesh(x=2)"), POISON)
    result = simulate(program, *[{"x": numbers(4)}] * 2)
    assert result.peak_bytes == (4 * ROW, 4 * ROW)


def test_preallocated_outputs_count_once() -> None:
    body = """
      input %x: f32[4] (x=R)
      %y: f32[4] (x=R) = add(%x, 1.0)
      return %y"""
    assert peak(body, x=numbers(4)) == 2 * ROW
    assert peak(body, x=numbers(4), y=torch.empty(4)) == 2 * ROW


def test_an_update_in_place_needs_nothing() -> None:
    body = """
      input %x: f32[4] (x=R)
      alias %y: f32[4] (x=R) = %x
      %y = add(%y, 1.0)
      %y = sigmoid(%y)
      return %y"""
    assert peak(body, x=numbers(4)) == ROW


# -- blocks and calls ----------------------------------------------------------------------------

BY_TURNS = program_text("insert_frees/by_turns")


def freed(*calls: str) -> str:
    text = BY_TURNS.replace("CALLS", "\n  ".join(f"call {c}" for c in calls))
    program = insert_frees.run(hir.parse(text), mf.Options())
    verify(program)
    x = torch.arange(4.0)
    y, z = mf.simulate(program, [x], options=mf.Options(poison=True)).outputs
    assert torch.equal(y, (x + 1).exp())
    assert z == (x + 1).sum()
    return str(program).partition("block @first")[2]


def test_the_last_block_that_uses_a_value_frees_it() -> None:
    found = freed("first(0)", "left(0)", "first(1)", "right(0)", "left(1)", "right(1)")
    first, _, rest = found.partition("block @left")
    assert "free %x.i" in first
    assert "call first(1)\n  free %one\n" in rest
    assert "free %h, %z.i" in rest or "free %h" in rest.partition("block @right")[2]
    assert "drop" not in found


def test_a_block_frees_what_another_one_uses_last_for_another_index() -> None:
    found = freed("first(0)", "left(0)", "right(0)", "first(1)", "right(1)", "left(1)")
    assert "block @drop0(%i) {\n    free %h\n  }" in found
    assert "call right(0)\n  call drop0(0)" in found
    assert "call left(1)\n  call drop0(1)" in found


def test_what_may_be_a_copy_is_freed_after_the_post_of_its_view() -> None:
    """A view that is to lie in an order owns its memory where it had to be copied."""
    program = parse(
        """
      input %x: f32[1,2] (x=R)
      %e: f32[1,2] (x=R) = permute(%x, dims=[0,1]) order=[1,0]
      %p: f32[1,2] (x=R) = detach(%e)
      %r: f32[1,2] (x=R) = alloc
      %c = post allreduce[sum](%p) -> %r f32[1,2] (x=P(sum)) => (x=R) axis=x
      %y: f32[1,2] (x=R) = neg(%e)
      wait %c
      return %y, %r
    """,
        "mesh(x=2)",
    )
    code = insert_frees.run(program, POISON).instructions
    (wait,) = (n for n, i in enumerate(code) if i.op == "wait")
    assert {x for i in code[wait:] if i.op == "free" for x in i.reads} == {"e", "p"}
