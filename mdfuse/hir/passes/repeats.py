"""Cut local work into units of one size: where it repeats, as layers do, into equal ones.

A compiler takes seconds for a unit of a hundred ops and minutes for one of thousands, and it
compiles equal units once. So a long run of instructions is cut between its repetitions:

    norm linear gelu linear norm linear gelu linear    ->    (norm linear gelu linear) twice

The borders are a period apart, where the fewest values are read across them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from mdfuse.hir.analysis.normal_form import NormalForm, Stretch, stretches
from mdfuse.hir.program import HostProgram, Instruction

#: Instructions up to which nothing is cut: a layer of a transformer has some sixty, its backward
#: twice as many.
LIMIT = 256

#: Instructions that a unit of what repeats has at least.
LEAST = 24

#: A value whose last reader is further behind its computation is none of one repetition.
_FAR = LIMIT // 2

#: Distances between equal instructions that are tried as periods: the most frequent ones.
_TRIED = 16


def pieces(program: HostProgram, run: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """Cut instructions into runs of at most `LIMIT`, equal ones where they repeat."""
    if len(run) <= LIMIT:
        return [run]
    live = _live(run)
    borders = [at for at in _borders(keys(program, run), live) if 0 < at < len(run)]
    if not borders:
        return _of_one_size(run, live)
    # What is in front of a repetition and behind it may hold another one.
    parts = (run[start:stop] for start, stop in pairwise([0, *borders, len(run)]))
    return [piece for part in parts for piece in pieces(program, part)]


def _of_one_size(run: Sequence[Instruction], live: Sequence[int]) -> list[Sequence[Instruction]]:
    """Cut instructions among which nothing repeats, where few values are read across the border."""
    starts = [0]
    while len(run) - starts[-1] > LIMIT:
        starts.append(_narrowest(live, starts[-1] + LIMIT // 2, starts[-1] + LIMIT + 1))
    return [run[start:stop] for start, stop in pairwise([*starts, len(run)])]


def keys(program: HostProgram, run: Sequence[Instruction]) -> list[Hashable]:
    """Return keys that are equal for instructions that do the same with values from as far back.

    A value that is read far behind its computation, such as the rate of an optimizer, counts as one
    from outside: its distance differs in each repetition.
    """
    writer, keys, last = _Distances(program), list[Hashable](), _last_reads(run)
    for n, i in enumerate(run):
        writer.position = n
        keys.append(writer.instruction(i))
        near = (x for x in i.outputs if last.get(x, n) - n <= _FAR)
        writer.computed_at.update(dict.fromkeys(near, n))
    return keys


def _last_reads(run: Sequence[Instruction]) -> dict[str, int]:
    """Return the position of the last instruction that reads a name."""
    return {x: n for n, i in enumerate(run) for x in i.reads}


@dataclass(slots=True)
class _Distances(NormalForm):
    """Instructions with the distance to where an operand is computed in the place of its name."""

    position: int = 0
    computed_at: dict[str, int] = field(default_factory=dict)

    def operand(self, name: str) -> Hashable:
        at = self.computed_at.get(name)
        return "outside" if at is None else self.position - at, self.type_of(name)

    def result(self, name: str) -> Hashable:
        return self.type_of(name)


def _live(run: Sequence[Instruction]) -> list[int]:
    """Return for each border how many values that are computed before it are read behind it."""
    last = _last_reads(run)
    steps = [0] * (len(run) + 1)
    for n, i in enumerate(run):
        for x in i.outputs:
            if last.get(x, n) > n:
                steps[n + 1] += 1
                steps[last[x] + 1] -= 1
    return [*accumulate(steps)]


def _borders(keys: Sequence[Hashable], live: Sequence[int]) -> list[int]:
    """Return the borders of what repeats most; none where nothing does."""
    longest: dict[int, Stretch] = {}  # period -> the first of its longest stretches
    for stretch in stretches(keys, tried=_TRIED):
        known = longest.setdefault(stretch.period, stretch)
        if known.length < stretch.length:
            longest[stretch.period] = stretch
    repeated = [s for p, s in longest.items() if p <= LIMIT]
    if not repeated:
        return []
    start, period, length = max(repeated, key=lambda s: (s.length, s.start, -s.period))
    period *= -(-LEAST // period)
    first = _narrowest(live, start, start + period)
    return list(range(first, start + length + 1, period))


def _narrowest(live: Sequence[int], start: int, stop: int) -> int:
    """Return the border from `start` on, before `stop`, over which the fewest values are read."""
    return min(range(start, min(stop, len(live))), key=lambda n: (live[n], n))
