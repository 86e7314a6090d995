"""Rows of a table, looked up by indices that may be out of range."""

from __future__ import annotations

from typing import Any

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Partial, Shard

CHECKED = Options(check_indices=True)


ROWS = 5


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({}, {}),
    "rows split": ({}, {"x": Shard(0)}),
    "columns split": ({}, {"x": Shard(1)}),
    "indices split": ({"x": Shard(0)}, {}),
}


def lookup(
    layout: str, ranks: int = 2, rows: int = ROWS, options: Options | None = CHECKED
) -> mf.Program:
    """Rows of a table, and a communication after them."""
    mesh, (of_indices, of_table) = DeviceMesh.arange(x=ranks), LAYOUTS[layout]
    with mf.FusionDefinition("lookup") as fd:
        i = fd.define_tensor([4], torch.int64, mesh, of_indices)
        table = fd.define_tensor([rows, 4], mesh=mesh, layout=of_table)
        y = fd.ops.embedding(i, table)
        if layout == "rows split":  # instead of gathering them
            y = y.on(mesh, {"x": Partial()})
        fd.add_output(fd.ops.set(y).on(mesh, {}) + 1.0)
    return mf.compile(fd, options)
