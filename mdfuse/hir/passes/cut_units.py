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
Units of loops, and of blocks that not every rank computes, stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from mdfuse.config import Options
from mdfuse.hir.instructions import is_work
from mdfuse.hir.passes.large_values import has_numbers
from mdfuse.hir.passes.repeats import LEAST, keys
from mdfuse.hir.program import HostProgram, Instruction

name = "cut_units"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with its longer units cut."""
    if not has_numbers(program):
        return program
    units = [i for i in program.instructions if i.op == "launch"]
    uses = Counter(_key(program, i) for i in units)
    often = {key: n for key, n in uses.items() if n > 1 and len(key.steps) >= LEAST}
    cuts = dict[int, Sequence[Instruction]]()
    for unit in units if often else ():
        parts = _parts(program, unit, often, uses[_key(program, unit)])
        if parts is not None:
            cuts[id(unit)] = parts
    if not cuts:
        return program
    return replace(program, instructions=replaced(program.instructions, cuts, count()))


class _UnitForm(NamedTuple):
    """A unit without names: its steps, and the places among its results of those it hands on."""

    steps: tuple[Hashable, ...]
    outputs: tuple[int, ...]


def _key(program: HostProgram, unit: Instruction) -> _UnitForm:
    results, outputs = (x for i in unit.body for x in i.outputs), {*unit.outputs}
    places = (n for n, x in enumerate(results) if x in outputs)
    return _UnitForm(tuple(keys(program, unit.body)), tuple(places))


def _parts(
    program: HostProgram, unit: Instruction, often: Mapping[_UnitForm, int], uses: int
) -> list[Instruction] | None:
    """Return what a unit, of which there are so many, is cut into; None: it stays."""
    body = unit.body
    if not is_plain(unit):
        return None
    lengths = {len(k.steps) for k, n in often.items() if len(k.steps) < len(body) and n > uses}
    for length in sorted(lengths, reverse=True):
        for at in (len(body) - length, length):
            parts = part_of(unit, body[:at], body[at:]), part_of(unit, body[at:], ())
            if any(often.get(_key(program, x), 0) > uses for x in parts):
                return [i for x in parts for i in ((x,) if is_work(x.body) else x.body)]
    return None


def is_plain(unit: Instruction) -> bool:
    """Return whether each of its results is written once, into memory of its own."""
    results = [x for i in unit.body for x in i.outputs]
    return len({*results}) == len(results) and {*results}.isdisjoint(unit.inputs)


def part_of(
    unit: Instruction, part: Sequence[Instruction], behind: Sequence[Instruction]
) -> Instruction:
    """Return a part of a unit as one of its own."""
    computed = [x for i in part for x in i.outputs]
    read = {x for i in behind for x in i.reads}.union(unit.outputs)
    taken = dict.fromkeys(x for i in part for x in i.reads if x not in computed)
    outputs = tuple(x for x in computed if x in read)
    source = part[0].source
    return replace(unit, inputs=tuple(taken), outputs=outputs, body=tuple(part), source=source)


def replaced(
    block: Sequence[Instruction], cuts: dict[int, Sequence[Instruction]], numbers: Iterator[int]
) -> tuple[Instruction, ...]:
    """Return a block with other units for some, numbered anew in order."""
    done = list[Instruction]()
    for i in block:
        for j in cuts.get(id(i), (i,)):
            if j.op == "launch":
                done.append(replace(j, fn=f"fused{next(numbers)}"))
            elif j.body or j.orelse:
                body = replaced(j.body, cuts, numbers)
                done.append(replace(j, body=body, orelse=replaced(j.orelse, cuts, numbers)))
            else:
                done.append(j)
    return tuple(done)
