"""Convolutions and pooling over the last dims: batches, channels and places may be split.

A convolution is a product: with the channels of its input split, ranks sum up their shares. Where
places are split, a rank reads the rows that its windows reach (`mdfuse.layouts.reach`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import DimMap, Shape, Shapes, always
from mdfuse.ir.extremes import lowest
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.layouts.boxes import Interval, box_shape
from mdfuse.layouts.reach import Reach

Attrs = Mapping[str, Any]

_F: Any = torch.nn.functional
_ATEN: Any = torch.ops.aten
#: How many dims a window has -> torch's function.
_POOLS = {1: _F.max_pool1d, 2: _F.max_pool2d, 3: _F.max_pool3d}

#: The labels of a convolution: batch, channels of the input, channels of the result; then places.
_N, _IN, _OUT, _AT = 0, 1, 2, 3


# -- windows -------------------------------------------------------------------------------------


def _window(of: int, stride: int, padding: int, spread: int) -> Reach:
    """Return what windows read, each of so many rows."""
    return Reach(of=of, up=stride, down=1, first=-padding, last=spread - padding)


def _windows_at(of: int, stride: int, padding: int, spread: int) -> Reach:
    """Return the windows that read a row."""
    first = padding - spread + stride
    return Reach(of=of, up=1, down=stride, first=first, last=padding + stride)


def _reaches(made: Shape, kernel: Shape, attrs: Attrs, at: Sequence[int]) -> dict[Any, Reach]:
    """Return which rows of some operands the places of a result need; {} where a run chooses."""
    if not all(type(n) is int for n in (*made, *kernel)):
        return {}
    of = _windows_at if attrs.get("transposed") else _window
    settings = zip(attrs["stride"], attrs["padding"], attrs["dilation"], strict=True)
    return {
        (operand, len(made) - len(kernel) + d): of(n, s, p, (k - 1) * e + 1)
        for d, (n, k, (s, p, e)) in enumerate(
            zip(made[len(made) - len(kernel) :], kernel, settings, strict=True)
        )
        for operand in at
    }


def _places(reaches: Mapping[Any, Reach], n: int) -> tuple[int | None, ...]:
    """Return the labels of the dims of places: they may be split where reaches are known."""
    return tuple(_AT + d for d in range(n)) if reaches else (None,) * n


def _edges(
    read: Interval, made: Interval, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[int, int]:
    """Return how many rows are to stand around those that windows of a rank read."""
    rows = (made[1] - made[0] - 1) * stride + (kernel - 1) * dilation + 1
    before = read[0] - made[0] * stride + padding if read[0] < read[1] else 0
    return before, rows - before - (read[1] - read[0])


def _cut(
    read: Interval, made: Interval, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[int, int]:
    """Return how many rows are to stand around those that are spread; below 0: how many go."""
    rows = (read[1] - read[0] - 1) * stride + (kernel - 1) * dilation + 1
    before = read[0] * stride - padding - made[0] if read[0] < read[1] else 0
    return before, made[1] - made[0] - rows - before


def _around(
    reads: Sequence[Interval], makes: Sequence[Interval], kernel: Shape, attrs: Attrs
) -> tuple[int, ...]:
    """Return the rows around each dim of places on a rank, as (before, behind, before, …)."""
    find = _cut if attrs.get("transposed") else _edges
    settings = zip(attrs["stride"], attrs["padding"], attrs["dilation"], strict=True)
    dims = zip(reads, makes, kernel, settings, strict=True)
    return tuple(e for r, m, k, how in dims for e in find(r, m, k, *how))


def _with_rows(x: Tensor, around: Sequence[int], value: Any = 0) -> Tensor:
    """Return a tensor with rows around the last dims, or without some."""
    pairs = [around[i : i + 2] for i in range(0, len(around), 2)]
    flat = [n for pair in reversed(pairs) for n in pair]
    return _F.pad(x, flat, value=value) if any(flat) else x


# -- convolutions --------------------------------------------------------------------------------


def convolve(
    x: Tensor,
    weight: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    transposed: bool = False,
    more: Sequence[int] | None = None,
    here: int | None = None,
    around: Sequence[int] | None = None,
) -> Tensor:
    """Convolve x[n,i,…] with weight[o,i/groups,…], or transposed with weight[i,o/groups,…].

    Args:
        x: its spatial dims are the last ones.
        weight: as many spatial dims.
        stride, padding, dilation: a number per spatial dim.
        groups: of channels, each with its own weights.
        transposed: spread the input instead of collecting it.
        more: of a transposed one, what is added to the extents of the result.
        here: how many of the groups this part has; None: all.
        around: where places are split, the rows that stand around x, or the result of a transposed
            one, instead of the padding.
    """
    none = [0] * len(stride)
    if not (x.numel() and weight.numel()):  # a rank that has no channels, or no rows
        how: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
        how |= {"groups": groups, "transposed": transposed, "here": here, "more": more}
        made = shape_of_convolution((x.shape, weight.shape), {**how, "around": around})
        return x.new_zeros(made)
    if around is not None:
        padding, more = none, none
        x = x if transposed else _with_rows(x, around)
    settings = (stride, padding, dilation, transposed, more or none, here or groups)
    found: Tensor = _ATEN.convolution(x, weight, None, *settings)
    return _with_rows(found, around) if around is not None and transposed else found


def convolve_weight(
    ct: Tensor,
    x: Tensor,
    *,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    around: Sequence[int] | None = None,
    box: Sequence[Interval] | None = None,
) -> Tensor:
    """Return what comes back to the weight of a convolution of x; settings are its own.

    Args:
        ct: what comes back to its result.
        x: what it read.
        shape: of the whole weight.
        stride, padding, dilation, groups, around: as `convolve` takes them.
        box: the part of the weight that is made; None: all of it.
    """
    made = tuple(shape) if box is None else box_shape(tuple(box))
    if not (ct.numel() and x.numel() and math.prod(made)):
        return x.new_zeros(made)
    if around is not None:
        padding, x = [0] * len(stride), _with_rows(x, around)
    here = groups * made[0] // shape[0] if groups > 1 else 1
    settings = (stride, padding, dilation, False, [0] * len(stride), here)
    wanted = [False, True, False]
    found: Tensor = _ATEN.convolution_backward(ct, x, x.new_empty(made), None, *settings, wanted)[1]
    return found


def few_convolved(x: Tensor, weight: Tensor, **how: Any) -> Tensor:
    """Convolve where each dim has two elements, whatever the strides."""
    one = [1] * (x.ndim - 2)
    return convolve(x, weight, stride=one, padding=one, dilation=one)


def few_convolved_weight(ct: Tensor, x: Tensor, **how: Any) -> Tensor:
    """Return what comes back to a weight where each dim has two elements."""
    one = [1] * (x.ndim - 2)
    wide = ct.new_ones((2, 2, *(3 for _ in one)))
    return convolve_weight(wide, x, shape=x.shape, stride=one, padding=one, dilation=one)


def of_convolution(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[n,i,…], w[o,i,…]`; with groups, whole groups of all channels are split alike."""
    x, weight = shapes
    assert x is not None and weight is not None
    reaches = _reaches(result, weight[2:], attrs, (0,))
    rest, places = (None,) * (len(x) - 2), _places(reaches, len(x) - 2)
    groups = attrs.get("groups", 1)
    own: tuple[int, int] = (_IN, _OUT) if attrs.get("transposed") else (_OUT, _IN)
    if groups > 1:
        labels = (_N, _OUT, *places)
        return DimMap(
            operands=(labels, (_OUT, None, *rest)),
            results=(labels,),
            fits=_whole_groups(groups),
            reaches=reaches,
        )
    return DimMap(
        operands=((_N, _IN, *places), (*own, *rest)),
        results=((_N, _OUT, *places),),
        reduces={_IN: "sum"},
        reaches=reaches,
    )


