"""Programs that move as many rows as a run counts, on real ranks."""

from __future__ import annotations

import pytest
import torch
from helpers.counted_programs import Counted, skewed

import mdfuse as mf

FOUR = (
    Counted(axes=(4,), experts=5, most=7, width=3, dtype="bf16"),
    Counted(axes=(2, 2), experts=3, most=5, width=1),
    Counted(axes=(4,), experts=2, most=1),
    Counted(axes=(4,), experts=5, most=3, parts=3),
    Counted(axes=(2, 2), experts=3, most=5, width=2, is_fetched=False),
)
TWO = (Counted(), Counted(axes=(2,), experts=3, most=4, width=2, dtype="bf16"))


def check(case: Counted, comm: mf.Communicator) -> None:
    """One plan runs with counts of all kinds, twice."""
    evaluator = mf.HostIrEvaluator(case.program(), comm, mf.Options(poison=True))
    for seed, counts in enumerate((*skewed(case).values(), *skewed(case).values())):
        x, n = case.inputs(counts, seed)
        mine = slice(comm.rank, comm.rank + 1)
        (got,) = evaluator.run({"x": x[mine].to(comm.device), "n": n[mine].to(comm.device)})
        assert torch.equal(got.cpu(), case.expected(x, n)[mine]), counts


@pytest.mark.world(2)
@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks(case: Counted, comm: mf.Communicator) -> None:
    check(case, comm)


@pytest.mark.world(4)
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks(case: Counted, comm: mf.Communicator) -> None:
    check(case, comm)


@pytest.mark.world(4)
def test_all_ranks_refuse_counts_over_the_bound(comm: mf.Communicator) -> None:
    """Those of one rank alone are too many; a later run goes on as if nothing had been."""
    case = FOUR[0]
    evaluator = mf.HostIrEvaluator(case.program(), comm)
    right = skewed(case)["drawn"]
    wrong = right.clone()
    wrong[2, 1] = 8
    mine = slice(comm.rank, comm.rank + 1)
    for counts, is_right in ((right, True), (wrong, False), (right, True)):
        x, n = case.inputs(counts)
        given = {"x": x[mine].to(comm.device), "n": n[mine].to(comm.device)}
        if is_right:
            (got,) = evaluator.run(given)
            assert torch.equal(got.cpu(), case.expected(x, n)[mine])
            continue
        with pytest.raises(mf.CountsError, match="rows of part 2, of which there may be 7"):
            evaluator.run(given)
