"""Attention with the logarithm of its sums of powers, and its gradient: neither keeps the scores.

A library's kernels compute both where they can; else blocks of keys are taken in turn. Either way
the memory grows with the number of rows, not with its square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir import attention_kernels, documents, few_rows, shapes
from mdfuse.ir.attention_blocks import Scores, attend_blocks, grad_of_blocks, wide_of
from mdfuse.ir.visible import Run, Tile, tiles
from mdfuse.layouts.boxes import nth_chunk


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *hides: Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    rows: Sequence[Run] | None = None,
    keys: Sequence[Run] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention and, for each row, log(sum(exp(scores))), in f32 or f64.

    A row that sees nothing is 0, and its logarithm -inf.

    Args:
        q, k, v: see `mdfuse.frontend.ops.neural.attention`.
        hides: nothing; a mask, likewise; or the numbers of the documents of rows […,l] and of
            keys […,s], of which rows see those of their document.
        is_causal, scale, enable_gqa, window, q_offset, k_offset: likewise.
        rows: the positions of the query's rows in the whole of it; None: all are here.
        keys: likewise.
    """
    seen_by = _check((q, k, v), hides, is_causal, enable_gqa, window)
    scale = 1 / math.sqrt(q.shape[-1] or 1) if scale is None else scale
    if q.device.type == "meta":
        sums = q.new_empty(q.shape[:-1], dtype=wide_of(q.dtype))
        return q.new_empty((*q.shape[:-1], v.shape[-1])), sums
    seen = _tiles((q, k, v), seen_by, is_causal, window, (rows, q_offset), (keys, k_offset))
    parts = [(t, _attend_tile(t, q, k, v, seen_by, scale)) for t in seen]
    if len(parts) == 1 and parts[0][0].rows == (0, q.shape[-2]):
        return parts[0][1]
    return _joined(parts, q, v)


def attend_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *hides: Tensor | None,
    parts: int,
    keys: Sequence[Run] | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """Compute `attend` for each part of the keys, as `torch.chunk` makes them; see `join`.

    Args:
        q, k, v, hides, keys, how: as `attend` takes them; `keys` are of the one part that is here.
        parts: how many there are; those without keys are 0, and their logarithms -inf.

    Returns:
        both results with a first dim, that of parts.
    """
    each, n = list[tuple[Tensor, Tensor]](), k.shape[-2]
    for i in range(parts):
        at = nth_chunk((0, n), parts, i)
        seen = [*hides[:-1], *(_columns(x, n, at) for x in hides[-1:])]
        positions = [at] if keys is None and how.get("is_causal") else keys
        each.append(attend(q, _cut(k, at), _cut(v, at), *seen, keys=positions, **how))
    if not each:  # a rank without a part
        out, sums = attend(q, k, v, *hides, keys=keys, **how)
        return out.new_empty((0, *out.shape)), sums.new_empty((0, *sums.shape))
    return torch.stack([out for out, _ in each]), torch.stack([sums for _, sums in each])


def _columns(x: Tensor | None, n: int, keys: Run) -> Tensor | None:
    """Return the columns of a mask, or the numbers, of some of n keys; one for all as it is."""
    return x if x is None or x.shape[-1] != n else _cut(x, keys, -1)


def attend_terms(q: Tensor, k: Tensor, v: Tensor, *hides: Tensor | None, **how: Any) -> Tensor:
    """Compute `attend` to some of the keys, as a term that `join_terms` joins with those of others.

    Args:
        q, k, v, hides, how: as `attend` takes them.

    Returns:
        both results, in f32 or f64: the logarithms are the last column.
    """
    out, sums = attend(q, k, v, *hides, **how)
    return torch.cat((out.to(sums.dtype), sums.unsqueeze(-1)), -1)


