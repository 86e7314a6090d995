"""Programs that move as many rows as a run counts: on the simulator, as text, and their figures."""

from __future__ import annotations

import pytest
import torch
from helpers.counted_programs import CASES, Counted, skewed
from helpers.host_programs import POISON

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.counted import bytes_received, expected_bytes, worst_bytes
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.traffic import received
from mdfuse.hir.verify.check import verify


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_come_back_whatever_is_counted(case: Counted) -> None:
    program = case.program()
    for seed, counts in enumerate(skewed(case).values()):
        x, n = case.inputs(counts, seed)
        for schedule in (None, seed):
            got = mf.simulate(program, [x, n], options=mf.Options(poison=True), schedule=schedule)
            assert torch.equal(got.outputs[0], case.expected(x, n)), counts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_text_reads_back(case: Counted) -> None:
    program = case.program()
    for printed in (program, *(project(program, r) for r in range(case.parts))):
        assert hir.parse(str(printed)) == printed
        assert str(hir.parse(str(printed))) == str(printed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_projections_run(case: Counted) -> None:
    local = [hir.parse(str(project(case.program(), rank))) for rank in range(case.parts)]
    verify(dict(enumerate(local)))
    x, n = case.inputs(skewed(case)["drawn"])
    rows = [{"x": x[r : r + 1], "n": n[r : r + 1]} for r in range(case.parts)]
    got = mf.simulate(local, per_rank=rows, options=POISON).per_rank
    assert torch.equal(torch.cat([y for (y,) in got]), case.expected(x, n))


@pytest.mark.parametrize(
    ("place", "number", "what"),
    [((1, 0), 7, "counts 7 rows of part 1"), ((0, 3), -1, "counts -1 rows")],
)
def test_counts_over_the_bound(place: tuple[int, int], number: int, what: str) -> None:
    """Every rank refuses them, before rows are posted."""
    case = CASES[0]
    n = torch.zeros(2, 4, dtype=torch.int64)
    n[place] = number
    with pytest.raises(mf.ProgramError, match=what):
        mf.simulate(case.program(), [*case.inputs(n)])


def test_memory_is_that_of_the_rows() -> None:
    """Few rows take little, though there might be many."""
    case = Counted(most=1024, width=64)
    few, many = (
        mf.simulate(case.program(), [*case.inputs(skewed(case)[kind])]).peak_bytes
        for kind in ("few", "one")
    )
    row = 64 * 4
    bound = 1024 * row
    assert max(few) <= 2 * bound + 8 * row  # x and y
    assert many[1] >= 3 * bound  # x, and the rows of both parts at the last expert


def test_bytes_that_arrive() -> None:
    """Expected: an equal share of full parts; at worst: all rows of all others, or all of mine."""
    case = Counted(axes=(4,), experts=8, most=16, width=4)
    there, back = (i for i in case.program().walk() if i.op == "post" and len(i.inputs) == 3)
    row = 4 * 4
    assert worst_bytes(there, 1) == 3 * 16 * row
    assert worst_bytes(back, 1) == 16 * row
    assert expected_bytes(there, 1) == expected_bytes(back, 1) == 3 * 16 // 4 * row
    assert bytes_received(there, 1) == expected_bytes(there, 1)
    sizes = [size for _, size in received(case.program(), 1)]
    assert sizes == [3 * 8 * 8, 3 * 16 // 4 * row, 3 * 16 // 4 * row]


def test_what_may_be_captured() -> None:
    """Counts are gathered in a graph; the fetch and all rows are not."""
    eager = {i.fn or i.op: why for i, why in hir.capture.eager(project(CASES[0].program(), 0))}
    assert "which the host waits for" in eager["fetch"]
    assert {*eager} == {"fetch", "pack_rows", "alloc", "post", "mul", "wait", "unpack_rows"} - {
        "wait"
    }
