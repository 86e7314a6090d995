"""Hand-written host programs that communicate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from helpers.host_cases import LOCAL
from helpers.host_programs import Case, each, mine, numbers, register

POSTS: list[Case] = []
case = partial(register, POSTS)


@case(
    4,
    """
  input %x: f32[2] of [8] (x=S0)
  input %p: f32[8] (x=P(sum))
  input %q: f32[8] (x=P(max))
  %all: f32[8] (x=R) = alloc
  %c = post allgather(%x) -> %all f32[8] (x=S0) => (x=R) axis=x dim=0
  %h: f32[2] of [8] (x=S0) = add(%x, 1.0)
  wait %c
  %total: f32[8] (x=R) = alloc
  %d = post allreduce[sum](%p) -> %total f32[8] (x=P(sum)) => (x=R) axis=x
  %part: f32[2] of [8] (x=S0) = alloc
  %e = post reduce_scatter[max](%q) -> %part f32[8] (x=P(max)) => (x=S0) axis=x dim=0
  wait %e
  wait %d
  return %all, %h, %total, %part
""",
    each(x=(2,), p=(8,), q=(8,)),
)
def collectives(rank: int) -> list[Any]:
    rows = [each(x=(2,), p=(8,), q=(8,))(r) for r in range(4)]
    total = torch.stack([row["p"] for row in rows]).sum(0)
    largest = torch.stack([row["q"] for row in rows]).amax(0)
    whole = torch.cat([row["x"] for row in rows])
    return [whole, rows[rank]["x"] + 1, total, largest.chunk(4)[rank]]


@case(
    4,
    """
  input %x: f32[4] m0(x=R)
  %part: f32[2] of [4] m1(x=S0) = alloc
  %c0 = post scatter(%x) -> %part f32[4] m0(x=R) => m1(x=S0) axis=x dim=0
  wait %c0
  %twice: f32[2] of [4] m1(x=S0) = mul(%part, 2.0)
  %back: f32[4] m0(x=R) = alloc
  %c1 = post gather(%twice) -> %back f32[4] m1(x=S0) => m0(x=R) axis=x dim=0
  wait %c1
  %copy: f32[4] m2(x=R) = alloc
  %c2 = post broadcast(%back) -> %copy f32[4] m0(x=R) => m2(x=R)
  wait %c2
  %sum: f32[4] m0(x=R) = alloc
  %mine: f32[4] m2(x=varies) = mul(%copy, 1.0)
  %p: f32[4] m2(x=P(sum)) = set(%mine)
  %c3 = post reduce[sum](%p) -> %sum f32[4] m2(x=P(sum)) => m0(x=R)
  wait %c3
  return %twice, %copy, %sum
""",
    lambda rank: {"x": numbers(4) if rank == 1 else None},
    mesh="m0=mesh(x=1: 1), m1=mesh(x=2: 3 0), m2=mesh(x=4)",
)
def between_meshes(rank: int) -> list[Any]:
    twice = (2 * numbers(4)).chunk(2)
    mine = {3: twice[0], 0: twice[1]}.get(rank)
    return [mine, 2 * numbers(4), 8 * numbers(4) if rank == 1 else None]


@case(
    2,
    """
  input %x: f32[2,4] of [4,4] (x=S0)
  %send: f32[8] of [4,4] (x=S0) flat = pack(%x, dim=0, to_dim=1, axis=x)
  %y: f32[4,2] of [4,4] (x=S1) = alloc
  %c = post alltoall(%send) -> %y f32[4,4] (x=S0) => (x=S1) axis=x dim=0 to_dim=1
  wait %c
  %there: f32[2,4] of [4,4] m1(x=S0) = alloc
  %d = post sendrecv(%x) -> %there f32[4,4] m0(x=S0) => m1(x=S0)
  wait %d
  return %y, %there
""",
    each(x=(2, 4)),
    mesh="m0=mesh(x=2), m1=mesh(x=2: 1 0)",
)
def all_to_all_and_send_recv(rank: int) -> list[Any]:
    whole = torch.cat([mine(r, 2, 4) for r in range(2)])
    return [whole.chunk(2, 1)[rank], mine(1 - rank, 2, 4)]


@case(
    4,
    """
  input %x: f32[4] (x=P(sum))
  %y: f32[4] (x=R) = alloc
  %c = post allreduce[sum](%x) -> %y f32[4] (x=P(sum)) => (x=R) axis=x pieces=3
  for %i in 0..2 {
    wait %c[%i]
    %s: f32[] (x=R) = select(%y, dim=0, index=%i)
    %s = add(%s, 1.0)
  }
  wait %c[2]
  %z: f32[4] (x=R) = mul(%y, 2.0)
  return %z
