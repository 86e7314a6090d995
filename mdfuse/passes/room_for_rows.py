"""Give rows of experts as much room in each microbatch as the largest of these asks for.

    %s: f32[2,4,<=10:%n,16] = group_rows(%x, %ids, %n)      # five tokens, two experts each
->
    %s: f32[2,4,<=12:%n,16] = group_rows(%x, %ids, %n, bound=12)      # two microbatches: 6 each

`torch.chunk` cuts five tokens into three and two, and ten rows into five and five: six would have
no room. A microbatch with fewer tokens leaves some of its room empty, as experts without tokens do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ragged_dims import choices
from mdfuse.passes.count_rows import first

#: Attributes that have an element for each dim of a ragged value.
_OF_DIMS = ("ends", "shape")
#: Operations that read ids -> which of their operands these are.
OF_TOKENS = {"counts": 0, "group_rows": 1, "ungroup_rows": 1}
_ROWS = 2  # the dim of a ragged value


def run(fusion: Fusion, rows: object, count: int, is_of_batch: Callable[[str], bool]) -> Fusion:
    """Return the fusion with other bounds where tokens are cut unevenly.

    Args:
        fusion: with all layouts.
        rows: of the batch.
        count: how many microbatches.
        is_of_batch: whether the first dim of a value is the batch's, alone or with dims behind it.
    """
    bounds = dict[str, tuple[int, int]]()
    for e in fusion.exprs:
        counts = fusion.values[e.output].rows if e.op == "group_rows" else None
        if counts is not None and is_of_batch(e.reads[1]):
            before = fusion.values[e.output].shape[_ROWS]
            bound = _room(fusion, e.reads[1], rows, count)
            if bound is not None and bound != before:
                bounds[counts] = before, bound
    for name in fusion.outputs:  # what a user gets has the shape that was defined
        bounds.pop(fusion.values[name].rows or "", None)
    if not bounds:
        return fusion
    values = dict(fusion.values)
    for x in fusion.values.values():
        if x.rows in bounds:
            shape = (*x.shape[:_ROWS], bounds[x.rows][1], *x.shape[_ROWS + 1 :])
            values[x.name] = replace(x, shape=shape)
    exprs = tuple(_with_bound(e, fusion, bounds) for e in fusion.exprs)
    return replace(fusion, values=values, exprs=exprs)


def _room(fusion: Fusion, ids: str, rows: object, count: int) -> int | None:
    """Return how many rows of a part all microbatches have room for; None: it is not known."""
    shape = fusion.values[ids].shape
    extent = shape[0]
    if not isinstance(extent, int) or not isinstance(rows, int) or not rows or extent % rows:
        return None
    each = extent // rows
    largest = max(stop - start for _, (start, stop) in fusion.layout(ids).chunks_of(0, extent))
    return count * -(-largest // (each * count)) * each * choices(shape)


def _with_bound(expr: Expr, fusion: Fusion, bounds: Mapping[str, tuple[int, int]]) -> Expr:
    """Return an expression with the bound of the rows that it makes or takes."""
    rows = (fusion.values[x].rows for x in (*expr.outputs, *expr.reads))
    counts = next((n for n in rows if n is not None), None)
    if counts is None or counts not in bounds:
        return expr
    before, bound = bounds[counts]
    attrs = dict(expr.attrs)
    if expr.op == "group_rows":
        attrs["bound"] = bound
    for name in _OF_DIMS:
        given = attrs.get(name)
        if isinstance(given, tuple) and given[_ROWS : _ROWS + 1] == (before,):
            attrs[name] = (*given[:_ROWS], bound, *given[_ROWS + 1 :])
    return replace(expr, attrs=tuple(attrs.items()))


def problem(fusion: Fusion, expr: Expr) -> tuple[str, str]:
    """Return why an operation between tokens and rows takes no microbatches, and what to do."""
    name = expr.reads[OF_TOKENS[expr.op]]
    ids, layout = first(fusion, name), fusion.layout(name)
    cut, extent = fusion.layout(ids), fusion.values[ids].shape[0]
    counts = expr.output if expr.op == "counts" else expr.reads[2]
    parts = fusion.values[counts].shape[0]
    ranks = math.prod(cut.mesh.axis_size(a) for a in cut.split_axes(0))
    if ranks == 1:
        because = f"ranks have all tokens, not those of a part: %{ids} is {cut}"
        return because, f"tokens that {parts} ranks share alike: those that fill up have ids of -1"
    if ranks != parts:
        because = f"a microbatch has tokens of one part: %{ids} is {cut}, with parts={parts}"
        return because, f"parts={ranks}, as many as ranks have tokens of their own"
    if layout == cut:
        return (
            f"%{ids} has several tokens of a row of the batch, and microbatches are of other "
            "numbers of rows",
            "as many microbatches as divide the rows of each rank",
        )
    if expr.op == "counts":
        sizes = [b - a for _, (a, b) in cut.chunks_of(0, extent)]
        have = " or ".join(map(str, sorted({*sizes})))
        because = f"ranks have {have} tokens by {cut}, and %{counts} is of {parts} other parts"
        return because, f"how many tokens each rank has: parts={sizes}"
    along = ", ".join(a for a in cut.split_axes(0) if a not in layout.split_axes(0))
    return (
        f"rows of several parts come together along {along}, which splits matrices of experts",
        f"bring these matrices together: fd.ops.set(w).on(mesh, ...) without {along}",
    )
