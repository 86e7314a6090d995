"""Operations of neural networks: softmax, normalisations, attention, losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent, are_same
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.creations import arange
from mdfuse.frontend.ops.loss_parts import class_numbers, distance, reduced
from mdfuse.frontend.ops.parts import chunk
from mdfuse.frontend.ops.pointwise import ROWS, clamp, where
from mdfuse.frontend.ops.recording import (
    Dims,
    Integers,
    again,
    as_dtype,
    back,
    in_f32,
    own_place,
    place,
    record,
    record_several,
    shown,
)
from mdfuse.frontend.ops.reduction_parts import parts_of_log
from mdfuse.frontend.ops.reductions import mean, norm, sum
from mdfuse.frontend.ops.views import expand, repeat_interleave, reshape


def softmax(x: Handle, dim: int = -1, dtype: torch.dtype | None = None) -> Handle:
    """Softmax along a dim, of x in another dtype where one is given."""
    return _rowwise("softmax", x, dim, dtype)


def log_softmax(x: Handle, dim: int = -1, dtype: torch.dtype | None = None) -> Handle:
    """Logarithm of the softmax along a dim."""
    return _rowwise("log_softmax", x, dim, dtype)


def softmin(x: Handle, dim: int = -1, dtype: torch.dtype | None = None) -> Handle:
    """Softmax of -x along a dim."""
    return _rowwise("softmax", ROWS["neg"](x), dim, dtype)


def _rowwise(op: str, x: Handle, dim: int, dtype: torch.dtype | None) -> Handle:
    place(x, dim)
    return record(op, x if dtype is None or dtype == x.dtype else as_dtype(x, dtype), dim=dim)


def glu(x: Handle, dim: int = -1) -> Handle:
    """The first half of a dim times the sigmoid of the second."""
    at = own_place(x, dim)
    if x.shape[at] % 2:
        raise DefinitionError(
            f"glu(%{x.name}, {dim}) of {x.value.type_text()}",
            because="the dim has two halves",
            hint="an even extent",
        )
    first, second = chunk(x, 2, at)
    with again(x):
        wide, share = in_f32(first), ROWS["sigmoid"](in_f32(second))
    return back(wide * share, x)


# -- normalisations ------------------------------------------------------------------------------


def _last(x: Handle, normalized_shape: Integers | None) -> tuple[int, ...]:
    shape = normalized_shape if normalized_shape is not None else x.shape[-1:]
    return (shape,) if isinstance(shape, int | Extent) else tuple(shape)


def layer_norm(
    x: Handle,
    normalized_shape: Integers | None = None,
    weight: Handle | None = None,
    bias: Handle | None = None,
    eps: float = 1e-5,
) -> Handle:
    """Layer normalisation over the last dims (the last one by default)."""
    shape = _last(x, normalized_shape)
    for factor in (weight, bias):
        if factor is not None and not factor.dtype.is_floating_point:
            raise DefinitionError(
                f"layer_norm(%{x.name}) with %{factor.name}: {factor.value.type_text()}",
                because="it multiplies and adds floating-point numbers",
                hint="cast before",
            )
    _check_factors(x, [f for f in (weight, bias) if f is not None])
    return record("layer_norm", x, weight, bias, normalized_shape=shape, eps=eps)


def _check_factors(x: Handle, factors: list[Handle]) -> None:
    """Check that weight and bias have x's dtype; for 16-bit x both may be float32, as in torch."""
    dtypes = {f.dtype for f in factors}
    is_narrow = x.dtype in (torch.bfloat16, torch.float16)
    if dtypes <= {x.dtype} or (is_narrow and dtypes == {torch.float32}):
        return
    raise DefinitionError(
        f"layer_norm(%{x.name}: {x.value.type_text()}) with "
        + ", ".join(f"%{f.name}: {f.value.type_text()}" for f in factors),
        because="weight and bias have the dtype of what is normalised, or are both float32 "
        "where that has 16 bits",
        hint=f"cast them: {factors[0].name}.to({x.dtype})",
    )


def rms_norm(
    x: Handle,
    normalized_shape: Integers | None = None,
    weight: Handle | None = None,
    eps: float | None = None,
) -> Handle:
    """x / sqrt(mean(x²) + eps) * weight over the last dims (the last one by default).

    Without eps it is the precision of the computation, which is f32 for 16-bit dtypes.
    """
    shape = _last(x, normalized_shape)
    if not x.dtype.is_floating_point:
        raise DefinitionError(
            f"rms_norm(%{x.name}) of {x.value.type_text()}",
            because="roots of integers are no integers",
            hint="cast it to a floating dtype",
        )
    if not 0 < len(shape) <= x.ndim or x.shape[x.ndim - len(shape) :] != shape:
        raise DefinitionError(
            f"rms_norm(%{x.name}, {shape}) of {x.value.type_text()}",
            because="the normalised dims are the last ones",
            hint=f"for the last one {x.shape[-1:]}" if x.ndim else "give it a dim: reshape(1)",
        )
    if weight is not None and weight.dtype.is_complex:
        raise DefinitionError(
            f"rms_norm(%{x.name}) with %{weight.name}: {weight.value.type_text()}",
            because="the result has the dtype of what is normalised, which is real",
            hint="multiply afterwards",
        )
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return record("rms_norm", x, weight, normalized_shape=shape, eps=eps)


