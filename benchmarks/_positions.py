"""Positions of a sequence that are split over ranks: who has which, and torch's ring of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def positions(size: int, ranks: int, rank: int, is_zigzag: bool) -> Tensor:
    """Return which positions a rank has."""
    if not is_zigzag:
        return torch.arange(size).chunk(ranks)[rank]
    chunks = torch.arange(size).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


@contextmanager
def ring(mesh: Any, device: torch.device) -> Iterator[None]:
    """Let `F.scaled_dot_product_attention` see the keys of all ranks, in zigzag order.

    What torch splits here is a stand-in, since it takes no empty list: values come split.

    Args:
        mesh: torch's, of one dim.
        device: of the values.
    """
    from torch.distributed.tensor.experimental import context_parallel

    stand_in = torch.zeros(1, 2 * mesh.size(), device=device)
    with context_parallel(mesh, buffers=[stand_in], buffer_seq_dims=[1]):
        yield
