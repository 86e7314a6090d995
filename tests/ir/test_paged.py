"""Attention to pages: as attention to the rows of each request, one by one; wherever heads lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

PAGE, ROOM = 4, 3


def one_by_one(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for r, n in enumerate(lengths.tolist()):
        keys, values = (x[table[r]].flatten(0, 1)[:n].double().transpose(0, 1) for x in (k, v))
        for i in range(q.shape[2]):
            last = n - q.shape[2] + i + 1
            if last > 0:
                row = q[r, :, i : i + 1].double()
                out[r, :, i : i + 1] = F.scaled_dot_product_attention(
                    row[None], keys[None, :, :last], values[None, :, :last], enable_gqa=True
                )[0]
    return out


def drawn(requests: int, heads: int, shared: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Requests of no row, of one, of full pages."""
    k, v = (torch.randn(9, PAGE, shared, n).to(dtype) for n in (8, 6))
    table = torch.randperm(8)[: requests * ROOM].view(requests, -1) if requests < 3 else (
        torch.randint(8, (requests, ROOM)))  # fmt: skip
    lengths = torch.tensor([0, 1, PAGE, PAGE * ROOM, 7, 5])[torch.randperm(6)[:requests]]
    return [torch.randn(requests, heads, rows, 8).to(dtype), k, v, table, lengths]


@pytest.mark.parametrize(
    ("axes", "heads", "requests"),
    [({"tp": 1}, False, False), ({"tp": 2}, True, False), ({"dp": 3, "tp": 1}, True, True)],
)
def test_each_request_attends_to_its_own_rows(axes: Any, heads: bool, requests: bool) -> None:
    mesh, dtype = DeviceMesh.arange(**axes), torch.bfloat16 if heads else torch.float64
    by_head = {"tp": Shard(1)} if heads else {}
    of_cache = {"tp": Shard(2)} if heads else {}
    by_request = {"dp": Shard(0)} if requests else {}
    for count, rows in ((5, 1), (4, 3), (1, 2)):
        given = drawn(count, 4, 2, rows, dtype)
        layouts = [{**by_head, **by_request}, of_cache, of_cache, by_request, by_request]
        with mf.FusionDefinition("paged") as fd:
            of = [
                fd.define_tensor(x.shape, x.dtype, mesh, at)
                for x, at in zip(given, layouts, strict=True)
            ]
            fd.add_output(fd.ops.paged_attention(*of))
        program = mf.compile(fd)
        assert not program.communications
        made = mf.simulate(program, given).outputs[0]
        near = {"rtol": 2e-2, "atol": 2e-2} if heads else {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(made.double(), one_by_one(*given), **near)


def test_what_does_not_fit_is_refused_with_the_line() -> None:
    with mf.FusionDefinition("wrong") as fd:
        q, k = fd.define_tensor([2, 3, 1, 8]), fd.define_tensor([5, 4, 2, 8])
        table, lengths = fd.define_tensor([2, 3], torch.int64), fd.define_tensor([2], torch.int64)
        with pytest.raises(mf.DefinitionError, match=r"test_paged.py:\d+"):
            fd.ops.paged_attention(q, k, k, table, lengths)
        with pytest.raises(mf.DefinitionError, match="integers of 64 bits"):
            fd.ops.paged_attention(q, k, k, table.float(), lengths)
