"""Terms of index expressions: loop indices, and numbers that depend on the rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mdfuse.extents.expressions import Index, terms
from mdfuse.hir.program import BufferType, Instruction
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh


def index_names(i: Instruction, types: Mapping[str, BufferType]) -> set[str]:
    """Return the loop indices in an instruction itself, not those that its operands depend on."""
    layouts = [kind.layout for n in i.outputs if (kind := types.get(n)) is not None]
    if i.comm is not None:
        layouts += [i.comm.source, i.comm.destination]
    return names_in(layouts, i.indices)


def names_in(layouts: Iterable[Layout | None], indices: tuple[Index, ...] = ()) -> set[str]:
    """Return the loop indices in layouts, and in some index expressions."""
    for layout in layouts:
        if layout is not None and layout.stream is not None and layout.stream.index is not None:
            indices = (*indices, layout.stream.index)
    if not indices:
        return set()
    return {t.name for index in indices for t in terms(index) if t.kind == "index"}


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
