"""Compiled launches on real ranks: those of one host compile each function once between them."""

from __future__ import annotations

import pytest
import torch
from helpers.stand_in_compiler import StandIn

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.frontend.cache import FusionCache
from mdfuse.plan import compilation

#: How many units of `layers` differ.
UNITS = 3


def layers(mesh: DeviceMesh, depth: int) -> mf.FusionDefinition:
    with mf.FusionDefinition("layers") as fd:
        x = fd.define_tensor([4, 8], mesh=mesh, layout={})
        up = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(1)})
        down = fd.define_tensor([6, 8], mesh=mesh, layout={"tp": Shard(0)})
        for _ in range(depth):
            h = (x.sin() * 0.5 + 1.0) @ up
            y = (h.exp() * 0.1) @ down
            x = fd.ops.set(y).on(mesh, {}) * 0.5 + x
        fd.add_output(x.cos() * 2.0)
    return fd


@pytest.mark.world(2)
def test_ranks_compile_each_function_once(comm: mf.Communicator, compiler: StandIn) -> None:
    draw = torch.Generator().manual_seed(3)
    x, up, down = (torch.randn(s, generator=draw) for s in ([4, 8], [8, 6], [6, 8]))
    want = x
    for _ in range(3):
        want = ((want.sin() * 0.5 + 1) @ up).exp() * 0.1 @ down * 0.5 + want
    want = want.cos() * 2
    columns, rows = up.chunk(2, 1)[comm.rank], down.chunk(2, 0)[comm.rank]
    given = [t.to(comm.device, copy=True) for t in (x, columns.contiguous(), rows)]
    # in one form, whose functions are counted
    mesh, options = DeviceMesh.arange(tp=2), Options(compile="always", overlap="never")
    for _ in range(2):  # the second time from files
        compilation._MADE.empty()
        FusionCache.reset()
        program = mf.compile(layers(mesh, 3), options=options)
        for _ in range(3):
            (got,) = program.run(*given)
            torch.testing.assert_close(got.cpu(), want)
        tally = program._usual.fuser.tally
        assert not tally.unsaved and not tally.unreadable and not program._usual.fuser.refused
    assert tally.compiled == 0
    comm.all_ok(None)  # all have counted
    began = compiler.began
    assert len({*began}) == 2, "both ranks compile"
    # what is compiled for a GPU names it; ranks may share one
    copies = 2 if torch.cuda.device_count() > 1 and comm.device.type == "cuda" else 1
    assert len(began) == copies * tally.in_files and tally.in_files >= UNITS


@pytest.mark.gpu
@pytest.mark.world(2)
def test_padded_products_are_posted_whole(comm: mf.Communicator) -> None:
    """Where products are padded, as the compiler does where that is faster, rows lie apart."""
    from torch._inductor import config

    draw = torch.Generator().manual_seed(4)
    x, up, down = (torch.randn(s, generator=draw).double() for s in ([4, 8], [8, 6], [6, 6]))
    want = ((x.sin() * 0.5 + 1) @ up).exp() * 0.1 @ down
    parts = x, up.chunk(2, 1)[comm.rank], down.chunk(2, 0)[comm.rank]
    given = [t.float().contiguous().to(comm.device) for t in parts]
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("odd") as fd:
        a = fd.define_tensor([4, 8], mesh=mesh, layout={})
        b = fd.define_tensor([8, 6], mesh=mesh, layout={"tp": Shard(1)})
        c = fd.define_tensor([6, 6], mesh=mesh, layout={"tp": Shard(0)})
        y = (((a.sin() * 0.5 + 1.0) @ b).exp() * 0.1) @ c
        fd.add_output(fd.ops.set(y).on(mesh, {}))
    with config.patch(force_shape_pad=True):
        program = mf.compile(fd, options=Options(compile="always", overlap="never"))
        for _ in range(3):
            (got,) = program.run(*given)
            torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)
