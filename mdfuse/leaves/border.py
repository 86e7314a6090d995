"""Between what callers pass and get, in parts of ranks, and the parts of leaves.

Where the parts of a rank consist of those of its leaves they are cut and joined; where they do not,
as those of 3 ranks of 12 rows, parts are gathered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mdfuse.ir.infer import dense_strides
from mdfuse.layouts.boxes import Box, box_size, index_of, intersect, relative
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.sharding import shard_tensor, unshard_tensor
from mdfuse.leaves.deal import Deal
from mdfuse.leaves.meeting import Parcels, Rounds

#: Bytes to which leaves align what they read: libraries choose code by it.
_ALIGNED = 64


@dataclass(frozen=True)
class PartBorder:
    """An input or an output: its parts on ranks, and on leaves.

    Attributes:
        shape: of the whole.
        layout: on the mesh of the ranks.
        leaf_layout: on that of the leaves.
        deal: who computes which leaves.
    """

    shape: tuple[int, ...]
    layout: Layout
    leaf_layout: Layout
    deal: Deal

    @cached_property
    def is_cut(self) -> bool:
        """True if the part of each rank contains those of its leaves."""
        return all(
            _inside(self._leaf_boxes[leaf], self._boxes[rank])
            for rank in self.deal.mesh.ranks
            for leaf in self.deal.leaves_of(rank)
        )

    @cached_property
    def is_joined(self) -> bool:
        """True if the parts of its leaves contain the part of each rank."""
        return all(map(self._is_covered, self.deal.mesh.ranks))

    def _is_covered(self, rank: int) -> bool:
        box = self._boxes[rank]
        if box is None:
            return False
        pieces = {self._leaf_boxes[leaf] for leaf in self.deal.leaves_of(rank)}
        shared = [intersect(piece, box) for piece in pieces if piece is not None]
        covered = sum(box_size(x) for x in shared if x is not None)
        return None not in pieces and covered == box_size(box)

    @cached_property
    def _boxes(self) -> dict[int, Box | None]:
        """Rank -> its part; None where it has several runs of a dim."""
        return {rank: _one_run(self.layout, self.shape, rank) for rank in self.deal.mesh.ranks}

    @cached_property
    def _leaf_boxes(self) -> dict[int, Box | None]:
        return {n: _one_run(self.leaf_layout, self.shape, n) for n in self.deal.leaf_mesh.ranks}

    # -- in --------------------------------------------------------------------------------------

    def cut(self, rank: int, x: Tensor) -> dict[int, Tensor]:
        """Return the parts of a rank's leaves; those that are alike are one tensor.

        A part that lies as a new tensor would is not copied.
        """
        local = self._boxes[rank]
        parts: dict[Box | None, Tensor] = {}
        by_leaf: dict[int, Tensor] = {}
        for leaf in self.deal.leaves_of(rank):
            box = self._leaf_boxes[leaf]
            assert local is not None and box is not None
            if box not in parts:
                part = x.new_empty(_shape(box))
                if box_size(box):  # without elements it may lie outside of the rank's
                    part = x[index_of(relative(box, local))]
                parts[box] = part if lies_as_new(part) else as_new(part)
            by_leaf[leaf] = parts[box]
        return by_leaf

    def gathered(self, rank: int, x: Tensor, into: dict[int, Tensor]) -> Rounds:
        """Gather the whole from all ranks, and put the parts of this rank's leaves into a dict."""
        mesh = self.deal.mesh
        parts = {
            r: x if r == rank else x.new_empty(self.layout.local_shape(self.shape, r))
            for r in mesh.ranks
        }
        parts[rank] = mine = x.contiguous()
        others = [r for r in mesh.ranks if r != rank]
        yield Parcels(mesh.ranks, {r: [mine] for r in others}, {r: [parts[r]] for r in others})
        whole = unshard_tensor([parts[r] for r in mesh.ranks], self.layout)
        for leaf in self.deal.leaves_of(rank):
            into[leaf] = as_new(shard_tensor(whole, self.leaf_layout, rank=leaf))

    # -- out -------------------------------------------------------------------------------------

    def joined(
        self, rank: int, parts: dict[int, Tensor], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the part of a rank, from those of its leaves."""
        box = self._boxes[rank]
        assert box is not None
        for leaf, x in parts.items():
            if self._leaf_boxes[leaf] == box:
                return x
        result = torch.empty(_shape(box), dtype=dtype, device=device)
        for leaf, x in parts.items():
            piece = self._leaf_boxes[leaf]
            assert piece is not None
            if (common := intersect(piece, box)) is not None:
                result[index_of(relative(common, box))] = x[index_of(relative(common, piece))]
        return result

    def exchanged(
        self, rank: int, parts: dict[int, Tensor], dtype: torch.dtype, device: torch.device,
        into: list[Tensor],
    ) -> Rounds:  # fmt: skip
        """Gather the parts of all leaves, and put the part of this rank into a list."""
        mesh, leaves = self.deal.mesh, self.deal.leaf_mesh.ranks
        first: dict[object, int] = {}
        of = {
            leaf: first.setdefault(self.leaf_layout.rows(self.shape, leaf), leaf) for leaf in leaves
        }
        held = {
            leaf: parts[leaf].contiguous()
            if leaf in parts
            else torch.empty(
                self.leaf_layout.local_shape(self.shape, leaf), dtype=dtype, device=device
            )
            for leaf in first.values()
        }
        by_rank = {
            r: [held[leaf] for leaf in held if self.deal.ranks[leaf] == r] for r in mesh.ranks
        }
        others = [r for r in mesh.ranks if r != rank]
        yield Parcels(
            mesh.ranks, dict.fromkeys(others, by_rank[rank]), {r: by_rank[r] for r in others}
        )
        whole = unshard_tensor([held[of[leaf]] for leaf in leaves], self.leaf_layout)
        into.append(shard_tensor(whole, self.layout, rank=rank).clone())


def lies_as_new(x: Tensor) -> bool:
    """Return whether a tensor lies in memory as a new one does, so that kernels are the same.

    Strides of dims of one element count: libraries look at them, too.
    """
    return x.stride() == dense_strides(x.shape) and x.data_ptr() % _ALIGNED == 0


def as_new(x: Tensor) -> Tensor:
    """Return a copy in new memory, row by row."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _one_run(layout: Layout, shape: Sequence[int], rank: int) -> Box | None:
    rows = layout.rows(shape, rank)
    return tuple(runs[0] for runs in rows) if all(len(runs) == 1 for runs in rows) else None


def _shape(box: Box) -> list[int]:
    return [stop - start for start, stop in box]


def _inside(piece: Box | None, box: Box | None) -> bool:
    if piece is None or box is None:
        return False
    return not box_size(piece) or intersect(piece, box) == piece