def normalize(x: Handle, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12) -> Handle:
    """x divided by its p-norm along dims, or by eps where that is larger."""
    return x / clamp(norm(x, p, dim, keepdim=True), eps)


# -- attention -----------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Handle,
    key: Handle,
    value: Handle,
    attn_mask: Handle | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Handle:
    """softmax(q k^T * scale + mask) v for q[…,l,e], k[…,s,e], v[…,s,f].

    Leading dims of extent 1 serve for all, as the one head of key and value that all heads of query
    read; with enable_gqa each serves as many heads of query as there are to one.
    """
    if dropout_p:
        raise DefinitionError(
            f"dropout_p={dropout_p}", hint="write softmax, dropout and matmul as three operations"
        )
    if enable_gqa:
        key, value = _for_each_head(query, key), _for_each_head(query, value)
    query, key, value = _of_one_batch(query, key, value)
    return record(
        "scaled_dot_product_attention",
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        scale=scale,
    )


def paged_attention(
    query: Handle,
    key: Handle,
    value: Handle,
    table: Handle,
    lengths: Handle,
    *,
    scale: float | None = None,
) -> Handle:
    """Attention of each request's last rows to its keys and values, which lie in pages.

    Requests and heads may be split; heads of keys by a divisor of their number.

    Args:
        query: [requests, heads, rows, e]: row i of a request of n rows is its row n - rows + i,
            which sees the rows up to itself; one before the first is 0.
        key: [pages, page, heads of keys, e], a cache; each head serves as many heads of query as
            there are to one.
        value: [pages, page, heads of keys, f].
        table: [requests, pages of a request]: integers of 64 bits that name pages of the caches.
        lengths: [requests]: how many rows each has, as integers of 64 bits.
        scale: of the scores; 1/sqrt(e) by default.

    >>> import torch, mdfuse as mf
    >>> with mf.FusionDefinition("decode") as fd:
    ...     q = fd.define_tensor([2, 4, 1, 8])
    ...     k, v = (fd.define_tensor([5, 16, 2, 8]) for _ in range(2))
    ...     table, lengths = (fd.define_tensor(s, torch.int64) for s in ([2, 3], [2]))
    ...     y = fd.ops.paged_attention(q, k, v, table, lengths)
    ...     fd.add_output(y)
    >>> y.shape
    (2, 4, 1, 8)
    """
    for x, name in ((table, "table"), (lengths, "lengths")):
        if x.dtype != torch.int64:
            raise DefinitionError(
                f"paged_attention with {name} {shown(x)}",
                because="pages and lengths are integers of 64 bits",
                hint=f"{name}.long()",
            )
    return record("paged_attention", query, key, value, table, lengths, scale=scale)


class Attended(NamedTuple):
    """The results of `attention`: its value, and log(sum(exp(scores))) of each row."""

    output: Handle
    lse: Handle


def attention(
    query: Handle,
    key: Handle,
    value: Handle,
    attn_mask: Handle | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
) -> Attended:
    """Attention with the logarithm of each row's sum of powers, of which parts can be joined.

    No scores are kept. Batches, heads and the query's rows may be split.

    Args:
        query: […,l,e].
        key: […,s,e]; its leading dims are those of the query.
        value: […,s,f].
        attn_mask: bools (True counts), or floats that are added to the scores.
        is_causal: row i sees the keys 0 to i, counted from the offsets, where the mask lets it.
        scale: of the scores; 1/sqrt(e) by default.
        enable_gqa: each head of key and value serves as many heads of query as there are to one.
        window: how many of the keys that a causal row sees count, the last ones; None: all.
        q_offset, k_offset: the positions of the first row and of the first key.
    """
    operands = (query, key, value, *(() if attn_mask is None else (attn_mask,)))
    how: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    how |= {} if window is None else {"window": window}
    how |= {"q_offset": q_offset} if q_offset else {}
    how |= {"k_offset": k_offset} if k_offset else {}
    return Attended(*record_several("attention", *operands, **how))


