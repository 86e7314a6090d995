"""A step with two states, whose rows are independent of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh

SIZES = mf.Options(sizes={"ids.0": (2, 4, 8)})


def step(
    mesh: DeviceMesh, rows: Mapping[str, Any] = {}, cache: Mapping[str, Any] = {}, more: Any = None
) -> mf.FusionDefinition:
    """Rows of a table that are written into two states, added up in one of them."""
    with mf.FusionDefinition("step") as fd:
        ids = fd.define_tensor([-1], torch.int64, mesh, rows, name="ids")
        pos = fd.define_tensor([ids.shape[0]], torch.int64, mesh, rows, name="pos")
        w = fd.define_tensor([16, 8], mesh=mesh, name="w")
        c = fd.define_tensor([10, 8], mesh=mesh, layout=cache, name="c")
        a = fd.define_tensor([4, 5, 8], mesh=mesh, name="a")
        h = F.embedding(ids, w)
        fd.add_output(c.index_copy(0, pos, h), reuse=c)
        added = a.view(20, 8).index_put((pos,), h, accumulate=True)
        fd.add_output(added.view(4, 5, 8), reuse=a)
        y = F.rms_norm(h, (8,)) @ w.t()
        fd.add_output(y if more is None else more(y, ids))
    return fd


def by_torch(ids: Tensor, pos: Tensor, w: Tensor, c: Tensor, a: Tensor) -> list[Tensor]:
    h, c, a = F.embedding(ids, w), c.clone(), a.clone()
    c[pos] = h
    a.view(20, 8).index_put_((pos,), h, accumulate=True)
    return [c, a, F.rms_norm(h, (8,)) @ w.t()]


def given(n: int) -> list[Tensor]:
    ids, pos = torch.randint(16, (n,)), torch.randperm(10)[:n]
    return [ids, pos, torch.randn(16, 8), torch.randn(10, 8), torch.randn(4, 5, 8)]
