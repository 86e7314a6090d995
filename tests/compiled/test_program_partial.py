"""Each option beside outputs that are declared Partial, of which ranks keep terms."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Partial, Shard

LINE, GRID = DeviceMesh.arange(tp=2), DeviceMesh.arange(dp=2, tp=2)
FAR = DeviceMesh([4, 5, 6], axes=("x",))
PAYS = str(Path(helpers.__file__).parent / "pays.json")

#: A value of every option that differs from the default, but for those that name what is elsewhere:
#: simulated ranks have one backend, no timeouts, and no files.
VALUES: dict[str, tuple[Any, ...]] = {
    "backend": (), "timeout_s": (), "reports": (), "trace": (), "fast_lane": ("never",),
    "streams": (1, 2), "stream_policy": ("round_robin", "copy_compute"), "graph": ("never",),
    "compile": ("never",), "verify": (False,), "poison": (True,), "check_indices": (True,),
    "reduce_dtype": (torch.float32, torch.float64), "bucket_bytes": (0, 1, 1 << 20),
    "prefetch_bytes": (0, 64, 1 << 20), "logits_bytes": (0, 64),
    "overlap": ("never", "auto", "measure"),
    "costs": ("unit", "h100", PAYS), "plans": (1,), "ranges": ("torch",), "sizes": (),
    "context": ("auto", "gather", "heads", "ring"), "counts": ("device",), "sums": ("apart",),
    "same_bits": (),  # which has no Partial outputs
}  # fmt: skip

#: Each value alone, and many of them together, which meet in one program.
EACH = [{name: value} for name, values in VALUES.items() for value in values] + [
    {"overlap": way, "costs": PAYS, "bucket_bytes": 1 << 20, "prefetch_bytes": room,
     "reduce_dtype": wide, "streams": 2}
    for way in ("auto", "measure") for room in (0, 1 << 20) for wide in (None, torch.float64)
]  # fmt: skip


def test_every_option_is_among_them() -> None:
    assert VALUES.keys() == {f.name for f in dataclasses.fields(Options)}


def sums(dtype: torch.dtype, mesh: DeviceMesh, rows: int) -> mf.FusionDefinition:
    """A row-parallel product that stays in terms along tp, and what is computed of it."""
    split = {"dp": Shard(0)} if "dp" in mesh.axes else {}
    kept = {"tp": Partial("sum")}
    with mf.FusionDefinition("sums") as fd:
        x = fd.define_tensor([rows, 6], dtype, mesh=mesh, layout={**split, "tp": Shard(1)})
        w = fd.define_tensor([5, 6], dtype, mesh=mesh, layout={**split, "tp": Shard(1)})
        y = mf.ops.linear(x, w).on(mesh, {**split, **kept})
        whole = fd.ops.set(y).on(mesh, split)
        fd.add_output(y)
        fd.add_output(whole.relu())
        fd.add_output(fd.ops.set((whole * x.sum()).sum(0)).on(mesh, kept))
        fd.add_output(fd.ops.set((x * x).sum()).on(mesh, kept))  # along dp it is reduced
        for g in mf.grad((whole * whole).sum(), [x, w]):
            fd.add_output(fd.ops.set(g).on(mesh, {axis: Partial("sum") for axis in mesh.axes}))
        fd.add_output(fd.ops.set(whole).on(FAR, {"x": Partial("sum")}))
    return fd


def of_torch(x: Tensor, w: Tensor) -> list[Tensor]:
    x, w = (t.double().requires_grad_() for t in (x, w))
    y = x @ w.T
    grads = torch.autograd.grad((y * y).sum(), [x, w])
    found = [y, y.relu(), (y * x.sum()).sum(0), (x * x).sum(), *grads, y]
    return [t.detach() for t in found]


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
@pytest.mark.parametrize("given", EACH, ids=str)
def test_terms_add_up(mesh: DeviceMesh, given: dict[str, Any]) -> None:
    options = Options(**given)
    for dtype, rows in ((torch.float64, 3), (torch.float16, 4), (torch.bfloat16, 1)):
        generator = torch.Generator().manual_seed(0)
        shapes = (rows, 6), (5, 6)
        inputs = [torch.randint(-1, 2, s, generator=generator).to(dtype) for s in shapes]
        program = mf.compile(sums(dtype, mesh, rows), options)
        outputs = mf.simulate(program, inputs, options=options).outputs
        for got, want in zip(outputs, of_torch(*inputs), strict=True):
            assert torch.equal(got.double(), want)


@pytest.mark.parametrize("op", ["max", "avg"])
@pytest.mark.parametrize("given", EACH, ids=str)
def test_other_ops_join_what_ranks_hold(op: Any, given: dict[str, Any]) -> None:
    options = Options(**given)
    with mf.FusionDefinition("others") as fd:
        x = fd.define_tensor([4, 6], torch.float16, mesh=GRID, layout={"dp": Shard(0)})
        w = fd.define_tensor([5, 6], torch.float16, mesh=GRID, layout={"tp": Shard(0)})
        y = mf.ops.linear(x, w)
        fd.add_output(fd.ops.set(y).on(GRID, {"tp": Partial(op)}))
        fd.add_output(fd.ops.set(y.sum(0)).on(GRID, {"tp": Partial(op)}))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(-2, 3, s, generator=generator).half() for s in ((4, 6), (5, 6))]
    outputs = mf.simulate(mf.compile(fd, options), inputs, options=options).outputs
    whole = inputs[0] @ inputs[1].T
    assert torch.equal(outputs[0], whole) and torch.equal(outputs[1], whole.sum(0))
