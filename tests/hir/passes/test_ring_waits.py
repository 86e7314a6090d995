"""Rings that send shards in pieces have as much under way as those that send them whole."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import POISON

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream, hir, simulate
from mdfuse.hir.passes import own_products, ring_waits
from mdfuse.hir.program import HostProgram
from mdfuse.hir.unroll import write
from mdfuse.hir.verify.flow import Flow
from mdfuse.hir.verify.types import check_types


def ring(kind: str, pieces: int, dtype: torch.dtype = torch.bfloat16) -> mf.Program:
    """A product beside a gather or a scatter of four ranks."""
    mesh, stream = DeviceMesh.arange(tp=4), Stream(0, 4 * pieces, rotate="tp")
    with mf.FusionDefinition("ring") as fd:
        if kind == "gather":
            x = fd.define_tensor([48, 6], dtype, mesh, {"tp": Shard(0)})
            w = fd.define_tensor([6, 8], dtype, mesh, {"tp": Shard(1)})
            x = fd.ops.set(x * 2.0).on(mesh, {}, stream=stream)
            fd.add_output((x @ w).on(mesh, {"tp": Shard(1)}, stream=stream))
        else:
            x = fd.define_tensor([48, 8], dtype, mesh, {"tp": Shard(1)})
            w = fd.define_tensor([8, 6], dtype, mesh, {"tp": Shard(0)})
            fd.add_output((x @ w).on(mesh, {"tp": Shard(0)}, stream=stream))
    return mf.compile(fd, mf.Options(compile="never", backend="symmetric"))


def under_way(program: HostProgram) -> int:
    """The greatest number of pieces that are sent and not waited for."""
    found = most = 0
    for i in program.instructions:
        if i.op == "send":
            found += 1
        elif i.op == "wait" and i.reads[0].startswith("c0"):
            found -= 1
        most = max(most, found)
    return most


@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_two_shards_are_under_way(kind: str, pieces: int) -> None:
    program = ring(kind, pieces)
    for rank in range(4):
        before = own_products.run(program.for_rank(rank).written_out)
        after = ring_waits.run(before)
        assert after == program.for_rank(rank).as_run
        assert (under_way(before), under_way(after)) == (2, 2 * pieces)
        kept = [i for i in after.instructions if i.op not in ("wait", "free")]
        assert kept == [i for i in before.instructions if i.op not in ("wait", "free")]
        check_types(after)
        Flow(after, has_frees=True).run()


@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, w = (torch.randn(48, 6), torch.randn(6, 8))
    x, w = (x, w) if kind == "gather" else (x @ w, w.T.contiguous())
    x, w = x.to(dtype), w.to(dtype)
    program = ring(kind, 3, dtype)
    (got,) = simulate(program, [x, w], options=POISON).outputs
    right = (x.double() * 2 if kind == "gather" else x.double()) @ w.double()
    off = 2**-7 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), right, rtol=off, atol=off * 8)
    for rank in range(4):
        Flow(program.for_rank(rank).as_run, has_frees=True).run()


def test_what_is_written_meanwhile_is_waited_for_before() -> None:
    """A buffer that each iteration fills anew is sent before it is filled again."""
    program = hir.parse(
        """host @busy on mesh(tp=2) {
  input %x: f32[4] of [8] (tp=S0)
  %caller = get_stream
  %y: f32[4] of [8] (tp=S0) = alloc
  %s: f32[4] of [8] (tp=S0) = alloc
  %z: f32[4] of [8] (tp=S0) = alloc
  set_stream 0
  sync %caller
  for %i in 0..4 {
    %s = mul(%x, 2.0)
    group_start
    %c0 = send(%s, to=(coord(tp) + (%i // 2)) mod 2, axis=tp)
    %c1 = recv(%y, from=(coord(tp) - (%i // 2)) mod 2, axis=tp)
    group_end
    wait %c0
    wait %c1
  }
  %z = mul(%y, 1.0)
  set_stream %caller
  sync 0
  return %z
}
"""
    )
    for rank in range(2):
        alone = write(program.project(rank))
        assert ring_waits.run(alone) is alone
