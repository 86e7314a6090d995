"""Schedules: read, printed, checked, merged."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.golden import Golden
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import pipelining

import mdfuse as mf
from mdfuse.pipelines.schedules import Action, Schedule
from mdfuse.pipelines.tables import NAMED

#: 1F1B of two stages and two microbatches.
ROWS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule that has a name."""
    name = draw(st.sampled_from([*NAMED]))
    groups, laps, microbatches = (draw(st.integers(1, n)) for n in (5, 3, 13))
    stages = groups * laps
    if not NAMED[name].can(stages, groups, microbatches):
        name = "gpipe"
    return Schedule.named(name, stages=stages, groups=groups, microbatches=microbatches)


def message(error: pytest.ExceptionInfo[mf.DefinitionError]) -> str:
    """An error without the line of this file."""
    return re.sub(r"\n  test_\S+ .*", "", str(error.value))


# -- read and written ------------------------------------------------------------------------------


@given(schedules())
def test_a_table_comes_back_from_its_csv(schedule: Schedule) -> None:
    rows = [line.split(",") for line in schedule.to_csv().splitlines()]
    assert Schedule.from_rows(rows) == schedule


def test_a_file_with_idle_slots(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,,0B0\n,1F0,1B0\n")
    found = Schedule.from_csv(path)
    assert found.rows[1] == (None, Action(1, "F", 0), Action(1, "B", 0))
    assert (found.name, found.stages, found.groups, found.microbatches) == ("mine.csv", 2, 2, 1)
    assert found.to_csv() == path.read_text()
    assert found.owners == {0: 0, 1: 1}


def test_torch_reads_what_is_written() -> None:
    """Each cell is an action to torch, which prints it as it was."""
    stage = SimpleNamespace(num_stages=1, group_size=1, group_rank=0, stage_index=0, submod=None)
    action = type(pipelining.ScheduleInterleaved1F1B([stage], 1).pipeline_order[0][0])
    written = Schedule.named("dualpipev", stages=4, microbatches=6).to_csv()
    cells = [cell for line in written.splitlines() for cell in line.split(",")]
    assert [str(action.from_str(cell)) for cell in cells] == cells
    assert any(action.from_str(cell).sub_actions for cell in cells)


def test_what_follows_from_the_program_is_left_out() -> None:
    row = ["0UNSHARD", "0F0", "0SEND_F0", "0RECV_B0", "0B0", "0RESHARD", "0REDUCE_GRAD"]
    assert Schedule.from_rows([row]) == Schedule.from_rows([["0F0", "0B0"]])


@pytest.mark.parametrize("cell", ["F0", "0F", "0X1", "0F0 0B0", "(0F0;1F0)OVERLAP_F_B", "-1F0"])
def test_a_cell_that_is_no_action(cell: str, tmp_path: Path) -> None:
    with pytest.raises(mf.DefinitionError, match=r"is no action(.|\n)*row 1(.|\n)*1F0") as error:
        Schedule.from_rows([["0F0"], [cell]])
    assert repr(cell) in str(error.value)
    (tmp_path / "t.csv").write_text(f"0F0\n1F0,{cell}\n")
    with pytest.raises(mf.DefinitionError, match=r"t.csv:2"):
        Schedule.from_csv(tmp_path / "t.csv")


def test_rank_groups_are_printed_with_their_meshes(golden: Golden) -> None:
    found = Schedule(Schedule.from_rows(ROWS).rows, meshes=("m0", "m10"))
    golden(str(found))


# -- names -----------------------------------------------------------------------------------------


def test_a_name_that_no_schedule_has() -> None:
    with pytest.raises(mf.DefinitionError) as error:
        Schedule.named("pipedream", stages=2, microbatches=2)
    for name in NAMED:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "stages", "groups", "microbatches", "hint"),
    [
        ("1f1b", 4, 2, 8, "one of gpipe, interleaved, zb1p, zbv, dualpipev"),
        ("interleaved", 3, 2, 8, "one of gpipe"),
        ("interleaved", 8, 4, 9, "microbatches=8"),
        ("zb1p", 8, 4, 13, "microbatches=12"),
        ("zbv", 4, 4, 8, "one of gpipe, 1f1b, interleaved, zb1p"),
        ("dualpipev", 8, 4, 3, "microbatches=8"),
    ],
)
def test_what_a_schedule_cannot_have(
    name: str, stages: int, groups: int, microbatches: int, hint: str
) -> None:
    with pytest.raises(mf.DefinitionError, match="cannot have") as error:
        Schedule.named(name, stages=stages, groups=groups, microbatches=microbatches)
    assert str(error.value).endswith(f"try         {hint}")
    assert f"because     {NAMED[name].rule}" in str(error.value)


def test_what_a_schedule_cannot_have_where_stages_lie_as_they_do() -> None:
    """`interleaved` could have four stages on two groups, but not these."""
    with pytest.raises(mf.DefinitionError, match="4 stages on rank groups 0 1 1 0") as error:
        Schedule.named("1f1b", stages=4, microbatches=8, groups=[0, 1, 1, 0])
    assert str(error.value).endswith("try         one of gpipe, zbv, dualpipev")


def test_stages_that_lie_elsewhere() -> None:
    with pytest.raises(mf.DefinitionError, match=r"0 1 0 1(.|\n)*up again: 0 1 1 0"):
        Schedule.named("zbv", stages=4, microbatches=8, groups=[0, 1, 0, 1])
    made = Schedule.named("zbv", stages=4, microbatches=8, groups=[0, 1, 1, 0])
    assert made == Schedule.named("zbv", stages=4, microbatches=8, groups=2)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("name", NAMED)
