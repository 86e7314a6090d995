"""Hand-written programs with square shapes, so that a change of a dim, an axis or a layout fits."""

from __future__ import annotations

REDUCED = """
host @reduced on mesh(x=2) {
  input %x: f32[2,4] of [4,4] (x=S0)
  input %w: f32[4,2] of [4,4] (x=S1)
  input %p: f32[4,4] (x=P(sum))
  %t: f32[2,4] of [4,4] (x=S0) = permute(%w, dims=[1,0])
  %columns: f32[4] (x=P(sum)) = sum(%x, dims=[0])
  %rows: f32[2] of [4] (x=S0) = sum(%x, dims=[1])
  %total: f32[4] (x=R) = alloc
  %c0 = post allreduce[sum](%columns) -> %total f32[4] (x=P(sum)) => (x=R) axis=x
  wait %c0
  %largest: f32[4] (x=P(max)) = max(%x, dims=[0])
  %top: f32[4] (x=R) = alloc
  %c1 = post allreduce[max](%largest) -> %top f32[4] (x=P(max)) => (x=R) axis=x
  wait %c1
  %m: f32[4] (x=P(sum)) = mean(%x, dims=[0])
  %mean: f32[2] of [4] (x=S0) = alloc
  %c2 = post reduce_scatter[sum](%m) -> %mean f32[4] (x=P(sum)) => (x=S0) axis=x dim=0
  wait %c2
  %q: f32[4,4] (x=P(sum)) = mul(%p, 2.0)
  %r: f32[4,4] (x=P(sum)) = add(%p, %q)
  %s: f32[4] (x=P(sum)) = sum(%r, dims=[1])
  %sum: f32[4] (x=R) = alloc
  %c3 = post allreduce[sum](%s) -> %sum f32[4] (x=P(sum)) => (x=R) axis=x
  wait %c3
  %soft: f32[2,4] of [4,4] (x=S0) = softmax(%x, dim=1)
  %y: f32[4] (x=R) = add(%sum, %total)
  %z: f32[4] (x=R) = maximum(%y, %top)
  %e: f32[4] (x=R) = exp(%top)
  return %rows, %mean, %z, %soft, %t, %e
}"""

MOVED = """
host @moved on mesh(x=2) {
  input %x: f32[2,4] of [4,4] (x=S0)
  %send: f32[8] of [4,4] (x=S0) flat = pack(%x, dim=0, to_dim=1, axis=x)
  %y: f32[4,2] of [4,4] (x=S1) = alloc
  %c0 = post alltoall(%send) -> %y f32[4,4] (x=S0) => (x=S1) axis=x dim=0 to_dim=1
  wait %c0
  %whole: f32[4,4] (x=R) = alloc
  %c1 = post allgather(%x) -> %whole f32[4,4] (x=S0) => (x=R) axis=x dim=0
  wait %c1
  %cut: f32[4,2] of [4,4] (x=S1) = narrow(%whole)
  %h: f32[4,2] of [4,4] (x=S1) = sub(%y, %cut)
  %k: f32[4,2] of [4,4] (x=S1) = add(%h, %y)
  %f.send: f32[2,4] of [4,4] (x=S0) = permute(%k, dims=[1,0]) contiguous
  %f.recv: f32[4,4] (x=R) = alloc
  %c2 = post allgather(%f.send) -> %f.recv f32[4,4] (x=S1) => (x=R) axis=x dim=1
  wait %c2
  %f: f32[4,4] (x=R) = permute(%f.recv, dims=[1,0])
  %row: f32[4] (x=R) = select(%f, dim=0, index=1)
  %z: f32[4,4] (x=P(sum)) = term(%x)
  return %k, %f, %row, %z
}"""

CHUNKED = """
host @chunked on mesh(x=2) {
  input %x: f32[4,4] (x=P(sum))
  input %w: f32[4,4] (x=R)
  input %b: f32[2,4] of [4,4] (x=S0)
  %y: f32[4,4] (x=R) = alloc
  %s: f32[2,4] of [4,4] (x=S0) = alloc
  for %i in 0..2 {
    %x.i: f32[2,4] of [4,4] (x=P(sum), chunk(0,2,%i)) = chunk(%x)
    %y.i: f32[2,4] of [4,4] (x=R, chunk(0,2,%i)) = chunk(%y)
    %t: f32[2,4] of [4,4] (x=R, chunk(0,2,%i)) = alloc
    %c0 = post allreduce[sum](%x.i) -> %t
      f32[4,4] (x=P(sum), chunk(0,2,%i)) => (x=R, chunk(0,2,%i)) axis=x
    wait %c0
    %g: f32[2,4] of [4,4] (x=R, chunk(0,2,%i)) = alloc
    %c1 = post broadcast(%b) -> %g f32[4,4] (x=S0) => (x=R, chunk(0,2,%i)) axis=x
    wait %c1
    %h: f32[2,4] of [4,4] (x=R, chunk(0,2,%i)) = matmul(%t, %w)
    %y.i = add(%h, %g)
    %c2 = post reduce[sum](%x.i) -> %s f32[4,4] (x=P(sum), chunk(0,2,%i)) => (x=S0) axis=x
    wait %c2
    free %x.i, %y.i, %t, %g, %h
  }
  return %y, %s
}"""

