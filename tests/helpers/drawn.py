"""Random numbers that are the same in every run, on every rank."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers; others for another shape, or another seed."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


#: The same in f64, for gradients.
numbers = partial(drawn, dtype=torch.float64)
