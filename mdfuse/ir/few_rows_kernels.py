"""Kernels of `mdfuse.ir.few_rows`, in Triton.

The parts of the keys are joined as in Dao et al., Flash-Decoding for long-context inference (2023):
each part gives its values, divided by the sum of its powers of two, and the logarithm of that sum.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import triton
import triton.language as tl

#: The natural logarithm of 2: scores are those of powers of two.
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_part(
    q, k, v, mask, out, sums, logs, scale,
    shared, groups, rows, n, e, f, per,
    qb, qh, qr, qe, kb, kh, kn, ke,
    vb, vh, vn, vf, mb, mh, mr, mn,
    HAS_MASK: tl.constexpr, HAS_SUMS: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let all rows that share a head of keys attend to a part of its keys."""
    pair, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = (pair // shared).to(tl.int64), (pair % shared).to(tl.int64)
    r, es, fs = tl.arange(0, ROWS), tl.arange(0, E).to(tl.int64), tl.arange(0, F).to(tl.int64)
    head, row, is_row = h * groups + r // rows, (r % rows).to(tl.int64), r < groups * rows
    at_q = q + b * qb + head[:, None] * qh + row[:, None] * qr + es[None, :] * qe
    query = tl.load(at_q, mask=is_row[:, None] & (es < e)[None, :], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total, values = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, F], tl.float32)
    stop = tl.minimum(part * per + per, n)
    for start in range(part * per, stop, BLOCK):
        key = (start + tl.arange(0, BLOCK)).to(tl.int64)
        seen = is_row[:, None] & (key < stop)[None, :]
        if HAS_MASK:
            at_m = mask + b * mb + head[:, None] * mh + row[:, None] * mr + key[None, :] * mn
            seen = seen & (tl.load(at_m, mask=seen, other=0) != 0)
        is_seen = tl.max(seen.to(tl.int32), 0) > 0
        if tl.max(is_seen.to(tl.int32), 0) > 0:
            at_k = k + b * kb + h * kh + key[None, :] * kn + es[:, None] * ke
            keys = tl.load(at_k, mask=is_seen[None, :] & (es < e)[:, None], other=0.0)
            at_v = v + b * vb + h * vh + key[:, None] * vn + fs[None, :] * vf
            some = tl.load(at_v, mask=is_seen[:, None] & (fs < f)[None, :], other=0.0)
            scores = tl.dot(query, keys, input_precision=PRECISION) * scale
            scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            powers, fade = tl.exp2(scores - shift[:, None]), tl.exp2(top - shift)
            weighted = tl.dot(powers.to(some.dtype), some, input_precision=PRECISION)
            values = values * fade[:, None] + weighted
            total, top = total * fade + tl.sum(powers, 1), new
    values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    is_there = is_row[:, None] & (fs < f)[None, :]
    if IS_WHOLE:
        place = (b * shared * groups + head) * rows + row
        at = out + place[:, None] * f + fs[None, :]
        tl.store(at, values.to(out.dtype.element_ty), mask=is_there)
        if HAS_SUMS:
            tl.store(logs + place, (tl.log2(total) + top) * LN_2, mask=is_row)
    else:
        place = (pair * parts + part).to(tl.int64) * ROWS + r
        tl.store(out + place[:, None] * f + fs[None, :], values, mask=is_there)
        tl.store(sums + place, tl.log2(total) + top, mask=is_row)


@triton.jit
def join(
    values, sums, out, logs, heads, groups, rows, parts, f,
    HAS_SUMS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Join the parts of a row; one that sees no key is 0."""
    head, row = tl.program_id(0), tl.program_id(1)
    pair, r = head // groups, head % groups * rows + row
    p, fs = tl.arange(0, PARTS), tl.arange(0, F)
    place = (pair.to(tl.int64) * parts + p) * ROWS + r
    each = tl.load(sums + place, mask=p < parts, other=float("-inf"))
    top = tl.max(each, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(each - shift)
    at = values + place[:, None] * f + fs[None, :]
    some = tl.load(at, mask=(p < parts)[:, None] & (fs < f)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    joined = tl.sum(some * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    into = head.to(tl.int64) * rows + row
    tl.store(out + into * f + fs, joined.to(out.dtype.element_ty), mask=fs < f)
    if HAS_SUMS:
        tl.store(logs + into, (tl.log2(total) + shift) * LN_2)
