"""Losses: how far values are from targets, as a mean, a sum, or each.

Classes and rows may be split; sums over them are joined by the ranks.
"""

from __future__ import annotations

import math

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import distances
from mdfuse.frontend.ops.creations import arange
from mdfuse.frontend.ops.loss_parts import alike, class_numbers, distance, reduced
from mdfuse.frontend.ops.pointwise import ROWS, clamp_min, logsigmoid, where
from mdfuse.frontend.ops.recording import again, as_dtype, back, in_f32, record, shown
from mdfuse.frontend.ops.reductions import sum
from mdfuse.frontend.ops.views import reshape


def nll_loss(
    x: Handle,
    target: Handle,
    weight: Handle | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Handle:
    """-x[target] along dim 1 (of a vector: 0): mean, sum, or "none" for each.

    Args:
        x: logarithms of probabilities: [rows, classes], [rows, classes, …] or [classes]; the
            classes may be split.
        target: the index of a class for each row; its range is not checked.
        weight: of each class.
        ignore_index: rows with this target count nothing.
        reduction: "mean" (by the weights of the rows that count), "sum" or "none".
    """
    at = 1 if x.ndim > 1 else 0
    rows = (*x.shape[:at], *x.shape[at + 1 :])
    is_index = not (target.dtype.is_floating_point or target.dtype.is_complex)
    fits = weight is None or (
        weight.shape == x.shape[at : at + 1] and weight.ndim == 1 and weight.dtype == x.dtype
    )
    if not x.ndim or not x.dtype.is_floating_point or target.shape != rows or not is_index:
        fits = False
    if not fits:
        raise DefinitionError(
            f"nll_loss of {shown(x)} with the target {shown(target)}"
            + (f" and the weight {shown(weight)}" if weight is not None else ""),
            because="x is floating, with its classes along dim 1 (of a vector: 0); the target has "
            "x's other dims, and integers; a weight has x's dtype and a number for each class",
            hint="x: [rows, classes], target: [rows]",
        )
    target = class_numbers(target)
    n, behind = x.shape[at], x.ndim - 1 - at
    classes = arange(n, dtype=target.dtype)
    classes = reshape(classes, (n, *(1,) * behind)) if behind else classes
    with again(x):
        is_it = ROWS["eq"](classes, record("unsqueeze", target, dims=(at,)))
    counts = ROWS["ne"](target, ignore_index)
    score = sum(where(is_it, in_f32(x), 0.0), at)
    share = as_dtype(counts, score.dtype)
    if weight is not None:
        factors = reshape(in_f32(weight), (n, *(1,) * behind)) if behind else in_f32(weight)
        share = where(counts, sum(where(is_it, factors, 0.0), at), 0.0)
    losses = where(counts, -score * share, 0.0)
    if reduction == "mean":
        return back(sum(losses) / sum(share), x)
    return back(reduced(losses, reduction), x)


def _probabilities(name: str, x: Handle, target: Handle) -> None:
    if x.shape != target.shape or not x.dtype.is_floating_point:
        raise DefinitionError(
            f"{name} of {shown(x)} with the target {shown(target)}",
            because="each number has a target, and both are floating",
            hint=f"target.to({x.dtype})",
        )


def binary_cross_entropy(
    x: Handle, target: Handle, weight: Handle | None = None, *, reduction: str = "mean"
) -> Handle:
    """-(target * log(x) + (1 - target) * log(1 - x)); logarithms are at least -100."""
    _probabilities("binary_cross_entropy", x, target)
    with again(x):
        loss = record("binary_cross_entropy", in_f32(x), in_f32(target))
        loss = loss if weight is None else loss * weight
    return back(reduced(loss, reduction), x)


def binary_cross_entropy_with_logits(
    x: Handle,
    target: Handle,
    weight: Handle | None = None,
    *,
    reduction: str = "mean",
    pos_weight: Handle | None = None,
) -> Handle:
    """`binary_cross_entropy` of sigmoid(x), without overflow.

    Args:
        x: numbers of any size.
        target: probabilities.
        weight: a factor for each.
        reduction: "mean", "sum" or "none".
        pos_weight: a factor for the part of the target.
    """
    _probabilities("binary_cross_entropy_with_logits", x, target)
    with again(x):
        wide, goal = in_f32(x), in_f32(target)
        factor = 1.0 if pos_weight is None else (pos_weight - 1.0) * goal + 1.0
        losses = (1.0 - goal) * wide - logsigmoid(wide) * factor
    return back(reduced(losses if weight is None else losses * weight, reduction), x)


def smooth_l1_loss(
    x: Handle, target: Handle, *, reduction: str = "mean", beta: float = 1.0
) -> Handle:
    """Squares of distances below beta, divided by 2 * beta; above it the distance less beta / 2."""
    if beta < 0:
        raise DefinitionError(
            f"smooth_l1_loss with beta={beta}", because="beta is a distance", hint="0 or more"
        )
    if beta == 0:
        return reduced(ROWS["abs"](distance(x, target)), reduction)
    with again(x):
        loss = record("smooth_l1_loss", *alike(x, target), beta=beta)
    return reduced(loss, reduction)


def huber_loss(x: Handle, target: Handle, *, reduction: str = "mean", delta: float = 1.0) -> Handle:
    """Half of squared distances up to delta; above it delta * (distance - delta / 2)."""
    if not delta > 0:
        raise DefinitionError(
            f"huber_loss with delta={delta}", because="delta is a distance", hint="more than 0"
        )
    with again(x):
        loss = record("huber_loss", *alike(x, target), delta=delta)
    return reduced(loss, reduction)


def kl_div(
    x: Handle, target: Handle, *, reduction: str = "mean", log_target: bool = False
) -> Handle:
    """target * (log(target) - x), for x the logarithms of probabilities.

    Args:
        x: logarithms of probabilities.
        target: probabilities, or with log_target their logarithms.
        reduction: "mean" of all elements, "batchmean" (their sum by the rows), "sum" or "none".
        log_target: whether the target holds logarithms.
    """
    if log_target:
        losses = ROWS["exp"](target) * (target - x)
    else:
        losses = ROWS["xlogy"](target, target) - target * x
    if reduction == "batchmean":
        return sum(losses) / (losses.shape[0] if losses.ndim else 1)
    return reduced(losses, reduction)


def _margin(margin: float, distances: Handle, reduction: str) -> Handle:
    return reduced(clamp_min(distances + margin, 0), reduction)


def triplet_margin_loss(
    anchor: Handle,
    positive: Handle,
    negative: Handle,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Handle:
    """max(0, d(anchor, positive) - d(anchor, negative) + margin), for distances d."""
    near = distances.pairwise_distance(anchor, positive, p, eps)
    far = distances.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = ROWS["minimum"](far, distances.pairwise_distance(positive, negative, p, eps))
    return _margin(margin, near - far, reduction)


def margin_ranking_loss(
    x1: Handle, x2: Handle, target: Handle, *, margin: float = 0.0, reduction: str = "mean"
) -> Handle:
    """max(0, -target * (x1 - x2) + margin)."""
    return _margin(margin, -target * (x1 - x2), reduction)


def cosine_embedding_loss(
    x1: Handle, x2: Handle, target: Handle, *, margin: float = 0.0, reduction: str = "mean"
) -> Handle:
    """1 - cosine where the target is 1; where it is -1 the cosine, so far as it is above margin."""
    dim = x1.ndim - 1
    product, first, second = (sum(a * b, dim) for a, b in ((x1, x2), (x1, x1), (x2, x2)))
    cosine = product / ROWS["sqrt"]((first + _TINY) * (second + _TINY))
    losses = where(ROWS["eq"](target, 1), 1.0 - cosine, 0.0)
    losses = losses + where(ROWS["eq"](target, -1), clamp_min(cosine - margin, 0), 0.0)
    return reduced(losses, reduction)


#: As torch has it.
_TINY = 1e-12


def hinge_embedding_loss(
    x: Handle, target: Handle, *, margin: float = 1.0, reduction: str = "mean"
) -> Handle:
    """x where the target is 1; where it is -1, what is missing to the margin."""
    near = where(ROWS["ne"](target, -1), x, 0.0)
    return reduced(near + where(ROWS["ne"](target, 1), clamp_min(margin - x, 0), 0.0), reduction)


def soft_margin_loss(x: Handle, target: Handle, *, reduction: str = "mean") -> Handle:
    """log(1 + exp(-target * x)), in the dtype of x where that has fractions."""
    losses = ROWS["log1p"](ROWS["exp"](-target * x))
    return reduced(back(losses, x) if x.dtype.is_floating_point else losses, reduction)


def poisson_nll_loss(
    x: Handle,
    target: Handle,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Handle:
    """exp(x) - target * x; with log_input=False x - target * log(x + eps)."""
    losses = ROWS["exp"](x) - target * x if log_input else x - target * ROWS["log"](x + eps)
    if full:  # Stirling
        stirling = target * ROWS["log"](target) - target + ROWS["log"](target * (2 * math.pi)) * 0.5
        losses = losses + where(ROWS["le"](target, 1), 0.0, stirling)
    return reduced(losses, reduction)
