"""Common spellings of torch: each gives torch's own result, or is refused with a way out."""

from __future__ import annotations

import pytest
from helpers.oracle import is_close
from helpers.spellings import PLACES, Spelling, simulated, spellings, tried

ALL = spellings()
WORKS = [case for case in ALL if not case.why]
REFUSED = [case for case in ALL if case.why]


def test_how_many_work() -> None:
    """Both numbers change together with the list, in a change that says why."""
    assert (len(WORKS), len(ALL)) == (324, 355)
    assert len({*map(str, ALL)}) == len(ALL)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", WORKS, ids=str)
def test_it_is_what_torch_computes(case: Spelling, place: str) -> None:
    wanted = case.results(case.tensors())
    found = simulated(case, PLACES[place])
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in wanted]
    for got, want in zip(found, wanted, strict=True):
        assert is_close(got, want), (got, want)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_it_is_refused_for_a_reason(case: Spelling) -> None:
    assert tried(case).line == case.line
