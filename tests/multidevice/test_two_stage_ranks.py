"""The two-stage matrix on real ranks."""

from __future__ import annotations

import pytest
from helpers.two_stage import CASES, MESHES, Case

import mdfuse as mf

#: What two ranks can run. How local expressions run makes no difference to communications.
CASES_OF_2 = [
    case
    for case in CASES
    if max(*MESHES[case.before].ranks, *MESHES[case.after].ranks) < 2 and case.units == "ops"
]


@pytest.mark.world(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_stages(case: Case, comm: mf.Communicator) -> None:
    check(case, comm)


@pytest.mark.world(2)
@pytest.mark.parametrize("case", CASES_OF_2, ids=str)
def test_two_stages_among_2(case: Case, comm: mf.Communicator) -> None:
    check(case, comm)


@pytest.mark.world(8)
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_stages_among_8(case: Case, comm: mf.Communicator) -> None:
    """The same where half of the ranks are in no mesh."""
    check(case, comm)


def check(case: Case, comm: mf.Communicator) -> None:
    before, _ = case.layouts()
    whole, mine = case.input().to(comm.device), None
    if comm.rank in before.mesh:
        mine = mf.shard_tensor(whole, before, rank=comm.rank)
    (got,) = case.program().run(mine)
    case.check(comm.rank, got)
