"""Attention that reads shared heads as they are: values, gradients, and what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

PLACED = {"cp": Shard(2), "tp": Shard(1), "dp": Shard(0)}


def defined(shared: int, axes: dict[str, int], is_trained: bool) -> Any:
    mesh = DeviceMesh.arange(**axes)
    where = {a: PLACED[a] for a in axes}
    with mf.FusionDefinition("attention") as fd:
        q = fd.define_tensor([2, 8, 12, 4], torch.float64, mesh, where)
        of_keys = {a: p for a, p in where.items() if a != "tp" or shared % axes["tp"] == 0}
        k, v = (fd.define_tensor([2, shared, 12, 4], torch.float64, mesh, of_keys) for _ in "kv")
        y = mf.ops.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        fd.add_output(y)
        for x in mf.grad((y * y).sum(), [q, k, v]) if is_trained else ():
            fd.add_output(x)
    return mf.compile(fd)


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("axes", [{"cp": 2}, {"tp": 4}, {"cp": 3, "tp": 2}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_heads_are_repeated_where_ranks_divide_groups_alone(
    shared: int, axes: dict[str, int], is_trained: bool
) -> None:
    program = defined(shared, axes, is_trained)
    q, k, v = (torch.randn(2, h, 12, 4, dtype=torch.float64) for h in (8, shared, shared))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    wanted = [y.detach()]
    if is_trained:
        wanted += torch.autograd.grad((y * y).sum(), leaves)
    check_everywhere(program, [q, k, v], wanted)
    is_divided = shared % axes.get("tp", 1) > 0
    assert any(i.fn == "expand" and len(i.kwargs["shape"]) == 5 for i in program.host.walk()) == (
        is_divided
    )


def test_gradients_of_keys_travel_once_per_shared_head() -> None:
    program = defined(2, {"cp": 2}, True)
    sizes = [c.bytes_received(0) for c in program.communications]
    assert sizes == [2 * 2 * 6 * 4 * 8] * 4
