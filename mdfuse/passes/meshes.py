"""The meshes of a definition, before layouts are inferred: axes of one rank, and other meshes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mdfuse.ir.graph import Fusion
from mdfuse.layouts.layout import Layout, Replicate
from mdfuse.mesh import DeviceMesh


def without_single_axes(fusion: Fusion) -> Fusion:
    """Return the fusion with values whole along axes of one rank, whatever the user stated there.

    Definitions keep what was stated, since a program for other meshes can be made of them.
    """
    return _mapped(fusion, _whole_along_singles)


def _whole_along_singles(ndim: int, layout: Layout) -> Layout:
    axes = [a for a in layout.mesh.axes if layout.mesh.axis_size(a) == 1]
    is_stated = any(layout.placement(a) != Replicate() for a in axes)
    return layout.normalized(ndim) if is_stated else layout


def on_mesh(fusion: Fusion, mesh: DeviceMesh) -> Fusion:
    """Return the fusion with the layouts of all values on another mesh of the same axes."""
    return _mapped(fusion, lambda _, layout: moved(layout, mesh))


def moved(layout: Layout, mesh: DeviceMesh) -> Layout:
    """Return a layout on another mesh of the same axes."""
    return Layout(mesh, layout.by_axis(), layout.order, layout.stream, dict(layout.reaches))


def _mapped(fusion: Fusion, change: Callable[[int, Layout], Layout]) -> Fusion:
    """Return the fusion with another layout of each value that has one."""
    values = dict(fusion.values)
    for name, value in fusion.values.items():
        if value.layout is not None:
            layout = change(len(value.shape), value.layout)
            if layout is not value.layout:
                values[name] = replace(value, layout=layout)
    return replace(fusion, values=values)
