"""Compute while rows are on their way to their experts, and back, what does not need them.

    %r = set(%rows)            to the experts            %r = set(%rows)
    %h = grouped_mm(%r, %up)                             %s = linear(%x, %shared)
    %b = set(%h)               and back            ->    %h = grouped_mm(%r, %up)
    %s = linear(%x, %shared)                             %b = set(%h)
    %y = add(%b, %s)                                     %y = add(%b, %s)

Expressions keep their order but for those around such a set. Those before it that it does not need
go behind it, from the last work that it needs on; those behind it that do not need it go before
those that do, up to where the two meet. So a module's shared experts, and
gradients of matrices, are computed meanwhile. The way there takes half of the products that follow:
the way back brings as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.passes.count_rows import way

name = "fill_ways"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with independent work behind the sets that move counted rows."""
    ways = {e.output: to for e in fusion.exprs if (to := _direction(fusion, e)) is not None}
    if not ways:
        return fusion
    exprs, filled = [*fusion.exprs], {*ways}
    for rows in ways:
        at = next(n for n, e in enumerate(exprs) if e.outputs == (rows,))
        before, after = _before(exprs, at, filled), _after(exprs, at, ways)
        filled.update(x for n in (*before, *after) for x in exprs[n].outputs)
        moved = {at, *before, *after}
        order = [n for n in range(at) if n not in moved] + [at, *before, *after]
        order += [n for n in range(at, len(exprs)) if n not in moved]
        exprs = [exprs[n] for n in order]
    return replace(fusion, exprs=tuple(exprs))


def _direction(fusion: Fusion, e: Expr) -> tuple[str | None, bool] | None:
    """Return by which counts a set moves rows, and whether to their experts; None for others."""
    value = fusion.values[e.outputs[0]]
    if e.op != "set" or not value.is_counted:
        return None
    before, after = fusion.layout(e.reads[0]), fusion.layout(value.name)
    steps = way(before, after, value.shape)
    return (value.rows, bool(after.split_axes(1))) if steps is not None and steps[0] else None


def _is_work(e: Expr) -> bool:
    return TABLE[e.op].is_library


def _before(exprs: Sequence[Expr], at: int, filled: set[str]) -> list[int]:
    """Return the places before a set, of what it does not need, back to work that it needs.

    Work of the experts themselves does not end it: gradients of their matrices come before.
    """
    need, others = {*exprs[at].reads}, list[int]()
    for n in range(at - 1, -1, -1):
        e = exprs[n]
        if not filled.isdisjoint(e.outputs):
            break
        if need.isdisjoint(e.outputs):
            others.insert(0, n)
            continue
        need.update(e.reads)
        if _is_work(e) and e.op != "rows_mm":
            break
    return others if any(_is_work(exprs[k]) for k in others) else []


def _after(exprs: Sequence[Expr], at: int, ways: dict[str, tuple[str | None, bool]]) -> list[int]:
    """Return the places behind a set, of work that does not need it, up to where the two meet."""
    rows, is_there = ways[exprs[at].output]
    dependents, worked, others = {exprs[at].output}, set[str](), list[int]()
    for n in range(at + 1, len(exprs)):
        e = exprs[n]
        if ways.get(e.outputs[0], (rows, not is_there)) != (rows, not is_there):
            return []
        if not dependents.isdisjoint(e.reads):
            if not worked.isdisjoint(e.reads):
                break
            dependents.update(e.outputs)
            continue
        others.append(n)
        if _is_work(e) or not worked.isdisjoint(e.reads):
            worked.update(e.outputs)
    else:
        return []
    work = [k for k, n in enumerate(others) if _is_work(exprs[n])]
    half = -(-len(work) // 2) if is_there else len(work)
    return others[: work[half - 1] + 1]
