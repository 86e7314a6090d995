"""Part products from the work between them, where that may lie over what dies there.

    launch f(%dy, %v, %g, %w) -> %dx, %dw {         %dm = matmul(%dy, %v)
      %dm = matmul(%dy, %v)                         launch f(%dm, %g) -> %dg {
      %s = sigmoid(%g)                                %s = sigmoid(%g)
      %dg = mul(%dm, %s)                    ->        %dg = mul(%dm, %s)
      %dx = matmul(%dg, %w)                         }
      ...                                           %dx = matmul(%dg, %w)
    }                                               ...

What dies in the unit is then the memory of what is computed of it element by element: the next
pass, `write_over_operands`, says so. Only where nothing but products, norms and views is left: they
have kernels of their own in any case, so that there are as many kernels as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import dataflow, pinned, with_code
from mdfuse.hir.instructions import is_elementwise, is_library, is_work, may_share
from mdfuse.hir.passes.cut_units import is_plain, part_of
from mdfuse.hir.passes.large_values import (
    NORMS,
    has_large,
    is_large,
    lies_as_planned,
)
from mdfuse.hir.program import HostProgram, Instruction

name = "part_products"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with such units parted, where launches are made."""
    if not has_large(program, options):
        return program
    code = list[Instruction]()
    for n, unit in enumerate(program.instructions):
        parts = _parted(unit) if unit.op == "launch" and is_plain(unit) else None
        if parts is None or not _is_less(program, n, *parts):
            code.append(unit)
            continue
        ahead, inside, behind = parts
        code += (*ahead, part_of(unit, inside, behind), *behind)
    return with_code(program, code)


def _is_less(
    program: HostProgram,
    n: int,
    ahead: Sequence[Instruction],
    inside: Sequence[Instruction],
    behind: Sequence[Instruction],
) -> bool:
    """Tell whether a large result of a unit at a position, parted so, may lie over what dies."""
    flow, fixed, unit = dataflow(program), pinned(program), program.instructions[n]
    part, read = part_of(unit, inside, behind), {x for i in behind for x in i.reads}
    names = Counter(map(flow.memory, unit.reads))
    given = (x for x in unit.reads if flow.is_own(x) and names[x] == 1)
    makers = {x: flow.code[flow.bound_at(x)] for x in given if flow.last_use(x) == n}
    products = (i for i in ahead if is_library(i))
    makers |= {x: i for i in products for x in i.outputs if x not in unit.outputs}
    gone = {x for x in part.reads if x in makers and x not in fixed and x not in read}
    places = {flow.types[x] for x in gone if lies_as_planned(flow, x, makers[x])}
    results = (x for x in part.outputs if x in read and x not in fixed)
    return any(is_large(program, x) and flow.types[x] in places for x in results)


def _parted(unit: Instruction) -> Sequence[tuple[Instruction, ...]] | None:
    """Return a unit's work element by element, with products that it reads, and those behind it.

    None: it has other work, or none in front of products.
    """
    inside, others = list[Instruction](), list[Instruction]()
    for i in unit.body:
        if is_elementwise(i) and i.order is None:
            inside.append(i)
        elif is_library(i) or i.fn in NORMS or (may_share(i) and i.order is None):
            others.append(i)
        else:
            return None
    if not is_work(inside):
        return None
    needed, ahead = {x for i in inside for x in i.reads}, list[Instruction]()
    for i in reversed(others):
        if not needed.isdisjoint(i.outputs):
            ahead.append(i)
            needed.update(i.reads)
    behind = [i for i in others if i not in ahead]
    computed = {x for i in inside for x in i.outputs}
    if any(map(is_library, behind)) and computed.isdisjoint(x for i in ahead for x in i.reads):
        return tuple(ahead[::-1]), tuple(inside), tuple(behind)
    return None
