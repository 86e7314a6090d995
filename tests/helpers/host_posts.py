"""Hand-written host programs that communicate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from helpers.host_cases import LOCAL
from helpers.host_programs import Case, each, mine, numbers, register

POSTS: list[Case] = []
case = partial(register, POSTS)


@case(4, each(x=(2,), p=(8,), q=(8,)))
def collectives(rank: int) -> list[Any]:
    rows = [each(x=(2,), p=(8,), q=(8,))(r) for r in range(4)]
    total = torch.stack([row["p"] for row in rows]).sum(0)
    largest = torch.stack([row["q"] for row in rows]).amax(0)
    whole = torch.cat([row["x"] for row in rows])
    return [whole, rows[rank]["x"] + 1, total, largest.chunk(4)[rank]]


@case(4, lambda rank: {"x": numbers(4) if rank == 1 else None})
def between_meshes(rank: int) -> list[Any]:
    twice = (2 * numbers(4)).chunk(2)
    mine = {3: twice[0], 0: twice[1]}.get(rank)
    return [mine, 2 * numbers(4), 8 * numbers(4) if rank == 1 else None]


@case(2, each(x=(2, 4)))
def all_to_all_and_send_recv(rank: int) -> list[Any]:
    whole = torch.cat([mine(r, 2, 4) for r in range(2)])
    return [whole.chunk(2, 1)[rank], mine(1 - rank, 2, 4)]


@case(4, each(x=(4,)))
def pieces(rank: int) -> list[Any]:
    total = sum((mine(r, 4) for r in range(4)), torch.zeros(4))
    return [2 * (total + torch.tensor([1.0, 1.0, 0.0, 0.0]))]


@case(4, each(x=(3,)))
def rings(rank: int) -> list[Any]:
    return [mine(rank, 3) + 2, mine((rank + 3) % 4, 3) + 2]


@case(4, each(x=(2,)))
def peers_that_depend_on_the_loop(rank: int) -> list[Any]:
    return [torch.stack([mine(r, 2) for r in range(4)])]


@case(2, each(x=(2,)))
def to_oneself(rank: int) -> list[Any]:
    return [mine(rank, 2), mine(rank, 2)]


@case(4, lambda rank: {"x": mine(rank, 3, 4), "k": torch.tensor([rank, -rank])})
def a_group_of_columns(rank: int) -> list[Any]:
    left, across = (rank + 3) % 4, (rank + 2) % 4
    return [
        mine(left, 3, 4)[:, left] + 1,
        mine(across, 3, 4)[:, across],
        torch.tensor([left, -left]),
    ]


@case(2, each(x=(4, 2)))
def posts_in_a_loop(rank: int) -> list[Any]:
    return [mine(1, 4, 2)]


#: All of them.
CASES = [*LOCAL, *POSTS]
