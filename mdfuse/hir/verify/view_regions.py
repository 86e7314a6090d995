"""Views while a program is verified: the regions of storages that view ops take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from mdfuse.hir.instructions import row_of
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.verify.accesses import PENDING, Access, View
from mdfuse.ir.dims import reshape_groups
from mdfuse.layouts.boxes import Box, Interval, nth_chunk, relative

#: The dims of a view whose order within its region is not known.
OPAQUE = (-1,)


@lru_cache(maxsize=4096)
def whole(kind: BufferType, rank: int) -> Box:
    """Return the box of all of a buffer on a rank, in the buffer's own coordinates."""
    return tuple((0, n) for n in kind.local_shape(rank))


def cut(view: View, box: Box, intervals: Iterable[tuple[int, Interval]]) -> Box | None:
    """Return the region of the storage that a part of a view covers.

    Args:
        view: what is cut.
        box: all of its storage.
        intervals: (dim of the view, interval of it).
    """
    if view.dims == OPAQUE:
        return view.region
    region = list(box if view.region is None else view.region)
    for d, (start, stop) in intervals:
        at = d if view.dims is None else view.dims[d]
        first = region[at][0]
        region[at] = (first + start, first + stop)
    return tuple(region)


@dataclass(frozen=True, slots=True)
class ViewBinding:
    """A view op about to bind its result: the view that it reads, and the types of the buffers."""

    view: View
    storage: BufferType
    source: BufferType
    result: BufferType
    rank: int
    i: Instruction

    def part(self, intervals: Iterable[tuple[int, Interval]]) -> Box | None:
        return cut(self.view, whole(self.storage, self.rank), intervals)

    def dims(self, ndim: int) -> tuple[int, ...]:
        return tuple(range(ndim)) if self.view.dims is None else self.view.dims


Shape = tuple[Box | None, tuple[int, ...] | None]


def _same(c: ViewBinding) -> Shape:
    return c.view.region, c.view.dims


def _permute(c: ViewBinding) -> Shape:
    if c.view.dims == OPAQUE:
        return c.view.region, OPAQUE
    before, n = c.dims(len(c.source.shape)), len(c.source.shape)
    return c.view.region, tuple(before[d % n] for d in c.i.kwargs["dims"])


def _narrow(c: ViewBinding) -> Shape:
    if c.result.runs(c.rank).keys() - c.source.runs(c.rank).keys():  # two runs, side by side
        return c.view.region, OPAQUE
    box = relative(c.result.box(c.rank), c.source.box(c.rank))
    return c.part(enumerate(box)), c.view.dims


def _window(c: ViewBinding) -> Shape:
    starts, ends = c.i.kwargs["starts"], c.i.kwargs["ends"]
    extents = c.source.local_shape(c.rank)
    if len(extents) != len(starts):  # columns of rows that a run counts
        return c.view.region, OPAQUE
    stops = [max(s, min(e, n)) for s, e, n in zip(starts, ends, extents, strict=True)]
    if min(starts, default=0) < 0 or any(step != 1 for step in c.i.kwargs["steps"]):
        return c.view.region, OPAQUE
    return c.part(enumerate(zip(starts, stops, strict=True))), c.view.dims


def _select(c: ViewBinding) -> Shape:
    shape = c.source.local_shape(c.rank)
    dim = c.i.kwargs["dim"] % len(shape)
    index = 0 if shape[dim] == 1 else c.i.kwargs["index"] % max(shape[dim], 1)
    region = c.part([(dim, (index, index + 1))])
    if c.view.dims == OPAQUE:
        return region, OPAQUE
    return region, tuple(d for at, d in enumerate(c.dims(len(shape))) if at != dim)


def _unexpand(c: ViewBinding) -> Shape:
    return c.part([(d, (0, 1)) for d in c.i.kwargs["dims"]]), c.view.dims


#: view op -> the region and the dims of its result; results of other view ops are opaque.
SHAPES: dict[str, Callable[[ViewBinding], Shape]] = {
    "set": _same,
    "own": _same,
    "permute": _permute,
    "narrow": _narrow,
    "chunk": _narrow,
    "slice": _window,
    "select": _select,
    "unexpand": _unexpand,
}


def is_view(program: HostProgram, i: Instruction) -> bool:
    """Return whether an instruction makes a view of its operand, if its result has no buffer yet.

    A pad is one where this rank's part is as long as it has to be already.
    """
    row = row_of(i)
    if row is None or not row.is_view or i.order is not None:
        return False
    if i.op != "pad":
        return True
    before, after = (program.types.get(x) for x in (*i.reads, *i.outputs))
    if before is None or after is None:
        return True  # an unbound operand is refused where it is read
    return before.local_shape(program.rank) == after.local_shape(program.rank)


def is_author_s(program: HostProgram, i: Instruction) -> bool:
    """Return whether a `set` gives its operand another layout, on the author's word."""
    if i.fn != "set" or not i.reads:
        return False
    before, after = (program.types[x].layout for x in (i.reads[0], i.outputs[0]))
    if before is None or after is None or before is after:
        return False
    return before.varying_axes != after.varying_axes


def is_slice(i: Instruction) -> bool:
    """Return whether an instruction makes a view that may be written."""
    row = row_of(i)
    return row is not None and row.is_slice


def shape_of(program: HostProgram, view: View, i: Instruction) -> Shape:
    """Return the region of the storage that a view op takes, and how its dims lie there."""
    shape, source = SHAPES.get(i.fn or i.op), i.inputs[0]
    if shape is None:
        return view.region, OPAQUE
    assert isinstance(source, str) and program.rank is not None
    types = program.types
    kinds = types[view.storage.name], types[source], types[i.outputs[0]]
    return shape(ViewBinding(view, *kinds, program.rank, i))


def may_copy(program: HostProgram, i: Instruction) -> bool:
    """Return whether a view op may have to copy, which reads: a reshape that merges dims may."""
    if i.fn != "reshape":
        row = row_of(i)
        return row is not None and row.may_copy
    names = (*i.reads[:1], *i.outputs)
    before, after = (program.types[x].local_shape(program.rank) for x in names)
    return any(sum(before[d] != 1 for d in old) > 1 for old, _ in reshape_groups(before, after))


def pieces_of(
    program: HostProgram, i: Instruction, used: list[tuple[str, View, bool]], count: int | None
) -> dict[int | None, list[tuple[View, Access]]]:
    """Return what each piece of a communication accesses from now on, until its wait.

    Args:
        program: straight-line, with its rank.
        i: what begins it.
        used: the name of each buffer, its view, and whether it is written.
        count: of the pieces; None where it arrives at once.
    """
    pieces: dict[int | None, list[tuple[View, Access]]] = {}
    for n in (None,) if count is None else range(count):
        pieces[n] = []
        for name, view, is_write in used:
            part = view if count is None else _rows(program, name, view, count, n or 0)
            access = Access(PENDING, 0, part.region, is_write, i)
            part.storage.accesses.append(access)
            pieces[n].append((part, access))
    return pieces


def _rows(program: HostProgram, name: str, view: View, count: int, n: int) -> View:
    """Return the n-th of the pieces in which a buffer arrives: a chunk of its outermost dim."""
    assert program.rank is not None
    extents = program.types[name].local_shape(program.rank)
    if not extents:
        return view
    box = whole(program.types[view.storage.name], program.rank)
    rows = nth_chunk((0, extents[0]), count, n)
    return View(view.storage, cut(view, box, [(0, rows)]), view.dims)
