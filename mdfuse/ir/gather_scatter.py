"""Lookups by tensors of indices, and sums by index: calls, labels, shapes.

A dim that indices run over may be split: each rank looks up what it has, and zeros stand for the
rest, so that the sum over the ranks is the lookup. The table never travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import DimMap, Shape, Shapes, check_equal, present
from mdfuse.ir.dtype_limits import neutral
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.layouts.boxes import box_shape

Attrs = Mapping[str, Any]
Span = tuple[int, int]

#: reduce op -> as torch calls it.
_NAMES = {"sum": "sum", "prod": "prod", "max": "amax", "min": "amin"}


# -- calls ---------------------------------------------------------------------------------------


def select(
    indices: Tensor, table: Tensor, *, along: int, part: tuple[int, int, int] | None = None
) -> Tensor:
    """Take the places of a dim that indices name; their dims stand in the place of the dim.

    Args:
        indices: of places along the dim, from 0 on.
        table: what they look up.
        along: dim of the table, counted from 0.
        part: (start, stop, places in all) where the table is that part of the whole: what is
            outside of it comes back as zeros.
    """
    shape = (*table.shape[:along], *indices.shape, *table.shape[along + 1 :])
    is_here, at = _in_part(indices, part)
    if not table.shape[along]:
        return table.new_zeros(shape)
    rows = torch.index_select(table, along, at.reshape(-1)).reshape(shape)
    if is_here is None:
        return rows
    return torch.where(is_here.reshape(*is_here.shape, *(1,) * (table.ndim - 1 - along)), rows, 0)


def _in_part(indices: Tensor, part: tuple[int, int, int] | None) -> tuple[Tensor | None, Tensor]:
    """Return which indices are in a part (None: all), and where there; others become 0."""
    if part is None or part[:2] == (0, part[2]):
        return None, indices
    is_here = (indices >= part[0]) & (indices < part[1])
    return is_here, torch.where(is_here, indices - part[0], 0)


def select_grad(
    indices: Tensor,
    ct: Tensor,
    *,
    shape: Sequence[int],
    along: int,
    box: Sequence[Span] | None = None,
) -> Tensor:
    """Add up, at each place of a dim, the elements with its index; other places are zero.

    Args:
        indices: of places along the dim.
        ct: its dims are those of the result, with those of the indices in the place of the dim.
        shape: of the whole result.
        along: dim, counted from 0.
        box: the part of the result that is made; None: all of it.
    """
    result_shape, part = _local_result(shape, along, box)
    check_shape(ct.shape, (*result_shape[:along], *indices.shape, *result_shape[along + 1 :]))
    is_here, at = _in_part(indices, part)
    if is_here is not None:
        ct = ct.masked_fill(
            ~is_here.reshape(*is_here.shape, *(1,) * (len(result_shape) - 1 - along)), 0
        )
    result = ct.new_zeros(result_shape)
    rows = ct.reshape(
        *result_shape[:along], -1 if indices.numel() else 0, *result_shape[along + 1 :]
    )
    return result.index_add_(along, at.reshape(-1), rows) if result_shape[along] else result


def _local_result(
    shape: Sequence[int], dim: int, box: Sequence[Span] | None
) -> tuple[tuple[int, ...], tuple[int, int, int] | None]:
    """Return the shape of a rank's result, and its part of a dim."""
    if box is None:
        return tuple(shape), None
    return tuple(stop - start for start, stop in box), (*box[dim], shape[dim])


