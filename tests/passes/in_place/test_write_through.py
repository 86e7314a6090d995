"""A few elements of an input that are written through views: in place, with torch's values."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import sampling
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Shard

#: How c [8,4] gets the rows r [3,4] at p [3], of which two are one place: as torch spells it.
SPELLINGS: dict[str, Callable[..., Any]] = {
    "rows": lambda c, p, r: c.index_put((p,), r),
    "rows from the end": lambda c, p, r: c.index_put((p - 8,), r),
    "added": lambda c, p, r: c.index_put((p,), r, accumulate=True),
    "one row for all": lambda c, p, r: c.index_put((p,), r[0]),
    "two indices": lambda c, p, r: c.index_put((p[:, None], (p % 4)[None]), r[:, :3]),
    "flat": lambda c, p, r: c.view(32).index_put((p,), r[:, 0]).view(8, 4),
    "pages": lambda c, p, r: c.view(2, 4, 4).index_put((p // 4, p % 4), r).view(8, 4),
    "pages from the end": lambda c, p, r: (
        c.view(2, 4, 4).index_put((p // 4 - 2, p % 4 - 4), r).view(8, 4)),
    "pages as rows": lambda c, p, r: c.view(2, 16).view(8, 4).index_copy(0, p, r),
    "columns": lambda c, p, r: c.t().index_copy(1, p, r.t()).t(),
    "turned": lambda c, p, r: (
        c.view(2, 4, 4).permute(1, 0, 2).index_put((p % 4, p % 2), r).permute(1, 0, 2)
        .reshape(8, 4)),
    "in a row": lambda c, p, r: c.select_scatter(c[1].index_put((p % 4,), r[:, 0]), 0, 1),
    "in a slice": lambda c, p, r: c.slice_scatter(c[1:7].index_copy(0, p % 6, r), 0, 1, 7),
    "in each other": lambda c, p, r: c.slice_scatter(c[1:7:2].index_copy(0, p % 3, r), 0, 1, 7, 2),
    "in some columns": lambda c, p, r: (
        c.slice_scatter(c[:, 1:3].index_copy(0, p, r[:, :2]), 1, 1, 3)),
    "a slice": lambda c, p, r: c.slice_scatter(r, 0, 2, 5),
    "a slice in a slice": lambda c, p, r: (
        c.slice_scatter(c[1:7].slice_scatter(r, 0, 2, 5), 0, 1, 7)),
    "scattered": lambda c, p, r: c.scatter(0, p[:, None].expand(3, 4), r),
    "scattered few": lambda c, p, r: c.scatter(1, p[:, None] % 4, r[:, :1]),
    "scattered in a view": lambda c, p, r: (
        c.view(4, 8).scatter(1, p[:, None] % 8, r[:, :1]).view(8, 4)),
    "a dim more": lambda c, p, r: c.unsqueeze(0).index_copy(1, p, r[None]).squeeze(0),
    "split columns": lambda c, p, r: c.view(8, 2, 2).index_put((p, p % 2), r[:, :2]).view(8, 4),
    "twice": lambda c, p, r: c.index_copy(0, p, r).index_put((p,), r, accumulate=True),
    "nothing": lambda c, p, r: c.index_put((p[:0],), r[:0]),
}  # fmt: skip

MESHES: list[tuple[Any, Any]] = [
    ({"tp": 1}, {}), ({"tp": 2}, {"tp": Shard(0)}), ({"tp": 3}, {"tp": Shard(0)}),
    ({"tp": 2}, {"tp": Shard(1)}), ({"a": 2, "b": 2}, {"a": Shard(0), "b": Shard(1)}),
]  # fmt: skip


def _written(name: str, axes: Any, layout: Any, dtype: torch.dtype, is_read: bool) -> str:
    """Compare with torch; return the text of the program."""
    mesh, f = DeviceMesh.arange(**axes), SPELLINGS[name]
    with FusionDefinition("write") as fd:
        c = fd.define_tensor([8, 4], dtype, mesh, layout, name="c")
        p = fd.define_tensor([3], torch.int64, mesh, name="p")
        r = fd.define_tensor([3, 4], dtype, mesh, name="r")
        new = f(c, p, r)
        fd.add_output((new * 2).sum(1))
        fd.add_output(new, reuse=c)
        if is_read:
            fd.add_output(c * 3)
    program = mf.compile(fd)
    x, at, rows = torch.randn(8, 4).to(dtype), torch.tensor([5, 1, 5]), torch.randn(3, 4).to(dtype)
    wanted = f(x.clone(), at, rows)
    total, made, *old = mf.simulate(program, [x.clone(), at, rows]).outputs
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(total, (wanted * 2).sum(1))
    assert not is_read or torch.equal(old[0], x * 3)
    assert mf.hir.parse(str(program)) == program.host
    return str(program)


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_writes_in_place_unless_the_old_value_is_read_later(name: str) -> None:
    """Wherever the rows lie; then it is a copy, and the program says why."""
    drawn = random.Random(name)
    for axes, layout in MESHES if sampling.is_whole() else drawn.sample(MESHES, 2):
        dtype = drawn.choice((torch.float64, torch.bfloat16))
        text = _written(name, axes, layout, dtype, is_read=False)
        assert ".new" not in text and "%c = set" not in text, text
        assert name == "nothing" or "%c = " in text
    assert ".new" in _written(name, axes, layout, dtype, is_read=True) or name == "nothing"


def test_what_is_read_later_and_what_a_write_touches_is_said() -> None:
    mesh = DeviceMesh.arange(tp=2)
    for is_read in (False, True):
        with FusionDefinition("said") as fd:
            c = fd.define_tensor([8, 4], mesh=mesh, layout={"tp": Shard(1)}, name="c")
            p = fd.define_tensor([3], torch.int64, mesh, name="p")
            fd.add_output(c.index_put((p,), fd.define_tensor([3, 4], mesh=mesh)), reuse=c)
            if is_read:
                fd.add_output(c * 3)
        program = mf.compile(fd)
        assert f"writes {128 if is_read else 48} bytes" in str(program)
        assert ("reads the old %c later" in program.explain()) == is_read
        assert ("copies 128 bytes into %c" in program.explain()) == is_read


@pytest.mark.parametrize("wrong", [8, -9])
@pytest.mark.parametrize("layout", [{}, {"tp": Shard(0)}])
@pytest.mark.parametrize("name", ["rows", "flat", "pages", "in a slice"])
def test_an_index_that_is_nowhere_is_an_error(name: str, layout: Any, wrong: int) -> None:
    """In a view as well, where another row of the whole would be at that place."""
    forms: dict[str, Callable[..., Any]] = {
        "rows": SPELLINGS["rows"],
        "flat": lambda c, p, r: c.view(32).index_put((p * 4,), r[:, 0]).view(8, 4),
        "pages": lambda c, p, r: c.view(8, 2, 2).index_put((p % 8, p), r[:, :2]).view(8, 4),
        "in a slice": lambda c, p, r: c.slice_scatter(c[:7].index_copy(0, p, r), 0, 0, 7),
    }
    with FusionDefinition("wrong") as fd:
        mesh = DeviceMesh.arange(tp=2)
        c = fd.define_tensor([8, 4], mesh=mesh, layout=layout, name="c")
        p = fd.define_tensor([3], torch.int64, mesh, name="p")
        fd.add_output(forms[name](c, p, fd.define_tensor([3, 4], mesh=mesh)), reuse=c)
    given = [torch.zeros(8, 4), torch.tensor([1, wrong, 2]), torch.ones(3, 4)]
    program = mf.compile(fd)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        mf.simulate(program, given)


# -- buffers of modules --------------------------------------------------------------------------


def _batch_and_place(s: Any, n: Tensor, at: Tensor) -> None:
    s.k[torch.arange(2), :, at.expand(2)] = n[:, :, 0]


def _places(s: Any, n: Tensor, at: Tensor) -> None:
    s.k[:, :, at] = n


def _pages(s: Any, n: Tensor, at: Tensor) -> None:
    s.k.view(4, 12, 3)[at % 4, at] = n[0, 0]


#: How a module writes n [2,2,1,3] into its buffer k [2,2,12,3] at the place `at`.
IN_MODULES: dict[str, Callable[..., Any]] = {
    "index_copy_": lambda s, n, at: s.k.index_copy_(2, at, n),
    "set": _places,
    "set by two": _batch_and_place,
    "set in a view": _pages,
    "of some": lambda s, n, at: s.k[:1].index_copy_(2, at, n[:1]),
    "of one": lambda s, n, at: s.k[1].index_copy_(1, at, n[1]),
    "copy_": lambda s, n, at: s.k.narrow(2, 1, 1).copy_(n),
    "add_": lambda s, n, at: s.k[:, 1].narrow(1, 1, 1).add_(n[:, 1]),
    "turned": lambda s, n, at: s.k.transpose(1, 2).index_copy_(1, at, n.transpose(1, 2)),
    "scatter_": lambda s, n, at: s.k.scatter_(2, at.view(1, 1, 1, 1).expand(2, 2, 1, 3), n),
    "accumulate": lambda s, n, at: s.k.view(-1, 3).index_put_((at,), n[0, 0], accumulate=True),
    "twice": lambda s, n, at: (s.k.index_copy_(2, at, n), s.k.index_copy_(2, at + 1, 2 * n)),
}


class _Caching(nn.Module):
    def __init__(self, write: Callable[..., Any]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("k", torch.randn(2, 2, 12, 3))

    def forward(self, q: Tensor, n: Tensor, at: Tensor) -> Tensor:
        self.write(self, n, at)
        return q @ self.k.mT


@pytest.mark.parametrize("name", IN_MODULES)
def test_buffers_of_modules_are_written_in_place(name: str) -> None:
    module, split = _Caching(IN_MODULES[name]), random.Random(name).choice((1, 2))
    for layout in ({}, {"tp": Shard(split)}):
        given = (torch.randn(2, 2, 1, 3), torch.randn(2, 2, 1, 3), torch.tensor([7]))
        torch_module = copy.deepcopy(module)
        model = mf.from_torch(module, given, mesh=DeviceMesh.arange(tp=2), layouts={"k": layout})
        program = model.compile()
        assert ".new" not in str(program) and "%k = set" not in str(program)
        cache, result = mf.simulate(program, [module.k.clone(), *given]).outputs
        torch.testing.assert_close(result, torch_module(*given))
        torch.testing.assert_close(cache, torch_module.k)


@pytest.mark.parametrize("rows", [{}, {"tp": Shard(0)}, {"tp": Shard(1)}], ids=str)
@pytest.mark.parametrize(("n", "start", "stop"), [(5, 2, 5), (4, 1, 4), (7, 1, 7), (3, 0, 2)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slice_of_most_rows(ranks: int, n: int, start: int, stop: int, rows: Any) -> None:
    """Each rank takes its own rows of a slice that it has as a whole."""
    mesh, x, r = DeviceMesh.arange(tp=ranks), torch.randn(n, 4), torch.randn(stop - start, 4)
    with FusionDefinition("most") as fd:
        given = fd.define_tensor([n, 4], torch.float32, mesh, {"tp": Shard(0)})
        written = fd.define_tensor([stop - start, 4], torch.float32, mesh, rows)
        fd.add_output(given.slice_scatter(written, 0, start, stop))
    (y,) = mf.simulate(mf.compile(fd, mf.Options(poison=True)), [x, r]).outputs
    assert torch.equal(y, x.slice_scatter(r, 0, start, stop))
