"""Calls of the op table for which torch has another form, or takes several steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as _F

from mdfuse import torch_private
from mdfuse.ir import attention, few_rows
from mdfuse.ir.out_forms import as_tensor


def cast(x: Tensor, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return a copy in another dtype."""
    return x.to(dtype, copy=True) if out is None else out.copy_(x)


def polygamma(x: Tensor, *, n: int, out: Tensor | None = None) -> Tensor:
    """Return the n-th derivative of digamma."""
    return torch.polygamma(n, x, out=out)


def cat(*xs: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    """Join tensors along a dim."""
    last = xs[0].ndim - 1
    return torch.cat(xs, dim if dim < last else last, out=out)


def window(
    x: Tensor, *, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int]
) -> Tensor:
    """Take a slice with a start, an end and a step for each dim; of packed rows, of columns."""
    if x.ndim != len(starts):
        return x[:, slice(starts[-1], ends[-1], steps[-1])]
    return x[tuple(map(slice, starts, ends, steps))]


def unsqueeze(x: Tensor, *, dims: Sequence[int]) -> Tensor:
    """Insert dims of extent 1, at these dims of the result."""
    ndim = x.ndim + len(dims)
    for d in sorted(d % ndim for d in dims):
        x = x.unsqueeze(d)
    return x


def squeeze(x: Tensor, *, dims: Sequence[int]) -> Tensor:
    """Remove those of some dims that have extent 1."""
    return x.squeeze(tuple(dims))


def in_order(x: Tensor, *, order: Sequence[int]) -> Tensor:
    """Return the tensor itself where its dims lie in `order`, outermost first, else a copy."""
    back = [order.index(d) for d in range(x.ndim)]
    return x.permute(tuple(order)).contiguous().permute(back)