GRID = """
host @grid on mesh(dp=2, tp=2) {
  input %x: f32[2,2] of [4,4] (dp=S0, tp=S1)
  input %w: f32[2,4] of [4,4] (dp=R, tp=S0)
  input %n: i64[2] of [4] (dp=S0, tp=R)
  input %e: f32[2,4] of [4,4] (dp=R, tp=S0)
  %h: f32[2,4] of [4,4] (dp=S0, tp=P(sum)) = matmul(%x, %w)
  %y: f32[2,4] of [4,4] (dp=S0, tp=R) = alloc
  %c0 = post allreduce[sum](%h) -> %y f32[4,4] (dp=S0, tp=P(sum)) => (dp=S0, tp=R) axis=tp
  wait %c0
  %l: f32[2,4] of [4,4] (dp=S0, tp=P(sum)) = embedding(%n, %e)
  %k: f32[2,4] of [4,4] (dp=S0, tp=R) = alloc
  %c1 = post allreduce[sum](%l) -> %k f32[4,4] (dp=S0, tp=P(sum)) => (dp=S0, tp=R) axis=tp
  wait %c1
  %u: f32[2,4] of [4,4] (dp=S0, tp=R) = uniform(3, shape=[4,4], dtype=f32, stream=0)
  %d: f32[2,4] of [4,4] (dp=S0, tp=R) = dropout(%k, 5, p=0.5, stream=1)
  %a: f32[2,4] of [4,4] (dp=S0, tp=R) = add(%y, %d)
  %z: f32[2,4] of [4,4] (dp=S0, tp=R) = add(%a, %u)
  %m: f32[4] (dp=P(sum), tp=R) = mean(%z, dims=[0])
  %g: f32[4] (dp=R, tp=R) = alloc
  %c2 = post allreduce[sum](%m) -> %g f32[4] (dp=P(sum), tp=R) => (dp=R, tp=R) axis=dp
  wait %c2
  %r: f32[4,4] (dp=R, tp=R) = alloc
  %c3 = post allgather(%z) -> %r f32[4,4] (dp=S0, tp=R) => (dp=R, tp=R) axis=dp dim=0
  wait %c3
  %q: f32[2,2,4] of [2,2,4] (dp=R, tp=R) = reshape(%r, shape=[2,2,4])
  %o: f32[2,2] of [4,4] (dp=S0, tp=S1) = alloc
  %c4 = post exchange(%z) -> %o f32[4,4] (dp=S0, tp=R) => (dp=S0, tp=S1)
  wait %c4
  return %z, %g, %q, %o
}"""

MESHES = """
host @meshes on m0=mesh(x=1: 1), m1=mesh(x=2: 3 0), m2=mesh(x=4), m3=mesh(x=2: 1 2) {
  input %x: f32[4,4] m0(x=R)
  %part: f32[2,4] of [4,4] m1(x=S0) = alloc
  %c0 = post scatter(%x) -> %part f32[4,4] m0(x=R) => m1(x=S0) axis=x dim=0
  wait %c0
  %twice: f32[2,4] of [4,4] m1(x=S0) = mul(%part, 2.0)
  %there: f32[2,4] of [4,4] m3(x=S0) = alloc
  %c1 = post sendrecv(%twice) -> %there f32[4,4] m1(x=S0) => m3(x=S0)
  wait %c1
  %back: f32[4,4] m0(x=R) = alloc
  %c2 = post gather(%there) -> %back f32[4,4] m3(x=S0) => m0(x=R) axis=x dim=0
  wait %c2
  %copy: f32[4,4] m2(x=R) = alloc
  %c3 = post broadcast(%back) -> %copy f32[4,4] m0(x=R) => m2(x=R)
  wait %c3
  %cut: f32[1,4] of [4,4] m2(x=S0) = narrow(%copy)
  %p: f32[4] m2(x=P(sum)) = sum(%cut, dims=[0])
  %sum: f32[4] m0(x=R) = alloc
  %c4 = post reduce[sum](%p) -> %sum f32[4] m2(x=P(sum)) => m0(x=R)
  wait %c4
  return %twice, %there, %copy, %sum
}"""

