"""The two-stage matrix on real ranks."""

from __future__ import annotations

import pytest
from helpers.in_turn import telling
from helpers.two_stage import CASES, MESHES, UNITS, Case

import mdfuse as mf

#: How local expressions run makes no difference to communications: each case has one of both ways,
#: and next to it, with the other extents or the other dim, stands one that has the other.
WAYS = [[c for c in CASES if c.units == units] for units in UNITS]
ONE_WAY = [both[n.bit_count() % 2] for n, both in enumerate(zip(*WAYS, strict=True))]


def by_meshes(cases: list[Case]) -> dict[str, list[Case]]:
    """The cases of each family of programs and pair of meshes, which one test runs."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(f"{case.family}-{case.before}-{case.after}", []).append(case)
    return found


CASES_OF_2 = [c for c in ONE_WAY if max(*MESHES[c.before].ranks, *MESHES[c.after].ranks) < 2]
OF_4, OF_2 = by_meshes(ONE_WAY), by_meshes(CASES_OF_2)


@pytest.mark.world(4)
@pytest.mark.parametrize("cases", OF_4.values(), ids=OF_4)
def test_two_stages(cases: list[Case], comm: mf.Communicator) -> None:
    check_all(cases, comm)


@pytest.mark.world(2)
@pytest.mark.parametrize("cases", OF_2.values(), ids=OF_2)
def test_two_stages_among_2(cases: list[Case], comm: mf.Communicator) -> None:
    check_all(cases, comm)


@pytest.mark.world(8)
@pytest.mark.gpu
@pytest.mark.parametrize("cases", OF_4.values(), ids=OF_4)
def test_two_stages_among_8(cases: list[Case], comm: mf.Communicator) -> None:
    """The same where half of the ranks are in no mesh."""
    check_all(cases, comm)


def check_all(cases: list[Case], comm: mf.Communicator) -> None:
    for case in cases:
        with telling(case):
            check(case, comm)


def check(case: Case, comm: mf.Communicator) -> None:
    before, _ = case.layouts()
    whole, mine = case.input().to(comm.device), None
    if comm.rank in before.mesh:
        mine = mf.shard_tensor(whole, before, rank=comm.rank)
    (got,) = case.program().run(mine)
    case.check(comm.rank, got)
