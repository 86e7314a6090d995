"""Places of a dim put in place of others: what is written, and what is not even read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Shard
from mdfuse.ir.ops import TABLE

ROOM, ROW = 64, 8


class _Touched(TorchDispatchMode):
    """Notes how many elements the tensors have that operations read and make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor))
        self.sizes += [(function.overloadpacket.__name__, x.numel()) for x in tensors]
        return made


def test_a_write_into_a_cache_touches_its_rows_alone() -> None:
    """A split dim works, too: ranks that lack the place look at one row of theirs, and keep it."""
    cache = torch.randn(2, ROOM, ROW)
    for part in (None, (0, ROOM, 2 * ROOM), (ROOM, 2 * ROOM, 2 * ROOM)):
        kept, at, rows = cache.clone(), torch.tensor([5]), torch.randn(2, 1, ROW)
        with _Touched() as touched:
            TABLE["index_copy"].writes.form(at, rows, kept, along=1, part=part, out=kept)
        large = {name for name, size in touched.sizes if size > rows.numel()}
        assert large <= {"index_copy_", "index_select"}  # which take rows of the whole
        made = [size for name, size in touched.sizes if name == "index_select"]
        assert made.count(cache.numel()) <= 1
        wanted = cache.index_copy(1, at, rows) if part is None or not part[0] else cache
        assert torch.equal(kept, wanted)


def test_a_program_writes_into_the_buffer_that_its_output_reuses() -> None:
    """One instruction for each cache, and what reads it reads what was written."""
    shape, mesh = [2, ROOM, ROW], DeviceMesh.arange(tp=2, sp=2)
    where = {"tp": Shard(0), "sp": Shard(1)}
    with FusionDefinition("decode") as fd:
        cache = fd.define_tensor(shape, mesh=mesh, layout=where, name="cache")
        at = fd.define_tensor([1], torch.int64, mesh, name="at")
        rows = fd.define_tensor([2, 1, ROW], mesh=mesh, layout={"tp": Shard(0)}, name="rows")
        new = cache.index_copy(1, at, rows)
        fd.add_output(new, reuse=cache)
        fd.add_output(new.sum(1))
        fd.add_output(at + 1, reuse=at)
    program = mf.compile(fd)
    (write,) = (line for line in str(program).splitlines() if "index_copy" in line)
    assert "%cache = index_copy(%at, %rows, %cache, along=1)" in write
    assert mf.hir.parse(str(program.host)) == program.host
    held, place, wanted = torch.zeros(shape), torch.tensor([ROOM // 2 - 1]), torch.zeros(shape)
    for _ in range(2):  # on the last row of one rank, and on the first of the next
        step = torch.randn(2, 1, ROW)
        wanted[:, int(place)] = step[:, 0]
        held, total, place = mf.simulate(program, [held, place, step]).outputs
        assert torch.equal(held, wanted)
        torch.testing.assert_close(total, wanted.sum(1))


def test_of_equal_places_the_last_one_counts_on_the_rank_that_has_them() -> None:
    """Places elsewhere write nothing, wherever they stand between those that are here."""
    x, at = torch.zeros(12, 2), torch.tensor([7, 3, 11, 7, 0, 3])
    rows = torch.arange(12.0).view(6, 2)
    wanted = x.clone()
    for place, row in zip(at.tolist(), rows, strict=True):
        wanted[place] = row
    call = TABLE["index_copy"].call
    parts = [call(at, rows, x[a : a + 4], along=0, part=(a, a + 4, 12)) for a in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), wanted)
    assert torch.equal(call(at, rows, x, along=0), wanted)


def test_gradients_go_to_what_stays_and_to_what_is_written_last() -> None:
    x, rows = (torch.randn(s, dtype=torch.float64) for s in ((6, 3), (4, 3)))
    at, ct = torch.tensor([2, 5, 2, 0]), torch.randn(6, 3, dtype=torch.float64)
    for where in ({}, {"tp": Shard(0)}, {"tp": Shard(1)}):
        mesh = DeviceMesh.arange(tp=2)
        with FusionDefinition("back") as fd:
            hx, hr, hc = (fd.define_tensor(t.shape, t.dtype, mesh, where) for t in (x, rows, ct))
            hi = fd.define_tensor([4], torch.int64, mesh)
            y = hx.index_copy(0, hi, hr)
            for made in mf.grad((y * hc).sum(), [hx, hr]):
                fd.add_output(made)
        dx, dr = ct.clone(), ct[at]
        dx[[0, 2, 5]], dr[0] = 0, 0
        found = mf.simulate(mf.compile(fd), [x, rows, ct, at]).outputs
        torch.testing.assert_close(found, [dx, dr])
