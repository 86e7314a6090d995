"""Compiled launches free an operand right after its last read.

    v5, v6, = launch(v1, v2)        ->    v7 = listed(v1, v2)
    v1 = None                             v1 = None
                                          v5, v6, = launch(v7)    # empties the list on its way
                                          v7 = None

Otherwise operands stay alive until the call returns, beside all results: in a backward, activations
beside the gradients that are computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from mdfuse.plan.compiled_functions import emptying
from mdfuse.plan.context import Context, PlanStep
from mdfuse.plan.lines import Line, SlotRef, drop

#: How many lines behind a launch may drop its operands.
_FAR = 100


def freeing(steps: Sequence[PlanStep], context: Context) -> list[PlanStep]:
    """Return steps whose launches free operands that are dropped right behind them."""
    done = []
    for n, step in enumerate(steps):
        if step.op == "launch":
            later = chain.from_iterable(steps[k].lines for k in range(n + 1, len(steps)))
            step = replace(step, lines=tuple(_freeing(step.lines, [*islice(later, _FAR)], context)))
        done.append(step)
    return done


def listed(*operands: Any) -> list[Any]:
    """Return operands in a list of their own."""
    return [*operands]


def _freeing(lines: Sequence[Line], later: Sequence[Line], context: Context) -> Iterator[Line]:
    """Yield the lines of a launch, which others follow."""
    for n, line in enumerate(lines):
        taking = emptying(line.run) if callable(line.run) else None
        gone = _dropped([*lines[n + 1 :], *later]).intersection(line.refs) if taking else set()
        if not gone:
            yield line
            continue
        given = context.new_slot()
        yield Line(run=listed, args=line.args, into=given, shares=line.refs)
        yield drop(*sorted(gone))
        yield replace(line, run=taking, args=(SlotRef(given),))
        yield drop(given)


def _dropped(lines: Iterable[Line]) -> set[int]:
    """Return the slots that are dropped before anything is computed, and not read before."""
    gone, read = set[int](), set[int]()
    for line in lines:
        if line.run is None:
            gone.update(slot for slot in line.targets if slot not in read)
        elif line.is_view:
            read.update(line.refs)
        else:
            break
    return gone
