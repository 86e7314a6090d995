"""Which stream an instruction goes to, and what one rank runs: the printed programs."""

from __future__ import annotations

from expecttest import TestCase
from helpers.stream_cases import CASES, text

import mdfuse as mf

ROUND_ROBIN = mf.Options(stream_policy="round_robin")
COPY_COMPUTE = mf.Options(stream_policy="copy_compute")


class TestPolicies(TestCase):
    def test_one_stream(self) -> None:
        """Everything on the caller's stream."""
        self.assertExpectedInline(
            text(CASES["gather_matmul"].compile(options=mf.Options(streams=1))),
            """\
host @gather_matmul on mesh(tp=4) {
  input %x: f32[2,6] of [8,6] (tp=S0)
  input %w: f32[6,2] of [6,8] (tp=S1)
  %x.dense: f32[2,6] of [8,6] (tp=S0) = set(%x) contiguous
  %y: f32[8,2] of [8,8] (tp=S1) = alloc
  for %i in 0..4 {
    %x.whole.i: f32[2,6] of [8,6] (tp=R, chunk(0,4,%i)) = alloc
    %c0 = post broadcast(%x.dense) -> %x.whole.i f32[8,6] (tp=S0) => (tp=R, chunk(0,4,%i))
        axis=tp
    next
    %y.i: f32[2,2] of [8,8] (tp=S1, chunk(0,4,%i)) = chunk(%y)
    wait %c0
    %y.i = matmul(%x.whole.i, %w)
    free %x.whole.i, %y.i
  }
  free %x.dense
  return %y
}""",
        )

    def test_two_streams(self) -> None:
        self.assertExpectedInline(
            text(CASES["one_op"].compile(options=mf.Options(streams=2))),
            """\
host @one_op on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  %caller = get_stream
  %y: f32[8,4] (tp=R) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 2
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%y)
    %y.i = add(%x.i, 1)
    free %x.i, %y.i
  }
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %y
}""",
        )

    def test_round_robin(self) -> None:
        """Also where a loop communicates."""
        self.assertExpectedInline(
            text(CASES["gather_matmul"].compile(options=ROUND_ROBIN)),
            """\
host @gather_matmul on mesh(tp=4) {
  input %x: f32[2,6] of [8,6] (tp=S0)
  input %w: f32[6,2] of [6,8] (tp=S1)
  %caller = get_stream
  %x.dense: f32[2,6] of [8,6] (tp=S0) = set(%x) contiguous
  %y: f32[8,2] of [8,8] (tp=S1) = alloc
  for %s in 0..4 {
    set_stream %s
    sync %caller
  }
  for %i in 0..4 {
    set_stream %i mod 4
    %x.whole.i: f32[2,6] of [8,6] (tp=R, chunk(0,4,%i)) = alloc
    %c0 = post broadcast(%x.dense) -> %x.whole.i f32[8,6] (tp=S0) => (tp=R, chunk(0,4,%i))
        axis=tp
    next
    set_stream %i mod 4
    %y.i: f32[2,2] of [8,8] (tp=S1, chunk(0,4,%i)) = chunk(%y)
    wait %c0
    %y.i = matmul(%x.whole.i, %w)
    free %x.whole.i, %y.i
  }
  free %x.dense
  set_stream %caller
  for %s in 0..4 {
    sync %s
  }
  return %y
}""",
        )

    def test_copy_compute(self) -> None:
        """A loop without transfers uses one stream."""
        self.assertExpectedInline(
            text(CASES["one_op"].compile(options=COPY_COMPUTE)),
            """\
host @one_op on mesh(tp=4) {
  input %x: f32[8,4] (tp=R)
  %caller = get_stream
  %y: f32[8,4] (tp=R) = alloc
  set_stream 0
  sync %caller
  for %i in 0..3 {
    %x.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%y)
    %y.i = add(%x.i, 1)
    free %x.i, %y.i
  }
  set_stream %caller
  sync 0
  return %y
}""",
        )

    def test_round_robin_where_iterations_add_up(self) -> None:
        """What all iterations write is written on one stream."""
        self.assertExpectedInline(
            text(CASES["scatter_by_ring"].compile(options=ROUND_ROBIN)),
            """\
host @scatter_by_ring on mesh(tp=4) {
  input %x: f32[8,3] (tp=P(sum))
  %caller = get_stream
  %y: f32[2,3] of [8,3] (tp=S0) = alloc
  set_stream 1
  sync %caller
  for %i in 0..4 {
    %x.i: f32[2,3] of [8,3] (tp=P(sum), chunk(0,4,((%i + coord(tp)) + 1) mod 4)) = chunk(%x)
    %x.i.dense: f32[2,3] of [8,3] (tp=P(sum), chunk(0,4,((%i + coord(tp)) + 1) mod 4)) =
        set(%x.i) contiguous
    free %x.i
    %y.i.recv: f32[2,3] of [8,3] (tp=S0) = alloc
    group_start
    %c0 = send(%x.i.dense, to=(coord(tp) + (%i + 1)) mod 4, axis=tp)
    %c1 = recv(%y.i.recv, from=(coord(tp) - (%i + 1)) mod 4, axis=tp)
    group_end
    next
    wait %c1
    if %i == 0 {
      %y = set(%y.i.recv)
    } else {
      %y = add(%y, %y.i.recv)
    }
    free %y.i.recv
    wait %c0
    free %x.i.dense
  }
  set_stream %caller
  sync 1
  return %y
}""",
        )


