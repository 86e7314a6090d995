"""Intermediate layouts of a reshard: replicas, or holders of terms, share the later steps."""

from __future__ import annotations

import math
from itertools import permutations

from mdfuse.layouts.layout import Layout, Placement, Replicate, Shard


def placed(layout: Layout, axes: tuple[str, ...], placement: Placement) -> Layout:
    """Return a layout with another placement along some axes; new splits come innermost."""
    is_plain = not (layout.blocked or layout.reaches)
    if not axes or not is_plain or not isinstance(placement, Shard | Replicate):
        for axis in axes:
            layout = layout.with_placement(axis, placement)
        return layout
    mesh, splits = layout.mesh, {d: [a for a in of if a not in axes] for d, of in layout.splits}
    if isinstance(placement, Shard):
        splits.setdefault(placement.dim, []).extend(axes)
    pairs = zip(mesh.axes, layout.placements, strict=True)
    placements = tuple([placement if a in axes else p for a, p in pairs])
    of = tuple([(d, tuple(split_axes)) for d, split_axes in sorted(splits.items()) if split_axes])
    return Layout.checked(mesh, placements, of, layout.stream, ())


def splits_of(layout: Layout, axes: tuple[str, ...], shape: tuple[int, ...]) -> list[Layout]:
    """Return a layout with some axes whole, and its splits by these axes or by all whole axes.

    The other whole axes split the same dim, or another one.
    """
    whole = placed(layout, axes, Replicate())
    free = tuple(a for a, p in whole.by_axis().items() if isinstance(p, Replicate))
    free = tuple(a for a in free if layout.mesh.axis_size(a) > 1)
    others = tuple(a for a in free if a not in axes) if axes else ()
    dims = free_dims(layout, shape)
    ways = [{d: of} for d in dims for of in dict.fromkeys((axes, free)) if of]
    ways += [{d: axes, e: others} for d, e in permutations(dims, 2) if axes and others]
    room, layouts = whole.local_shape(shape), [whole]
    for way in ways:
        if all(room[d] >= math.prod(map(layout.mesh.axis_size, of)) for d, of in way.items()):
            split = whole
            for d, of in way.items():
                split = placed(split, of, Shard(d))
            layouts.append(split)
    return layouts


def free_dims(layout: Layout, shape: tuple[int, ...]) -> list[int]:
    """Return the dims that ranks may split: all but the dim in chunks."""
    chunked = layout.stream.dim if layout.stream is not None else None
    return [d for d in range(len(shape)) if d != chunked]
