"""`check_indices`: an index that no row has is an error on all ranks, whole tables or split."""

from __future__ import annotations

import pytest
import torch
from helpers.lookups import CHECKED, LAYOUTS, ROWS, lookup

import mdfuse as mf
from mdfuse import DeviceMesh, Options, ProgramError, Stream


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", [None, 0, 1])
def test_out_of_range(layout: str, schedule: int | None) -> None:
    program, table = lookup(layout), torch.randn(ROWS, 4)
    for wrong in (ROWS, -1, 1 << 40, -(1 << 40)):
        for at in range(4):
            i = torch.tensor([0, 4, 2, 2])
            i[at] = wrong
            with pytest.raises(IndexError, match=f"{wrong}, but %table has 5 rows") as caught:
                mf.simulate(program, [i, table], options=CHECKED, schedule=schedule)
            assert isinstance(caught.value, ProgramError)
            assert isinstance(caught.value, mf.IndexRangeError)
    i = torch.tensor([0, 4, 2, 2])
    (y,) = mf.simulate(program, [i, table], options=CHECKED, schedule=schedule).outputs
    assert torch.equal(y, table[i] + 1.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_without_rows(layout: str) -> None:
    i, table = torch.tensor([0, 1, 0, 0]), torch.randn(0, 4)
    with pytest.raises(IndexError, match="%table has 0 rows"):
        mf.simulate(lookup(layout, rows=0), [i, table], options=CHECKED)


def test_chunks() -> None:
    """In a loop over chunks, written out, and in one that a stream goes through."""
    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("chunks") as fd:
        i = fd.define_tensor([8], torch.int64, mesh)
        table = fd.define_tensor([ROWS, 4], mesh=mesh)
        y = fd.ops.embedding(i, table).on(mesh, {}, stream=Stream(0, 2))
        fd.add_output(y)
    program, table = mf.compile(fd), torch.randn(ROWS, 4)
    i = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    assert torch.equal(mf.simulate(program, [i, table], options=CHECKED).outputs[0], table[i])
    for at in range(8):
        wrong = i.clone()
        wrong[at] = ROWS
        with pytest.raises(IndexError, match="index 5"):
            mf.simulate(program, [wrong, table], options=CHECKED)


@pytest.mark.usefixtures("unjoined")
def test_runs_by_one_rank() -> None:
    program, table, i = lookup("whole", 1), torch.randn(ROWS, 4), torch.tensor([0, 4, 2, 2])
    for n in range(3):
        with pytest.raises(IndexError, match="index -3"):
            program.run(i - 3 * (i == 0), table)
        if n:
            with pytest.raises(ProgramError, match="dtype"):
                program.run(i.float(), table)
        assert torch.equal(program.run(i, table)[0], table[i] + 1.0)


def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDFUSE_CHECK_INDICES", "1")
    with pytest.raises(mf.IndexRangeError):
        mf.simulate(lookup("rows split"), [torch.full((4,), 7), torch.randn(ROWS, 4)])


def test_graphs_hold_no_checks() -> None:
    with pytest.raises(ProgramError, match="graph"):
        Options(check_indices=True, graph="always")
