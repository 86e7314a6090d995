"""Documents packed into rows: attention reads their numbers, of rows and of keys, not a mask.

| operands | computed |
|---|---|
| on a GPU, that `fits` | by kernels here: no pair of blocks whose numbers do not meet |
| others | by masks of a few rows each, which are made of the numbers: all pairs |
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.few_rows import has_triton, power_of_two

#: The most elements of a mask that is made of numbers.
_MASK = 1 << 24
#: dtype -> the most features of a head that kernels take: blocks must fit into shared memory.
_FEATURES = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
#: The most heads, and the most batches, of a grid.
_HEADS = 65_535
#: How many blocks of numbers are compared at once.
_MANY = 256


def rows_of_mask(rows: Tensor, keys: Tensor) -> int:
    """Return how many rows a mask may have that is made of numbers of documents.

    >>> rows_of_mask(torch.zeros(2, 1, 100_000), torch.zeros(2, 1, 100_000))
    83
    """
    lead = torch.broadcast_shapes(rows.shape[:-1], keys.shape[:-1])
    elements: int = math.prod(lead) * keys.shape[-1]
    return max(_MASK // max(elements, 1), 1)


def has_kernels(dtype: torch.dtype, e: int, f: int) -> bool:
    """Return whether kernels take keys of e features and values of f; not where a run says so."""
    is_known = type(e) is type(f) is int
    return is_known and min(e, f) > 0 and max(e, f) <= _FEATURES.get(dtype, 0)


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether kernels compute the attention of such operands.

    Args:
        q, k, v: […,rows,features]
    """
    if q.device.type != "cuda" or q.ndim < 3 or not has_triton():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return False
    is_few = max(q.shape[-3], math.prod(q.shape[:-3])) <= _HEADS
    is_there = 0 not in (*q.shape, *k.shape, *v.shape)
    return is_few and is_there and has_kernels(q.dtype, q.shape[-1], v.shape[-1])


