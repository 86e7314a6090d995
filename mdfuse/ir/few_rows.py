"""Attention of few rows on a GPU, such as a token of a decode.

| keys of all heads | kernel |
|---|---|
| up to `KEYS` | the one here: each program takes a part of the keys of a head, another joins them |
| more | cuDNN's, which splits keys, too, and reads faster; it does so for one row of each head |

On one H200, 8 heads of keys of 128 features in 16 bits, 4 rows each, microseconds: 1,024 keys take
6 here, 13 by cuDNN, and 31 where rows are not heads; 131,072 keys 200, 136 and 2,544. Keys that a
mask hides from all rows are not read here: the empty end of a cache costs nothing.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

#: The most rows of all heads that share keys: those of a tile of the kernel.
ROWS = 16
#: The most keys of all heads and batches together.
KEYS = 1 << 15
#: The most features of a head.
_FEATURES = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def fits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    most: float = KEYS,
) -> bool:
    """Return whether `attend` computes the attention of such operands.

    Args:
        q, k, v: [batch, heads, rows, features].
        mask: what is added to the scores, or bools; it has as many dims.
        is_causal: a row sees the keys up to its place.
        enable_gqa: heads of queries may share one of keys.
        most: keys of all heads and batches together.
    """
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    if q.device.type != "cuda" or is_causal or any(x.ndim != 4 for x in operands):
        return False
    sizes = [n for x in operands for n in x.shape]
    if not all(type(n) is int and n > 0 for n in sizes) or not has_triton():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return False
    is_plain = q.dtype in _DTYPES and q.dtype == k.dtype == v.dtype
    is_masked = mask is None or (mask.dtype == torch.bool and mask.shape[-1] == k.shape[2])
    is_alike = k.shape[:3] == v.shape[:3] and q.shape[::3] == k.shape[::3]
    is_small = q.shape[1] // k.shape[1] * q.shape[2] <= ROWS and math.prod(k.shape[:3]) <= most
    is_narrow = max(q.shape[3], v.shape[3]) <= _FEATURES
    is_even = _shares(q, k, enable_gqa)
    return is_plain and is_masked and is_alike and is_small and is_narrow and is_even


def can_be_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Return whether rows may be heads of one row each, which cuDNN computes faster.

    Args:
        q, k, v, mask, is_causal, enable_gqa: as `fits` takes them.
    """
    if q.device.type != "cuda" or is_causal or q.ndim != 4 or q.dtype not in _DTYPES[:2]:
        return False
    if any(x.ndim != 4 or type(x.shape[1]) is not int for x in (k, v)):
        return False
    is_short = type(q.shape[2]) is int and 1 < q.shape[2] <= ROWS
    is_mask_alike = mask is None or (mask.ndim == 4 and tuple(mask.shape[1:3]) == (1, 1))
    may_cudnn = all(x.shape[3] % 8 == 0 and x.shape[3] <= 128 for x in (q, v))
    is_even = 0 < k.shape[1] == v.shape[1] and _shares(q, k, enable_gqa)  # none broadcasts
    is_alike = q.shape[0] == k.shape[0] == v.shape[0]
    return is_short and is_mask_alike and may_cudnn and is_even and is_alike


def _shares(q: Tensor, k: Tensor, enable_gqa: bool) -> bool:
    """Return whether heads of keys serve as many of queries each: one without `enable_gqa`."""
    return q.shape[1] % k.shape[1] == 0 if enable_gqa else q.shape[1] == k.shape[1]


def as_heads(q: Tensor) -> Tensor:
    """Return each row as a head of its own: [batch, heads · rows, 1, features]."""
    return q.reshape(q.shape[0], q.shape[1] * q.shape[2], 1, q.shape[3])


@cache
def has_triton() -> bool:
    """Return whether kernels can be compiled here."""
    return find_spec("triton") is not None


@torch.library.custom_op("mdfuse::attend_few_rows", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention for operands that `fits`; a row that sees no key is 0.

    Args:
        q: [batch, heads, rows, e].
        k: [batch, heads of keys, n, e]; each serves as many heads of q as there are to one.
        v: [batch, heads of keys, n, f].
        mask: bools that broadcast to [batch, heads, rows, n]: which keys a row sees.
        scale: of the scores.

    Returns:
        [batch, heads, rows, f].
    """
    return _attend(q, k, v, mask, scale, has_sums=False)[0]


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@torch.library.custom_op("mdfuse::attend_few_rows_with_sums", mutates_args=())
def attend_with_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `attend` and, for each row, log(sum(exp(scores))); -inf where it sees no key.

    Returns:
        [batch, heads, rows, f], and [batch, heads, rows] in f32.
    """
    return _attend(q, k, v, mask, scale, has_sums=True)


@attend_with_sums.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, has_sums: bool
) -> tuple[Tensor, Tensor]:
    """Return averages and, if they are asked for, the logarithms of sums."""
    batch, heads, rows, _ = q.shape
    shared, n, f = k.shape[1], k.shape[2], v.shape[3]
    block = 64 if max(q.shape[3], f) <= 128 else 32
    parts = _parts(batch * shared, -(-n // block), _processors(q.device))
    out = q.new_empty((batch, heads, rows, f))
    logs = q.new_empty((batch, heads, rows), dtype=torch.float32) if has_sums else out
    joined, sums = out, out
    if parts > 1:
        joined = q.new_empty((batch * shared, parts, ROWS, f), dtype=torch.float32)
        sums = q.new_empty((batch * shared, parts, ROWS), dtype=torch.float32)
    kernels: Any = _kernels()
    with torch.cuda.device_of(q):  # Triton launches on the current one
        kernels.attend_part[batch * shared, parts](
            q, k, v, q if mask is None else mask.view(torch.uint8), joined, sums, logs,
            scale * math.log2(math.e), shared, heads // shared, rows, n, q.shape[3], f,
            -(-n // (block * parts)) * block, *q.stride(), *k.stride(), *v.stride(),
            *_strides(mask, (batch, heads, rows, n)),
            HAS_MASK=mask is not None, HAS_SUMS=has_sums, IS_WHOLE=parts == 1, ROWS=ROWS,
            BLOCK=block, E=power_of_two(q.shape[3]), F=power_of_two(f),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        if parts > 1:
            kernels.join[batch * heads, rows](
                joined, sums, out, logs, heads, heads // shared, rows, parts, f,
                HAS_SUMS=has_sums, ROWS=ROWS, PARTS=power_of_two(parts), F=power_of_two(f),
            )  # fmt: skip
    return out, logs


def _parts(heads: int, blocks: int, processors: int) -> int:
    """The number of parts of the keys: four programs for each processor, of whole blocks.

    >>> _parts(8, 16, 132), _parts(8, 1000, 132), _parts(600, 1000, 132), _parts(1, 3, 132)
    (16, 66, 1, 3)
    """
    return max(min(-(-4 * processors // heads), blocks, 128), 1)


def _strides(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0, 0, 0, 0) if mask is None else tuple(mask.expand(shape).stride())


def power_of_two(n: int) -> int:
    """The next power of two, at least the 16 that a tile has."""
    return max(1 << (n - 1).bit_length(), 16)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _kernels() -> Any:
    from mdfuse.ir import few_rows_kernels  # Triton is not everywhere, and slow to import

    return few_rows_kernels
