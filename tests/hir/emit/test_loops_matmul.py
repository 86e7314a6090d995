"""Streamed matmuls, alone and with communications: the printed programs."""

from __future__ import annotations

from expecttest import TestCase
from helpers.stream_cases import CASES, text


class TestMatmul(TestCase):
    def test_matmul_rows(self) -> None:
        self.assertExpectedInline(
            text(CASES["matmul_rows"].compile()),
            """\
host @matmul_rows on mesh(tp=4) {
  input %x: f32[8,6] (tp=R)
  input %w: f32[6,2] of [6,8] (tp=S1)
  %caller = get_stream
  %y: f32[8,2] of [8,8] (tp=S1) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %x.i: f32[3,6] of [8,6] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,2] of [8,8] (tp=S1, chunk(0,3,%i)) = chunk(%y)
    %y.i = matmul(%x.i, %w)
    free %x.i, %y.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %y
}""",
        )

    def test_matmul_columns(self) -> None:
        self.assertExpectedInline(
            text(CASES["matmul_columns"].compile()),
            """\
host @matmul_columns on mesh(tp=4) {
  input %x: f32[2,6] of [8,6] (tp=S0)
  input %w: f32[6,8] (tp=R)
  %caller = get_stream
  %y: f32[2,8] of [8,8] (tp=S0) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %w.i: f32[6,3] of [6,8] (tp=R, chunk(1,3,%i)) = chunk(%w)
    %y.i: f32[2,3] of [8,8] (tp=S0, chunk(1,3,%i)) = chunk(%y)
    %y.i = matmul(%x, %w.i)
    free %w.i, %y.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %y
}""",
        )

    def test_batched_matmul(self) -> None:
        self.assertExpectedInline(
            text(CASES["batched_matmul"].compile()),
            """\
host @batched_matmul on mesh(tp=4) {
  input %a: f32[8,4,5] (tp=R)
  input %b: f32[8,5,3] (tp=R)
  %caller = get_stream
  %y: f32[8,4,3] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %a.i: f32[3,4,5] of [8,4,5] (tp=R, chunk(0,3,%i)) = chunk(%a)
    %b.i: f32[3,5,3] of [8,5,3] (tp=R, chunk(0,3,%i)) = chunk(%b)
    %y.i: f32[3,4,3] of [8,4,3] (tp=R, chunk(0,3,%i)) = chunk(%y)
    %y.i = matmul(%a.i, %b.i)
    free %a.i, %b.i, %y.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %y
}""",
        )

    def test_linear_columns(self) -> None:
        self.assertExpectedInline(
            text(CASES["linear_columns"].compile()),
            """\
host @linear_columns on mesh(tp=4) {
  input %x: f32[2,3,6] (tp=R)
  input %w: f32[8,6] (tp=R)
  input %bias: f32[8] (tp=R)
  %caller = get_stream
  %y: f32[2,3,8] (tp=R) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %w.i: f32[3,6] of [8,6] (tp=R, chunk(0,3,%i)) = chunk(%w)
    %bias.i: f32[3] of [8] (tp=R, chunk(0,3,%i)) = chunk(%bias)
    %y.i: f32[2,3,3] of [2,3,8] (tp=R, chunk(2,3,%i)) = chunk(%y)
    %y.i = linear(%x, %w.i, %bias.i)
    free %w.i, %bias.i, %y.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %y
}""",
        )

    def test_gather_matmul(self) -> None:
        self.assertExpectedInline(
            text(CASES["gather_matmul"].compile()),
            """\
host @gather_matmul on mesh(tp=4) {
  input %x: f32[2,6] of [8,6] (tp=S0)
  input %w: f32[6,2] of [6,8] (tp=S1)
  %caller = get_stream
  %x.dense: f32[2,6] of [8,6] (tp=S0) = set(%x) contiguous
  %y: f32[8,2] of [8,8] (tp=S1) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..4 {
    set_stream 1
    %x.whole.i: f32[2,6] of [8,6] (tp=R, chunk(0,4,%i)) = alloc
    %c0 = post broadcast(%x.dense) -> %x.whole.i f32[8,6] (tp=S0) => (tp=R, chunk(0,4,%i))
        axis=tp
    next
    %y.i: f32[2,2] of [8,8] (tp=S1, chunk(0,4,%i)) = chunk(%y)
    set_stream 0
    wait %c0
    %y.i = matmul(%x.whole.i, %w)
    free %x.whole.i, %y.i
  }
  free %x.dense
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %y
}""",
        )

    def test_gather_matmul_in_a_ring(self) -> None:
        self.assertExpectedInline(
            text(CASES["gather_matmul_in_a_ring"].compile()),
            """\
host @gather_matmul_in_a_ring on mesh(tp=4) {
  input %x: f32[2,6] of [8,6] (tp=S0)
  input %w: f32[6,2] of [6,8] (tp=S1)
  %caller = get_stream
  %x.dense: f32[2,6] of [8,6] (tp=S0) = set(%x) contiguous
  %y: f32[8,2] of [8,8] (tp=S1) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..4 {
    set_stream 1
    %x.whole.i: f32[2,6] of [8,6] (tp=R, chunk(0,4,(%i + coord(tp)) mod 4)) = alloc
    group_start
    %c0 = send(%x.dense, to=(coord(tp) - %i) mod 4, axis=tp)
    %c1 = recv(%x.whole.i, from=(coord(tp) + %i) mod 4, axis=tp)
    group_end
    next
    set_stream 0
    wait %c1
    %h.i: f32[2,2] of [8,8] (tp=S1, chunk(0,4,(%i + coord(tp)) mod 4)) =
        matmul(%x.whole.i, %w)
    free %x.whole.i
    %y.i: f32[2,2] of [8,8] (tp=S1, chunk(0,4,(%i + coord(tp)) mod 4)) = chunk(%y)
    %y.i = relu(%h.i)
    free %h.i, %y.i
    set_stream 1
    wait %c0
  }
  free %x.dense
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %y
}""",
        )

    def test_matmul_scatter(self) -> None:
        self.assertExpectedInline(
            text(CASES["matmul_scatter"].compile()),
            """\
host @matmul_scatter on mesh(tp=4) {
  input %x: f32[8,2] of [8,6] (tp=S1)
  input %w: f32[2,8] of [6,8] (tp=S0)
  %caller = get_stream
  %y: f32[2,8] of [8,8] (tp=S0) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..4 {
    %x.i: f32[2,2] of [8,6] (tp=S1, chunk(0,4,%i)) = chunk(%x)
    set_stream 0
    %y.partial.i: f32[2,8] of [8,8] (tp=P(sum), chunk(0,4,%i)) = matmul(%x.i, %w) contiguous
    free %x.i
    set_stream 1
    sync 0
    %c0 = post reduce[sum](%y.partial.i) -> %y f32[8,8] (tp=P(sum), chunk(0,4,%i)) =>
        (tp=S0) axis=tp
    next
    set_stream 1
    wait %c0
    free %y.partial.i
  }
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %y
}""",
        )

    def test_matmul_scatter_in_a_ring(self) -> None:
        self.assertExpectedInline(
            text(CASES["matmul_scatter_in_a_ring"].compile()),
            """\
host @matmul_scatter_in_a_ring on mesh(tp=4) {
  input %x: f32[8,2] of [8,6] (tp=S1)
  input %w: f32[2,8] of [6,8] (tp=S0)
  %caller = get_stream
  %y: f32[2,8] of [8,8] (tp=S0) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..4 {
    %x.i: f32[2,2] of [8,6] (tp=S1, chunk(0,4,((%i + coord(tp)) + 1) mod 4)) = chunk(%x)
    set_stream 0
    %y.partial.i: f32[2,8] of [8,8] (tp=P(sum), chunk(0,4,((%i + coord(tp)) + 1) mod 4)) =
        matmul(%x.i, %w) contiguous
    free %x.i
    set_stream 1
    %y.i.recv: f32[2,8] of [8,8] (tp=S0) = alloc
    sync 0
    group_start
    %c0 = send(%y.partial.i, to=(coord(tp) + (%i + 1)) mod 4, axis=tp)
    %c1 = recv(%y.i.recv, from=(coord(tp) - (%i + 1)) mod 4, axis=tp)
    group_end
    next
    set_stream 1
    wait %c1
    if %i == 0 {
      %y = set(%y.i.recv)
    } else {
      %y = add(%y, %y.i.recv)
    }
    free %y.i.recv
    wait %c0
    free %y.partial.i
  }
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %y
}""",
        )

    def test_matmul_scatter_columns(self) -> None:
        self.assertExpectedInline(
            text(CASES["matmul_scatter_columns"].compile()),
            """\
host @matmul_scatter_columns on mesh(tp=4) {
  input %x: f32[8,2] of [8,6] (tp=S1)
  input %w: f32[2,8] of [6,8] (tp=S0)
  %caller = get_stream
  %y: f32[2,8] of [8,8] (tp=S0) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    %w.i: f32[2,3] of [6,8] (tp=S0, chunk(1,3,%i)) = chunk(%w)
    set_stream 0
    %y.partial.i: f32[8,3] of [8,8] (tp=P(sum), chunk(1,3,%i)) = matmul(%x, %w.i) contiguous
    free %w.i
    set_stream 1
    %y.i.new: f32[2,3] of [8,8] (tp=S0, chunk(1,3,%i)) = alloc
    sync 0
    %c0 = post reducescatter[sum](%y.partial.i) -> %y.i.new f32[8,8]
        (tp=P(sum), chunk(1,3,%i)) => (tp=S0, chunk(1,3,%i)) axis=tp dim=0
    next
    %y.i: f32[2,3] of [8,8] (tp=S0, chunk(1,3,%i)) = chunk(%y)
    set_stream 1
    wait %c0
    free %y.partial.i
    %y.i = set(%y.i.new)
    free %y.i.new, %y.i
  }
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %y
}""",
        )

    def test_matmul_reduce(self) -> None:
        """The bias is added among the transfers: the next product need not wait for it."""
        self.assertExpectedInline(
            text(CASES["matmul_reduce"].compile()),
            """\
host @matmul_reduce on mesh(tp=4) {
  input %x: f32[8,2] of [8,6] (tp=S1)
  input %w: f32[5,2] of [5,6] (tp=S1)
  input %b: f32[5] (tp=R)
  %caller = get_stream
  %y: f32[8,5] (tp=R) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    %x.i: f32[3,2] of [8,6] (tp=S1, chunk(0,3,%i)) = chunk(%x)
    set_stream 0
    %y.partial.i: f32[3,5] of [8,5] (tp=P(sum), chunk(0,3,%i)) = linear(%x.i, %w) contiguous
    free %x.i
    set_stream 1
    %y.partial.whole.i: f32[3,5] of [8,5] (tp=R, chunk(0,3,%i)) = alloc
    sync 0
    %c0 = post allreduce[sum](%y.partial.i) -> %y.partial.whole.i f32[8,5]
        (tp=P(sum), chunk(0,3,%i)) => (tp=R, chunk(0,3,%i)) axis=tp
    next
    %y.i: f32[3,5] of [8,5] (tp=R, chunk(0,3,%i)) = chunk(%y)
    set_stream 1
    wait %c0
    free %y.partial.i
    %y.i = add(%y.partial.whole.i, %b)
    free %y.partial.whole.i, %y.i
  }
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %y
}""",
        )

    def test_perceptron_in_one_loop(self) -> None:
        self.assertExpectedInline(
            text(CASES["perceptron_in_one_loop"].compile()),
            """\
host @perceptron_in_one_loop on mesh(tp=4) {
  input %x: f32[2,6] of [8,6] (tp=S0)
  input %w: f32[6,2] of [6,8] (tp=S1)
  input %v: f32[2,6] of [8,6] (tp=S0)
  %caller = get_stream
  %x.dense: f32[2,6] of [8,6] (tp=S0) = set(%x) contiguous
  %y: f32[2,6] of [8,6] (tp=S0) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..4 {
    set_stream 1
    %x.whole.i: f32[2,6] of [8,6] (tp=R, chunk(0,4,%i)) = alloc
    %c0 = post broadcast(%x.dense) -> %x.whole.i f32[8,6] (tp=S0) => (tp=R, chunk(0,4,%i))
        axis=tp
    next
    set_stream 0
    wait %c0
    %h.i: f32[2,2] of [8,8] (tp=S1, chunk(0,4,%i)) = matmul(%x.whole.i, %w)
    free %x.whole.i
    %a.i: f32[2,2] of [8,8] (tp=S1, chunk(0,4,%i)) = relu(%h.i)
    free %h.i
    %y.partial.i: f32[2,6] of [8,6] (tp=P(sum), chunk(0,4,%i)) = matmul(%a.i, %v) contiguous
    free %a.i
    set_stream 1
    sync 0
    %c1 = post reduce[sum](%y.partial.i) -> %y f32[8,6] (tp=P(sum), chunk(0,4,%i)) =>
        (tp=S0) axis=tp
    next
    set_stream 1
    wait %c1
    free %y.partial.i
  }
  free %x.dense
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %y
}""",
        )
