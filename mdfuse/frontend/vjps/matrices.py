"""Gradients of inverses, solutions and factors of matrices (Giles 2008, Oxford NA-08/01)."""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import masks, views
from mdfuse.frontend.ops.recording import record
from mdfuse.frontend.vjps.table import Applied, rule


def product(a: Handle, b: Handle) -> Handle:
    """The matrix product of values whose dims before the last two are alike."""
    matrix: Handle = record("matmul", a, b)
    return matrix


@rule("inverse")
def _inverse(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    turned = views.transpose(e.y)
    return (-product(product(turned, ct), turned),)


@rule("solve")
def _solve(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    sides = record("solve", views.transpose(e[0]), ct)
    return (
        -product(sides, views.transpose(e.y)) if e.wants(0) else None,
        sides if e.wants(1) else None,
    )


@rule("cholesky")
def _cholesky(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    lower = e.y
    inner = masks.tril(product(views.transpose(lower), ct))
    inner = (inner + masks.tril(inner, -1)) * 0.5  # half of the diagonal
    back = record("inverse", lower)
    gradient = product(product(views.transpose(back), inner), back)
    return ((gradient + views.transpose(gradient)) * 0.5,)
