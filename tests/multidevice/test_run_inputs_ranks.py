"""Tensors whose memory does not hold their elements, and what cannot be written, on real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

WORLD = DeviceMesh.arange(x=2)

LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": lambda x: torch._neg_view(x),
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "imaginary": lambda x: torch.complex(x, -x).conj().imag,
    "zero": lambda x: torch._efficientzerotensor(x.shape, device=x.device),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", ["allgather", "alltoall", "allreduce"])
@pytest.mark.parametrize("what", LAZY)
def test_elements_that_are_computed_when_read_are_sent(
    what: str, kind: str, comm: mf.Communicator
) -> None:
    """From the first run on, from later ones, and on one rank alone."""
    dtype = torch.complex64 if what == "conjugate" else torch.float32
    before, after = {
        "allgather": ({"x": Shard(0)}, {}),
        "alltoall": ({"x": Shard(0)}, {"x": Shard(1)}),
        "allreduce": ({"x": mf.Partial()}, {}),
    }[kind]
    with mf.FusionDefinition(f"{kind}_{what}") as fd:
        x = fd.define_tensor([4, 4], dtype, WORLD, before)
        fd.add_output(fd.ops.set(x).on(WORLD, after))
    program = mf.compile(fd)
    shape = (4, 4) if kind == "allreduce" else (2, 4)
    parts = [
        torch.arange(16.0)[: 16 if kind == "allreduce" else 8].view(shape) + 8 * r for r in (0, 1)
    ]
    for is_lazy in ((True, True), (False, False), (True, True), (False, True)):
        given = [
            LAZY[what](p) if lazy else p.to(dtype) for p, lazy in zip(parts, is_lazy, strict=True)
        ]
        plain = [g.clone().resolve_neg().resolve_conj() for g in given]
        want = plain[0] + plain[1] if kind == "allreduce" else torch.cat(plain)
        if kind == "alltoall":
            want = want.chunk(2, dim=1)[comm.rank]
        mine = parts[comm.rank].to(comm.device)
        (got,) = program.run(LAZY[what](mine) if is_lazy[comm.rank] else mine.to(dtype))
        assert torch.equal(got.cpu(), want)


@pytest.mark.world(2)
def test_what_cannot_be_written_is_refused_by_all(comm: mf.Communicator) -> None:
    """Before anything is posted: the communicator goes on."""
    with mf.FusionDefinition("updated") as fd:
        w = fd.define_tensor([4, 4], mesh=WORLD, layout={"x": Shard(0)})
        g = fd.define_tensor([4, 4], mesh=WORLD, layout={"x": Shard(1)})
        fd.add_output(w - fd.ops.set(g).on(WORLD, {"x": Shard(0)}), reuse=w)
    program = mf.compile(fd)
    w, g = torch.ones(2, 4, device=comm.device), torch.ones(4, 2, device=comm.device)
    with pytest.raises(
        mf.ProgramError, match=r"rank 1(.|\n)*share memory|share memory(.|\n)*rank 1"
    ):
        program.run(w[:1].expand(2, 4) if comm.rank == 1 else w, g)
    for _ in range(2):
        program.run(w, g)
        with pytest.raises(mf.ProgramError, match="share memory"):
            program.run(w[:1].expand(2, 4), g)
    assert torch.equal(w.cpu(), torch.full((2, 4), -1.0))
