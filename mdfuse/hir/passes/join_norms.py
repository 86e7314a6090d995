"""Cut norms of rows behind small sums over ranks into units of their own, next to the sums.

    %c = post allreduce[sum](%x) -> %s             %c = post allreduce[sum](%x) -> %s then=row_norm
    wait %c                                        wait %c
    launch fused0(%r, %s, %w, %v) -> %t, %q {      launch fused0(%r, %s, %w) -> %t, %y {
      %t = add(%r, %s)                               %t = add(%r, %s)
      %y = rms_norm(%t, %w)                ->        %y = rms_norm(%t, %w)
      %q = linear(%y, %v)                          }
    }                                              %q = linear(%y, %v)

With `Options(backend="symmetric")`, whose ranks on GPUs then compute both in one kernel: rows are
neither written nor read in between, and a kernel less is started. A sum that takes several steps
anyway stays as it is, and so does one behind which something else follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from mdfuse.config import Options, backend_choice
from mdfuse.extents.extent import is_symbolic
from mdfuse.hir.analysis.dataflow import Dataflow, Effects, dataflow
from mdfuse.hir.instructions import is_work
from mdfuse.hir.passes.cut_units import part_of, replaced
from mdfuse.hir.passes.form_fusion_groups import is_grouped
from mdfuse.hir.passes.place_symmetric import SYMMETRIC
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.row_norms import NormChain, SumReaders, is_sum, norm_behind, unit_behind

name = "join_norms"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program whose small sums have the norms behind them in units of their own."""
    choice = backend_choice(options.backend)
    is_asked = options.sums == "auto" and is_grouped(options) and SYMMETRIC in choice.names
    pairs = _pairs(program, choice.usual) if is_asked else {}
    if not pairs:
        return program
    cuts = dict[int, Sequence[Instruction]]()
    for post, unit, parts in pairs.values():
        cuts[id(unit)] = parts
        cuts[id(post)] = (replace(post, attrs=(*post.attrs, ("then", "row_norm"))),)
    return replace(program, instructions=replaced(program.instructions, cuts, count()))


def _pairs(
    program: HostProgram, usual: str
) -> dict[int, tuple[Instruction, Instruction, Sequence[Instruction]]]:
    """Return place of a sum -> its post, the unit behind it, and the parts of that unit."""
    block, flow = program.instructions, dataflow(program)
    readers = SumReaders.of(program)
    pairs = dict[int, tuple[Instruction, Instruction, Sequence[Instruction]]]()
    for n, post in enumerate(block):
        if not is_sum(post) or (post.comm.backend or usual) != SYMMETRIC:  # type: ignore[union-attr]
            continue
        at = unit_behind(block, n)
        if at is None:
            continue
        unit = block[at]
        is_read = readers.are_elsewhere(post, unit)
        chain = norm_behind(program, post, unit, is_read=is_read)
        if chain is not None and _is_small(program, post, chain) and _goes_first(flow, unit, chain):
            pairs[n] = post, unit, _parts(unit, chain)
    return pairs


def _is_small(program: HostProgram, post: Instruction, chain: NormChain) -> bool:
    """Return whether a kernel would make the sum; where a run chooses sizes, that is seen then."""
    comm, kind = post.comm, program.types[chain.result]
    assert comm is not None
    rows = kind.local_shape()[:-1]
    if is_symbolic(rows):
        return True
    members = math.prod(comm.split_mesh.axis_size(axis) for axis in comm.axes)
    return members > 1 and chain.norm.fits(math.prod(rows), members)


def _goes_first(flow: Dataflow, unit: Instruction, chain: NormChain) -> bool:
    """Return whether a chain may go before the other work of its unit."""
    ids, ahead = set(map(id, chain.steps)), Effects()
    for i in unit.body:
        if id(i) not in ids:
            ahead |= flow.effects(i)
        elif ahead.meet(flow.effects(i)):
            return False
    results = [x for i in chain.steps for x in i.outputs]
    return len({*results}) == len(results) and {*results}.isdisjoint(unit.inputs)


def _parts(unit: Instruction, chain: NormChain) -> Sequence[Instruction]:
    """Return the unit of the norm, and what is left of the one that it was in."""
    ids = set(map(id, chain.steps))
    left = tuple(i for i in unit.body if id(i) not in ids)
    first = part_of(unit, chain.steps, left)
    if not left:
        return (first,)
    behind = part_of(unit, left, ())
    return (first, *((behind,) if is_work(behind.body) else left))
