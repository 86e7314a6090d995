"""Small programs that a calibration does not fit, and the errors of their predicted times."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mdfuse.cli.calibration.measuring import call_of
from mdfuse.cli.calibration.scales import Scale
from mdfuse.cli.calibration.timed_samples import QUEUED, seconds_of
from mdfuse.compiled.program import Program, compile
from mdfuse.config import Options
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.layouts.layout import Shard
from mdfuse.mesh import DeviceMesh
from mdfuse.runtime.communicator import Communicator
from mdfuse.seeing.costs import Costs

#: torch's own functions take the values of definitions, too, of which its annotations know nothing.
F: Any = torch.nn.functional

_Build = Callable[[FusionDefinition, torch.dtype, DeviceMesh, int], Any]


def _weight(
    fd: FusionDefinition, dtype: torch.dtype, mesh: DeviceMesh, n: int, k: int, dim: int | None
) -> Any:
    return fd.define_tensor([n, k], dtype, mesh, {} if dim is None else {"x": Shard(dim)})


def _mlp(rows: int, width: int, hidden: int, act: str) -> _Build:
    def build(fd: FusionDefinition, dtype: torch.dtype, mesh: DeviceMesh, ranks: int) -> Any:
        x = fd.define_tensor([rows, width], dtype, mesh=mesh)
        up, down = (
            _weight(fd, dtype, mesh, hidden, width, 0),
            _weight(fd, dtype, mesh, width, hidden, 1),
        )
        h = getattr(F, act)(F.linear(x, up))
        return x + fd.ops.set(F.linear(h, down)).on(mesh, {})

    return build


def _gated(rows: int, width: int, hidden: int) -> _Build:
    def build(fd: FusionDefinition, dtype: torch.dtype, mesh: DeviceMesh, ranks: int) -> Any:
        x = fd.define_tensor([rows, width], dtype, mesh=mesh)
        a, b, c = (_weight(fd, dtype, mesh, hidden, width, 0) for _ in range(3))
        h = F.silu(F.linear(x, a)) * F.linear(x, b)
        return h * F.linear(x, c)

    return build


def _normed(rows: int, width: int) -> _Build:
    def build(fd: FusionDefinition, dtype: torch.dtype, mesh: DeviceMesh, ranks: int) -> Any:
        x = fd.define_tensor([rows, width], dtype, mesh=mesh)
        for _ in range(3):
            w = _weight(fd, dtype, mesh, width, width, 0)
            x = x + fd.ops.set(F.linear(F.rms_norm(x, (width,)), w)).on(mesh, {})
        return x

    return build


def _attention(length: int, heads: int, head: int) -> _Build:
    def build(fd: FusionDefinition, dtype: torch.dtype, mesh: DeviceMesh, ranks: int) -> Any:
        width = heads * head
        x = fd.define_tensor([1, length, width], dtype, mesh=mesh)
        ws = [_weight(fd, dtype, mesh, width, width, 0) for _ in range(3)]
        parts = [F.linear(x, w).view(1, length, heads, head).transpose(1, 2) for w in ws]
        mixed = F.scaled_dot_product_attention(*parts)
        return mixed.transpose(1, 2).reshape(1, length, width)

    return build


def _products(*sizes: int) -> _Build:
    def build(fd: FusionDefinition, dtype: torch.dtype, mesh: DeviceMesh, ranks: int) -> Any:
        rows, width, *widths = sizes
        x: Any = fd.define_tensor([rows, width], dtype, mesh=mesh)
        for n in widths:
            x, width = F.linear(x, _weight(fd, dtype, mesh, n, width, None)), n
        return x

    return build


def _gathered(rows: int, width: int) -> _Build:
    def build(fd: FusionDefinition, dtype: torch.dtype, mesh: DeviceMesh, ranks: int) -> Any:
        x = fd.define_tensor([rows * ranks, width], dtype, mesh, {"x": Shard(0)})
        for _ in range(2):
            w = _weight(fd, dtype, mesh, width, width, None)
            y = fd.ops.set(x).on(mesh, {})
            x = fd.ops.set(F.linear(y, w)).on(mesh, {"x": Shard(0)})
        return x

    return build


def _ahead(rows: int, width: int) -> _Build:
    def build(fd: FusionDefinition, dtype: torch.dtype, mesh: DeviceMesh, ranks: int) -> Any:
        x = fd.define_tensor([rows, width], dtype, mesh=mesh)
        for _ in range(2):  # a weight comes beside a product
            local = _weight(fd, dtype, mesh, width, width, None)
            w = fd.ops.set(_weight(fd, dtype, mesh, width, width, 0)).on(mesh, {})
            x = F.linear(F.linear(x, local), w)
        return x

    return build


def _builds(f: int) -> dict[str, _Build]:
    """Return the programs by name; their sizes, `f` times as large, are between measured ones."""
    return {
        "mlp": _mlp(96 * f, 384 * f, 1536 * f, "gelu"),
        "wide_mlp": _mlp(192 * f, 768 * f, 3072 * f, "relu"),
        "tall_mlp": _mlp(384 * f, 192 * f, 640 * f, "silu"),
        "gated": _gated(160 * f, 512 * f, 1408 * f),
        "normed": _normed(256 * f, 640 * f),
        "attention": _attention(256 * f, 12, 32 * min(f, 2)),
        "long_attention": _attention(384 * f, 8 * f, 64),
        "products": _products(48 * f, 320 * f, 1280 * f, 192 * f, 768 * f),
        "many_rows": _products(720 * f, 448 * f, 448 * f, 896 * f),
        "gathered": _gathered(128 * f, 384 * f),
        "ahead": _ahead(320 * f, 512 * f),
    }


#: Those whose launches are compiled on GPUs: compiling takes longer than all the rest.
_COMPILED = ("mlp", "gated", "normed", "attention")

#: How many there are.
COUNT = len(_builds(1))


def programs(scale: Scale, ranks: int, options: Options) -> Iterator[Program]:
    """Yield the programs, on a mesh of all ranks; some are compiled as they are by default."""
    mesh = DeviceMesh.arange(x=ranks)
    for name, build in _builds(scale.factor).items():
        with FusionDefinition(name) as fd:
            fd.add_output(build(fd, scale.dtypes[0], mesh, ranks))
        yield compile(fd, replace(options, compile="auto") if name in _COMPILED else options)


def seconds_pair(comm: Communicator, program: Program, costs: Costs) -> tuple[float, float]:
    """Return the predicted and the measured seconds of a program; all ranks call it.

    The measured time is the median over ranks.
    """
    mine = seconds_of(comm, call_of(comm, program), QUEUED)
    texts = comm.all_ok(json.dumps(mine))
    measured = statistics.median(json.loads(text) for text in texts if text is not None)
    return program.timeline(costs).seconds, measured


def errors(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean relative error of predictions, and the 95th percentile."""
    offs = [abs(predicted - measured) / measured for predicted, measured in pairs]
    return statistics.mean(offs), statistics.quantiles(offs, n=20, method="inclusive")[-1]
