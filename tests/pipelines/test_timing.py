"""Times of schedules, counted by hand."""

from __future__ import annotations

import pytest

import mdfuse as mf
from mdfuse.pipelines.actions import Action
from mdfuse.pipelines.schedules import Schedule
from mdfuse.pipelines.timing import Slot


def test_when_each_action_is() -> None:
    timed = Schedule.from_rows([["0F0", "0B0"], ["1F0", "1I0", "1W0"]]).timed()
    starts = [[(str(s.action), s.start, s.stop) for s in lane] for lane in timed.lanes]
    assert starts == [
        [("0F0", 0, 1), ("0B0", 3, 5)],  # which waits for 1I0, not for 1W0
        [("1F0", 1, 2), ("1I0", 2, 3), ("1W0", 3, 4)],
    ]
    assert (timed.makespan, timed.work, timed.bubble) == (5, (3, 3), (2, 2))


def test_other_costs() -> None:
    """A last stage that takes twice as long is never idle once it has begun."""

    def costs(action: Action) -> float:
        return (3.0 if action.phase == "B" else 1.5) * (1 + action.stage)

    timed = Schedule.named("1f1b", stages=2, microbatches=5).timed(costs)
    assert timed.makespan == 1.5 + 5 * 9 + 3
    assert timed.bubble == (timed.makespan - 5 * 4.5, 4.5)


def test_idle_slots_take_no_time() -> None:
    found = Schedule.from_rows([["0F0", "", "", "0B0"]]).timed()
    assert found.makespan == 3


def test_two_that_overlap_begin_and_end_together() -> None:
    """1F0 would begin at 1 if 0F0 and 0B1 were apart."""
    rows = [["0F1", "(0F0;0B1)OVERLAP_F_B", "0B0"], ["1F1", "1B1", "1F0", "1B0"]]
    timed = Schedule.from_rows(rows).timed()
    assert timed.lanes[0][1:3] == (
        Slot(Action(0, "F", 0), 4, 5),
        Slot(Action(0, "B", 1), 5, 7),
    )
    assert timed.lanes[1][2].start == 7
    apart = [["0F1", "0F0", "0B1", "0B0"], rows[1]]
    assert Schedule.from_rows(apart).timed().lanes[1][2].start == 4


def test_a_skip_connection_waits_for_both() -> None:
    """Stage 0 is read by stages 1 and 2: its backward waits for both of theirs."""
    made = Schedule.named("gpipe", stages=3, microbatches=1)
    timed = made.timed(reads={1: (0,), 2: (0,)})
    assert [lane[0].start for lane in timed.lanes] == [0, 1, 1]
    assert [lane[1].start for lane in timed.lanes] == [4, 2, 2]


def test_live_without_backwards() -> None:
    assert Schedule.named("forward", stages=2, microbatches=4).timed().live == (1, 1)


def test_a_group_that_does_nothing() -> None:
    timed = Schedule.from_rows([["0F0"], []]).timed()
    assert (timed.makespan, timed.bubble, timed.live) == (1, (0, 1), (1, 0))


def test_an_action_that_no_row_has() -> None:
    with pytest.raises(mf.DefinitionError, match="0B0, which needs 1B0, which no row has"):
        Schedule.from_rows([["0F0", "0B0"], ["1F0"]]).timed()
