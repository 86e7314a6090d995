"""Streamed local operations: the printed programs."""

from __future__ import annotations

from expecttest import TestCase
from helpers.stream_cases import CASES, text


class TestLocal(TestCase):
    def test_one_op(self) -> None:
        self.assertExpectedInline(
            text(CASES["one_op"].compile()),
            """\
host @one_op on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  %caller = get_stream
  %y: f32[8,4] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%y)
    %y.i = add(%x.i, 1)
    free %x.i, %y.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %y
}""",
        )

    def test_inner_dim(self) -> None:
        """Each iteration takes some columns of all of a rank's own rows."""
        self.assertExpectedInline(
            text(CASES["inner_dim"].compile()),
            """\
host @inner_dim on mesh(tp=4) {
  input %x: f32[2,8] of [8,8] (tp=S0)
  %caller = get_stream
  %y: f32[2,8] of [8,8] (tp=S0) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[2,3] of [8,8] (tp=S0, chunk(1,3,%i)) = chunk(%x)
    %y.i: f32[2,3] of [8,8] (tp=S0, chunk(1,3,%i)) = chunk(%y)
    %y.i = relu(%x.i)
    free %x.i, %y.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %y
}""",
        )

    def test_broadcast_operands(self) -> None:
        """%row has no streamed dim and is read whole."""
        self.assertExpectedInline(
            text(CASES["broadcast_operands"].compile()),
            """\
host @broadcast_operands on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  input %row: f32[1,4] (tp=R)
  input %column: f32[8,1] (tp=R)
  %caller = get_stream
  %z: f32[8,4] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = add(%x.i, %row)
    free %x.i
    %column.i: f32[3,1] of [8,1] (tp=R, chunk(0,3,%i)) = chunk(%column)
    %z.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%z)
    %z.i = mul(%y.i, %column.i)
    free %y.i, %column.i, %z.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %z
}""",
        )

    def test_sliced_once(self) -> None:
        """%x is read twice and sliced once."""
        self.assertExpectedInline(
            text(CASES["sliced_once"].compile()),
            """\
host @sliced_once on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  %caller = get_stream
  %z: f32[8,4] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = mul(%x.i, %x.i)
    %z.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%z)
    %z.i = add(%y.i, %x.i)
    free %y.i, %x.i, %z.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %z
}""",
        )

    def test_two_sets(self) -> None:
        """One loop; %y, which only the loop reads, is never whole."""
        self.assertExpectedInline(
            text(CASES["two_sets"].compile()),
            """\
host @two_sets on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  %caller = get_stream
  %z: f32[8,4] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = set(%x.i)
    free %x.i
    %z.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%z)
    %z.i = set(%y.i)
    free %y.i, %z.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %z
}""",
        )

    def test_plain_between(self) -> None:
        """The stream spreads to what is computed of chunks, and what chunks are computed of."""
        self.assertExpectedInline(
            text(CASES["plain_between"].compile()),
            """\
host @plain_between on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  %caller = get_stream
  %c: f32[8,4] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %a.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = add(%x.i, 1)
    free %x.i
    %b.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = mul(%a.i, 2)
    free %a.i
    %c.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%c)
    %c.i = sub(%b.i, 3)
    free %b.i, %c.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %c
}""",
        )

    def test_reduction(self) -> None:
        self.assertExpectedInline(
            text(CASES["reduction"].compile()),
            """\
host @reduction on mesh(tp=4) {
  input %x: f32[8,4,3] (tp=R)
  %caller = get_stream
  %y: f32[8,3] (tp=R) = alloc
  %z: f32[8] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,4,3] of [8,4,3] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,3] of [8,3] (tp=R, chunk(0,3,%i)) = chunk(%y)
    %y.i = sum(%x.i, dims=[1])
    free %y.i
    %z.i: f32[3] of [8] (tp=R, chunk(0,3,%i)) = chunk(%z)
    %z.i = max(%x.i, dims=[1,2])
    free %x.i, %z.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %y, %z
}""",
        )

    def test_casts(self) -> None:
        self.assertExpectedInline(
            text(CASES["casts"].compile()),
            """\
host @casts on mesh(tp=4) {
  input %x: bf16[8,4] (tp=R)
  %caller = get_stream
  %d: i64[8,4] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: bf16[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %a.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = cast(%x.i, dtype=f32)
    free %x.i
    %b.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = abs(%a.i)
    free %a.i
    %c.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = neg(%b.i)
    free %b.i
    %d.i: i64[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%d)
    %d.i = cast(%c.i, dtype=i64)
    free %c.i, %d.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %d
}""",
        )

    def test_host_unit(self) -> None:
        self.assertExpectedInline(
            text(CASES["host_unit"].compile()),
            """\
host @host_unit on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  %caller = get_stream
  %p: f32[8,4] (tp=R) = alloc
  %y: f32[8,4] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %p.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%p)
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%y)
    launch seg0(%x.i) -> %p.i, %y.i {
      %p.i = softmax(%x.i, dim=-1)
      %y.i = layer_norm(%p.i, None, None, normalized_shape=[4], eps=1e-05)
    }
    free %x.i, %p.i, %y.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %p, %y
}""",
        )

    def test_read_afterwards(self) -> None:
        self.assertExpectedInline(
            text(CASES["read_afterwards"].compile()),
            """\
host @read_afterwards on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  %caller = get_stream
  %y: f32[8,4] (tp=R) = alloc
  %z: f32[8,4] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%y)
    %y.i = add(%x.i, 1)
    free %x.i
    %z.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%z)
    %z.i = mul(%y.i, 2)
    free %y.i, %z.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  %total: f32[4] (tp=R) = sum(%y, dims=[0]) contiguous
  return %y, %z, %total
}""",
        )

    def test_several_loops(self) -> None:
        self.assertExpectedInline(
            text(CASES["several_loops"].compile()),
            """\
host @several_loops on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  %caller = get_stream
  %y: f32[8,4] (tp=R) = alloc
  %z: f32[8,4] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%y)
    %y.i = add(%x.i, 1)
    free %x.i
    %z.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%z)
    %z.i = mul(%y.i, 2)
    free %y.i, %z.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  %v: f32[8,4] (tp=R) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %j in 0..2 {
    set_stream %j mod 2
    %y.j: f32[8,2] of [8,4] (tp=R, chunk(1,2,%j)) = chunk(%y)
    %v.j: f32[8,2] of [8,4] (tp=R, chunk(1,2,%j)) = chunk(%v)
    %v.j = sub(%y.j, 3)
    free %y.j, %v.j
  }
  free %y
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  %w: f32[8,4] (tp=R) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %k in 0..2 {
    set_stream %k mod 2
    %z.k: f32[4,4] of [8,4] (tp=R, chunk(0,2,%k)) = chunk(%z)
    %w.k: f32[4,4] of [8,4] (tp=R, chunk(0,2,%k)) = chunk(%w)
    %w.k = add(%z.k, 5)
    free %z.k, %w.k
  }
  free %z
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %w, %v
}""",
        )
