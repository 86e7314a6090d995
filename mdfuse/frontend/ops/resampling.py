"""Images in another size, and at other places.

Each spatial dim is resampled separately: source elements and weights are constants of the
definition. Batches and channels may be split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import convolutions, views
from mdfuse.frontend.ops.creations import tensor
from mdfuse.frontend.ops.lookups import index_select
from mdfuse.frontend.ops.pointwise import ROWS, cast, clamp, where
from mdfuse.frontend.ops.recording import Integers, Numbers, back, in_f32, record, shown

#: mode -> the number of spatial dims.
_MODES = {"nearest": (1, 2, 3), "nearest-exact": (1, 2, 3), "linear": (1,), "bilinear": (2,),
          "trilinear": (3,), "bicubic": (2,), "area": (1, 2, 3)}  # fmt: skip


def interpolate(
    x: Handle,
    size: Integers | None = None,
    scale_factor: Numbers | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Handle:
    """Images in another size: by the nearest element, linearly or by cubics between neighbours.

    Args:
        x: [batch, channels, …]; split spatial dims are gathered.
        size: the new spatial extents.
        scale_factor: the factor of the extents, instead of size.
        mode: "nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic" or "area".
        align_corners: for linear and cubic modes, whether the outermost elements stay at the
            corners.
        recompute_scale_factor: whether weights follow from the extents and not from scale_factor.
        antialias: for "bilinear" and "bicubic", whether smaller images average the covered
            elements.
    """
    n = x.ndim - 2
    is_smooth = mode in ("bilinear", "bicubic")
    is_unlike = (antialias and not is_smooth) or (align_corners and mode.startswith("nearest"))
    if n not in _MODES.get(mode, ()) or is_unlike:
        raise DefinitionError(
            f"interpolate of {shown(x)} with mode={mode!r}, align_corners={align_corners} and "
            f"antialias={antialias}",
            because="the modes are " + ", ".join(_MODES) + ", each for its number of dims; "
            "antialiasing is for bilinear and bicubic",
            hint="x: [batch, channels, height, width] for bilinear",
        )
    sizes, scales = _extents(x, size, scale_factor)
    if mode == "area":
        pooled: Handle = getattr(convolutions, f"adaptive_avg_pool{n}d")(x, sizes)
        return pooled
    if recompute_scale_factor:
        scales = [None] * n
    for at, (m, scale) in enumerate(zip(sizes, scales, strict=True)):
        dim, extent = 2 + at, x.shape[2 + at]
        if mode.startswith("nearest"):
            x = index_select(x, dim, tensor(_nearest(extent, m, scale, "exact" in mode)))
        elif mode == "bicubic" or antialias:
            x = _shared(x, dim, _shares(extent, m, scale, mode, bool(align_corners), antialias))
        elif m != extent or (scale not in (None, 1.0) and not align_corners):
            x = _linear(x, dim, _sources(extent, m, scale, bool(align_corners)))
    return record("set", x)


def _extents(x: Handle, size: Any, scale: Any) -> tuple[list[int], list[float | None]]:
    n = x.ndim - 2
    given = size if size is not None else scale
    several = list(given) if isinstance(given, Sequence) else [given] * n
    is_one = (size is None) != (scale is None)
    if not is_one or len(several) != n or any(not k > 0 for k in several):
        raise DefinitionError(
            f"interpolate of {shown(x)} with size={size} and scale_factor={scale}",
            because=f"one of both is given, for each of {n} spatial dims, and positive",
            hint="size=(height, width)",
        )
    if size is not None:
        return several, [None] * n
    return [math.floor(e * k) for e, k in zip(x.shape[2:], several, strict=True)], several


def _nearest(n: int, m: int, scale: float | None, is_exact: bool) -> list[int]:
    """Return the nearest element to each place, as torch computes it on a row of numbers."""
    row = torch.arange(int(n), dtype=torch.float64)[None, None]
    mode = "nearest-exact" if is_exact else "nearest"
    how: dict[str, Any] = {"size": m} if scale is None else {"scale_factor": scale}
    nearest = torch.nn.functional.interpolate(row, mode=mode, **how)
    return [int(k) for k in nearest[0, 0].tolist()]


def _sources(n: int, m: int, scale: float | None, corners: bool) -> list[float]:
    """Return the source coordinate of each new place, as `area_pixel_compute_source_index`."""
    if corners:
        step = (n - 1) / (m - 1) if m > 1 else 0.0
        return [step * i for i in range(m)]
    step = 1.0 / scale if scale else n / m
    return [max(step * (i + 0.5) - 0.5, 0.0) for i in range(m)]


def _shares(
    n: int, m: int, scale: float | None, mode: str, corners: bool, antialias: bool
) -> Tensor:
    """Return the weights of n elements at m places, [m,n], as torch computes them.

    It uses two columns, because torch 2.13 is wrong for one with antialiasing.
    """
    how: dict[str, Any] = {"size": (m, 2)} if scale is None else {"scale_factor": (scale, 1.0)}
    columns = torch.eye(n, dtype=torch.float64)[None, :, :, None].repeat(1, 1, 1, 2)
    resampled = torch.nn.functional.interpolate(
        columns, mode=mode, align_corners=corners, antialias=antialias, **how
    )
    return resampled[0, :, :, 0].T


def _shared(x: Handle, dim: int, shares: Tensor) -> Handle:
    """Return weighted sums of neighbours, which are consecutive."""
    n, wide = x.shape[dim], in_f32(x)
    given = (shares != 0).int()
    first, last = given.argmax(1), n - 1 - given.flip(1).argmax(1)
    total: Any = None
    for k in range(int((last - first).max()) + 1):
        at = (first + k).clamp(max=n - 1)
        share = shares.gather(1, at[:, None])[:, 0].where(first + k < n, 0.0)
        numbers = views.reshape(
            tensor(share.tolist(), dtype=wide.dtype), (-1, *(1,) * (x.ndim - 1 - dim))
        )
        part = index_select(wide, dim, tensor(at.tolist())) * numbers
        total = part if total is None else total + part
    return back(total, x)


def _linear(x: Handle, dim: int, sources: Sequence[float]) -> Handle:
    n = x.shape[dim]
    first = [min(math.floor(s), n - 1) for s in sources]
    second = [min(i + 1, n - 1) for i in first]
    shares = [min(max(s - i, 0.0), 1.0) for s, i in zip(sources, first, strict=True)]
    wide = in_f32(x)
    share = views.reshape(tensor(shares, dtype=wide.dtype), (-1, *(1,) * (x.ndim - 1 - dim)))
    low, high = (index_select(wide, dim, tensor(i)) for i in (first, second))
    return back(low * (1.0 - share) + high * share, x)


# -- at places that are values -------------------------------------------------------------------


def grid_sample(
    x: Handle,
    grid: Handle,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Handle:
    """Images at places of a grid: x[n,c,h,w], grid[n,a,b,2] -> [n,c,a,b].

    Args:
        x: split height and width are gathered.
        grid: the source place (x, y) of each element of the result, from (-1, -1) to (1, 1).
        mode: "bilinear" or "nearest".
        padding_mode: the values outside: "zeros", or the "border".
        align_corners: whether -1 and 1 are the middles of the outermost elements, or their ends.
    """
    is_known = mode in ("bilinear", "nearest") and padding_mode in ("zeros", "border")
    fits = x.ndim == grid.ndim == 4 and grid.shape[-1] == 2 and x.shape[0] == grid.shape[0]
    if not is_known or not fits or x.dtype != grid.dtype or not x.dtype.is_floating_point:
        raise DefinitionError(
            f"grid_sample of {shown(x)} by {shown(grid)}, mode={mode!r}, {padding_mode!r}",
            because="the modes are bilinear and nearest, with zeros or the border outside; x is "
            "[n,c,h,w], the grid [n,a,b,2] of one dtype",
            hint="images of two spatial dims",
        )
    h, w = x.shape[2:]
    column, row = (grid[..., k] for k in (0, 1))
    column, row = (_unnormal(p, n, bool(align_corners)) for p, n in ((column, w), (row, h)))
    if padding_mode == "border":
        column, row = clamp(column, 0, w - 1), clamp(row, 0, h - 1)
    flat = views.reshape(x, (*x.shape[:2], h * w))
    if mode == "nearest":
        return _sampled(flat, ROWS["round"](row), ROWS["round"](column), h, w)
    top, left = ROWS["floor"](row), ROWS["floor"](column)
    down, right = row - top, column - left
    total = None
    for by, bx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        share = (down if by else 1.0 - down) * (right if bx else 1.0 - right)
        part = _sampled(flat, top + by, left + bx, h, w) * views.unsqueeze(share, 1)
        total = part if total is None else total + part
    assert total is not None
    return total


def _unnormal(p: Handle, n: int, corners: bool) -> Handle:
    return (p + 1.0) * ((n - 1) / 2) if corners else ((p + 1.0) * n - 1.0) / 2


def _sampled(flat: Handle, row: Handle, column: Handle, h: int, w: int) -> Handle:
    """Return x[n,c,h*w] at rows and columns [n,a,b], zeros outside."""
    n, c = flat.shape[:2]
    inside = None
    for p, extent in ((row, h), (column, w)):
        within = ROWS["logical_and"](ROWS["ge"](p, 0), ROWS["le"](p, extent - 1))
        inside = within if inside is None else ROWS["logical_and"](inside, within)
    assert inside is not None
    place = clamp(row, 0, h - 1) * w + clamp(column, 0, w - 1)
    places = views.reshape(cast(place, torch.int64), (n, 1, -1))
    sampled = record("gather", views.expand(places, (n, c, -1)), flat, along=2)
    sampled = views.reshape(sampled, (n, c, *row.shape[1:]))
    return where(views.unsqueeze(inside, 1), sampled, 0.0)
