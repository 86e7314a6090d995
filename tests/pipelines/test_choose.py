"""Which schedules a pipeline may have."""

from __future__ import annotations

import pytest

import mdfuse as mf
from mdfuse.pipelines.choose import choose
from mdfuse.pipelines.tables import NAMED

#: A skip connection: the last stage reads both others.
SKIP = {1: (0,), 2: (0, 1)}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_is_a_schedule_for_these_stages(name: str) -> None:
    groups = [0, 1, 1, 0] if NAMED[name].turns else [0, 1, 2, 3]
    found = choose(name, microbatches=4, groups=groups, gradients=name != "forward")
    assert found == mf.Schedule.named(name, stages=4, microbatches=4, groups=groups)


def test_a_table_stays_as_it_is() -> None:
    table = mf.Schedule.from_rows([["0F0", "", "0B0"]])
    assert choose(table, microbatches=1, groups=[0], gradients=True) is table


def test_a_table_for_other_stages() -> None:
    table = mf.Schedule.named("1f1b", stages=2, microbatches=4)
    with pytest.raises(mf.DefinitionError, match="0F3 in row 0, action 5"):
        choose(table, microbatches=3, groups=[0, 1], gradients=True)


def test_backwards_where_there_are_none() -> None:
    with pytest.raises(mf.DefinitionError, match=r"without gradients(.|\n)*try +one of forward$"):
        choose("1f1b", microbatches=3, groups=[0, 1], gradients=False)


def test_no_backwards_where_there_are_some() -> None:
    with pytest.raises(mf.DefinitionError, match=r"with gradients(.|\n)*one of gpipe, 1f1b"):
        choose("forward", microbatches=3, groups=[0, 1], gradients=True)


def test_stages_that_are_no_chain() -> None:
    given = {"microbatches": 2, "groups": [0, 1, 2], "gradients": True, "reads": SKIP}
    because = "stage 1 reads 0, stage 2 reads 0 and 1"
    with pytest.raises(mf.DefinitionError, match=f"no chain(.|\n)*{because}"):
        choose("1f1b", **given)  # type: ignore[arg-type]
    assert choose("gpipe", **given).stages == 3  # type: ignore[arg-type]
    table = mf.Schedule.named("1f1b", stages=3, microbatches=2)
    assert choose(table, **given) is table  # type: ignore[arg-type]


def test_what_is_no_schedule() -> None:
    with pytest.raises(
        mf.DefinitionError, match=r"schedule=3(.|\n)*mf.Schedule(.|\n)*forward, gpipe"
    ):
        choose(3, microbatches=2, groups=[0], gradients=True)