def join_terms(total: Tensor, term: Tensor) -> Tensor:
    """Join a term of `attend_terms` to what other keys gave, in place: see `join`.

    >>> total, term = torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0]])
    >>> join_terms(total, term)[..., 0].tolist()
    [2.0]
    """
    (a, of_a), (b, of_b) = ((x[..., :-1], x[..., -1]) for x in (total, term))
    join(a, of_a, b, of_b)
    return total


def attend_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    ct: Tensor,
    *hides: Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    rows: Sequence[Run] | None = None,
    keys: Sequence[Run] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the cotangent of attention's first result means for q, k and v.

    Args:
        q, k, v, hides: as `attend` took them.
        out, sums: what it gave, of all keys: also where others of them are on other ranks. In the
            place of `out` may stand sum(out ct) of each row, less the cotangent of its sum.
        ct: the cotangent of `out`.
        is_causal, scale, enable_gqa, window, q_offset, k_offset, rows, keys: as `attend` took them.
    """
    seen_by = _check((q, k, v), hides, is_causal, enable_gqa, window)
    shapes.attention_grad([*map(_shape, (q, k, v, out, sums, ct))], {"enable_gqa": enable_gqa})
    has_both = out.ndim == sums.ndim
    wanted = wide_of(q.dtype) if has_both else q.dtype, q.dtype, wide_of(q.dtype)
    if (out.dtype, ct.dtype, sums.dtype) != wanted:
        raise TypeError(
            f"out, its cotangent and the sums are {out.dtype}, {ct.dtype}, {sums.dtype}"
        )
    scale = 1 / math.sqrt(q.shape[-1] or 1) if scale is None else scale
    if q.device.type == "meta":
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    # the powers of a row that is hidden entirely are 0 whatever their sum is
    sums = sums.masked_fill(sums == -math.inf, 0)
    saved: Sequence[Tensor] = (q, k, v, out, sums, ct)
    if has_both:
        saved = _with_rows(*saved)
    placed = (rows, q_offset), (keys, k_offset)
    seen = _tiles(saved[:3], seen_by, is_causal, window, *placed)
    dq, dk, dv = _grad_of_tiles(seen, saved, seen_by, scale)
    return dq.to(q.dtype), dk.to(q.dtype), _cut(dv, (0, v.shape[-1]), -1).to(q.dtype)


def _with_rows(
    q: Tensor, k: Tensor, v: Tensor, weighed: Tensor, sums: Tensor, ct: Tensor
) -> tuple[Tensor, ...]:
    """Return operands with rows `out` of which sum(out ct) is `weighed`.

    Gradients read `out` for that alone. It has digits of the number at the features with the
    largest cotangents: bfloat16 has 8 bits, and the number all but cancels where few keys are seen.
    The range of f16 is too small for them: it becomes f32. Cotangents that are 0, or tiny beside
    the number, become as large as digits need, which is too small to change a gradient.
    """
    dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
    few = 1 if not ct.shape[-1] else 0  # without features there is no sum
    v, ct = (torch.nn.functional.pad(x, (0, few)) for x in (v, ct))
    left = weighed.unsqueeze(-1)
    tiny, wide = left.abs() * _TINY[left.dtype], ct.to(left.dtype)
    ct = torch.where(wide.abs() < tiny, tiny, wide).to(dtype)
    out, places = torch.zeros_like(ct), ct.abs().topk(min(_DIGITS, ct.shape[-1])).indices
    for place in places.split(1, -1):
        by = ct.gather(-1, place).to(left.dtype)
        digit = (left / by.masked_fill(by == 0, 1)).to(dtype)
        out.scatter_(-1, place, digit)
        left = left - digit.to(left.dtype) * by
    return q.to(dtype), k.to(dtype), v.to(dtype), out, sums, ct


#: Features that give a number of a row.
_DIGITS = 3

#: dtype of sums -> how much less than the number of a row its cotangent may be.
_TINY = {torch.float32: 2.0**-40, torch.float64: 2.0**-90}


def _grad_of_tiles(
    seen: Sequence[Tile], saved: Sequence[Tensor], seen_by: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up what tiles mean for q, k and v; see `_grad_of_tile`."""
    q, k, v, *_ = saved
    if len(seen) == 1 and seen[0].shape == (q.shape[-2], k.shape[-2]):
        return _grad_of_tile(seen[0], saved, seen_by, scale)
    runs = [t.rows for t in seen], [t.keys for t in seen]
    of_rows, of_keys = (q.dtype if _are_apart(x) else wide_of(q.dtype) for x in runs)
    dtypes = of_rows, of_keys, of_keys
    grads = [
        torch.zeros(x.shape, dtype=dtype, device=x.device)
        for x, dtype in zip((q, k, v), dtypes, strict=True)
    ]
    for t in seen:
        parts = _grad_of_tile(t, saved, seen_by, scale)
        for total, part, at in zip(grads, parts, (t.rows, t.keys, t.keys), strict=True):
            _cut(total, at).add_(part)
    dq, dk, dv = (total.to(q.dtype) for total in grads)
    return dq, dk, dv