def _whole_groups(groups: int) -> Callable[[int, tuple[int, ...]], bool]:
    return lambda label, sizes: label != _OUT or groups % math.prod(sizes) == 0


def of_convolution_weight(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `ct[n,o,…], x[n,i,…]` and a weight [o,i,…]: it adds up over batch and places."""
    ct, x = shapes
    assert ct is not None and x is not None
    reaches = _reaches(ct, result[2:], attrs, (1,))
    rest, places = (None,) * (len(x) - 2), _places(reaches, len(x) - 2)
    groups = attrs.get("groups", 1)
    channels = _OUT if groups > 1 else _IN
    return DimMap(
        operands=((_N, _OUT, *places), (_N, channels, *places)),
        results=((_OUT, None if groups > 1 else _IN, *rest),),
        reduces=dict.fromkeys((_N, *(x for x in places if x is not None)), "sum"),
        fits=_whole_groups(groups) if groups > 1 else always,
        reaches=reaches,
    )


def shape_of_convolution(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape [n,o,…], by the formulas of `torch.nn.Conv2d` and `ConvTranspose2d`."""
    x, weight = shapes
    assert x is not None and weight is not None
    groups, is_transposed = attrs.get("here") or attrs.get("groups", 1), attrs.get("transposed")
    settings = [attrs["stride"], attrs["padding"], attrs["dilation"]]
    more = attrs.get("more") or (0,) * len(settings[0])
    channels = weight[1] * groups if is_transposed else weight[0]
    if (weight[0] if is_transposed else weight[1] * groups) != x[1] or weight[0] % groups:
        raise ValueError(f"a weight {weight} with {groups} groups does not fit {x}")
    around = attrs.get("around")
    found = []
    for at, (n, k, s, p, d, m) in enumerate(zip(x[2:], weight[2:], *settings, more, strict=True)):
        spread = (k - 1) * d + 1
        rows = m - 2 * p if around is None else sum(around[2 * at : 2 * at + 2])
        if is_transposed:
            found.append((n - 1) * s + spread + rows)
            if around is None and found[-1] < 1:
                raise ValueError(f"{n} elements leave {found[-1]}")
            continue
        rows = 2 * p if around is None else rows
        if around is None and n + rows < spread:
            raise ValueError(f"{n} elements, padded by {p}, are fewer than {spread}")
        found.append((n + rows - spread) // s + 1)
    return (x[0], channels, *found)


def shape_of_convolution_weight(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the weight, or of the rank's box, checked with the cotangent's."""
    ct, x = shapes
    assert ct is not None and x is not None
    made, box = attrs["shape"], attrs.get("box")
    if box is not None:
        return box_shape(box)
    for a, b in zip(ct, shape_of_convolution((x, made), attrs), strict=True):
        if a != b:
            raise ValueError(f"{a} is not {b}")
    return tuple(made)


def local_convolution(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Count the groups that this rank has of the weight, and say what stands around its rows."""
    (x, weight), box = part.shapes, part.boxes[1]
    assert x is not None and weight is not None and box is not None
    if attrs.get("groups", 1) > 1 and weight[0]:
        attrs = {**attrs, "here": attrs["groups"] * box_shape(box)[0] // weight[0]}
    return _local_rows(attrs, (x, part.boxes[0]), (part.shape, part.box), weight[2:])


def _local_rows(
    attrs: dict[str, Any], read: tuple[Shape, Any], made: tuple[Shape, Any], kernel: Shape
) -> dict[str, Any]:
    """Say what stands around the rows that this rank reads, unless it has all.

    What is read and what is made are (shape, box).
    """
    n = len(kernel)
    (x, reads), (y, makes) = ((shape[-n:], box[-n:]) for shape, box in (read, made))
    if (box_shape(reads), box_shape(makes)) == (x, y):
        return attrs
    return {**attrs, "around": _around(reads, makes, kernel, attrs)}


def local_convolution_weight(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say which part of the weight this rank makes, and what stands around its rows of x."""
    ct, x = part.shapes
    assert ct is not None and x is not None
    attrs = {**attrs, "shape": part.shape, "box": part.box}
    return _local_rows(attrs, (x, part.boxes[1]), (ct, part.boxes[0]), part.shape[2:])


# -- pooling -------------------------------------------------------------------------------------


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
    wide = _with_rows(x, around, lowest(x.dtype))
    rows = zip(wide.shape[-n:], kernel, stride, dilation, strict=True)
    made = (*x.shape[:-n], *((m - (k - 1) * d - 1) // s + 1 for m, k, s, d in rows))
    if not math.prod(made):
        return x.new_empty(made), x.new_empty(made, dtype=torch.int64)
    how[2] = [0] * n
    values, places = _POOLS[n](wide, *how, False, return_indices=True)
    found = torch.zeros_like(places)
    scale = 1
    for d in reversed(range(n)):
        rest, row = places // wide.shape[d - n], places % wide.shape[d - n]
        row = row + (begins[d] - around[2 * d])
        found, scale, places = (
            found + row.clamp(0, extents[d] - 1) * scale,
            scale * extents[d],
            rest,
        )
    return values, found


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
    made = box_shape(tuple(spans))
    at, inside = places, None
    if made[-n:] != tuple(shape[-n:]):
        at, scale = torch.zeros_like(places), 1
        inside = torch.ones_like(places, dtype=torch.bool)
        for (start, stop), extent in [*zip(spans, shape, strict=True)][: -n - 1 : -1]:
            row, places = places % extent, places // extent
            inside = inside & (row >= start) & (row < stop)
            at, scale = at + (row - start) * scale, scale * (stop - start)
        at, ct = torch.where(inside, at, 0), torch.where(inside, ct, 0)
    found = ct.new_zeros((*made[:-n], math.prod(made[-n:])))
    if found.numel() and ct.numel():
        found.scatter_add_(-1, at.flatten(-n), ct.flatten(-n))
    return found.reshape(made)


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
    reaches = _reaches(result, kernel, attrs, at)
    return (*range(free), *_places(reaches, len(kernel))), reaches


def of_pool_grad(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label places, what comes back to them, and what was pooled."""
    labels, reaches = _of_windows(result, {**attrs, "transposed": True}, (0, 1))
    return DimMap(operands=(labels, labels), results=(labels,), reaches=reaches)


def pooled(n: int, k: int, s: int, p: int, d: int, ceil: bool) -> int:
    """Return how many windows there are: none begins behind the padding on the left and x."""
    rest = n + 2 * p - d * (k - 1) - 1
    if 2 * p > k:
        raise ValueError(f"a padding of {p} is more than half a window of {k}")
    if rest < 0 and not ceil:
        raise ValueError(f"{n} elements, padded by {p}, are fewer than a window of {k}")
    count = (-(-rest // s) if ceil else rest // s) + 1
    return count - 1 if ceil and (count - 1) * s >= n + p else count


def shape_of_pool(shapes: Shapes, attrs: Attrs) -> tuple[Shape, Shape]:
    """Return the shapes of the largest elements, and of their places."""
    (x,) = shapes
    assert x is not None
    names = ("kernel", "stride", "padding", "dilation")
    n = len(attrs["kernel"])
    if len(x) not in (n + 1, n + 2):
        raise ValueError(f"{x} has other dims than channels and {n} more")
    settings = [attrs[name] for name in names]
    around = attrs.get("around")
    if around is not None:  # a rank's part
        found = tuple(
            (m + sum(around[2 * i : 2 * i + 2]) - (k - 1) * d - 1) // s + 1
            for i, (m, k, s, _, d) in enumerate(zip(x[-n:], *settings, strict=True))
        )
        return (*x[:-n], *found), (*x[:-n], *found)
    ceil = bool(attrs.get("ceil"))
    dims = zip(x[-n:], *settings, strict=True)
    found = tuple(pooled(m, k, s, p, d, ceil) for m, k, s, p, d in dims)
    if any(f < 1 for f in found):
        raise ValueError("there is no window")
    shape = (*x[:-n], *found)
    return shape, shape


def shape_of_pool_grad(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of what was pooled, or of the rank's box, checked with the operands."""
    places, ct = shapes
    box = attrs.get("box")
    if box is not None:
        return box_shape(box)
    for given in (places, ct):
        for a, b in zip(given or (), shape_of_pool((attrs["shape"],), attrs)[0], strict=True):
            if a != b:
                raise ValueError(f"{a} is not {b}")
    return tuple(attrs["shape"])


def local_pool(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say what stands around the rows that this rank has, and where they are."""
    (shape,), (reads,), kernel = part.shapes, part.boxes, tuple(attrs["kernel"])
    assert shape is not None and reads is not None
    found = _local_rows(attrs, (shape, reads), (part.shape, part.box), kernel)
    if "around" not in found:
        return attrs
    n = len(kernel)
    return {**found, "begins": tuple(a for a, _ in reads[-n:]), "extents": shape[-n:]}
