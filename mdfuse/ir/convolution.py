"""Convolutions over the last dims: batches, channels and places may be split.

A convolution is a product: with the channels of its input split, ranks sum up their shares. Where
places are split, a rank reads the rows that its windows reach (`mdfuse.layouts.halo`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import DimMap, Shape, Shapes, always, check_equal, present
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.ir.windows import Attrs, labels_of_places, local_rows, reaches_of, with_rows
from mdfuse.layouts.boxes import Interval, box_shape

_ATEN: Any = torch.ops.aten

#: The labels of a convolution: batch, channels of the input, channels of the result; then places.
_N, _IN, _OUT = 0, 1, 2


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
        shape = shape_of_convolution((x.shape, weight.shape), {**how, "around": around})
        return x.new_zeros(shape)
    added = more or none
    if around is not None:
        padding, added = none, none
        x = x if transposed else with_rows(x, around)
    settings = (stride, padding, dilation, transposed, added, here or groups)
    y: Tensor = _ATEN.convolution(x, weight, None, *settings)
    return with_rows(y, around) if around is not None and transposed else y


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
    weight_shape = tuple(shape) if box is None else box_shape(tuple(box))
    if not (ct.numel() and x.numel() and math.prod(weight_shape)):
        return x.new_zeros(weight_shape)
    if around is not None:
        padding, x = [0] * len(stride), with_rows(x, around)
    groups_here = groups * weight_shape[0] // shape[0] if groups > 1 else 1
    settings = (stride, padding, dilation, False, [0] * len(stride), groups_here)
    wanted = [False, True, False]
    ct_of_weight: Tensor = _ATEN.convolution_backward(
        ct, x, x.new_empty(weight_shape), None, *settings, wanted
    )[1]
    return ct_of_weight


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
    x, weight = present(shapes)
    reaches = reaches_of(result, weight[2:], attrs, (0,))
    places_whole, places = (None,) * (len(x) - 2), labels_of_places(reaches, len(x) - 2)
    groups = attrs.get("groups", 1)
    in_and_out: tuple[int, int] = (_IN, _OUT) if attrs.get("transposed") else (_OUT, _IN)
    if groups > 1:
        labels = (_N, _OUT, *places)
        return DimMap(
            operands=(labels, (_OUT, None, *places_whole)),
            results=(labels,),
            fits=_whole_groups(groups),
            reaches=reaches,
        )
    return DimMap(
        operands=((_N, _IN, *places), (*in_and_out, *places_whole)),
        results=((_N, _OUT, *places),),
        reduces={_IN: "sum"},
        reaches=reaches,
    )


def _whole_groups(groups: int) -> Callable[[int, tuple[int, ...]], bool]:
    return lambda label, sizes: label != _OUT or groups % math.prod(sizes) == 0


def of_convolution_weight(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `ct[n,o,…], x[n,i,…]` and a weight [o,i,…]: it adds up over batch and places."""
    ct, x = present(shapes)
    reaches = reaches_of(ct, result[2:], attrs, (1,))
    places_whole, places = (None,) * (len(x) - 2), labels_of_places(reaches, len(x) - 2)
    groups = attrs.get("groups", 1)
    channels = _OUT if groups > 1 else _IN
    return DimMap(
        operands=((_N, _OUT, *places), (_N, channels, *places)),
        results=((_OUT, None if groups > 1 else _IN, *places_whole),),
        reduces=dict.fromkeys((_N, *(x for x in places if x is not None)), "sum"),
        fits=_whole_groups(groups) if groups > 1 else always,
        reaches=reaches,
    )


def shape_of_convolution(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape [n,o,…], by the formulas of `torch.nn.Conv2d` and `ConvTranspose2d`."""
    x, weight = present(shapes)
    groups, is_transposed = attrs.get("here") or attrs.get("groups", 1), attrs.get("transposed")
    settings = [attrs["stride"], attrs["padding"], attrs["dilation"]]
    extra = attrs.get("more") or (0,) * len(settings[0])
    channels = weight[1] * groups if is_transposed else weight[0]
    if (weight[0] if is_transposed else weight[1] * groups) != x[1] or weight[0] % groups:
        raise ValueError(f"a weight {weight} with {groups} groups does not fit {x}")
    around = attrs.get("around")
    extents = []
    for at, (n, k, s, p, d, m) in enumerate(zip(x[2:], weight[2:], *settings, extra, strict=True)):
        spread = (k - 1) * d + 1
        rows = m - 2 * p if around is None else sum(around[2 * at : 2 * at + 2])
        if is_transposed:
            extents.append((n - 1) * s + spread + rows)
            if around is None and extents[-1] < 1:
                raise ValueError(f"{n} elements leave {extents[-1]}")
            continue
        rows = 2 * p if around is None else rows
        if around is None and n + rows < spread:
            raise ValueError(f"{n} elements, padded by {p}, are fewer than {spread}")
        extents.append((n + rows - spread) // s + 1)
    return (x[0], channels, *extents)


def shape_of_convolution_weight(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the weight, or of the rank's box, checked with the cotangent's."""
    ct, x = present(shapes)
    weight, box = attrs["shape"], attrs.get("box")
    if box is not None:
        return box_shape(box)
    check_equal(ct, shape_of_convolution((x, weight), attrs))
    return tuple(weight)


def local_convolution(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Count the groups that this rank has of the weight, and say what stands around its rows."""
    weight = part[1]
    if attrs.get("groups", 1) > 1 and weight.shape[0]:
        attrs = {**attrs, "here": attrs["groups"] * box_shape(weight.box)[0] // weight.shape[0]}
    return local_rows(attrs, part[0], part.out, weight.shape[2:])


def local_convolution_weight(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say which part of the weight this rank makes, and what stands around its rows of x."""
    weight = part.out
    attrs = {**attrs, "shape": weight.shape, "box": weight.box}
    return local_rows(attrs, part[1], part[0], weight.shape[2:])
