"""What a backward keeps of the forward, and computes again: bytes and operations, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.seeing.backward_memory import backward_memory

MESH, SPLIT = DeviceMesh.arange(dp=2), {"dp": Shard(0)}
ROWS, IN, OUT = 6, 8, 10


def program(is_again: bool, options: Any = None) -> mf.Program:
    """A gathered matrix, a product and its tanh, whose sine is summed."""
    with mf.FusionDefinition("small") as fd:
        x = fd.define_tensor([ROWS, IN], mesh=MESH, layout=SPLIT)
        w = fd.define_tensor([IN, OUT], mesh=MESH, layout=SPLIT)
        whole = fd.ops.set(w).on(MESH, {})
        if is_again:
            with mf.recompute():
                h = (x @ whole).tanh()
        else:
            h = (x @ whole).tanh()
        for g in mf.grad(h.sin().sum(), [x, w]):
            fd.add_output(g)
    return mf.compile(fd, options)


def test_what_is_kept() -> None:
    memory = backward_memory(program(False).fusion, 1)
    assert memory.held == {"h": ROWS // 2 * OUT * 4, "whole": IN * OUT * 4}
    assert (memory.again, memory.operations, memory.received) == ({}, 0, 0)
    assert memory.all_operations == 3 * 2 * (ROWS // 2) * IN * OUT  # of x, and of both gradients


def test_what_is_computed_again() -> None:
    memory = backward_memory(program(True).fusion, 0)
    assert memory.held == {"whole": IN * OUT * 4}
    assert [*memory.again.values()] == [ROWS // 2 * OUT * 4] * 2  # the product, and tanh of it
    assert memory.operations == 2 * (ROWS // 2) * IN * OUT


def test_what_is_received_once_more() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([ROWS, IN], mesh=MESH, layout=SPLIT)
        w = fd.define_tensor([IN, OUT], mesh=MESH, layout=SPLIT)
        with mf.recompute():
            whole = fd.ops.set(w).on(MESH, {})
        for g in mf.grad((x @ whole).sin().sum(), [x, w]):
            fd.add_output(g)
    program = mf.compile(fd)
    memory = backward_memory(program.fusion, 0)
    assert memory.received == IN // 2 * OUT * 4
    (line,) = [x for x in program.explain().splitlines() if "computed again" in x]
    assert line.endswith("160 B received once more")


@pytest.mark.parametrize("is_again", [False, True])
def test_programs_explain_it(is_again: bool) -> None:
    lines = [line.strip() for line in program(is_again).explain().splitlines()]
    held = "1 value, 320 B" if is_again else "2 values, 440 B"
    assert f"backward: of the forward {held} on a rank, are kept" in lines
    again = "2 values, 240 B, are computed again: 4.8e-07 GFLOP, 33 % of all products"
    assert (again in lines) == is_again


def test_without_a_backward_there_is_no_line() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4], torch.float32)
        fd.add_output(x.sin())
    assert "backward" not in mf.compile(fd).explain()
