"""The buffers that a plan owns, packed into one piece of memory.

    v3 = empty(…)                     b0: bytes 0-4096 of the plan's memory, in use in lines 0-2
    v4 = empty(…)            ->       b1: bytes 4096-8192, in lines 1-4
    v5 = empty(…)                     b2: bytes 0-4096 again, in lines 3-5

A buffer that the caller never sees has the same place in all runs; buffers that are not in use at
the same time share one. Lines decide the lifetime: a buffer is in use until the last line that uses
it, a value that may share its memory, or a communication of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mdfuse.interpreter.garbage import no_collection
from mdfuse.ir.ops import itself
from mdfuse.plan.lines import Line, NewBuffer, SlotRef, in_form
from mdfuse.plan.packing import MANY, LiveBytes, LiveRange, peak, place, place_in, size_of

#: Offsets are multiples of this: torch aligns new buffers so, kernels may count on it.
ALIGNMENT = {"cpu": 64, "cuda": 512}

#: A plan owns its buffers up to this multiple of the memory that torch's allocator would hold at
#: once.
WORTH = 1.0

#: How many heights of the memory are tried as the border above which buffers are left to torch.
TRIED = 64


def lives(lines: Sequence[Line], results: Iterable[int | None]) -> list[LiveRange]:
    """Return the lives of the buffers that lines make, except those that a result may refer to.

    Buffers that torch allocates within a call count, too.
    """
    return _lives(_Flow(lines), results)


def _lives(flow: _Flow, results: Iterable[int | None]) -> list[LiveRange]:
    uses, bases = flow.uses, flow.bases
    returned = {base for slot in results if slot is not None for base in bases.get(slot, ())}
    return [
        LiveRange(
            slot=slot,
            new=line.new,
            nbytes=line.makes if line.new is None else line.new.nbytes,
            start=uses[slot][0][0] if slot in uses else n,
            stop=uses[slot][-1][0] if slot in uses else n,
        )
        for n, line in enumerate(flow.lines)
        if (line.new is not None or line.makes) and (slot := line.targets[0]) not in returned
    ]


class _Flow:
    """The reads and writes of lines, looked up once.

    Attributes:
        lines: the calls.
        refs: for each its `Line.refs`.
        bases: slot -> the slots whose buffers it may refer to, or keep in use.
        uses: for each buffer the lines that use it, each with the slot through which it does.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines, self.refs = lines, [line.refs for line in lines]
        self.bases = _bases(lines)
        self.uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for n in range(len(lines)):
            for slot in self._used(n):
                for base in self.bases.get(slot, ()):
                    self.uses[base].append((n, slot))

    def _used(self, n: int) -> tuple[int, ...]:
        """Return the slots whose buffers a line uses, and those of results that share memory."""
        line = self.lines[n]
        if line.run is None:
            return ()
        return (*self.refs[n], *line.ends, *(line.targets if line.new is None else ()))


def _bases(lines: Sequence[Line]) -> dict[int, frozenset[int]]:
    """Return slot -> the slots whose buffers it may refer to, or keep in use."""
    bases: dict[int, frozenset[int]] = defaultdict(frozenset)
    for line in lines:
        if line.run is None:
            continue
        shared = _together([bases[slot] for slot in line.shares])
        for slot in line.targets:
            is_own = line.new is not None or line.makes
            own_base = frozenset({slot}) if is_own else frozenset()
            bases[slot] = _together([bases[slot], shared, own_base])
    return bases


