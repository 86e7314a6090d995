"""Convolutions, windows of images, pooling.

Batches and channels may be split: channels of the result with the weight's rows, channels of the
input as the contracted dim of a product, whose partial sums the ranks add. If spatial dims are
split, ranks receive the halo rows of their windows.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import indexing, moves, parts, views
from mdfuse.frontend.ops.creations import tensor
from mdfuse.frontend.ops.recording import (
    Integers,
    Operation,
    Sizes,
    back,
    in_f32,
    named,
    record,
    record_several,
    shown,
)
from mdfuse.frontend.ops.reduction_parts import first_extreme
from mdfuse.frontend.ops.reductions import mean, sum
from mdfuse.ir.pooling import pooled


def _numbers(name: str, x: Any, n: int, least: int) -> tuple[int, ...]:
    """Return one number for each of n dims."""
    numbers = tuple(x) if isinstance(x, Sequence) else (x,) * n
    numbers = numbers * n if len(numbers) == 1 else numbers
    if len(numbers) != n or any(k < least for k in numbers):
        raise DefinitionError(
            f"{name}={x}", because=f"it is a number from {least} on for each of {n} dims",
            hint="one number stands for all dims",
        )  # fmt: skip
    return numbers


# -- convolutions --------------------------------------------------------------------------------


def _convolution(n: int) -> Operation:
    def function(
        x: Handle,
        weight: Handle,
        bias: Handle | None = None,
        stride: Integers = 1,
        padding: Integers | str = 0,
        dilation: Integers = 1,
        groups: int = 1,
    ) -> Handle:
        name = f"conv{n}d"
        whole = _with_batch(name, x, n)
        how = {
            "stride": _numbers("stride", stride, n, 1),
            "dilation": _numbers("dilation", dilation, n, 1),
        }
        if isinstance(padding, str):
            whole, padding = _padded_by_name(name, whole, weight, padding, how)
        how["padding"] = _numbers("padding", padding, n, 0)
        _check_weight(name, x, weight, bias, weight.shape[0] if weight.ndim else 0, n)
        convolved = record("convolution", whole, weight, groups=groups, **how)
        return _unbatched(_with_bias(convolved, bias), x)

    doc = _CONVOLUTION.format(dims=("l", "h,w", "d,h,w")[n - 1])
    return named(f"conv{n}d", doc, function)


_CONVOLUTION = """x[n,i,{dims}] or x[i,{dims}] with the kernels weight[o,i/groups,…] at each place.

Args:
    x: where its spatial dims are split, ranks receive the rows that their windows reach.
    weight: a kernel for each channel of the result.
    bias: a number for each.
    stride: how far from one place to the next.
    padding: zeros at both ends, "same" or "valid".
    dilation: how far from one element of a kernel to the next.
    groups: of channels, each with kernels of its own.
