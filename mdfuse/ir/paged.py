"""Attention to keys and values that lie in pages: the pages of a request are named by a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir import calls
from mdfuse.ir.dims import DimMap, Shape, Shapes, check_equal, present

Attrs = Mapping[str, Any]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Let the last rows of each request attend to all rows before them, and to themselves.

    Args:
        q: [requests, heads, rows, e]: the last rows of each request.
        k: [pages, page, heads of keys, e]; each serves as many heads of q as there are to one.
        v: [pages, page, heads of keys, f].
        table: [requests, pages of a request] of integers; those behind the length count for
            nothing.
        lengths: [requests]: rows of each request, those of q included; a row of q before the first
            one of its request is 0.
        scale: of the scores; 1/sqrt(e) by default.
    """
    if q.device.type == "meta":
        return q.new_empty(shape([x.shape for x in (q, k, v, table, lengths)], {}))
    _, heads, rows, e = q.shape
    result = q.new_zeros((*q.shape[:3], v.shape[-1]))
    if not (result.numel() and k.shape[0] and table.shape[1]):
        return result
    k, v = (_of_requests(x, table) for x in (k, v))
    at = lengths.unsqueeze(1) - rows + torch.arange(rows, device=q.device)
    keys = torch.arange(k.shape[2], device=q.device)
    sees = keys <= at.unsqueeze(-1)
    mask = sees.unsqueeze(1)
    # a row that sees nothing sees all, since some kernels give NaN, and is 0 in the end
    is_there = (at >= 0).unsqueeze(1).unsqueeze(-1)
    scale = 1 / math.sqrt(e or 1) if scale is None else scale
    out = calls.attend(q, k, v, mask | ~is_there, scale=scale, enable_gqa=heads != k.shape[1])
    return torch.where(is_there, out, 0)


def _of_requests(x: Tensor, table: Tensor) -> Tensor:
    """Return the rows of each request: [requests, heads, rows, features]."""
    pages = x.index_select(0, table.clamp(0, x.shape[0] - 1).flatten())
    return pages.view(len(table), -1, *x.shape[2:]).transpose(1, 2)


def labels(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `q[b,h,l,e], k[p,s,h,e], v[p,s,h,f], table[b,m], lengths[b]`: b, h, f may be split."""
    k = shapes[1]
    assert k is not None

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        return label != 1 or k[2] % math.prod(sizes) == 0

    pages = (None, None, 1)
    operands = ((0, 1, None, None), (*pages, None), (*pages, 3), (0, None), (0,))
    return DimMap(operands=operands, results=((0, 1, None, 3),), fits=fits)


def shape(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return [requests, heads, rows, f]; heads of q are a multiple of those of keys."""
    q, k, v, table, lengths = present(shapes)
    wanted = (4, 4, 4, 2, 1)
    if tuple(map(len, (q, k, v, table, lengths))) != wanted:
        raise ValueError("q, k, v, table and lengths have 4, 4, 4, 2 and 1 dims")
    check_equal((*k[:3], k[3], q[0], q[0]), (*v[:3], q[3], table[0], lengths[0]))
    if k[2] == 0 or q[1] % k[2]:
        raise ValueError(f"{q[1]} heads of queries for {k[2]} heads of keys")
    return (*q[:3], v[3])
