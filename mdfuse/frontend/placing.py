"""Turn layouts as users state them into keys of the definition cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from mdfuse.errors import LayoutError
from mdfuse.frontend.plain import brief
from mdfuse.layouts.layout import Layout, Placement
from mdfuse.layouts.stream import Stream
from mdfuse.mesh import DeviceMesh

_PLACEMENTS = frozenset((*get_args(Placement), Stream))


def placed(
    mesh: Any,
    placements: Mapping[str, Placement] | None,
    order: Mapping[int, Sequence[str]] | None,
    stream: Stream | None,
) -> tuple[Any, ...]:
    """Return a stated layout as a key: (mesh, placements, order, stream)."""
    if mesh is not None and type(mesh) is not DeviceMesh and type(mesh) is not Layout:
        mesh = DeviceMesh(mesh)
    if placements is not None and not (type(placements) is dict or isinstance(placements, Mapping)):
        raise LayoutError(
            f"{brief(placements)} is no layout",
            hint='a mapping of axes: {"tp": Shard(0)}, or a Layout',
        )
    if order is not None and not (
        isinstance(order, Mapping) and all(map(_names_axes, order.items()))
    ):
        raise LayoutError(
            f"order={brief(order)}",
            because="an order says of dims which axes split them, outermost first",
            hint='for example order={0: ("tp", "dp")}',
        )
    if stream is not None and type(stream) is not Stream:
        raise LayoutError(f"stream={brief(stream)}", hint="stream=Stream(dim, chunks), or none")
    pairs = tuple(placements.items()) if placements else ()
    for axis, placement in pairs:
        is_placement = type(placement) in _PLACEMENTS or isinstance(placement, Placement | Stream)
        if type(axis) is not str or not is_placement:
            raise LayoutError(
                f"axis {brief(axis)}: {brief(placement)} is not a placement",
                because="a layout says of axes, by their names, what lies along them",
                hint="mdfuse's own: mdfuse.Shard(dim), mdfuse.Replicate(), mdfuse.Partial(op)",
            )
    ordered = tuple([(d, tuple(axes)) for d, axes in order.items()]) if order else ()
    return mesh, pairs, ordered, stream


def _names_axes(item: tuple[Any, Any]) -> bool:
    dim, axes = item
    are_names = isinstance(axes, list | tuple) and all(isinstance(a, str) for a in axes)
    return type(dim) is int and are_names
