"""Tensors of indices: which become views, which rows, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, Shard

TP = DeviceMesh.arange(tp=2)
X = torch.arange(24.0).reshape(4, 6)


class Taking(nn.Module):
    """A function of a tensor, as a module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.call(x, *more)


def test_indices_that_spread_dims_keep_them_split() -> None:
    """As masks are indexed by batches and positions: a view, nothing is sent."""

    def call(x: Tensor) -> Tensor:
        rows, columns = torch.arange(4), torch.arange(6)
        return x[rows[:, None, None], columns]

    model = mf.from_torch(Taking(call), (X,), mesh=TP, layouts={"input:x": {"tp": Shard(0)}})
    program = model.compile()
    assert not program.communications
    assert {e.op for e in model.fusion.exprs} == {"unsqueeze"}
    assert torch.equal(mf.simulate(program, [X]).outputs[0], call(X))


def test_rows_of_a_split_table_are_looked_up() -> None:
    """The table is not gathered: what is looked up is reduced."""
    known = torch.tensor([3, 0, 3])
    module = Taking(lambda x: x[known])
    table = torch.arange(96.0).reshape(16, 6)
    model = mf.from_torch(module, (table,), mesh=TP, layouts={"input:x": {"tp": Shard(0)}})
    assert [c.kind for c in model.compile().communications] == ["Allreduce"]
    assert torch.equal(mf.simulate(model.compile(), [table]).outputs[0], table[known])


@pytest.mark.parametrize(
    ("call", "more", "text"),
    [
        (lambda x: x[torch.tensor([0, 4])], (), "indexed by 4 along dim 0"),
        (lambda x: x[:, torch.tensor([-7])], (), "indexed by -7 along dim 1"),
        (
            lambda x, i, j: x[i, j],
            (torch.tensor([1, 0]), torch.tensor([0, 5])),
            "a tensor that a run computes",
        ),
    ],
)
def test_refused(call: Callable[..., Any], more: tuple[Tensor, ...], text: str) -> None:
    with pytest.raises(DefinitionError, match=text):
        mf.from_torch(Taking(call), (X, *more), mesh=TP)
