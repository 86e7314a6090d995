"""Leaves: the ranks of a mesh of fixed size, which the ranks of a job share out among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mdfuse.errors import LoweringError
from mdfuse.layouts.boxes import nth_chunk
from mdfuse.mesh import DeviceMesh

#: The leaves along each axis, and so the most ranks along it.
LEAVES = 8


@dataclass(frozen=True)
class Deal:
    """The leaves that each rank computes.

    Along each axis there are `LEAVES` of them, dealt out to its ranks as `torch.chunk` does. Leaves
    are numbered as the ranks of `leaf_mesh`.

    Attributes:
        mesh: of the ranks.

    Raises:
        LoweringError: an axis has more ranks than leaves.

    >>> deal = Deal(DeviceMesh.arange(dp=3))
    >>> deal.leaf_mesh, [deal.leaves_of(rank) for rank in deal.mesh]
    (mesh(dp=8), [(0, 1, 2), (3, 4, 5), (6, 7)])
    """

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        for axis, size in zip(self.mesh.axes, self.mesh.shape, strict=True):
            if size > LEAVES:
                raise LoweringError(
                    f"same_bits with {size} ranks along {axis}",
                    because=f"an axis has {LEAVES} leaves, each of which one rank computes",
                    hint=f"a mesh of at most {LEAVES} ranks along each axis",
                )

    @cached_property
    def leaf_mesh(self) -> DeviceMesh:
        """The mesh that has the leaves for ranks."""
        ndim = self.mesh.ndim
        return DeviceMesh.of((LEAVES,) * ndim, range(LEAVES**ndim), self.mesh.axes)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """For each leaf the rank that computes it."""
        along = [_owners(size) for size in self.mesh.shape]
        owners = []
        for leaf in range(self.leaf_mesh.size):
            position = 0
            for size, of, at in zip(
                self.mesh.shape, along, self.leaf_mesh.unravel(leaf), strict=True
            ):
                position = position * size + of[at]
            owners.append(self.mesh.ranks[position])
        return tuple(owners)

    def leaves_of(self, rank: int) -> tuple[int, ...]:
        """Return the leaves of a rank, which may be none."""
        return tuple(leaf for leaf, owner in enumerate(self.ranks) if owner == rank)

    def team(self, leaves: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that compute some leaves, each once, in the order of these."""
        return tuple(dict.fromkeys(self.ranks[leaf] for leaf in leaves))

    def __str__(self) -> str:
        pairs = zip(self.mesh.axes, self.mesh.shape, strict=True)
        return "; ".join(
            f"{axis}: {LEAVES} on {size} rank{'s' * (size > 1)} ({_counts(size)})"
            for axis, size in pairs
        )


def _owners(size: int) -> list[int]:
    """Return for each leaf of an axis the coordinate of its rank."""
    owners: list[int] = []
    for coordinate in range(size):
        start, stop = nth_chunk((0, LEAVES), size, coordinate)
        owners += [coordinate] * (stop - start)
    return owners


def _counts(size: int) -> str:
    owners = _owners(size)
    return ", ".join(str(owners.count(coordinate)) for coordinate in range(size))