def attend(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor,
    scale: float, shift: int | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention, and the logarithms of sums of powers, for operands that `fits`.

    Args:
        q, k, v: […,heads,rows,features]; a head of keys may serve several of the query.
        rows, keys: the numbers of their documents, which expand to […,heads,rows] of q and of k.
        scale: of the scores.
        shift: row i sees its keys up to i + shift; None: all of them.
        window: how many keys a row sees at most, the last ones of these; None: all of these.
    """
    given = _as_heads(q, k, v), _as_numbers(rows, q), _as_numbers(keys, q)
    out, sums = _attend(*given[0], *given[1:], scale, shift, window)
    return out.reshape(*q.shape[:-1], v.shape[-1]), sums.reshape(q.shape[:-1])


def attend_grad(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    rows: Tensor, keys: Tensor, scale: float, shift: int | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v for operands that `fits`.

    Args:
        ct: the cotangent of the result.
        q, k, v, rows, keys, scale, shift, window: as `attend` took them.
        out, sums: of all keys of these rows.
    """
    given = _as_heads(ct, q, k, v, out)
    sums = sums.reshape(-1, *q.shape[-3:-1]).contiguous()
    numbers = _as_numbers(rows, q), _as_numbers(keys, q)
    grads = _attend_grad(*given, sums, *numbers, scale, shift, window)
    dq, dk, dv = (x.reshape(like.shape) for x, like in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _as_heads(*operands: Tensor) -> list[Tensor]:
    return [x.reshape(-1, *x.shape[-3:]) for x in operands]


def _as_numbers(numbers: Tensor, q: Tensor) -> Tensor:
    """Return numbers in 64 bits, side by side: [batch or 1, heads or 1, rows or keys]."""
    x = numbers.to(torch.int64).reshape((1,) * (q.ndim - 1 - numbers.ndim) + numbers.shape)
    if any(n != 1 for n in x.shape[:-2]):
        x = x.expand(*q.shape[:-3], *x.shape[-2:])
    return x.reshape(-1, *x.shape[-2:]).contiguous()


# -- kernels ---------------------------------------------------------------------------------------


@torch.library.custom_op("mdfuse::attend_documents", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor,
    scale: float, shift: int | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, n, e = q.shape
    kernels: Any = _kernels()
    block = _blocks(q, v, "attend")
    out = q.new_empty((batch, heads, n, v.shape[-1]))
    sums = q.new_empty((batch, heads, n), dtype=torch.float32)
    with torch.cuda.device_of(q):  # Triton launches on the current one
        lows, highs = _bounds(keys, block["BLOCK"])
        kernels.attend[-(-n // block["ROWS"]), heads, batch](
            q, k, v, rows, keys, lows, highs, out, sums, scale, heads // k.shape[1], n, k.shape[2],
            shift or 0, window or 0, e, v.shape[-1], *q.stride(), *k.stride(), *v.stride(),
            *_strides(rows), *_strides(keys), *_strides(lows), **_how(q, v, shift, window), **block,
        )  # fmt: skip
    return out, sums


@torch.library.custom_op("mdfuse::attend_documents_grad", mutates_args=())
def _attend_grad(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    rows: Tensor, keys: Tensor, scale: float, shift: int | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, heads, n, e), (_, shared, m, f) = q.shape, v.shape
    kernels: Any = _kernels()
    how = _how(q, v, shift, window)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    deltas = torch.empty_like(sums)
    strides = (
        *q.stride(), *k.stride(), *v.stride(), *ct.stride(), *_strides(rows), *_strides(keys),
    )  # fmt: skip
    numbers = heads // shared, n, m, shift or 0, window or 0, e, f, *strides
    with torch.cuda.device_of(q):
        kernels.weigh[-(-n // 64), heads, batch](
            ct, out, deltas, n, f, *ct.stride(), *out.stride(), ROWS=64, F=how["F"]
        )
        block = _blocks(q, v, "rows_grad")
        bounds = _bounds(keys, block["BLOCK"])
        kernels.rows_grad[-(-n // block["ROWS"]), heads, batch](
            q, k, v, ct, sums, deltas, rows, keys, *bounds, dq, scale, *numbers,
            *_strides(bounds[0]), **how, **block,
        )  # fmt: skip
        block = _blocks(q, v, "keys_grad")
        bounds = _bounds(rows, block["ROWS"])
        kernels.keys_grad[-(-m // block["BLOCK"]), shared, batch](
            q, k, v, ct, sums, deltas, rows, keys, *bounds, dk, dv, scale, *numbers,
            *_strides(bounds[0]), **how, **block,
        )  # fmt: skip
    return dq, dk, dv


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor,
    scale: float, shift: int | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@_attend_grad.register_fake
def _(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    rows: Tensor, keys: Tensor, scale: float, shift: int | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _bounds(numbers: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest number of each block: [batch or 1, heads or 1, blocks]."""
    *lead, n = numbers.shape
    blocks = -(-n // block)
    lows, highs = (numbers.new_empty((*lead, blocks)) for _ in range(2))
    kernels: Any = _kernels()
    kernels.bounds[blocks, math.prod(lead)](numbers, lows, highs, n, blocks, BLOCK=block)
    return lows, highs


def _strides(numbers: Tensor) -> tuple[int, ...]:
    """Return the strides of batches and heads: 0 where one is for all."""
    dims = zip(numbers.shape[:2], numbers.stride()[:2], strict=True)
    return tuple(0 if n == 1 else stride for n, stride in dims)


def _blocks(q: Tensor, v: Tensor, kernel: str) -> dict[str, int]:
    """Return how many rows and keys a block has, and how many warps compute it.

    A tensor core of an H100 computes 64 rows at once: of keys where these get gradients.
    """
    wide = power_of_two(max(q.shape[-1], v.shape[-1])) * q.element_size()  # bytes of a row
    rows, keys = (64, 64) if wide <= 256 else (64, 32)
    if kernel == "attend" and wide <= 256:
        rows = 128
    if kernel == "keys_grad":
        rows, keys = keys, rows
    stages = 2 if q.dtype == torch.float32 else 3  # a block of f32 takes thrice its bytes
    return {"ROWS": rows, "BLOCK": keys, "num_warps": 4 if wide <= 128 else 8, "num_stages": stages}


def _how(q: Tensor, v: Tensor, shift: int | None, window: int | None) -> dict[str, Any]:
    return {
        "IS_CAUSAL": shift is not None, "HAS_WINDOW": window is not None, "MANY": _MANY,
        "E": power_of_two(q.shape[-1]), "F": power_of_two(v.shape[-1]),
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


@cache
def _kernels() -> Any:
    from mdfuse.ir import documents_kernels  # Triton is not everywhere, and slow to import

    return documents_kernels
