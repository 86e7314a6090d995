"""Attention of few rows by kernels of our own: which operands they take, and their numbers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mdfuse.ir import attention, calls, few_rows


def logarithms(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The logarithms of the sums of the powers, in f64."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).logsumexp(-1)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The formula in f64; a row that is hidden entirely gives zeros."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


#: q, k, mask (shape, dtype), and what differs; `v` is as `k`.
USUAL: dict[str, Any] = {"q": (2, 8, 1, 64), "k": (2, 2, 40, 64), "mask": (2, 1, 1, 40)}
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "a token": ({}, True),
    "no mask": ({"mask": None}, True),
    "f32": ({"dtype": torch.float32}, True),
    "f64": ({"dtype": torch.float64}, False),
    "a mask of floats": ({"mask_dtype": torch.bfloat16}, False),
    "one mask for all keys": ({"mask": (1, 1, 1, 1)}, False),
    "16 rows": ({"q": (2, 8, 4, 64)}, True),
    "20 rows": ({"q": (2, 8, 5, 64)}, False),
    "no row": ({"q": (2, 8, 0, 64)}, False),
    "no key": ({"k": (2, 2, 0, 64), "mask": None}, False),
    "heads alone": ({"q": (2, 2, 3, 64), "enable_gqa": False}, True),
    "heads that differ": ({"enable_gqa": False}, False),
    "uneven heads": ({"q": (2, 5, 1, 64)}, False),
    "no batch": ({"q": (8, 1, 64), "k": (2, 40, 64), "mask": None}, False),
    "one batch of keys": ({"k": (1, 2, 40, 64)}, False),
    "many keys": ({"k": (2, 2, 8193, 64), "mask": None}, False),
    "wide": ({"q": (2, 8, 1, 320), "k": (2, 2, 40, 320)}, False),
    "causal": ({"is_causal": True, "mask": None}, False),
    "with a gradient": ({"requires_grad": True}, False),
    "on a processor": ({"device": "cpu"}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_operands_that_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, fits = CASES[name]
    case = {"dtype": torch.bfloat16, "device": "cuda", "mask_dtype": torch.bool, **USUAL, **changes}
    monkeypatch.setattr(few_rows, "has_triton", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        how: Any = {"dtype": case["dtype"], "device": case["device"]}
        q = torch.empty(case["q"], requires_grad=case.get("requires_grad", False), **how)
        k, v = (torch.empty(case["k"], **how) for _ in "kv")
        mask = case["mask"]
        if mask is not None:
            mask = torch.empty(mask, dtype=case["mask_dtype"], device=case["device"])
        gqa = case.get("enable_gqa", True)
        assert few_rows.fits(q, k, v, mask, case.get("is_causal", False), gqa) is fits
        if fits:
            y = calls.attend(q, k, v, mask, enable_gqa=gqa)
            assert (y.shape, y.dtype, y.device) == ((*q.shape[:3], v.shape[3]), q.dtype, q.device)
            y, sums = attention.attend(q, k, v, mask, enable_gqa=gqa)
            assert (y.shape, y.dtype, y.device) == ((*q.shape[:3], v.shape[3]), q.dtype, q.device)
            assert (sums.shape, sums.dtype) == (q.shape[:3], torch.float32)
            monkeypatch.setattr(few_rows, "has_triton", lambda: False)
            assert not few_rows.fits(q, k, v, mask, False, gqa)


@pytest.mark.parametrize(("heads", "shared"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("has_mask", [False, True])
def test_rows_as_heads(heads: int, shared: int, has_mask: bool) -> None:
    q = torch.randn(3, 5, heads, 8, dtype=torch.float64).transpose(1, 2)
    k, v = torch.randn(2, 3, shared, 7, 8, dtype=torch.float64).unbind()
    mask = torch.rand(3, 1, 1, 7) < 0.6 if has_mask else None
    many = few_rows.as_heads(q)
    y = torch.nn.functional.scaled_dot_product_attention(many, k, v, mask, enable_gqa=True)
    want = plain(q, k, v, mask, 8**-0.5)
    torch.testing.assert_close(y.reshape(q.shape), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True), ({"enable_gqa": False}, False),
        ({"q": (2, 8, 1, 64)}, False), ({"q": (2, 8, 17, 64)}, False),
        ({"dtype": torch.float32}, False), ({"device": "cpu"}, False), ({"mask": None}, True),
        ({"mask": (2, 1, 4, 40)}, False), ({"mask": (2, 8, 1, 40)}, False),
        ({"q": (8, 4, 64)}, False), ({"k": (1, 2, 40, 64)}, False), ({"is_causal": True}, False),
        ({"q": (2, 8, 4, 60), "k": (2, 2, 40, 60)}, False),
        ({"k": (40, 64)}, False), ({"v": (40, 64)}, False), ({"v": (2, 1, 40, 64)}, False),
        ({"q": (2, 1, 3, 64), "k": (2, 3, 40, 64)}, False), ({"q": (2, 5, 4, 64)}, False),
    ],
)  # fmt: skip
def test_rows_that_can_be_heads(changes: dict[str, Any], fits: bool) -> None:
    case = {"dtype": torch.bfloat16, "device": "cuda", **USUAL, "q": (2, 8, 4, 64), **changes}
    with FakeTensorMode():
        case.setdefault("v", case["k"])
        q, k, v = (torch.empty(case[x], dtype=case["dtype"], device=case["device"]) for x in "qkv")
        mask = case["mask"]
        if mask is not None:
            mask = torch.empty(mask, dtype=torch.bool, device=case["device"])
        gqa = case.get("enable_gqa", True)
        assert few_rows.can_be_heads(q, k, v, mask, case.get("is_causal", False), gqa) is fits


@pytest.mark.gpu(1)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers(dtype: torch.dtype, seed: int) -> None:
    """Odd sizes, any strides, rows without a key; hidden keys and values are NaN."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, shared, groups = draw.choice([1, 2, 65]), draw.choice([1, 3, 8]), draw.choice([1, 3, 16])
    rows = draw.randint(1, few_rows.ROWS // groups)
    n, e = draw.choice([1, 17, 64, 300, 3000]), draw.choice([1, 40, 64, 80, 128, 256])
    f, scale = draw.choice([e, 5, 192]), draw.choice([e**-0.5, 0.3])
    q = torch.randn(batch, rows, shared * groups, e).to("cuda", dtype).transpose(1, 2)
    k = torch.randn(n, batch, shared, e).to("cuda", dtype).permute(1, 2, 0, 3)
    v = torch.randn(batch, shared, f, n).to("cuda", dtype).mT
    shape = draw.choice([None, (batch, 1, 1, n), (1, shared * groups, rows, n), (1, 1, 1, n)])
    mask = None if shape is None else torch.rand(shape, device="cuda") < draw.choice([0.0, 0.1, 1])
    clean = k, v
    if mask is not None:
        hidden = ~mask.expand(batch, shared * groups, rows, n)
        hidden = hidden.unflatten(1, (shared, groups)).all(3).all(2).unsqueeze(-1)
        k, v = (x.masked_fill(hidden, math.nan) for x in clean)
    if not few_rows.fits(q, k, v, mask, False, True):
        assert batch * shared * n > few_rows.KEYS
        k, v = clean  # cuDNN reads hidden keys, too
    y = calls.attend(q, k, v, mask, scale=scale, enable_gqa=True)
    want = plain(q, *clean, mask, scale)
    error = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert y.dtype == dtype and bool(y.isfinite().all())
    torch.testing.assert_close(y.double(), want, rtol=error, atol=error)
    y, sums = attention.attend(q, k, v, mask, scale=scale, enable_gqa=True)
    torch.testing.assert_close(y.double(), want, rtol=error, atol=error)
    of_scores = logarithms(q, clean[0], mask, scale)
    torch.testing.assert_close(sums.double(), of_scores, rtol=error, atol=error)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("which", "dim"), [(0, 2), (0, 3), (1, 3), (2, 3)])
