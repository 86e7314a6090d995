"""Elements in other places: turned round, rolled, padded, tiled, joined as rows or columns."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import is_symbolic, larger
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, indexing, parts, views
from mdfuse.frontend.ops.pointwise import ROWS, where
from mdfuse.frontend.ops.recording import (
    Dims,
    Integers,
    check_factor,
    checked,
    own_place,
    place,
    record,
    sequence,
    shown,
)


def tile(x: Handle, dims: Integers, *further: int) -> Handle:
    """The whole repeated along its last dims; further numbers add dims in front."""
    times = sequence(dims, further)
    return views.repeat(x, (*(1,) * (x.ndim - len(times)), *times))


def flip(x: Handle, dims: Integers, *further: int) -> Handle:
    """Dims turned round: the last element first. They are whole on every rank."""
    turned = checked(x, None, sequence(dims, further)) or ()
    return record("flip", x, dims=tuple(d % x.ndim for d in turned)) if turned else views.set(x)


def fliplr(x: Handle) -> Handle:
    """Columns in reverse."""
    own_place(x, 0)
    return flip(x, (place(x, 1),))


def flipud(x: Handle) -> Handle:
    """Rows in reverse."""
    own_place(x, 0)
    return flip(x, (0,))


def roll(x: Handle, shifts: Integers, dims: Integers | None = None) -> Handle:
    """Elements moved along dims, from the end to the beginning; without dims of x flattened.

    Args:
        x: a tensor.
        shifts: by how many places, one number per dim.
        dims: along which.
    """
    by = sequence(shifts, ())
    if dims is None:
        if len(by) != 1:
            raise _no_roll(x, by, dims)
        return views.reshape(_rolled(views.flatten(x), by[0], 0), x.shape)
    along = sequence(dims, ())
    if len(by) != len(along):
        raise _no_roll(x, by, dims)
    for shift, d in zip(by, along, strict=True):
        x = _rolled(x, shift, own_place(x, d))
    return record("set", x)


def _no_roll(x: Handle, shifts: Sequence[int], dims: Dims) -> DefinitionError:
    return DefinitionError(
        f"roll(%{x.name}, {shifts}, {dims})",
        because="there is one shift for each dim; without dims one for all elements",
        hint="as many shifts as dims",
    )


def _rolled(x: Handle, shift: int, dim: int) -> Handle:
    n = x.shape[dim]
    first = -shift % larger(n, 1)
    if not is_symbolic((n, shift)) and not first:
        return x
    ahead, behind = (builtins.slice(first), builtins.slice(first, None))
    return parts.cat([indexing.along(x, dim, behind), indexing.along(x, dim, ahead)], dim)


def rot90(x: Handle, k: int = 1, dims: Sequence[int] = (0, 1)) -> Handle:
    """Two dims turned by k quarters of a circle, from the first towards the second."""
    plane = [own_place(x, d) for d in dims]
    if len({*plane}) != 2 or len(plane) != 2:
        raise DefinitionError(
            f"rot90 of {shown(x)} with dims={list(dims)}",
            because="a plane has two dims",
            hint="two different dims",
        )
    first, second = plane
    turns = k % 4
    if turns == 2:
        return flip(x, plane)
    if turns == 1:
        return views.transpose(flip(x, (second,)), first, second)
    return flip(views.transpose(x, first, second), (second,)) if turns else views.set(x)


# -- padding -------------------------------------------------------------------------------------

_MODES = ("constant", "reflect", "replicate", "circular")


def pad(
    x: Handle, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Handle:
    """More elements at both ends of dims, the last dim first; negative numbers cut.

    Args:
        x: a tensor.
        pad: how many before and behind the last dim, before and behind the one before it, …
        mode: "constant", or a source of elements: "reflect" (without the end itself), "replicate"
            (the end), "circular" (the other end).
        value: of a constant; 0 by default.
    """
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad) - 1, 2)]
    if len(pad) % 2 or len(pairs) > x.ndim or mode not in _MODES or (value and mode != "constant"):
        raise DefinitionError(
            f"pad({shown(x)}, {list(pad)}, mode={mode!r}, value={value})",
            because="there are two numbers for each of the last dims, and the mode is one of "
            + ", ".join(_MODES),
            hint="pad(x, (left, right, top, bottom))",
        )
    before = [0] * (x.ndim - len(pairs)) + [a for a, _ in reversed(pairs)]
    behind = [0] * (x.ndim - len(pairs)) + [b for _, b in reversed(pairs)]
    if mode == "constant":
        check_factor("pad", value, x)
        return _with_constant(x, before, behind, value or 0)
    for d in range(x.ndim):
        x = _with_ends(x, d, before[d], behind[d], mode)
    return record("set", x)


def _cut(x: Handle, before: Sequence[int], behind: Sequence[int]) -> Handle:
    window = tuple(
        builtins.slice(-a if a < 0 else 0, n + b if b < 0 else n)
        for a, b, n in zip(before, behind, x.shape, strict=True)
    )
    return indexing.index(x, window) if min((*before, *behind, 0)) < 0 else x


def _with_constant(x: Handle, before: Sequence[int], behind: Sequence[int], value: float) -> Handle:
    if any(n + a + b < 0 for n, a, b in zip(x.shape, before, behind, strict=True)):
        raise DefinitionError(
            f"{shown(x)} padded by {list(before)} before and {list(behind)} behind its dims",
            because="more is cut than there is",
            hint="smaller numbers",
        )
    x = _cut(x, before, behind)
    starts = tuple(builtins.max(a, 0) for a in before)
    shape = tuple(
        a + n + builtins.max(b, 0) for a, n, b in zip(starts, x.shape, behind, strict=True)
    )
    if shape == x.shape:
        return record("set", x)
    whole = record("slice_grad", x, shape=shape, starts=starts, steps=(1,) * x.ndim)
    if value == 0:
        return whole
    inside = _inside(x, starts, shape)
    filled = where(inside, whole, bool(value) if x.dtype == torch.bool else value)
    return filled if filled.dtype == x.dtype else record("cast", filled, dtype=x.dtype)


def _inside(x: Handle, starts: Sequence[int], shape: Sequence[int]) -> Handle:
    """Return the mask of a shape that is true where x lies."""
    inside = None
    for d, (start, n, extent) in enumerate(zip(starts, x.shape, shape, strict=True)):
        if n == extent:
            continue
        at = views.reshape(creations.arange(extent), (extent, *(1,) * (len(shape) - 1 - d)))
        within = ROWS["logical_and"](ROWS["ge"](at, start), ROWS["lt"](at, start + n))
        inside = within if inside is None else ROWS["logical_and"](inside, within)
    assert inside is not None
    return inside


def _with_ends(x: Handle, dim: int, before: int, behind: int, mode: str) -> Handle:
    n = x.shape[dim]
    most = {"reflect": n - 1, "circular": n}.get(mode, math.inf)
    if builtins.max(before, behind) > most or (mode == "replicate" and not n):
        raise DefinitionError(
            f"{shown(x)} padded by {before} and {behind} along dim {dim}, mode={mode!r}",
            because=f"there are {n} elements to take them from",
            hint="smaller numbers",
        )
    ends = {dim: (before, behind)}
    x = _cut(x, *([ends.get(d, (0, 0))[side] for d in range(x.ndim)] for side in (0, 1)))
    n = n + sum(builtins.min(e, 0) for e in ends[dim])
    pieces = [x]
    if before > 0:
        pieces.insert(0, _end(x, dim, before, n, mode, True))
    if behind > 0:
        pieces.append(_end(x, dim, behind, n, mode, False))
    return parts.cat(pieces, dim) if len(pieces) > 1 else x


def _end(x: Handle, dim: int, count: int, n: int, mode: str, is_front: bool) -> Handle:
    if mode == "replicate":
        edge = parts.narrow(x, dim, 0 if is_front else n - 1, 1)
        return views.expand(edge, [count if d == dim else -1 for d in range(x.ndim)])
    if mode == "circular":
        return parts.narrow(x, dim, n - count if is_front else 0, count)
    return flip(parts.narrow(x, dim, 1 if is_front else n - 1 - count, count), (dim,))


# -- windows and blocks --------------------------------------------------------------------------


def unfold(x: Handle, dimension: int, size: int, step: int) -> Handle:
    """Windows of a dim, each a row of a new last dim; windows overlap where step < size.

    Args:
        x: a tensor.
        dimension: the dim, which becomes the dim of windows.
        size: of a window.
        step: from one window to the next.
    """
    at = own_place(x, dimension)
    n = x.shape[at]
    if not 0 < size <= n or step < 1:
        raise DefinitionError(
            f"unfold of {shown(x)} along dim {dimension} in windows of {size} by {step}",
            because=f"a window is a part of the {n} elements of the dim",
            hint="a size from 1 to the extent, a positive step",
        )
    count = (n - size) // step + 1
    if size == step:
        whole = parts.narrow(x, at, 0, count * size) if count * size != n else x
        apart = views.reshape(whole, (*x.shape[:at], count, size, *x.shape[at + 1 :]))
        return views.movedim(apart, at + 1, -1)
    ends = [
        indexing.index(
            x, (*[builtins.slice(None)] * at, builtins.slice(i, i + (count - 1) * step + 1, step))
        )
        for i in range(size)
    ]
    return parts.stack(ends, -1)


def diff(
    x: Handle,
    n: int = 1,
    dim: int = -1,
    prepend: Handle | None = None,
    append: Handle | None = None,
) -> Handle:
    """Each element along a dim less the one before it, n times."""
    at = own_place(x, dim)
    given = [part for part in (prepend, x, append) if part is not None]
    if n < 0:
        raise DefinitionError(
            f"diff of {shown(x)}, {n} times", because="a number of times", hint="n from 0 on"
        )
    x = parts.cat(given, at) if len(given) > 1 else x
    extent = x.shape[at]
    for _ in range(n if is_symbolic((extent,)) else builtins.min(n, extent)):
        behind = indexing.along(x, at, builtins.slice(1, None))
        ahead = indexing.along(x, at, builtins.slice(-1))
        x = ROWS["logical_xor" if x.dtype == torch.bool else "sub"](behind, ahead)
    return record("set", x)


def pixel_shuffle(x: Handle, upscale_factor: int) -> Handle:
    """Channels laid out in space: [*,c*r*r,h,w] -> [*,c,h*r,w*r]."""
    r = upscale_factor
    if x.ndim < 3 or r < 1 or x.shape[-3] % (r * r):
        raise DefinitionError(
            f"pixel_shuffle of {shown(x)} by {r}",
            because="the channels, the third dim from the end, are a multiple of the square",
            hint="[batch, channels, height, width]",
        )
    *lead, c, h, w = x.shape
    apart = views.reshape(x, (*lead, c // (r * r), r, r, h, w))
    order = [*range(len(lead) + 1), *(len(lead) + i for i in (3, 1, 4, 2))]
    return views.reshape(views.permute(apart, order), (*lead, c // (r * r), h * r, w * r))


def pixel_unshuffle(x: Handle, downscale_factor: int) -> Handle:
    """Space laid out in channels: [*,c,h*r,w*r] -> [*,c*r*r,h,w]."""
    r = downscale_factor
    if x.ndim < 3 or r < 1 or x.shape[-1] % r or x.shape[-2] % r:
        raise DefinitionError(
            f"pixel_unshuffle of {shown(x)} by {r}",
            because="height and width are multiples of it",
            hint="[batch, channels, height, width]",
        )
    *lead, c, h, w = x.shape
    apart = views.reshape(x, (*lead, c, h // r, r, w // r, r))
    order = [*range(len(lead) + 1), *(len(lead) + i for i in (2, 4, 1, 3))]
    return views.reshape(views.permute(apart, order), (*lead, c * r * r, h // r, w // r))
