"""The calls of all ranks: rows in order, hand-overs right behind what they hand over."""

from __future__ import annotations

import pytest
from helpers.pipelines import chain, stages_of

from mdfuse.pipelines.order import calls
from mdfuse.pipelines.schedules import Schedule


def called(schedule: Schedule, order: list[int]) -> list[str]:
    stages = stages_of(chain(order))
    if not schedule.has("I"):
        stages = stages.whole_backward()
    return [
        " + ".join(" ".join(f"{part}({k})" for part, k in lane) for lane in lanes)
        for lanes in calls(stages, schedule)
        if any(lanes)
    ]


def test_microbatches_travel_ahead() -> None:
    found = called(Schedule.named("1f1b", stages=2, microbatches=3), [0, 1])
    assert " ".join(found) == (
        "F0(0) T01(0) F0(1) T01(1) F1(0) B1(0) T10(0) B0(0) F1(1) B1(1) T10(1) F0(2) T01(2) "
        "B0(1) F1(2) B1(2) T10(2) B0(2)"
    )


def test_parts_that_a_stage_does_not_have_are_left_out() -> None:
    found = called(Schedule.named("zb1p", stages=2, microbatches=2), [0, 1])
    assert "W0(0)" in found
    assert "I0(0)" not in found  # nothing reads the gradient of the first stage's input


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p"])
def test_rows_keep_their_order(name: str) -> None:
    schedule = Schedule.named(name, stages=3, microbatches=4)
    found = " ".join(called(schedule, [0, 1, 2])).split()
    for stage, row in enumerate(schedule.actions):
        wanted = [f"{a.phase}{a.stage}({a.microbatch})" for a in row]
        assert [c for c in found if c in wanted] == [c for c in wanted if c in found]
        handed = [f"T{stage}{stage + 1}({k})" for k in range(4)] if stage < 2 else []
        for k, call in enumerate(handed):
            assert found.index(call) == found.index(f"F{stage}({k})") + 1


def test_what_overlaps_stands_beside_each_other() -> None:
    rows = [["0F0", "3F0", "(0F1;3B0)OVERLAP_F_B", "3F1", "3B1", "0B0", "0B1"]]
    rows += [["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"]]
    found = called(Schedule.from_rows(rows), [0, 1, 0, 1])
    (both,) = (x for x in found if " + " in x)
    assert both == "F0(1) T01(1) + B3(0) T32(0)"
    assert found[0] == "F0(0) T01(0)"
