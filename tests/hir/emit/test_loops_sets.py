"""Streamed changes of layout: the printed programs."""

from __future__ import annotations

from expecttest import TestCase
from helpers.stream_cases import CASES, text


class TestSets(TestCase):
    def test_gather_another_dim(self) -> None:
        """The dim that is gathered leads in what is sent; a copy puts it back in its place."""
        self.assertExpectedInline(
            text(CASES["gather_another_dim"].compile()),
            """\
host @gather_another_dim on mesh(tp=4) {
  input %x: f32[8,2] of [8,8] (tp=S1)
  %caller = get_stream
  %y: f32[8,8] (tp=R) = alloc
  set_stream 1
  sync %caller
  for %i in 0..3 {
    %x.i: f32[3,2] of [8,8] (tp=S1, chunk(0,3,%i)) = chunk(%x)
    %y.i.new.send: f32[2,3] of [8,8] (tp=S0, chunk(1,3,%i)) = permute(%x.i, dims=[1,0])
        contiguous
    free %x.i
    %y.i.new.recv: f32[8,3] of [8,8] (tp=R, chunk(1,3,%i)) = alloc
    %c0 = post allgather(%y.i.new.send) -> %y.i.new.recv f32[8,8] (tp=S1, chunk(0,3,%i)) =>
        (tp=R, chunk(0,3,%i)) axis=tp dim=1
    next
    %y.i: f32[3,8] of [8,8] (tp=R, chunk(0,3,%i)) = chunk(%y)
    wait %c0
    free %y.i.new.send
    %y.i.new: f32[3,8] of [8,8] (tp=R, chunk(0,3,%i)) = permute(%y.i.new.recv, dims=[1,0])
    free %y.i.new.recv
    %y.i = set(%y.i.new)
    free %y.i.new, %y.i
  }
  set_stream %caller
  sync 1
  return %y
}""",
        )

    def test_gather_by_broadcasts(self) -> None:
        """As many chunks as ranks: each sends its own, right into its place of the whole."""
        self.assertExpectedInline(
            text(CASES["gather_by_broadcasts"].compile()),
            """\
host @gather_by_broadcasts on mesh(tp=4) {
  input %x: f32[2,3] of [8,3] (tp=S0)
  %caller = get_stream
  %x.dense: f32[2,3] of [8,3] (tp=S0) = set(%x) contiguous
  %y: f32[8,3] (tp=R) = alloc
  set_stream 1
  sync %caller
  for %i in 0..4 {
    %y.i: f32[2,3] of [8,3] (tp=R, chunk(0,4,%i)) = chunk(%y)
    %c0 = post broadcast(%x.dense) -> %y.i f32[8,3] (tp=S0) => (tp=R, chunk(0,4,%i)) axis=tp
    next
    wait %c0
    free %y.i
  }
  free %x.dense
  set_stream %caller
  sync 1
  return %y
}""",
        )

    def test_gather_by_exchanges(self) -> None:
        """Otherwise each rank receives what it lacks of the chunk."""
        self.assertExpectedInline(
            text(CASES["gather_by_exchanges"].compile()),
            """\
host @gather_by_exchanges on mesh(tp=4) {
  input %x: f32[2,3] of [8,3] (tp=S0)
  %caller = get_stream
  %y: f32[8,3] (tp=R) = alloc
  set_stream 1
  sync %caller
  for %i in 0..3 {
    %y.i: f32[3,3] of [8,3] (tp=R, chunk(0,3,%i)) = chunk(%y)
    %c0 = post exchange(%x) -> %y.i f32[8,3] (tp=S0) => (tp=R, chunk(0,3,%i))
    next
    wait %c0
    free %y.i
  }
  set_stream %caller
  sync 1
  return %y
}""",
        )

    def test_gather_by_ring(self) -> None:
        self.assertExpectedInline(
            text(CASES["gather_by_ring"].compile()),
            """\
host @gather_by_ring on mesh(tp=4) {
  input %x: f32[2,3] of [8,3] (tp=S0)
  %caller = get_stream
  %x.dense: f32[2,3] of [8,3] (tp=S0) = set(%x) contiguous
  %y: f32[8,3] (tp=R) = alloc
  set_stream 1
  sync %caller
  for %i in 0..4 {
    %y.i: f32[2,3] of [8,3] (tp=R, chunk(0,4,(%i + coord(tp)) mod 4)) = chunk(%y)
    group_start
    %c0 = send(%x.dense, to=(coord(tp) - %i) mod 4, axis=tp)
    %c1 = recv(%y.i, from=(coord(tp) + %i) mod 4, axis=tp)
    group_end
    next
    wait %c0
    wait %c1
    free %y.i
  }
  free %x.dense
  set_stream %caller
  sync 1
  return %y
}""",
        )

    def test_reduce_all(self) -> None:
        self.assertExpectedInline(
            text(CASES["reduce_all"].compile()),
            """\
host @reduce_all on mesh(tp=4) {
  input %x: f32[8,4] (tp=P(sum))
  %caller = get_stream
  %y: f32[8,4] (tp=R) = alloc
  set_stream 1
  sync %caller
  for %i in 0..3 {
    %x.i: f32[3,4] of [8,4] (tp=P(sum), chunk(0,3,%i)) = chunk(%x)
    %x.i.dense: f32[3,4] of [8,4] (tp=P(sum), chunk(0,3,%i)) = set(%x.i) contiguous
    free %x.i
    %y.i: f32[3,4] of [8,4] (tp=R, chunk(0,3,%i)) = chunk(%y)
    %c0 = post allreduce[sum](%x.i.dense) -> %y.i f32[8,4] (tp=P(sum), chunk(0,3,%i)) =>
        (tp=R, chunk(0,3,%i)) axis=tp
    next
    wait %c0
    free %x.i.dense, %y.i
  }
  set_stream %caller
  sync 1
  return %y
}""",
        )

    def test_scatter_another_dim(self) -> None:
        self.assertExpectedInline(
            text(CASES["scatter_another_dim"].compile()),
            """\
host @scatter_another_dim on mesh(tp=4) {
  input %x: f32[8,6] (tp=P(sum))
  %caller = get_stream
  %y: f32[8,2] of [8,6] (tp=S1) = alloc
  set_stream 1
  sync %caller
  for %i in 0..3 {
    %x.i: f32[3,6] of [8,6] (tp=P(sum), chunk(0,3,%i)) = chunk(%x)
    %y.i.new.send: f32[6,3] of [6,8] (tp=P(sum), chunk(1,3,%i)) = permute(%x.i, dims=[1,0])
    free %x.i
    %y.i.new.pad: f32[8,3] of [6,8] (tp=P(sum), chunk(1,3,%i)) pad=team(dim=0,parts=4) =
        pad(%y.i.new.send, dim=0)
    free %y.i.new.send
    %y.i.new.recv: f32[2,3] of [6,8] (tp=S0, chunk(1,3,%i)) pad=block(dim=0,parts=4,axis=tp)
        = alloc
    %c0 = post reducescatter[sum](%y.i.new.pad) -> %y.i.new.recv f32[8,6]
        (tp=P(sum), chunk(0,3,%i)) => (tp=S1, chunk(0,3,%i)) axis=tp dim=1
    next
    %y.i: f32[3,2] of [8,6] (tp=S1, chunk(0,3,%i)) = chunk(%y)
    wait %c0
    free %y.i.new.pad
    %y.i.new.rows: f32[2,3] of [6,8] (tp=S0, chunk(1,3,%i)) = narrow(%y.i.new.recv)
    free %y.i.new.recv
    %y.i.new: f32[3,2] of [8,6] (tp=S1, chunk(0,3,%i)) = permute(%y.i.new.rows, dims=[1,0])
    free %y.i.new.rows
    %y.i = set(%y.i.new)
    free %y.i.new, %y.i
  }
  set_stream %caller
  sync 1
  return %y
}""",
        )

    def test_scatter_by_reductions(self) -> None:
        self.assertExpectedInline(
            text(CASES["scatter_by_reductions"].compile()),
            """\
host @scatter_by_reductions on mesh(tp=4) {
  input %x: f32[8,3] (tp=P(max))
  %caller = get_stream
  %y: f32[2,3] of [8,3] (tp=S0) = alloc
  set_stream 1
  sync %caller
  for %i in 0..4 {
    %x.i: f32[2,3] of [8,3] (tp=P(max), chunk(0,4,%i)) = chunk(%x)
    %x.i.dense: f32[2,3] of [8,3] (tp=P(max), chunk(0,4,%i)) = set(%x.i) contiguous
    free %x.i
    %c0 = post reduce[max](%x.i.dense) -> %y f32[8,3] (tp=P(max), chunk(0,4,%i)) => (tp=S0)
        axis=tp
    next
    wait %c0
    free %x.i.dense
  }
  set_stream %caller
  sync 1
  return %y
}""",
        )

    def test_scatter_by_ring(self) -> None:
        self.assertExpectedInline(
            text(CASES["scatter_by_ring"].compile()),
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

    def test_scatter_whole(self) -> None:
        """It cannot be cut so: no loop."""
        self.assertExpectedInline(
            text(CASES["scatter_whole"].compile()),
            """\
host @scatter_whole on mesh(tp=4) {
  input %x: f32[8,4] (tp=P(sum))
  %x.dense: f32[8,4] (tp=P(sum)) = set(%x) contiguous
  %y: f32[2,4] of [8,4] (tp=S0) = alloc
  %c0 = post reducescatter[sum](%x.dense) -> %y f32[8,4] (tp=P(sum)) => (tp=S0) axis=tp
      dim=0
  wait %c0
  free %x.dense
  return %y
}""",
        )

    def test_local_slices(self) -> None:
        self.assertExpectedInline(
            text(CASES["local_slices"].compile()),
            """\
host @local_slices on mesh(tp=4) {
  input %x: f32[8,6] (tp=R)
  %caller = get_stream
  %y: f32[2,6] of [8,6] (tp=S0) = alloc
  %z: f32[8,2] of [8,6] (tp=S1) = alloc
  for %s in 0..3 {
    set_stream %s
    sync %caller
  }
  for %i in 0..3 {
    set_stream %i mod 3
    %y.i.new: f32[1,6] of [8,6] (tp=S0, chunk(0,3,%i)) = narrow(%x)
    %y.i: f32[1,6] of [8,6] (tp=S0, chunk(0,3,%i)) = chunk(%y)
    %y.i = set(%y.i.new)
    free %y.i.new, %y.i
    %x.i: f32[3,6] of [8,6] (tp=R, chunk(0,3,%i)) = chunk(%x)
    %x.tp_S1.i: f32[3,2] of [8,6] (tp=S1, chunk(0,3,%i)) = narrow(%x.i)
    free %x.i
    %z.i: f32[3,2] of [8,6] (tp=S1, chunk(0,3,%i)) = chunk(%z)
    %z.i = add(%x.tp_S1.i, 1)
    free %x.tp_S1.i, %z.i
  }
  set_stream %caller
  for %s in 0..3 {
    sync %s
  }
  return %y, %z
}""",
        )

    def test_send_to_a_mesh(self) -> None:
        """One loop for both meshes: a chunk travels while the next one is computed."""
        self.assertExpectedInline(
            text(CASES["send_to_a_mesh"].compile()),
            """\
host @send_to_a_mesh on m0=mesh(a=2), m1=mesh(b=2: 2..3) {
  input %x: f32[8,3] of [8,6] m0(a=S1)
  %caller = get_stream
  %z: f32[8,3] of [8,6] m1(b=S1) = alloc
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
    %y.i: f32[3,3] of [8,6] m1(b=S1, chunk(0,3,%i)) = alloc
    sync 0
    %c0 = post sendrecv(%h.i) -> %y.i f32[8,6] m0(a=S1, chunk(0,3,%i)) =>
        m1(b=S1, chunk(0,3,%i))
    next
    %z.i: f32[3,3] of [8,6] m1(b=S1, chunk(0,3,%i)) = chunk(%z)
    set_stream 0
    wait %c0
    free %h.i
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
