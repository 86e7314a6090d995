"""Norms of weights, imported, beside the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.beside_module import MESHES, check_beside, numbers
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dim", [0, 1, -2, None])
def test_weight_norm(dim: int | None, mesh: str) -> None:
    torch.manual_seed(0)
    module = weight_norm(nn.Linear(8, 4, dtype=torch.float64), dim=dim)  # type: ignore[arg-type]
    check_beside(module, (numbers(4, 8),), mesh)


class Norms(nn.Module):
    """Norms of what a linear layer makes."""

    def __init__(self, *orders: Any, dim: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.orders, self.dim = orders, dim
        self.into = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        y = self.into(x)
        return [torch.linalg.norm(y, n, self.dim, keepdim=True) for n in self.orders]


@pytest.mark.parametrize(
    "module", [Norms(None), Norms(None, 1, 3, dim=-1), Norms(None, dim=(0, 1)), Norms(2, dim=(0,))]
)
def test_norms_of_vectors(module: nn.Module) -> None:
    check_beside(module, (numbers(4, 8),), "tp=2")


def test_norms_of_matrices_are_refused() -> None:
    with pytest.raises(DefinitionError, match="norms of vectors alone"):
        mf.from_torch(Norms(2), (numbers(4, 8),), mesh=DeviceMesh.arange(tp=2))