""",
    each(x=(4,)),
)
def pieces(rank: int) -> list[Any]:
    total = sum((mine(r, 4) for r in range(4)), torch.zeros(4))
    return [2 * (total + torch.tensor([1.0, 1.0, 0.0, 0.0]))]


@case(
    4,
    """
  input %x: f32[3] (dp=R, tp=R)
  %y: f32[3] (dp=R, tp=R) = mul(%x, 1.0)
  %next: f32[3] (dp=R, tp=R) = alloc
  for %i in 0..2 {
    group_start
    %s = send(%y, to=(coord(tp) + 1) mod 2, axis=tp)
    %r = recv(%next, from=(coord(tp) + 1) mod 2, axis=tp)
    group_end
    wait %s
    wait %r
    %y = add(%next, 1.0)
  }
  barrier (dp=R, tp=R)
  group_start
  %s2 = send(%y, to=(rank + 1) mod 4)
  %r2 = recv(%next, from=(rank + 3) mod 4)
  group_end
  wait %r2
  wait %s2
  barrier (dp=R, tp=R) axis=dp
  return %y, %next
""",
    each(x=(3,)),
    mesh="mesh(dp=2, tp=2)",
)
def rings(rank: int) -> list[Any]:
    return [mine(rank, 3) + 2, mine((rank + 3) % 4, 3) + 2]


@case(
    4,
    """
  input %x: f32[2] (x=varies)
  %y: f32[4,2] (x=varies) = alloc
  for %i in 0..4 {
    %row: f32[2] (x=varies) = select(%y, dim=0, index=(rank + %i) mod 4)
    group_start
    %s = send(%x, to=(rank - %i) mod 4)
    %r = recv(%row, from=(rank + %i) mod 4)
    group_end
    wait %s
    wait %r
  }
  return %y
""",
    each(x=(2,)),
)
def peers_that_depend_on_the_loop(rank: int) -> list[Any]:
    return [torch.stack([mine(r, 2) for r in range(4)])]


@case(
    2,
    """
  input %x: f32[2] (x=R)
  %y: f32[2] (x=R) = mul(%x, 1.0)
  %z: f32[2] (x=R) = alloc
  %s = send(%y, to=rank)
  %r = recv(%z, from=rank)
  wait %s
  wait %r
  %y = mul(%y, 0.0)
  group_start
  %s1 = send(%z, to=rank)
  %r1 = recv(%y, from=rank)
  group_end
  wait %r1
  wait %s1
  return %z, %y
""",
    each(x=(2,)),
)
def to_oneself(rank: int) -> list[Any]:
    return [mine(rank, 2), mine(rank, 2)]


@case(
    4,
    """
  input %x: f32[3,4] (x=varies)
  input %k: i64[2] (x=varies)
  %column: f32[3] (x=varies) = select(%x, dim=1, index=rank)
  %y: f32[3,4] (x=varies) = alloc
  %there: f32[3] (x=varies) = select(%y, dim=1, index=0)
  %other: f32[3] (x=varies) = select(%y, dim=1, index=1)
  %l: i64[2] (x=varies) = alloc
  group_start
  %s0 = send(%column, to=(rank + 1) mod 4)
  %s1 = send(%k, to=(rank + 1) mod 4)
  %s2 = send(%column, to=(rank + 2) mod 4)
  %r0 = recv(%there, from=(rank + 3) mod 4)
  %r2 = recv(%other, from=(rank + 2) mod 4)
  %r1 = recv(%l, from=(rank + 3) mod 4)
  group_end
  wait %r0
  %there = add(%there, 1.0)
  wait %r1
  wait %r2
  wait %s0
  wait %s1
  wait %s2
  return %there, %other, %l
""",
    lambda rank: {"x": mine(rank, 3, 4), "k": torch.tensor([rank, -rank])},
)
def a_group_of_columns(rank: int) -> list[Any]:
    left, across = (rank + 3) % 4, (rank + 2) % 4
    return [
        mine(left, 3, 4)[:, left] + 1,
        mine(across, 3, 4)[:, across],
        torch.tensor([left, -left]),
    ]


@case(
    2,
    """
  input %x: f32[4,2] (x=varies)
  %y: f32[4,2] (x=R) = alloc
  for %i in 0..3 {
    %x.i: f32[2,2] of [4,2] (x=varies, chunk(0,3,%i)) = chunk(%x)
    %y.i: f32[2,2] of [4,2] (x=R, chunk(0,3,%i)) = chunk(%y)
    %c = post allreduce[sum](%x.i) -> %y.i
      f32[4,2] (x=P(sum), chunk(0,3,%i)) => (x=R, chunk(0,3,%i)) axis=x
    wait %c
    %d = post allreduce[max](%x.i) -> %y.i
      f32[4,2] (x=P(max), chunk(0,3,%i)) => (x=R, chunk(0,3,%i)) axis=x
    wait %d
  }
  return %y
""",
    each(x=(4, 2)),
)
def posts_in_a_loop(rank: int) -> list[Any]:
    return [mine(1, 4, 2)]


#: All of them.
CASES = [*LOCAL, *POSTS]
