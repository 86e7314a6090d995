"""Leave out expressions whose result nobody reads: a tensor program has no other effects.

%a: f32[8] (tp=R) = set(%x)                     # neither read nor an output
%b: f32[8] (tp=S0) = add(%x, %x)        ->      %b: f32[8] (tp=S0) = add(%x, %x)
return %b                                       return %b
"""

from __future__ import annotations

from mdfuse.ir.graph import Expr, Fusion

name = "drop_unread"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion without expressions that nobody reads."""
    return fusion.with_exprs(live_exprs(fusion))


def live_exprs(fusion: Fusion) -> tuple[Expr, ...]:
    """Return the expressions that lead to an output."""
    read = {*fusion.outputs}
    live = []
    for expr in reversed(fusion.exprs):
        if not read.isdisjoint(expr.outputs):
            read.update(expr.reads)
            live.append(expr)
    return tuple(reversed(live))
