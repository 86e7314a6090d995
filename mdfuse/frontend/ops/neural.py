"""Operations of neural networks: softmax, normalisations, attention, losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.parts import chunk
from mdfuse.frontend.ops.pointwise import ROWS, clamp
from mdfuse.frontend.ops.recording import Dims, as_dtype, own_place, place, record
from mdfuse.frontend.ops.reductions import mean, norm, sum
from mdfuse.frontend.ops.views import repeat_interleave


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
    return first * ROWS["sigmoid"](second)


# -- normalisations ------------------------------------------------------------------------------


def _last(x: Handle, normalized_shape: int | Sequence[int] | None) -> tuple[int, ...]:
    shape = normalized_shape if normalized_shape is not None else x.shape[-1:]
    return (shape,) if isinstance(shape, int | Extent) else tuple(shape)


def layer_norm(
    x: Handle,
    normalized_shape: int | Sequence[int] | None = None,
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
    """Weight and bias have x's dtype; of 16-bit x they may both be float32, as torch has it."""
    found = {f.dtype for f in factors}
    is_narrow = x.dtype in (torch.bfloat16, torch.float16)
    if found <= {x.dtype} or (is_narrow and found == {torch.float32}):
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
    normalized_shape: int | Sequence[int] | None = None,
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

    With enable_gqa each head of key and value serves as many heads of query as there are to one.
    """
    if dropout_p:
        raise DefinitionError(
            f"dropout_p={dropout_p}", hint="write softmax, dropout and matmul as three operations"
        )
    if enable_gqa:
        key, value = _for_each_head(query, key), _for_each_head(query, value)
    return record(
        "scaled_dot_product_attention",
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        scale=scale,
    )


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
    distance = _distance(x, target)
    return _reduced(distance * distance, reduction)


def l1_loss(x: Handle, target: Handle, reduction: str = "mean") -> Handle:
    """Absolute differences: their mean, their sum, or with reduction="none" each."""
    return _reduced(ROWS["abs"](_distance(x, target)), reduction)


def _distance(x: Handle, target: Handle) -> Handle:
    """Differences, in the dtype of two tensors of one shape: torch expands them before."""
    dtype = torch.promote_types(x.dtype, target.dtype)
    same = [y if y.dtype == dtype else as_dtype(y, dtype) for y in (x, target)]
    return same[0] - same[1]


def _reduced(x: Handle, reduction: str) -> Handle:
    known: dict[str, Any] = {"none": lambda x: x, "mean": mean, "sum": sum}
    if reduction not in known:
        raise DefinitionError(
            f"reduction={reduction!r}",
            because="a loss is reduced to one number or not at all",
            hint=" or ".join(map(repr, known)),
        )
    result: Handle = known[reduction](x)
    return result
