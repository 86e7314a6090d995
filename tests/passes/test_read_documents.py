"""Which masks compare numbers of documents, and become these; any others stay masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

N = 13


def same(ids: Any) -> Any:
    return ids[:, :, None] == ids[:, None, :]


def restarts(at: Any, lib: Any, step: int = 1, dim: int = 1) -> Any:
    """As transformers counts documents by positions: where these do not go up by one."""
    first = lib.cat([at[:, :1] - 1, at], dim)
    changed = (first[:, 1:] - first[:, :-1]) != step
    return lib.cumsum(changed.to(torch.int64), dim)


def narrow(at: Any) -> Any:
    """Positions that go on from the greatest number of their dtype at the least one."""
    return (at + 253).to(torch.uint8)


def halves(lib: Any) -> Any:
    """Places that f16 rounds to each other."""
    return lib.arange(2046, 2046 + N, dtype=torch.float16)


def count_of(lib: Any) -> Any:
    return lib.arange(N)


#: name -> the mask of ids and positions [batch, n], by the functions of a library.
Mask = Callable[[Any, Any, Any], Any]
DOCUMENTS: dict[str, Mask] = {
    "as written": lambda ids, at, lib: same(ids)[:, None],
    "of views": lambda ids, at, lib: ids[:, None, :, None] == ids[:, None, None, :],
    "columns first": lambda ids, at, lib: ids[:, None, None, :] == ids[:, None, :, None],
    "one batch": lambda ids, at, lib: ids[0][:, None] == ids[0][None, :],
    "columns without rows": lambda ids, at, lib: ids[0][:, None] == ids[0],
    "of heads": lambda ids, at, lib: (
        lib.cat([ids, ids + 1], 0)[None, :, :, None] == lib.cat([ids, ids], 0)[None, :, None, :]
    ),
    "repeated": lambda ids, at, lib: same(ids)[:, None].expand(2, 4, N, N),
    "computed": lambda ids, at, lib: same(ids // 2 * 3)[:, None],
    "of bools": lambda ids, at, lib: same(ids > 1)[:, None],
    "two vectors": lambda ids, at, lib: (ids[:, :, None] == at[:, None, :])[:, None],
}
CAUSAL: dict[str, Mask] = {
    "not before": lambda ids, at, lib: (
        same(ids)[:, None] & (count_of(lib)[:, None] >= count_of(lib))
    ),
    "not behind": lambda ids, at, lib: (
        (count_of(lib) <= count_of(lib)[:, None]) & same(ids)[:, None]
    ),
    "restarts": lambda ids, at, lib: (same(restarts(at, lib)) & (at[:, None, :] <= at[:, :, None]))[
        :, None
    ],
    "restarts twice": lambda ids, at, lib: (
        same(restarts(at, lib))
        & (at[:, None, :] <= at[:, :, None])
        & (count_of(lib) <= count_of(lib)[:, None])
    )[:, None],
}
OTHERS: dict[str, Mask] = {
    "unequal": lambda ids, at, lib: (ids[:, :, None] != ids[:, None, :])[:, None],
    "either": lambda ids, at, lib: (same(ids) | same(at))[:, None],
    "both": lambda ids, at, lib: (same(ids) & same(at))[:, None],
    "padding": lambda ids, at, lib: (ids == 1)[:, None, None, :],
    "documents and padding": lambda ids, at, lib: same(ids)[:, None] & (ids != 1)[:, None, None, :],
    "floats": lambda ids, at, lib: same(ids.to(torch.float32))[:, None],
    "anti-causal": lambda ids, at, lib: (
        same(ids)[:, None] & (count_of(lib)[:, None] <= count_of(lib))
    ),
    "strictly behind": lambda ids, at, lib: (
        same(ids)[:, None] & (count_of(lib)[:, None] > count_of(lib))
    ),
    "the first row for all": lambda ids, at, lib: (
        same(ids)[:, None] & (lib.arange(1)[:, None] >= count_of(lib))
    ),
    "steps of 2": lambda ids, at, lib: (
        same(ids)[:, None] & (count_of(lib)[:, None] * 2 >= count_of(lib))
    ),
    "positions of other documents": lambda ids, at, lib: (
        same(ids) & (at[:, None, :] <= at[:, :, None])
    )[:, None],
    "restarts by 2": lambda ids, at, lib: (
        same(restarts(at, lib, 2)) & (at[:, None, :] <= at[:, :, None])
    )[:, None],
    "restarts of other positions": lambda ids, at, lib: (
        same(restarts(at, lib)) & (ids[:, None, :] <= ids[:, :, None])
    )[:, None],
    "restarts of bytes": lambda ids, at, lib: (
        (lambda at: same(restarts(at, lib)) & (at[:, None, :] <= at[:, :, None]))(narrow(at))
    )[:, None],
    "rounded places": lambda ids, at, lib: (
        same(ids)[:, None] & (halves(lib)[:, None] >= halves(lib))
    ),
    "across": lambda ids, at, lib: (same(ids) & (ids[:, :, None] == 1))[:, None],
}
#: For as many heads as batches.
ACROSS_HEADS: dict[str, Mask] = {
    "numbers of batches, positions of heads": lambda ids, at, lib: (
        same(restarts(at, lib))[:, None] & (at[:, None, :] <= at[:, :, None])[None]
    ),
    "rows of batches, keys of heads": lambda ids, at, lib: (
        (lambda x: x[:, None, :, None] == x[None, :, None, :])(restarts(at, lib))
        & (at[None, :, None, :] <= at[:, None, :, None])
    ),
}


def defined(mask: Mask, grads: bool = True, heads: int = 4, **how: Any) -> mf.FusionDefinition:
    with mf.FusionDefinition("masked") as fd:
        q, k, v = (fd.define_tensor([2, heads, N, 4], torch.float64) for _ in "qkv")
        ids, at = (fd.define_tensor([2, N], torch.int64) for _ in range(2))
        if how.get("window"):
            y = mf.ops.attention(q, k, v, mask(ids, at, mf.ops), **how).output
        else:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask(ids, at, mf.ops))
        for x in (y, *(mf.grad((y * y).sum(), [q, k, v]) if grads else ())):
            fd.add_output(x)
    return fd


def given(heads: int = 4, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, heads, N, 4, dtype=torch.float64, generator=g).unbind()
    ids = torch.randint(0, 4, (2, N), generator=g)
    ids[0] = ids[0].sort().values
    at = torch.stack([torch.cat([torch.arange(n) for n in x]) for x in ((5, 1, 4, 3), (2, 11))])
    at[1, 7:9] = torch.tensor([1, 4])  # positions need not be those of documents
    return [q, k, v, ids, at]


def expected(mask: Mask, tensors: list[Tensor]) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    seen = mask(*tensors[3:], torch)
    scores = (q @ k.mT / 2).masked_fill(~seen, -torch.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    y = (scores - sums.masked_fill(sums == -torch.inf, 0)).exp() @ v
    return [y.detach(), *torch.autograd.grad((y * y).sum(), (q, k, v))]


def read(program: mf.HostProgram) -> list[tuple[int, bool]]:
    """For each attention, how many values it reads besides query, key and value; is it causal?"""
    found = [i for i in program.for_rank(0).walk() if "attention" in (i.fn or "")]
    return [
        (len(i.reads) - (6 if "grad" in (i.fn or "") else 3), bool(i.kwargs.get("is_causal")))
        for i in found
    ]


def check(mask: Mask, hides: int, is_causal: bool, heads: int = 4) -> None:
    for grads in (False, True):
        program = mf.compile(defined(mask, grads, heads))
        assert read(program) == [(hides, is_causal)] * (2 if grads else 1)
        assert ("numbers of documents" in program.explain()) is (hides == 2)
        tensors = given(heads)
        results = mf.simulate(program, tensors).outputs
        for x, want in zip(results, expected(mask, tensors), strict=False):
            torch.testing.assert_close(x, want)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str) -> None:
    check(DOCUMENTS[name], 2, False)


@pytest.mark.parametrize("name", CAUSAL)
def test_documents_that_hide_later_keys(name: str) -> None:
    check(CAUSAL[name], 2, True)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str) -> None:
    check(OTHERS[name], 1, False)


@pytest.mark.parametrize("name", ACROSS_HEADS)
def test_masks_that_pair_batches_with_heads_stay(name: str) -> None:
    check(ACROSS_HEADS[name], 1, False, heads=2)


def test_a_causal_mask_beside_offsets_stays() -> None:
    """The mask counts from 0, and attention from its offsets."""
    mask = partial(CAUSAL["not before"], lib=mf.ops)
    with mf.FusionDefinition("later") as fd:
        q, k, v = (fd.define_tensor([2, 4, N, 4]) for _ in "qkv")
        ids = fd.define_tensor([2, N], torch.int64)
        for how in ({"q_offset": 3}, {"window": 3}):
            y, _ = mf.ops.attention(q, k, v, mask(ids, ids), is_causal=True, **how)
            fd.add_output(y)
    assert sorted(read(mf.compile(fd))) == [(1, True), (2, True)]


def test_a_mask_with_a_layout_stays() -> None:
    mesh = DeviceMesh.arange(cp=2)
    with mf.FusionDefinition("placed") as fd:
        q, k, v = (fd.define_tensor([2, 4, N, 4], mesh=mesh) for _ in "qkv")
        ids = fd.define_tensor([2, N], torch.int64, mesh=mesh)
        mask = same(ids).on(mesh, {"cp": Shard(1)})[:, None]
        fd.add_output(mf.ops.attention(q, k, v, mask).output)
    assert read(mf.compile(fd)) == [(1, False)]


def test_numbers_of_layers_are_the_same_views() -> None:
    """A mask of several layers is compared by all; its numbers are gathered once."""
    mesh = DeviceMesh.arange(cp=2)
    with mf.FusionDefinition("layers") as fd:
        placed = {"cp": Shard(2)}
        q, k, v = (fd.define_tensor([1, 2, 8, 4], mesh=mesh, layout=placed) for _ in "qkv")
        ids = fd.define_tensor([1, 8], torch.int64, mesh, {"cp": Shard(1)})
        mask = same(ids)[:, None]
        for _ in range(3):
            q = mf.ops.attention(q, k, v, mask, is_causal=True).output + q
        fd.add_output(q)
    for form in ("gather", "heads"):
        program = mf.compile(fd, mf.Options(context=form))
        sent = [c for c in program.communications if c.dtype == torch.int64]
        assert len(sent) == {"gather": 1, "heads": 2}[form]


@pytest.mark.parametrize(
    ("dtype", "features", "has"),
    [(torch.bfloat16, 64, True), (torch.bfloat16, 320, False), (torch.float64, 64, False)],
)
def test_the_report_says_what_has_kernels(dtype: torch.dtype, features: int, has: bool) -> None:
    with mf.FusionDefinition("packed") as fd:
        q, k, v = (fd.define_tensor([1, 2, 8, features], dtype) for _ in "qkv")
        ids = fd.define_tensor([1, 8], torch.int64)
        for _ in range(3):
            q = mf.ops.attention(q, k, v, same(ids)[:, None]).output
        fd.add_output(q)
    (line,) = [x for x in mf.compile(fd).explain().splitlines() if "numbers of documents" in x]
    assert ", and 2 more: " in line and "test_read_documents.py" in line
    assert ("on GPUs kernels leave out blocks of other documents" in line) is has
