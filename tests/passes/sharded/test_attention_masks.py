"""Masks of attention whose positions are split: documents in a row, padding, slopes, any others."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.layouts.stream import Stream

AXES = [{"cp": 2}, {"cp": 3}, {"cp": 4}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}]
FORMS = ["gather", "heads", "ring", "auto"]
ROWS = [0, 1, 3, 5, 11, 16, 24, 29]


def documents(ids: Any, at: Any) -> Any:
    """Rows see the keys of their document: [batch, 1, rows, keys]."""
    return (ids.unsqueeze(-1) == ids.unsqueeze(-2)).unsqueeze(1)


def behind(ids: Any, at: Any) -> Any:
    """Documents, and no later key: as a user of torch writes it."""
    return documents(ids, at) & (at.unsqueeze(-1) >= at)


def not_behind(ids: Any, at: Any) -> Any:
    """No row sees a later key of its document: no equality, so it stays a mask."""
    return ~documents(ids, at) | (at.unsqueeze(-1) >= at)


def padded(ids: Any, at: Any) -> Any:
    """No row sees the keys of document 1: columns alone, so that some rows see nothing."""
    return (ids != 1).unsqueeze(1).unsqueeze(1)


def slopes(ids: Any, at: Any) -> Any:
    """Numbers that are added to the scores, others for each head."""
    far = (at.unsqueeze(-1) - at) * -0.25
    return far.unsqueeze(0).unsqueeze(0) + (ids * 0.5).unsqueeze(-1).unsqueeze(1)


def given_whole(ids: Any, at: Any) -> Any:
    """Not made of rows and columns: the running number of pairs in each row."""
    return behind(ids, at).long().cumsum(-1) % 2 == 1


MASKS: dict[str, Callable[[Any, Any], Any]] = {
    f.__name__: f for f in (documents, behind, not_behind, padded, slopes, given_whole)
}


def defined(
    axes: dict[str, int],
    shape: tuple[int, ...],
    mask: str,
    zigzag: bool,
    dtype: torch.dtype = torch.float64,
    **how: Any,
) -> mf.FusionDefinition:
    n, heads, shared, rows, f = shape
    placed = {"cp": Shard(2, zigzag=zigzag), "tp": Shard(1), "dp": Shard(0)}
    of_ids = {"cp": Shard(1, zigzag=zigzag), "dp": Shard(0)}
    mesh = DeviceMesh.arange(**axes)
    with mf.FusionDefinition("masked") as fd:
        q, k, v = (
            fd.define_tensor([n, h, rows, f], dtype, mesh, {a: placed[a] for a in axes}, name=name)
            for name, h in (("q", heads), ("k", shared), ("v", shared))
        )
        at = {a: of_ids[a] for a in axes if a in of_ids}
        ids = fd.define_tensor([n, rows], torch.int64, mesh, at, name="ids")
        hides = MASKS[mask](ids, fd.ops.arange(rows)) if mask != "none" else None
        y, sums = mf.ops.attention(q, k, v, hides, enable_gqa=True, **how)
        for x in (y, sums, *mf.grad((y * y).sum(), [q, k, v])):
            fd.add_output(x)
    return fd


def given(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Query, key, value, and ids of documents.

    These lie one behind the other, or mixed; or one is all that there is, or each row is its own.
    """
    n, heads, shared, rows, f = shape
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64
    tensors = [torch.randn(n, h, rows, f, dtype=wide, generator=generator).to(dtype)
               for h in (heads, shared, shared)]  # fmt: skip
    drawn = torch.randint(0, 4, (n, rows), generator=generator)
    each = torch.arange(rows).expand(n, rows).contiguous()
    return [*tensors, (drawn.sort(-1).values, drawn, torch.zeros_like(drawn), each)[seed % 4]]


