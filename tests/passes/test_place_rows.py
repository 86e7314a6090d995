"""The places of rows by expert: sorted once for a step, with the values of a loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.ir import ragged
from passes.test_count_rows import by_loop, given, layer, router

SPLIT = {"ep": Shard(0)}


@pytest.mark.parametrize("counts", ["host", "device"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_sorts_its_rows_once(count: int, counts: Any) -> None:
    fd, options = layer(DeviceMesh.arange(ep=2), 8, 5, 3, SPLIT), mf.Options(counts=counts)
    batch = {"x": 0, "ids": 0}
    program = mf.compile(fd, options)
    if count == 2:
        program = mf.pipeline(fd, microbatches=2, batch=batch, options=options)
    every = [*program.host.walk()]
    readers = [i for i in every if i.fn in ("line_up_rows", "put_back_rows")]
    assert sum(i.fn == "row_places" for i in every) == 1
    assert [len(i.reads) for i in readers] == [4] * 4
    values = given(8, 5, router(8, 5, 3))
    check_everywhere(program, values, by_loop(*values))


def test_dense_rows_look_for_themselves() -> None:
    fd = layer(DeviceMesh.arange(ep=2), 8, 4, 2, SPLIT, has_grads=False)
    program = mf.compile(fd, mf.Options(same_bits=True, compile="auto"))
    assert not any(i.fn == "row_places" for i in program.host.walk())


def test_places_are_those_of_each_part() -> None:
    """By expert, in the order of the tokens; -1 where no expert is, or none of the rows is kept."""
    ids = torch.tensor([[1, 0], [1, -1], [0, 1], [2, 1], [5, 0]])
    n = ragged.count(ids, experts=3, parts=2)
    assert n.tolist() == [[2, 3, 0], [1, 1, 1]]
    wanted = [[2, 0], [3, -1], [1, 4], [2, 1], [-1, 0]]
    assert ragged.places(ids, n).tolist() == wanted
    few = ragged.places(ids, n.clamp(max=1))
    assert few.tolist() == [[1, 0], [-1, -1], [-1, -1], [2, 1], [-1, 0]]
    last = ragged.places(ids[3:], n[1:], rows=(3, 5, 5), part=(1, 2, 2))
    assert last.tolist() == wanted[3:]
    assert ragged.places(ids, n, sizes=(3, 2)).tolist() == wanted
