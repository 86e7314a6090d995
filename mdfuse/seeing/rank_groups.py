"""Idle time and memory of each rank group of a pipeline, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.pipelines.schedules import Schedule
from mdfuse.seeing.memory_use import memory_of
from mdfuse.seeing.rank_classes import Classes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of one mesh in a pipeline.

    Attributes:
        name: of the mesh in the host program.
        ranks: of the mesh.
        stages: that it computes.
        bubble: the share of the time of all groups in which it is idle.
        live: how many microbatches it keeps at most for their backwards.
        peak: the most bytes that one of its ranks holds at once.
    """

    name: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    bubble: float
    live: int
    peak: int


def rank_groups(host: HostProgram, schedule: Schedule, classes: Classes) -> tuple[RankGroup, ...]:
    """Return idle time and memory of each rank group, by unit costs.

    Args:
        host: the program, for all ranks, with numbers for extents.
        schedule: of the program, which names the meshes of its rank groups.
        classes: of the program's ranks; one of each stands for all.
    """
    meshes = {f"m{n}": mesh for n, mesh in enumerate(host.meshes)}
    timing, groups = schedule.timed(), []
    for group, name in enumerate(schedule.meshes):
        ranks = tuple(meshes[name].ranks)
        stages = tuple(s for s, g in sorted(schedule.owners.items()) if g == group)
        peaks = [memory_of(project(host, r)).peak for r in {classes.of[r] for r in ranks}]
        groups.append(
            RankGroup(
                name=name,
                ranks=ranks,
                stages=stages,
                bubble=timing.bubble[group] / timing.makespan,
                live=timing.live[group],
                peak=max(peaks),
            )
        )
    return tuple(groups)