def expected(tensors: list[Tensor], mask: str, **how: Any) -> list[Tensor]:
    """Attention of whole tensors in f64: rows that see nothing are 0."""
    q, k, v = (x.clone().double().requires_grad_() for x in tensors[:3])
    rows = torch.arange(q.shape[2])
    many = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
    scores = q @ many[0].mT / q.shape[-1] ** 0.5
    hides = MASKS[mask](tensors[3], rows)
    is_shown = hides.dtype == torch.bool
    scores = scores.masked_fill(~hides, -torch.inf) if is_shown else scores + hides
    if how.get("is_causal"):
        far = rows.unsqueeze(-1) - rows
        scores = scores.masked_fill((far < 0) | (far >= how.get("window", 1 << 20)), -torch.inf)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.masked_fill(sums == -torch.inf, 0).unsqueeze(-1)).exp()
    y = weights @ many[1]
    return [x.detach() for x in (y, sums, *torch.autograd.grad((y * y).sum(), (q, k, v)))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seed", range(4))
def test_values_sums_and_gradients(seed: int, mask: str, form: str) -> None:
    """Uneven lengths, fewer rows than ranks, one row, no row; rows that see nothing at all."""
    draw = random.Random(f"{seed} {mask} {form}")
    axes, zigzag = draw.choice(AXES), draw.random() < 0.5
    heads, shared = draw.choice([(8, 8), (8, 4), (10, 2)])
    shape = (draw.choice([1, 2, 3]), heads, shared, draw.choice(ROWS), 4)
    how = draw.choice([{}, {"is_causal": True}, {"is_causal": True, "window": 3}])
    program = mf.compile(defined(axes, shape, mask, zigzag, **how), Options(context=form))
    tensors = given(shape, torch.float64, seed)
    check_everywhere(program, tensors, expected(tensors, mask, **how), schedule=seed)


@pytest.mark.parametrize("form", FORMS[:3])
@pytest.mark.parametrize("zigzag", [False, True])
def test_16_bits_are_as_near_as_on_one_device(form: str, zigzag: bool) -> None:
    shape, how, dtype = (2, 4, 2, 40, 8), {"is_causal": True}, torch.bfloat16
    tensors = given(shape, dtype, 0)
    want = expected(tensors, "documents", **how)
    far = []
    for n, options in ((4, Options(context=form)), (1, Options())):
        fd = defined({"cp": n}, shape, "documents", zigzag and n > 1, dtype, **how)
        outs = mf.simulate(mf.compile(fd, options), tensors).outputs
        far.append([(x.double() - z).norm() / z.norm() for x, z in zip(outs, want, strict=True)])
    assert all(x <= 1.5 * least + 1e-6 for x, least in zip(*far, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("mask", ["documents", "behind"])
def test_documents_need_no_mask(mask: str, zigzag: bool, form: str) -> None:
    """No rank has one; numbers alone are sent, and the report says what is computed."""
    how = {"is_causal": True} if mask == "documents" else {}
    fd = defined({"cp": 4}, (1, 4, 4, 64, 4), mask, zigzag, **how)
    program = mf.compile(fd, Options(context=form))
    plain = mf.compile(
        defined({"cp": 4}, (1, 4, 4, 64, 4), "none", zigzag, is_causal=True), Options(context=form)
    )
    assert "bool[" not in str(program.for_rank(0))
    more = max(map(program.bytes_received, range(4))) - max(map(plain.bytes_received, range(4)))
    assert form == "auto" or 0 < more <= 2 * 64 * 8
    said = program.explain()
    assert "numbers of documents in the place of a mask: masks of a few rows each are" in said
    assert "; of its documents are at most" in said and "is computed, too" not in said


@pytest.mark.parametrize("form", FORMS[:3])
@pytest.mark.parametrize("zigzag", [False, True])
def test_rows_and_columns_are_all_that_is_sent_of_a_mask(form: str, zigzag: bool) -> None:
    """However many there are of both; in a ring no rank has more than its rows of a part's keys."""
    received = {}
    for mask in ("not_behind", "slopes"):
        shape = (1, 4, 4, 64, 4)
        program = mf.compile(defined({"cp": 4}, shape, mask, zigzag), Options(context=form))
        plain = mf.compile(defined({"cp": 4}, shape, "padded", zigzag), Options(context=form))
        received[mask] = max(map(program.bytes_received, range(4)))
        received[mask] -= max(map(plain.bytes_received, range(4)))
        wide = re.findall(r"bool\[(?:1,)*(\d+),(\d+)\]", str(program.for_rank(0)))
        most = {"gather": (16, 64), "heads": (64, 64), "ring": (16, 16)}[form]
        assert {(int(a), int(b)) for a, b in wide} <= {most, (1, 64), (16, 1), (64, 1)}
    assert max(received.values()) <= 3 * 64 * 8


def test_a_mask_that_several_read_is_made_once() -> None:
    """The layers of a model have one mask: but for rings, whose ranks make it a part at a time."""
    mesh, placed = DeviceMesh.arange(cp=2), {"cp": Shard(2)}
    with mf.FusionDefinition("layers") as fd:
        q, k, v = (fd.define_tensor([1, 2, 8, 4], mesh=mesh, layout=placed) for _ in "qkv")
        ids = fd.define_tensor([1, 8], torch.int64, mesh, {"cp": Shard(1)})
        mask = not_behind(ids, fd.ops.arange(8))
        for _ in range(3):
            q = mf.ops.attention(q, k, v, mask, is_causal=True).output + q
        fd.add_output(q)
    for form in ("gather", "heads"):
        here = mf.compile(fd, Options(context=form)).for_rank(0)
        assert sum(i.fn == "eq" for i in here.walk()) == 1
    assert mf.compile(fd).explain().count("positions split along cp: ") == 3


def test_a_chunk_in_zigzag_order_is_read_by_its_own_loop_alone() -> None:
    """It is a copy of two runs: what is written there would be lost."""
    mesh = DeviceMesh.arange(cp=2)
    with mf.FusionDefinition("read_whole") as fd:
        x = fd.define_tensor([8, 3], mesh=mesh)
        y = fd.ops.exp(x).on(mesh, {}, stream=Stream(0, 2, zigzag=True))
        fd.add_output(y)
    with pytest.raises(mf.MdfuseError, match="chunks in zigzag order") as caught:
        mf.compile(fd)
    assert "test_attention_masks.py" in str(caught.value)


@pytest.mark.parametrize("form", FORMS[:3])
def test_batches_of_a_mask_stay_split(form: str) -> None:
    """Numbers of documents have no dim of heads: a batch of two is no split of two heads."""
    fd = defined({"dp": 2, "cp": 2}, (2, 2, 2, 8, 4), "behind", True)
    program = mf.compile(fd, Options(context=form))
    tensors = given((2, 2, 2, 8, 4), torch.float64, 3)
    check_everywhere(program, tensors, expected(tensors, "behind"))
    ids = [c for c in program.communications if c.dtype == torch.int64]
    assert {"dp=S0" in str(c.destination) for c in ids if c.shape[0] == 2} == {True}


def test_a_mask_of_all_rows_is_priced() -> None:
    """With whole positions each rank makes all of it: 4096 by 4096, and a part of it otherwise."""
    forms = {}
    for mask in ("not_behind", "padded"):
        fd = defined({"cp": 4}, (1, 16, 16, 4096, 4), mask, False, is_causal=True)
        forms[mask] = mf.compile(fd).explain().partition("positions split along cp: ")[2]
    assert forms["padded"].startswith("heads") and forms["not_behind"].startswith("gather")


@pytest.mark.parametrize("form", FORMS[:3])
@pytest.mark.parametrize("axes", AXES)
def test_slopes_of_each_head(axes: dict[str, int], form: str) -> None:
    """As ALiBi has them: heads of the mask go where those of the query go; 3 dims beside 4."""
    placed = {"cp": Shard(2, zigzag=True), "tp": Shard(1), "dp": Shard(0)}
    mesh, shape = DeviceMesh.arange(**axes), (2, 8, 13, 4)

    def numbers(lib: Any) -> Any:
        at, head = lib.arange(13), lib.arange(8)
        return (at - at.unsqueeze(-1)).unsqueeze(0) * (head * 0.25).unsqueeze(-1).unsqueeze(-1)

    with mf.FusionDefinition("alibi") as fd:
        q, k, v = (
            fd.define_tensor([*shape], torch.float64, mesh, {a: placed[a] for a in axes})
            for _ in "qkv"
        )
        bias = numbers(fd.ops).to(torch.float64)
        y = mf.ops.attention(q, k, v, bias, is_causal=True).output
        for x in (y, *mf.grad((y * y).sum(), [q, k, v])):
            fd.add_output(x)
    tensors = given((2, 8, 8, 13, 4), torch.float64, 5)[:3]
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    scores = q @ k.mT / 2 + numbers(torch)
    hidden = torch.ones(13, 13, dtype=torch.bool).triu(1)
    y = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    want = [y.detach(), *torch.autograd.grad((y * y).sum(), (q, k, v))]
    check_everywhere(mf.compile(fd, Options(context=form)), tensors, want)
