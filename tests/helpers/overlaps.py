"""Programs whose communications could be hidden behind products, and each way to do so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir_lowering
from mdfuse.compiled.segments import segments_of
from mdfuse.config import Options
from mdfuse.ir.graph import Fusion
from mdfuse.passes import overlap
from mdfuse.passes.overlap import Form, Window
from mdfuse.passes.segment_ids import with_ids

Define = Callable[[mf.FusionDefinition, DeviceMesh, int], None]


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        define: `define(definition, mesh, rows)`; the mesh has an axis tp, and may have dp.
        plain: its outputs from whole inputs, in plain torch.
    """

    define: Define
    plain: Callable[..., Any]

    def definition(self, mesh: DeviceMesh, rows: int) -> mf.FusionDefinition:
        with mf.FusionDefinition(self.define.__name__) as fd:
            self.define(fd, mesh, rows)
        return fd

    def inputs(self, fusion: Fusion, seed: int = 0) -> list[Tensor]:
        """Small integers, so that sums are exact whatever their order."""
        draw = torch.Generator().manual_seed(seed)
        values = [fusion.values[name] for name in fusion.inputs]
        return [torch.randint(-2, 3, v.shape, generator=draw).to(v.dtype) for v in values]

    def expected(self, inputs: list[Tensor]) -> list[Tensor]:
        found = self.plain(*inputs)
        return [found] if isinstance(found, Tensor) else list(found)


def _rows(mesh: DeviceMesh, **more: Any) -> dict[str, Any]:
    return {**({"dp": Shard(0)} if "dp" in mesh.axes else {}), **more}


def _gather(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """All-gather and matmul."""
    x = fd.define_tensor([rows, 6], mesh=mesh, layout=_rows(mesh, tp=Shard(0)), name="x")
    w = fd.define_tensor([6, 8], mesh=mesh, layout={"tp": Shard(1)}, name="w")
    fd.add_output((x @ w).on(mesh, _rows(mesh, tp=Shard(1))))


def _three(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """What three products read is gathered once."""
    x = fd.define_tensor([2, rows, 6], mesh=mesh, layout=_rows(mesh, tp=Shard(1)), name="x")
    for name in "qkv":
        w = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(0)}, name=name)
        fd.add_output(mf.ops.linear(x, w).on(mesh, _rows(mesh, tp=Shard(2))))


def _scatter(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """Matmul and reduce-scatter."""
    x = fd.define_tensor([rows, 8], mesh=mesh, layout=_rows(mesh, tp=Shard(1)), name="x")
    w = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(0)}, name="w")
    fd.add_output((x @ w).on(mesh, _rows(mesh, tp=Shard(0))))


def _reduce(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """Matmul and all-reduce."""
    x = fd.define_tensor([rows, 8], mesh=mesh, layout=_rows(mesh, tp=Shard(1)), name="x")
    w = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(0)}, name="w")
    fd.add_output((x @ w).on(mesh, _rows(mesh)))


def _experts(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """All-to-all and a product for each expert."""
    x = fd.define_tensor([8, rows, 6], mesh=mesh, layout={"tp": Shard(1)}, name="x")
    w = fd.define_tensor([8, 6, 4], mesh=mesh, layout={"tp": Shard(0)}, name="w")
    fd.add_output(fd.ops.set(x).on(mesh, {"tp": Shard(0)}) @ w)


def _mlp(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """A chain: all-gather, matmul, relu, matmul, reduce-scatter."""
    x = fd.define_tensor([rows, 6], mesh=mesh, layout=_rows(mesh, tp=Shard(0)), name="x")
    w = fd.define_tensor([6, 8], mesh=mesh, layout={"tp": Shard(1)}, name="w")
    v = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(0)}, name="v")
    fd.add_output((fd.ops.relu(x @ w) @ v).on(mesh, _rows(mesh, tp=Shard(0))))


CASES = {
    "gather": Case(_gather, torch.matmul),
    "three": Case(_three, lambda x, *ws: [torch.nn.functional.linear(x, w) for w in ws]),
    "scatter": Case(_scatter, torch.matmul),
    "reduce": Case(_reduce, torch.matmul),
    "experts": Case(_experts, torch.matmul),
    "mlp": Case(_mlp, lambda x, w, v: (x @ w).relu() @ v),
}


def prepared(case: Case, mesh: DeviceMesh, rows: int) -> Fusion:
    return hir_lowering.prepare(case.definition(mesh, rows).fusion)


def in_forms(fusion: Fusion) -> Iterator[tuple[Window, Form, Fusion]]:
    """Each window of a fusion in each of its forms."""
    for window in overlap.windows(fusion):
        for form, streamed in overlap.forms(fusion, window).items():
            yield window, form, streamed


def program(fusion: Fusion, options: Options | None = None) -> mf.Program:
    """The program of a prepared fusion."""
    fusion = with_ids(fusion)
    sections, host = hir_lowering.lower_prepared(fusion, None, options)
    return mf.Program(fusion, segments_of(fusion, sections, host, options), host, options)
