"""Parts of ranks and of their leaves: each leaf has as many elements along each dim as it says."""

from __future__ import annotations

import pytest
import torch

from mdfuse import DeviceMesh, Layout, Shard
from mdfuse.leaves.border import PartBorder
from mdfuse.leaves.deal import Deal


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 8)])
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (5, 0), (16, 16)])
def test_parts_of_leaves_have_their_shapes(shape: tuple[int, int], sizes: tuple[int, int]) -> None:
    """A part without elements may have rows that the rank's has not."""
    deal = Deal(DeviceMesh.arange(a=sizes[0], b=sizes[1]))
    placements = {"a": Shard(0), "b": Shard(1)}
    layout, inner = (Layout(mesh, placements) for mesh in (deal.mesh, deal.leaf_mesh))
    border = PartBorder(shape, layout, inner, deal)
    for rank in deal.mesh.ranks if border.is_cut else ():
        part = torch.zeros(layout.local_shape(shape, rank))
        for leaf, x in border.cut(rank, part).items():
            assert x.shape == inner.local_shape(shape, leaf)
