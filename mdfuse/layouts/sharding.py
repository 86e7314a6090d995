"""Global tensors and the parts of them that ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mdfuse.errors import LayoutError, counted, shown
from mdfuse.layouts.boxes import Rows, boxes_of, index_of
from mdfuse.layouts.layout import Layout, Partial, Placement
from mdfuse.mesh import DeviceMesh

if TYPE_CHECKING:
    from torch import Tensor

Where = DeviceMesh | Layout


def as_layout(
    where: Where,
    placements: Mapping[str, Placement] | None = None,
    order: Mapping[int, Sequence[str]] | None = None,
) -> Layout:
    """Return a `Layout` that is given as one, or as mesh and placements."""
    if isinstance(where, Layout):
        return where
    return Layout(where, placements, order)


def shard_tensor(
    tensor: Tensor,
    mesh: Where,
    placements: Mapping[str, Placement] | None = None,
    *,
    rank: int,
    order: Mapping[int, Sequence[str]] | None = None,
) -> Tensor:
    """Cut the part of a rank out of a global tensor: a view where that is possible.

    Along Partial(sum) axes the first rank gets the value and the others zeros; along Partial(prod)
    the others get ones; along the other ops every rank gets the value.

    Args:
        tensor: the global tensor.
        mesh: a mesh, or a Layout.
        placements: axis -> placement.
        rank: whose part.
        order: see `Layout`.

    >>> import torch
    >>> from mdfuse import DeviceMesh, Shard
    >>> shard_tensor(torch.arange(5), DeviceMesh.arange(tp=2), {"tp": Shard(0)}, rank=1)
    tensor([3, 4])
    """
    _check_tensor(tensor, "a global tensor")
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise LayoutError(f"rank={shown(rank)}", because="a rank is an integer that counts from 0")
    layout = as_layout(mesh, placements, order).normalized(tensor.ndim)
    part = cut_out(tensor, layout.rows(tuple(tensor.shape), rank))
    coordinate = layout.mesh.coordinate(rank)
    assert coordinate is not None
    for axis in layout.partial_axes:
        placement = layout.placement(axis)
        assert isinstance(placement, Partial)
        if coordinate[layout.mesh.axis_index(axis)] == 0:
            continue
        if placement.op in ("sum", "bxor"):
            part = part.new_zeros(part.shape)
        elif placement.op == "prod":
            part = part.new_ones(part.shape)
    return part


def _check_tensor(x: object, what: str) -> None:
    from torch import Tensor, strided

    if not isinstance(x, Tensor) or x.is_nested or x.layout != strided:
        raise LayoutError(f"{shown(x)} is not {what}", hint="pass a dense tensor")


def cut_out(tensor: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Return the rows of a tensor: a view, or a copy where those of a dim are in several runs."""
    import torch

    for dim, pieces in enumerate(rows):
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in pieces]
        if len(parts) > 1:
            tensor = torch.cat(parts, dim)
        else:
            (tensor,) = parts
    return tensor


def unshard_tensor(
    parts: Sequence[Tensor],
    mesh: Where,
    placements: Mapping[str, Placement] | None = None,
    *,
    order: Mapping[int, Sequence[str]] | None = None,
) -> Tensor:
    """Put a global tensor together from the parts of a mesh's ranks, in row-major order.

    Raises:
        LayoutError: the parts do not fit together.

    >>> import torch
    >>> from mdfuse import DeviceMesh, Shard
    >>> parts = [torch.tensor([0, 1, 2]), torch.tensor([3, 4])]
    >>> unshard_tensor(parts, DeviceMesh.arange(tp=2), {"tp": Shard(0)})
    tensor([0, 1, 2, 3, 4])
    """
    if not isinstance(parts, list | tuple) or not parts:
        what = f"parts={shown(parts)}" if parts is not None else "no parts"
        raise LayoutError(what, hint="pass a list: the part of every rank of the mesh")
    for part in parts:
        _check_tensor(part, "a part")
    layout = as_layout(mesh, placements, order).normalized(parts[0].ndim)
    if len(parts) != layout.mesh.size:
        raise LayoutError(
            f"{counted(len(parts), 'part')} for {counted(layout.mesh.size, 'rank')}",
            hint="pass the part of every rank of the mesh, in row-major order",
        )
    shape = _global_shape(layout, parts)
    return _assemble(layout, parts, shape)


def _global_shape(layout: Layout, parts: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the global shape: local extents added up along the axes that split each dim."""
    shape = list(parts[0].shape)
    for dim, axes in layout.splits:
        total = 0
        for index, part in enumerate(parts):
            coordinate = layout.mesh.unravel(index)
            others = [c for a, c in zip(layout.mesh.axes, coordinate, strict=True) if a not in axes]
            total += part.shape[dim] if not any(others) else 0
        shape[dim] = total
    return tuple(shape)


def _assemble(layout: Layout, parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Put parts in their places, in one tensor per term of a Partial value, and reduce these."""
    layers: dict[tuple[int, ...], Tensor] = {}
    partial_at = [layout.mesh.axis_index(a) for a in layout.partial_axes]
    for index, part in enumerate(parts):
        coordinate = layout.mesh.unravel(index)
        rows = layout.rows_at(shape, coordinate)
        if tuple(part.shape) != layout.local_shape(shape, layout.mesh.ranks[index]):
            raise LayoutError(
                f"the part of rank {layout.mesh.ranks[index]} has shape {tuple(part.shape)}",
                because=f"its part of {shape} laid out as {layout} is "
                f"{layout.local_shape(shape, layout.mesh.ranks[index])}",
                hint="pass the parts in the row-major order of the mesh, with its layout",
            )
        layer = tuple(coordinate[i] for i in partial_at)
        if layer not in layers:
            layers[layer] = part.new_empty(shape)
        for box, place in boxes_of(rows):
            layers[layer][index_of(box)] = part[index_of(place)]
    for axis in reversed(layout.partial_axes):  # the coordinate along the last one goes first
        layers = _reduced(layers, layout.placement(axis))
    return layers[()]


def _reduced(
    layers: Mapping[tuple[int, ...], Tensor], placement: Placement
) -> dict[tuple[int, ...], Tensor]:
    """Return the terms of a Partial value reduced along the last of their coordinates."""
    import torch

    from mdfuse.layouts.reduction import check_reduction, combine

    assert isinstance(placement, Partial)
    rows: dict[tuple[int, ...], list[Tensor]] = {}
    for layer in sorted(layers):
        check_reduction(placement.op, layers[layer].dtype)
        rows.setdefault(layer[:-1], []).append(layers[layer])
    return {
        layer: combine(placement.op, torch.stack([x.reshape(-1) for x in each])).reshape(
            each[0].shape
        )
        for layer, each in rows.items()
    }