def lookup(
    indices: Tensor,
    table: Tensor,
    *,
    part: tuple[int, int, int] | None = None,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """Look up rows of a table; with `part=(start, stop, rows in all)`, of those rows of a table.

    Rows outside of the part come back as zeros: the sum over all parts is the lookup. What else is
    said is about gradients alone.
    """
    if not table.shape[0]:
        return table.new_zeros((*indices.shape, table.shape[1]))
    if part is None:
        return _F.embedding(indices, table)
    start, stop, _ = part
    is_here = (indices >= start) & (indices < stop)
    rows = _F.embedding((indices - start).clamp(0, stop - start - 1), table)
    return torch.where(is_here.unsqueeze(-1), rows, 0)


def running(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return cummax or cummin: the extreme so far along a dim, and where it stood last."""
    function = getattr(torch, name)

    def call(x: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        values, indices = function(x, dim)
        return values, indices

    return call


def top(x: Tensor, *, k: int, dim: int, smallest: bool = False) -> tuple[Tensor, Tensor]:
    """Return the k largest elements along a dim, the largest first, and their places."""
    values, indices = torch.topk(x, k, dim, largest=not smallest)
    return values, indices


def sort(
    x: Tensor, *, dim: int, descending: bool = False, stable: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the elements in order along a dim, and the places where they stood."""
    values, indices = torch.sort(x, stable=stable, dim=dim, descending=descending)
    return values, indices


def lookup_grad(
    indices: Tensor,
    ct: Tensor,
    *,
    shape: Sequence[int],
    box: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Add up the cotangents of the rows that were looked up, in a table of some shape.

    With `box` only the rows of that part of the table are made, in the columns that `ct` has.
    """
    (start, stop), columns = box if box is not None else ((0, shape[0]), (0, shape[1]))
    if ct.shape != (*indices.shape, columns[1] - columns[0]):
        raise ValueError(f"{tuple(ct.shape)} is no cotangent of a lookup of {tuple(indices.shape)}")
    if box is not None and (start, stop) != (0, shape[0]):
        is_here = (indices >= start) & (indices < stop)
        ct = ct.masked_fill(~is_here.unsqueeze(-1), 0)
        indices = (indices - start).clamp(0, max(stop - start - 1, 0))
    return torch_private.table_grad(ct, indices, stop - start)


def window_grad(
    ct: Tensor,
    *,
    shape: Sequence[int],
    starts: Sequence[int],
    steps: Sequence[int],
    box: Sequence[tuple[int, int]] | None = None,
    taken: Sequence[tuple[int, int]] | None = None,
    at: Sequence[int] | None = None,
) -> Tensor:
    """Put the cotangent of a slice where the slice was, in zeros.

    Args:
        ct: the cotangent.
        shape: of what was sliced.
        starts: per dim, the first index that the slice took.
        steps: per dim.
        box: the part of the result that is made; None: all of it.
        taken: per dim, what that part has of the cotangent.
        at: per dim, where that begins in the part.
    """
    if ct.ndim == 2 and len(shape) == 4:  # rows that are there: columns of them
        rows = ct.shape[0]
        return window_grad(
            ct,
            shape=(rows, shape[3]),
            starts=(0, starts[3]),
            steps=(1, steps[3]),
            box=None if box is None else ((0, rows), box[3]),
            taken=None if taken is None else ((0, rows), taken[3]),
            at=None if at is None else (0, at[3]),
        )
    ct_of_x = ct.new_zeros([stop - start for start, stop in box] if box is not None else shape)
    source = [(0, n) for n in ct.shape] if taken is None else taken
    begin, where = starts if at is None else at, []
    for first, (start, stop), step in zip(begin, source, steps, strict=True):
        where.append(
            slice(first, first + (stop - start - 1) * step + 1 if stop > start else first, step)
        )
    ct_of_x[tuple(where)] = ct[tuple(slice(*x) for x in source)]
    return ct_of_x


def joined_window(
    x: Tensor,
    *,
    reduce: str,
    starts: Sequence[int],
    ends: Sequence[int],
    steps: Sequence[int],
    places: Sequence[tuple[int, int]] | None = None,
    shape: Sequence[int] = (),
) -> Tensor:
    """Slice x; where x is one rank's part, put what the part has of the slice into zeros.

    Args:
        x: the whole, or a part.
        reduce: the op that joins what the ranks have; for layouts only.
        starts: per dim, the first index taken of x.
        ends: per dim, the index before which to stop.
        steps: per dim, at least 1.
        places: where what is taken of a part lies in the result; None: x is the whole.
        shape: of the result, where x is a part.
    """
    rows = window(x, starts=starts, ends=ends, steps=steps)
    if places is None:
        return rows.clone()
    result = x.new_zeros(tuple(shape))
    result[tuple(slice(*place) for place in places)] = rows
    return result


def normalize(
    x: Tensor, weight: Any, bias: Any, *, normalized_shape: Sequence[int], eps: float
) -> Tensor:
    """Normalise over the last dims; weight and bias may be None."""
    return _F.layer_norm(x, list(normalized_shape), weight, bias, eps)


def root_mean_square_normalize(
    x: Tensor, weight: Any, *, normalized_shape: Sequence[int], eps: float
) -> Tensor:
    """Divide by the root of the mean square over the last dims; the weight may be None."""
    if weight is None or weight.dtype == x.dtype:
        return _F.rms_norm(x, list(normalized_shape), weight, eps)
    # Torch computes the same of a weight of another dtype, but warns.
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    dims = tuple(range(-len(normalized_shape), 0))
    power = (wide * wide).mean(dims, keepdim=True)
    result: Tensor = (wide * torch.rsqrt(power + eps) * weight).to(x.dtype)
    return result


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    of_keys: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **positions: Any,
) -> Tensor:
    """Compute scaled dot-product attention; the mask may be None.

    Torch's own knows neither positions, of parts, with offsets or windows, nor documents, whose
    numbers are those of rows, in the place of a mask, and of keys: see `attention.attend`.
    """
    how: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if of_keys is None and not any(positions.values()):
        if few_rows.fits(q, k, v, mask, is_causal, enable_gqa):
            by = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
            result: Tensor = few_rows.attend(q, k, v, mask, by)
            return result
        if few_rows.can_be_heads(q, k, v, mask, is_causal, enable_gqa):
            heads = few_rows.as_heads(q)
            result = _F.scaled_dot_product_attention(
                heads, k, v, mask, scale=scale, enable_gqa=True
            )
            return result.reshape(*q.shape[:3], v.shape[3])
        return _F.scaled_dot_product_attention(q, k, v, mask, **how)
    if not enable_gqa:
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
    return attention.attend(q, k, v, mask, of_keys, **how, **positions)[0]


# -- several steps at once: 16 bits are rounded once -----------------------------------------------


_ATEN: Any = torch.ops.aten


def elu(x: Tensor, **attrs: float) -> Tensor:
    """Return scale * x where positive, else scale * alpha * (exp(input_scale * x) - 1)."""
    result: Tensor = _ATEN.elu(x, **attrs)
    return result


def lerp(x: Tensor, end: Tensor, weight: Any, *, out: Tensor | None = None) -> Tensor:
    """Return x + weight * (end - x), from the nearer of both: with a weight of 1 it is the end."""
    return torch.lerp(x, end, weight, out=out)


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: Any, *, out: Tensor | None = None) -> Tensor:
    """Return x + value * a * b, multiplied in this order."""
    return torch.addcmul(x, a, b, value=value, out=out)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Any, *, out: Tensor | None = None) -> Tensor:
    """Return x + value * a / b, in this order."""
    return torch.addcdiv(x, a, b, value=value, out=out)


def squared_distance(x: Tensor, centre: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return (x - centre)^2."""
    distance = torch.sub(x, centre, out=out)
    return torch.mul(distance, distance, out=out)


def limit(x: Tensor, least: Any, most: Any, *, out: Tensor | None = None) -> Tensor:
    """Limit x to what stands between tensors, or numbers, or None; `most` where they cross."""
    limits = (None if limit is None else as_tensor(limit, x) for limit in (least, most))
    return torch.clamp(x, *limits, out=out)


def binary_cross_entropy(p: Tensor, target: Tensor) -> Tensor:
    """Return (target - 1) * log(1 - p) - target * log(p), with logarithms of at least -100.

    torch's own kernel ends a process where p is no probability; here that is a NaN.
    """
    return (target - 1) * torch.log1p(-p).clamp(-100) - target * torch.log(p).clamp(-100)


def robust_loss(name: str) -> Callable[..., Tensor]:
    """Return the Huber loss or the smooth l1 loss of each element, whose unit is an attribute."""

    def call(x: Tensor, target: Tensor, *, out: Tensor | None = None, **unit: float) -> Tensor:
        into = {} if out is None else {"out": out}
        # by its name, which is the same in all processes: compiled functions are kept by it
        result: Tensor = getattr(_ATEN, name)(x, target, 0, *unit.values(), **into)
        return result

    call.__name__ = name
    return call