def _together(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    """Return all slots of some sets: a set itself, which may be large, where the others are empty.

    A list of results shares memory with hundreds of slots, and so does each slot that it fills.
    """
    some = [x for x in sets if x]
    if not some:
        return frozenset()
    first, *others = some
    return first.union(*others) if others else first


def in_place(lines: Sequence[Line], results: Sequence[int | None]) -> tuple[Line, ...]:
    """Turn new buffers that take the place of an operand into that operand.

    This holds for memory owned by the plan or by torch. If the new buffer is made before the
    operand, the operand is computed in it.
    """
    flow = _Flow(lines)
    took = _taken(flow, [life for life in _lives(flow, results) if life.new is not None])
    at = {line.targets[0]: n for n, line in enumerate(lines) if line.new is not None}
    stands = {new: of for new, of in took.items() if at[of] < at[new]}
    stands |= {of: new for new, of in took.items() if at[of] > at[new] and of not in took}
    return tuple(
        Line(run=itself, args=(SlotRef(of),), into=new, shares=(of,), is_view=True)
        if line.new is not None and (of := stands.get(new := line.targets[0])) is not None
        else line
        for line in lines
    )


def _merged(flow: _Flow, living: Sequence[LiveRange]) -> dict[int, int]:
    """Find buffers that share one place, because one takes the place of the other.

    Returns:
        slot -> the slot of the first buffer in the same place; for most buffers their own slot.
    """
    home = {life.slot: life.slot for life in living}
    for slot, of in _taken(flow, living).items():
        home[slot] = home[of]
    return home


def taken(lines: Sequence[Line], living: Sequence[LiveRange]) -> dict[int, int]:
    """Find buffers that take the place of an operand whose last use is the call that fills them.

    The operand of a reduction is in use until its wait, when the sum is complete. A call that also
    reads the operand through a view is excluded: `h + h.T` would read elements that it has just
    written.

    Returns:
        slot -> that of the operand, in the order of the calls.
    """
    return _taken(_Flow(lines), living)


def _taken(flow: _Flow, living: Sequence[LiveRange]) -> dict[int, int]:
    lives_of = {life.slot: life for life in living}
    took, bases, uses = dict[int, int](), flow.bases, flow.uses
    handles = _handles(flow.lines)
    for n, (line, refs) in enumerate(zip(flow.lines, flow.refs, strict=True)):
        for written in (s for s in refs if line.in_place and s in lives_of):
            born = lives_of[written]
            if born.start != n or written in took:
                continue
            alike = [
                s
                for s in refs
                if s in lives_of
                and s != written
                and lives_of[s].new == born.new
                and lives_of[s].start < n
                and not any(s in bases[view] for view in refs if view != s)
                and all(slot == handles[n] for at, slot in reversed(uses[s]) if at > n)
            ]
            if alike:
                took[written] = alike[0]
    return took


def _handles(lines: Sequence[Line]) -> list[int | None]:
    """Return for each line the handle of the post that it belongs to, or of the next one."""
    waited = {slot for line in lines for slot in line.ends}
    handles: list[int | None] = []
    for line in reversed(lines):
        handle = next((slot for slot in line.targets if slot in waited), None)
        is_bound = handle is not None and line.run is not None
        handles.append(handle if is_bound or not handles else handles[-1])
    return handles[::-1]


def _joined(living: Sequence[LiveRange], home: Mapping[int, int]) -> list[LiveRange]:
    """Return one life for each place, from the first use of its buffers to the last."""
    by_home: dict[int, list[LiveRange]] = defaultdict(list)
    for life in living:
        by_home[home[life.slot]].append(life)
    return [
        replace(
            parts[0], slot=slot, start=min(x.start for x in parts), stop=max(x.stop for x in parts)
        )
        for slot, parts in by_home.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """The buffers of a plan that are the same in all runs.

    Attributes:
        buffers: slot -> its buffer, or a view of one.
        lines: the remaining lines of each run.
        numbers: for each of these lines, its number among the lines that were given.
        nbytes: the bytes that the buffers take together.
    """

    buffers: Mapping[int, Tensor]
    lines: tuple[Line, ...]
    numbers: tuple[int, ...]
    nbytes: int


@no_collection()
def owned_by_plan(
    lines: Sequence[Line], results: Sequence[int | None], device: torch.device
) -> Owned:
    """Make the buffers that a plan owns, and the views of them; drop the lines that made them.

    Owned buffers exist all the time, also while torch holds most. Where both together would take
    more than `WORTH` allows, the plan leaves the buffers that lie highest in its memory to torch.

    Args:
        lines: all calls of the plan.
        results: the slots that the plan returns, whose buffers it never owns.
        device: where the buffers lie.
    """
    flow = _Flow(lines)
    living = _lives(flow, results)
    alone = [life for life in living if life.new is not None]
    others = [life for life in living if life.new is None]
    home = _merged(flow, alone)
    placed = _joined(alone, home)
    alignment = ALIGNMENT.get(device.type, 512)
    offsets, limit = place(placed, alignment), WORTH * peak(living) + alignment
    if size_of(placed, offsets) + peak(others) > limit:
        if len(placed) <= MANY:
            offsets = place_in(_lowest_beside(others, placed), alignment)
        placed = _lowest(placed, offsets, alone, others, home, limit)
    if not placed:
        return Owned(buffers={}, lines=tuple(lines), numbers=tuple(range(len(lines))), nbytes=0)
    size = size_of(placed, offsets)
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        places = {x.slot: _at(memory, offsets[x.slot], x.new) for x in placed if x.new}
        buffers = {x.slot: places[home[x.slot]] for x in alone if home[x.slot] in places}
        remaining, numbers = _fold(lines, buffers)
    return Owned(buffers=buffers, lines=remaining, numbers=numbers, nbytes=size)


def _lowest_beside(others: Iterable[LiveRange], places: Iterable[LiveRange]) -> list[LiveRange]:
    """Return places in the order of `place_in`: first those in use while torch holds others."""
    spans = [(x.start, x.stop) for x in others]
    beside = {n for start, stop in spans for n in range(start, stop + 1)}
    apart = {x.slot: beside.isdisjoint(range(x.start, x.stop + 1)) for x in places}
    return sorted(places, key=lambda x: (apart[x.slot], -x.nbytes, x.start))


def _lowest(
    places: Sequence[LiveRange],
    offsets: Mapping[int, int],
    alone: Sequence[LiveRange],
    others: Sequence[LiveRange],
    home: Mapping[int, int],
    limit: float,
) -> list[LiveRange]:
    """Return the places to own: all up to some height, as high as the limit on bytes allows.

    Args:
        places: the places.
        offsets: their offsets.
        alone: the buffers that have a place.
        others: the buffers that torch allocates in any case.
        home: buffer -> its place.
        limit: on the bytes that are held at once, by the plan and by torch.
    """
    ends = {x.slot: offsets[x.slot] + x.nbytes for x in places}
    heights = sorted({*ends.values()}, reverse=True)
    held, left = LiveBytes(), sorted(alone, key=lambda x: ends[home[x.slot]])
    held.add(others)
    # this many find a good one where heights are few, as in equal layers
    for height in heights[:: -(-len(heights) // TRIED) or 1]:
        count = bisect_right(left, height, key=lambda x: ends[home[x.slot]])
        held.add(left[count:])
        del left[count:]
        if height + held.most <= limit:
            return [x for x in places if ends[x.slot] <= height]
    return []


def _at(memory: Tensor, offset: int, new: NewBuffer) -> Tensor:
    """Return the buffer of a form that lies at an offset, in bytes, of a piece of memory."""
    flat = memory[offset : offset + new.nbytes].view(new.dtype)
    return flat.as_strided(new.shape, new.strides)


def _fold(
    lines: Sequence[Line], buffers: dict[int, Tensor]
) -> tuple[tuple[Line, ...], tuple[int, ...]]:
    """Make views of owned buffers once; return the lines that are left for each run."""
    bound = _bound_once(lines)
    remaining = [n for n, line in enumerate(lines) if not _is_made(line, buffers, bound)]
    return tuple(lines[n].without(buffers) for n in remaining), tuple(remaining)


def _is_made(line: Line, buffers: dict[int, Tensor], bound: set[int]) -> bool:
    """Tell whether a line leaves nothing to do in a run.

    Such a line makes or drops an owned buffer, copies one onto itself, or makes a view of one; the
    view is made here and added to `buffers`.
    """
    if line.run is None:
        return all(slot in buffers for slot in line.targets)
    if line.new is not None:
        return line.targets[0] in buffers
    if line.run == "copy_" and all(slot in buffers for slot in line.refs):
        a, b = (in_form(buffers[x.slot], x.form) for x in line.args)
        return bool(a.data_ptr() == b.data_ptr() and a.stride() == b.stride())
    if not line.is_view or not bound.issuperset(line.targets):
        return False
    if not all(slot in buffers for slot in line.refs):
        return False
    slots: dict[int, Any] = dict(buffers)
    line(slots)
    view, base = slots[line.targets[0]], buffers[line.refs[0]]
    if view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        return False  # a copy
    buffers[line.targets[0]] = view
    return True


def _bound_once(lines: Sequence[Line]) -> set[int]:
    """Return the slots that exactly one line binds."""
    count: dict[int, int] = defaultdict(int)
    for line in lines:
        for slot in line.targets if line.run is not None else ():
            count[slot] += 1
    return {slot for slot, n in count.items() if n == 1}
