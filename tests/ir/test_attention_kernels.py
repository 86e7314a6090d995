"""Which kernels compute attention on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mdfuse.ir import attention, few_rows


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
    monkeypatch.setattr(few_rows, "has_triton", lambda: True)
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
