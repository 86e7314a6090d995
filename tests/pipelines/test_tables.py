"""Tables of schedules: those of torch, which is asked for them and whose answers are kept as CSV.

Torch has no table of 1F1B (what it prints begins with microbatch 1 on the last rank): that file is
what the rule of `greedy` makes, as is the test of every other size.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import pipelining

import mdfuse as mf
from mdfuse.pipelines.schedules import Schedule
from mdfuse.pipelines.tables import NAMED, placed

TABLES = Path(__file__).parent / "tables"

#: file of torch's table for 4 rank groups and 8 microbatches, our name for it, and for each group
#: the makespan, the work, the bubble and the live microbatches, where F, I and W take 1, and B 2.
EXPECTED = [
    ("GPipe-1", "gpipe", 33, 24, 9, (8, 8, 8, 8)),
    ("OneFOneB-1", "1f1b", 33, 24, 9, (4, 3, 2, 1)),
    ("Interleaved1F1B-1", "interleaved", 33, 24, 9, (7, 5, 3, 1)),
    ("Interleaved1F1B-2", "interleaved", 57, 48, 9, (11, 9, 7, 5)),
    ("LoopedBFS-2", "gpipe", 57, 48, 9, (16, 16, 16, 16)),
    ("InterleavedZeroBubble-1", "zb1p", 27, 24, 3, (4, 4, 4, 4)),
    ("InterleavedZeroBubble-2", "zb1p", 51, 48, 3, (8, 8, 8, 8)),
    ("ZBVZeroBubble-2", "zbv", 51, 48, 3, (8, 8, 8, 8)),
    ("DualPipeV-2", "dualpipev", 54, 48, 6, (9, 9, 9, 9)),
]


@pytest.mark.parametrize(("file", "name", "makespan", "work", "bubble", "live"), EXPECTED)
def test_a_table_takes_what_it_is_known_to(
    file: str, name: str, makespan: int, work: int, bubble: int, live: tuple[int, ...]
) -> None:
    kept = mf.Schedule.from_csv(TABLES / f"{file}.csv")
    made = Schedule.named(name, stages=kept.stages, groups=4, microbatches=8)
    for timed in (kept.timed(), made.timed()):
        assert timed.makespan == makespan
        assert timed.work == (work,) * 4
        assert timed.bubble == (bubble,) * 4
        assert timed.live == live
    if file != "LoopedBFS-2":  # which goes through microbatches from the last one on
        assert made.units == kept.units


#: Ours that torch makes for any number of stages and microbatches.
THEIRS: dict[str, Any] = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb1p": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


def theirs(name: str, laps: int, groups: int, microbatches: int) -> mf.Schedule:
    """Return torch's table, for stages that compute nothing."""
    stage = SimpleNamespace(
        num_stages=laps * groups, group_size=groups, group_rank=0, stage_index=0, submod=None
    )
    order = THEIRS[name]([stage] * laps, microbatches).pipeline_order
    texts = [[str(a) if a is not None else None for a in order[g]] for g in range(groups)]
    return mf.Schedule.from_rows(texts)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", THEIRS)
def test_rows_are_those_of_torch(name: str, groups: int) -> None:
    met = 0
    for laps in (1, 2, 3):
        for microbatches in (*range(1, 13), 16, 21):
            try:
                expected = theirs(name, laps, groups, microbatches)
            except ValueError:  # torch refuses it
                with pytest.raises(mf.DefinitionError, match="cannot have"):
                    Schedule.named(
                        name, stages=laps * groups, groups=groups, microbatches=microbatches
                    )
                continue
            made = Schedule.named(
                name, stages=laps * groups, groups=groups, microbatches=microbatches
            )
            assert made.units == expected.units, (laps, microbatches)
            met += 1
    assert met


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "forward"])
@pytest.mark.parametrize("stages", [1, 2, 4, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_no_order_is_quicker(name: str, stages: int, microbatches: int) -> None:
    """The last stage begins after p - 1 forwards, and its work comes back through p - 1 stages."""
    timed = Schedule.named(name, stages=stages, microbatches=microbatches).timed()
    cost = 1 if name == "forward" else 3
    assert timed.makespan == (stages - 1 + microbatches) * cost
    if name == "1f1b":
        assert timed.live == tuple(min(microbatches, stages - r) for r in range(stages))


def greedy(stages: int, microbatches: int) -> list[list[str]]:
    """Return 1F1B by a rule: whoever is free begins a backward if it can, else a forward if it can.

    A stage keeps no more microbatches than there are stages from it on.
    """
    rows: list[list[str]] = [[] for _ in range(stages)]
    done = dict[tuple[str, int, int], int]()
    counts = [{"F": 0, "B": 0} for _ in rows]
    free, now = [0] * stages, 0
    while any(len(row) < 2 * microbatches for row in rows):
        for s in range(stages):
            f, b = counts[s]["F"], counts[s]["B"]
            after = ("B", s + 1, b) if s + 1 < stages else ("F", s, b)
            can_f = f < microbatches and f - b < stages - s
            can_f &= s == 0 or done.get(("F", s - 1, f), now + 1) <= now
            can_b = b < f and done.get(after, now + 1) <= now
            if free[s] > now or not (can_f or can_b):
                continue
            phase = "B" if can_b else "F"
            k = counts[s][phase]
            rows[s].append(f"{s}{phase}{k}")
            free[s] = done[phase, s, k] = now + (2 if can_b else 1)
            counts[s][phase] += 1
        now += 1
    return rows


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_1f1b_is_what_a_greedy_rule_makes(stages: int) -> None:
    for microbatches in range(1, 12):
        made = Schedule.named("1f1b", stages=stages, microbatches=microbatches)
        assert made == mf.Schedule.from_rows(greedy(stages, microbatches)), microbatches


def test_stages_of_gpipe_lie_anywhere() -> None:
    made = Schedule.named("gpipe", stages=3, microbatches=2, groups=[0, 1, 0])
    assert str(made) == (
        "rank group 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nrank group 1  1F0 1F1 1B0 1B1"
    )
    assert made.timed().makespan == 12  # the first group is never idle


def test_stages_turn_or_go_round() -> None:
    assert placed(6, 3, turns=True) == (0, 1, 2, 2, 1, 0)
    assert placed(6, 3, turns=False) == (0, 1, 2, 0, 1, 2)
    for name, named in NAMED.items():
        made = Schedule.named(name, stages=2, groups=1 if named.turns else 2, microbatches=2)
        assert made.owners == dict(enumerate(placed(2, made.groups, named.turns)))
