"""Attention by numbers of documents: by masks of a few rows, and by kernels in Triton."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mdfuse.ir import documents
from mdfuse.ir.attention import attend, attend_grad, attend_parts, attend_terms, join

#: How numbers of documents lie.
KINDS = ("sorted", "unsorted", "one document", "each its own")


def numbers(kind: str, lead: tuple[int, ...], n: int, generator: torch.Generator) -> Tensor:
    if kind == "one document":
        return torch.full((*lead, n), -7)
    if kind == "each its own":
        return torch.arange(n).expand(*lead, n).contiguous()
    drawn = torch.randint(-2, 3, (*lead, n), generator=generator)
    return drawn.sort(-1).values if kind == "sorted" else drawn


class Case:
    """Operands, and what whole tensors give in f64: results, and gradients of a drawn cotangent."""

    def __init__(self, seed: int, rows: list[int], features: list[int], **how: Any) -> None:
        draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
        b, shared, groups = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([1, 2, 3])
        h, n, m = shared * groups, draw.choice(rows), draw.choice(rows)
        e, f, self.scale = draw.choice(features), draw.choice(features), 0.3
        self.shift = draw.choice([None, m - n, 0, 5, -3])
        self.window = draw.choice([None, 20]) if self.shift is not None else None
        lead = draw.choice([(), (b, 1), (b, h), (1, 1), (1, h)])
        kind = KINDS[seed % 4]
        self.rows, self.keys = (numbers(kind, lead, x, g) for x in (n, m))

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=g).to(**how).double()

        self.q, self.k = drawn(b, n, h, e).transpose(1, 2), drawn(b, shared, e, m).mT
        self.v, self.ct = drawn(m, b, shared, f).permute(1, 2, 0, 3), drawn(b, h, f, n).mT
        i, j = torch.arange(n, device=self.q.device).unsqueeze(-1), torch.arange(m)
        seen = (self.rows.unsqueeze(-1) == self.keys.unsqueeze(-2)).expand(b, h, n, m)
        if self.shift is not None:
            seen = seen & (j.to(i.device) <= i + self.shift).cpu()
        if self.window is not None:
            seen = seen & (j.to(i.device) > i + self.shift - self.window).cpu()
        self.seen = seen.to(self.q.device)
        self.rows, self.keys = self.rows.to(i.device), self.keys.to(i.device)

    def expected(self) -> list[Tensor]:
        """The result, the logarithms of sums, and gradients; no hidden pair counts at all."""
        q, k, v = (x.clone().requires_grad_() for x in (self.q, self.k, self.v))
        many = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
        scores = (q @ many[0].mT * self.scale).masked_fill(~self.seen, -math.inf)
        sums = scores.logsumexp(-1)
        weights = (scores - sums.masked_fill(sums == -math.inf, 0).unsqueeze(-1)).exp()
        out = weights @ many[1]
        grads = torch.autograd.grad(out, (q, k, v), self.ct)
        return [x.detach() for x in (out, sums, *grads)]

    def computed(self, dtype: torch.dtype) -> list[Tensor]:
        """What kernels give, each result in memory of NaN."""
        q, k, v, ct = (x.to(dtype) for x in (self.q, self.k, self.v, self.ct))
        how = self.rows, self.keys, self.scale, self.shift, self.window
        out, sums = documents.attend(q, k, v, *how)
        given = sums.masked_fill(sums == -math.inf, 0)
        return [out, sums, *documents.attend_grad(ct, q, k, v, out, given, *how)]


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory that nobody has written be NaN, or a number that no document has."""

    def filled(x: Tensor, *shape: Any, **how: Any) -> Tensor:
        y = torch.empty(*shape, **{"dtype": x.dtype, "device": x.device, **how})
        return y.fill_(math.nan if y.is_floating_point() else 1 << 40)

    monkeypatch.setattr(Tensor, "new_empty", filled)
    monkeypatch.setattr(torch, "empty_like", lambda x: filled(x, x.shape))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def interpreted(check: str) -> None:
    """Evaluate a check of this file where Triton's interpreter runs kernels, on the CPU."""
    code = f"""
import contextlib, pytest, torch
import test_documents as tests
with pytest.MonkeyPatch.context() as patch:
    tests.poison(patch)
    patch.setattr(torch.cuda, "device_of", lambda x: contextlib.nullcontext())
    tests.{check}
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr


# -- masks of a few rows ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_masks_of_a_few_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As whole tensors, whatever the number of rows; no mask has more elements than may be."""
    case = Case(seed, [1, 5, 17, 40], [4, 8])
    most = random.Random(seed).choice([1, 30, 200, 1 << 24])
    monkeypatch.setattr(documents, "_MASK", most)
    how: dict[str, Any] = {"scale": case.scale, "enable_gqa": True}
    if case.shift is not None:
        how |= {"is_causal": True, "q_offset": case.shift + 9, "k_offset": 9}
        how |= {} if case.window is None else {"window": case.window}
    ids = case.rows, case.keys
    out, sums = attend(case.q, case.k, case.v, *ids, **how)
    want = case.expected()
    grads = attend_grad(case.q, case.k, case.v, out, sums, case.ct, *ids, **how)
    for x, y in zip((out, sums, *grads), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    terms = attend_terms(case.q, case.k, case.v, *ids, **how)
    torch.testing.assert_close(terms, torch.cat((want[0], want[1].unsqueeze(-1)), -1))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_keys_join(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 4, 11, 8, dtype=torch.float64, generator=generator).unbind()
    ids = numbers(kind, (2, 1), 11, generator)
    how: dict[str, Any] = {"is_causal": True}
    outs, sums = attend_parts(q, k, v, ids, ids, parts=3, **how)
    assert outs.shape == (3, 2, 4, 11, 8)
    total = outs[0], sums[0]
    for out, some in zip(outs[1:], sums[1:], strict=True):
        join(*total, out, some)
    for x, y in zip(total, attend(q, k, v, ids, ids, **how), strict=True):
        torch.testing.assert_close(x, y)


def test_a_mask_has_few_rows_where_there_are_many_keys() -> None:
    """An eighth of a gigabyte of bools, did the mask stand there: its largest part is much less."""
    n = 1 << 15
    q, k, v = (torch.randn(1, 1, m, 4) for m in (4096, n, n))
    ids = torch.arange(n).div(n // 8, rounding_mode="floor")
    sizes = list[int]()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            y = func(*args, **(kw or {}))
            sizes.extend([y.numel()] if isinstance(y, Tensor) and y.dtype == torch.bool else [])
            return y

    with Watch():
        out, _ = attend(q, k, v, ids[:4096], ids)
    assert documents._MASK >= max(sizes) > 0
    torch.testing.assert_close(out, attend(q, k[:, :, :4096], v[:, :, :4096])[0])


@pytest.mark.parametrize(
    ("rows", "keys", "error"),
    [
        (torch.zeros(5), torch.zeros(7), TypeError),
        (torch.zeros(5, dtype=torch.int64), torch.zeros(7), TypeError),
        (torch.zeros(7, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), ValueError),
        (torch.zeros(3, 5, dtype=torch.int64), torch.zeros(7, dtype=torch.int64), ValueError),
        (torch.zeros((), dtype=torch.int64), torch.zeros(7, dtype=torch.int64), ValueError),
    ],
)
def test_numbers_that_do_not_fit(rows: Tensor, keys: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        attend(torch.zeros(2, 5, 4), torch.zeros(2, 7, 4), torch.zeros(2, 7, 4), rows, keys)


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True), ({"dtype": torch.float32}, True), ({"dtype": torch.float64}, False),
        ({"q": (2, 8, 5, 256)}, True), ({"q": (2, 8, 5, 257)}, False), ({"f": 320}, False),
        ({"q": (2, 8, 0, 64)}, False), ({"q": (5, 64)}, False), ({"q": (8, 5, 64)}, True),
        ({"q": (70_000, 1, 5, 64)}, False), ({"requires_grad": True}, False),
        ({"device": "cpu"}, False),
    ],
)  # fmt: skip
def test_operands_that_fit(
    changes: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_has_triton", lambda: True)
    case = {"q": (2, 8, 5, 64), "dtype": torch.bfloat16, "device": "cuda", "f": 64, **changes}
    how = {"dtype": case["dtype"], "device": case["device"]}
    with FakeTensorMode():
        q = torch.empty(case["q"], requires_grad=case.get("requires_grad", False), **how)
        k = torch.empty(*q.shape[:-2], 7, q.shape[-1], **how)
        v = torch.empty(*q.shape[:-2], 7, case["f"], **how)
        assert documents.fits(q, k, v) is fits
        ids = [torch.zeros(x.shape[-2], dtype=torch.int64, device=q.device) for x in (q, k)]
        if fits:
            out, sums = attend(q, k, v, *ids)
            assert (out.dtype, sums.dtype) == (q.dtype, torch.float32)
            assert (out.shape, sums.shape) == ((*q.shape[:-1], case["f"]), q.shape[:-1])
            grads = attend_grad(q, k, v, out, sums, torch.zeros_like(out), *ids)
            assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


def check_drawn(seeds: range) -> None:
    for seed in seeds:
        case = Case(seed, [1, 5, 64, 130, 200], [8, 24, 64])
        for x, want in zip(case.computed(torch.float32), case.expected(), strict=True):
            torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu(1)  # where Triton is
@pytest.mark.parametrize("first", range(0, 16, 4))
def test_kernels_in_the_interpreter(first: int) -> None:
    """Odd sizes, any strides, shared heads, offsets, windows, rows that see nothing."""
    interpreted(f"check_drawn(range({first}, {first + 4}))")


def of_two_documents(**how: Any) -> tuple[Case, slice]:
    """Rows and keys of three documents, side by side in blocks; the second is not finite."""
    case = Case(0, [150], [16], **how)
    case.shift, case.window, device = 0, None, case.q.device
    case.rows = case.keys = torch.tensor([0] * 40 + [1] * 30 + [2] * 80, device=device)
    seen = (case.rows.unsqueeze(-1) == case.keys).tril()
    case.seen = seen.expand(*case.q.shape[:2], 150, 150)
    return case, slice(40, 70)


def check_two_documents(dtype: torch.dtype, tolerance: float, **how: Any) -> None:
    """What is not finite in a document, in any operand, changes nothing in others."""
    case, bad = of_two_documents(**how)
    want = case.expected()
    for name, value in (("v", math.inf), ("k", math.nan), ("q", -math.inf), ("ct", math.nan)):
        spoiled, _ = of_two_documents(**how)
        getattr(spoiled, name)[:, :, bad] = value
        results = spoiled.computed(dtype)
        assert any(not x[:, :, bad].isfinite().all() for x in results)
        for x, whole in zip(results, want, strict=True):
            for part in (slice(bad.start), slice(bad.stop, None)):
                torch.testing.assert_close(
                    x[:, :, part].double(), whole[:, :, part], rtol=tolerance, atol=tolerance
                )


def check_skipped() -> None:
    """Keys of the first two of four documents are not finite; kernels do not read them at all."""
    q, k, v = torch.randn(3, 1, 1, 256, 16).unbind()
    ids = torch.arange(256).div(64, rounding_mode="floor")
    bad = [x.clone() for x in (k, v)]
    for x in bad:
        x[:, :, :128] = math.nan
    for each in (ids, torch.tensor([0, 1, 3, 2])[ids]):
        how = each[128:], each, 0.3, 128, None
        for x, y in zip(
            documents.attend(q[:, :, 128:], *bad, *how),
            documents.attend(q[:, :, 128:], k, v, *how), strict=True,
        ):  # fmt: skip
            assert torch.equal(x, y)


@pytest.mark.gpu(1)  # where Triton is
@pytest.mark.parametrize("check", ["check_two_documents(torch.float32, 1e-4)", "check_skipped()"])
def test_what_is_not_finite_in_the_interpreter(check: str) -> None:
    interpreted(check)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels(dtype: torch.dtype, seed: int, poisoned: None) -> None:
    case = Case(seed, [1, 64, 130, 1000], [16, 64, 80, 128, 256], device="cuda", dtype=dtype)
    error = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for x, want in zip(case.computed(dtype), case.expected(), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=error, atol=error)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_there(dtype: torch.dtype, poisoned: None) -> None:
    error = 4e-2 if dtype == torch.bfloat16 else 1e-4
    check_two_documents(dtype, error, device="cuda", dtype=dtype)


@pytest.mark.gpu(1)
def test_kernels_in_a_graph() -> None:
    """Numbers of documents change between replays: nothing of them is known on the host."""
    q, k, v = torch.randn(3, 1, 4, 500, 64, device="cuda").unbind()
    ids = torch.zeros(500, dtype=torch.int64, device="cuda")
    attend(q, k, v, ids, ids, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(q, k, v, ids, ids, is_causal=True)
    for n in (3, 100):
        ids.copy_(torch.arange(500, device="cuda") // n)
        graph.replay()
        mask = (ids.unsqueeze(-1) == ids).tril()
        want = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), mask
        )
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