"""


def _with_batch(name: str, x: Handle, n: int) -> Handle:
    if x.ndim not in (n + 1, n + 2):
        raise DefinitionError(
            f"{name} of {shown(x)}",
            because=f"it has channels and {n} spatial dim{'s' * (n > 1)}, and a batch in front",
            hint="[batch, channels, …]",
        )
    return x if x.ndim == n + 2 else views.unsqueeze(x, 0)


def _unbatched(y: Handle, x: Handle) -> Handle:
    return y if y.ndim == x.ndim else record("squeeze", y, dims=(0,))


def _check_weight(
    name: str, x: Handle, weight: Handle, bias: Handle | None, channels: int, n: int
) -> None:
    if weight.ndim != n + 2 or (bias is not None and bias.shape != (channels,)):
        raise DefinitionError(
            f"{name} of {shown(x)} with the weight {shown(weight)}"
            + (f" and the bias {shown(bias)}" if bias is not None else ""),
            because=f"a weight has two dims of channels and {n} of places; a bias a number for "
            "each channel of the result",
            hint="weight: [out, in / groups, …]",
        )


def _with_bias(x: Handle, bias: Handle | None) -> Handle:
    return x if bias is None else x + views.reshape(bias, (-1, *(1,) * (x.ndim - 2)))


def _padded_by_name(
    name: str, x: Handle, weight: Handle, padding: str, how: dict[str, tuple[int, ...]]
) -> tuple[Handle, Integers]:
    if padding not in ("same", "valid") or (padding == "same" and {*how["stride"]} != {1}):
        raise DefinitionError(
            f"{name} with padding={padding!r} and stride={list(how['stride'])}",
            because='it is a number, "valid", or with stride 1 "same"',
            hint="numbers",
        )
    if padding == "valid":
        return x, 0
    extra = [d * (k - 1) for d, k in zip(how["dilation"], weight.shape[2:], strict=True)]
    if all(e % 2 == 0 for e in extra):
        return x, tuple(e // 2 for e in extra)
    ends = [n for e in reversed(extra) for n in (e // 2, e - e // 2)]
    return moves.pad(x, ends), 0


conv1d, conv2d, conv3d = map(_convolution, (1, 2, 3))


def _transposed(n: int) -> Operation:
    def function(
        x: Handle,
        weight: Handle,
        bias: Handle | None = None,
        stride: Integers = 1,
        padding: Integers = 0,
        output_padding: Integers = 0,
        groups: int = 1,
        dilation: Integers = 1,
    ) -> Handle:
        name = f"conv_transpose{n}d"
        whole = _with_batch(name, x, n)
        channels = weight.shape[1] * groups if weight.ndim > 1 else 0
        _check_weight(name, x, weight, bias, channels, n)
        how = {
            "stride": _numbers("stride", stride, n, 1),
            "padding": _numbers("padding", padding, n, 0),
            "dilation": _numbers("dilation", dilation, n, 1),
            "more": _numbers("output_padding", output_padding, n, 0),
        }
        convolved = record("convolution", whole, weight, groups=groups, transposed=True, **how)
        return _unbatched(_with_bias(convolved, bias), x)

    doc = f"The transpose of conv{n}d: x[n,i,…] is spread by the kernels weight[i,o/groups,…]."
    return named(f"conv_transpose{n}d", doc, function)


conv_transpose1d, conv_transpose2d, conv_transpose3d = map(_transposed, (1, 2, 3))


# -- pooling -------------------------------------------------------------------------------------


def _windows(
    name: str, x: Handle, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1
) -> dict[str, tuple[int, ...]]:
    _with_batch(name, x, n)
    sizes = _numbers("kernel_size", kernel, n, 1)
    is_given = stride is not None and stride != []
    windows = {
        "kernel": sizes,
        "stride": _numbers("stride", stride, n, 1) if is_given else sizes,
        "padding": _numbers("padding", padding, n, 0),
        "dilation": _numbers("dilation", dilation, n, 1),
    }
    return windows


def _max_pool(n: int) -> Operation:
    def function(
        x: Handle,
        kernel_size: Integers,
        stride: Integers | None = None,
        padding: Integers = 0,
        dilation: Integers = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Handle | tuple[Handle, Handle]:
        how = _windows(f"max_pool{n}d", x, n, kernel_size, stride, padding, dilation)
        values, places = record_several("max_pool", x, ceil=ceil_mode, **how)
        return (values, places) if return_indices else values

    doc = f"The largest element of each window of the last {n} dim{'s' * (n > 1)}, "
    return named(f"max_pool{n}d", doc + "and with return_indices where it stands.", function)


max_pool1d, max_pool2d, max_pool3d = map(_max_pool, (1, 2, 3))


def _avg_pool(n: int) -> Operation:
    def function(
        x: Handle,
        kernel_size: Integers,
        stride: Integers | None = None,
        padding: Integers = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Handle:
        name = f"avg_pool{n}d"
        if not x.dtype.is_floating_point or divisor_override == 0:
            raise DefinitionError(
                f"{name} of {shown(x)}, divided by {divisor_override}",
                because="a mean is a fraction, and nothing is divided by 0",
                hint="x.to(torch.float32)",
            )
        how = _windows(name, x, n, kernel_size, stride, padding)
        how.pop("dilation")
        window_counts = tuple(
            _count(x, x.ndim - n + at, _window_along(how, at), ceil_mode) for at in range(n)
        )
        counts = [_counts(x.shape[at - n], m, _window_along(how, at), count_include_pad)
                  for at, m in enumerate(window_counts)]  # fmt: skip
        are_full = all({*c} == {k} for c, k in zip(counts, how["kernel"], strict=True))
        divisor = divisor_override or (math.prod(how["kernel"]) if are_full else 1)
        is_one_step = divisor_override is not None or are_full
        means = _sums(x if is_one_step else in_f32(x), _cut_to(x, how), window_counts, divisor)
        if is_one_step:
            return means
        for at, c in enumerate(counts):
            means = _divided(means, x.ndim - n + at, c)
        return back(means, x)

    doc = f"The mean of each window of the last {n} dim{'s' * (n > 1)}."
    return named(f"avg_pool{n}d", doc, function)


def _cut_to(x: Handle, how: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return window settings with kernels cut to the extent of x and its padding."""
    extents = zip(x.shape[-len(how["kernel"]) :], how["kernel"], how["padding"], strict=True)
    kernel = (builtins.min(k, n + p) if type(n) is int else k for n, k, p in extents)
    return {**how, "kernel": tuple(kernel)}


