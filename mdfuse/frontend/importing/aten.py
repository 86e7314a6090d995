"""Operations of aten that are several of ours, or have other arguments.

Norms; losses, whose reductions are numbers; images; functional writes into parts of a value, which
export makes of `x[1:3] = y` and of operations in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.loss_parts import class_numbers

ops: Any = operations

# -- norms -----------------------------------------------------------------------------------------


def batch_norm_of_training(
    x: Handle,
    weight: Handle | None,
    bias: Handle | None,
    mean: Handle,
    var: Handle,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The result, mean and root of the batch, and the kept statistics afterwards."""
    wide = x.to(torch.float32) if x.dtype.itemsize < 4 else x
    spread, centre = ops.var_mean(wide, [d for d in range(x.ndim) if d != 1], correction=0)
    y = ops.batch_norm(x, centre, spread, weight, bias, False, momentum, eps)
    count = math.prod(x.shape) // x.shape[1]
    unbiased = spread * (count / max(count - 1, 1))
    return (
        y,
        centre,
        ops.rsqrt(spread + eps),
        mean * (1 - momentum) + centre * momentum,
        var * (1 - momentum) + unbiased * momentum,
    )


def weight_norm(v: Handle, g: Handle, dim: int = 0) -> Any:
    """v with the norm g in each place of a dim (Salimans, Kingma 2016); dim -1: with one norm."""
    others = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    return v * (g / ops.norm(v, 2, others, True))


def linalg_norm(
    x: Handle, ord: Any = None, dim: Any = None, keepdim: bool = False, **how: Any
) -> Any:
    """`torch.linalg.norm` of vectors; without an order, of all dims that are named."""
    dims = [dim] if isinstance(dim, int) else dim
    is_of_vectors = ord is None or (x.ndim == 1 if dims is None else len(dims) == 1)
    if not is_of_vectors:
        raise DefinitionError(
            f"linalg.norm of matrices, with ord={ord}",
            because="there are norms of vectors alone",
            hint="torch.linalg.vector_norm(x, ord, dim), which sees several dims as one",
        )
    return ops.vector_norm(x, 2 if ord is None else ord, dims, keepdim, **how)


# -- losses ----------------------------------------------------------------------------------------


_REDUCTIONS = ("none", "mean", "sum")


def loss(name: str, *order: str) -> Callable[..., Any]:
    """A loss, whose reduction aten writes as a number; the order of arguments behind the target."""
    operation = ops.BY_NAME[name]

    def call(x: Handle, target: Handle, *given: Any, **named: Any) -> Any:
        known = {**dict(zip(order, given, strict=False)), **named}
        known["reduction"] = _REDUCTIONS[known.get("reduction", 1)]
        return operation(x, target, **{k: v for k, v in known.items() if v is not None})

    return call


