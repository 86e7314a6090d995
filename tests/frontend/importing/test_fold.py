"""Known values of modules: equal ones are one, computed and looked at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.frontend.importing.constants import Distinct, asked_once
from mdfuse.frontend.importing.drawn import kind_of_mask

TP = DeviceMesh.arange(tp=2)
T, LAYERS = 12, 3

#: Masks of all tokens, by name: those that attention knows, and others.
MASKS: dict[str, Callable[[], Tensor]] = {
    "causal": lambda: torch.ones(T, T, dtype=torch.bool).tril(),
    "causal, added": lambda: torch.full((T, T), -torch.inf).triu(1),
    "window": lambda: torch.ones(T, T, dtype=torch.bool).tril().triu(-3),
    "holes": lambda: torch.ones(T, T, dtype=torch.bool).tril() & (torch.arange(T) % 3 != 1),
    "finite": lambda: torch.full((T, T), torch.finfo(torch.float32).min).triu(1),
}
CONSTANTS = {"causal": 0, "causal, added": 0, "window": 0, "holes": 1, "finite": 1}


class Layer(nn.Module):
    """Attention whose mask is a buffer, or made as it runs."""

    def __init__(self, mask: Callable[[], Tensor], is_buffer: bool) -> None:
        super().__init__()
        self.linear, self.drawn = nn.Linear(8, 8), mask
        self.is_buffer = is_buffer
        self.register_buffer("mask", mask() if is_buffer else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask if self.is_buffer else self.drawn()
        heads = self.linear(x).view(1, T, 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return x + y.transpose(1, 2).reshape(1, T, 8)


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_all_layers_are_one(name: str, is_buffer: bool) -> None:
    module = nn.Sequential(*(Layer(MASKS[name], is_buffer) for _ in range(LAYERS)))
    x = torch.randn(1, T, 8)
    model = mf.from_torch(module, (x,), mesh=TP)
    assert len(model.model.constants) == CONSTANTS[name]
    (y,) = mf.simulate(model.compile(), [*model.load(), x]).outputs
    torch.testing.assert_close(y, module(x).detach())
    folded = model.model.folded
    masks = [n.args[3] for n in model.model.live if "attention" in str(n.target)]
    assert len({id(folded[n]) for n in masks}) == 1 and len(masks) == LAYERS


class Signs(nn.Module):
    """Buffers that are equal as numbers, and not as bits; others of other dtypes and shapes."""

    def __init__(self) -> None:
        super().__init__()
        zeros = torch.zeros(3, 4)
        for name, x in {"a": zeros, "b": -zeros, "c": zeros.T.clone(), "d": zeros.int()}.items():
            self.register_buffer(name, x, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x + 1 / self.a, x + 1 / self.b, x.T + self.c, x + self.d


def test_zeros_of_two_signs_are_apart() -> None:
    x = torch.randn(3, 4)
    model = mf.from_torch(Signs(), (x,), mesh=TP)
    got = mf.simulate(model.compile(), [*model.load(), x]).outputs
    for y, right in zip(got, Signs()(x), strict=True):
        assert torch.equal(y, right)


def test_equal_tensors_are_the_first() -> None:
    distinct, table = Distinct(), torch.randn(5, 40)
    first = distinct.first(table, (40, 1))
    assert first is table and distinct.first(table.clone(), (40, 1)) is table
    others = table.clone(), table.double(), table.view(40, 5), table.neg()
    others[0][3, 7] += 1  # which a sample of the numbers misses
    for x in (*others, table.to(torch.complex64), torch.zeros(0, 3)):
        assert distinct.first(x, x.stride()) is x
    assert distinct.first(table.clone(), (1, 5)) is not table, "other strides"
    nan = torch.full((3,), torch.nan)
    assert distinct.first(nan) is distinct.first(nan.clone())


def test_a_question_is_asked_again_of_what_is_written() -> None:
    asked: list[Any] = []

    @asked_once
    def total(x: Any, scale: int) -> float:
        asked.append(scale)
        return float(x.sum()) * scale

    x = torch.ones(3)
    assert [total(x, 1), total(x, 1), total(x, 2)] == [3.0, 3.0, 6.0] and asked == [1, 2]
    x += 1
    assert total(x, 1) == 6.0 and total(x.clone(), 1) == 6.0 and len(asked) == 4
    with torch.inference_mode():
        assert total(torch.ones(2), 1) == 2.0


@pytest.mark.parametrize("rows", [1, 3])
def test_kinds_of_masks(rows: int) -> None:
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    added = torch.zeros(4, 4).masked_fill(~causal, -torch.inf)
    for x, right in (
        (causal, "causal"), (added, "causal"), (causal | True, "none"), (torch.ones(4, 4), None),
        (added.nan_to_num(neginf=-9.0), None), (causal.T, None), (causal[:, :3], None),
        (causal.triu(-1), 2), (added.masked_fill(~causal.triu(0), -torch.inf), 1),
        (causal.triu(-1) & (torch.arange(4) != 2), None),
    ):  # fmt: skip
        several = x.expand(rows, 2, *x.shape)
        assert kind_of_mask(several, 4, 4) == right
    mixed = torch.stack([causal, causal.T])
    assert kind_of_mask(mixed, 4, 4) is None and kind_of_mask(causal[:3], 3, 4) is None
    assert kind_of_mask(None, 4, 4) is None
