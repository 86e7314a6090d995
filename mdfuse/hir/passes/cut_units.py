"""Cut units that begin or end with what is a unit elsewhere, so that it is compiled once.

    launch fused0(%ids, %w) {                      launch fused0(%ids, %w) {
      %x = embedding(%ids, %w)                       %x = embedding(%ids, %w)
      %n = rms_norm(%x)                            }
      ...                                   ->     launch fused1(%x) {
    }                                                %n = rms_norm(%x)
    launch fused1(%y) {                              ...
      %m = rms_norm(%y)                            }
      ...                                          launch fused2(%y) { ... }
    }

The first layer of a model is so in a unit with what is before it. Cut off it takes its operands
from memory, as the other layers do, and equal units are compiled once. Only what is a unit more
often than the longer one, and takes as long to compile as a repetition (`repeats.LEAST`), counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from mdfuse.config import Options
from mdfuse.hir.instructions import row_of
from mdfuse.hir.passes.repeats import LEAST, keys
from mdfuse.hir.program import HostProgram, Instruction

name = "cut_units"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with its longer units cut."""
    units = [i for i in program.walk() if i.op == "launch"]
    uses = Counter(tuple(keys(program, i.body)) for i in units)
    often = {key: n for key, n in uses.items() if n > 1 and len(key) >= LEAST}
    cuts = dict[int, Sequence[Instruction]]()
    for unit in units if often else ():
        parts = _parts(program, unit, often, uses)
        if parts is not None:
            cuts[id(unit)] = parts
    if not cuts:
        return program
    numbers = count()
    return replace(program, instructions=_replaced(program.instructions, cuts, numbers))


def _parts(
    program: HostProgram,
    unit: Instruction,
    often: dict[tuple[Hashable, ...], int],
    uses: Counter[tuple[Hashable, ...]],
) -> list[Instruction] | None:
    """Return what a unit is cut into; None: it stays."""
    body, mine = unit.body, uses[tuple(keys(program, unit.body))]
    if not _is_plain(unit):
        return None
    lengths = sorted({len(k) for k, n in often.items() if len(k) < len(body) and n > mine})
    for length in reversed(lengths):
        for at, part in ((len(body) - length, body[-length:]), (length, body[:length])):
            if often.get(tuple(keys(program, part)), 0) > mine:
                return [*_unit(unit, body[:at], body[at:]), *_unit(unit, body[at:], ())]
    return None


def _is_plain(unit: Instruction) -> bool:
    """Return whether each of its results is written once, into memory of its own."""
    results = [x for i in unit.body for x in i.outputs]
    return len({*results}) == len(results) and {*results}.isdisjoint(unit.inputs)


def _unit(
    unit: Instruction, part: Sequence[Instruction], behind: Sequence[Instruction]
) -> Iterator[Instruction]:
    """Yield a part of a unit as one of its own, or as it is where it has no two steps of work."""
    computed = [x for i in part for x in i.outputs]
    if sum(map(_works, part)) < 2:
        yield from part
        return
    read = {x for i in behind for x in i.reads}.union(unit.outputs)
    taken = dict.fromkeys(x for i in part for x in i.reads if x not in computed)
    outputs = tuple(x for x in computed if x in read)
    source = part[0].source
    yield replace(unit, inputs=tuple(taken), outputs=outputs, body=tuple(part), source=source)


def _works(i: Instruction) -> bool:
    row = row_of(i)
    return i.order is not None or row is None or not row.is_pure_view


def _replaced(
    block: Sequence[Instruction], cuts: dict[int, Sequence[Instruction]], numbers: Iterator[int]
) -> tuple[Instruction, ...]:
    """Return a block with other units for some, numbered anew in order."""
    done = list[Instruction]()
    for i in block:
        for j in cuts.get(id(i), (i,)):
            if j.op == "launch":
                done.append(replace(j, fn=f"fused{next(numbers)}"))
            elif j.body or j.orelse:
                body = _replaced(j.body, cuts, numbers)
                done.append(replace(j, body=body, orelse=_replaced(j.orelse, cuts, numbers)))
            else:
                done.append(j)
    return tuple(done)