def _window_along(how: dict[str, tuple[int, ...]], at: int) -> tuple[int, int, int]:
    """Return kernel, stride and padding along one dim."""
    return how["kernel"][at], how["stride"][at], how["padding"][at]


def _count(x: Handle, dim: int, window: tuple[int, int, int], ceil: bool) -> int:
    try:
        return pooled(x.shape[dim], *window, 1, ceil)
    except ValueError as error:
        raise DefinitionError(
            f"a mean over windows of {window[0]} along dim {dim} of {shown(x)}",
            because=str(error),
            hint="smaller windows, or less padding",
        ) from None


def _sums(
    x: Handle, how: dict[str, tuple[int, ...]], counts: tuple[int, ...], divisor: int
) -> Handle:
    """Return the sums of windows, with zeros for padding, divided."""
    if all(type(n) is int for n in (*x.shape[-len(counts) :], *counts)):
        return record("mean_pool", x, made=counts, divisor=divisor, **how)
    for at, count in enumerate(counts):  # a run chooses the number of windows
        x = _added(x, x.ndim - len(counts) + at, count, *_window_along(how, at))
    return x / divisor


def _added(x: Handle, dim: int, count: int, k: int, s: int, p: int) -> Handle:
    x = _padded(x, dim, p, (count - 1) * s + k - x.shape[dim] - p)
    if s == k:
        return sum(views.reshape(x, (*x.shape[:dim], count, k, *x.shape[dim + 1 :])), dim + 1)
    total = None
    for i in range(k):
        part = _strided(x, dim, i, count, s)
        total = part if total is None else total + part
    assert total is not None
    return total


def _padded(x: Handle, dim: int, before: int, behind: int) -> Handle:
    if before == behind == 0:
        return x
    return moves.pad(x, [*(0,) * (2 * (x.ndim - 1 - dim)), before, behind])


def _strided(x: Handle, dim: int, start: int, count: int, step: int) -> Handle:
    window = builtins.slice(start, start + (count - 1) * step + 1, step)
    return indexing.index(x, (*[builtins.slice(None)] * dim, window))


def _counts(n: int, windows: int, window: tuple[int, int, int], counts_pad: bool) -> list[int]:
    """Return the number of elements of each window along one dim."""
    k, s, p = window
    low, high = (-p, n + p) if counts_pad else (0, n)
    starts = (i * s - p for i in range(windows))
    return [builtins.min(start + k, high) - builtins.max(start, low) for start in starts]


def _divided(x: Handle, dim: int, counts: list[int]) -> Handle:
    """Divide by the number of elements of each window along one dim."""
    if len({*counts}) == 1:
        return x / counts[0]
    behind = (1,) * (x.ndim - 1 - dim)
    return x / views.reshape(tensor(counts, dtype=x.dtype), (len(counts), *behind))


avg_pool1d, avg_pool2d, avg_pool3d = map(_avg_pool, (1, 2, 3))


