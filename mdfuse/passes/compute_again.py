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

In a loop, what ranks bring together cuts units. Behind it a value that is cast to more bits is cast
again: logits of 16 bits are in memory till then, not those of 32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mdfuse.errors import BACKWARD, RECOMPUTED
from mdfuse.ir.again import Recomputation
from mdfuse.ir.graph import Expr, Fusion, Operand, Value, fresh_name
from mdfuse.ir.ops import TABLE

name = "compute_again"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with such values computed again; as it is where it has several meshes."""
    if len({v.layout.mesh for v in fusion.values.values() if v.layout is not None}) > 1:
        return fusion
    backward = {id(e) for e in fusion.exprs if e.note in (BACKWARD, RECOMPUTED)}
    made_by = _again(fusion, [e for e in fusion.exprs if id(e) in backward])
    values, exprs = dict(fusion.values), list[Expr]()

    def write(expr: Expr, inputs: tuple[Operand, ...]) -> list[str]:
        """Add an expression anew, behind those that it reads."""
        new = fresh_name(values, f"{expr.output}.again")
        values[new] = replace(values[expr.output], name=new)
        line = expr.source and replace(expr.source, note=RECOMPUTED)
        exprs.append(replace(expr, inputs=inputs, outputs=(new,), source=line))
        return [new]

    later, casts, behind = (
        Recomputation(made_by, write),
        dict[str, Expr](),
        Recomputation({}, write),
    )
    for expr in fusion.exprs:
        is_inside = expr.op != "set" and fusion.values[expr.outputs[0]].stream is not None
        inputs = tuple(map(later, expr.inputs)) if id(expr) in backward else expr.inputs
        inputs = tuple(map(behind, inputs)) if is_inside else inputs
        exprs.append(expr if inputs == expr.inputs else replace(expr, inputs=inputs))
        if _cuts(fusion, expr):
            behind = Recomputation(dict(casts), write)
        elif _is_wide(fusion, expr):
            casts[expr.output] = expr
    is_new = len(exprs) > len(fusion.exprs)
    return replace(fusion, values=values, exprs=tuple(exprs)) if is_new else fusion


def _cuts(fusion: Fusion, expr: Expr) -> bool:
    """Return whether an expression of a loop brings together what ranks have."""
    is_set = expr.op == "set" and fusion.values[expr.output].stream is not None
    return is_set and fusion.layout(expr.reads[0]) != fusion.layout(expr.output)


def _is_wide(fusion: Fusion, expr: Expr) -> bool:
    """Return whether an expression of a loop casts a value to one of more bytes."""
    if expr.op != "cast" or (y := fusion.values[expr.output]).stream is None or not y.shape:
        return False
    x = fusion.values[expr.reads[0]]
    return x.stream is not None and x.dtype.itemsize < y.dtype.itemsize and _is_kept(y)


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
    if row.is_creation or not (row.is_view or row.is_elementwise) or x.name in fusion.returned:
        return False
    is_plain = x.stream is None and bool(x.shape) and _is_kept(x)
    moves = expr.op == "set" and len(layouts) > 1
    return is_plain and not moves and not any(y is not None and y.partial_axes for y in layouts)


def _is_kept(x: Value) -> bool:
    return x.rows is None and not x.is_order_required
