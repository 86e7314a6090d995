"""Places of symmetric buffers: none is used again before all is done that used it."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import networkx as nx
import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream, hir
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.layouts.call import Call
from mdfuse.plan.arena import Arena, arena
from mdfuse.plan.build import build


def layers(count: int, chunks: int, streamed: bool) -> HostProgram:
    """Sequence-parallel layers of two products, in a ring or one after the other."""
    mesh = DeviceMesh.arange(tp=2)
    stream = Stream(0, chunks, rotate="tp") if streamed else None
    with mf.FusionDefinition("layers") as fd:
        x = fd.define_tensor([512, 64], mesh=mesh, layout={"tp": Shard(0)})
        for _ in range(count):
            up = fd.define_tensor([64, 64], mesh=mesh, layout={"tp": Shard(1)})
            down = fd.define_tensor([64, 64], mesh=mesh, layout={"tp": Shard(0)})
            whole = fd.ops.set(fd.ops.relu(x)).on(mesh, {}, stream=stream)
            h = (whole @ up).on(mesh, {"tp": Shard(1)}, stream=stream)
            x = x + (fd.ops.gelu(h) @ down).on(mesh, {"tp": Shard(0)}, stream=stream)
        fd.add_output(x)
    return mf.compile(fd, mf.Options(backend="symmetric")).host


def sizes(program: HostProgram) -> list[int]:
    found = [
        program.types[i.outputs[0]].local_shape(program.rank)  # type: ignore[arg-type]
        for i in program.instructions
        if i.op == "alloc" and i.kwargs.get("memory") == "symmetric"
    ]
    return [torch.Size(x).numel() * 4 for x in found]


def orders(program: HostProgram) -> nx.DiGraph:
    """Number of an instruction -> those that surely come behind it, by streams and their joins."""
    graph: nx.DiGraph = nx.DiGraph()
    current, handles, last = "caller", {}, {}
    for n, i in enumerate(program.instructions):
        graph.add_node(n)
        if current in last:
            graph.add_edge(last[current], n)
        other = str(i.kwargs.get("stream", handles.get(i.reads[0] if i.reads else "")))
        if i.op == "get_stream":
            handles[i.outputs[0]] = current
        if i.op == "sync" and other in last:
            graph.add_edge(last[other], n)
        last[current] = n
        if i.op == "set_stream":
            current = other
    return graph


def users(program: HostProgram) -> dict[int, set[int]]:
    """Number of a symmetric `alloc` -> the instructions that use its memory, by name and handle."""
    made: dict[int, set[int]] = {}
    of: dict[str, set[int]] = {}
    sent: list[set[int]] = []  # to itself; the first that is sent is received first
    for n, i in enumerate(program.instructions):
        if i.op == "alloc" and i.kwargs.get("memory") == "symmetric":
            of[i.outputs[0]] = {n}
            made[n] = set()
        held = {a for x in (*i.reads, *i.outputs) for a in of.get(x, ())}
        if i.op == "send" and i.kwargs["to"] == program.rank:
            sent.append(held)
        if i.op == "recv" and i.kwargs["from"] == program.rank:
            held = held | sent.pop(0)
            of.setdefault(i.reads[0], set()).update(held)
        for a in held:
            made[a].add(n)
        if i.op in ("chunk", "send", "recv", "post") and held:
            of.setdefault(i.outputs[0], set()).update(held)
        if i.op == "free":
            for x in i.reads:
                of.pop(x, None)
    return made


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("chunks", [2, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_places_are_used_again_in_order(streamed: bool, chunks: int, rank: int) -> None:
    program = written_out(project(layers(3, chunks, streamed), rank))
    found, behind, used = arena(program), orders(program), users(program)
    assert len(found.offsets) == len(used) == len(sizes(program)) > 3
    spans = [(a, a + b) for a, b in zip(found.offsets, sizes(program), strict=True)]  # type: ignore
    shared = 0
    for (a, x), (b, y) in combinations(zip(used, spans, strict=True), 2):
        if x[0] < y[1] and y[0] < x[1]:
            shared += 1
            assert used[a] <= nx.ancestors(behind, b), f"{a} is in use when {b} begins"
    assert shared, "nothing is used again"
    assert max(stop for _, stop in spans) <= found.size


def test_memory_does_not_grow_with_layers() -> None:
    few, many = (arena(written_out(project(layers(n, 8, True), 0))).size for n in (2, 8))
    assert many == few


def test_outputs_and_empty_buffers_have_no_place() -> None:
    program = hir.parse(
        """
        host @kept on mesh(tp=2) {
          input %x: f32[4] of [8] (tp=S0)
          %a: f32[4] of [8] (tp=S0) = alloc(memory=symmetric)
          %a = neg(%x)
          %b: f32[4] of [8] (tp=S0) = alloc(memory=symmetric)
          %b = neg(%a)
          %e: f32[0] of [0] (tp=S0) = alloc(memory=symmetric)
          free %b, %e
          return %a
        }
        """
    )
    assert arena(written_out(project(program, 1))) == Arena((None, 0, None), 512)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "symmetric"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_rank_reads_its_own_shard_where_it_lies(
    backend: str, pieces: int, in_pieces: bool
) -> None:
    """In rings that gather and that scatter; also where what is sent has a place of its own, and
    where it is computed in pieces."""
    mesh = DeviceMesh.arange(tp=2)
    stream = Stream(0, pieces) if in_pieces else None
    around = Stream(0, 2 * pieces, rotate="tp")
    with mf.FusionDefinition("rings") as fd:
        x = fd.define_tensor([8, 4], mesh=mesh, layout={"tp": Shard(0)})
        w = fd.define_tensor([4, 6], mesh=mesh, layout={"tp": Shard(1)})
        v = fd.define_tensor([6, 4], mesh=mesh, layout={"tp": Shard(0)})
        t = (x * 2).on(mesh, {"tp": Shard(0)}, stream=stream)
        whole = fd.ops.set(t).on(mesh, {}, stream=around)
        h = (whole @ w).on(mesh, {"tp": Shard(1)}, stream=around)
        fd.add_output((fd.ops.neg(h) @ v).on(mesh, {"tp": Shard(0)}, stream=around))
    program = mf.compile(fd, mf.Options(backend=backend))
    inputs = [torch.empty(4, 4), torch.empty(4, 3), torch.empty(3, 4)]
    for rank in (0, 1):
        plan = build(project(program.host, rank), unused, torch.device("cpu"), False, inputs)
        ops = Counter(step.op for step in plan.steps)
        added = 0 if pieces == 1 else pieces  # of sums, those to which a product adds itself
        assert (ops["same"], ops["addmm"]) == (2 * pieces - added, added)


def unused(call: Call) -> Any:
    """Stand for what posts a call of a plan that does not run."""
    return SimpleNamespace(prepare=lambda *given: None)
