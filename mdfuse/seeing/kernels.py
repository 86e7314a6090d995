"""Kernels: what a compiler makes of a launch, as far as bytes go.

Work between two calls of a library, each of which reads what another one makes, becomes one kernel;
what only that kernel reads is neither written nor read again.
"""

from __future__ import annotations

import networkx as nx

from mdfuse.hir.instructions import is_library
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import dtype_name
from mdfuse.seeing.amounts import added_to, buffer_bytes, is_work


def kernels(program: HostProgram, launch: Instruction) -> list[tuple[int, str]]:
    """Return the bytes that each kernel of a launch reads and writes, and its type of elements."""
    body = launch.body
    level: dict[str, int] = {}
    made = {x: n for n, i in enumerate(body) for x in i.outputs}
    roots = _roots(body)
    graph: nx.Graph[int] = nx.Graph()
    heights: list[int] = []
    for n, i in enumerate(body):
        height = max((level.get(x, 0) for x in i.reads), default=0)
        level.update(dict.fromkeys(i.outputs, height + is_library(i)))
        heights.append(height)
        if is_library(i) or not is_work(i):
            continue
        graph.add_node(n)
        for at in (made.get(roots.get(x, x)) for x in i.reads):
            if at is not None and at in graph and heights[at] == height:
                graph.add_edge(at, n)
    found = nx.connected_components(graph)
    return [_moved(program, launch, sorted(part), roots) for part in found]


def _moved(
    program: HostProgram, launch: Instruction, part: list[int], roots: dict[str, str]
) -> tuple[int, str]:
    inside = {x for n in part for x in launch.body[n].outputs}
    reads = {x for n in part for x in launch.body[n].reads if roots.get(x, x) not in inside}
    outside = (i for n, i in enumerate(launch.body) if n not in part)
    used = {roots.get(x, x) for i in outside if is_work(i) for x in i.reads}
    writes = inside & (used | {roots.get(x, x) for x in launch.outputs})
    first = program.types[launch.body[part[-1]].outputs[0]].dtype
    sums = sum(added_to(program, launch.body[n]) for n in part)
    return sums + sum(buffer_bytes(program, x) for x in reads | writes), dtype_name(first)


def _roots(body: tuple[Instruction, ...]) -> dict[str, str]:
    """Return a view -> what it is a view of."""
    found: dict[str, str] = {}
    for i in body:
        if not is_work(i) and i.reads:
            found.update(dict.fromkeys(i.outputs, found.get(i.reads[0], i.reads[0])))
    return found
