"""Reduce sums of microbatches as they were added up, where they are reduced in that dtype anyway.

    %y = round_terms(%y.sum, dtype=bf16)
    %y.wide = widen(%y, dtype=f32)               ->
    %c = post allreduce[sum](%y.wide) -> %z          %c = post allreduce[sum](%y.sum) -> %z

`Options.reduce_dtype` widens what is reduced; 16-bit parts of a batch are added up in f32. So a sum
is rounded once, behind both. A wide value that has to lie in another memory order than the sum is
a copy of the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mdfuse.config import Options
from mdfuse.hir.program import HostProgram, Instruction

name = "keep_wide"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program without roundings that are taken back."""
    sums = {i.outputs[0]: i.reads[0] for i in program.walk() if i.fn == "round_terms"}
    instead = {
        i.outputs[0]: sums[i.reads[0]]
        for i in program.walk()
        if i.fn == "widen"
        and i.reads[0] in sums
        and program.types[i.outputs[0]] == program.types[sums[i.reads[0]]]
    }
    if not instead:
        return program
    moved = [i.outputs[0] for i in program.walk() if _has_own_order(program, i, instead)]
    reads = Counter(x for i in program.walk() if i.op != "launch" for x in i.reads)
    casts = (i for i in program.walk() if i.reads and not instead.keys().isdisjoint(i.outputs))
    back = Counter(i.reads[0] for i in casts)
    unread = {x for x, n in back.items() if reads[x] == n and x not in program.outputs}
    copies = {x: instead.pop(x) for x in moved}
    gone = instead.keys() | unread
    block = _renamed(program.instructions, instead, copies, gone)
    types = {n: kind for n, kind in program.types.items() if n not in gone}
    return replace(program, instructions=block, types=types)


def _has_own_order(program: HostProgram, i: Instruction, instead: Mapping[str, str]) -> bool:
    """Return whether a wide value must lie in another memory order than the sum does."""
    if i.fn != "widen" or i.outputs[0] not in instead or i.order is None:
        return False
    known = program.orders.get(program.root(instead[i.outputs[0]]))
    return known is None or known.lies != i.order


def _renamed(
    block: Sequence[Instruction],
    instead: Mapping[str, str],
    copies: Mapping[str, str],
    gone: set[str],
) -> tuple[Instruction, ...]:
    """Return instructions that read sums instead of their casts, or copies of them.

    Args:
        block: the instructions.
        instead: name -> the sum that is read in its place.
        copies: casts that become copies -> the sum.
        gone: names that nothing makes any more.
    """
    code = []
    for i in block:
        if i.fn == "widen" and i.outputs[0] in copies:
            i = replace(i, op="set", fn="set", inputs=(copies[i.outputs[0]],), attrs=())
        inputs = tuple(instead.get(x, x) if isinstance(x, str) else x for x in i.inputs)
        body, orelse = (_renamed(b, instead, copies, gone) for b in (i.body, i.orelse))
        if i.op == "launch":
            bound = {n for j in body for n in j.outputs}
            needed = {x for j in body for x in j.reads} - bound
            inputs = tuple(dict.fromkeys((*(x for x in inputs if x in needed), *sorted(needed))))
            i = replace(i, outputs=tuple(n for n in i.outputs if n in bound))
        elif not gone.isdisjoint(i.outputs):
            continue
        if body or i.op != "launch":
            code.append(replace(i, inputs=inputs, body=body, orelse=orelse))
    return tuple(code)
