"""Running sums and largest elements along split dims: torch's values, and what travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard

FOUR, GRID = DeviceMesh.arange(tp=4), DeviceMesh([[3, 0], [2, 1]], axes=("a", "b"))


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 99).to(dtype)


def sent(
    build: Callable[..., Any], x: Tensor, mesh: DeviceMesh, where: dict[str, Any], goal: Any = None
) -> list[tuple[str, tuple[int, ...]]]:
    """What is sent, after the values were compared."""
    with mf.FusionDefinition("split") as fd:
        made = build(fd.define_tensor(x.shape, x.dtype, mesh, where))
        for y in made if isinstance(made, tuple) else (made,):
            fd.add_output(y if goal is None else fd.ops.set(y).on(mesh, goal))
    program = mf.compile(fd)
    assert mf.hir.parse(str(program.host)) == program.host
    expected = build(x)
    check_everywhere(program, [x], [*expected] if isinstance(expected, tuple) else [expected])
    return [(c.kind, tuple(c.shape)) for c in program.communications]


S1 = {"tp": Shard(1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16], ids=str)
def test_of_a_running_sum_the_sums_of_parts_travel(dtype: torch.dtype) -> None:
    x = numbers(6, 64, dtype=dtype)
    found = sent(lambda x: x.cumsum(1), x, FOUR, S1, S1)
    assert found == [("Allgather", (6, 4, 1))]


def test_along_a_dim_that_two_axes_split() -> None:
    where = {"a": Shard(0), "b": Shard(0)}
    found = sent(lambda x: x.cumsum(0) * 2, numbers(64, 3), GRID, where, where)
    assert {shape for _, shape in found} == {(4, 1, 3)}


def test_where_it_goes_whole() -> None:
    """Parts that are not equal, a sum that somebody reads whole, and one that would not be less."""
    whole = [("Allgather", (6, 62))]
    assert sent(lambda x: x.cumsum(1), numbers(6, 62), FOUR, S1, S1) == whole
    assert sent(lambda x: x.cumsum(1), numbers(6, 8), FOUR, S1, S1) == [("Allgather", (6, 8))]
    x = numbers(6, 64)
    assert sent(lambda x: (x.cumsum(1), x.flip(1)), x, FOUR, S1, S1)[0] == ("Allgather", (6, 64))
    partial = sent(lambda x: x.cumsum(1), x, FOUR, {"tp": Partial()}, {})
    assert ("Allgather", (6, 4, 1)) not in partial


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 3])
def test_of_the_largest_candidates_travel(k: int, largest: bool) -> None:
    found = sent(lambda x: tuple(x.topk(k, 1, largest)), numbers(5, 80), FOUR, S1)
    assert {shape for _, shape in found} <= {(5, 4 * k), (5, k)} and found


def test_more_than_a_part_has() -> None:
    mesh = DeviceMesh.arange(tp=2)
    for k in (4, 5, 8):
        sent(lambda x, k=k: tuple(x.topk(k, 0)), numbers(8, 3), mesh, {"tp": Shard(0)})


def test_gradients_through_both() -> None:
    x = numbers(3, 64)
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("gradients") as fd:
        h = fd.define_tensor(x.shape, x.dtype, mesh, {"tp": Shard(1)})
        loss = (h.cumsum(1) * h).sum() + (h.topk(2, 1).values ** 3).sum()
        (dx,) = mf.grad(loss, [h])
        fd.add_output(dx)
    leaf = x.clone().requires_grad_()
    ((leaf.cumsum(1) * leaf).sum() + (leaf.topk(2, 1).values ** 3).sum()).backward()
    check_everywhere(mf.compile(fd), [x], [leaf.grad])
