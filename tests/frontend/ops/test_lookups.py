"""Lookups and writes by tensors of indices: what ranks send for them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layout_claims import Claim, check

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, FusionDefinition, IndexRangeError, Shard

T = (10, 7)  # over three ranks: 4, 4 and 2 rows

CLAIMS: dict[str, Claim] = {
    # the rows that are looked up are joined; the table stays where it is
    "rows of a split table": Claim(
        [(T, 0), ((4,), None, 10)], lambda x, i: x.index_select(0, i), [("Allreduce", (4, 7))]),
    "rows, split again": Claim(
        [(T, 0), ((6,), None, 10)], lambda x, i: x[i - 10], [("ReduceScatter", (6, 7))], 0),
    "columns of split rows": Claim([(T, 1), ((4,), None, 10)], lambda x, i: x[i], []),
    "by split indices": Claim([(T, None), ((4, 2), 0, 10)], lambda x, i: x[i], []),
    "of bools": Claim(
        [(T, 0, True), ((4,), None, 10)], lambda x, i: x.index_select(0, i),
        [("Allreduce", (4, 7))]),
    "by two": Claim(
        [((9, 7, 5), 2), ((4,), None, 9), ((4,), None, 7)], lambda x, i, j: x[i, j], []),
    "gather along the split dim": Claim(
        [(T, 0), ((3, 7), None, 10)], lambda x, i: x.gather(0, i), [("Allreduce", (3, 7))]),
    "gather beside it": Claim([(T, 1), ((3, 7), 1, 10)], lambda x, i: x.gather(0, i), []),
    # what is written comes whole to each, or the table is made in parts that are joined
    "added to a split table": Claim(
        [(T, 0), ((4, 7), None, 10), ((4, 7), None)], lambda x, i, s: x.scatter_add(0, i, s), []),
    "added from split rows": Claim(
        [(T, None), ((4, 7), 0, 10), ((4, 7), 0)], lambda x, i, s: x.scatter_add(0, i, s),
        [("Allreduce", T)]),
    "the largest": Claim(
        [(T, 0), ((4, 7), None, 10), ((4, 7), None)],
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), []),
    "rows added": Claim(
        [(T, 0), ((4,), None, 10), ((4, 7), None)], lambda x, i, s: x.index_add(0, i, s), []),
    "rows added from split ones": Claim(
        [(T, None), ((4,), 0, 10), ((4, 7), 0)], lambda x, i, s: x.index_add(0, i, s),
        [("Allreduce", T)]),
    "rows in place": Claim(
        [(T, 0), ((1,), None, 10), ((1, 7), None)], lambda x, i, s: x.index_copy(0, i, s), []),
    "put": Claim(
        [(T, 0), ((1,), None, 10), ((1, 7), None)], lambda x, i, s: x.index_put((i,), s), []),
    "scattered beside the split dim": Claim(
        [(T, 1), ((1, 7), 1, 10), ((1, 7), 1)], lambda x, i, s: x.scatter(0, i, s), []),
    "scattered along it": Claim(
        [(T, 0), ((1, 7), None, 10), ((1, 7), None)], lambda x, i, s: x.scatter(0, i, s), []),
    "a slice written": Claim(
        [(T, 0), ((4, 7), None)], lambda x, s: x.slice_scatter(s, 0, 2, 6), []),
    "a bag": Claim(
        [((2, 3), None, 100), ((100, 5), 1)], lambda i, x: F.embedding_bag(i, x), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_sent(name: str) -> None:
    assert check(CLAIMS[name]) == CLAIMS[name].sends


def test_of_equal_indices_the_last_one_counts() -> None:
    """Wherever the rows that write lie, and whatever order their ranks write in."""
    x, i = torch.zeros(3, 2), torch.tensor([1, 0, 1, 1, 0, 1])
    s = torch.arange(12.0).view(6, 2)
    wanted = torch.tensor([[8.0, 9.0], [10.0, 11.0], [0.0, 0.0]])
    mesh = DeviceMesh.arange(tp=3)
    for where in ({}, {"tp": Shard(0)}):
        with FusionDefinition("last") as fd:
            hx = fd.define_tensor([3, 2], mesh=mesh, layout=where)
            hi = fd.define_tensor([6], torch.int64, mesh, where)
            hs = fd.define_tensor([6, 2], mesh=mesh, layout=where)
            fd.add_output(hx.index_copy(0, hi, hs))
            fd.add_output(hx.index_put((hi,), hs))
            fd.add_output(hx.scatter(0, hi[:, None].expand(6, 2), hs))
        for found in mf.simulate(mf.compile(fd), [x, i, s]).outputs:
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("wrong", [-1, 10])
@pytest.mark.parametrize("name", ["index_select", "gather"])
def test_indices_out_of_range_are_found_where_that_is_asked_for(name: str, wrong: int) -> None:
    mesh = DeviceMesh.arange(tp=2)
    with FusionDefinition("checked") as fd:
        x = fd.define_tensor([3, 10], mesh=mesh, layout={"tp": Shard(1)})
        i = fd.define_tensor([2] if name == "index_select" else [3, 2], torch.int64, mesh)
        fd.add_output(getattr(x, name)(1, i))
    given = torch.full(i.shape, 9)
    given.flatten()[-1] = wrong
    program, options = mf.compile(fd), mf.Options(check_indices=True)
    with pytest.raises(IndexRangeError, match=f"index {wrong}.*10 rows"):
        mf.simulate(program, [torch.ones(3, 10), given], options=options)


@pytest.mark.parametrize("wrong", [-1, 10])
@pytest.mark.parametrize("split", [{}, {"tp": Shard(0)}], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["scatter_add", "scatter", "index_add", "index_copy"])
def test_writes_out_of_range_are_found_where_that_is_asked_for(
    name: str, split: dict[str, Shard], wrong: int
) -> None:
    mesh = DeviceMesh.arange(tp=2)
    with FusionDefinition("checked") as fd:
        x = fd.define_tensor([10, 3], mesh=mesh, layout=split)
        s = fd.define_tensor([2, 3], mesh=mesh)
        i = fd.define_tensor([2, 3] if "scatter" in name else [2], torch.int64, mesh)
        fd.add_output(getattr(x, name)(0, i, s))
    given = torch.full(i.shape, 9)
    given.flatten()[-1] = wrong
    program, options = mf.compile(fd), mf.Options(check_indices=True)
    with pytest.raises(IndexRangeError, match=f"index {wrong}.*10 rows"):
        mf.simulate(program, [torch.ones(10, 3), torch.ones(2, 3), given], options=options)


#: what is typed with x: f32[5,4], i: i64[5], m: bool[5,4] -> words that the error has
WRONG: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "a mask": (lambda ops, x, i, m: x[m], ("[mask]", "where(mask, x, other)")),
    "a mask of rows": (lambda ops, x, i, m: x[m[:, 0]], ("[mask]",)),
    "floats": (lambda ops, x, i, m: x[x[0]], ("integers of 64 or 32 bits", "long()")),
    "too many": (lambda ops, x, i, m: x[i, i, i], ("[mask]",)),
    "index of two dims": (
        lambda ops, x, i, m: x.index_select(0, i[:, None]), ("the index is a vector",)),
    "gather by fewer dims": (lambda ops, x, i, m: x.gather(1, i), ("has the dims of x",)),
    "gather of more": (
        lambda ops, x, i, m: x[:2].gather(1, i[:, None]), ("no more places", "take_along_dim")),
    "take_along_dim": (lambda ops, x, i, m: x.take_along_dim(i, 0), ("same number of dims",)),
    "take_along_dim of rows that do not fit": (
        lambda ops, x, i, m: x[:2].take_along_dim(i[:, None], 1),
        ("dim 1", "2 is not 5", "expand one")),
    "other dtype": (
        lambda ops, x, i, m: x.scatter(0, i[:, None], i[:, None]), ("both have one dtype",)),
    "more indices than places": (
        lambda ops, x, i, m: x.scatter_add(1, i[:, None], x[:2]), ("no more places", "src")),
    "reduce": (
        lambda ops, x, i, m: x.scatter_reduce(0, i[:, None], x, "median"), ("'median'", "amax")),
    "reduce of bools": (
        lambda ops, x, i, m: m.scatter_add(0, i[:, None], m), ("of numbers",)),
    "a source of other rows": (
        lambda ops, x, i, m: x.index_add(0, i, x[:2]), ("a source of [5, 4]",)),
    "index_copy": (lambda ops, x, i, m: x.index_copy(1, i, x), ("a source of [5, 5]",)),
    "index_put of nothing": (lambda ops, x, i, m: x.index_put((), x), ("0 indices",)),
    "index_put of each where a mask holds": (
        lambda ops, x, i, m: x.index_put((m,), x[0]), ("all of them get the same", "where(mask")),
    "index_put of integers": (lambda ops, x, i, m: x.index_put((i,), i), ("x's dtype",)),
    "masked_scatter": (lambda ops, x, i, m: x.masked_scatter(i, x), ("a mask is made of bools",)),
    "slice_scatter": (
        lambda ops, x, i, m: x.slice_scatter(x, 0, 1, 3), ("that slice is [2, 4]",)),
    "select_scatter": (
        lambda ops, x, i, m: x.select_scatter(x[0], 0, 5), ("from -5 to 4", "slice_scatter")),
    "padding_idx": (
        lambda ops, x, i, m: F.embedding(i, x, padding_idx=5), ("one of its rows",)),
    "max_norm": (
        lambda ops, x, i, m: F.embedding(i, x, max_norm=1.0), ("max_norm=1.0", "renorm")),
    "bags by offsets": (
        lambda ops, x, i, m: F.embedding_bag(i, x, i), ("offsets", "of one size")),
    "bags of a vector": (lambda ops, x, i, m: F.embedding_bag(i, x), ("rows of a matrix",)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    typed, says = WRONG[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 4], name="x")
        i = fd.define_tensor([5], torch.int64, name="i")
        m = fd.define_tensor([5, 4], torch.bool, name="m")
        with pytest.raises(DefinitionError) as caught:
            typed(fd.ops, x, i, m)
    for words in (*says, "test_lookups.py:"):
        assert words in str(caught.value), caught.value


#: From a table [4,3] and a function that makes a tensor of indices: what looks them up.
KNOWN: dict[str, Any] = {
    "index_select": lambda x, i, t: torch.index_select(x, 0, t(i)),
    "gather": lambda x, i, t: torch.gather(x, 0, t([[n] * 3 for n in i])),
    "embedding": lambda x, i, t: torch.nn.functional.embedding(t(i), x),
    "index": lambda x, i, t: x[t(i)], "index of columns": lambda x, i, t: x[:, t(i)],
    "indices": lambda x, i, t: x[t([0] * len(i)), t(i)],
    "take": lambda x, i, t: torch.take(x, t([4 * n for n in i])),
    "take_along_dim": lambda x, i, t: torch.take_along_dim(x, t([[n] * 3 for n in i]), 0),
    "index_add": lambda x, i, t: x.index_add(0, t(i), x[: len(i)]),
    "index_copy": lambda x, i, t: x.index_copy(0, t(i), x[: len(i)]),
    "index_fill": lambda x, i, t: x.index_fill(0, t(i), 7.0),
    "index_put": lambda x, i, t: torch.index_put(x, (t(i),), x[: len(i)]),
    "scatter": lambda x, i, t: x.scatter(0, t([[n] * 3 for n in i]), x),
    "scatter_add": lambda x, i, t: x.scatter_add(0, t([[n] * 3 for n in i]), x),
}  # fmt: skip


@pytest.mark.parametrize("indices", [[0, 2], [99], [1, -1], [-5], [2, 4], [-3]])
@pytest.mark.parametrize("name", KNOWN)
def test_indices_that_are_constants(name: str, indices: list[int]) -> None:
    """What torch refuses of them is refused when it is defined; negative ones are as torch has."""
    x, f = torch.arange(12.0).reshape(4, 3), KNOWN[name]
    with mf.FusionDefinition("known") as fd:
        h = fd.define_tensor([4, 3], mesh=DeviceMesh.arange(x=2), layout={"x": Shard(0)})
        try:
            expected = f(x, indices, torch.tensor)
        except (IndexError, RuntimeError):
            with pytest.raises(mf.DefinitionError, match="out of range"):
                f(h, indices, fd.ops.tensor)
            return
        fd.add_output(f(h, indices, fd.ops.tensor))
    assert torch.equal(mf.simulate(mf.compile(fd), [x]).outputs[0], expected)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("layout", [{}, {"x": mf.Shard(0)}, {"x": mf.Shard(1)}])
def test_equals_of_both_share_a_gradient(reduce: str, layout: dict[str, Any]) -> None:
    """As many of src as are equal, and x itself, have equal parts."""
    mesh = mf.DeviceMesh.arange(x=2)
    with mf.FusionDefinition("extremes") as fd:
        x, src = (fd.define_tensor([n, 3], torch.float64, mesh, layout) for n in (5, 7))
        index = fd.define_tensor([7, 3], torch.int64, mesh, layout)
        y = fd.ops.scatter_reduce(x, 0, index, src, reduce)
        for result in (y, *mf.grad((y * y).sum(), [x, src])):
            fd.add_output(result)
    one = torch.randint(-1, 2, (5, 3)).double().requires_grad_()
    other = torch.randint(-1, 2, (7, 3)).double().requires_grad_()
    places = torch.randint(0, 5, (7, 3))
    want = one.scatter_reduce(0, places, other, reduce)
    (want * want).sum().backward()
    given = [one.detach(), other.detach(), places]
    results = mf.simulate(mf.compile(fd), given).outputs
    torch.testing.assert_close(results, (want.detach(), one.grad, other.grad))