# -- tiles -----------------------------------------------------------------------------------------

#: The positions of what is here, if not all of it is, and what is added to them.
_Placed = tuple[Sequence[Run] | None, int]


def _tiles(
    operands: Sequence[Tensor],
    hides: Sequence[Tensor],
    is_causal: bool,
    window: int | None,
    rows: _Placed,
    keys: _Placed,
) -> list[Tile]:
    """Return what rows see of the keys that are here; one tile where they see all.

    Masks that are made of numbers of documents are of a few rows each.
    """
    n, m = (x.shape[-2] for x in operands[:2])
    seen = [Tile((0, n), (0, m))]
    if is_causal:
        seen = tiles(_positions(n, *rows), _positions(m, *keys), is_causal, window)
    if len(hides) < 2 or documents.fits(*operands):
        return seen
    return [part for t in seen for part in t.blocks(documents.rows_of_mask(*hides))]


def _positions(n: int, runs: Sequence[Run] | None, shift: int) -> list[Run]:
    return [(a + shift, b + shift) for a, b in (((0, n),) if runs is None else runs)]


def _cut(x: Tensor, run: Run, dim: int = -2) -> Tensor:
    """Return the rows of a run; all of them as they are."""
    start, stop = run
    return x if (start, stop) == (0, x.shape[dim]) else x.narrow(dim, start, stop - start)


def _band(tile: Tile, device: torch.device) -> Tensor:
    """Return which keys the rows of a tile that is not full see."""
    assert tile.shift is not None
    n, m = tile.shape
    last = torch.arange(n, device=device).unsqueeze(-1) + tile.shift
    at = torch.arange(m, device=device)
    seen = at <= last
    return seen if tile.window is None else seen & (at > last - tile.window)