def _spans(n: int, parts: int) -> list[tuple[int, int]]:
    """Return start and end of each part of a dim for adaptive pooling."""
    return [(i * n // parts, -(-(i + 1) * n // parts)) for i in range(parts)]


def _adaptive(n: int, name: str, join: Operation, words: str) -> Operation:
    def function(x: Handle, output_size: Sizes, return_indices: bool = False) -> Handle:
        if return_indices:
            raise DefinitionError(
                f"adaptive_{name}_pool{n}d with return_indices",
                because="windows of several sizes are joined one by one",
                hint=f"max_pool{n}d gives the places of its windows",
            )
        _with_batch(f"adaptive_{name}_pool{n}d", x, n)
        given = list(output_size) if isinstance(output_size, Sequence) else [output_size] * n
        extents = [x.shape[x.ndim - n + at] if m is None else m for at, m in enumerate(given)]
        sizes = _numbers("output_size", extents, n, 1)
        result = in_f32(x) if n > 1 and join is mean else x
        for at, m in reversed([*enumerate(sizes)]):  # so that the first of equal elements counts
            result = _in_parts(result, x.ndim - n + at, m, join)
        return record("set", back(result, x))

    doc = f"{words} of so many parts of each of the last {n} dim{'s' * (n > 1)}."
    return named(f"adaptive_{name}_pool{n}d", doc, function)


def _in_parts(x: Handle, dim: int, m: int, join: Operation) -> Handle:
    n = x.shape[dim]
    if m == n:
        return x
    if n % m == 0:
        apart = views.reshape(x, (*x.shape[:dim], m, n // m, *x.shape[dim + 1 :]))
        return join(apart, dim + 1)  # type: ignore[no-any-return]
    pieces = [join(parts.narrow(x, dim, a, b - a), dim, True) for a, b in _spans(n, m)]
    return parts.cat(pieces, dim)


def _largest(x: Handle, dim: int, keepdim: bool = False) -> Handle:
    return first_extreme("max", x, (dim,), keepdim)


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (
    _adaptive(n, "avg", mean, "The mean") for n in (1, 2, 3)
)
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (
    _adaptive(n, "max", _largest, "The largest element") for n in (1, 2, 3)
)


# -- windows as columns --------------------------------------------------------------------------


def im2col(
    x: Handle,
    kernel_size: Integers,
    dilation: Integers = 1,
    padding: Integers = 0,
    stride: Integers = 1,
) -> Handle:
    """The windows of images as columns: [n,c,h,w] -> [n,c*kh*kw,windows], `F.unfold` of torch."""
    whole = _with_batch("im2col", x, 2)
    (kh, kw), (dh, dw) = (_numbers("…", a, 2, 1) for a in (kernel_size, dilation))
    (ph, pw), (sh, sw) = _numbers("padding", padding, 2, 0), _numbers("stride", stride, 2, 1)
    wide = moves.pad(whole, (pw, pw, ph, ph)) if ph or pw else whole
    h, w = (
        (n - d * (k - 1) - 1) // s + 1
        for n, k, d, s in zip(wide.shape[2:], (kh, kw), (dh, dw), (sh, sw), strict=True)
    )
    if h < 1 or w < 1:
        raise DefinitionError(
            f"im2col of {shown(x)} in windows of {kh} by {kw}",
            because="there is not one",
            hint="smaller windows, or padding",
        )
    rows = [
        _strided(_strided(wide, 2, i * dh, h, sh), 3, j * dw, w, sw)
        for i in range(kh)
        for j in range(kw)
    ]
    columns = parts.stack(rows, 2)
    columns = views.reshape(columns, (*whole.shape[:1], -1, h * w))
    return columns if x.ndim == 4 else record("squeeze", columns, dims=(0,))


def col2im(
    x: Handle,
    output_size: Integers,
    kernel_size: Integers,
    dilation: Integers = 1,
    padding: Integers = 0,
    stride: Integers = 1,
) -> Handle:
    """Columns added up where their windows were: [n,c*kh*kw,windows] -> [n,c,h,w], `F.fold`."""
    size, (kh, kw) = _numbers("output_size", output_size, 2, 1), _numbers("…", kernel_size, 2, 1)
    (dh, dw), (sh, sw) = _numbers("dilation", dilation, 2, 1), _numbers("stride", stride, 2, 1)
    ph, pw = _numbers("padding", padding, 2, 0)
    whole = x if x.ndim == 3 else views.unsqueeze(x, 0)
    tall, wide = size[0] + 2 * ph, size[1] + 2 * pw
    h, w = (tall - dh * (kh - 1) - 1) // sh + 1, (wide - dw * (kw - 1) - 1) // sw + 1
    fits = whole.ndim == 3 and h > 0 and w > 0 and whole.shape[2] == h * w
    if not fits or whole.shape[1] % (kh * kw):
        raise DefinitionError(
            f"col2im of {shown(x)} to {list(size)} in windows of {kh} by {kw}",
            because="there is a column for each window, with all channels of all its places",
            hint=f"{h} by {w} columns",
        )
    n, c = whole.shape[0], whole.shape[1] // (kh * kw)
    apart = views.reshape(whole, (n, c, kh * kw, h, w))
    total = None
    for at, piece in enumerate(parts.unbind(apart, 2)):
        starts = (0, 0, at // kw * dh, at % kw * dw)
        spread = record(
            "slice_grad", piece, shape=(n, c, tall, wide), starts=starts, steps=(1, 1, sh, sw)
        )
        total = spread if total is None else total + spread
    assert total is not None
    images = moves.pad(total, (-pw, -pw, -ph, -ph)) if ph or pw else total
    return images if x.ndim == 3 else record("squeeze", images, dims=(0,))
