"""Emit a pipeline: a block per stage and phase, blocks that hand over, and the calls of a schedule.

    block @F0(%i) on m0 { … %h.i = linear(%x.i, %w) }
    block @T01(%i) { %g.i: … m1(…) = alloc   %c0 = post exchange(%h.i) -> %g.i … }
    block @F1(%i) on m1 { wait %c0   %y.i = linear(%g.i, %v) … }
    call F0(0)
    call T01(0)
    …

A hand-over only posts: its wait stands in the block that reads the received value, so that sender
and receiver go on with other microbatches meanwhile.

A block that overlaps with another one is in pieces. Each piece begins with the wait for the post of
the piece before:

    block @F0(%i) on m0 { … %c0 = post allreduce(%h.i) -> … }
    block @F0.1(%i) on m0 { wait %c0 … }
    call F0(3)
    call B1(0)
    call F0.1(3)
    call B1.1(0)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import networkx as nx

from mdfuse.hir.emit.loop import Loop
from mdfuse.hir.emit.loops import begin_loop, emit_section
from mdfuse.hir.emit.sets import Emitter
from mdfuse.hir.instructions import POSTS, received
from mdfuse.hir.program import Instruction
from mdfuse.passes.segmentation import Section
from mdfuse.pipelines.order import Call, Lanes
from mdfuse.pipelines.stages import Part, Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The parts of a program that run once per microbatch, and their calls.

    Attributes:
        stages: the stages, with the part of each expression.
        calls: the calls of all ranks, in order; calls of overlapping actions stand side by side.
    """

    stages: Stages
    calls: Sequence[Lanes]

    @property
    def overlapping(self) -> set[Part]:
        """The parts that ever overlap with another one."""
        return {part for lanes in self.calls if len(lanes) > 1 for x in lanes for part, _ in x}


def split_sections(
    pipeline: Pipeline, sections: Sequence[Section]
) -> tuple[list[Section], list[Section], list[Section]]:
    """Return the sections before a pipeline, in it, and behind it."""
    parts = pipeline.stages.parts
    before, inside, behind = list[Section](), list[Section](), list[Section]()
    late: set[str] = set()
    for section in sections:
        if section.exprs[0].outputs[0] in parts:
            inside.append(section)
        else:
            is_late = not late.isdisjoint(section.inputs)
            (behind if is_late else before).append(section)
            if not is_late:
                continue
        late.update(x for e in section.exprs for x in e.outputs)
    return before, inside, behind


def emit_blocks(out: Emitter, pipeline: Pipeline, sections: Sequence[Section]) -> None:
    """Append the blocks of a pipeline, and its calls.

    Args:
        out: the program under construction, with the code before the pipeline.
        pipeline: stages and calls.
        sections: the sections of its parts, in order.
    """
    of: dict[Part, list[Section]] = defaultdict(list)
    for section in sections:
        of[pipeline.stages.parts[section.exprs[0].outputs[0]]].append(section)
    graph = pipeline.stages.graph
    first = {part: n for n, part in enumerate(of)}
    order = list(nx.lexicographical_topological_sort(graph, key=first.__getitem__))
    building, _ = begin_loop(out, sections)
    for part in order:
        out.code.append(Instruction(op="block", fn=str(part), outputs=(building.name,)))
        _forget_views(building)
        for section in of[part]:
            emit_section(building, section)
    bodies = _bodies(out.code)
    _move_waits(pipeline.stages, of, building, bodies)
    out.code = building.outside
    pieces: dict[Part, list[str]] = {}
    for part in order:
        is_cut = part in pipeline.overlapping and part.phase != "T"
        cut = _cut(bodies[str(part)]) if is_cut else [bodies[str(part)]]
        pieces[part] = [f"{part}.{n}" if n else str(part) for n in range(len(cut))]
        for fn, body in zip(pieces[part], cut, strict=True):
            out.code.append(
                Instruction(op="block", fn=fn, outputs=(building.name,), body=tuple(body))
            )
    for lanes in pipeline.calls:
        rows = [_turns(lane, pieces) for lane in lanes]
        in_turns = (call for x in zip_longest(*rows, fillvalue=[]) for turn in x for call in turn)
        for fn, k in in_turns:
            out.code.append(Instruction(op="call", fn=fn, attrs=(("index", k),)))
    out.code += building.behind