def test_every_schedule_of_few_stages_goes_through(
    name: str, stages: int, microbatches: int
) -> None:
    groups = stages // 2 if NAMED[name].turns else stages
    if not groups or (name == "dualpipev" and microbatches < stages):
        with pytest.raises(mf.DefinitionError, match="cannot have"):
            Schedule.named(name, stages=stages, groups=1, microbatches=microbatches)
        return
    made = Schedule.named(name, stages=stages, microbatches=microbatches)
    where = [made.owners[s] for s in range(stages)]
    made.check(stages=stages, microbatches=microbatches, groups=where, gradients=name != "forward")


# -- checks ----------------------------------------------------------------------------------------


def checked(*rows: str, stages: int = 2, microbatches: int = 2, gradients: bool = True) -> None:
    """Check a table of two rank groups."""
    found = Schedule.from_rows([row.split() for row in rows])
    found.check(stages=stages, microbatches=microbatches, groups=2, gradients=gradients)


FIRST, SECOND = (" ".join(row) for row in ROWS)


def test_a_table_that_is_right() -> None:
    checked(FIRST, SECOND)
    checked("0F0 0F1 0I0 0I1 0W1 0W0", SECOND)
    checked("0F0 0F1", "1F1 1F0", gradients=False)


@pytest.mark.parametrize(
    ("rows", "what", "hint"),
    [
        ([FIRST], "its 1 rows", "a row for each"),
        ([FIRST, SECOND + " 2F0"], "2F0 in row 1, action 4", "leave it out"),
        ([FIRST + " 0F2", SECOND], "0F2 in row 0, action 4", "leave it out"),
        (["1F0 " + FIRST, SECOND[4:]], "1F0 in row 0, action 0", "move it to row 1"),
        ([FIRST, SECOND + " 1F1"], "1F1 twice, in row 1, action 2 and in row 1, action 4", "leave"),
        ([FIRST, SECOND + " 1B1"], "1B1 twice", "leave one of them out"),
        ([FIRST, SECOND + " 1W1"], "1W1 in row 1, action 4 beside 1B1", "either B, or I and W"),
        ([FIRST, SECOND.replace(" 1B1", "")], "no 1B1", "put it into row 1"),
        ([FIRST, SECOND.replace(" 1B1", " 1I1")], "no 1W1", "put it into row 1"),
        ([FIRST.replace("0F1 ", ""), SECOND], "no 0F1", "put it into row 0"),
        ([FIRST, "1B0 1F0 1F1 1B1"], "1B0, which needs 1F0, which row 1 has behind 1B0", "put"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "0B0, which needs 1B0, which row 1 has", "put"),
        ([FIRST, "1F0 1W0 1I0 1F1 1B1"], "1W0, which needs 1I0", "put"),
    ],
)
def test_a_table_that_is_wrong(rows: list[str], what: str, hint: str) -> None:
    with pytest.raises(mf.DefinitionError) as error:
        checked(*rows)
    assert what in str(error.value)
    assert f"try         {hint}" in str(error.value)
    assert "test_schedules.py" in str(error.value)


def test_a_backward_without_gradients() -> None:
    with pytest.raises(mf.DefinitionError, match=r'0B0 in row 0(.|\n)*schedule="forward"'):
        checked(FIRST, SECOND, gradients=False)


def test_an_error_tells_where_each_rank_group_stands(golden: Golden) -> None:
    with pytest.raises(mf.DefinitionError) as error:
        checked("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    golden(message(error))


# -- one order -------------------------------------------------------------------------------------


@given(schedules())
def test_one_order_keeps_every_row_and_comes_after_what_is_needed(schedule: Schedule) -> None:
    merged = schedule.merged()
    for g, row in enumerate(schedule.actions):
        assert tuple(a for group, a in merged if group == g) == row
    place = {a: n for n, (_, a) in enumerate(merged)}
    assert len(place) == len(merged) == sum(map(len, schedule.actions))
    last = schedule.stages - 1
    for a, n in place.items():
        s, k = a.stage, a.microbatch
        if a.phase == "F" and s:
            assert place[Action(s - 1, "F", k)] < n
        if a.phase in "BI":
            assert place[Action(s, "F", k)] < n
        if a.phase in "BI" and s < last:
            after = [place[x] for p in "BI" if (x := Action(s + 1, p, k)) in place]
            assert min(after) < n
        if a.phase == "W":
            assert place[Action(s, "I", k)] < n


def test_one_order_of_1f1b() -> None:
    merged = Schedule.from_rows(ROWS).merged()
    assert (
        " ".join(f"{g}:{a}" for g, a in merged) == "0:0F0 0:0F1 1:1F0 1:1B0 0:0B0 1:1F1 1:1B1 0:0B1"
    )


def test_stages_need_not_be_a_chain() -> None:
    """Two towers: stage 1 may begin before stage 0, since both are read by stage 2 alone."""
    rows = [["1F0", "0F0", "2F0", "2B0", "0B0", "1B0"]]
    with pytest.raises(mf.DefinitionError, match="1F0, which needs 0F0"):
        Schedule.from_rows(rows).merged()
    merged = Schedule.from_rows(rows).merged(reads={2: (0, 1)})
    assert [str(a) for _, a in merged] == rows[0]
    Schedule.from_rows(rows).check(stages=3, microbatches=1, groups=[0, 0, 0], reads={2: (0, 1)})
