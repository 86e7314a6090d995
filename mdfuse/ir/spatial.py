"""Convolutions and pooling over the last dims, which are whole; batches and channels may be split.

A convolution is a product: with the channels of its input split, ranks sum up their shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import DimMap, Shape, Shapes
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.layouts.boxes import box_shape

Attrs = Mapping[str, Any]

_F: Any = torch.nn.functional
_ATEN: Any = torch.ops.aten
#: How many dims a window has -> torch's function.
_POOLS = {1: _F.max_pool1d, 2: _F.max_pool2d, 3: _F.max_pool3d}

#: The labels of a convolution: batch, channels of the input, channels of the result.
_N, _IN, _OUT = 0, 1, 2


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
    """
    more = [0] * len(stride) if more is None else more
    if not (x.numel() and weight.numel()):  # a rank that has no channels
        how: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
        how |= {"groups": groups, "transposed": transposed, "here": here, "more": more}
        return x.new_zeros(shape_of_convolution((x.shape, weight.shape), how))
    return _ATEN.convolution(  # type: ignore[no-any-return]
        x, weight, None, stride, padding, dilation, transposed, more, here or groups
    )


def convolve_grad(
    ct: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Return what comes back to x and to the weight of a convolution; settings are its own."""
    if not (ct.numel() and x.numel() and weight.numel()):  # a rank that has no channels
        return torch.zeros_like(x), torch.zeros_like(weight)
    more = more or [0] * len(stride)
    settings = (stride, padding, dilation, transposed, more, here or groups)
    dx, dw, _ = _ATEN.convolution_backward(ct, x, weight, None, *settings, [True, True, False])
    return dx, dw


def few_convolved(x: Tensor, weight: Tensor, **how: Any) -> Tensor:
    """Convolve where each dim has two elements, whatever the strides."""
    one = [1] * (x.ndim - 2)
    return convolve(x, weight, stride=one, padding=one, dilation=one)


def few_convolved_grad(ct: Tensor, x: Tensor, weight: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """Return what comes back where each dim has two elements."""
    one = [1] * (x.ndim - 2)
    wide = ct.new_ones((2, 2, *(3 for _ in one)))
    return convolve_grad(wide, x, weight, stride=one, padding=one, dilation=one)


def of_convolution(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[n,i,…], w[o,i,…]`; with groups, whole groups of all channels are split alike."""
    x, _ = shapes
    assert x is not None
    rest = (None,) * (len(x) - 2)
    groups = attrs.get("groups", 1)
    own: tuple[int, int] = (_IN, _OUT) if attrs.get("transposed") else (_OUT, _IN)
    if groups > 1:
        labels = (_N, _OUT, *rest)
        operands = (labels, (_OUT, None, *rest))
        return DimMap(operands=operands, results=(labels,), fits=_whole_groups(groups))
    return DimMap(
        operands=((_N, _IN, *rest), (*own, *rest)),
        results=((_N, _OUT, *rest),),
        reduces={_IN: "sum"},
    )


def _whole_groups(groups: int) -> Callable[[int, tuple[int, ...]], bool]:
    return lambda label, sizes: label != _OUT or groups % math.prod(sizes) == 0


def of_convolution_grad(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label the gradients: the weight's adds up over the batch, the input's over the result."""
    made = of_convolution(shapes[1:], shapes[0] or (), attrs)
    (x, weight), ct = made.operands, made.result
    reduces = {_N: "sum", **({} if attrs.get("groups", 1) > 1 else {_OUT: "sum"})}
    return replace(made, operands=(ct, x, weight), results=(x, weight), reduces=reduces)


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
    found = []
    for n, k, s, p, d, m in zip(x[2:], weight[2:], *settings, more, strict=True):
        spread = (k - 1) * d + 1
        if is_transposed:
            found.append((n - 1) * s - 2 * p + spread + m)
            if found[-1] < 1:
                raise ValueError(f"{n} elements leave {found[-1]}")
            continue
        if n + 2 * p < spread:
            raise ValueError(f"{n} elements, padded by {p}, are fewer than {spread}")
        found.append((n + 2 * p - spread) // s + 1)
    return (x[0], channels, *found)


def shape_of_convolution_grad(shapes: Shapes, attrs: Attrs) -> tuple[Shape, Shape]:
    """Return the shapes of x and of the weight, checked with that of the cotangent."""
    ct, x, weight = shapes
    assert ct is not None and x is not None and weight is not None
    for a, b in zip(ct, shape_of_convolution((x, weight), attrs), strict=True):
        if a != b:
            raise ValueError(f"{a} is not {b}")
    return x, weight


def local_groups(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Count the groups that this rank has, of x or of the weight, the last operands."""
    shape, box = part.shapes[-1], part.boxes[-1]
    if attrs.get("groups", 1) == 1 or shape is None or box is None or not shape[0]:
        return attrs
    return {**attrs, "here": attrs["groups"] * box_shape(box)[0] // shape[0]}


# -- pooling -------------------------------------------------------------------------------------


def max_pool(
    x: Tensor,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the largest element of each window, and its place in the spatial dims as one."""
    if len(kernel) not in _POOLS:
        raise ValueError(f"a window of {len(kernel)} dims")
    pool = _POOLS[len(kernel)]
    values, places = pool(
        x, list(kernel), list(stride), list(padding), list(dilation), ceil, return_indices=True
    )
    return values, places


def few_pooled(x: Tensor, *, kernel: Sequence[int], **how: Any) -> tuple[Tensor, Tensor]:
    """Pool where each dim has two elements, whatever the windows."""
    one = [1] * len(kernel)
    return max_pool(x, kernel=one, stride=one, padding=[0] * len(kernel), dilation=one)


def of_pool(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label the largest of windows, and their places: the last dims must be whole."""
    free = len(result) - len(attrs["kernel"])
    labels = tuple(d if d < free else None for d in range(len(result)))
    return DimMap(operands=(labels,), results=(labels, labels))


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
    settings = zip(x[-n:], *(attrs[name] for name in names), strict=True)
    ceil = bool(attrs.get("ceil"))
    found = tuple(pooled(m, k, s, p, d, ceil) for m, k, s, p, d in settings)
    if any(f < 1 for f in found):
        raise ValueError("there is no window")
    shape = (*x[:-n], *found)
    return shape, shape
