"""Writes of a few elements of a value: calls, labels, shapes.

In the buffer of the value itself they write these elements, and touch no others. An indexed dim may
be split: each rank writes what it has. Among equal places the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import DimMap, Shape, Shapes, check_equal, present, window_grad
from mdfuse.ir.gather_scatter import check_shape
from mdfuse.ir.local_attributes import ExprPart, local_taken

Attrs = Mapping[str, Any]
Span = tuple[int, int]

#: The index of an element that is written nowhere, where a write `drops` such elements.
NOWHERE = -(1 << 62)

#: An index that is in no tensor, so that torch refuses it.
OUT_OF_RANGE = 1 << 62

#: Places are compared pair by pair up to so many pairs: three kernels, where a sort takes ten.
_PAIRS = 1 << 14


# -- calls ---------------------------------------------------------------------------------------


def put(
    *operands: Tensor,
    dims: Sequence[int],
    accumulate: bool = False,
    drops: bool = False,
    box: Sequence[Span] | None = None,
    extents: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Put elements in place of those of x that a tensor of indices per dim names, or add them.

    Args:
        operands: for each of the dims a vector of indices, which may count from the end; the
            elements, of shape [indices, *other dims of x]; x.
        dims: the indexed dims of x.
        accumulate: add the elements instead, equal places one after the other.
        drops: leave out elements with an index NOWHERE.
        box: the part of these dims that x has; None: all of them.
        extents: of these dims, where x is a part.
        out: the buffer of the result; that of x, where it may be overwritten.
    """
    *indices, source, x = operands
    result = _target(x, out)
    if not (source.numel() and result.numel()):
        return result
    others = [d for d in range(x.ndim) if d not in dims]
    turned = result.permute(*dims, *others)
    wholes = [x.shape[d] for d in dims] if extents is None else extents
    is_here, at = _placed(indices, wholes, box, drops)
    if accumulate:
        if is_here is not None:  # -0.0 changes no element that it is added to
            source = source.masked_fill(~is_here.view(-1, *(1,) * len(others)), -0.0)
            at = [torch.where(is_here, i, 0) for i in at]
        turned.index_put_(tuple(at), source, accumulate=True)
        return result
    chosen = torch.arange(len(source), device=source.device)
    if is_here is not None:  # others write what the first that is here writes
        chosen = torch.where(is_here, chosen, is_here.int().argmax())
        at = [torch.where(is_here.any(), i[chosen], 0) for i in at]
    if len(source) > 1:
        source = source.index_select(0, last_of_equals(_joined(at, turned.shape), chosen, 0))
    if is_here is not None:
        source = torch.where(is_here.any(), source, turned[tuple(at)])
    turned.index_put_(tuple(at), source)
    return result