UNEVEN = """
host @uneven on mesh(x=2) {
  input %a: f32[3,3] of [5,3] (x=S0)
  %p: f32[3,3] of [5,3] (x=S0) pad=block(dim=0,parts=2,axis=x) = pad(%a, dim=0)
  %b: f32[6,3] of [5,3] (x=R) pad=team(dim=0,parts=2) = alloc
  %c = post allgather(%p) -> %b f32[5,3] (x=S0) => (x=R) axis=x dim=0
  wait %c
  %y: f32[5,3] (x=R) = narrow(%b)
  %one: f32[1,3] (x=R) = slice(%y, starts=[1,0], ends=[2,3], steps=[1,1])
  %many: f32[3,3] (x=R) = expand(%one, shape=[3,3])
  %turned: f32[3,3] (x=R) = permute(%many, dims=[1,0])
  %single: f32[3,1] (x=R) = unexpand(%turned, dims=[1])
  %z: f32[3,1] (x=R) = neg(%single)
  return %y, %z
}"""

TURNED = """
host @turned on mesh(x=4) {
  input %x: f32[2,2] of [8,2] (x=S0)
  input %w: f32[2,2] (x=R)
  %next: f32[2,2] of [8,2] (x=S0) = alloc
  group_start
  %c0 = send(%x, to=(coord(x) + 1) mod 4, axis=x)
  %c1 = recv(%next, from=(coord(x) - 1) mod 4, axis=x)
  group_end
  wait %c0
  wait %c1
  %q: f32[2,2] (x=varies) = set(%x)
  %k: f32[2,2] (x=varies) = set(%next)
  %t: f32[2,2] (x=varies) = permute(%k, dims=[1,0])
  %scores: f32[2,2] (x=varies) = matmul(%q, %t)
  %row: f32[2] (x=varies) = select(%w, dim=0, index=rank mod 2)
  %h: f32[2,2] (x=varies) = add(%scores, %row)
  %p: f32[2,2] (x=P(sum)) = set(%h)
  %y: f32[2,2] (x=R) = alloc
  %c2 = post allreduce[sum](%p) -> %y f32[2,2] (x=P(sum)) => (x=R) axis=x
  wait %c2
  %z: f32[2,2] of [8,2] (x=S0) = set(%h)
  return %y, %z, %next
}"""

SUMS = """
host @sums on mesh(x=2) {
  input %x: f32[2,4] of [4,4] (x=S0)
  input %w: f32[4,4] (x=R)
  %a: f32[4] (x=P(sum)) = alloc
  %b: f32[4] (x=R) = alloc
  %m: f32[4,2] of [4,4] (x=S1) = alloc
  for %i in 0..2 {
    %x.i: f32[1,4] of [4,4] (x=S0, chunk(0,2,%i)) = chunk(%x)
    %a.i: f32[4] (x=P(sum), chunk(P(sum),2,%i)) = sum(%x.i, dims=[0])
    %a = accumulate(%a.i)
    %w.i: f32[4,2] of [4,4] (x=R, chunk(1,2,%i)) = chunk(%w)
    %b.i: f32[4] (x=R, chunk(P(max),2,%i)) = max(%w.i, dims=[1])
    %b = accumulate(%b.i)
    %v.i: f32[2,4] of [4,4] (x=R, chunk(0,2,%i)) = permute(%w.i, dims=[1,0])
    %n.i: f32[2,2] of [4,4] (x=S1, chunk(0,2,%i)) = narrow(%v.i)
    %m.i: f32[4,2] of [4,4] (x=S1, chunk(P(sum),2,%i)) = matmul(%w.i, %n.i)
    %m = accumulate(%m.i)
  }
  %t: f32[4] (x=R) = alloc
  %c0 = post allreduce[sum](%a) -> %t f32[4] (x=P(sum)) => (x=R) axis=x
  wait %c0
  %y: f32[4] (x=R) = sub(%t, %b)
  return %y, %m
}"""

TYPED = {
    "sums": SUMS,
    "reduced": REDUCED,
    "moved": MOVED,
    "chunked": CHUNKED,
    "grid": GRID,
    "meshes": MESHES,
    "uneven": UNEVEN,
}

#: What their values are only the ranks know.
BY_RANK = {"turned": TURNED}