def check_shape(shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise ValueError for another shape than is wanted."""
    if tuple(shape) != tuple(wanted):
        raise ValueError(f"{tuple(shape)} is not {tuple(wanted)}")


def gather(
    indices: Tensor, x: Tensor, *, along: int, part: tuple[int, int, int] | None = None
) -> Tensor:
    """Take an element of x for each index: at its place, but along the dim at the index."""
    check_shape(
        (*indices.shape[:along], *indices.shape[along + 1 :]),
        (*x.shape[:along], *x.shape[along + 1 :]),
    )
    is_here, at = _in_part(indices, part)
    if not x.shape[along]:
        return x.new_zeros(indices.shape)
    elements = torch.gather(x, along, at)
    return elements if is_here is None else torch.where(is_here, elements, 0)


def scatter(
    indices: Tensor,
    src: Tensor,
    *,
    shape: Sequence[int],
    along: int,
    reduce: str,
    box: Sequence[Span] | None = None,
) -> Tensor:
    """Join the elements that have one index, at its place along the dim.

    Args:
        indices: of places along the dim.
        src: of the same shape.
        shape: of the whole result; it differs from that of the indices along the dim alone.
        along: dim, counted from 0.
        reduce: how they are joined; where there is none its neutral element stands.
        box: the part of the result that is made; None: all of it.
    """
    result_shape, part = _local_result(shape, along, box)
    check_shape(src.shape, indices.shape)
    check_shape(
        (*indices.shape[:along], *indices.shape[along + 1 :]),
        (*result_shape[:along], *result_shape[along + 1 :]),
    )
    nothing = neutral(reduce, src.dtype)
    is_here, at = _in_part(indices, part)
    if is_here is not None:
        src = torch.where(is_here, src, nothing)
    result = src.new_full(result_shape, nothing)
    return result.scatter_reduce_(along, at, src, _NAMES[reduce]) if result_shape[along] else result


# -- labels --------------------------------------------------------------------------------------


def of_select(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `indices[…], table[…,v,…]`; with v split, ranks take what they have: Partial(sum)."""
    n, v = len(shapes[1] or ()), attrs["along"]
    indices = tuple(n + d for d in range(len(shapes[0] or ())))
    table = tuple(range(n))
    return DimMap(
        operands=(indices, table),
        results=((*table[:v], *indices, *table[v + 1 :]),),
        reduces={v: "sum"},
        plain=frozenset({v}),
    )


def of_select_grad(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label the transpose: elements with one index add up, each rank may compute its own v."""
    n, v = len(result), attrs["along"]
    indices = tuple(n + d for d in range(len(shapes[0] or ())))
    labels = tuple(range(n))
    return DimMap(
        operands=(indices, (*labels[:v], *indices, *labels[v + 1 :])),
        results=(labels,),
        reduces=dict.fromkeys(indices, "sum"),
        plain=frozenset({v}),
    )


def of_gather(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `indices[…,n,…], x[…,v,…]`; with v split, ranks take what they have: Partial(sum)."""
    n, v = len(result), attrs["along"]
    taken = tuple(range(n))
    return DimMap(
        operands=(taken, (*taken[:v], n, *taken[v + 1 :])),
        results=(taken,),
        reduces={n: "sum"},
        plain=frozenset({n}),
    )


def of_scatter(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `indices[…,n,…], src[…,n,…]` and a result […,v,…]: splits of n are reduced."""
    n, v = len(result), attrs["along"]
    labels = tuple(range(n))
    given = (*labels[:v], n, *labels[v + 1 :])
    return DimMap(
        operands=(given, given),
        results=(labels,),
        reduces={n: attrs["reduce"]},
        plain=frozenset({v}),
    )


# -- shapes --------------------------------------------------------------------------------------


def shape_of_select(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the table's shape with the indices' in the place of the dim."""
    indices, table = present(shapes)
    _check_dim(table, attrs)
    return (*table[: attrs["along"]], *indices, *table[attrs["along"] + 1 :])


def shape_of_gather(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the indices, which is x's but along the dim."""
    indices, x = present(shapes)
    _check_dim(x, attrs)
    for d, (a, b) in enumerate(zip(indices, x, strict=True)):
        if d != attrs["along"] and a != b:
            raise ValueError(f"{a} is not {b}")
    return indices


def shape_of_made(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape in the attributes, or that of the rank's box, checked with the operands."""
    indices, given = present(shapes)
    result_shape, dim = attrs["shape"], attrs["along"]
    if attrs.get("box") is not None:
        result_shape = box_shape(attrs["box"])
    _check_dim(result_shape, attrs)
    if "reduce" in attrs:
        shape_of_gather((indices, result_shape), attrs)
        wanted = indices
    else:
        wanted = (*result_shape[:dim], *indices, *result_shape[dim + 1 :])
    check_equal(given, wanted)
    return tuple(result_shape)


def _check_dim(shape: Shape, attrs: Attrs) -> None:
    if attrs["along"] not in range(len(shape)):
        raise ValueError(f"there is no dim {attrs['along']}")


# -- one rank's part -----------------------------------------------------------------------------


def local_part(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say which places of the dim this rank has of what is last, unless it has all."""
    x, dim = part[-1], attrs["along"]
    return attrs if x.has_all(dim) else {**attrs, "part": x.ends(dim)}
