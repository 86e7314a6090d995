"""Memory orders on real ranks: after communications, channels-last, in the caller's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.oracle import dense_strides, has_strides, local_part
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard
from mdfuse.compiled.program import Program

CHANNELS_LAST = (3, 0, 2, 1)


def outermost_first(stride_order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(stride_order)), key=lambda d: -stride_order[d]))


def numbers(shape: Sequence[int], stride_order: Sequence[int], device: Any) -> Tensor:
    """The same integers on every rank, in this memory order."""
    dims = outermost_first(stride_order)
    count = torch.Size(shape).numel()
    base = torch.arange(count, dtype=torch.float64, device=device).reshape([shape[d] for d in dims])
    return base.permute([dims.index(d) for d in range(len(dims))])


def check(
    program: Program, given: Tensor, out: Any, expected: Sequence[Tensor], orders: Any
) -> None:
    """Run with and without the caller's buffers; values and strides are exact."""
    for buffers in (None, out):
        outputs = program.run(given, out=buffers)
        for y, name, whole, order in zip(
            outputs, program.fusion.outputs, expected, orders, strict=True
        ):
            part = local_part(whole, program.fusion.layout(name), mf.init().rank)
            assert torch.equal(y, part)
            assert has_strides(y, dense_strides(part.shape, outermost_first(order)))


def run_everywhere(comm: Any, size: int) -> None:
    mesh = DeviceMesh.arange(tp=size)
    shape = (5, 2 * size, 3)
    x = numbers(shape, (2, 1, 0), comm.device)
    layouts: list[dict[str, Any]] = [{}, *({"tp": Shard(d)} for d in range(3))]
    for order in ((0, 1, 2), (1, 2, 0), (2, 1, 0)):
        with mf.FusionDefinition() as fd:
            a = fd.define_tensor(shape, torch.float64, mesh, {"tp": Shard(1)})
            for layout in layouts:
                fd.add_output(fd.ops.set(a).on(mesh, layout), stride_order=order)
            t = fd.ops.sum(a, dims=[1], keepdim=True)
            fd.add_output(fd.ops.set(t).on(mesh, {}), stride_order=order)
            fd.add_output(fd.ops.set(t).on(mesh, {"tp": Shard(0)}), stride_order=order)
        program = mf.compile(fd)
        expected = [x] * 4 + [x.sum(1, keepdim=True)] * 2
        parts = [
            local_part(whole, program.fusion.layout(name), comm.rank)
            for whole, name in zip(expected, program.fusion.outputs, strict=True)
        ]
        strides = [dense_strides(p.shape, outermost_first(order)) for p in parts]
        out = [
            torch.empty_strided(p.shape, s, dtype=p.dtype, device=p.device)
            for p, s in zip(parts, strides, strict=True)
        ]
        given = local_part(x, program.fusion.layout(program.fusion.inputs[0]), comm.rank)
        check(program, given, out, expected, [order] * 6)


@pytest.mark.world(2)
def test_requirements_on_two_ranks(comm: Any) -> None:
    run_everywhere(comm, 2)


@pytest.mark.world(4)
def test_requirements_on_four_ranks(comm: Any) -> None:
    run_everywhere(comm, 4)


@pytest.mark.world(4)
def test_channels_last_and_a_hinted_sum(comm: Any) -> None:
    mesh = DeviceMesh.arange(tp=4)
    x = numbers((4, 6, 5, 3), CHANNELS_LAST, comm.device)
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor(
            x.shape, torch.float64, mesh, {"tp": Shard(1)}, stride_order=CHANNELS_LAST
        )
        fd.add_output(fd.ops.relu(a * 2) + a)
        fd.add_output(fd.ops.sum(a, dims=[2]))
    program = mf.compile(fd)
    given = local_part(x, program.fusion.layout(program.fusion.inputs[0]), comm.rank)
    check(program, given, None, [x * 3, x.sum(2)], [CHANNELS_LAST, (2, 0, 1)])


@pytest.mark.world(4)
def test_an_allreduce_into_a_required_order(comm: Any) -> None:
    mesh = DeviceMesh.arange(tp=4)
    x = numbers((4, 6), (1, 0), comm.device)
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor(x.shape, torch.float64, mesh, {"tp": Partial("sum")})
        fd.add_output(fd.ops.set(a).on(mesh, {}), stride_order=(0, 1))
    check(mf.compile(fd), x, None, [4 * x], [(0, 1)])
