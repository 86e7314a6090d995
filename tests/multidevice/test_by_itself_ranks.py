"""A rank runs by itself what communicates nothing, and others something else or nothing."""

from __future__ import annotations

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Partial
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.runtime.alone import by_itself

pytestmark = pytest.mark.world(2)


def test_ranks_that_ran_something_by_themselves_communicate(comm: mf.Communicator) -> None:
    """Each another number of programs, whose numbers are not those of programs of all ranks."""
    mesh = DeviceMesh.arange(tp=2)
    alone = by_itself(comm)
    assert (alone.rank, alone.size, alone.device) == (comm.rank, comm.size, comm.device)
    assert mf.init() is comm
    x = torch.randn(3, 4, device=comm.device)
    for n in range(1, 3 + comm.rank):
        with mf.FusionDefinition(f"scaled_by_{n + comm.rank}") as fd:
            given = fd.define_tensor([3, 4], mesh=mesh)
            fd.add_output(given * float(n + comm.rank))
        program = HostIrEvaluator(mf.compile(fd).host, alone)
        (given_name,) = program.program.inputs
        for _ in range(3):
            (y,) = program.run({given_name: x})
            assert torch.equal(y, x * (n + comm.rank))
    alone.close()
    with mf.FusionDefinition("summed") as fd:
        part = fd.define_tensor([4], mesh=mesh, layout={"tp": Partial()})
        fd.add_output(fd.ops.set(part).on(mesh, {}))
    host = mf.compile(fd).host
    together = HostIrEvaluator(host, comm)
    for turn in range(3):
        mine = torch.full((4,), 2.0 * turn + comm.rank, device=comm.device)
        (total,) = together.run({host.inputs[0]: mine})
        assert total.tolist() == [4.0 * turn + 1] * 4
    told = comm.all_ok(str(together._tally.serial))
    assert told[0] == told[1], "what all ranks run has one number"
