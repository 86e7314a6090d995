"""Elementwise calls of torch that take several steps at once: 16 bits are rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.out_forms import as_tensor

_ATEN: Any = torch.ops.aten


def elu(x: Tensor, **attrs: float) -> Tensor:
    """Return scale * x where positive, else scale * alpha * (exp(input_scale * x) - 1)."""
    result: Tensor = _ATEN.elu(x, **attrs)
    return result


def lerp(x: Tensor, end: Tensor, weight: Any, *, out: Tensor | None = None) -> Tensor:
    """Return x + weight * (end - x), from the nearer of both: with a weight of 1 it is the end."""
    return torch.lerp(x, end, weight, out=out)


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: Any, *, out: Tensor | None = None) -> Tensor:
    """Return x + value * a * b, multiplied in this order."""
    return torch.addcmul(x, a, b, value=value, out=out)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Any, *, out: Tensor | None = None) -> Tensor:
    """Return x + value * a / b, in this order."""
    return torch.addcdiv(x, a, b, value=value, out=out)


def squared_distance(x: Tensor, centre: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return (x - centre)^2."""
    distance = torch.sub(x, centre, out=out)
    return torch.mul(distance, distance, out=out)


def limit(x: Tensor, least: Any, most: Any, *, out: Tensor | None = None) -> Tensor:
    """Limit x to what stands between tensors, or numbers, or None; `most` where they cross."""
    limits = (None if limit is None else as_tensor(limit, x) for limit in (least, most))
    return torch.clamp(x, *limits, out=out)


def binary_cross_entropy(p: Tensor, target: Tensor) -> Tensor:
    """Return (target - 1) * log(1 - p) - target * log(p), with logarithms of at least -100.

    torch's own kernel ends a process where p is no probability; here that is a NaN.
    """
    return (target - 1) * torch.log1p(-p).clamp(-100) - target * torch.log(p).clamp(-100)


def robust_loss(name: str) -> Callable[..., Tensor]:
    """Return the Huber loss or the smooth l1 loss of each element, whose unit is an attribute."""

    def call(x: Tensor, target: Tensor, *, out: Tensor | None = None, **unit: float) -> Tensor:
        into = {} if out is None else {"out": out}
        # by its name, which is the same in all processes: compiled functions are kept by it
        result: Tensor = getattr(_ATEN, name)(x, target, 0, *unit.values(), **into)
        return result

    call.__name__ = name
    return call
