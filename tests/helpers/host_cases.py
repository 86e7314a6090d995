"""Hand-written host programs of local instructions, loops, branches and streams."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from helpers.host_programs import Case, each, mine, register

LOCAL: list[Case] = []
case = partial(register, LOCAL)

# -- buffers -------------------------------------------------------------------------------------


@case(
    2,
    """
  input %x: f32[4] of [8] (x=S0)
  %h: f32[4] of [8] (x=S0) = alloc
  %h = add(%x, 1.0)
  %y: f32[4] of [8] (x=S0) = mul(%h, %x)
  free %h
  return %y
""",
    each(x=(4,)),
)
def alloc_and_free(rank: int) -> list[Any]:
    x = mine(rank, 4)
    return [(x + 1) * x]


@case(
    1,
    """
  input %x: f32[2,3] (x=R)
  %a: f32[2,3] (x=R) = alloc(memory=host)
  %b: f32[2,3] (x=R) = alloc(memory=pinned) order=[1,0]
  %c: f32[2,3] (x=R) = alloc(memory=device) contiguous
  %a = set(%x)
  %b = set(%x)
  %c = mul(%x, 2.0)
  %d: f32[2,3] (x=R) = alloc(memory=symmetric)
  %d = set(%c)
  return %d
""",
    each(x=(2, 3)),
)
def every_memory(rank: int) -> list[Any]:
    return [2 * mine(rank, 2, 3)]


@case(
    2,
    """
  input %x: f32[2,3] of [4,3] (x=S0)
  %v: f32[3,2] of [3,4] (x=S1) = permute(%x, dims=[1,0])
  %w: f32[3,2] of [3,4] (x=S1) = permute(%x, dims=[1,0]) contiguous
  %y: f32[3,2] of [3,4] (x=S1) = add(%v, %w) order=[1,0]
  %z: f32[3,2] of [3,4] (x=S1) = set(%y) contiguous
  return %v, %y, %z
""",
    each(x=(2, 3)),
)
def permutes(rank: int) -> list[Any]:
    x = mine(rank, 2, 3).T
    return [x, 2 * x, 2 * x]


@case(
    2,
    """
  input %x: f32[4] of [8] (x=S0)
  alias %c: f32[4] of [8] (x=S0) = %b
  alias %b: f32[4] of [8] (x=S0) = %a
  %a: f32[4] of [8] (x=S0) = alloc
  %c = add(%x, 1.0)
  %b = mul(%a, 2.0)
  %y: f32[4] of [8] (x=S0) = sub(%c, %x)
  free %b
  return %y
""",
    each(x=(4,)),
)
def a_chain_of_aliases(rank: int) -> list[Any]:
    x = mine(rank, 4)
    return [2 * (x + 1) - x]


@case(
    2,
    """
  input %x: f32[4] of [8] (x=S0)
  launch unit(%x) -> %y, %s {
    %h: f32[4] of [8] (x=S0) = abs(%x)
    %m: bool[4] of [8] (x=S0) = gt(%h, 2.0)
    %y: f32[4] of [8] (x=S0) = where(%m, %h, 0.0)
    %s: f32[] (x=P(max)) = max(%y)
  }
  return %y, %s
""",
    each(x=(4,)),
)
def a_host_unit(rank: int) -> list[Any]:
    x = mine(rank, 4)
    y = torch.where(x > 2, x, 0.0)
    return [y, y.max()]


# -- loops and branches --------------------------------------------------------------------------


@case(
    2,
    """
  input %x: f32[] (x=R)
  alias %y: f32[] (x=R) = %x
  for %i in 1..6 step 2 {
    %y = add(%y, %i)
  }
  return %y
""",
    lambda rank: {"x": torch.tensor(21.0)},
)
def a_sum_in_a_loop(rank: int) -> list[Any]:
    return [torch.tensor(30.0)]


@case(
    2,
    """
  input %x: f32[6,4] of [12,4] (x=S0)
  input %w: f32[4,5] (x=R)
  %y: f32[6,5] of [12,5] (x=S0) = alloc
  for %i in 0..4 {
    %x.i: f32[2,4] of [12,4] (x=S0, chunk(0,4,%i)) = chunk(%x)
    %y.i: f32[2,5] of [12,5] (x=S0, chunk(0,4,%i)) = chunk(%y)
    %y.i = matmul(%x.i, %w)
  }
  return %y
