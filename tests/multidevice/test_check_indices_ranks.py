"""An index out of range on one rank is an IndexError on all, after which they go on."""

from __future__ import annotations

import pytest
import torch
from helpers.lookups import LAYOUTS, ROWS, lookup

import mdfuse as mf
from mdfuse import DeviceMesh, Options


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_of_range(layout: str, comm: mf.Communicator) -> None:
    program, table = lookup(layout), torch.arange(4.0 * ROWS).view(ROWS, 4)
    of_indices, of_table = (mf.Layout(DeviceMesh.arange(x=2), said) for said in LAYOUTS[layout])
    mine = mf.shard_tensor(table, of_table, rank=comm.rank).to(comm.device)
    for at in (None, 0, None, 3, 3, None):
        i = torch.tensor([0, 4, 2, 2])
        want = table[i] + 1.0
        if at is not None:
            i[at] = ROWS
        given = mf.shard_tensor(i, of_indices, rank=comm.rank).to(comm.device)
        if at is None:
            (y,) = program.run(given, mine)
            assert torch.equal(y.cpu(), want)
            continue
        with pytest.raises(IndexError, match="index 5, but %table has 5 rows") as caught:
            program.run(given, mine)
        assert isinstance(caught.value, mf.IndexRangeError)


@pytest.mark.world(2)
def test_without_communication(comm: mf.Communicator) -> None:
    """A rank that refuses a run has the others raise, too: they would meet at its end."""
    mesh = DeviceMesh.arange(x=2)
    with mf.FusionDefinition("rows") as fd:
        i = fd.define_tensor([2], torch.int64, mesh)
        table = fd.define_tensor([ROWS, 4], mesh=mesh)
        fd.add_output(fd.ops.embedding(i, table))
    program = mf.compile(fd, Options(check_indices=True))
    i = torch.tensor([1, 3], device=comm.device)
    table = torch.randn(ROWS, 4, device=comm.device)
    for guilty in (0, 1):
        program.run(i, table)
        with pytest.raises(IndexError, match="index 5"):
            program.run(i + 4 * (comm.rank == guilty), table)
        with pytest.raises(mf.ProgramError, match="dtype"):
            program.run(i.float() if comm.rank == guilty else i, table)
        assert torch.equal(program.run(i, table)[0], table[i])
