"""Losses as aten writes them: reductions are numbers, cross entropy is one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.loss_parts import class_numbers

ops: Any = operations

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
