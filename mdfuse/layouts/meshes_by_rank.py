"""An index of several meshes by rank."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from mdfuse.mesh import DeviceMesh


class MeshesByRank:
    """An index of several meshes by rank, which does not look at each mesh.

    >>> a, b = DeviceMesh([0, 1], ["x"]), DeviceMesh([1, 3], ["x"])
    >>> MeshesByRank([a, b]).of(1) == (a, b), MeshesByRank([a, b]).of(2)
    (True, ())
    """

    def __init__(self, meshes: Sequence[DeviceMesh]) -> None:
        self._order = {id(mesh): n for n, mesh in enumerate(meshes)}
        self._listed: dict[int, list[DeviceMesh]] = defaultdict(list)
        begins: dict[int, list[DeviceMesh]] = defaultdict(list)
        ends: dict[int, list[DeviceMesh]] = defaultdict(list)
        for mesh in meshes:
            if mesh.is_consecutive:
                begins[mesh.first].append(mesh)
                ends[mesh.first + mesh.size].append(mesh)
            else:
                for rank in mesh:
                    self._listed[rank].append(mesh)
        self._starts = sorted({*begins, *ends})
        #: start -> the meshes of consecutive ranks that contain all ranks up to the next start
        self._from: list[tuple[DeviceMesh, ...]] = []
        open_meshes: dict[int, DeviceMesh] = {}
        for start in self._starts:
            for mesh in ends[start]:
                del open_meshes[id(mesh)]
            open_meshes.update((id(mesh), mesh) for mesh in begins[start])
            self._from.append(tuple(open_meshes.values()))

    def of(self, rank: int) -> tuple[DeviceMesh, ...]:
        """Return the meshes that have a rank, in the order in which they were given."""
        at = bisect_right(self._starts, rank) - 1
        meshes = self._from[at] if at >= 0 else ()
        meshes = (*meshes, *self._listed.get(rank, ()))
        return tuple(sorted(meshes, key=lambda mesh: self._order[id(mesh)]))
