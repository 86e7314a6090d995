"""Products of rows with the matrix whose number each has, as experts compute them.

Matrices stand in parts, `weight[p,e,k,n]`, so that parts may lie on several ranks. A product of
rows `x[t,k]` is apart, `y[p,t,n]`: of each part the rows whose matrix it has, zeros for the others.
A product of rows that are apart is together again: of each part those rows are read alone. So what
is computed between two products stays where the matrices are, and is summed once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir import groups
from mdfuse.ir.dims import DimMap, Labels, Shape, Shapes, present
from mdfuse.ir.local_attributes import ExprPart

Attrs = Mapping[str, Any]
Part = tuple[int, int, int]

#: The labels: rows, what is summed over, columns, parts.
_T, _K, _N, _P = range(4)


def multiply(x: Tensor, weight: Tensor, ids: Tensor, *, part: Part | None = None) -> Tensor:
    """Multiply each row with its matrix.

    Args:
        x: [t,k], or apart [p,t,k].
        weight: [p,e,k,n].
        ids: [t], the number of each row's matrix, of all p * e; others take none: zeros.
        part: (first, behind the last, all) of the parts that the weight has; None: all.

    Returns:
        [p,t,n], or together [t,n].
    """
    parts, each = weight.shape[:2]
    numbers = _numbers_of_part(ids, parts, each, part)
    order, ends = _in_order(numbers, parts * each)
    rows = _together(x, numbers, each)
    products = groups.multiply(rows[order], weight.flatten(0, 1), ends)
    products = torch.empty_like(products).index_copy_(0, order, products)
    return products if x.ndim == 3 else _apart(products, numbers, parts, each)


def multiply_grad(
    x: Tensor, ct: Tensor, ids: Tensor, *, shape: Sequence[int], part: Part | None = None
) -> Tensor:
    """Return the gradient of the weight [p,e,k,n]: for each matrix the product of its rows."""
    parts = shape[0] if part is None else part[1] - part[0]
    each = shape[1]
    numbers = _numbers_of_part(ids, parts, each, part)
    order, ends = _in_order(numbers, parts * each)
    x, ct = (_together(rows, numbers, each)[order] for rows in (x, ct))
    whole = (parts * each, x.shape[1], ct.shape[1])
    return groups.multiply_grad(x, ct, ends, shape=whole).view(parts, each, *whole[1:])


def _numbers_of_part(ids: Tensor, parts: int, each: int, part: Part | None) -> Tensor:
    """Return the index of each row's matrix among the local ones; past the end if it is remote."""
    count = parts * each
    numbers = ids.long() - (0 if part is None else part[0] * each)
    return torch.where((numbers >= 0) & (numbers < count), numbers, count)


def _in_order(matrices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows by their matrix, and behind which of these each matrix ends."""
    in_order, order = matrices.sort(stable=True)
    numbers = torch.arange(count, device=matrices.device)
    return order, torch.searchsorted(in_order, numbers, right=True)


def _together(x: Tensor, matrices: Tensor, each: int) -> Tensor:
    """Return, of rows that are apart, the row of the part that has its matrix."""
    if x.ndim == 2:
        return x
    if x.shape[0] <= 1:
        return x[0] if len(x) else x.new_zeros(x.shape[1:])
    at = (matrices // each).clamp(max=x.shape[0] - 1)
    return x[at, torch.arange(x.shape[1], device=x.device)]


def _apart(x: Tensor, matrices: Tensor, parts: int, each: int) -> Tensor:
    """Each row in its part, zeros in the others."""
    if parts <= 1:
        return x.expand(parts, *x.shape)
    numbers = torch.arange(parts, device=x.device).unsqueeze(1)
    return torch.where((matrices // each == numbers).unsqueeze(2), x, 0)


def _of_rows(shape: Shape | None, last: int) -> Labels:
    """Labels of rows, which are apart or not."""
    assert shape is not None
    return (_T, last) if len(shape) == 2 else (_P, _T, last)


def labels(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x, w[p,e,k,n], ids[t]`: ranks add up their shares of k, and of parts."""
    x, reduces = shapes[0], {_K: "sum"}
    assert x is not None
    if len(x) == 3:
        reduces[_P] = "sum"
    return DimMap(
        operands=(_of_rows(x, _K), (_P, None, _K, _N), (_T,)),
        results=(_of_rows(result, _N),),
        reduces=reduces,
        plain=frozenset({_P, _K, _N}),
    )


def labels_of_grad(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x, ct, ids[t]`, of which x or ct is apart: rows add up."""
    return DimMap(
        operands=(_of_rows(shapes[0], _K), _of_rows(shapes[1], _N), (_T,)),
        results=((_P, None, _K, _N),),
        reduces={_T: "sum"},
        plain=frozenset({_P, _K, _N}),
    )


def shape(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the rows: together if x is apart, apart if it is not."""
    x, weight, ids = present(shapes)
    (p, _, k, n), (t,) = weight, ids
    if x not in ((t, k), (p, t, k)):
        raise ValueError(f"{x}, {weight} and {ids} do not fit")
    return (p, t, n) if len(x) == 2 else (t, n)


def shape_of_grad(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the weight, or of a rank's part of it."""
    x, ct, ids = present(shapes)
    (p, e, *sizes), part = attrs["shape"], attrs.get("part")
    parts = p if part is None else part[1] - part[0]
    (t,), k, n = ids, x[-1], ct[-1]
    is_fitting = (x, ct) in (((t, k), (parts, t, n)), ((parts, t, k), (t, n)))
    if not is_fitting or (part is None and sizes != [k, n]):
        raise ValueError(f"{x}, {ct} and {ids} do not fit {attrs['shape']}")
    return (parts, e, k, n)


def local_parts(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Say which parts of the matrices this rank has."""
    matrices = part.out if "shape" in attrs else part[1]
    return dict(attrs) if matrices.has_all(0) else {**attrs, "part": matrices.ends(0)}