def cross_entropy(
    x: Handle,
    target: Handle,
    weight: Handle | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross entropy, where classes may have weights."""
    how: dict[str, Any] = {"ignore_index": ignore_index, "reduction": _REDUCTIONS[reduction]}
    if weight is None:
        return ops.cross_entropy(x, target, label_smoothing=label_smoothing, **how)
    at = 0 if x.ndim == 1 else 1
    logs = ops.log_softmax(x, at)
    if not label_smoothing and not target.dtype.is_floating_point:
        return ops.nll_loss(logs, target, weight, **how)
    n = x.shape[at]
    all_classes = logs * ops.reshape(weight, (n, *(1,) * (x.ndim - 1 - at)))
    if target.dtype.is_floating_point:
        losses = -ops.sum(all_classes * (target * (1 - label_smoothing) + label_smoothing / n), at)
        return ops.mean(losses) if reduction == 1 else _reduced(losses, reduction)
    how["reduction"], target = "none", class_numbers(target)
    smooth = ops.where(ops.eq(target, ignore_index), 0.0, -ops.sum(all_classes, at))
    of_targets = ops.nll_loss(logs, target, weight, **how)
    losses = of_targets * (1 - label_smoothing) + smooth * (label_smoothing / n)
    if reduction != 1:
        return _reduced(losses, reduction)
    counted = ops.nll_loss(ops.full_like(logs, -1.0), target, weight, **how)
    return ops.sum(losses) / ops.sum(counted)


def _reduced(losses: Handle, reduction: int) -> Any:
    return ops.sum(losses) if reduction == 2 else losses


# -- images ----------------------------------------------------------------------------------------


def resized(mode: str, antialias: bool = False) -> Callable[..., Any]:
    """`interpolate` in a mode, with the arguments of aten."""
    if mode.startswith("nearest"):
        return lambda x, size, scales=None: ops.interpolate(x, size, scales, mode=mode)
    return lambda x, size, corners, scales=None: ops.interpolate(
        x, size, scales, mode=mode, align_corners=corners, antialias=antialias
    )


def grid_sample(x: Handle, grid: Handle, mode: int, padding: int, corners: bool) -> Any:
    """`grid_sample`, whose modes aten writes as numbers."""
    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    return ops.grid_sample(x, grid, modes[mode], paddings[padding], corners)


def affine_grid(theta: Handle, size: Sequence[int], corners: bool) -> Any:
    """Return the source place (x, y) of each element of [n,c,h,w] by theta[n,2,3]: [n,h,w,2]."""
    n, _, h, w = size
    x, y = (_middles(m, corners, theta) for m in (w, h))
    x, y = ops.expand(ops.unsqueeze(x, 0), (h, w)), ops.expand(ops.unsqueeze(y, 1), (h, w))
    places = ops.reshape(ops.stack([x, y, ops.ones_like(x)], -1), (h * w, 3))
    return ops.reshape(ops.matmul(places, ops.transpose(theta, 1, 2)), (n, h, w, 2))


def _middles(n: int, corners: bool, like: Handle) -> Any:
    """The middles of n elements between -1 and 1; with `corners` the outermost are at the ends."""
    steps = ops.arange(n, dtype=like.dtype)
    if not corners:
        return (steps * 2 + (1 - n)) / n
    return steps * (2 / (n - 1)) - 1 if n > 1 else steps * 0


def channel_shuffle(x: Handle, groups: int) -> Any:
    """Channels [groups, m] in the order [m, groups]."""
    _, c, *spatial = x.shape
    apart = ops.reshape(x, (x.shape[0], groups, c // groups, *spatial))
    return ops.reshape(ops.transpose(apart, 1, 2), x.shape)


def adaptive_max(dims: int) -> Callable[..., Any]:
    """`adaptive_max_pool` with places; None for these where windows are of several sizes."""

    def call(x: Handle, output_size: Sequence[int]) -> Any:
        whole, size = x.shape[-dims:], [*output_size] * (dims // len(output_size))
        if any(n % m for n, m in zip(whole, size, strict=True)):
            return ops.BY_NAME[f"adaptive_max_pool{dims}d"](x, size), None
        window = [n // m for n, m in zip(whole, size, strict=True)]
        return ops.BY_NAME[f"max_pool{dims}d"](x, window, window, return_indices=True)

    return call


# -- writes of parts -------------------------------------------------------------------------------


def fill(x: Handle, value: Any) -> Any:
    """One number in the place of all elements."""
    if isinstance(value, Tensor):
        value = value.item()
    if not isinstance(value, Handle):
        return ops.full_like(x, value)
    return copy(x, value)


def copy(x: Handle, source: Handle) -> Any:
    """The elements of another value, in the shape and the dtype of x."""
    converted = source if source.dtype == x.dtype else ops.cast(source, x.dtype)
    return converted if converted.shape == x.shape else ops.expand(converted, x.shape)


def slice_scatter(
    x: Handle, source: Handle, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """A value with a slice of a dim written."""
    at = dim % x.ndim
    first, last, _ = slice(start, end).indices(x.shape[at])
    last = max(first, last)
    new = _spread(x, source, at, len(range(first, last, step)))
    return ops.slice_scatter(x, new, at, first, last, step)


def select_scatter(x: Handle, source: Handle, dim: int, index: int) -> Any:
    """A value with one place of a dim written."""
    shape = (*x.shape[: dim % x.ndim], *x.shape[dim % x.ndim + 1 :])
    new = source if source.shape == shape else ops.expand(source, shape)
    return ops.select_scatter(x, new, dim, index)


def _spread(x: Handle, source: Handle, dim: int, length: int) -> Any:
    """Expand the source to the written part of x."""
    wanted = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return source if source.shape == wanted else ops.expand(source, wanted)
