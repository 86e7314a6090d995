"""Leave out expressions whose result nobody reads: a tensor program has no other effects.

%a: f32[8] (tp=R) = set(%x)                     # neither read nor an output
%b: f32[8] (tp=S0) = add(%x, %x)        ->      %b: f32[8] (tp=S0) = add(%x, %x)
return %b                                       return %b
"""

from __future__ import annotations

from mdfuse.ir.graph import Fusion, leading_to

name = "drop_unread"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion without expressions that nobody reads."""
    return fusion.with_exprs(leading_to(fusion.exprs, fusion.outputs))
