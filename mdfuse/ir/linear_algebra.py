"""Inverses, solutions and factors of matrices, the last two dims, which are whole.

A matrix that has none gives NaN: an error in the midst of a run would leave other ranks waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import DimMap, Shape, Shapes, check_equal, present

Attrs = Mapping[str, Any]


def _where_there(x: Tensor, info: Tensor) -> Tensor:
    return torch.where(info.reshape(*info.shape, 1, 1) == 0, x, math.nan)


def inverse(x: Tensor) -> Tensor:
    """Return the inverse of each matrix."""
    inverses, info = torch.linalg.inv_ex(x)
    return _where_there(inverses, info)


def cholesky(x: Tensor) -> Tensor:
    """Return the lower triangle of which each matrix is the square."""
    factors, info = torch.linalg.cholesky_ex(x)
    return _where_there(factors, info)


def solve(a: Tensor, b: Tensor) -> Tensor:
    """Return x[…,n,k] of a[…,n,n] @ x = b[…,n,k]."""
    solutions, info = torch.linalg.solve_ex(a, b)
    return _where_there(solutions, info)


def of_matrices(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label matrices: their rows and columns must be whole, batches may be split."""
    labels = (*range(len(result) - 2), None, None)
    return DimMap(operands=(labels,), results=(labels,))


def of_solution(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `a[…,n,n], b[…,n,k]`: batches and the columns of b may be split."""
    batch = tuple(range(len(result) - 2))
    sides = (*batch, None, len(batch))
    return DimMap(operands=((*batch, None, None), sides), results=(sides,))


def shape_of_matrices(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the operand, whose last two dims are equal."""
    (x,) = present(shapes)
    if len(x) < 2 or x[-1] != x[-2]:
        raise ValueError(f"{x} are no square matrices")
    return x


def shape_of_solution(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the right side, whose rows are those of the square matrices."""
    a, b = present(shapes)
    square = shape_of_matrices((a,), attrs)
    check_equal(square[:-1], b[:-1])
    return b
