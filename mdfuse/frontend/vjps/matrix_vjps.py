"""Gradients of inverses, solutions and factors of matrices (Giles 2008, Oxford NA-08/01).

Then those of rows that are grouped by expert, with a matrix for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import masks, views
from mdfuse.frontend.ops.recording import record
from mdfuse.frontend.vjps.table import RULES, Applied, by_operand, rule


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


# -- rows grouped by expert ------------------------------------------------------------------------


@rule("group_rows")
def _group_rows(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    rows = record("ungroup_rows", ct, e[1], e[2])
    is_shared = len(e.shape(0)) == 2
    return record("sum", rows, dims=(1,)) if is_shared else rows, None, None


@rule("ungroup_rows")
def _ungroup_rows(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    rows = record("squeeze", ct, dims=(1,)) if len(e.shape(1)) == 1 else ct
    return record("group_rows", rows, e[1], e[2]), None, None


def _grouped(op: str, **of_grad: Callable[[Applied], object]) -> None:
    """Add the rules of a product of groups of rows, and of its gradient, which has attributes."""
    RULES[op] = by_operand(
        lambda e, ct: record(op, ct, views.transpose(e[1]), e[2]),
        lambda e, ct: record(
            f"{op}_grad", e[0], ct, e[2], **{name: x(e) for name, x in of_grad.items()}
        ),
        None,
    )
    RULES[f"{op}_grad"] = by_operand(
        lambda e, ct: record(op, e[1], views.transpose(ct), e[2]),
        lambda e, ct: record(op, e[0], ct, e[2]),
        None,
    )


_grouped("grouped_mm", shape=lambda e: e.shape(1))
_grouped("routed_mm", shape=lambda e: e.shape(1))
_grouped("rows_mm")


@rule("sum_of_rows")
def _sum_of_rows(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return record("spread_rows", ct, e[0], e[1]), None


RULES["spread_rows"] = by_operand(lambda e, ct: record("sum_of_rows", ct, e[2]), None, None)


@rule("mask_rows")
def _mask_rows(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    return ct, None
