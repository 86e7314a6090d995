"""Attention whose keys travel around a ring, on real ranks, beside whole tensors in f64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import TOLERANCES, local_part
from passes.sharded import test_attention_masks, test_context_parallel, test_window_halos
from passes.sharded.test_ring import RING, defined, expected, given

import mdfuse as mf

#: shape: batch, heads, heads of keys, positions, features; zigzag; what attention is told.
CASES: dict[str, tuple[tuple[int, ...], bool, dict[str, Any]]] = {
    "even": ((1, 4, 4, 32, 4), False, {"is_causal": True}),
    "zigzag": ((2, 4, 2, 32, 4), True, {"is_causal": True}),
    "uneven": ((2, 4, 2, 13, 4), False, {"is_causal": True}),
    "uneven in zigzag order": ((1, 4, 2, 21, 4), True, {"is_causal": True}),
    "all is seen": ((1, 2, 2, 9, 4), False, {}),
    "fewer rows than ranks": ((1, 4, 2, 3, 4), True, {"is_causal": True}),
    "one row": ((2, 2, 2, 1, 4), False, {"is_causal": True}),
    "a window": ((1, 2, 2, 19, 4), True, {"is_causal": True, "window": 4}),
}


def check(comm: mf.Communicator, axes: dict[str, int], name: str, dtype: torch.dtype) -> None:
    shape, zigzag, how = CASES[name]
    program = mf.compile(defined(axes, shape, zigzag, dtype, **how), RING)
    tensors = given(shape, dtype, 1)
    wants, _ = expected(tensors, **how)
    layouts = [program.fusion.layout(x) for x in (*program.fusion.inputs, *program.fusion.outputs)]
    parts = [local_part(x, at, comm.rank) for x, at in zip(tensors, layouts, strict=False)]
    for _ in range(2):
        outs = program.run(*(x.to(comm.device, copy=True) for x in parts))
        for y, want, at in zip(outs, wants, layouts[3:], strict=True):
            far = {torch.bfloat16: 5e-2}.get(dtype, TOLERANCES[dtype])
            part = local_part(want, at, comm.rank)
            torch.testing.assert_close(y.double().cpu(), part, rtol=far, atol=far)


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, dtype: torch.dtype, comm: mf.Communicator) -> None:
    check(comm, {"cp": 2}, name, dtype)


@pytest.mark.world(4)
@pytest.mark.parametrize("axes", [{"cp": 4}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}])
@pytest.mark.parametrize("name", CASES)
def test_four_ranks(name: str, axes: dict[str, int], comm: mf.Communicator) -> None:
    check(comm, axes, name, torch.float32)


def check_windows(comm: mf.Communicator, axes: dict[str, int], name: str) -> None:
    """Halos of keys, and of their gradients."""
    _, shape, window = test_window_halos.CASES[name]
    fd = test_context_parallel.defined(axes, shape, True, window=window)
    program = mf.compile(fd, test_window_halos.GATHER)
    tensors, wants = test_context_parallel.expected(shape, True, window)
    layouts = [program.fusion.layout(x) for x in (*program.fusion.inputs, *program.fusion.outputs)]
    parts = [local_part(x, at, comm.rank) for x, at in zip(tensors, layouts, strict=False)]
    outs = program.run(*(x.to(comm.device, copy=True) for x in parts))
    for y, want, at in zip(outs, wants, layouts[3:], strict=True):
        torch.testing.assert_close(y.cpu(), local_part(want, at, comm.rank), rtol=1e-11, atol=1e-11)


@pytest.mark.world(2)
@pytest.mark.parametrize("name", test_window_halos.CASES)
def test_windows_on_two_ranks(name: str, comm: mf.Communicator) -> None:
    check_windows(comm, {"cp": 2}, name)


@pytest.mark.world(4)
@pytest.mark.parametrize("axes", [{"cp": 4}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}])
@pytest.mark.parametrize("name", test_window_halos.CASES)
def test_windows_on_four_ranks(name: str, axes: dict[str, int], comm: mf.Communicator) -> None:
    check_windows(comm, axes, name)


def check_masked(comm: mf.Communicator, axes: dict[str, int], mask: str, form: str) -> None:
    """Uneven lengths, in zigzag order."""
    shape, how = (2, 8, 4, 21, 4), {} if mask == "behind" else {"is_causal": True}
    fd = test_attention_masks.defined(axes, shape, mask, True, torch.float64, **how)
    program = mf.compile(fd, mf.Options(context=form))
    tensors = test_attention_masks.given(shape, torch.float64, 1)
    wants = test_attention_masks.expected(tensors, mask, **how)
    layouts = [program.fusion.layout(x) for x in (*program.fusion.inputs, *program.fusion.outputs)]
    parts = [local_part(x, at, comm.rank) for x, at in zip(tensors, layouts, strict=False)]
    outs = program.run(*(x.to(comm.device, copy=True) for x in parts))
    for y, want, at in zip(outs, wants, layouts[4:], strict=True):
        part = local_part(want, at, comm.rank)
        torch.testing.assert_close(y.cpu(), part, rtol=1e-11, atol=1e-11)


@pytest.mark.world(2)
@pytest.mark.parametrize("form", ["gather", "heads", "ring"])
@pytest.mark.parametrize("mask", test_attention_masks.MASKS)
def test_masks_on_two_ranks(mask: str, form: str, comm: mf.Communicator) -> None:
    check_masked(comm, {"cp": 2}, mask, form)


@pytest.mark.world(4)
@pytest.mark.parametrize("axes", [{"cp": 4}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}])
@pytest.mark.parametrize("mask", ["behind", "documents"])
def test_documents_on_four_ranks(mask: str, axes: dict[str, int], comm: mf.Communicator) -> None:
    check_masked(comm, axes, mask, "ring")