def copy(
    indices: Tensor,
    source: Tensor,
    x: Tensor,
    *,
    along: int,
    drops: bool = False,
    part: tuple[int, int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Put the places of source in place of those of x that indices name; see `put`.

    Args:
        indices: a vector of places along the dim, from 0 on.
        source: has a place for each of them.
        x: what the others are taken from.
        along: dim, counted from 0.
        drops: leave out places with an index NOWHERE.
        part: (start, stop, places in all) where x is that part of the whole.
        out: the buffer of the result.
    """
    check_shape(source.shape, (*x.shape[:along], *indices.shape, *x.shape[along + 1 :]))
    result = _target(x, out)
    if not (source.numel() and result.numel()):
        return result
    is_here, at = _along(indices, x.shape[along], part, drops)
    is_plain = is_here is None and len(indices) == 1  # as a cache is written
    chosen = at if is_plain else torch.arange(len(indices), device=indices.device)
    if is_here is not None:
        chosen = torch.where(is_here, chosen, is_here.int().argmax())
        at = torch.where(is_here.any(), at[chosen], 0)
    if len(indices) > 1:
        source = source.index_select(along, last_of_equals(at, chosen, 0))
    if is_here is not None:
        source = torch.where(is_here.any(), source, result.index_select(along, at))
    return result.index_copy_(along, at, source)


def scatter(
    indices: Tensor,
    source: Tensor,
    x: Tensor,
    *,
    along: int,
    drops: bool = False,
    part: tuple[int, int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Put each element in the place of that of x at its own place, but along a dim at its index.

    Args:
        indices: along the dim, from 0 on; along others no more than x has.
        source: the elements, of the same shape.
        x: what the others are taken from.
        along: dim, counted from 0.
        drops: leave out elements with an index NOWHERE.
        part: (start, stop, places in all) where x is that part of the whole.
        out: the buffer of the result.
    """
    check_shape(source.shape, indices.shape)
    result = _target(x, out)
    if not (source.numel() and result.numel()):
        return result
    is_here, at = _along(indices, x.shape[along], part, drops)
    order = [1] * x.ndim
    order[along] = indices.shape[along]
    chosen = torch.arange(indices.shape[along], device=indices.device).view(order).expand_as(at)
    if is_here is not None:
        chosen = torch.where(is_here, chosen, is_here.int().argmax(along, keepdim=True))
        at = torch.where(is_here.any(along, keepdim=True), at.gather(along, chosen), 0)
    if indices.shape[along] > 1:
        source = source.gather(along, last_of_equals(at, chosen, along))
    if is_here is not None:
        there = result.gather(along, at)
        source = torch.where(is_here.any(along, keepdim=True), source, there)
    return result.scatter_(along, at, source)


def write_window(
    source: Tensor,
    x: Tensor,
    *,
    starts: Sequence[int],
    steps: Sequence[int],
    taken: Sequence[Span] | None = None,
    at: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Put the elements of a slice in place of those of x.

    Args:
        source: the elements.
        x: what the others are taken from.
        starts: per dim, the first place that is written.
        steps: per dim.
        taken: per dim, what x has of the source, where x is a part.
        at: per dim, where that begins in the part.
        out: the buffer of the result.
    """
    result = _target(x, out)
    held = [(0, n) for n in source.shape] if taken is None else taken
    where = [
        slice(first, first + max((stop - start - 1) * step + 1, 0), step)
        for first, (start, stop), step in zip(at or starts, held, steps, strict=True)
    ]
    result[tuple(where)] = source[tuple(slice(*x) for x in held)]
    return result


def _target(x: Tensor, out: Tensor | None) -> Tensor:
    """Return the tensor that is written, with the elements of x."""
    if out is None:
        return x.clone()
    return out if out is x else out.copy_(x)


def _placed(
    indices: Sequence[Tensor], extents: Sequence[int], box: Sequence[Span] | None, drops: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return which elements are in a part (None: all), and the indices there along each dim."""
    is_here: Tensor | None = None
    at = []
    for d, (index, n) in enumerate(zip(indices, extents, strict=True)):
        if box is not None or drops:
            index = torch.where((index < 0) & (index >= -n), index + n, index)
        part = None if box is None else (*box[d], n)
        is_in, there = _along(index, n, part, drops)
        if is_in is not None:
            is_here = is_in if is_here is None else is_here & is_in
        at.append(there)
    return is_here, at


def _along(
    index: Tensor, n: int, part: tuple[int, int, int] | None, drops: bool
) -> tuple[Tensor | None, Tensor]:
    """Return which indices along a dim are in a part (None: all), and where there.

    One that is out of range is so in each part, so that all ranks refuse it.
    """
    is_whole = part is None or part[:2] == (0, part[2])
    if is_whole and not drops:
        return None, index
    start, stop, n = (0, n, n) if part is None else part
    is_wrong = (index < 0) | (index >= n)
    if drops:
        is_wrong = is_wrong & (index != NOWHERE)
    is_here = ((index >= start) & (index < stop)) | is_wrong
    return is_here, torch.where(is_wrong, OUT_OF_RANGE, index - start)


def _joined(at: Sequence[Tensor], extents: Sequence[int]) -> Tensor:
    """Return one number for each place, which several dims give."""
    joined: Tensor | None = None
    for i, n in zip(at, extents, strict=False):
        i = i.remainder(n)
        joined = i if joined is None else joined * n + i
    assert joined is not None
    return joined


def last_of_equals(keys: Tensor, chosen: Tensor, dim: int) -> Tensor:
    """Return for each key along a dim the largest number among those with its key.

    Args:
        keys: places.
        chosen: a number for each of them, from 0 on.
        dim: along which they are compared.
    """
    n = keys.shape[dim]
    if n * keys.numel() <= _PAIRS:
        is_equal = keys.unsqueeze(dim + 1) == keys.unsqueeze(dim)
        return torch.where(is_equal, chosen.unsqueeze(dim), 0).amax(dim + 1)
    ordered, places = keys.sort(dim=dim)
    is_new = ordered.diff(dim=dim, prepend=ordered.narrow(dim, 0, 1)) != 0
    group = is_new.cumsum(dim)
    numbers = chosen.gather(dim, places)
    largest = torch.zeros_like(numbers).scatter_reduce_(dim, group, numbers, "amax")
    return torch.empty_like(numbers).scatter_(dim, places, largest.gather(dim, group))


# -- labels --------------------------------------------------------------------------------------


def of_put(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `indices[n]…, source[n,…], x[…]`; ranks write what they have of indexed dims."""
    labels, dims = tuple(range(len(result))), attrs["dims"]
    source = (None, *(d for d in labels if d not in dims))
    indices = [(None,)] * (len(shapes) - 2)
    return DimMap(operands=(*indices, source, labels), results=(labels,))


def of_copy(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `indices[n], source[…,n,…], x[…,v,…]`; with v split, ranks write what they have."""
    labels, v = tuple(range(len(result))), attrs["along"]
    source = (*labels[:v], None, *labels[v + 1 :])
    return DimMap(operands=((None,), source, labels), results=(labels,), plain=frozenset({v}))


def of_scatter(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `indices[…,n,…], source[…,n,…], x[…,v,…]`; a dim of which few are written is whole."""
    v = attrs["along"]
    given = tuple(d if d != v and n == result[d] else None for d, n in enumerate(shapes[0] or ()))
    labels = tuple(v if d == v else given[d] for d in range(len(result)))
    return DimMap(operands=(given, given, labels), results=(labels,))


def of_window(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label a slice put into x: what it cuts must be whole in it, and may be split in x."""
    labels = window_grad(shapes[:1], result, attrs)
    return DimMap(operands=(*labels.operands, *labels.results), results=labels.results)


# -- shapes --------------------------------------------------------------------------------------


def shape_of_put(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return x's shape; the source has a place per index, and x's other dims."""
    *indices, source, x = present(shapes)
    dims = attrs["dims"]
    if len(indices) != len(dims) or any(i is None or len(i) != 1 for i in indices):
        raise ValueError(f"{len(indices)} vectors of indices for the dims {dims}")
    if max(dims) >= len(x):
        raise ValueError(f"there is no dim {max(dims)}")
    count = tuple(n for i in indices for n in (i or ()))
    wanted = (count[0], *(n for d, n in enumerate(x) if d not in dims))
    check_equal((*source, *count[1:]), (*wanted, *count[:1] * (len(count) - 1)))
    return x


def shape_of_copy(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return x's shape, which is the source's but along the dim."""
    indices, source, x = present(shapes)
    along = _dim(x, attrs)
    check_equal((*indices, *source), (*indices[:1], *x[:along], *indices, *x[along + 1 :]))
    return x


def shape_of_scatter(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return x's shape; indices and source have one shape."""
    indices, source, x = present(shapes)
    _dim(x, attrs)
    check_equal(indices, source)
    if len(indices) != len(x):
        raise ValueError(f"{indices} has other dims than {x}")
    for d, (n, most) in enumerate(zip(indices, x, strict=True)):
        if d != attrs["along"] and type(n) is type(most) is int and n > most:
            raise ValueError(f"{indices} has more than {x} along dim {d}")
    return x


def shape_of_window(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return x's shape, which has the window."""
    source, x = present(shapes)
    window = zip(source, attrs["starts"], attrs["steps"], x, strict=True)
    for n, start, step, end in window if attrs.get("at") is None else ():
        if n and start + (n - 1) * step >= end:
            raise ValueError(f"{n} elements from {start} on by {step} are not in {end}")
    return x


def _dim(x: Shape, attrs: Attrs) -> int:
    along: int = attrs["along"]
    if along not in range(len(x)):
        raise ValueError(f"there is no dim {along}")
    return along


# -- one rank's part -----------------------------------------------------------------------------


def local_box(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say which places of the indexed dims this rank has of x, unless it has all."""
    x, dims = part[-1], attrs["dims"]
    if x.has_all(*dims):
        return attrs
    box, extents = (tuple(of[d] for d in dims) for of in (x.box, x.shape))
    return {**attrs, "box": box, "extents": extents}


def local_window(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say what a rank's part of x has of the window, and where, unless it has all of x."""
    if part.out.has_all(*range(len(part.out.shape))):
        return attrs
    local = local_taken(attrs, part)
    return {**attrs, "taken": local["taken"], "at": local["at"]}
