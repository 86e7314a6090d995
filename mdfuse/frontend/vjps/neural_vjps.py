"""Gradients of products, lookups, softmax, norms and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import reductions, views
from mdfuse.frontend.ops.recording import in_f32, record
from mdfuse.frontend.vjps.table import Applied, exp, rsqrt, rule, widely

# -- contractions --------------------------------------------------------------------------------


def _rows(x: Handle) -> Handle:
    """Merge all dims except the last."""
    return x if x.ndim == 2 else views.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@rule("matmul")
def _matmul(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    a, b = len(e.shape(0)), len(e.shape(1))
    if a == b == 1:
        return ct * e[1] if e.wants(0) else None, ct * e[0] if e.wants(1) else None
    if a == 1:
        ct = views.unsqueeze(ct, -2)
    elif b == 1:
        ct = views.unsqueeze(ct, -1)
    return (
        _left_factor(e, ct, a, b) if e.wants(0) else None,
        _right_factor(e, ct, a, b) if e.wants(1) else None,
    )


def _left_factor(e: Applied, ct: Handle, a: int, b: int) -> Handle:
    """ct[…,m,n] @ b[…,k,n]; a vector has one row."""
    other: Handle = e[1]
    if b == 1:
        return ct * other
    x = record("matmul", ct, views.transpose(other))
    return record("squeeze", x, dims=(x.ndim - 2,)) if a == 1 else x


def _right_factor(e: Applied, ct: Handle, a: int, b: int) -> Handle:
    """a[…,k,m] @ ct[…,m,n]; one matrix for a whole batch is one product of all rows."""
    if a == 1:
        return views.unsqueeze(e[0], -1) * ct
    if b == 1:
        return reductions.sum(e[0] * ct, tuple(range(a - 1)))
    if b == 2:
        return record("matmul", views.transpose(_rows(e[0])), _rows(ct))
    return record("matmul", views.transpose(e[0]), ct)


@rule("linear")
def _linear(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """x[…,k], w[n,k], b[n]; or w[k] and a result without its dim."""
    is_vector = len(e.shape(1)) == 1
    if is_vector:
        ct = views.unsqueeze(ct, -1)
    if is_vector or ct.ndim == 1:  # an outer product, or one row
        x = ct * e[1] if is_vector else record("matmul", ct, e[1])
        w = reductions.sum(e[0] * ct, tuple(range(ct.ndim - 1))) if is_vector else None
        w = views.unsqueeze(ct, -1) * e[0] if w is None else w
    else:
        x = record("matmul", ct, e[1]) if e.wants(0) else None
        w = record("matmul", views.transpose(_rows(ct)), _rows(e[0])) if e.wants(1) else None
    if e.count < 3 or not e.wants(2):
        return (x, w, None)[: e.count]
    over = tuple(range(ct.ndim - 1))
    bias = reductions.sum(ct, over) if over else ct
    return x, w, record("squeeze", bias, dims=(0,)) if is_vector else bias


@rule("embedding")
def _embedding(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Each row gets the sum of the cotangents of its lookups; the padding row gets none.

    With `scale_grad_by_freq` it gets their mean.
    """
    if e.attrs.get("scale_grad_by_freq"):
        one = record("full", 1, shape=(*ct.shape[:-1], 1), dtype=torch.float32)
        counts = record("embedding_grad", e[0], one, shape=(e.shape(1)[0], 1))
        ct = ct / record("embedding", e[0], counts).to(ct.dtype)
    if (padding := e.attrs.get("padding_idx")) is not None:
        is_padding = views.unsqueeze(record("eq", e[0], padding), -1)
        ct = record("where", is_padding, 0, ct)
    return None, record("embedding_grad", e[0], ct, shape=e.shape(1))


@rule("embedding_grad")
def _embedding_grad(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return None, record("embedding", e[0], ct)


# -- composite ops -------------------------------------------------------------------------------


@rule("softmax")
@widely
def _softmax(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return (_through_softmax(e.y, ct, e.attrs["dim"]),)


def _through_softmax(y: Handle, ct: Handle, dim: int) -> Handle:
    weighed = ct * y
    return weighed - y * reductions.sum(weighed, dim if y.ndim else (), True)


@rule("log_softmax")
@widely
def _log_softmax(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    total = reductions.sum(ct, e.attrs["dim"] if ct.ndim else (), True)
    return (ct - exp(e.y) * total,)


@rule("layer_norm")
def _layer_norm(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Ba, Kiros, Hinton 2016, with y = normal * weight + bias."""
    x, weight = e[0], e[1]
    wide, ct = in_f32(x), in_f32(ct)
    over = tuple(range(x.ndim - len(e.attrs["normalized_shape"]), x.ndim))
    distance = wide - reductions.mean(wide, over, True)
    variance = reductions.mean(distance * distance, over, True)
    scale = rsqrt(variance + e.attrs["eps"])
    normal = distance * scale
    inner = ct if weight is None else ct * weight
    gradients: list[Handle | None] = [None, None, None]
    if e.wants(0):
        lost = reductions.mean(inner, over, True)
        turned = normal * reductions.mean(inner * normal, over, True)
        gradients[0] = (inner - lost - turned) * scale
    if e.wants(1):
        gradients[1] = ct * normal
    if e.wants(2):
        gradients[2] = ct
    return gradients


@rule("rms_norm")
@widely
def _rms_norm(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Zhang, Sennrich 2019, with y = x / root * weight."""
    x, weight = e[0], e[1]
    over = tuple(range(x.ndim - len(e.attrs["normalized_shape"]), x.ndim))
    scale = rsqrt(reductions.mean(x * x, over, True) + e.attrs["eps"])
    normal = x * scale
    inner = ct if weight is None else ct * weight
    turned = normal * reductions.mean(inner * normal, over, True)
    return (
        (inner - turned) * scale if e.wants(0) else None,
        ct * normal if e.wants(1) else None,
    )
