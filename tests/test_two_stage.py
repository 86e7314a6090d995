"""The two-stage matrix on the simulator."""

from __future__ import annotations

import pytest
from helpers.two_stage import CASES, Case

import mdfuse as mf


def test_the_matrix_is_whole() -> None:
    """Several hundred cases, each once."""
    assert len(CASES) == len({str(c) for c in CASES}) == (36 * 3 + 4 + 2 + 24 + 4) * 2 * 2 * 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_stages(case: Case) -> None:
    result = mf.simulate(case.program(), [case.input()], options=mf.Options(poison=True))
    for rank, (got,) in enumerate(result.per_rank):
        case.check(rank, got)
