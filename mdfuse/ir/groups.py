"""Products of rows with a matrix each, as experts compute them: calls, labels, shapes.

Rows come in groups (`grouped_mm`), or each with the number of its matrix (`routed_mm`). Matrices
may be split: each rank computes the rows of its own, the others are zero, and the sum over the
ranks is the product. So may rows and columns of the matrices, and rows of the operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse import torch_private
from mdfuse.ir.dims import DimMap, Shape, Shapes, present
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.torch_private import aligned_rows

Attrs = Mapping[str, Any]
Part = tuple[int, int, int]

#: The labels: rows, what is summed over, columns, groups.
_T, _K, _N, _E = range(4)


def multiply(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    rows: Part | None = None,
    part: Part | None = None,
) -> Tensor:
    """Multiply rows of x with the matrix of their group.

    Args:
        x: [t,k], the rows of a group one after the other.
        weight: [e,k,n].
        ends: behind which row each group ends, of all rows and groups; no group has what is behind
            the last, which becomes zeros.
        rows: (first, behind the last, all) of the rows that x has; None: all.
        part: (first, behind the last, all) of the groups that the weight has; None: all.
    """
    if weight.numel() and x.numel() and torch_private.has_grouped_kernel([x], [weight]):
        if rows is None and part is None:  # groups begin with the first row
            return _zeroed(torch_private.grouped_mm(aligned_rows(x), weight, ends.int()), ends[-1])
        return _by_kernel(x, weight, *_spans(x, weight.shape[0], ends, rows, part))
    result = x.new_zeros((x.shape[0], weight.shape[2]))
    for i, (a, b, mask) in enumerate(_groups(x, weight.shape[0], ends, rows, part)):
        if mask is None:
            result[a:b] = x[a:b] @ weight[i]
        else:
            result = torch.where(mask, x @ weight[i], result)
    return result


def multiply_packed(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows of x with the matrix of their group, as `multiply` does with all rows.

    Rows behind the last group count for nothing, and may become anything.
    """
    if weight.numel() and x.numel() and torch_private.has_grouped_kernel([x], [weight]):
        return torch_private.grouped_mm(aligned_rows(x), weight, ends.int())
    return multiply(x, weight, ends)


def multiply_grad(
    x: Tensor,
    ct: Tensor,
    ends: Tensor,
    *,
    shape: Sequence[int],
    rows: Part | None = None,
    part: Part | None = None,
) -> Tensor:
    """Return the gradient of the weight [e,k,n]: for each group the product of its rows."""
    count = shape[0] if part is None else part[1] - part[0]
    if count and x.numel() and ct.numel() and torch_private.has_grouped_kernel([x, ct]):
        if rows is None and part is None:
            return torch_private.grouped_mm(aligned_rows(x).T, aligned_rows(ct), ends.int())
        starts, own_ends = _spans(x, count, ends, rows, part)
        places = _from(starts[0], x.shape[0])
        return torch_private.grouped_mm(x[places].T, ct[places], (own_ends - starts[0]).int())
    result = x.new_zeros((count, x.shape[1], ct.shape[1]))
    for i, (a, b, mask) in enumerate(_groups(x, count, ends, rows, part)):
        left, right = (t[a:b] if mask is None else torch.where(mask, t, 0) for t in (x, ct))
        result[i] = left.T @ right
    return result


def _by_kernel(x: Tensor, weight: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Multiply by torch's kernel, which takes groups that begin with the first row.

    What it leaves behind the last one is not written.
    """
    places = _from(starts[0], x.shape[0])
    ends = ends - starts[0]
    products = _zeroed(torch_private.grouped_mm(x[places], weight, ends.int()), ends[-1])
    return torch.empty_like(products).index_copy_(0, places, products)


def _zeroed(products: Tensor, end: Tensor) -> Tensor:
    """Return products with zeros in the rows behind the last group."""
    is_written = torch.arange(products.shape[0], device=products.device) < end
    return torch.where(is_written.unsqueeze(1), products, 0)


def _from(start: Tensor, t: int) -> Tensor:
    """All rows, beginning with one that only the device knows."""
    return (torch.arange(t, device=start.device) + start) % max(t, 1)


def may_look(x: Tensor) -> bool:
    """Return whether the host may read numbers of a tensor at no cost."""
    return not x.is_cuda


def _spans(
    x: Tensor, count: int, ends: Tensor, rows: Part | None, part: Part | None
) -> tuple[Tensor, Tensor]:
    """Return where each local group begins and ends among the local rows."""
    first = 0 if part is None else part[0]
    own_ends = (ends.long() - (0 if rows is None else rows[0])).clamp(0, x.shape[0])
    starts = torch.cat([own_ends.new_zeros(1), own_ends])[first : first + count]
    return starts, own_ends[first : first + count]


def _groups(
    x: Tensor, count: int, ends: Tensor, rows: Part | None, part: Part | None
) -> Iterator[tuple[int, int, Tensor | None]]:
    """Yield for each group here its span of rows; on GPUs all rows, with a mask of its own.

    Numbers of a GPU are not looked at: that would wait for it, and no graph could contain it.
    """
    if x.is_meta:
        return
    starts, own_ends = _spans(x, count, ends, rows, part)
    if may_look(x):
        for a, b in zip(starts.tolist(), own_ends.tolist(), strict=True):
            yield a, max(a, b), None
        return
    places = torch.arange(x.shape[0], device=x.device)
    for i in range(count):
        yield 0, x.shape[0], ((places >= starts[i]) & (places < own_ends[i])).unsqueeze(1)


def of_groups(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[t,k], w[e,k,n], ends[e]`: ranks add up their shares of k, and of the groups."""
    return DimMap(
        operands=((_T, _K), (_E, _K, _N), (None,)),
        results=((_T, _N),),
        reduces={_K: "sum", _E: "sum"},
    )


def of_groups_grad(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[t,k], ct[t,n], ends[e]`: rows add up, each rank may make its own groups."""
    return DimMap(
        operands=((_T, _K), (_T, _N), (None,)), results=((_E, _K, _N),), reduces={_T: "sum"}
    )


def shape_of_groups(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape [t,n]; there is an end for each group."""
    x, weight, ends = present(shapes)
    (t, k), (e, m, n), (count,) = x, weight, ends
    if k != m or (attrs.get("part") is None and e != count):
        raise ValueError(f"{x}, {weight} and {ends} do not fit")
    return (t, n)


def shape_of_groups_grad(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the weight, or of a rank's part of it."""
    x, ct, ends = present(shapes)
    (t, k), (rows, n), (count,) = x, ct, ends
    part = attrs.get("part")
    if t != rows or (part is None and (*attrs["shape"],) != (count, k, n)):
        raise ValueError(f"{x} and {ct} do not fit {attrs['shape']}")
    return (count if part is None else part[1] - part[0], k, n)


def local_groups(attrs: dict[str, Any], part: ExprPart) -> dict[str, Any]:
    """Add the rows and the groups that this rank has."""
    x, groups = part[0], part.out if "shape" in attrs else part[1]
    local = dict(attrs)
    if not x.has_all(0):
        local["rows"] = x.ends(0)
    if not groups.has_all(0):
        local["part"] = groups.ends(0)
    return local