def _of_one_batch(*operands: Handle) -> list[Handle]:
    """Expand leading dims of extent 1 to those of the other operands."""
    fronts = [x.shape[:-2] for x in operands]
    if len({*map(len, fronts)}) > 1:
        return [*operands]
    front = [next((n for n in of if not are_same(n, 1)), 1) for of in zip(*fronts, strict=True)]
    are_full = [all(map(are_same, of, front)) for of in fronts]
    return [
        x if is_kept else expand(x, (*front, *x.shape[-2:]))
        for x, is_kept in zip(operands, are_full, strict=True)
    ]


def _for_each_head(query: Handle, x: Handle) -> Handle:
    if min(query.ndim, x.ndim) < 3 or not x.shape[-3] or query.shape[-3] % x.shape[-3]:
        raise DefinitionError(
            f"enable_gqa for %{query.name}: {query.value.type_text()} "
            f"and %{x.name}: {x.value.type_text()}",
            because="the third dim from the end counts heads; those of the query are a multiple of "
            "one or more",
            hint="[batch, heads, length, features]",
        )
    times = query.shape[-3] // x.shape[-3]
    return x if times == 1 else repeat_interleave(x, times, -3)


# -- losses --------------------------------------------------------------------------------------


def mse_loss(x: Handle, target: Handle, reduction: str = "mean") -> Handle:
    """Squared differences: their mean, their sum, or with reduction="none" each."""
    far = distance(x, target)
    return reduced(far * far, reduction)


def l1_loss(x: Handle, target: Handle, reduction: str = "mean") -> Handle:
    """Absolute differences: their mean, their sum, or with reduction="none" each."""
    return reduced(ROWS["abs"](distance(x, target)), reduction)


def cross_entropy(
    x: Handle,
    target: Handle,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Handle:
    """-log(softmax(x))[target] along dim 1 (of a vector: 0): mean, sum, or "none" for each.

    The classes may be split: ranks exchange three numbers per row. The range of indices is not
    checked.

    Args:
        x: [rows, classes], [rows, classes, …] or [classes].
        target: the index of a class for each row; or floats like x, a probability for each class.
        ignore_index: rows with this target count nothing.
        reduction: "mean" (over the rows that count), "sum" or "none".
        label_smoothing: how much of each row's target is spread over all classes, from 0 to 1.
    """
    at = _of_classes(x, target, label_smoothing)
    with again(x):
        wide, n = in_f32(x), x.shape[at]
    top, above = parts_of_log(wide, (at,))
    if target.dtype.is_floating_point:
        of_each = as_dtype(target, wide.dtype)
        if label_smoothing:
            of_each = of_each * (1 - label_smoothing) + label_smoothing / n
        losses = sum(of_each * (above + (top - wide)), at)
        return back(reduced(losses, reduction), x)
    target = class_numbers(target)
    classes, behind = arange(n, dtype=target.dtype), x.ndim - 1 - at
    classes = reshape(classes, (n, *(1,) * behind)) if behind else classes
    with again(x, is_more=True):
        is_it = ROWS["eq"](classes, record("unsqueeze", target, dims=(at,)))
    score = sum(where(is_it, wide, 0.0), at)
    if label_smoothing:
        score = score * (1 - label_smoothing) + _share(wide, at, label_smoothing)
    counts = ROWS["ne"](target, ignore_index)
    top, above = (record("squeeze", x, dims=(at,)) for x in (top, above))
    losses = where(counts, above + (top - score), 0.0)  # subtract the large terms first
    if reduction != "mean":
        return back(reduced(losses, reduction), x)
    return back(sum(losses) / sum(as_dtype(counts, losses.dtype)), x)


def _share(x: Handle, at: int, smoothing: float) -> Handle:
    """Return a share of the mean over classes, as a product that ranks add to another sum."""
    n = x.shape[at]
    if isinstance(n, Extent):
        return mean(x, at) * smoothing
    return sum(x, at) * (smoothing / max(n, 1))


def _of_classes(x: Handle, target: Handle, smoothing: float) -> int:
    """Return the dim of the classes; raise DefinitionError unless target and smoothing fit x."""
    at = 1 if x.ndim > 1 else 0
    rows = (*x.shape[:at], *x.shape[at + 1 :])
    wanted = x.shape if target.dtype.is_floating_point else rows
    if not x.ndim or not x.dtype.is_floating_point or target.shape != wanted:
        raise DefinitionError(
            f"cross_entropy of {shown(x)} with the target {shown(target)}",
            because="x is floating, with its classes along dim 1 (of a vector: 0); a target of "
            "integers has x's other dims, one of floats all of them",
            hint="x: [rows, classes], target: [rows]",
        )
    if not 0 <= smoothing <= 1:
        raise DefinitionError(
            f"label_smoothing={smoothing}",
            because="it is the share of the target that is spread over all classes",
            hint="a number from 0 to 1",
        )
    return at
