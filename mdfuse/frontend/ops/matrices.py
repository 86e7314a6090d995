"""Inverses, solutions and factors of matrices. Batches may be split; a matrix without gives NaN."""

from __future__ import annotations

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import views
from mdfuse.frontend.ops.recording import record, shown


def _check_square(name: str, x: Handle) -> None:
    if x.ndim < 2 or x.shape[-1] != x.shape[-2] or not x.dtype.is_floating_point:
        raise DefinitionError(
            f"{name} of {shown(x)}",
            because="it takes square matrices of floating numbers, the last two dims",
            hint="x: […, n, n]",
        )


def inverse(x: Handle) -> Handle:
    """The inverse of each matrix of x[…,n,n]; NaN where there is none."""
    _check_square("inverse", x)
    return record("inverse", x)


def cholesky(x: Handle, upper: bool = False) -> Handle:
    """The triangle l of which each symmetric matrix is l @ l.mT; with upper its transpose."""
    _check_square("cholesky", x)
    lower = record("cholesky", x)
    return views.transpose(lower, -2, -1) if upper else lower


def linalg_solve(x: Handle, other: Handle) -> Handle:
    """y of x[…,n,n] @ y = other, for other of [n] (one for all) or […,n,k].

    Args:
        x: square matrices.
        other: right sides; their columns may be split.
    """
    _check_square("linalg_solve", x)
    is_vector = other.ndim == 1 or (other.ndim == x.ndim - 1 and other.shape == x.shape[:-1])
    sides = views.unsqueeze(other, -1) if is_vector else other
    batch = x.shape[:-2] if len(x.shape) >= sides.ndim else sides.shape[:-2]
    fits = sides.dtype == x.dtype and sides.ndim > 1 and sides.shape[-2] == x.shape[-1]
    if not fits:
        raise DefinitionError(
            f"linalg_solve of {shown(x)} and {shown(other)}",
            because="each matrix has as many rows as the right side, of one dtype",
            hint="x: […, n, n], other: […, n, k]",
        )
    x = views.expand(x, (*batch, *x.shape[-2:]))
    solution = record("solve", x, views.expand(sides, (*batch, *sides.shape[-2:])))
    return record("squeeze", solution, dims=(solution.ndim - 1,)) if is_vector else solution
