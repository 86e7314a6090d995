"""Comparisons that hide the keys behind a row, among those of its document.

    ge(arange(64) as rows, arange(64))    of positions in the whole sequence
    le(%p as columns, %p as rows)         of positions %p that begin anew with each document, where
                                          documents are cumsum(%p[1:] - %p[:-1] != 1)

Rows and keys whose documents are counted so have one number where the positions between them all go
up by 1: what stands behind has the greater position. transformers writes its masks in this way.
"""

from __future__ import annotations

import torch

from mdfuse.extents.extent import are_same
from mdfuse.ir.graph import Expr, Fusion

#: A comparison that is true unless a row is before its column -> its operands: rows, and columns.
NOT_BEFORE = {"ge": (0, 1), "le": (1, 0)}

#: Dims of a view -> those of what it is a view of; None: of none.
_Dims = tuple[int | None, ...]


def hides_later(fusion: Fusion, e: Expr, rows: str, keys: str, is_beside: bool) -> bool:
    """Return whether a comparison hides just the keys behind a row, of those in its document.

    Args:
        fusion: without layouts but those that are stated.
        e: the comparison.
        rows, keys: the numbers of their documents.
        is_beside: whether their dims are those of the comparison.
    """
    if e.op not in NOT_BEFORE or len(e.reads) != 2:
        return False
    (a, of_a), (b, of_b) = (_viewed(fusion, e.reads[at]) for at in NOT_BEFORE[e.op])
    ends = [fusion.producers.get(x) for x in (a, b)]
    if ends[0] is not None and ends[1] is not None and ends[0].op == ends[1].op == "arange":
        is_alike = ends[0].inputs == ends[1].inputs and ends[0].inputs[1] == 1
        places = [[d - len(of) for d, x in enumerate(of) if x == 0] for of in (of_a, of_b)]
        pairs = ((a, fusion.values[rows].shape[-2]), (b, fusion.values[keys].shape[-1]))
        is_each = all(are_same(fusion.values[x].shape[0], n) for x, n in pairs)
        is_exact = all(fusion.values[x].dtype == torch.int64 for x in (a, b))
        return is_alike and is_exact and is_each and places == [[-2], [-1]]
    (c, of_c), (d, of_d) = (_viewed(fusion, x) for x in (rows, keys))
    is_same = a == b and c == d and (of_a, of_b) == (of_c, of_d)
    if not is_beside or not is_same or len(of_a) < 2 or _lead(of_a) != _lead(of_b):
        return False
    dim, other = of_a[-2], of_b[-1]
    return dim is not None and dim == other and _counts_restarts(fusion, c, a, dim)


def _viewed(fusion: Fusion, x: str) -> tuple[str, _Dims]:
    """Return the value of which another one is a view or a copy, and the dims of the view."""
    dims: list[int | None] = [*range(len(fusion.values[x].shape))]
    while (e := fusion.producers.get(x)) is not None and e.op in ("unsqueeze", "set"):
        n = len(fusion.values[x].shape)
        new = {d % n for d in e.kwargs.get("dims", ())}
        before = {d: at for at, d in enumerate(d for d in range(n) if d not in new)}
        dims = [None if d is None else before.get(d) for d in dims]
        x = e.reads[0]
    return x, (*dims,)


def _lead(dims: _Dims) -> list[tuple[int, int]]:
    """Return where a view has dims before the last two, counted from the last one, and which."""
    return [(at - len(dims), d) for at, d in enumerate(dims[:-2]) if d is not None]


def _counts_restarts(fusion: Fusion, numbers: str, positions: str, dim: int) -> bool:
    """Return whether numbers count, along a dim, the positions that are not one more than before.

    %first = cat(%any, %p)                        # %any has an extent of 1
    %step = sub(slice(%first, from 1 on), slice(%first, to the last but one))
    %numbers = cumsum(cast(ne(%step, 1)))
    """
    p = fusion.values[positions]
    count, ne = (_last_of(fusion, numbers, *ops) for ops in (("cumsum",), ("cumsum", "cast", "ne")))
    if count is None or ne is None or ne.inputs[1] != 1 or p.dtype != torch.int64:
        return False
    is_wide = fusion.values[numbers].dtype == fusion.values[count.reads[0]].dtype == torch.int64
    step = _last_of(fusion, ne.reads[0], "sub")
    if not is_wide or count.kwargs["dim"] % len(p.shape) != dim or step is None:
        return False
    ends = [_last_of(fusion, x, "slice") for x in step.reads]
    both = [_last_of(fusion, e.reads[0], "cat") for e in ends if e is not None]
    if len(both) != 2 or both[0] is None or both[0] is not both[1] or len(both[0].reads) != 2:
        return False
    whole = both[0]
    last = whole.kwargs["dim"] % len(p.shape) == dim and whole.reads[1] == positions
    has_one = are_same(fusion.values[whole.reads[0]].shape[dim], 1)
    runs = zip(ends, (1, 0), strict=True)
    return last and has_one and all(_is_run(fusion, e, p.shape, dim, at) for e, at in runs)


def _last_of(fusion: Fusion, x: str, *ops: str) -> Expr | None:
    """Return the last expression of a chain that makes a value, copies aside; None: another."""
    e: Expr | None = None
    for op in ops:
        e = fusion.producers.get(x)
        while e is not None and e.op == "set":
            e = fusion.producers.get(e.reads[0])
        if e is None or e.op != op:
            return None
        x = e.reads[0]
    return e


def _is_run(fusion: Fusion, e: Expr | None, shape: tuple[int, ...], dim: int, first: int) -> bool:
    """Return whether a slice takes all that is there, but for its first or last place of a dim."""
    if e is None or any(n != 1 for n in e.kwargs["steps"]):
        return False
    starts = [first if d == dim else 0 for d in range(len(shape))]
    taken = zip(fusion.values[e.output].shape, shape, strict=True)
    return [*e.kwargs["starts"]] == starts and all(are_same(a, b) for a, b in taken)
