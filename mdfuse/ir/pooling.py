"""Pooling over the last dims: the largest of windows, their means, and what comes back to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import DimMap, Shape, Shapes, check_equal, present
from mdfuse.ir.dtype_limits import lowest
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.ir.windows import Attrs, around_of, labels_of_places, local_rows, reaches_of, with_rows
from mdfuse.layouts.boxes import Interval, box_shape
from mdfuse.layouts.halo import Reach

_F: Any = torch.nn.functional
_ATEN: Any = torch.ops.aten
#: How many dims a window has -> torch's function.
_POOLS = {1: _F.max_pool1d, 2: _F.max_pool2d, 3: _F.max_pool3d}


# -- the largest ---------------------------------------------------------------------------------


def max_pool(
    x: Tensor,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool = False,
    around: Sequence[int] | None = None,
    begins: Sequence[int] | None = None,
    extents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the largest element of each window, and its place in the spatial dims as one.

    Args:
        x: its spatial dims are the last ones.
        kernel, stride, padding, dilation: a number per spatial dim.
        ceil: windows may end behind the padding.
        around: where places are split, the rows that stand around x instead of the padding.
        begins: where the rows of x then begin in the whole.
        extents: of the spatial dims of the whole.
    """
    n = len(kernel)
    if n not in _POOLS:
        raise ValueError(f"a window of {n} dims")
    how = [list(k) for k in (kernel, stride, padding, dilation)]
    if around is None or begins is None or extents is None:
        values, places = _POOLS[n](x, *how, ceil, return_indices=True)
        return values, places
    wide = with_rows(x, around, lowest(x.dtype))
    rows = zip(wide.shape[-n:], kernel, stride, dilation, strict=True)
    windows = (*x.shape[:-n], *((m - (k - 1) * d - 1) // s + 1 for m, k, s, d in rows))
    if not math.prod(windows):
        return x.new_empty(windows), x.new_empty(windows, dtype=torch.int64)
    how[2] = [0] * n
    values, places = _POOLS[n](wide, *how, False, return_indices=True)
    flat = torch.zeros_like(places)
    scale = 1
    for d in reversed(range(n)):
        outer, row = places // wide.shape[d - n], places % wide.shape[d - n]
        row = row + (begins[d] - around[2 * d])
        flat, scale, places = (
            flat + row.clamp(0, extents[d] - 1) * scale,
            scale * extents[d],
            outer,
        )
    return values, flat


def few_pooled(x: Tensor, *, kernel: Sequence[int], **how: Any) -> tuple[Tensor, Tensor]:
    """Pool where each dim has two elements, whatever the windows."""
    one = [1] * len(kernel)
    return max_pool(x, kernel=one, stride=one, padding=[0] * len(kernel), dilation=one)


def max_pool_grad(
    places: Tensor,
    ct: Tensor,
    *,
    shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool = False,
    box: Sequence[Interval] | None = None,
) -> Tensor:
    """Add up what comes back to each place; the rest is zero.

    Args:
        places: as `max_pool` returns them.
        ct: what comes back to the largest elements.
        shape: of the whole that was pooled.
        kernel, stride, padding, dilation, ceil: its windows.
        box: the part of it that is made; None: all of it.
    """
    n = len(kernel)
    if box is None:
        how = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
        shape_of_pool_grad((places.shape, ct.shape), {**how, "ceil": ceil, "shape": tuple(shape)})
    spans = [(0, m) for m in shape] if box is None else [*box]
    grad_shape = box_shape(tuple(spans))
    at, inside = places, None
    if grad_shape[-n:] != tuple(shape[-n:]):
        at, scale = torch.zeros_like(places), 1
        inside = torch.ones_like(places, dtype=torch.bool)
        for (start, stop), extent in [*zip(spans, shape, strict=True)][: -n - 1 : -1]:
            row, places = places % extent, places // extent
            inside = inside & (row >= start) & (row < stop)
            at, scale = at + (row - start) * scale, scale * (stop - start)
        at, ct = torch.where(inside, at, 0), torch.where(inside, ct, 0)
    ct_of_x = ct.new_zeros((*grad_shape[:-n], math.prod(grad_shape[-n:])))
    if ct_of_x.numel() and ct.numel():
        ct_of_x.scatter_add_(-1, at.flatten(-n), ct.flatten(-n))
    return ct_of_x.reshape(grad_shape)


def few_pooled_grad(places: Tensor, ct: Tensor, *, kernel: Sequence[int], **how: Any) -> Tensor:
    """Add up what comes back where each dim has two elements, whatever the windows."""
    one = [1] * len(kernel)
    settings: dict[str, Any] = {"stride": one, "padding": [0] * len(kernel), "dilation": one}
    return max_pool_grad(torch.zeros_like(places), ct, shape=ct.shape, kernel=one, **settings)


def of_pool(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label the largest of windows, and their places."""
    labels, reaches = _of_windows(result, attrs, (0,))
    return DimMap(operands=(labels,), results=(labels, labels), reaches=reaches)


def _of_windows(
    result: Shape, attrs: Attrs, at: Sequence[int]
) -> tuple[tuple[int | None, ...], dict[Any, Reach]]:
    free, kernel = len(result) - len(attrs["kernel"]), attrs["kernel"]
    reaches = reaches_of(result, kernel, attrs, at)
    return (*range(free), *labels_of_places(reaches, len(kernel))), reaches


def of_pool_grad(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label places, what comes back to them, and what was pooled."""
    labels, reaches = _of_windows(result, {**attrs, "transposed": True}, (0, 1))
    return DimMap(operands=(labels, labels), results=(labels,), reaches=reaches)


def pooled(n: int, k: int, s: int, p: int, d: int, ceil: bool) -> int:
    """Return how many windows there are: none begins behind the padding on the left and x."""
    room = n + 2 * p - d * (k - 1) - 1
    if 2 * p > k:
        raise ValueError(f"a padding of {p} is more than half a window of {k}")
    if room < 0 and not ceil:
        raise ValueError(f"{n} elements, padded by {p}, are fewer than a window of {k}")
    count = (-(-room // s) if ceil else room // s) + 1
    return count - 1 if ceil and (count - 1) * s >= n + p else count


def shape_of_pool(shapes: Shapes, attrs: Attrs) -> tuple[Shape, Shape]:
    """Return the shapes of the largest elements, and of their places."""
    (x,) = present(shapes)
    names = ("kernel", "stride", "padding", "dilation")
    n = len(attrs["kernel"])
    if len(x) not in (n + 1, n + 2):
        raise ValueError(f"{x} has other dims than channels and {n} more")
    settings = [attrs[name] for name in names]
    around = attrs.get("around")
    if around is not None:  # a rank's part
        counts = tuple(
            (m + sum(around[2 * i : 2 * i + 2]) - (k - 1) * d - 1) // s + 1
            for i, (m, k, s, _, d) in enumerate(zip(x[-n:], *settings, strict=True))
        )
        return (*x[:-n], *counts), (*x[:-n], *counts)
    ceil = bool(attrs.get("ceil"))
    dims = zip(x[-n:], *settings, strict=True)
    counts = tuple(pooled(m, k, s, p, d, ceil) for m, k, s, p, d in dims)
    if any(f < 1 for f in counts):
        raise ValueError("there is no window")
    shape = (*x[:-n], *counts)
    return shape, shape


def shape_of_pool_grad(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of what was pooled, or of the rank's box, checked with the operands."""
    places, ct = shapes
    box = attrs.get("box")
    if box is not None:
        return box_shape(box)
    for given in (places, ct):
        check_equal(given or (), shape_of_pool((attrs["shape"],), attrs)[0])
    return tuple(attrs["shape"])


def local_pool(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the rows around those that this rank has, and their places."""
    x, kernel = part[0], tuple(attrs["kernel"])
    local = local_rows(attrs, x, part.out, kernel)
    if "around" not in local:
        return attrs
    n = len(kernel)
    return {**local, "begins": tuple(a for a, _ in x.box[-n:]), "extents": x.shape[-n:]}


# -- means ---------------------------------------------------------------------------------------


def mean_pool(
    x: Tensor,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    made: Sequence[int],
    divisor: int,
    transposed: bool = False,
    around: Sequence[int] | None = None,
) -> Tensor:
    """Return the sum of each window, divided; or transposed what comes back to rows from windows.

    Args:
        x: its spatial dims are the last ones.
        kernel, stride, padding: a number per spatial dim.
        made: the spatial extents of the whole result.
        divisor: of each sum.
        transposed: spread what is in x over the rows of its windows.
        around: where places are split, the rows that stand around x, or around what is spread.
    """
    n = len(kernel)
    attrs: Attrs = {"kernel": kernel, "stride": stride, "padding": padding, "made": made}
    attrs = {**attrs, "divisor": divisor, "transposed": transposed, "around": around}
    shape = shape_of_mean((tuple(x.shape),), attrs)
    if not (x.numel() and math.prod(shape)):
        return x.new_zeros(shape)
    if around is None:
        read, whole = ([(0, m) for m in extents] for extents in (x.shape[-n:], made))
        around = around_of(read, whole, tuple(kernel), {**attrs, "dilation": (1,) * n})
    if n == 1:  # torch's own means over one dim take no divisor
        x, kernel, stride = x.unsqueeze(-2), (1, *kernel), (1, *stride)
        around = (0, 0, *around)
    dims, how = len(kernel), (list(kernel), list(stride))
    if transposed:
        rows = zip(x.shape[-dims:], kernel, stride, strict=True)
        spread = x.new_empty((*x.shape[:-dims], *((m - 1) * s + k for m, k, s in rows)))
        back = {2: _ATEN.avg_pool2d_backward, 3: _ATEN.avg_pool3d_backward}[dims]
        means = with_rows(back(x, spread, *how, [0] * dims, False, True, divisor), around)
    else:
        mean = {2: _F.avg_pool2d, 3: _F.avg_pool3d}[dims]
        means = mean(with_rows(x, around), *how, divisor_override=divisor)
    return means.squeeze(-2) if n == 1 else means


def few_means(x: Tensor, *, kernel: Sequence[int], divisor: int, **how: Any) -> Tensor:
    """Return means where each dim has two elements, whatever the windows."""
    one = [1] * len(kernel)
    settings: dict[str, Any] = {"padding": [0] * len(kernel), "made": x.shape[-len(kernel) :]}
    return mean_pool(x, kernel=one, stride=one, divisor=divisor, **settings)


def of_mean(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label the means of windows, or the rows of what they are spread over."""
    labels, reaches = _of_windows(result, {**attrs, "dilation": (1,) * len(attrs["kernel"])}, (0,))
    return DimMap(operands=(labels,), results=(labels,), reaches=reaches)


def shape_of_mean(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the means, or of what they are spread over."""
    (x,) = present(shapes)
    kernel, stride, padding = (attrs[name] for name in ("kernel", "stride", "padding"))
    n, means, around = len(kernel), attrs["made"], attrs.get("around")
    if n not in _POOLS or len(x) not in (n + 1, n + 2) or len(means) != n or not attrs["divisor"]:
        raise ValueError(f"windows of {n} dims, divided by {attrs['divisor']}, do not fit {x}")
    settings = [*zip(x[-n:], means, kernel, stride, padding, strict=True)]
    if around is not None:  # a rank's part
        padding_of = [sum(around[2 * d : 2 * d + 2]) for d in range(n)]
        parts = [(m, k, s, e) for (m, _, k, s, _), e in zip(settings, padding_of, strict=True)]
        if attrs.get("transposed"):
            return (*x[:-n], *((m - 1) * s + k + e for m, k, s, e in parts))
        return (*x[:-n], *((m + e - k) // s + 1 for m, k, s, e in parts))
    for read, count, k, s, p in settings:
        rows, windows = (count, read) if attrs.get("transposed") else (read, count)
        if min(windows, rows, k, s) < 1 or 2 * p > k or (windows - 1) * s >= rows + p:
            raise ValueError(f"{rows} elements, padded by {p}, have no {windows} windows of {k}")
    return (*x[:-n], *means)


def local_mean(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the rows around those that this rank has."""
    kernel = tuple(attrs["kernel"])
    how = {**attrs, "dilation": (1,) * len(kernel)}
    local = local_rows(how, part[0], part.out, kernel)
    return {**attrs, "around": local["around"]} if "around" in local else attrs
