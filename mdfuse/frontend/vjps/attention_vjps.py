"""Gradients of attention: y = P v, with the weights P = softmax(S), S = scale q k^T + mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, reductions, views
from mdfuse.frontend.ops.recording import back, in_f32, record, record_several
from mdfuse.frontend.vjps.matrix_vjps import product
from mdfuse.frontend.vjps.table import Applied, eq, ge, rule, where


@rule("attention", "scaled_dot_product_attention")
def _attention(e: Applied, cts: Sequence[Any]) -> Sequence[Handle | None]:
    """Use the op that keeps no scores, unless the mask's gradient, of the scores' size, is wanted.

    The recorder has already replaced attention without sums by the op that returns them.
    """
    ct, of_sums = cts
    if not (e.count > 3 and e.wants(3)):
        mask = [e[3]] if e.count > 3 else []
        out, sums = e.results
        given = creations.zeros_like(out) if ct is None else ct
        if of_sums is not None:
            out = reductions.sum(in_f32(given) * in_f32(out), -1) - of_sums
        operands = (e[0], e[1], e[2], out, sums, given, *mask)
        of_q, of_k, of_v = record_several("attention_grad", *operands, **e.attrs)
        return (of_q, of_k, None if ct is None else of_v, *(None for _ in mask))
    p, q, value, d_scores = _weights(e, 3, e.results[1]), e[0], None, None
    if ct is not None:
        d_scores = _through(p, in_f32(product(ct, views.transpose(_per_head(e, e[2])))))
        value = _joined(e, product(views.transpose(back(p, q)), ct))
    if of_sums is not None:
        from_sums = p * views.unsqueeze(in_f32(of_sums), -1)
        d_scores = from_sums if d_scores is None else d_scores + from_sums
    assert d_scores is not None
    small = back(d_scores * _scale(e), q)
    key = _joined(e, product(views.transpose(small), q))
    gradients = (product(small, _per_head(e, e[1])), key, value)
    return (*gradients, d_scores) if e.count > 3 else gradients


@rule("attention_grad")
def _attention_grad(e: Applied, cts: Sequence[Any]) -> Sequence[Handle | None]:
    """The gradient of the gradient, by the weights.

    Let M be the cotangent of dS = P (dP - D), D = sum(P dP) over a row, and N that of P through dv.
    The cotangent of dP is P (M - R), R = sum(P M) over a row; that of P is M (dP - D) - R dP + N.
    Where D is given, the terms of R are its cotangent instead.
    """
    wide = [in_f32(x) for x in (e[0], e[1], e[2])]
    given = [in_f32(x) if x is not None else z * 0.0 for x, z in zip(cts, wide, strict=True)]
    (wq, wk, wv), (a, b, c) = ((x[0], *(_per_head(e, y) for y in x[1:])) for x in (wide, given))
    wct, scale = in_f32(e[5]), _scale(e)
    p = _weights(e, 6, e[4])
    dp = product(wct, views.transpose(wv))
    has_both = e[3].ndim == e[4].ndim
    given_d = views.unsqueeze(e[3], -1) if has_both else reductions.sum(p * dp, -1, True)
    centred = dp - given_d
    ds = p * centred
    m = (product(a, views.transpose(wk)) + product(wq, views.transpose(b))) * scale
    row = reductions.sum(p * m, -1, True)
    to_dp = p * (m if has_both else m - row)
    to_p = m * centred + product(wct, views.transpose(c))
    to_s = _through(p, to_p if has_both else to_p - dp * row)
    return (
        (product(ds, b) + product(to_s, wk)) * scale,
        _joined(e, product(views.transpose(ds), a) + product(views.transpose(to_s), wq)) * scale,
        _joined(e, product(views.transpose(to_dp), wct)),
        -views.squeeze(row, -1) if has_both else None,
        None,
        product(to_dp, wv) + product(p, c),
        *(to_s for _ in range(e.count - 6)),
    )


def _shared(e: Applied) -> int:
    """Return the number of query heads per head of key and value."""
    heads = e.shape(1)[-3] if e.attrs.get("enable_gqa") else 0
    return e.shape(0)[-3] // heads if isinstance(heads, Extent) or heads else 1


def _per_head(e: Applied, x: Handle) -> Handle:
    """Repeat heads of key or value for the query heads that share them."""
    n = _shared(e)
    return x if n == 1 else views.repeat_interleave(x, n, -3)


def _joined(e: Applied, x: Handle) -> Handle:
    """Sum a cotangent over the query heads that share a head of key or value."""
    n = _shared(e)
    return x if n == 1 else reductions.sum(views.unflatten(x, -3, (-1, n)), -3)


def _scale(e: Applied) -> float:
    scale = e.attrs.get("scale")
    return 1.0 / math.sqrt(e.shape(0)[-1]) if scale is None else float(scale)


def _through(p: Handle, ct: Handle) -> Handle:
    """Return the cotangent of the argument of softmax along the last dim."""
    weighed = ct * p
    return weighed - p * reductions.sum(weighed, -1, True)


def _weights(e: Applied, at: int, sums: Handle) -> Handle:
    """Return the weights in at least f32; the mask, if any, is operand `at`."""
    q, k = e[0], _per_head(e, e[1])
    mask = e[at] if e.count > at else None
    scores = in_f32(product(q, views.transpose(k))) * _scale(e)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = where(mask, scores, -math.inf) if is_bool else scores + mask
    if e.attrs.get("is_causal"):
        ends = ((x.shape[-2], e.attrs.get(n, 0)) for x, n in ((q, "q_offset"), (k, "k_offset")))
        rows, columns = (creations.arange(first, first + n) for n, first in ends)
        behind = views.unsqueeze(rows, 1) - columns
        scores = where(ge(behind, 0), scores, -math.inf)
        if (window := e.attrs.get("window")) is not None:
            scores = where(ge(behind, window), -math.inf, scores)
    weights: Handle = record("softmax", scores, dim=-1)
    if mask is None and not {"window", "q_offset", "k_offset"} & {*e.attrs}:
        return weights
    # weights of a row that sees nothing are 0, where softmax gives NaN
    return where(eq(views.unsqueeze(sums, -1), -math.inf), 0.0, weights)
