"""The logarithm of a sum of exponentials, as operations that need it compute it."""

from __future__ import annotations

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.pointwise import ROWS, where
from mdfuse.frontend.ops.recording import again, record


def log_of_sum(wide: Handle, over: tuple[int, ...] | None) -> Handle:
    """log(sum(exp(x))) over dims (None: all), which are kept.

    No gradient goes through the largest element: what it takes away and adds is the same. Of
    complex numbers it is that of the real parts, which say how large the exponentials are.

    Args:
        wide: x of at least 32 bits, computed in a block of `again`, which this goes on with.
        over: the dims.
    """
    part = record("real", wide) if wide.dtype.is_complex else wide
    top = record("detach", record("max", part, dims=over, keepdim=True))
    top = where(ROWS["isfinite"](top), top, 0.0)
    with again(wide, is_more=True):
        shares = ROWS["exp"](wide - top)
    total = record("sum", shares, dims=over, keepdim=True, dtype=None)
    return ROWS["log"](total) + top
