"""A program of blocks and calls over two meshes."""

from __future__ import annotations

TWO_MESHES = """\
host @squares on m0=mesh(a=1), m1=mesh(b=1: 1) {
  input %x: f32[5] m0(a=R)
  %y: f32[5] m1(b=R) = alloc
  %s: f32[] m1(b=R) = alloc
  block @F0(%i) on m0 {
    %x.i: f32[2] of [5] m0(a=R, chunk(0,3,%i)) = chunk(%x)
    %h: f32[2] of [5] m0(a=R, chunk(0,3,%i)) = mul(%x.i, %x.i)
    free %x.i
  }
  block @T01(%i) {
    %h_1: f32[2] of [5] m1(b=R, chunk(0,3,%i)) = alloc
    %c0 = post sendrecv(%h) -> %h_1 f32[5] m0(a=R, chunk(0,3,%i)) => m1(b=R, chunk(0,3,%i))
  }
  block @F1(%i) on m1 {
    wait %c0
    free %h
    %y.i: f32[2] of [5] m1(b=R, chunk(0,3,%i)) = chunk(%y)
    %y.i = add(%h_1, %i)
    %s.i: f32[] m1(b=R, chunk(P(sum),3,%i)) = sum(%h_1, dims=[0])
    %s = accumulate(%s.i)
    free %h_1, %s.i, %y.i
  }
  call F0(0)
  call T01(0)
  call F0(1)
  call T01(1)
  call F1(0)
  call F1(1)
  call F0(2)
  call T01(2)
  call F1(2)
  return %y, %s
}"""
CALLS = [line.strip() for line in TWO_MESHES.splitlines() if line.startswith("  call")]


def ordered(*calls: str) -> str:
    """The program with other calls."""
    kept = [line for line in TWO_MESHES.splitlines() if not line.startswith("  call")]
    return "\n".join([*kept[:-2], *(f"  {call}" for call in calls), *kept[-2:]])