def _turns(lane: Sequence[Call], pieces: Mapping[Part, list[str]]) -> list[list[tuple[str, int]]]:
    """Return the turns of some calls: each is a piece with the hand-overs of its results."""
    turns: list[list[tuple[str, int]]] = []
    for part, k in lane:
        for fn in pieces[part]:
            if part.phase == "T" and turns:
                turns[-1].append((fn, k))
            else:
                turns.append([(fn, k)])
    return turns


def _cut(body: Sequence[Instruction]) -> list[list[Instruction]]:
    """Cut a block in front of each wait for a post of its own, if work follows the wait."""
    pieces: list[list[Instruction]] = [[]]
    posted = set[str]()
    last = max((n for n, i in enumerate(body) if i.op != "wait"), default=-1)
    for n, i in enumerate(body):
        if i.op == "wait" and n < last and not posted.isdisjoint(i.reads):
            pieces.append([])
            posted.clear()
        if i.op in POSTS:
            posted.update(i.outputs)
        pieces[-1].append(i)
    return pieces


def _forget_views(building: Loop) -> None:
    """Let each block cut the chunks of whole values itself: blocks may run in another order."""
    cut = {i.outputs[0] for i in building.out.code if i.op == "chunk"}
    building.chunks = {key: name for key, name in building.chunks.items() if name not in cut}


def _bodies(code: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    """Return the instructions behind each head of a block."""
    bodies: dict[str, list[Instruction]] = {}
    for i in code:
        if i.op == "block":
            current = bodies[i.fn] = []
        else:
            current.append(i)
    return bodies


def _move_waits(
    stages: Stages,
    of: Mapping[Part, Sequence[Section]],
    building: Loop,
    bodies: dict[str, list[Instruction]],
) -> None:
    """Move the wait of a hand-over to the block that reads its value before all other readers.

    The instructions of the set behind its last wait move with it.
    """
    ahead: dict[str, list[Instruction]] = defaultdict(list)
    for part, sections in of.items():
        if part.phase != "T":
            continue
        for section in sections:
            (value,) = section.exprs[0].outputs
            reader = _first_reader(stages, value)
            name = building.chunks.get((value, building.stream(value).dim))
            if reader is None or name is None:
                continue
            late = _arrival(bodies[str(part)], name)
            bodies[str(part)] = [i for i in bodies[str(part)] if not any(i is j for j in late)]
            ahead[str(reader)] += late
    for block, late in ahead.items():
        bodies[block] = [*late, *bodies[block]]


def _first_reader(stages: Stages, value: str) -> Part | None:
    """Return the part that reads a value before all others that do; None where none does."""
    readers = [stages.parts.get(e.outputs[0]) for e in stages.fusion.consumers[value]]
    parts = {part for part in readers if part is not None}
    for part in parts:
        if parts <= {part, *nx.descendants(stages.graph, part)}:
            return part
    return None


def _arrival(body: Sequence[Instruction], name: str) -> list[Instruction]:
    """Return the last wait that a name depends on, and the later instructions between them."""
    needed, after = {name}, list[Instruction]()
    waits = {i.reads[0]: i for i in body if i.op == "wait"}
    posts = [i for i in body if i.op == "post" and i.outputs[0] in waits]
    for i in reversed(body):
        if i.op == "post" and i in posts and not needed.isdisjoint(received(i)):
            return [waits[i.outputs[0]], *after[::-1]]
        if not needed.isdisjoint(i.outputs) and i.op not in ("alloc", "wait"):
            needed.update(i.reads)
            after.append(i)
    return []
