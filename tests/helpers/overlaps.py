"""Programs whose communications could be hidden behind products, and each way to do so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir_lowering
from mdfuse.compiled.segments import segments_of
from mdfuse.config import Options
from mdfuse.ir.graph import Fusion
from mdfuse.passes import collective_matmul
from mdfuse.passes.collective_matmul import Form, OverlapWindow
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


def _trained(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """What is gathered for a product is read by the gradient of its matrix, which sums over it."""
    x = fd.define_tensor([2, rows, 6], mesh=mesh, layout=_rows(mesh, tp=Shard(1)), name="x")
    w = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(0)}, name="w")
    y = mf.ops.linear(x, w)
    fd.add_output(y.on(mesh, _rows(mesh, tp=Shard(2))))
    fd.add_output(mf.grad((y * y).sum(), [w])[0])


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


def _computed(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """All-gather of what is computed row by row, and matmul."""
    x = fd.define_tensor([rows, 8], mesh=mesh, layout=_rows(mesh, tp=Shard(0)), name="x")
    w = fd.define_tensor([8, 8], mesh=mesh, layout={"tp": Shard(1)}, name="w")
    y = fd.ops.softmax(fd.ops.relu(x) * 0.0, 1) * 16.0 + x  # of eighths, which are exact
    fd.add_output((y @ w).on(mesh, _rows(mesh, tp=Shard(1))))


def _fused(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """As `_mlp`, with hidden units in blocks of which each rank has a part."""
    blocks = (5, 3)
    x = fd.define_tensor([rows, 6], mesh=mesh, layout=_rows(mesh, tp=Shard(0)), name="x")
    w = fd.define_tensor([6, 8], mesh=mesh, layout={"tp": Shard(1, blocks=blocks)}, name="w")
    v = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(0, blocks=blocks)}, name="v")
    fd.add_output((fd.ops.relu(x @ w) @ v).on(mesh, _rows(mesh, tp=Shard(0))))


def _sum_of_blocks(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """Matmul and all-reduce, where what is summed over is in blocks."""
    x = fd.define_tensor([rows, 8], mesh=mesh, layout=_rows(mesh, tp=Shard(1, blocks=2)), name="x")
    w = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(0, blocks=2)}, name="w")
    fd.add_output((x @ w).on(mesh, _rows(mesh)))


def _experts_in_blocks(fd: mf.FusionDefinition, mesh: DeviceMesh, rows: int) -> None:
    """All-to-all to experts, of each half of which a rank has a part."""
    half = {"tp": Shard(0, blocks=2)}
    x = fd.define_tensor([8, rows, 6], mesh=mesh, layout={"tp": Shard(1)}, name="x")
    w = fd.define_tensor([8, 6, 4], mesh=mesh, layout=half, name="w")
    fd.add_output(fd.ops.set(x).on(mesh, half) @ w)


@dataclass(frozen=True)
class Layer:
    """A layer of Llama whose rows, as what it adds to them, are split along tp.

    Attributes:
        width: features of a row.
        heads, kv_heads: of queries, and of keys and values.
        head: features of a head.
        hidden: units between.
    """

    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int

    def definition(self, mesh: DeviceMesh, rows: int, dtype: torch.dtype) -> mf.FusionDefinition:
        split, out, into = {"tp": Shard(1)}, {"tp": Shard(0)}, {"tp": Shard(1)}
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        shapes = {
            "x": ((1, rows, self.width), split),
            "q": ((queries, self.width), out),
            "k": ((keys, self.width), out),
            "v": ((keys, self.width), out),
            "o": ((self.width, queries), into),
            "gate": ((self.hidden, self.width), out),
            "up": ((self.hidden, self.width), out),
            "down": ((self.width, self.hidden), into),
            "cos": ((rows, self.head), {}),
            "sin": ((rows, self.head), {}),
            "first": ((self.width,), {}),
            "second": ((self.width,), {}),
        }
        with mf.FusionDefinition("layer") as fd:
            given = {
                name: fd.define_tensor(shape, dtype, mesh=mesh, layout=layout, name=name)
                for name, (shape, layout) in shapes.items()
            }
            fd.add_output(self.of(given, lambda y: y.on(mesh, split)))
        return fd

    def of(self, given: dict[str, Any], joined: Callable[[Any], Any] = lambda y: y) -> Any:
        """The output, of tensors or of values; `joined` is asked of what ranks have parts of."""
        x, width = given["x"], (self.width,)
        y = F.rms_norm(x, width, given["first"], 1e-5)
        x = x + joined(F.linear(self._mixed(given, y), given["o"]))
        y = F.rms_norm(x, width, given["second"], 1e-5)
        y = F.silu(F.linear(y, given["gate"])) * F.linear(y, given["up"])
        return x + joined(F.linear(y, given["down"]))

    def _mixed(self, given: dict[str, Any], y: Any) -> Any:
        rows = y.shape[1]

        def heads(name: str, count: int) -> Any:
            return F.linear(y, given[name]).reshape(1, rows, count, self.head).permute(0, 2, 1, 3)

        def turned(z: Any) -> Any:
            half = self.head // 2
            ends = torch.cat([-z[..., half:], z[..., :half]], -1)
            return z * given["cos"] + ends * given["sin"]

        q, k = turned(heads("q", self.heads)), turned(heads("k", self.kv_heads))
        mixed = F.scaled_dot_product_attention(
            q, k, heads("v", self.kv_heads), is_causal=True, enable_gqa=True
        )
        return mixed.permute(0, 2, 1, 3).reshape(1, rows, self.heads * self.head)


def _with_gradient(x: Tensor, w: Tensor) -> list[Tensor]:
    y = F.linear(x, w)
    return [y, 2 * y.flatten(0, 1).T @ x.flatten(0, 1)]


CASES = {
    "gather": Case(_gather, torch.matmul),
    "three": Case(_three, lambda x, *ws: [torch.nn.functional.linear(x, w) for w in ws]),
    "trained": Case(_trained, _with_gradient),
    "scatter": Case(_scatter, torch.matmul),
    "reduce": Case(_reduce, torch.matmul),
    "experts": Case(_experts, torch.matmul),
    "mlp": Case(_mlp, lambda x, w, v: (x @ w).relu() @ v),
    "computed": Case(_computed, lambda x, w: (x + 2) @ w),
    "fused": Case(_fused, lambda x, w, v: (x @ w).relu() @ v),
    "sum of blocks": Case(_sum_of_blocks, torch.matmul),
    "experts in blocks": Case(_experts_in_blocks, torch.matmul),
}


def prepared(case: Case, mesh: DeviceMesh, rows: int) -> Fusion:
    return hir_lowering.prepare(case.definition(mesh, rows).fusion)


def in_forms(fusion: Fusion) -> Iterator[tuple[OverlapWindow, Form, Fusion]]:
    """Each window of a fusion in each of its forms."""
    for window in collective_matmul.windows(fusion):
        for form, streamed in collective_matmul.forms(fusion, window).items():
            yield window, form, streamed


def program(fusion: Fusion, options: Options | None = None) -> mf.Program:
    """The program of a prepared fusion."""
    fusion = with_ids(fusion)
    sections, host = hir_lowering.lower_prepared(fusion, None, options)
    return mf.Program(fusion, segments_of(fusion, sections, host, options), host, options)