def test_elements_that_lie_far_apart(which: int, dim: int) -> None:
    """An element lies behind the 2^31st one, as in a view of a large tensor."""
    shapes = (1, 2, 3, 3), (1, 1, 5, 3), (1, 1, 5, 3)
    given = [torch.randn(x).to("cuda", torch.float16) for x in shapes]
    x = given[which]
    step = (1 << 30) + 8
    sizes = [n for d, n in enumerate(x.shape) if d != dim]
    strides = [math.prod(sizes[d + 1 :]) for d in range(3)]
    strides.insert(dim, step)
    memory = torch.empty(step * (x.shape[dim] - 1) + math.prod(sizes), dtype=x.dtype, device="cuda")
    given[which] = memory.as_strided(x.shape, strides).copy_(x)
    y = calls.attend(*given, scale=0.3, enable_gqa=True)
    q, k, v = (x.cpu() for x in given)
    torch.testing.assert_close(y.cpu().double(), plain(q, k, v, None, 0.3), rtol=2e-3, atol=2e-3)


@pytest.mark.gpu(2)
def test_another_gpu_than_the_current_one() -> None:
    q = torch.randn(1, 4, 1, 64, device="cuda:1")
    k, v = torch.randn(2, 1, 2, 3000, 64, device="cuda:1").unbind()
    with torch.cuda.device(0):
        y = calls.attend(q, k, v, enable_gqa=True)
    want = plain(q, k, v, None, 64**-0.5)
    torch.testing.assert_close(y.double(), want, rtol=2e-5, atol=2e-5)
