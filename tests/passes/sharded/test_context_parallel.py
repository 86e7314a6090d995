"""The forms of attention whose positions are split: values, gradients, work, and their choice."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.ir.visible import tiles

PLACED = {"cp": Shard(2), "tp": Shard(1), "dp": Shard(0)}

#: axes, shape: batch, heads, heads of keys, positions, features.
CASES: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "even": ({"cp": 2}, (1, 4, 4, 16, 4)),
    "uneven": ({"cp": 4}, (1, 4, 4, 11, 4)),
    "heads that do not divide": ({"cp": 3}, (2, 5, 5, 8, 4)),
    "shared": ({"cp": 2}, (1, 8, 2, 9, 4)),
    "few shared": ({"cp": 3}, (1, 6, 2, 10, 4)),
    "one for all": ({"cp": 2}, (2, 4, 1, 5, 4)),
    "fewer rows than ranks": ({"cp": 4}, (1, 4, 2, 3, 4)),
    "one row": ({"cp": 2}, (1, 2, 2, 1, 4)),
    "no row": ({"cp": 2}, (1, 2, 2, 0, 4)),
    "heads are split": ({"cp": 2, "tp": 2}, (1, 8, 4, 9, 4)),
    "batches are split": ({"dp": 2, "cp": 2}, (3, 4, 2, 7, 4)),
}


def defined(
    axes: dict[str, int], shape: tuple[int, ...], is_causal: bool = True, **how: Any
) -> mf.FusionDefinition:
    n, heads, shared, rows, f = shape
    mesh = DeviceMesh.arange(**axes)
    where = {a: PLACED[a] for a in axes}
    with mf.FusionDefinition("attention") as fd:
        q, k, v = (
            fd.define_tensor([n, h, rows, f], torch.float64, mesh, where, name=name)
            for name, h in (("q", heads), ("k", shared), ("v", shared))
        )
        y, sums = mf.ops.attention(q, k, v, is_causal=is_causal, enable_gqa=True, **how)
        fd.add_output(y)
        fd.add_output(sums)
        for x in mf.grad((y * y).sum(), [q, k, v]):
            fd.add_output(x)
    return fd


def expected(shape: tuple[int, ...], is_causal: bool, window: int) -> tuple[list[Tensor], ...]:
    n, heads, shared, rows, f = shape
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (
        torch.randn(n, h, rows, f, dtype=torch.float64, generator=generator, requires_grad=True)
        for h in (heads, shared, shared)
    )
    many = (x.repeat_interleave(heads // shared, 1) for x in (k, v))
    far = torch.arange(rows).unsqueeze(-1) - torch.arange(rows)
    scores = q @ next(many).mT / f**0.5
    if is_causal:
        scores = scores.masked_fill((far < 0) | (far >= window), -torch.inf)
    y = scores.softmax(-1) @ next(many)
    results = [y, scores.logsumexp(-1), *torch.autograd.grad((y * y).sum(), (q, k, v))]
    return [x.detach() for x in (q, k, v)], [x.detach() for x in results]


@pytest.mark.parametrize("form", ["gather", "heads"])
@pytest.mark.parametrize("name", CASES)
def test_each_form_gives_values_and_gradients(name: str, form: str) -> None:
    axes, shape = CASES[name]
    draw = random.Random(name)
    is_causal, window = draw.random() < 0.7, draw.choice([3, 99])
    how = {"window": window} if is_causal else {}
    program = mf.compile(defined(axes, shape, is_causal, **how), Options(context=form))
    check_everywhere(program, *expected(shape, is_causal, window))
    heads = {program.for_rank(0).local_shape(i.reads[0])[1] for i in program.for_rank(0).walk()
             if i.fn == "attention"}  # fmt: skip
    parts = axes["cp"] if form == "heads" else 1
    assert heads == {-(-shape[1] // (parts * axes.get("tp", 1)))}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_no_rank_computes_more_than_its_share(ranks: int) -> None:
    """Exactly what is visible is computed of long sequences whose heads divide."""
    program = mf.compile(defined({"cp": ranks}, (1, 16, 16, 8192, 4)))
    work = []
    for rank in range(ranks):
        here = program.for_rank(rank)
        (call,) = (i for i in here.walk() if i.fn == "attention")
        _, heads, rows, _ = here.local_shape(call.reads[0])
        runs = call.kwargs.get("rows", ((0, rows),))
        work.append(heads * sum(t.pairs for t in tiles(runs, [(0, 8192)], True)))
    assert sum(work) == 16 * 8192 * 8193 // 2
    assert max(work) * ranks <= 1.1 * sum(work)


def test_few_heads_of_keys_are_gathered() -> None:
    """Bytes decide where rows are so few that work does not count."""
    program = mf.compile(defined({"cp": 2}, (1, 32, 1, 64, 4)))
    assert "Allgather" in [c.kind for c in program.communications]
    assert "positions split along cp: gather; to the busiest rank" in program.explain()
    assert "in zigzag order, Shard(dim, zigzag=True)" in program.explain()


def test_heads_that_are_fewer_than_ranks_are_refused() -> None:
    fd = defined({"cp": 4}, (1, 2, 2, 8, 4))
    with pytest.raises(mf.MdfuseError, match="positions are split along cp") as caught:
        mf.compile(fd, Options(context="heads"))
    assert "2 heads for 4 ranks" in str(caught.value)
    assert "test_context_parallel.py" in str(caught.value)


@pytest.mark.parametrize(("rows", "window", "received"), [(64, 5, 4), (23, 100, 6), (8, 1, 0)])
def test_rows_read_the_keys_that_their_windows_reach(rows: int, window: int, received: int) -> None:
    """The second of four ranks gets the rows before its own that these see, and no others."""
    mesh, shape = DeviceMesh.arange(cp=4), (1, 2, 2, rows, 4)
    with mf.FusionDefinition("windows") as fd:
        q, k, v = (fd.define_tensor([1, 2, rows, 4], torch.float64, mesh, {"cp": Shard(2)})
                   for _ in "qkv")  # fmt: skip
        for x in mf.ops.attention(q, k, v, is_causal=True, window=window):
            fd.add_output(x)
    program = mf.compile(fd, Options(context="gather"))
    given, wanted = expected(shape, True, window)
    check_everywhere(program, given, wanted[:2])
    assert program.bytes_received(1) == 2 * 2 * received * 4 * 8
    few = mf.compile(fd).explain()
    assert "gather" in few.partition("positions split along cp: ")[2].split(";")[0] or window > 5


@pytest.mark.parametrize("form", ["gather", "heads", "ring"])
@pytest.mark.parametrize("rows", [1, 7])
def test_keys_that_are_not_trained_are_repeated_once(rows: int, form: str) -> None:
    """The gradient of the query then reads them as the user repeated them for its heads."""
    mesh, sizes = DeviceMesh.arange(cp=2), ([2, 4, rows, 4], [2, 1, rows, 4], [2, 1, rows, 4])
    with mf.FusionDefinition("frozen") as fd:
        at = {"cp": Shard(2)}
        q, k, v = (fd.define_tensor(n, torch.float64, mesh, at) for n in sizes)
        many = (x[:, :, None].expand(2, 1, 4, rows, 4).reshape(2, 4, rows, 4) for x in (k, v))
        y = mf.ops.attention(q, *many, is_causal=True).output
        fd.add_output(mf.grad((y * y).sum(), [q])[0])
    tensors = [torch.randn(n, dtype=torch.float64) for n in sizes]
    query = tensors[0].clone().requires_grad_()
    hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    scores = (query @ tensors[1].mT / 2).masked_fill(hidden, -torch.inf)
    want = (scores.softmax(-1) @ tensors[2]).square().sum()
    program = mf.compile(fd, Options(context=form))  # type: ignore[arg-type]
    check_everywhere(program, tensors, [*torch.autograd.grad(want, query)])
    heads = sorted(c.shape[1] for c in program.communications)
    assert form == "ring" or heads == [1, 1, 4, 4, 4, 4][: 2 if form == "gather" else 6]


@pytest.mark.parametrize("form", ["gather", "heads", "ring"])
@pytest.mark.parametrize("wanted", ["", "q", "k", "qv", "qkv"])
def test_prices_are_the_bytes_of_programs(form: str, wanted: str) -> None:
    """Gradients that nobody reads do not travel; a head of keys for all ranks travels once."""
    for shared, ranks, zigzag in itertools.product((1, 2, 4), (2, 4), (False, True)):
        mesh, at = DeviceMesh.arange(cp=ranks), {"cp": Shard(2, zigzag=zigzag)}
        sizes = {"q": (1, 4, 64, 4), "k": (1, shared, 64, 4), "v": (1, shared, 64, 6)}
        with mf.FusionDefinition("priced") as fd:
            given = {n: fd.define_tensor(x, mesh=mesh, layout=at) for n, x in sizes.items()}
            y = mf.ops.attention(*given.values(), is_causal=True, enable_gqa=True).output
            fd.add_output(y)
            for x in mf.grad((y * y).sum(), [given[n] for n in wanted]) if wanted else ():
                fd.add_output(x)
        program = mf.compile(fd, Options(context=form))  # type: ignore[arg-type]
        price = re.search(f"{form} ([0-9,]+) bytes", program.explain().partition("busiest")[2])
        received = max(map(program.bytes_received, range(ranks)))
        numbers = 4 * 2 * (ranks - 1) * bool(wanted)  # of rows, and of the sum: not all are priced
        assert price is not None
        assert received - numbers <= int(price[1].replace(",", "")) <= received
