"""Layouts as users state them, checked against their values."""

from __future__ import annotations

from typing import Any

import torch

from mdfuse.communication import check_reduce_op
from mdfuse.errors import CommunicationError, LayoutError, Source
from mdfuse.frontend.sites import Site
from mdfuse.ir.graph import Value, value_text
from mdfuse.layouts.blocks import segments
from mdfuse.layouts.layout import Layout, Partial, Placement
from mdfuse.layouts.stream import Stream
from mdfuse.mesh import DeviceMesh

#: Axes, each with its placement.
Pairs = tuple[tuple[str, Placement], ...]


def layout(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    site: Site,
    mesh: DeviceMesh | Layout | None,
    placements: Pairs | None,
    order: tuple[tuple[int, tuple[str, ...]], ...],
    stream: Stream | None,
) -> Layout:
    """Return the layout that the user stated for a value, checked against it."""
    if mesh is None:
        raise LayoutError(
            f"%{name} has a layout but no mesh", where=site.where, hint="pass mesh= as well"
        )
    if isinstance(mesh, Layout) and (placements or order or stream):
        raise LayoutError(
            f"%{name}: a Layout and placements at once",
            where=site.where,
            hint=".on(layout), or .on(mesh, {axis: placement})",
        )
    if isinstance(mesh, Layout) and mesh.reaches:
        raise LayoutError(
            f"%{name} as {mesh}",
            where=site.where,
            because="values are in parts that do not overlap; rows of other parts are received "
            "where an operation reads them",
            hint="the same layout without reaches",
        )
    if not isinstance(mesh, Layout):
        mesh = Layout(mesh, dict(placements or ()), dict(order), stream)
    try:
        normalized = mesh.normalized(len(shape), singles=True)
        for dim, blocks in normalized.blocked.items():
            segments(blocks, shape[dim])  # refuses blocks of another extent
        for placement in normalized.placements:
            if isinstance(placement, Partial):
                check_reduce_op(placement.op, dtype)
    except (LayoutError, CommunicationError) as error:
        raise LayoutError(
            f"%{name}: {error.what}", where=site.where, because=error.because, hint=error.hint
        ) from error
    return normalized


def of_value(value: Value, site: Site, *said: Any) -> Layout:
    """Return the layout that the user stated for a recorded value; see `layout`."""
    stated = layout(value.name, value.shape, value.dtype, site, *said)
    if value.rows is not None and stated.split_axes(2):
        raise LayoutError(
            f"%{value.name}: {value.type_text()} as {stated}",
            where=site.where,
            because=f"a run counts the rows along dim 2, in %{value.rows}; no axis splits them",
            hint="split dim 0, the parts of the tokens, or dim 1, the experts",
        )
    return stated


def check_unplaced(value: Value, law: str, site: Site, first: Source | None) -> None:
    """Raise LayoutError for a law on a scalar, or on a value with a law since `first`."""
    name = value.name
    if not value.is_tensor:
        raise LayoutError(
            f"%{name} is placed, but it is a scalar",
            where=site.where,
            because="every rank has every scalar",
            hint="leave .on() out",
        )
    if value.layout is not None or value.like is not None:
        said = value.layout if value.like is None else f"as %{value.like.of}"
        raise LayoutError(
            f"%{name} {law}, but its law says {said}",
            where=[*site.where, f"stated at {first.quote()}" if first else ""],
            because="a value has one layout; the second .on() contradicts the first",
            hint=f"reshard with a set: fd.ops.set({name}).on(...)",
        )


def check_referee(value: Value, other: Value, site: Site) -> None:
    """Raise LayoutError unless a value may have the layout of the other one."""
    if not other.is_tensor or len(other.shape) != len(value.shape):
        raise LayoutError(
            f"%{value.name}: {value.type_text()} lies as {value_text(other)}"
            + ("" if other.is_tensor else ", which is a scalar"),
            where=site.where,
            because="a layout says of each dim which axes split it",
            hint="a tensor with as many dims, or .on(mesh, {axis: placement})",
        )
    if other.name == value.name:
        raise LayoutError(
            f"%{value.name} lies as itself",
            where=site.where,
            because="its layout would wait for itself",
            hint="say as which other value, or .on(mesh, {axis: placement})",
        )


def counted_from_0(value: Value, placements: Pairs, site: Site) -> Pairs:
    """Return the placements of a value along some axes, with dims counted from 0."""
    mesh = DeviceMesh.arange(**{axis: 2 for axis, _ in placements}) if placements else None
    if mesh is None:
        return ()
    whole = layout(value.name, value.shape, value.dtype, site, mesh, placements, (), None)
    return tuple(whole.by_axis().items())


def too_late(name: str, site: Site, used: Source | None) -> LayoutError:
    """Return the error for a law stated after the first use of its value."""
    return LayoutError(
        f"%{name} is placed after its first use",
        where=[*site.where, f"used at {used.quote()}" if used else ""],
        because="a law is stated before the value is used",
        hint="write .on(...) where the value is defined",
    )
