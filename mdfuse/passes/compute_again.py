"""Compute again in the backward what follows, element by element, from values that it reads anyway.

    %s = silu(%g)                                   %s = silu(%g)
    %m = mul(%s, %u)                                %m = mul(%s, %u)
    %y = linear(%m, %w)                             %y = linear(%m, %w)
    %ds = mul(%dm, %u)      # backward       ->     %ds = mul(%dm, %u)      # backward
    %dg = silu_grad(%ds, %g)                        %dg = silu_grad(%ds, %g)
    %dw = matmul(%dy^T, %m)                         %s1 = silu(%g)          # recomputed
                                                    %m1 = mul(%s1, %u)      # recomputed
                                                    %dw = matmul(%dy^T, %m1)

Between forward and backward %g and %u are in memory then, not %s and %m. That is for programs whose
units are compiled: a kernel that reads %g for %dg makes %m1 besides. Bits may differ from those of
the forward only as those of two kernels do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mdfuse.errors import BACKWARD, RECOMPUTED
from mdfuse.ir.graph import Expr, Fusion, Operand, fresh_name
from mdfuse.ir.ops import TABLE

name = "compute_again"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with such values computed again; as it is where it has several meshes."""
    if len({v.layout.mesh for v in fusion.values.values() if v.layout is not None}) > 1:
        return fusion
    backward = {id(e): e for e in fusion.exprs if _note(e) in (BACKWARD, RECOMPUTED)}
    again = _again(fusion, backward.values())
    if not again:
        return fusion
    values, exprs, new = dict(fusion.values), list[Expr](), dict[str, str]()

    def anew(x: Operand) -> Operand:
        """Return a value as the backward reads it, behind the expressions that it takes."""
        if not isinstance(x, str) or x not in again:
            return x
        if x not in new:
            producer = again[x]
            inputs = tuple(map(anew, producer.inputs))
            new[x] = fresh_name(values, f"{x}.again")
            values[new[x]] = replace(values[x], name=new[x])
            line = producer.source and replace(producer.source, note=RECOMPUTED)
            exprs.append(replace(producer, inputs=inputs, outputs=(new[x],), source=line))
        return new[x]

    for expr in fusion.exprs:
        if id(expr) in backward and not again.keys().isdisjoint(expr.reads):
            expr = replace(expr, inputs=tuple(map(anew, expr.inputs)))
        exprs.append(expr)
    return replace(fusion, values=values, exprs=tuple(exprs))


def _again(fusion: Fusion, backward: Iterable[Expr]) -> dict[str, Expr]:
    """Return forward values that are computed again, and views of these, with what makes them.

    Their operands are inputs, values that the backward reads anyway, or such values in turn.
    """
    present = {*fusion.inputs, *(x for e in backward for x in e.reads)}
    later = {x for e in backward for x in e.outputs}
    again: dict[str, Expr] = {}
    for expr in fusion.exprs:
        if not later.isdisjoint(expr.reads):
            later.update(expr.outputs)
        elif expr.reads and _is_free(fusion, expr) and later.isdisjoint(expr.outputs):
            there = again.keys() if TABLE[expr.op].is_view else again.keys() | present
            if there >= {*expr.reads}:
                again[expr.outputs[0]] = expr
    return again


def _is_free(fusion: Fusion, expr: Expr) -> bool:
    """Return whether an expression is a view, or computes each element from others in its place."""
    row, x = TABLE[expr.op], fusion.values[expr.outputs[0]]
    layouts = {fusion.values[name].layout for name in (*expr.reads, *expr.outputs)}
    if row.is_creation or not (row.is_view or row.is_elementwise) or x.name in fusion.outputs:
        return False
    is_plain = x.stream is None and x.rows is None and not x.is_order_required and bool(x.shape)
    moves = expr.op == "set" and len(layouts) > 1
    return is_plain and not moves and not any(y is not None and y.partial_axes for y in layouts)


def _note(expr: Expr) -> str:
    return expr.source.note if expr.source is not None else ""
