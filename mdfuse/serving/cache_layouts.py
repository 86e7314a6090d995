"""Layouts of parameters and caches of an engine, where its caller does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mdfuse.frontend.importing.plans import from_plan
from mdfuse.layouts.layout import Replicate, Shard
from mdfuse.mesh import DeviceMesh
from mdfuse.serving.decoder import CACHES, CHOSEN


def placed(
    module: nn.Module,
    mesh: DeviceMesh,
    caches: Mapping[str, tuple[int, int, torch.dtype]],
    layouts: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return layouts, and what else `from_torch` takes.

    Args:
        caches: name -> heads, features, dtype.
        layouts: of parameters, and of "caches.*"; None: along tp as the model's own plan says,
            along ep a part of the experts. Caches are split along tp by heads, where these are
            split into equal parts, and along cp by positions.
    """
    said, others = dict(layouts or {}), dict[str, Any]()
    if layouts is None:
        said, others = _by_plan(module, mesh)
    whole = {axis: Replicate() for axis in mesh.axes}
    for name, (heads, _, _) in caches.items():
        if not any(pattern.startswith(f"{CACHES}.") for pattern in layouts or ()):
            said[f"{CACHES}.{name}"] = _of_cache(mesh, heads, said)
    return {**said, CHOSEN: whole}, others


def _by_plan(module: nn.Module, mesh: DeviceMesh) -> tuple[dict[str, Any], dict[str, Any]]:
    said: dict[str, Any] = {}
    others: dict[str, Any] = {}
    if "tp" in mesh.axes and mesh.axis_size("tp") > 1:
        others = from_plan(module)
        said = others.pop("layouts")
    if "ep" in mesh.axes:
        for name, x in module.named_parameters():
            if ".experts." in name and x.ndim > 2:  # split biases would be gathered
                said[name] = {**said.get(name, {}), "ep": Shard(0)}
    return said, others


def _of_cache(mesh: DeviceMesh, heads: int, said: Mapping[str, Any]) -> dict[str, Any]:
    layout: dict[str, Any] = {}
    if "tp" in mesh.axes and heads % mesh.axis_size("tp") == 0 and said:
        layout["tp"] = Shard(1)
    if "cp" in mesh.axes:
        layout["cp"] = Shard(0)
    return layout
