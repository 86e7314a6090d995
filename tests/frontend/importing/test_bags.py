"""Bags of rows, imported, beside the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.beside_module import MESHES, check_beside, numbers
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh

IDS = torch.tensor([[0, 2, 1], [3, 0, 2], [1, 1, 3], [2, 0, 0]])
#: The second bag is empty.
STARTS = torch.tensor([0, 5, 5, 9])


class Bag(nn.Module):
    """A table, and where bags begin, if not in each row."""

    def __init__(self, starts: Tensor | None = None, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.EmbeddingBag(4, 8, dtype=torch.float64, **how)
        self.starts = starts

    def forward(self, ids: Tensor, *factors: Tensor) -> Tensor:
        result: Tensor = self.rows(ids, self.starts, *factors)
        return result


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size(mode: str, mesh: str) -> None:
    check_beside(Bag(mode=mode), (IDS,), mesh)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_several_sizes(mode: str) -> None:
    check_beside(Bag(STARTS, mode=mode), (IDS.flatten(),), "fsdp=4")


def test_bags_that_end_where_it_is_said() -> None:
    ends = torch.cat([STARTS, torch.tensor([12])])
    check_beside(Bag(ends, mode="mean", include_last_offset=True), (IDS.flatten(),), "tp=2")


@pytest.mark.parametrize("starts", [None, STARTS], ids=["one size", "several"])
def test_factors_of_rows(starts: Tensor | None) -> None:
    shape = IDS.shape if starts is None else (IDS.numel(),)
    check_beside(Bag(starts, mode="sum"), (IDS.reshape(shape), numbers(*shape)), "tp=2")


@pytest.mark.parametrize(
    ("bag", "said"),
    [(Bag(STARTS, mode="max"), "bags of several sizes are added up"),
     (Bag(STARTS, padding_idx=1), "per_sample_weights of 0")],
)  # fmt: skip
def test_what_is_refused(bag: nn.Module, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        mf.from_torch(bag, (IDS.flatten(),), mesh=DeviceMesh.arange(tp=2)).compile()