class TestProjections(TestCase):
    def test_gather_matmul_of_rank_1(self) -> None:
        self.assertExpectedInline(
            text(CASES["gather_matmul"].compile().for_rank(1)),
            """\
host @gather_matmul on mesh(tp=4) rank 1 {
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
        axis=tp team=(0 1 2 3)
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

    def test_ring_of_rank_1(self) -> None:
        """It starts with its own chunk, then takes that of rank 2, …"""
        self.assertExpectedInline(
            text(CASES["gather_matmul_in_a_ring"].compile().for_rank(1)),
            """\
host @gather_matmul_in_a_ring on mesh(tp=4) rank 1 {
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
    %x.whole.i: f32[2,6] of [8,6] (tp=R, chunk(0,4,(%i + 1) mod 4)) = alloc
    group_start
    %c0 = send(%x.dense, to=(1 - %i) mod 4, axis=tp)
    %c1 = recv(%x.whole.i, from=(1 + %i) mod 4, axis=tp)
    group_end
    next
    set_stream 0
    wait %c1
    %h.i: f32[2,2] of [8,8] (tp=S1, chunk(0,4,(%i + 1) mod 4)) = matmul(%x.whole.i, %w)
    free %x.whole.i
    %y.i: f32[2,2] of [8,8] (tp=S1, chunk(0,4,(%i + 1) mod 4)) = chunk(%y)
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

    def test_sender(self) -> None:
        """Ranks of the other mesh have nothing to compute here."""
        self.assertExpectedInline(
            text(CASES["send_to_a_mesh"].compile().for_rank(0)),
            """\
host @send_to_a_mesh on m0=mesh(a=2), m1=mesh(b=2: 2..3) rank 0 {
  input %x: f32[8,3] of [8,6] m0(a=S1)
  %caller = get_stream
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    %x.i: f32[3,3] of [8,6] m0(a=S1, chunk(0,3,%i)) = chunk(%x)
    set_stream 0
    %h.i: f32[3,3] of [8,6] m0(a=S1, chunk(0,3,%i)) = mul(%x.i, 2) contiguous
    free %x.i
    set_stream 1
    sync 0
    %c0 = post sendrecv(%h.i) f32[8,6] m0(a=S1, chunk(0,3,%i)) => m1(b=S1, chunk(0,3,%i))
        team=(0 2) root=0
    next
    set_stream 0
    wait %c0
    free %h.i
  }
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %z: f32 none of [8,6] m1(b=S1)
}""",
        )

    def test_receiver(self) -> None:
        self.assertExpectedInline(
            text(CASES["send_to_a_mesh"].compile().for_rank(3)),
            """\
host @send_to_a_mesh on m0=mesh(a=2), m1=mesh(b=2: 2..3) rank 3 {
  input %x: f32 none of [8,6] m0(a=S1)
  %caller = get_stream
  %z: f32[8,3] of [8,6] m1(b=S1) = alloc
  for %s in 0..2 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream 1
    %y.i: f32[3,3] of [8,6] m1(b=S1, chunk(0,3,%i)) = alloc
    %c0 = post sendrecv() -> %y.i f32[8,6] m0(a=S1, chunk(0,3,%i)) =>
        m1(b=S1, chunk(0,3,%i)) team=(1 3) root=1
    next
    %z.i: f32[3,3] of [8,6] m1(b=S1, chunk(0,3,%i)) = chunk(%z)
    set_stream 0
    wait %c0
    %z.i = add(%y.i, 1)
    free %y.i, %z.i
  }
  set_stream %caller
  for %s in 0..2 {
    sync %s
  }
  return %z
}""",
        )
