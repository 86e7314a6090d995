"""Bytes at the peak of a run, and what they should be by hand."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _ranks import Ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import mdfuse as mf
from mdfuse import Layout, Partial, Shard

_ITEM = 4  # bytes of a float32
_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A program and the bytes it needs on this rank.

    Attributes:
        name: what it is.
        sizes: shapes.
        definition: the program.
        layouts: global shapes of the inputs, and their layouts.
        intermediates: bytes of the intermediates that must be alive at once.
        output: bytes of the output.
    """

    name: str
    sizes: str
    definition: mf.FusionDefinition
    layouts: list[tuple[tuple[int, ...], Layout]]
    intermediates: int
    output: int

    def inputs(self, ranks: Ranks) -> list[Tensor]:
        """This rank's inputs."""
        return [torch.zeros(shape, device=ranks.device) for shape in self._local_shapes(ranks)]

    def input_bytes(self, ranks: Ranks) -> int:
        return sum(math.prod(shape) * _ITEM for shape in self._local_shapes(ranks))

    def _local_shapes(self, ranks: Ranks) -> list[tuple[int, ...]]:
        return [layout.local_shape(shape, ranks.comm.rank) for shape, layout in self.layouts]


def mlp_chain(ranks: Ranks, rows: int) -> Footprint:
    """Layers gelu(h w): a layer's product is alive beside the one before, or beside its gelu."""
    width, everywhere = 512, Layout(ranks.mesh, {})
    shapes = [(rows, width)] + [(width, width)] * _STEPS
    with mf.FusionDefinition("mlp_chain") as fd:
        h, *weights = (fd.define_tensor(s, torch.float32, ranks.mesh, {}) for s in shapes)
        for w in weights:
            h = fd.ops.gelu(h @ w)
        fd.add_output(h)
    return Footprint(
        name=f"peak: {_STEPS} x (matmul, gelu)",
        sizes=f"f32 [{rows}, {width}]",
        definition=fd,
        layouts=[(shape, everywhere) for shape in shapes],
        intermediates=2 * rows * width * _ITEM,
        output=rows * width * _ITEM,
    )


def posting_chain(ranks: Ranks, rows: int) -> Footprint:
    """All-gather, matmul, reduce-scatter: what was gathered is alive beside its product."""
    size, width, split = ranks.comm.size, 64 * ranks.comm.size, {"tp": Shard(0)}
    shapes = [(rows * size, width), (width, width)]
    with mf.FusionDefinition("posting_chain") as fd:
        x, w = (fd.define_tensor(s, torch.float32, ranks.mesh, split) for s in shapes)
        for _ in range(_STEPS):
            product = fd.ops.set(x).on(ranks.mesh, {}) @ w
            product.on(ranks.mesh, {"tp": Partial("sum")})
            x = fd.ops.set(product).on(ranks.mesh, split)
        fd.add_output(x)
    return Footprint(
        name=f"peak: {_STEPS} x (all-gather, matmul, reduce-scatter)",
        sizes=f"f32 [{rows}, {width}] per rank",
        definition=fd,
        layouts=[(shape, Layout(ranks.mesh, split)) for shape in shapes],
        intermediates=2 * rows * size * width * _ITEM,
        output=rows * width * _ITEM,
    )


def peak_bytes(ranks: Ranks, footprint: Footprint) -> tuple[int, int]:
    """The most bytes that a run in the steady state has allocated, and the sum by hand."""
    program = mf.compile(footprint.definition, mf.Options(graph="never"))
    measure = _peak_on_gpu if ranks.device.type == "cuda" else _peak_on_cpu

    def prepare() -> Callable[[], object]:
        inputs = footprint.inputs(ranks)
        return lambda: program.run(*inputs)

    by_hand = footprint.input_bytes(ranks) + footprint.output + footprint.intermediates
    return measure(prepare), by_hand


def _peak_on_gpu(prepare: Callable[[], Callable[[], object]]) -> int:
    """Return the count of the caching allocator, with cuBLAS's workspace, made beforehand."""
    one = torch.ones(64, 64, device="cuda")
    torch.mm(one, one)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run = prepare()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(prepare: Callable[[], Callable[[], object]]) -> int:
    """Return the peak of all allocations that the profiler sees, those of the inputs included."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run = prepare()
        for _ in range(3):
            run()
        with record_function("steady"):
            run()
    profiler: Any = seen.profiler
    events = profiler.kineto_results.events()
    start = next(e.start_ns() for e in events if e.name() == "steady")
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive, peak = sum(n for at, n in changes if at < start), 0
    for at, change in changes:
        if at >= start:
            alive += change
            peak = max(peak, alive)
    return peak
