"""Leave out expressions whose result nobody reads: a tensor program has no other effects.

%a: f32[8] (tp=R) = set(%x)                     # neither read nor an output
%b: f32[8] (tp=S0) = add(%x, %x)        ->      %b: f32[8] (tp=S0) = add(%x, %x)
return %b                                       return %b
"""

from __future__ import annotations

from dataclasses import replace

from mdfuse.ir.graph import Expr, Fusion

name = "drop_unread"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion without expressions that nobody reads."""
    live = live_exprs(fusion)
    named = {*fusion.inputs, *(name for e in live for name in e.outputs)}
    values = {n: v for n, v in fusion.values.items() if n in named}
    return replace(fusion, values=values, exprs=live)


def live_exprs(fusion: Fusion) -> tuple[Expr, ...]:
    """Return the expressions that lead to an output."""
    read = {*fusion.outputs}
    live = []
    for expr in reversed(fusion.exprs):
        if not read.isdisjoint(expr.outputs):
            read.update(expr.reads)
            live.append(expr)
    return tuple(reversed(live))