def _attend_tile(
    tile: Tile, q: Tensor, k: Tensor, v: Tensor, hides: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of the rows of a tile to its keys."""
    q, k, v = _cut(q, tile.rows), _cut(k, tile.keys), _cut(v, tile.keys)
    hides = _hides_of(tile, hides)
    if len(hides) == 2 and documents.fits(q, k, v):
        of_rows, of_keys = hides
        return documents.attend(q, k, v, of_rows, of_keys, scale, tile.shift, tile.window)
    mask, is_causal = _masked(tile, hides, q)
    if _are_few(q, k, v, mask, is_causal):
        few: tuple[Tensor, Tensor] = few_rows.attend_with_sums(q, k, v, _of_four_dims(mask), scale)
        return few
    kernels = _kernels(q, k, v, mask, is_causal)
    if kernels is None and is_causal and tile.shape[0] != tile.shape[1]:
        apart = tile._replace(rows=(0, tile.shape[0]), keys=(0, tile.shape[1])).halves()
        return _joined([(t, _attend_tile(t, q, k, v, (), scale)) for t in apart], q, v)
    if kernels is None:
        return attend_blocks(Scores(q, k, mask, is_causal, scale), v)
    heads, bias = _as_heads(q, k, v), _as_bias(mask, q, k)
    out, sums = kernels[0](*heads, bias, is_causal, scale)
    if bias is not None:  # what kernels give for rows that see nothing is not the same in all
        hidden = (bias == -math.inf).all(-1)
        out, sums = out.masked_fill(hidden.unsqueeze(-1), 0), sums.masked_fill(hidden, -math.inf)
    return out.reshape(*q.shape[:-1], v.shape[-1]), sums.reshape(q.shape[:-1])


def _are_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Return whether the kernel of few rows computes them: with a mask however many keys.

    Torch's kernels with a mask give sums for as many heads of keys as of queries, and go through
    all keys of a head one block after the other.
    """
    most = few_rows.KEYS if mask is None else math.inf
    return few_rows.fits(q, k, v, _of_four_dims(mask), is_causal, True, most)


def _of_four_dims(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None else mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)


def _hides_of(tile: Tile, hides: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows and columns of a tile, of a mask or of numbers of documents."""
    ends = ((tile.rows, -2), (tile.keys, -1))
    if len(hides) == 2:
        return [_cut(x, run, -1) for x, (run, _) in zip(hides, ends, strict=True)]
    parts = list(hides)
    for run, dim in ends:
        parts = [x if x.shape[dim] == 1 else _cut(x, run, dim) for x in parts]
    return parts


def _masked(tile: Tile, hides: Sequence[Tensor], q: Tensor) -> tuple[Tensor | None, bool]:
    """Return the mask of a tile, and whether it is a triangle, which needs none."""
    mask = hides[0] if hides else None
    if len(hides) == 2:
        mask = hides[0].unsqueeze(-1) == hides[1].unsqueeze(-2)
    if tile.shift is None or (mask is None and tile.window is None):
        return mask, tile.shift is not None
    seen = _band(tile, q.device)
    if mask is None or mask.dtype == torch.bool:
        return seen if mask is None else seen & mask, False
    return torch.where(seen, mask, -math.inf), False


def _grad_of_tile(
    tile: Tile, saved: Sequence[Tensor], hides: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the rows of a tile mean for themselves and for its keys."""
    q, k, v, out, sums, ct = saved
    q, out, ct = (_cut(x, tile.rows) for x in (q, out, ct))
    sums, k, v = _cut(sums, tile.rows, -1), _cut(k, tile.keys), _cut(v, tile.keys)
    hides = _hides_of(tile, hides)
    if len(hides) == 2 and documents.fits(q, k, v):
        how = hides[0], hides[1], scale, tile.shift, tile.window
        return documents.attend_grad(ct, q, k, v, out, sums, *how)
    mask, is_causal = _masked(tile, hides, q)
    kernels = _kernels(q, k, v, mask, is_causal)
    if kernels is None and is_causal and tile.shape[0] != tile.shape[1]:
        apart = tile._replace(rows=(0, tile.shape[0]), keys=(0, tile.shape[1])).halves()
        full, square = (_grad_of_tile(t, (q, k, v, out, sums, ct), (), scale) for t in apart)
        dk, dv = (torch.cat(x, -2) for x in zip(full[1:], square[1:], strict=True))
        return (full[0].to(sums.dtype) + square[0]).to(q.dtype), dk, dv
    if kernels is None:
        return grad_of_blocks(Scores(q, k, mask, is_causal, scale), v, out, sums, ct)
    cotangent, sums, *given = _as_heads(ct, sums.unsqueeze(-1), q, k, v, out)
    bias = _as_bias(mask, q, k)
    sums = sums.squeeze(-1).contiguous()  # kernels of GPUs read them without their strides
    grads = kernels[1](cotangent, (*given, sums), bias, is_causal, scale)
    dq, dk, dv = (x.reshape(like.shape) for x, like in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _joined(
    parts: Sequence[tuple[Tile, tuple[Tensor, Tensor]]], q: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Join what rows make of their tiles; in f32 or f64, where rows have several: see `join`."""
    wide, is_apart = wide_of(q.dtype), _are_apart([t.rows for t, _ in parts])
    shape = *q.shape[:-1], v.shape[-1]
    out = torch.zeros(shape, dtype=q.dtype if is_apart else wide, device=q.device)
    sums = torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)
    for n, (tile, (part, of_part)) in enumerate(parts):
        into, of_into = _cut(out, tile.rows), _cut(sums, tile.rows, -1)
        if is_apart or not n:
            into.copy_(part)
            of_into.copy_(of_part)
        else:
            join(into, of_into, part, of_part)
    return out.to(q.dtype), sums


def _are_apart(runs: Sequence[Run]) -> bool:
    """Tell whether no two runs have a position in common."""
    ordered = sorted(runs)
    return all(a[1] <= b[0] for a, b in pairwise(ordered))


def join(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> None:
    """Join what rows make of two sets of keys, with the logarithms of their sums, into the first.

    A part whose logarithm is -inf weighs 0, also where both are.

    >>> one, sums = torch.ones(1, 1), torch.zeros(1)
    >>> join(one, sums, 3 * torch.ones(1, 1), torch.full((1,), -math.inf))
    >>> one.tolist(), sums.tolist()
    ([[1.0]], [0.0])
    """
    sums = torch.logaddexp(of_a, of_b)
    shift = sums.masked_fill(sums == -math.inf, 0)
    of, other = ((x - shift).exp().unsqueeze(-1) for x in (of_a, of_b))
    a.mul_(of).addcmul_(b, other)
    of_a.copy_(sums)


def _shape(x: Tensor | None) -> tuple[int, ...] | None:
    return tuple(x.shape) if x is not None else None


def _check(
    operands: Sequence[Tensor],
    hides: Sequence[Tensor | None],
    is_causal: bool,
    enable_gqa: bool,
    window: int | None,
) -> list[Tensor]:
    """Return what hides keys; raise ValueError or TypeError where attention means nothing."""
    attrs = {"is_causal": is_causal, "enable_gqa": enable_gqa, "window": window}
    shapes.attended([*map(_shape, (*operands, *hides))], attrs)
    dtypes = {x.dtype for x in operands}
    if len(dtypes) > 1 or not operands[0].dtype.is_floating_point:
        raise TypeError(f"query, key and value have one floating dtype, not {dtypes}")
    given = [x for x in hides if x is not None]
    kinds = [x.dtype for x in given]
    if len(given) == 1 and not (kinds[0] == torch.bool or kinds[0].is_floating_point):
        raise TypeError(f"a mask is of bools or floats, not {kinds[0]}")
    if len(given) == 2 and any(x.is_floating_point or x.is_complex for x in kinds):
        raise TypeError(f"documents have integers as numbers, not {kinds}")
    return given


# -- a library's kernels ---------------------------------------------------------------------------


def _kernels(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Any:
    """Return the library's forward and backward for these operands; None where it has none."""
    if 0 in (*q.shape, *k.shape) or q.shape[-1] != v.shape[-1] or q.ndim < 3:
        return None
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    return attention_kernels.kernels(query, key, value, mask is not None, is_causal)


def _as_heads(*operands: Tensor) -> list[Tensor]:
    """Return operands as [batch, heads, rows, features], the features side by side."""
    heads = (x.reshape(-1, *x.shape[-3:]) for x in operands)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in heads]


def _as_bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the mask as what is added to the scores: [batch, heads, rows, keys], or 1 of these."""
    if mask is None:
        return None
    bias = mask.to(q.dtype)
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(bias).masked_fill_(~mask, -math.inf)
    bias = bias[(None,) * (q.ndim - bias.ndim)]
    heads, rows = bias.shape[-3], (q.shape[-2], k.shape[-2])
    if any(n != 1 for n in bias.shape[:-3]):
        bias = bias.expand(*q.shape[:-3], *bias.shape[-3:])
    return bias.reshape(-1, heads, *bias.shape[-2:]).expand(-1, -1, *rows)