""",
    each(x=(6, 4), w=(4, 5)),
)
def matmuls_into_chunks(rank: int) -> list[Any]:
    row = each(x=(6, 4), w=(4, 5))(rank)
    return [row["x"] @ row["w"]]


@case(
    2,
    """
  input %x: f32[6,4] of [12,4] (x=S0)
  input %w: f32[5,4] (x=R)
  input %b: f32[5] (x=R)
  %y: f32[6,5] of [12,5] (x=S0) = alloc
  for %i in 0..2 {
    %x.i: f32[4,4] of [12,4] (x=S0, chunk(0,[4,2],%i)) = chunk(%x)
    %y.i: f32[4,5] of [12,5] (x=S0, chunk(0,[4,2],%i)) = chunk(%y)
    %y.i = linear(%x.i, %w, %b)
  }
  %h: f32[6,5] of [12,5] (x=S0) = relu(%y)
  return %h
""",
    each(x=(6, 4), w=(5, 4), b=(5,)),
)
def linears_into_chunks(rank: int) -> list[Any]:
    row = each(x=(6, 4), w=(5, 4), b=(5,))(rank)
    return [torch.nn.functional.linear(row["x"], row["w"], row["b"]).relu()]


@case(
    2,
    """
  input %x: f32[3,4] of [3,8] (x=S1)
  %y: f32[4] of [8] (x=S0) = alloc
  %s: f32[4] of [8] (x=S0) = select(%x, dim=0, index=0)
  %y = set(%s)
  for %i in 1..extent(%x,0) {
    if (%i + rank) mod 2 == 0 {
      %r: f32[4] of [8] (x=S0) = select(%x, dim=0, index=%i)
      %y = add(%y, %r)
    } else {
      %y = sub(%y, 1.0)
    }
  }
  return %y
""",
    each(x=(3, 4)),
)
def selects_and_branches(rank: int) -> list[Any]:
    x = mine(rank, 3, 4)
    y = x[0]
    for i in (1, 2):
        y = y + x[i] if (i + rank) % 2 == 0 else y - 1
    return [y]


@case(
    4,
    """
  input %x: f32[2] (dp=varies, tp=varies)
  %y: f32[2] (dp=varies, tp=varies) = mul(%x, 1.0)
  for %i in 0..coord(dp) + 1 {
    for %j in 0..rank mod 2 + %i {
      %y = add(%y, %i * 10 + %j + 1)
    }
    if coord(tp) == 1 {
      %y = mul(%y, 2.0)
    }
  }
  return %y
""",
    each(x=(2,)),
    mesh="mesh(dp=2, tp=2)",
)
def nested_loops(rank: int) -> list[Any]:
    y, (dp, tp) = mine(rank, 2), divmod(rank, 2)
    for i in range(dp + 1):
        for j in range(rank % 2 + i):
            y = y + (i * 10 + j + 1)
        y = y * (1 + tp)
    return [y]


# -- streams -------------------------------------------------------------------------------------


@case(
    1,
    """
  input %x: f32[8,3] (x=R)
  %y: f32[8,3] (x=R) = alloc
  %caller = get_stream
  for %i in 0..4 {
    set_stream %i mod 2
    sync %caller
    %x.i: f32[2,3] of [8,3] (x=R, chunk(0,4,%i)) = chunk(%x)
    %y.i: f32[2,3] of [8,3] (x=R, chunk(0,4,%i)) = chunk(%y)
    %h: f32[2,3] of [8,3] (x=R, chunk(0,4,%i)) = add(%x.i, 1.0)
    %y.i = mul(%h, 3.0)
    free %h, %x.i, %y.i
  }
  set_stream %caller
  sync 0
  sync 1
  %z: f32[8,3] (x=R) = add(%y, %x)
  free %y
  return %z
""",
    each(x=(8, 3)),
)
def round_robin(rank: int) -> list[Any]:
    x = mine(rank, 8, 3)
    return [(x + 1) * 3 + x]
