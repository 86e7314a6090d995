"""Which kernels compute attention on GPUs, and the numbers of those that are joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mdfuse.ir import attention, attention_kernels, few_rows


class Called(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kw or {}))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dims", [2, 4])
def test_sums_of_a_long_cache(dims: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No heads of keys are repeated: with a mask our kernel, else one that splits keys."""
    monkeypatch.setattr(few_rows, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with FakeTensorMode(), Called() as called:
        how: Any = {"dtype": torch.bfloat16, "device": "cuda"}
        q = torch.empty(1, 8, rows, 64, **how)
        k, v = (torch.empty(1, 2, 1 << 17, 64, **how) for _ in "kv")
        mask = torch.empty(
            (*(1 for _ in range(dims - 1)), 1 << 17), dtype=torch.bool, device="cuda"
        )
        attention.attend_parts(q, k, v, mask, parts=1, enable_gqa=True)
        assert "mdfuse::attend_few_rows_with_sums" in called.names
        called.names.clear()
        attention.attend_parts(q, k, v, None, parts=1, enable_gqa=True)
        assert {x for x in called.names if "attention" in x or "attend" in x} == {
            "aten::_scaled_dot_product_flash_attention"
        }


@pytest.mark.parametrize(("rows", "features", "squares"), [
    (8192, 64, True), (1024, 64, False), (8192, 256, False),
])  # fmt: skip
def test_large_tiles_are_squares_for_cudnn(
    rows: int, features: int, squares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows of a longer query, under a causal mask: flash takes them as they are."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(attention_kernels, "_may_cudnn", lambda *_: True)
    with FakeTensorMode(), Called() as called:
        how: Any = {"dtype": torch.bfloat16, "device": "cuda"}
        q, ct = (torch.empty(1, 8, rows, features, **how) for _ in "qc")
        k, v = (torch.empty(1, 2, 3 * rows, features, **how) for _ in "kv")
        given: Any = {"is_causal": True, "enable_gqa": True, "q_offset": 2 * rows}
        out, sums = attention.attend(q, k, v, **given)
        assert (out.shape, out.dtype, sums.shape) == (q.shape, q.dtype, q.shape[:3])
        attention.attend_grad(q, k, v, out, sums, ct, **given)
    by = {x.split("product_")[1] for x in called.names if "product" in x}
    kind = "cudnn" if squares else "flash"
    assert by == {f"{kind}_attention", f"{kind}_attention_backward"}


def whole(q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The formula, of rows that begin at a position: averages, and logarithms of sums."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(rows.unsqueeze(-1) + first < keys, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("features", [64, 128])
@pytest.mark.parametrize("rows", [4096, 4100])
def test_large_tiles(rows: int, features: int) -> None:
    """Values and gradients beside f64: two chunks of rows, the second behind many keys."""
    torch.manual_seed(0)
    how: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    q, ct = (torch.randn(1, 2, 2 * rows, features, **how) for _ in "qc")
    k, v = (torch.randn(1, 1, 3 * rows, features, **how) for _ in "kv")
    given: Any = {"is_causal": True, "enable_gqa": True, "rows": [(0, rows), (2 * rows, 3 * rows)]}
    out, sums = attention.attend(q, k, v, **given)
    grads = attention.attend_grad(q, k, v, out, sums, ct, **given)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        parts = [
            whole(x, *wide[1:], first)
            for x, first in zip(wide[0].chunk(2, 2), (0, 2 * rows), strict=True)
        ]
        want, logs = torch.cat([x for x, _ in parts], 2), torch.cat([x for _, x in parts], 2)
        right = torch.autograd.grad(want, wide, ct.double())
    norm = torch.linalg.vector_norm
    for a, b in zip((out, sums, *grads), (want, logs, *right), strict=True):
        assert norm(a.double() - b) < 2e-2 * norm(b)
