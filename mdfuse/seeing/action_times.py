"""The times of a schedule's actions, from the events of a run or of a timeline.

rank 0   %t_1.i@0 = linear   0 to 3 µs      ->    0F0   0 to 3 µs
rank 1   %t_2.i@0 = linear   15 to 18 µs          1F0   15 to 27 µs
rank 1   %loss.i@0 = sum     24 to 27 µs
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import cast

from mdfuse.hir.program import HostProgram
from mdfuse.pipelines.actions import Action, Phase
from mdfuse.pipelines.schedules import Schedule
from mdfuse.pipelines.timing import Slot, Timing
from mdfuse.seeing.events import Event
from mdfuse.seeing.report.numbers import time_text

#: The name of a block that is a phase of a stage, or a piece of it; a name of one of its calls.
_BLOCK = re.compile(r"([FBIW])(\d+)(\.\d+)?")
_MADE = re.compile(r"%([^\s@,]+)@(\d+)")


def by_action(host: HostProgram, schedule: Schedule, events: Sequence[Event]) -> Timing:
    """Return the times of a schedule's actions, in seconds from the first one.

    An action is from the start of its first work to the end of its last, with the waits between
    them. The first rank of a rank group that has events stands for the group.

    Args:
        host: the program of a pipeline, for all ranks.
        schedule: of the program, which names the meshes of its rank groups.
        events: of its ranks.
    """
    blocks = dict(_blocks(host))
    spans: dict[tuple[int, Action], tuple[int, int]] = {}
    for e in events:
        match = _MADE.search(e.name) if e.part == "work" else None
        if match is None or match[1] not in blocks:
            continue
        stage, phase = blocks[match[1]]
        key = e.rank, Action(stage, phase, int(match[2]))
        start, stop = spans.get(key, (e.start_ns, e.stop_ns))
        spans[key] = min(start, e.start_ns), max(stop, e.stop_ns)
    zero = min((start for start, _ in spans.values()), default=0)
    meshes = {f"m{n}": mesh for n, mesh in enumerate(host.meshes)}
    ranks = {rank for rank, _ in spans}
    lanes = []
    for name in schedule.meshes:
        first = next((r for r in meshes[name] if r in ranks), None)
        slots = [
            Slot(action, (start - zero) / 1e9, (stop - zero) / 1e9)
            for (rank, action), (start, stop) in spans.items()
            if rank == first
        ]
        lanes.append(tuple(sorted(slots, key=lambda s: s.start)))
    return Timing(name=schedule.name, lanes=tuple(lanes), names=schedule.labels, shown=time_text)


def _blocks(host: HostProgram) -> Iterable[tuple[str, tuple[int, Phase]]]:
    """Yield (name of a value, stage and phase of the block that computes it)."""
    for i in host.instructions:
        match = _BLOCK.fullmatch(i.fn) if i.op == "block" else None
        if match is not None:
            for name in (x for j in i.body for k in j.walk() for x in k.outputs):
                yield name, (int(match[2]), cast(Phase, match[1]))
