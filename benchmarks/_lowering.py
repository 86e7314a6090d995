"""Programs whose lowering is timed on a small and on a large mesh."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import torch
from _measure import Contender

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream
from mdfuse.caching import Cache
from mdfuse.frontend.handle import Handle
from mdfuse.hir import HostProgram
from mdfuse.hir.verify.check import verify

#: The rooms that lowering goes through, and whose functions keep answers.
_ROOMS = tuple(f"mdfuse.{x}." for x in ("extents", "hir", "ir", "layouts", "passes", "reshard"))

#: Divides by every axis of either mesh.
_EXTENT = 16384


def tensor_parallel(mesh: DeviceMesh) -> mf.FusionDefinition:
    """An MLP whose hidden units are split: one all-reduce."""
    with mf.FusionDefinition("mlp") as fd:
        x = fd.define_tensor([_EXTENT, 64], torch.float32, mesh, {})
        _mlp(fd, x, mesh)
    return fd


def sequence_parallel(mesh: DeviceMesh) -> mf.FusionDefinition:
    """Two MLPs, rows split along both axes outside of them: all-gathers and reduce-scatters."""
    rows = {axis: Shard(0) for axis in mesh.axes}
    with mf.FusionDefinition("two_mlps") as fd:
        x = fd.define_tensor([_EXTENT, 64], torch.float32, mesh, rows)
        for _ in range(2):
            x = fd.ops.set(_mlp(fd, x, mesh, is_output=False)).on(mesh, rows)
        fd.add_output(x)
    return fd


def _mlp(fd: mf.FusionDefinition, x: Handle, mesh: DeviceMesh, is_output: bool = True) -> Handle:
    w1 = fd.define_tensor([_EXTENT, 64], torch.float32, mesh, {"tp": Shard(0)})
    w2 = fd.define_tensor([64, _EXTENT], torch.float32, mesh, {"tp": Shard(1)})
    y: Handle = x + fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, w1)), w2)
    if is_output:
        fd.add_output(y)
    return y


#: name, definition, small mesh, large mesh of 8,192 ranks.
PROGRAMS: tuple[
    tuple[str, Callable[[DeviceMesh], mf.FusionDefinition], dict[str, int], dict[str, int]], ...
] = (
    ("tensor-parallel MLP", tensor_parallel, {"tp": 8}, {"tp": 8192}),
    ("sequence-parallel MLPs", sequence_parallel, {"dp": 2, "tp": 4}, {"dp": 64, "tp": 128}),
)


def rings(ranks: int, layers: int = 4) -> mf.FusionDefinition:
    """MLPs whose rows go round: each gathers a rank's rows at a time, and adds up its results so.

    The rows of the last ranks are fewer.
    """
    mesh, rows = DeviceMesh.arange(tp=ranks), 2 * ranks - 1
    turn, split = Stream(0, ranks, rotate="tp"), {"tp": Shard(0)}
    with mf.FusionDefinition("rings") as fd:
        x = fd.define_tensor([rows, 64], torch.float32, mesh, split)
        for _ in range(layers):
            w1 = fd.define_tensor([64, 2 * ranks], torch.float32, mesh, {"tp": Shard(1)})
            w2 = fd.define_tensor([2 * ranks, 64], torch.float32, mesh, {"tp": Shard(0)})
            whole = fd.ops.set(x).on(mesh, stream=turn)
            h = fd.ops.matmul(whole, w1).on(mesh, {"tp": Shard(1)}, stream=turn)
            x = fd.ops.matmul(fd.ops.relu(h), w2).on(mesh, split, stream=turn)
        fd.add_output(x)
    return fd


def stages(count: int) -> mf.FusionDefinition:
    """A pipeline: each stage is an MLP on two ranks of its own; the next one gets its result."""
    with mf.FusionDefinition("stages") as fd:
        x = None
        for n in range(count):
            mesh = DeviceMesh([2 * n, 2 * n + 1], axes=["tp"])
            x = fd.define_tensor([8, 64], torch.float32, mesh) if x is None else fd.ops.set(x)
            x = x.on(mesh) if n else x
            w1 = fd.define_tensor([64, 64], torch.float32, mesh, {"tp": Shard(0)})
            w2 = fd.define_tensor([64, 64], torch.float32, mesh, {"tp": Shard(1)})
            x = fd.ops.linear(fd.ops.linear(x, w1), w2).on(mesh)
        fd.add_output(x)
    return fd


def step(layers: int) -> mf.FusionDefinition:
    """A training step: layers of two matmuls, hidden units split over four ranks, rows over two."""
    mesh, rows = DeviceMesh.arange(dp=2, tp=4), {"dp": Shard(0)}
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([256, 64], torch.float32, mesh, rows, name="x")
        weights = []
        for _ in range(layers):
            w1 = fd.define_tensor([128, 64], torch.float32, mesh, {"tp": Shard(0)})
            w2 = fd.define_tensor([64, 128], torch.float32, mesh, {"tp": Shard(1)})
            weights += [w1, w2]
            y = fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, w1)), w2)
            x = x + fd.ops.set(y).on(mesh, rows)
        for g in mf.grad((x * x).mean(), weights):
            fd.add_output(g)
    return fd


def _lowered(definition: mf.FusionDefinition) -> HostProgram:
    return mf.compile(definition, mf.Options(verify=False, overlap="never")).host


def _microbatches(count: int) -> HostProgram:
    options = mf.Options(verify=False, overlap="never")
    return mf.pipeline(step(8), microbatches=count, batch={"x": 0}, options=options).host


#: What is measured, what defines and lowers it, and of how many ranks, layers or stages.
VERIFIED: tuple[tuple[str, Callable[[int], HostProgram], tuple[int, ...]], ...] = (
    ("rings of 4 layers, ranks", lambda n: _lowered(rings(n)), (8, 64, 512, 8192)),
    ("rings of 64 layers, ranks", lambda n: _lowered(rings(n, 64)), (8, 8192)),
    ("training steps, layers", lambda n: _lowered(step(n)), (8, 64)),
    ("steps of 8 layers, microbatches", _microbatches, (8, 64)),
    ("stages", lambda n: _lowered(stages(n)), (64, 1024)),
)


def forget() -> None:
    """Empty all caches of definitions, and of what was once asked about their parts."""
    mf.debug.FusionCache.reset()
    for name in [name for name in sys.modules if name.startswith("mdfuse.")]:
        for cache in vars(sys.modules[name]).values():
            if isinstance(cache, Cache):
                cache.empty()
            elif hasattr(cache, "cache_clear"):
                cache.cache_clear()
    gc.collect()


def lowering(
    define: Callable[[DeviceMesh], mf.FusionDefinition], mesh: dict[str, int]
) -> Contender:
    """Lowering and verification; each on a new mesh and definition, with all caches empty."""

    def fresh() -> mf.FusionDefinition:
        forget()
        return define(DeviceMesh.arange(**mesh))

    return Contender(call=_lower, fresh=fresh)


def _lower(definition: mf.FusionDefinition) -> None:
    verify(mf.compile(definition).host)
