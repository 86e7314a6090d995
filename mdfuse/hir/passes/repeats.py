"""Cut local work into units of one size: where it repeats, as layers do, into equal ones.

A compiler takes seconds for a unit of a hundred ops and minutes for one of thousands, and equal
units are compiled once. So a long run of instructions is cut at the border of what repeats in it:

    norm linear gelu linear norm linear gelu linear    ->    (norm linear gelu linear) twice

The borders are a period apart; those are taken over which the fewest values are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise

from mdfuse.hir.program import HostProgram, Instruction

#: Instructions up to which nothing is cut: a layer of a transformer has some sixty, its backward
#: twice as many.
LIMIT = 256

#: Instructions that a unit of what repeats has at least.
LEAST = 24

#: Distances between equal instructions that are tried as periods: the most frequent ones.
_TRIED = 16


def pieces(program: HostProgram, run: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """Cut instructions into runs of at most `LIMIT`, equal ones where they repeat."""
    if len(run) <= LIMIT:
        return [run]
    keys, live = _keys(program, run), _live(run)
    borders = [0, *_borders(keys, live), len(run)]
    cuts: list[Sequence[Instruction]] = []
    for start, stop in pairwise(borders):
        while stop - start > LIMIT:
            at = _narrowest(live, start + LIMIT // 2, start + LIMIT + 1)
            cuts.append(run[start:at])
            start = at
        if start < stop:
            cuts.append(run[start:stop])
    return cuts


def _keys(program: HostProgram, run: Sequence[Instruction]) -> list[Hashable]:
    """Return what is equal for instructions that do the same with values from as far back."""
    made: dict[str, int] = {}
    numbers: dict[Hashable, int] = {}
    found: list[Hashable] = []
    for n, i in enumerate(run):
        operands = tuple(
            (n - made[x] if x in made else "outside", program.types.get(x))
            if isinstance(x, str)
            else (type(x).__name__, x)
            for x in i.inputs
        )
        results = tuple(program.types.get(x) for x in i.outputs)
        key = (i.op, i.fn, i.attrs, i.order, operands, results)
        found.append(numbers.setdefault(key, len(numbers)))
        made.update(dict.fromkeys(i.outputs, n))
    return found


def _live(run: Sequence[Instruction]) -> list[int]:
    """Return for each border how many values that were made before are read behind it."""
    last = {x: n for n, i in enumerate(run) for x in i.reads}
    steps = [0] * (len(run) + 1)
    for n, i in enumerate(run):
        for x in i.outputs:
            if last.get(x, n) > n:
                steps[n + 1] += 1
                steps[last[x] + 1] -= 1
    live, found = 0, []
    for step in steps:
        live += step
        found.append(live)
    return found


def _borders(keys: Sequence[Hashable], live: Sequence[int]) -> list[int]:
    """Return the borders of what repeats most; none where nothing does."""
    best = max((_repeated(keys, p) for p in _periods(keys)), default=(0, 0, 0))
    covered, start, period = best[0], best[1], -best[2]
    if not covered:
        return []
    period *= -(-LEAST // period)
    first = _narrowest(live, start, start + period)
    return list(range(first, start + covered + 1, period))


def _periods(keys: Sequence[Hashable]) -> list[int]:
    """Return the most frequent distances between equal instructions that follow each other."""
    last: dict[Hashable, int] = {}
    distances: Counter[int] = Counter()
    for n, key in enumerate(keys):
        if key in last:
            distances[n - last[key]] += 1
        last[key] = n
    return [p for p, _ in distances.most_common(_TRIED) if p <= LIMIT]


def _repeated(keys: Sequence[Hashable], period: int) -> tuple[int, int, int]:
    """Return the longest stretch in which a period repeats: its length, start, and -period."""
    best, run = (0, 0, -period), 0
    for n in range(len(keys) - period):
        run = run + 1 if keys[n] == keys[n + period] else 0
        if run >= period:
            best = max(best, (run + period, n + 1 - run, -period), key=lambda x: x[0])
    return best


def _narrowest(live: Sequence[int], start: int, stop: int) -> int:
    """Return the border from `start` on, before `stop`, over which the fewest values are read."""
    return min(range(start, min(stop, len(live))), key=lambda n: (live[n], n))
