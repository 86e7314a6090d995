"""One rank compiles while the others wait for it: nothing hangs, on GPUs that ranks share, too.

On one GPU, where Inductor compiles:
CUDA_VISIBLE_DEVICES=0 MDFUSE_BACKEND=symmetric ./launch/torchrun 2 -m pytest \\
    tests/multidevice/test_compiling_ranks.py
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from helpers.stand_in_compiler import Compiled

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.plan import compilation, inductor
from mdfuse.plan.tensor_meta import form_of

#: For how long one rank compiles each function. Others poll, yield and sleep long before.
DELAY_S = 1.5


def layers(mesh: DeviceMesh) -> mf.FusionDefinition:
    """Two products with an all-reduce behind each, so that ranks need each other at once."""
    with mf.FusionDefinition("layers") as fd:
        x = fd.define_tensor([4, 8], mesh=mesh, layout={})
        up = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(1)})
        down = fd.define_tensor([6, 8], mesh=mesh, layout={"tp": Shard(0)})
        for _ in range(2):
            y = ((x.sin() * 0.5 + 1.0) @ up).exp() @ down
            x = fd.ops.set(y).on(mesh, {}) * 0.5 + x.cos()
        fd.add_output(x)
    return fd


def delayed(rank: int, here: mf.Communicator) -> Any:
    """What compiles: on GPUs Inductor, on CPUs a stand-in; on one rank only after a while."""
    own = inductor.compiled

    def compiled(found: inductor.TracedGraph) -> Any:
        if here.rank == rank:
            time.sleep(DELAY_S)
        if here.device.type == "cuda":
            return own(found)
        return Compiled(found.graph, [form_of(x) for x in found.arguments], found.results)

    return compiled


@pytest.mark.world(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_others_wait_for_one_that_compiles(
    comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Each rank compiles for itself: the others are in a communication meanwhile."""
    _wait_for_one(comm, monkeypatch, rank)


@pytest.mark.world(2)
@pytest.mark.backend("symmetric")
@pytest.mark.parametrize("rank", [0, 1])
def test_others_wait_on_symmetric(
    comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Words in shared memory say nothing for that long; on GPUs streams stand still."""
    _wait_for_one(comm, monkeypatch, rank)


def _wait_for_one(comm: mf.Communicator, patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(inductor, "compiled", delayed(rank, comm))
    patch.setattr(inductor, "folder", lambda: None)
    compilation._MADE.empty()
    draw = torch.Generator().manual_seed(5)
    x, up, down = (torch.randn(s, generator=draw) for s in ([4, 8], [8, 6], [6, 8]))
    up, down = up / 4, down / 4  # else `exp` makes thousands, whose sine is that of their rounding
    want = x
    for _ in range(2):
        want = ((want.sin() * 0.5 + 1) @ up).exp() @ down * 0.5 + want.cos()
    mine = up.chunk(2, 1)[comm.rank].contiguous(), down.chunk(2, 0)[comm.rank].contiguous()
    options = Options(compile="always", overlap="never")  # each run runs the same functions
    program = mf.compile(layers(DeviceMesh.arange(tp=2)), options)
    given = [t.to(comm.device) for t in (x, *mine)]
    start = time.monotonic()
    for n in range(4):  # on GPUs the second run captures
        (got,) = program.run(*given)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
        if n == 0:
            assert time.monotonic() - start >= DELAY_S, "it has waited for the one that compiles"
    tally = program._usual.fuser.tally
    assert tally.compiled and not tally.in_files and not program._usual.fuser.refused
    compilation._MADE.empty()
