"""Cut norms of rows behind small sums over ranks into units of their own, next to the sums.

    %c = post allreduce[sum](%x) -> %s             %c = post allreduce[sum](%x) -> %s then=row_norm
    wait %c                                        wait %c
    launch fused0(%r, %s, %w, %v) -> %t, %q {      launch fused0(%r, %s, %w) -> %t, %y {
      %t = add(%r, %s)                               %t = add(%r, %s)
      %y = rms_norm(%t, %w)                ->        %y = rms_norm(%t, %w)
      %q = linear(%y, %v)                          }
    }                                              %q = linear(%y, %v)

With `Options(backend="symmetric")`, whose ranks on GPUs then compute both in one kernel: rows are
neither written nor read in between, and a kernel less is started. Buffers that the kernel writes
are made before it. A sum that takes several steps anyway stays as it is, and so does one behind
which something else follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    pairs = [*_pairs(program, choice.usual)] if is_asked else []
    if not pairs:
        return program
    cuts = dict[int, Sequence[Instruction]]()
    for pair in pairs:
        cuts.update({id(i): () for i in pair.new})
        cuts[id(pair.unit)] = pair.parts
        joined = replace(pair.post, attrs=(*pair.post.attrs, ("then", "row_norm")))
        cuts[id(pair.post)] = (*pair.new, joined)
    return replace(program, instructions=replaced(program.instructions, cuts, count()))


@dataclass(frozen=True, slots=True)
class _Pair:
    """A sum and the norm behind it.

    Attributes:
        post: of the sum.
        new: the buffers for results that are made behind the post.
        unit: behind its wait.
        parts: of the unit: the norm, and what is left.
    """

    post: Instruction
    new: Sequence[Instruction]
    unit: Instruction
    parts: Sequence[Instruction]


def _pairs(program: HostProgram, usual: str) -> Iterator[_Pair]:
    """Yield the sums and norms that one kernel may compute."""
    flow, readers = dataflow(program), SumReaders.of(program)
    for n, post in enumerate(program.instructions):
        if not is_sum(post) or (post.comm.backend or usual) != SYMMETRIC:  # type: ignore[union-attr]
            continue
        new, block = _made_first(program.instructions, n)
        at = unit_behind(block, len(new))
        if at is None:
            continue
        unit = block[at]
        is_read = readers.are_elsewhere(post, unit)
        chain = norm_behind(program, post, unit, is_read=is_read)
        if chain is not None and _is_small(program, post, chain) and _goes_first(flow, unit, chain):
            yield _Pair(post, new, unit, _parts(unit, chain))


def _made_first(
    block: Sequence[Instruction], at: int
) -> tuple[Sequence[Instruction], Sequence[Instruction]]:
    """Return the buffers for results of the next unit, and it behind these, the post and others."""
    end = next((n for n in range(at, len(block)) if block[n].op == "launch"), at)
    results, behind = {*block[end].outputs}, block[at : end + 1]
    new = [i for i in behind if i.op == "alloc" and not results.isdisjoint(i.outputs)]
    return new, [*new, *(i for i in behind if i not in new)]


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
    return True


def _parts(unit: Instruction, chain: NormChain) -> Sequence[Instruction]:
    """Return the unit of the norm, and what is left of the one that it was in."""
    ids = set(map(id, chain.steps))
    left = tuple(i for i in unit.body if id(i) not in ids)
    first = part_of(unit, chain.steps, left)
    if not left:
        return (first,)
    behind = part_of(unit, left, ())
    return (first, *((behind,) if is_work(behind.body) else left))
