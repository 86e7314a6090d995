"""Norms of weights, imported, beside the module."""

from __future__ import annotations

import pytest
import torch
from helpers.beside_module import MESHES, check_beside, numbers
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dim", [0, 1, -2, None])
def test_weight_norm(dim: int | None, mesh: str) -> None:
    torch.manual_seed(0)
    module = weight_norm(nn.Linear(8, 4, dtype=torch.float64), dim=dim)  # type: ignore[arg-type]
    check_beside(module, (numbers(4, 8),), mesh)
