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


AT, J = torch.tensor([1, -1, 0, 3]), torch.tensor([0, 5, -6, 2])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, i, j: x[i, j],
        lambda x, i, j: x[i[:, None], j],
        lambda x, i, j: x[torch.tensor([3, 0, 0, 1]), j],
        lambda x, i, j: x[i, torch.tensor([3, 0, 5, 1])],
        lambda x, i, j: x[torch.arange(4), j],
        lambda x, i, j: x[None].expand(2, 4, 6)[:, torch.arange(4), j],
        lambda x, i, j: x[..., None].expand(4, 6, 3)[torch.arange(4), j],
        lambda x, i, j: x[torch.arange(x.shape[0]), j.argmax(-1)[None].expand(4)],
    ],
)
def test_several_indices_that_a_run_computes(call: Callable[..., Any], dim: int) -> None:
    layouts = {"input:x": {"tp": Shard(dim)}}
    model = mf.from_torch(Taking(call), (X, AT, J), mesh=TP, layouts=layouts)
    (found,) = mf.simulate(model.compile(), [*model.load(), X, AT, J]).outputs
    assert torch.equal(found, call(X, AT, J))


def test_one_of_each_row_keeps_rows_split() -> None:
    """As the token at the end of each text is chosen."""
    layouts = {"input:*": {"tp": Shard(0)}}
    module = Taking(lambda x, j: x[torch.arange(4), j])
    model = mf.from_torch(module, (X, J), mesh=TP, layouts=layouts)
    assert not model.compile().communications
    found = mf.simulate(model.compile(), [*model.load(), X, J]).outputs
    assert torch.equal(found[0], X[torch.arange(4), J])


def test_one_of_each_row_where_runs_choose_how_many() -> None:
    module = Taking(lambda x, j: x[torch.arange(x.shape[0]), j])
    model = mf.from_torch(
        module, (X, J), mesh=TP, layouts={"input:*": {"tp": Shard(0)}},
        dynamic_shapes={"x": {0: "n"}, "more.0": {0: "n"}},
    )  # fmt: skip
    program = model.compile()
    for n in (4, 7):
        x, j = torch.randn(n, 6), torch.randint(-6, 6, (n,))
        assert torch.equal(mf.simulate(program, [x, j]).outputs[0], x[torch.arange(n), j])


@pytest.mark.parametrize(
    ("call", "more", "text"),
    [
        (lambda x: x[torch.tensor([0, 4])], (), "indexed by 4 along dim 0"),
        (lambda x: x[:, torch.tensor([-7])], (), "indexed by -7 along dim 1"),
    ],
)
def test_refused(call: Callable[..., Any], more: tuple[Tensor, ...], text: str) -> None:
    with pytest.raises(DefinitionError, match=text):
        mf.from_torch(Taking(call), (X, *more), mesh=TP)


def written(index: Any, value: Any = 0.5, add: bool = False) -> Callable[..., Tensor]:
    """A copy of x with values written at an index."""

    def call(x: Tensor, j: Tensor) -> Tensor:
        x = x.clone()
        at = index(x, j)
        x[at] = x[at] + value if add else value(x) if callable(value) else value
        return x

    return call


KNOWN = torch.tensor([True, False, True, True])
WRITES: dict[str, Callable[..., Any]] = {
    "a mask": written(lambda x, j: x > 7),
    "rows by a mask": written(lambda x, j: x[:, 0] > 7, lambda x: x[0] * 2),
    "columns": written(lambda x, j: (slice(None), j), lambda x: x[:, :2].sin()),
    "a known mask": written(lambda x, j: KNOWN, lambda x: x[:3].cos()),
    "columns by a known mask": written(
        lambda x, j: (slice(None), torch.tensor([True] * 2 + [False] * 4))),
    "added": lambda x, j: x.index_put((j,), torch.ones(2, 6), accumulate=True),
    "added by a mask": lambda x, j: x.index_put((x > 7,), x[0, 1], accumulate=True),
    "rows that a known mask takes": lambda x, j: x[KNOWN],
    "rows of a constant": lambda x, j: torch.zeros(4, 6)[j] + x[:2],
}  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_and_masks(name: str, dim: int) -> None:
    call, j = WRITES[name], torch.tensor([3, 1])
    layouts = {"input:x": {"tp": Shard(dim)}}
    model = mf.from_torch(Taking(call), (X, j), mesh=TP, layouts=layouts)
    given = [*model.load(), *model.inputs(X, j)]
    assert torch.equal(mf.simulate(model.compile(), given).outputs[0], call(X, j))
