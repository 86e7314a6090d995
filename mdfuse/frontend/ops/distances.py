"""Norms of matrices, distances and angles between vectors."""

from __future__ import annotations

import math

import torch

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import joining, parts, reductions, views
from mdfuse.frontend.ops.pointwise import ROWS, cast
from mdfuse.frontend.ops.recording import (
    Dims,
    back,
    checked,
    floating,
    in_f32,
    own_place,
    real_only,
    record,
    shown,
    with_fractions,
)
from mdfuse.frontend.ops.reductions import norm, sum


def cosine_similarity(x1: Handle, x2: Handle, dim: int = 1, eps: float = 1e-8) -> Handle:
    """The cosine of the angle between vectors along a dim; norms are at least eps."""
    real_only("cosine_similarity", x1, x2)
    first, second = (in_f32(floating(x)) for x in (x1, x2))
    if x1.shape != x2.shape:  # norms are those of the vectors as they are repeated
        first, second = joining.broadcast_tensors(first, second)
    sizes = [ROWS["maximum"](norm(x, 2, dim, keepdim=True), eps) for x in (first, second)]
    cosine = sum((first / sizes[0]) * (second / sizes[1]), dim)
    return _as(cosine, torch.promote_types(x1.dtype, x2.dtype))


def _as(x: Handle, dtype: torch.dtype) -> Handle:
    return cast(x, dtype) if dtype.is_floating_point and x.dtype != dtype else x


def pairwise_distance(
    x1: Handle, x2: Handle, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Handle:
    """The p-norm of x1 - x2 + eps along the last dim."""
    if isinstance(eps, int) and abs(eps) < 2**63:  # a float, as in torch
        eps = float(eps)
    return norm(x1 - x2 + eps, p, -1, keepdim)


def cdist(x1: Handle, x2: Handle, p: float = 2.0) -> Handle:
    """The p-norms of the differences of all rows: [*,n,d], [*,m,d] -> [*,n,m].

    All n * m * d differences are computed; none is communicated.
    """
    if min(x1.ndim, x2.ndim) < 2 or x1.shape[-1] != x2.shape[-1] or p < 0:
        raise DefinitionError(
            f"cdist of {shown(x1)} and {shown(x2)} with p={p}",
            because="both have rows of one length, and p is not negative",
            hint="[n, d] and [m, d]",
        )
    return norm(views.unsqueeze(x1, -2) - views.unsqueeze(x2, -3), p, -1)


def vector_norm(
    x: Handle,
    ord: float | str = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Handle:
    """The norm of all elements along dims: `norm`."""
    return norm(x, ord, dim, keepdim, dtype)


def matrix_norm(
    x: Handle, ord: float | str = "fro", dim: Dims = (-2, -1), keepdim: bool = False
) -> Handle:
    """The norm of matrices: "fro", or with inf, -inf, 1 and -1 that of sums of rows or columns."""
    over = checked(x, dim)
    if over is None or len(over) != 2 or ord not in ("fro", 1, -1, math.inf, -math.inf):
        raise DefinitionError(
            f"matrix_norm of {shown(x)} with ord={ord!r} and dim={dim}",
            because="a matrix has two dims; it is 'fro', 1, -1, inf or -inf (no singular values)",
            hint="matrix_norm(x)",
        )
    if isinstance(ord, str):
        return norm(x, 2, over, keepdim)
    rows, columns = (d % x.ndim for d in over)
    first, second = (rows, columns) if abs(ord) == 1 else (columns, rows)
    total = sum(ROWS["abs"](in_f32(with_fractions(x))), first, True)
    norms = (reductions.amax if ord > 0 else reductions.amin)(total, second, True)
    return back(norms if keepdim else record("squeeze", norms, dims=(rows, columns)), x, True)


def cross(x: Handle, other: Handle, dim: int | None = None) -> Handle:
    """The cross product of vectors of three elements along a dim, the first such one by default."""
    if dim is None:
        dim = next((d for d, n in enumerate(x.shape) if n == 3), 0)
    a, b = own_place(x, dim), own_place(other, dim)
    if x.shape[a] != 3 or other.shape[b] != 3 or x.ndim != other.ndim:
        raise DefinitionError(
            f"cross of {shown(x)} and {shown(other)} along dim {dim}",
            because="vectors with a cross product have three elements",
            hint="a dim of extent 3 in both",
        )

    def turned(y: Handle, at: int, by: int) -> Handle:
        ahead, behind = parts.split(y, (by, 3 - by), at)
        return parts.cat([behind, ahead], at)

    first = turned(x, a, 1) * turned(other, b, 2)
    return first - turned(x, a, 2) * turned(other, b, 1)
