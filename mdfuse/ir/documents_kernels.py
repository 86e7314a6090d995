"""Kernels of `mdfuse.ir.documents`, in Triton.

Attention goes by blocks of rows and keys, as in Dao, FlashAttention-2 (2023). Here it leaves out
the pairs of blocks whose numbers of documents do not meet: `bounds` has the least and the greatest
number of each block. Between the first and the last block that meet,

| blocks | computed |
|---|---|
| of one document, whose pairs are all visible, where they lie side by side | without masks |
| others | with one, unless their numbers do not meet |

A number that is not finite counts for the pairs that are visible alone, and gives NaN there.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
import triton
import triton.language as tl

#: log2(e), and its inverse.
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
#: The greatest and the least number of a document.
_MOST = tl.constexpr((1 << 63) - 1)
_LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def bounds(numbers, lows, highs, n, blocks, BLOCK: tl.constexpr):
    """Find the least and the greatest number of each block."""
    block, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    x = numbers + lead * n + i
    tl.store(lows + lead * blocks + block, tl.min(tl.load(x, mask=i < n, other=_MOST), 0))
    tl.store(highs + lead * blocks + block, tl.max(tl.load(x, mask=i < n, other=_LEAST), 0))


@triton.jit
def _span(lows, highs, low, high, start, stop, first_full, last_full, MANY: tl.constexpr):
    """Return the blocks from the first to the last that meet, and those of them without masks."""
    first, last = stop, start
    begin, end, count = stop, start, 0
    for some in range(start, stop, MANY):
        at = some + tl.arange(0, MANY)
        is_there = at < stop
        a = tl.load(lows + at, mask=is_there, other=_MOST)
        b = tl.load(highs + at, mask=is_there, other=_LEAST)
        meets = is_there & (a <= high) & (b >= low)
        first = tl.minimum(first, tl.min(tl.where(meets, at, stop), 0))
        last = tl.maximum(last, tl.max(tl.where(meets, at + 1, start), 0))
        is_full = is_there & (a == b) & (a == low) & (low == high)
        is_full = is_full & (at >= first_full) & (at < last_full)
        begin = tl.minimum(begin, tl.min(tl.where(is_full, at, stop), 0))
        end = tl.maximum(end, tl.max(tl.where(is_full, at + 1, start), 0))
        count += tl.sum(is_full.to(tl.int32), 0)
    is_apart = (count == 0) | (end - begin != count)
    begin, end = tl.where(is_apart, last, begin), tl.where(is_apart, last, end)
    return first, begin, end, last


@triton.jit
def _keys_of(
    numbers, lows, highs, start, n, m, shift, window,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """Return the numbers of a block of rows, their bounds, and the span of blocks that they see."""
    row = (start + tl.arange(0, ROWS)).to(tl.int64)
    low = tl.min(tl.load(numbers + row, mask=row < n, other=_MOST), 0)
    high = tl.max(tl.load(numbers + row, mask=row < n, other=_LEAST), 0)
    ids = tl.load(numbers + row, mask=row < n, other=0)
    stop, begin, full, until = tl.cdiv(m, BLOCK), 0, 0, m // BLOCK
    if IS_CAUSAL:
        end = tl.maximum(tl.minimum(start + ROWS, n) + shift, 0)  # behind the last row's last key
        stop = tl.minimum(stop, tl.cdiv(end, BLOCK))
        until = tl.minimum(until, tl.maximum(start + shift + 1, 0) // BLOCK)
        if HAS_WINDOW:
            begin = tl.minimum(tl.maximum(start + shift - window + 1, 0) // BLOCK, stop)
            full = tl.cdiv(tl.maximum(start + ROWS + shift - window, 0), BLOCK)
    first, pure, mixed, last = _span(lows, highs, low, high, begin, stop, full, until, MANY)
    return ids, low, high, first, pure, mixed, last


@triton.jit
def _visible(ids, of_keys, row, key, n, m, shift, window, IS_CAUSAL, HAS_WINDOW):
    """Return which rows [R, 1] see which keys [1, K]."""
    seen = (ids == of_keys) & (row < n) & (key < m)
    if IS_CAUSAL:
        seen = seen & (key <= row + shift)
        if HAS_WINDOW:
            seen = seen & (key > row + shift - window)
    return seen


@triton.jit
def _weighed(p, x, seen, IS_FULL: tl.constexpr, PRECISION: tl.constexpr):
    """Return p [A, B] times x [B, C], where hidden pairs have p = 0, whatever x is."""
    if IS_FULL:
        y = tl.dot(p.to(x.dtype), x, input_precision=PRECISION)
    else:
        is_bad = (x != x) | (tl.abs(x) == float("inf"))
        clean = tl.where(is_bad, 0.0, x).to(x.dtype)
        y = tl.dot(p.to(x.dtype), clean, input_precision=PRECISION)
        if tl.max(tl.max(is_bad.to(tl.int32), 1), 0) > 0:
            bad = tl.dot(seen.to(x.dtype), is_bad.to(x.dtype), input_precision=PRECISION)
            y = tl.where(bad > 0, float("nan"), y)
    return y


@triton.jit
def _rows(x, row, n, at_row, cols, width, at_col):
    """Load rows of a head."""
    at = x + row[:, None] * at_row + cols[None, :] * at_col
    return tl.load(at, mask=(row < n)[:, None] & (cols < width)[None, :], other=0.0)


# -- forward ---------------------------------------------------------------------------------------


@triton.jit
def _attended(
    values, top, total, query, ids, row, k, v, numbers, lows, highs, low, high, first, last,
    n, m, shift, window, scale, e, f, es, fs, kn, ke, vn, vf,
    IS_FULL: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to blocks of keys: go on from a sum of values, its greatest score, and its total."""
    for block in range(first, last):
        is_met = True
        if not IS_FULL:
            is_met = (tl.load(lows + block) <= high) & (tl.load(highs + block) >= low)
        if is_met:
            key = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
            keys = _rows(k, key, m, kn, es, e, ke)
            scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
            seen = scores  # all of them
            if not IS_FULL:
                of_keys = tl.load(numbers + key, mask=key < m, other=0)
                seen = _visible(
                    ids[:, None], of_keys[None, :], row[:, None], key[None, :], n, m, shift,
                    window, IS_CAUSAL, HAS_WINDOW,
                )  # fmt: skip
                scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            by = tl.where(new == float("-inf"), 0.0, new)
            powers, fade = tl.exp2(scores - by[:, None]), tl.exp2(top - by)
            some = _rows(v, key, m, vn, fs, f, vf)
            values = values * fade[:, None] + _weighed(powers, some, seen, IS_FULL, PRECISION)
            total, top = total * fade + tl.sum(powers, 1), new
    return values, top, total


