"""Let a unit write a result over an operand that nobody uses behind it.

    launch fused0(%a, %b) -> %y {                   launch fused0(%a, %b) -> %a {
      %h = mul(%a, %b)                                %h = mul(%a, %b)
      %y = add(%h, 1.0)                    ->         %a = add(%h, 1.0)
    }                                               }
    %z = matmul(%y, %w)                             %z = matmul(%a, %w)

Where a layer is wide, the derivatives of an activation function then need no memory beside its
operands. Each element must be computed from the one that lies there: a compiler may read and write
it in one kernel. Where the unit reads the operand again behind the result, it copies at its end,
which the compiler joins with the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import dataflow, pinned
from mdfuse.hir.emit.sets import copy_into
from mdfuse.hir.instructions import is_elementwise
from mdfuse.hir.passes.large_values import has_units_in_order, is_large, lies_as_planned
from mdfuse.hir.program import HostProgram, Instruction

name = "write_over_operands"

#: What a result is called until it is copied.
_EARLY = ".early"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program whose units write over operands, where launches are made."""
    if not has_units_in_order(program, options):
        return program
    pairs = dict(_pairs(program))
    if not pairs:
        return program
    names = dict[str, str]()
    for result, operand in (pair for at in pairs.values() for pair in at.items()):
        names[result] = names.get(operand, operand)  # which may lie in the memory of another one
    code = enumerate(program.instructions)
    units = [_writing_over(i, pairs[n]) if n in pairs else i for n, i in code]
    inner = {x for n in pairs for i in units[n].body for x in i.outputs} - {*program.types}
    early = {x: program.types[x.removesuffix(_EARLY)] for x in inner}
    types = {x: kind for x, kind in program.types.items() if x not in names}
    new = tuple([i.renamed(names) for i in units])
    return replace(program, instructions=new, types={**types, **early})


def _pairs(program: HostProgram) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the positions of units, each with result -> operand."""
    flow, fixed = dataflow(program), pinned(program)
    for n, unit in enumerate(program.instructions):
        if unit.op != "launch":
            continue
        reads, chosen = dict.fromkeys(unit.reads), dict[str, str]()
        parts = Counter(map(flow.memory, reads))  # the unit may read views of an operand, too
        free = [x for x in reads if parts[x] == 1]
        for y in unit.outputs:
            is_free = y not in fixed and flow.is_own(y) and flow.results(y) == [n]
            if is_free and is_large(program, y):
                over = (x for x in free if flow.may_lie_over(y, x, n))
                over = (x for x in over if _is_by_element(program, unit, y, x))
                makers = ((x, flow.code[flow.bound_at(x)]) for x in over)
                x = next((x for x, i in makers if lies_as_planned(flow, x, i)), None)
                if x is not None:
                    chosen[y] = x
                    free.remove(x)
        if chosen:
            yield n, chosen


def _is_by_element(program: HostProgram, unit: Instruction, result: str, operand: str) -> bool:
    """Return whether each element of a result is computed from the one of an operand there."""
    shape, lying = program.types[result].shape, {operand}
    for i in unit.body:
        if lying.isdisjoint(i.reads) and result not in i.outputs:
            continue
        shapes = {program.types[x].shape for x in i.outputs}
        if not is_elementwise(i) or i.order is not None or shapes != {shape}:
            return False
        lying.update(i.outputs)
    return True


def _writing_over(unit: Instruction, pairs: Mapping[str, str]) -> Instruction:
    """Return a unit that copies results at its end, where it reads what they lie over behind them.

    Args:
        unit: whose results get the names of operands afterwards.
        pairs: result -> operand.
    """
    body = list(unit.body)
    for result, operand in pairs.items():
        at = next(n for n, i in enumerate(body) if result in i.outputs)
        if any(operand in i.reads for i in body[at + 1 :]):
            early = result + _EARLY
            body = [i.renamed({result: early}) for i in body]
            body.append(copy_into(early, result, body[at].source))
    return unit.changed(body=tuple(body))
