"""Gradients of attention: y = P v, with the weights P = softmax(S), S = scale q k^T + mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, reductions, views
from mdfuse.frontend.ops.recording import back, in_f32, record, record_several
from mdfuse.frontend.vjps.table import Applied, ge, rule, where


@rule("attention")
def _attention(e: Applied, cts: Sequence[Any]) -> Sequence[Handle | None]:
    """By the row that keeps no scores; a mask's gradient is as large as the scores are."""
    ct, of_sums = cts
    if of_sums is None and not (e.count > 3 and e.wants(3)):
        mask = [e[3]] if e.count > 3 else []
        operands = (e[0], e[1], e[2], *e.results, ct, *mask)
        found = record_several("attention_grad", *operands, **e.attrs)
        return (*found, *(None for _ in mask))
    p, q, value, d_scores = _weights(e, 3), e[0], None, None
    if ct is not None:
        d_scores = _through(p, in_f32(_product(ct, views.transpose(e[2]))))
        value = _product(views.transpose(back(p, q)), ct)
    if of_sums is not None:
        more = p * views.unsqueeze(in_f32(of_sums), -1)
        d_scores = more if d_scores is None else d_scores + more
    assert d_scores is not None
    small = back(d_scores * _scale(e), q)
    own = (_product(small, e[1]), _product(views.transpose(small), q), value)
    return (*own, d_scores) if e.count > 3 else own


@rule("attention_grad")
def _attention_grad(e: Applied, cts: Sequence[Any]) -> Sequence[Handle | None]:
    """The gradient of the gradient, by the weights.

    With M what comes back to dS = P (dP - D), D = sum(P dP) over a row, and N what comes back to P
    through dv: to dP comes P (M - R), R = sum(P M) over a row; to P comes M (dP - D) - R dP + N.
    """
    q, k, v, ct = e[0], e[1], e[2], e[5]
    zero = [in_f32(x) for x in (q, k, v)]
    a, b, c = (in_f32(x) if x is not None else z * 0.0 for x, z in zip(cts, zero, strict=True))
    wq, wk, wv, wct, scale = *zero, in_f32(ct), _scale(e)
    p = _weights(e, 6)
    dp = _product(wct, views.transpose(wv))
    ds = _through(p, dp)
    m = (_product(a, views.transpose(wk)) + _product(wq, views.transpose(b))) * scale
    row = reductions.sum(p * m, -1, True)
    to_dp = p * (m - row)
    own = dp - reductions.sum(p * dp, -1, True)
    to_s = _through(p, m * own - dp * row + _product(wct, views.transpose(c)))
    return (
        (_product(ds, b) + _product(to_s, wk)) * scale,
        (_product(views.transpose(ds), a) + _product(views.transpose(to_s), wq)) * scale,
        _product(views.transpose(to_dp), wct),
        None,
        None,
        _product(to_dp, wv) + _product(p, c),
        *(None for _ in range(e.count - 6)),
    )


def _product(a: Handle, b: Handle) -> Handle:
    found: Handle = record("matmul", a, b)
    return found


def _scale(e: Applied) -> float:
    scale = e.attrs.get("scale")
    return 1.0 / math.sqrt(e.shape(0)[-1]) if scale is None else float(scale)


def _through(p: Handle, ct: Handle) -> Handle:
    """Through softmax along the last dim."""
    weighed = ct * p
    return weighed - p * reductions.sum(weighed, -1, True)


def _weights(e: Applied, at: int) -> Handle:
    """The weights in f32 or wider; the mask, if there is one, is the operand at a position."""
    if e.attrs.get("enable_gqa"):
        raise DefinitionError(
            "the gradient of attention with enable_gqa, of its sums, of its mask, or once more",
            because="it is computed from the weights, of which each head has its own",
            hint="repeat the heads of key and value: repeat_interleave(k, n, -3)",
        )
    q, k = e[0], e[1]
    mask = e[at] if e.count > at else None
    scores = in_f32(_product(q, views.transpose(k))) * _scale(e)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = where(mask, scores, -math.inf) if is_bool else scores + mask
    if e.attrs.get("is_causal"):
        rows, columns = creations.arange(q.shape[-2]), creations.arange(k.shape[-2])
        scores = where(ge(views.unsqueeze(rows, 1), columns), scores, -math.inf)
    found: Handle = record("softmax", scores, dim=-1)
    return found