@triton.jit
def attend(
    q, k, v, of_rows, of_keys, lows, highs, out, sums, scale, groups, n, m, shift, window, e, f,
    qb, qh, qn, qe, kb, kh, kn, ke, vb, vh, vn, vf, rb, rh, cb, ch, bb, bh,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let a block of rows of a head attend to the keys of their documents."""
    start, heads = tl.program_id(0) * ROWS, tl.num_programs(1)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = (start + tl.arange(0, ROWS)).to(tl.int64)
    es, fs = tl.arange(0, E).to(tl.int64), tl.arange(0, F).to(tl.int64)
    lows, highs = lows + b * bb + h * bh, highs + b * bb + h * bh
    ids, low, high, first, pure, mixed, last = _keys_of(
        of_rows + b * rb + h * rh, lows, highs, start, n, m, shift, window,
        IS_CAUSAL, HAS_WINDOW, ROWS, BLOCK, MANY,
    )  # fmt: skip
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total, values = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, F], tl.float32)
    query = _rows(q + b * qb + h * qh, row, n, qn, es, e, qe)
    k, v = k + b * kb + h // groups * kh, v + b * vb + h // groups * vh
    for part in tl.static_range(3):
        one = first if part == 0 else (pure if part == 1 else mixed)
        two = pure if part == 0 else (mixed if part == 1 else last)
        values, top, total = _attended(
            values, top, total, query, ids, row, k, v, of_keys + b * cb + h * ch, lows, highs,
            low, high, one, two, n, m, shift, window, scale * _LOG2E, e, f, es, fs,
            kn, ke, vn, vf, part == 1, IS_CAUSAL, HAS_WINDOW, BLOCK, PRECISION,
        )  # fmt: skip
    values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (b * heads + h) * n + row
    is_there = (row < n)[:, None] & (fs < f)[None, :]
    tl.store(out + place[:, None] * f + fs[None, :], values.to(out.dtype.element_ty), mask=is_there)
    tl.store(sums + place, (tl.log2(total) + top) * _LN2, mask=row < n)


# -- backward --------------------------------------------------------------------------------------


@triton.jit
def weigh(
    ct, out, into, n, f, cb, ch, cn, cf, ob, oh, on, of, ROWS: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """Sum up, for each row, the products of its result and of the cotangent."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, fs = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64), tl.arange(0, F)
    fs = fs.to(tl.int64)
    x = _rows(ct + b * cb + h * ch, row, n, cn, fs, f, cf).to(into.dtype.element_ty)
    y = _rows(out + b * ob + h * oh, row, n, on, fs, f, of).to(into.dtype.element_ty)
    tl.store(into + (b * tl.num_programs(1) + h) * n + row, tl.sum(x * y, 1), mask=row < n)


@triton.jit
def _rows_grad(
    dq, query, given, sum_of, delta, ids, row, k, v, numbers, lows, highs, low, high, first, last,
    n, m, shift, window, scale, e, f, es, fs, kn, ke, vn, vf,
    IS_FULL: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for block in range(first, last):
        is_met = True
        if not IS_FULL:
            is_met = (tl.load(lows + block) <= high) & (tl.load(highs + block) >= low)
        if is_met:
            key = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
            keys = _rows(k, key, m, kn, es, e, ke)
            some = _rows(v, key, m, vn, fs, f, vf)
            scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
            powers = tl.exp2(scores - sum_of[:, None])
            ds = powers * (
                tl.dot(given, tl.trans(some), input_precision=PRECISION) - delta[:, None]
            )
            seen = scores  # all of them
            if not IS_FULL:
                of_keys = tl.load(numbers + key, mask=key < m, other=0)
                seen = _visible(
                    ids[:, None], of_keys[None, :], row[:, None], key[None, :], n, m, shift,
                    window, IS_CAUSAL, HAS_WINDOW,
                )  # fmt: skip
                ds = tl.where(seen, ds, 0.0)
            dq += _weighed(ds, keys, seen, IS_FULL, PRECISION)
    return dq


@triton.jit
def rows_grad(
    q, k, v, ct, sums, deltas, of_rows, of_keys, lows, highs, out, scale, groups, n, m, shift,
    window, e, f,
    qb, qh, qn, qe, kb, kh, kn, ke, vb, vh, vn, vf, tb, th, tn, tf, rb, rh, cb, ch, bb, bh,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of rows."""
    start, heads = tl.program_id(0) * ROWS, tl.num_programs(1)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = (start + tl.arange(0, ROWS)).to(tl.int64)
    es, fs = tl.arange(0, E).to(tl.int64), tl.arange(0, F).to(tl.int64)
    lows, highs = lows + b * bb + h * bh, highs + b * bb + h * bh
    ids, low, high, first, pure, mixed, last = _keys_of(
        of_rows + b * rb + h * rh, lows, highs, start, n, m, shift, window,
        IS_CAUSAL, HAS_WINDOW, ROWS, BLOCK, MANY,
    )  # fmt: skip
    place = (b * heads + h) * n + row
    sum_of = tl.load(sums + place, mask=row < n, other=float("inf")) * _LOG2E
    delta = tl.load(deltas + place, mask=row < n, other=0.0)
    query = _rows(q + b * qb + h * qh, row, n, qn, es, e, qe)
    given = _rows(ct + b * tb + h * th, row, n, tn, fs, f, tf)
    k, v = k + b * kb + h // groups * kh, v + b * vb + h // groups * vh
    dq = tl.zeros([ROWS, E], tl.float32)
    for part in tl.static_range(3):
        one = first if part == 0 else (pure if part == 1 else mixed)
        two = pure if part == 0 else (mixed if part == 1 else last)
        dq = _rows_grad(
            dq, query, given, sum_of, delta, ids, row, k, v, of_keys + b * cb + h * ch, lows,
            highs, low, high, one, two, n, m, shift, window, scale * _LOG2E, e, f, es, fs,
            kn, ke, vn, vf, part == 1, IS_CAUSAL, HAS_WINDOW, BLOCK, PRECISION,
        )  # fmt: skip
    is_there = (row < n)[:, None] & (es < e)[None, :]
    into = out + place[:, None] * e + es[None, :]
    tl.store(into, (dq * scale).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _keys_grad(
    dk, dv, keys, some, of_keys, key, q, ct, sums, deltas, numbers, lows, highs, low, high,
    first, last, n, m, shift, window, scale, e, f, es, fs, qn, qe, tn, tf,
    IS_FULL: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what blocks of rows of a head mean for a block of keys; pairs are [keys, rows]."""
    for block in range(first, last):
        is_met = True
        if not IS_FULL:
            is_met = (tl.load(lows + block) <= high) & (tl.load(highs + block) >= low)
        if is_met:
            row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            query, given = _rows(q, row, n, qn, es, e, qe), _rows(ct, row, n, tn, fs, f, tf)
            sum_of = tl.load(sums + row, mask=row < n, other=float("inf")) * _LOG2E
            delta = tl.load(deltas + row, mask=row < n, other=0.0)
            scores = tl.dot(keys, tl.trans(query), input_precision=PRECISION) * scale
            powers = tl.exp2(scores - sum_of[None, :])
            ds = tl.dot(some, tl.trans(given), input_precision=PRECISION) - delta[None, :]
            ds = powers * ds
            seen = scores  # all of them
            if not IS_FULL:
                ids = tl.load(numbers + row, mask=row < n, other=0)
                seen = _visible(
                    ids[None, :], of_keys[:, None], row[None, :], key[:, None], n, m, shift,
                    window, IS_CAUSAL, HAS_WINDOW,
                )  # fmt: skip
                powers, ds = tl.where(seen, powers, 0.0), tl.where(seen, ds, 0.0)
            dv += _weighed(powers, given, seen, IS_FULL, PRECISION)
            dk += _weighed(ds, query, seen, IS_FULL, PRECISION)
    return dk, dv


@triton.jit
def keys_grad(
    q, k, v, ct, sums, deltas, of_rows, of_keys, lows, highs, to_k, to_v, scale, groups, n, m,
    shift, window, e, f,
    qb, qh, qn, qe, kb, kh, kn, ke, vb, vh, vn, vf, tb, th, tn, tf, rb, rh, cb, ch, bb, bh,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, MANY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys, and of their values, by all heads that share it."""
    start, shared = tl.program_id(0) * BLOCK, tl.num_programs(1)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    key = (start + tl.arange(0, BLOCK)).to(tl.int64)
    es, fs = tl.arange(0, E).to(tl.int64), tl.arange(0, F).to(tl.int64)
    keys = _rows(k + b * kb + h * kh, key, m, kn, es, e, ke)
    some = _rows(v + b * vb + h * vh, key, m, vn, fs, f, vf)
    stop, begin, full, until = tl.cdiv(n, ROWS), 0, 0, tl.cdiv(n, ROWS)
    if IS_CAUSAL:
        begin = tl.minimum(tl.maximum(start - shift, 0) // ROWS, stop)
        full = tl.cdiv(tl.maximum(start + BLOCK - 1 - shift, 0), ROWS)
        if HAS_WINDOW:
            end = tl.maximum(tl.minimum(start + BLOCK, m) - 1 - shift + window, 0)
            stop = tl.maximum(tl.minimum(stop, tl.cdiv(end, ROWS)), begin)
            until = tl.maximum(start - shift + window, 0) // ROWS
    dk, dv = tl.zeros([BLOCK, E], tl.float32), tl.zeros([BLOCK, F], tl.float32)
    for at in range(groups):
        head = h * groups + at
        numbers = of_keys + b * cb + head * ch + key
        low = tl.min(tl.load(numbers, mask=key < m, other=_MOST), 0)
        high = tl.max(tl.load(numbers, mask=key < m, other=_LEAST), 0)
        ids = tl.load(numbers, mask=key < m, other=0)
        low_at, high_at = lows + b * bb + head * bh, highs + b * bb + head * bh
        first, pure, mixed, last = _span(low_at, high_at, low, high, begin, stop, full, until, MANY)
        place = (b * shared * groups + head) * n
        for part in tl.static_range(3):
            one = first if part == 0 else (pure if part == 1 else mixed)
            two = pure if part == 0 else (mixed if part == 1 else last)
            dk, dv = _keys_grad(
                dk, dv, keys, some, ids, key, q + b * qb + head * qh, ct + b * tb + head * th,
                sums + place, deltas + place, of_rows + b * rb + head * rh, low_at, high_at,
                low, high, one, two, n, m, shift, window, scale * _LOG2E, e, f, es, fs,
                qn, qe, tn, tf, part == 1, IS_CAUSAL, HAS_WINDOW, ROWS, PRECISION,
            )  # fmt: skip
    place = (b * shared + h) * m + key
    is_key = (key < m)[:, None]
    into_k, into_v = place[:, None] * e + es[None, :], place[:, None] * f + fs[None, :]
    tl.store(to_k + into_k, (dk * scale).to(to_k.dtype.element_ty), mask=is_key & (es < e)[None, :])
    tl.store(to_v + into_v, dv.to(to_v.dtype.element_ty), mask=is_key & (fs < f)[None, :])
