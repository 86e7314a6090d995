"""Adapters of aten's image operations: sizes, grids, channels, pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle

ops: Any = operations


def resized(mode: str, antialias: bool = False) -> Callable[..., Any]:
    """`interpolate` in a mode, with the arguments of aten."""
    if mode.startswith("nearest"):
        return lambda x, size, scales=None: ops.interpolate(x, size, scales, mode=mode)
    return lambda x, size, corners, scales=None: ops.interpolate(
        x, size, scales, mode=mode, align_corners=corners, antialias=antialias
    )


def grid_sample(x: Handle, grid: Handle, mode: int, padding: int, corners: bool) -> Any:
    """`grid_sample`, whose modes aten writes as numbers."""
    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    return ops.grid_sample(x, grid, modes[mode], paddings[padding], corners)


def affine_grid(theta: Handle, size: Sequence[int], corners: bool) -> Any:
    """Return the source place (x, y) of each element of [n,c,h,w] by theta[n,2,3]: [n,h,w,2]."""
    n, _, h, w = size
    x, y = (_middles(m, corners, theta) for m in (w, h))
    x, y = ops.expand(ops.unsqueeze(x, 0), (h, w)), ops.expand(ops.unsqueeze(y, 1), (h, w))
    places = ops.reshape(ops.stack([x, y, ops.ones_like(x)], -1), (h * w, 3))
    return ops.reshape(ops.matmul(places, ops.transpose(theta, 1, 2)), (n, h, w, 2))


def _middles(n: int, corners: bool, like: Handle) -> Any:
    """The middles of n elements between -1 and 1; with `corners` the outermost are at the ends."""
    steps = ops.arange(n, dtype=like.dtype)
    if not corners:
        return (steps * 2 + (1 - n)) / n
    return steps * (2 / (n - 1)) - 1 if n > 1 else steps * 0


def channel_shuffle(x: Handle, groups: int) -> Any:
    """Channels [groups, m] in the order [m, groups]."""
    _, c, *spatial = x.shape
    apart = ops.reshape(x, (x.shape[0], groups, c // groups, *spatial))
    return ops.reshape(ops.transpose(apart, 1, 2), x.shape)


def adaptive_max(dims: int) -> Callable[..., Any]:
    """`adaptive_max_pool` with places; None for these where windows are of several sizes."""

    def call(x: Handle, output_size: Sequence[int]) -> Any:
        whole, size = x.shape[-dims:], [*output_size] * (dims // len(output_size))
        if any(n % m for n, m in zip(whole, size, strict=True)):
            return ops.BY_NAME[f"adaptive_max_pool{dims}d"](x, size), None
        window = [n // m for n, m in zip(whole, size, strict=True)]
        return ops.BY_NAME[f"max_pool{dims}d"](x, window, window, return_indices=True)

    return call
