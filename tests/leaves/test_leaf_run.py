"""Runs on leaves that break off: which inputs they may have written is known to the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from helpers.drawn import drawn
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Replicate, Shard
from mdfuse.compiled.leaf_program import LeafProgram
from mdfuse.compiled.versions import may_have_written
from mdfuse.errors import BackendError
from mdfuse.leaves.carrier import LocalCarrier
from mdfuse.leaves.leaf_run import LeafRun
from mdfuse.leaves.meeting import Rounds
from mdfuse.runtime.watch.plan_position import wrote


@dataclass
class Breaking(LocalCarrier):
    """Loses a rank before one of the communications."""

    left: int = 0

    def carry(self, rounds: Sequence[tuple[int, Rounds]]) -> None:
        if self.left == 0:
            raise BackendError("a rank is gone")
        self.left -= 1
        super().carry(rounds)


def step(mesh: DeviceMesh, placement: mf.Placement) -> LeafProgram:
    """Updates of two weights, each of which takes a sum over rows."""
    rows, layout = {"dp": Shard(0)}, {"dp": placement}
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([12, 5], mesh=mesh, layout=rows)
        v = fd.define_tensor([5], name="v", mesh=mesh, layout=layout)
        w = fd.define_tensor([5], name="w", mesh=mesh, layout=layout)
        new = v + fd.ops.set(x.sum(0)).on(mesh, layout)
        fd.add_output(new, reuse=v)
        dw = (x * fd.ops.set(new).on(mesh, {})).sum(0)
        fd.add_output(w - fd.ops.set(dw).on(mesh, layout), reuse=w)
    program = mf.compile(fd, mf.Options(same_bits=True))
    assert isinstance(program, LeafProgram)
    return program


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
def test_a_state_is_half_written_where_something_says_so(
    ranks: int, placement: mf.Placement
) -> None:
    """12 rows on 3 and 7 ranks are gathered; a state that counts as whole is as it was."""
    mesh = DeviceMesh.arange(dp=ranks)
    program = step(mesh, placement)
    wholes = [drawn(12, 5), drawn(5, seed=1), drawn(5, seed=2)]

    def inputs() -> dict[int, list[Tensor]]:
        layouts = [program.fusion.layout(n) for n in program.fusion.inputs]
        pairs = [*zip(wholes, layouts, strict=True)]
        return {r: [mf.shard_tensor(x, y, rank=r).clone() for x, y in pairs] for r in mesh}

    def broken(given: dict[int, list[Tensor]], left: int) -> BackendError | None:
        run = LeafRun(program.code, mesh.ranks, Breaking(left=left), torch.device("cpu"))
        try:
            run.run(given)
        except BackendError as error:
            return error
        return None

    seen: set[frozenset[str]] = set()
    left, given = 0, inputs()
    while (error := broken(given, left)) is not None:
        seen.add(written := wrote(error) or frozenset())
        for rank, before in inputs().items():
            for n, name in enumerate(program.fusion.inputs):
                assert torch.equal(given[rank][n], before[n]) or name in written, (left, rank)
                assert may_have_written({name: given[rank][n]}, error) == (name in written)
        left, given = left + 1, inputs()
    assert frozenset() in seen and frozenset({"v"}) in seen, seen
