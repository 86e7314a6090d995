"""Hand-written host programs of local instructions, loops, branches and streams."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from helpers.host_programs import Case, each, mine, register

LOCAL: list[Case] = []
case = partial(register, LOCAL)

# -- buffers -------------------------------------------------------------------------------------


@case(2, each(x=(4,)))
def alloc_and_free(rank: int) -> list[Any]:
    x = mine(rank, 4)
    return [(x + 1) * x]


@case(1, each(x=(2, 3)))
def every_memory(rank: int) -> list[Any]:
    return [2 * mine(rank, 2, 3)]


@case(2, each(x=(2, 3)))
def permutes(rank: int) -> list[Any]:
    x = mine(rank, 2, 3).T
    return [x, 2 * x, 2 * x]


@case(2, each(x=(4,)))
def a_chain_of_aliases(rank: int) -> list[Any]:
    x = mine(rank, 4)
    return [2 * (x + 1) - x]


@case(2, each(x=(4,)))
def a_host_unit(rank: int) -> list[Any]:
    x = mine(rank, 4)
    y = torch.where(x > 2, x, 0.0)
    return [y, y.max()]


# -- loops and branches --------------------------------------------------------------------------


@case(2, lambda rank: {"x": torch.tensor(21.0)})
def a_sum_in_a_loop(rank: int) -> list[Any]:
    return [torch.tensor(30.0)]


@case(2, each(x=(6, 4), w=(4, 5)))
def matmuls_into_chunks(rank: int) -> list[Any]:
    row = each(x=(6, 4), w=(4, 5))(rank)
    return [row["x"] @ row["w"]]


@case(2, each(x=(6, 4), w=(5, 4), b=(5,)))
def linears_into_chunks(rank: int) -> list[Any]:
    row = each(x=(6, 4), w=(5, 4), b=(5,))(rank)
    return [torch.nn.functional.linear(row["x"], row["w"], row["b"]).relu()]


@case(2, each(x=(3, 4)))
def selects_and_branches(rank: int) -> list[Any]:
    x = mine(rank, 3, 4)
    y = x[0]
    for i in (1, 2):
        y = y + x[i] if (i + rank) % 2 == 0 else y - 1
    return [y]


@case(4, each(x=(2,)))
def nested_loops(rank: int) -> list[Any]:
    y, (dp, tp) = mine(rank, 2), divmod(rank, 2)
    for i in range(dp + 1):
        for j in range(rank % 2 + i):
            y = y + (i * 10 + j + 1)
        y = y * (1 + tp)
    return [y]


# -- streams -------------------------------------------------------------------------------------


@case(1, each(x=(8, 3)))
def round_robin(rank: int) -> list[Any]:
    x = mine(rank, 8, 3)
    return [(x + 1) * 3 + x]
