"""What torch answered once is found again, and only where it would answer the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse.frontend.handle import Handle
from mdfuse.ir import infer


def dtype_of(compute: Callable[[Any], Any], dtype: torch.dtype) -> torch.dtype:
    mf.FusionCache.reset()
    with mf.FusionDefinition("f") as fd:
        y: Handle = compute(fd.define_tensor([2, 2], dtype))
        fd.add_output(y)
    return y.dtype


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
def test_numbers_that_are_equal_give_what_torch_gives_for_each(
    dtype: torch.dtype, default: torch.dtype
) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for number in (True, 1, 1.0, 1):
            want = (torch.ones(2, 2, dtype=dtype) * number).dtype
            assert dtype_of(lambda x, number=number: x * number, dtype) == want
    finally:
        torch.set_default_dtype(before)


def test_equal_layers_ask_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = infer.infer

    def counted(op: Any, *arguments: Any) -> Any:
        asked.append(op.name)
        return ask(op, *arguments)

    monkeypatch.setattr(infer, "infer", counted)
    infer.ANSWERS.empty()
    mf.FusionCache.reset()
    with mf.FusionDefinition("layers") as fd:
        x = fd.define_tensor([3, 4])
        for _ in range(5):
            x = fd.ops.tanh(x @ fd.define_tensor([4, 4]))
        fd.add_output(x)
    assert sorted(asked) == ["matmul", "tanh"]
    assert fd.fusion.values[fd.fusion.outputs[0]].shape == (3, 4)
