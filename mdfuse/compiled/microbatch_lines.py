"""Explain microbatches: their stages, and what comes once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

from mdfuse.errors import counted
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.pipelines.schedules import Schedule
from mdfuse.seeing.report.numbers import size_text


def microbatch_lines(host: HostProgram, schedule: Schedule | None) -> Iterator[str]:
    """Yield a line on each rank group of a pipeline, and on what comes once in microbatches."""
    if schedule is not None:
        yield from _stages(host, schedule)
    places = [n for n, i in enumerate(host.instructions) if _adds_up(i)]
    if not places:
        return
    loops = sum(host.instructions[n].op == "for" for n in places)
    if loops > 1:
        yield (
            f"microbatches: {loops} loops, one after the other: what follows from a sum over the "
            "whole batch waits for all microbatches"
        )
    before, behind = host.instructions[: places[-1]], host.instructions[places[-1] :]
    gathers = [i for i in before if i.comm is not None and i.comm.kind == "Allgather"]
    if gathers:
        yield (
            f"microbatches: {counted(len(gathers), 'gather')} once, before them: "
            f"{_size(host, [i.reads[-1] for i in gathers])} on a rank stay until they are read last"
        )
    inside = (j for n in places for j in host.instructions[n].walk())
    sums = {j.outputs[0] for j in inside if j.op == "accumulate"}
    reduced = [i for i in behind if i.comm is not None and i.comm.source.partial_axes]
    yield (
        f"microbatches: {counted(len(sums), 'value')} added up, {_size(host, [*sums])} on a rank; "
        f"{counted(len(reduced), 'reduction')} once, behind them"
    )


def _stages(host: HostProgram, schedule: Schedule) -> Iterator[str]:
    """Yield a line on each rank group of a pipeline; its idle time is by unit costs."""
    from mdfuse.seeing.rank_classes import rank_classes
    from mdfuse.seeing.rank_groups import rank_groups

    for g in rank_groups(host, schedule, rank_classes(host)):
        stages = f"stage{'s' * (len(g.stages) > 1)} {', '.join(map(str, g.stages))}"
        yield (
            f"{schedule.name} on {g.name}: {stages}, idle {100 * g.bubble:.0f} %, live {g.live}, "
            f"{size_text(g.peak)} on a rank"
        )


def _adds_up(i: Instruction) -> bool:
    return i.op in ("for", "block") and any(j.op == "accumulate" for j in i.walk())


def _size(host: HostProgram, names: list[str]) -> str:
    return size_text(sum(host.types[name].nbytes() for name in names))
