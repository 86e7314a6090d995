"""Tell along which axes an index expression may be another number on other ranks."""

from __future__ import annotations

from mdfuse.extents.expressions import Index, terms
from mdfuse.mesh import DeviceMesh


def depends_on_rank(index: object) -> bool:
    """Return whether an index expression may be another number on other ranks."""
    return any(t.kind in ("rank", "coord") for t in terms(index))


def axes_of(index: Index, mesh: DeviceMesh) -> frozenset[str]:
    """Return the axes of a mesh along which an index expression may be another number."""
    every = frozenset(a for a in mesh.axes if mesh.axis_size(a) > 1)
    axes: set[str] = set()
    for term in terms(index):
        if term.kind == "coord" and term.name in mesh.axes:
            axes.add(term.name)
        elif term.kind in ("rank", "coord"):
            axes |= every
    return every & axes
