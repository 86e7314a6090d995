"""Check rows whose number a run counts: whose counts they are, and who may ask for them.

    %n.all: i64[4,8] (ep=R) = ...                      ranks hold the counts of all rows they move
    %c: i64[4,8] (ep=R) = fetch(%n.all, most=64)       one table of numbers
    %r: f32[<=256:%c,16] of [4,8,64,16] (ep=S1) = alloc(%c)
    %h = post alltoall(%s) -> %r ... (ep=S0) => (ep=S1) axis=ep dim=0 to_dim=1 counts=%c

A post sends and receives rows of one table, by its layouts before and after: so what a rank sends
is what another one receives. Where all ranks hold this table, all refuse it or none. Its numbers
say how many rows there are, and nothing else: no extent, index, loop, branch, peer or result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from mdfuse.errors import ProgramError
from mdfuse.extents.expressions import terms
from mdfuse.hir.counted_rows import group_size, is_counted, is_grouped, is_held
from mdfuse.hir.instructions import BLOCKS, POSTS, op_of, received
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.verify import row_orders
from mdfuse.hir.verify.error_report import wrong
from mdfuse.hir.verify.result_layouts import chunk_of, is_alike, plain
from mdfuse.layouts.layout import Replicate, Shard
from mdfuse.layouts.stream import Stream

if TYPE_CHECKING:
    from mdfuse.communication import Communication
    from mdfuse.hir.verify.result_types import Types

#: op -> which of its operands is the fetched value.
_TAKES = {"alloc": 0, "pack_rows": 1, "unpack_rows": 1, "post": 2}
#: Rows of the op table that know counted rows, besides those that work element by element.
_BY_ROWS = (
    "set", "linear", "rows_mm", "rows_mm_grad", "sum_of_rows", "spread_rows", "mask_rows", "slice",
    "cat", "detach", "sum", "slice_grad", "rows_to_experts", "rows_to_parts",
)  # fmt: skip
#: Those of them that take counts, too, or make what has no rows.
_WITH_COUNTS = (
    "rows_mm", "rows_mm_grad", "sum_of_rows", "spread_rows", "mask_rows", *row_orders.TURNS,
)  # fmt: skip

#: Those that read ids as their second operand.
_OF_IDS = ("line_up_rows", "put_back_rows")
_CUTS = ("group_rows", "ungroup_rows")
#: Those that may state a capacity, which a fetch of their counts before them refuses to exceed.
_GROUPS = ("group_rows", "line_up_rows")

#: Instructions that change a layout, or how a value lies, and no element; and such posts.
_MOVES = ("set", "narrow", "chunk", "pad", "own", "permute")
_POSTS_THAT_MOVE = ("Allgather", "Broadcast", "Exchange", "SendRecv", "Gather", "Scatter")
_MAKES_NONE = ("alloc", "launch", *BLOCKS)
_Uses = dict[str, list[Instruction]]
#: Names whose elements are shown, whether transposed, and as which of several writes left them.
_Origins = frozenset[tuple[str, bool, int]]


def check_counts(program: HostProgram) -> None:
    """Raise ProgramError where counted rows, or the numbers of a fetch, are used wrongly."""
    every = [*program.walk()]
    fetches = [i for i in every if i.op == "fetch"]
    is_bounded = any("capacity" in i.kwargs for i in every if i.fn in _GROUPS)
    if not fetches and not is_bounded and not is_counted(program.types.values()):
        return
    makers: _Uses = defaultdict(list)
    readers: _Uses = defaultdict(list)
    for i in every:
        for x in i.reads:
            readers[x].append(i)
        for x in received(i) if i.op in POSTS else i.outputs if i.op not in _MAKES_NONE else ():
            makers[x].append(i)
    _Counts(program, {i.outputs[0]: i for i in fetches}, makers, readers).check(every)


@dataclass(frozen=True, slots=True)
class _Counts:
    """The fetches of a program, by the names of their results."""

    program: HostProgram
    fetches: dict[str, Instruction]
    #: name -> the instructions that compute or receive it; those that read it
    makers: _Uses
    readers: _Uses

    def check(self, every: Sequence[Instruction]) -> None:
        program = self.program
        for name, kind in program.types.items():
            problem = self.kind_problem(kind) if kind.counts is not None else None
            if problem is not None:
                raise self.wrong(None, f"%{name}: {problem}")
        ends = (*program.inputs, *program.outputs, *program.aliases, *program.aliases.values())
        for name in ends:
            if name in self.fetches or self.is_counted(name):
                what = f"%{name} is an input, an output or an alias"
                raise self.wrong(None, what, "pack_rows and unpack_rows make one of the other")
        least: dict[_Origins, int] = {}
        turned = row_orders.by_expert(every, self.is_counted)
        for i in every:
            problem = self.problem(i) or self.origin_problem(i) or self.capacity_problem(i, least)
            problem = problem or row_orders.problem(i, turned, self.is_counted)
            if problem is not None:
                raise self.wrong(i, problem)
            if i.op == "fetch" and "each" in i.kwargs:
                of = self.origins(i.reads[0])
                least[of] = min(i.kwargs["each"], least.get(of, i.kwargs["each"]))

    def capacity_problem(self, i: Instruction, least: Mapping[_Origins, int]) -> str | None:
        """Return why rows may be over their capacity; None: a fetch refuses such counts.

        It does so before rows are grouped, or anywhere, where no host knows how many rows move.
        """
        if i.fn not in _GROUPS or "capacity" not in i.kwargs:
            return None
        stated, of = i.kwargs["capacity"], self.origins(i.reads[2])
        if len(of) == 1 and least.get(of, stated + 1) <= stated:
            return None
        readers = self.readers.get(i.outputs[0], ()) if i.fn == "line_up_rows" else ()
        by = [j.reads[1] for j in readers if j.op == "pack_rows"]
        if by and self.fetches.keys().isdisjoint(by):
            most = self.limit(by[0])
            if most is not None and most <= stated:
                return None
        return (
            f"no fetch before refuses over {stated} rows of a part for an expert by %{i.reads[2]}"
        )

    def wrong(self, i: Instruction | None, what: str, hint: str | None = None) -> ProgramError:
        return wrong(
            self.program,
            i,
            what,
            because="the numbers of a fetch say how many rows of a value there are, and decide "
            "nothing else",
            hint=hint
            or "name one fetched value in the types, the alloc and the post of these rows",
        )

    def is_counted(self, name: object) -> bool:
        kind = self.program.types.get(name) if isinstance(name, str) else None
        return kind is not None and kind.counts is not None

    # -- types -----------------------------------------------------------------------------------

    def kind_problem(self, kind: BufferType) -> str | None:
        """Return why a type of counted rows means nothing; None where it does."""
        counts, layout = kind.counts or "", kind.layout
        fetch, table = self.fetches.get(counts), self.program.types.get(counts)
        if table is None or (fetch is None and _fetch(table, table) is not None):
            return f"no fetch makes %{counts}, by which its rows are counted"
        if fetch is None and len(self.makers.get(counts, ())) > 1:
            return f"%{counts} is written twice, so that its rows are counted by two values"
        if layout is None or len(kind.shape) < 3 or kind.shape[:2] != table.shape:
            return f"%{kind.counts} counts {list(table.shape)}, and its type is {list(kind.shape)}"
        chunk, of = chunk_of(layout), chunk_of(table.placed)
        is_chunk = chunk is not None and (chunk.dim, chunk.op) != (2, None)
        if layout.split_axes(2) or kind.padding is not None or kind.flat or is_chunk:
            return "rows that are counted are not split, padded, flat or in chunks of other dims"
        counted = None if chunk is None else Stream.over("sum", chunk.chunks, chunk.index)
        if of != counted:
            return f"it is {chunk or 'whole'}, and %{counts} counts {of or 'all rows'}"
        if layout.mesh != (table.layout.mesh if table.layout is not None else None):
            return f"%{kind.counts} is on another mesh"
        known = plain(table.placed, 2)
        if not is_held(known.split_axes(0), layout):
            return f"it is {layout}, and of %{counts} ranks hold {known}: gather that before"
        most = fetch.kwargs["most"] if fetch is not None else 0
        bound = layout.local_shape(kind.shape)[2]
        if most > bound:
            return f"a part may have {most} rows by its fetch, and {bound} by its type"
        return self.each_problem(kind)

    def each_problem(self, kind: BufferType) -> str | None:
        """Return why there may be more rows at a place than a type has room for; None: no."""
        if kind.each is None:
            return None
        most = self.limit(kind.counts or "")
        if most is not None and most <= kind.each:
            return None
        what = "any number of" if most is None else str(most)
        return f"{what} rows of a part for an expert may be there, and it has room for {kind.each}"

    # -- instructions ----------------------------------------------------------------------------

    def problem(self, i: Instruction) -> str | None:
        """Return why an instruction may not use what it uses of counts; None where it may."""
        for index in i.indices:
            for term in terms(index):
                if term.kind == "extent" and (
                    self.is_counted(term.name) or term.name in self.fetches
                ):
                    return f"{term} is known only in a run"
        at = _TAKES.get(i.op)
        given = {x for x in i.inputs[at:][:1] if isinstance(x, str)} if at is not None else set()
        others = [x for n, x in enumerate(i.inputs) if x in self.fetches and n != at]
        if i.op == "fetch" and self.fetches[i.outputs[0]] is not i:
            return f"%{i.outputs[0]} is fetched twice"
        if i.op != "fetch" and any(x in self.fetches for x in i.outputs):
            return f"{i} writes numbers of a fetch"
        if i.op != "free" and others:
            return f"{i.fn or i.op} takes %{others[0]}, a fetched value"
        rows = [x for x in (*i.reads, *i.outputs) if self.is_counted(x)]
        if len({self.program.types[x].each for x in rows}) > 1:
            return f"{i.fn or i.op} of rows with other bounds"
        by = {self.program.types[x].counts for x in rows} | given
        if i.op in ("free", "launch"):
            return None
        if len(by) > 1:
            return f"{i.fn or i.op} of rows by " + " and ".join(
                f"%{x}" for x in sorted(map(str, by))
            )
        if i.fn in _OF_IDS or i.fn in _CUTS:
            return self.cut_problem(i) or (self.row_problem(i, rows) if rows else None)
        if i.op in _TAKES:
            return self.taking_problem(i, rows, bool(given)) or self.room_problem(i)
        return self.row_problem(i, rows) if rows else None

    def cut_problem(self, i: Instruction) -> str | None:
        """Return why tokens are cut into other parts than those whose rows are counted."""
        if len(i.reads) < 3:
            return f"{i.fn} of an operand that is no value"
        for name, _, _ in self.origins(i.reads[2]):
            for maker in self.makers.get(name, ()):
                of = maker.kwargs.get("sizes")
                if maker.fn == "counts" and of != i.kwargs.get("sizes"):
                    stated = "as torch.chunk cuts them" if of is None else f"of {[*of]} tokens"
                    return f"{i.fn} cuts tokens otherwise than %{name}, whose parts are {stated}"
        return self.places_problem(i) if len(i.reads) > 3 else None

    def places_problem(self, i: Instruction) -> str | None:
        """Return why places are not those of the rows that an instruction puts there."""
        ids, n, at = i.reads[1:]
        makers = [j for name, _, _ in self.origins(at) for j in self.makers.get(name, ())]
        of = [tuple(map(self.origins, j.reads)) for j in makers if j.fn == "row_places"]
        if len(of) != len(makers) or of != [(self.origins(ids), self.origins(n))]:
            return f"%{at} are not the row_places of %{ids} by %{n}"
        is_cut = makers[0].kwargs.get("sizes") == i.kwargs.get("sizes")
        return None if is_cut else f"%{at} are places in other parts"

    def taking_problem(self, i: Instruction, rows: list[str], is_given: bool) -> str | None:
        if bool(rows) == is_given:
            return self.memory_problem(i) if rows and i.op == "alloc" else None
        if i.op in ("alloc", "post"):
            of = "counts of no rows" if is_given else f"%{rows[0]}, and no counts"
            return f"{i.op} with {of}"
        return f"{i.op} of what no fetch made"

    def room_problem(self, i: Instruction) -> str | None:
        """Return why a group of experts may have more rows than its place; None: it may not."""
        if i.op not in ("pack_rows", "unpack_rows"):
            return None
        types = self.program.types
        names = i.reads[0], i.outputs[0]
        rows, whole = (types[x] for x in sorted(names, key=self.is_counted, reverse=True))
        if not is_grouped(whole, rows):
            return None
        most, room = (k.placed.local_shape(k.shape)[2] for k in (rows, whole))
        if rows.each is not None:
            most = min(most, rows.each * group_size(whole, rows))
        if room >= most:
            return None
        return f"{most} rows of a part for a group may be there, and it has room for {room}"

    def limit(self, counts: str) -> int | None:
        """Return the most rows of a part for an expert: of a fetch, or of counts that are cut."""
        fetch = self.fetches.get(counts)
        of = self.origins(counts if fetch is None else fetch.reads[0])
        limits = [
            i.kwargs["each"]
            for i in self.fetches.values()
            if "each" in i.kwargs and self.origins(i.reads[0]) == of
        ]
        makers = [i for name, _, _ in of for i in self.makers.get(name, ())]
        if len(makers) == len(of) == 1 and makers[0].fn == "clamp":
            limits.append(makers[0].kwargs["max"])
        return min((x for x in limits if type(x) is int), default=None)

    def memory_problem(self, i: Instruction) -> str | None:
        memory = i.kwargs.get("memory", "device")
        if memory == "device" and i.order is None:
            return None
        return f"counted rows in {memory} memory, or in a memory order"

    def row_problem(self, i: Instruction, rows: list[str]) -> str | None:
        """Return why an op does not work row by row; None where it does."""
        op = op_of(i)
        makes = any(map(self.is_counted, i.outputs))
        is_ordered = makes and i.order is not None
        if op is None or not (op.is_elementwise or op.name in _BY_ROWS) or is_ordered:
            return f"{i.fn or i.op} does not work on rows that are counted"
        if op.name in _WITH_COUNTS:
            return None
        if not all(map(self.is_counted, i.outputs)):
            return f"{op.name} of rows that are counted makes such rows"
        shape = self.program.types[rows[0]].shape
        if op.name == "linear":
            is_first = not any(map(self.is_counted, i.inputs[1:]))
            return None if is_first else "linear takes rows as its first operand"
        if not _is_of_columns(i, shape):
            return f"{op.name} of whole rows"
        kinds = [self.program.types.get(x) for x in i.reads if not self.is_counted(x)]
        wide = any(k is not None and len(k.shape) > len(shape) - 3 for k in kinds)
        return f"{op.name} of rows that are counted, and of others" if wide else None

    # -- one value -------------------------------------------------------------------------------

    def origin_problem(self, i: Instruction) -> str | None:
        """Return why an instruction counts its rows by several values; None where it does not.

        Counts of one value are reached from it through changes of its layout alone.
        """
        rows = [self.program.types[x] for x in (*i.reads, *i.outputs) if self.is_counted(x)]
        if not rows or rows[0].counts is None:
            return None
        fetch = self.fetches.get(rows[0].counts)
        table = fetch.reads[0] if fetch is not None else rows[0].counts
        want = self.origins(table)
        for x in self.counting(i, rows[0].shape[:2]):
            if self.origins(x) != want or len(want) != 1:
                return f"{i.fn or i.op} counts by %{x}, and its rows are counted by %{table}"
        return None

    def counting(self, i: Instruction, shape: tuple[int, ...]) -> Iterator[str]:
        """Yield the plain counts by which an instruction goes, or what lines its rows up does."""
        makers = self.makers.get(i.reads[0], ()) if i.op == "pack_rows" else ()
        readers = self.readers.get(i.outputs[0], ()) if i.op == "unpack_rows" else ()
        for j in (i, *makers, *readers):
            # Ids may have the shape of counts, which are behind them; units are walked, too.
            is_call = j.fn and j.op != "launch"
            which = slice(2, 3) if j.fn in _OF_IDS else slice(None)
            for x in j.reads[which] if is_call else ():
                kind = self.program.types.get(x)
                if kind is not None and kind.shape == shape and not kind.dtype.is_floating_point:
                    yield x

    def origins(self, name: str) -> _Origins:
        """Return the values whose elements a name shows, in any layout."""
        seen, todo, ends = set[tuple[str, bool]](), [(name, False)], set[tuple[str, bool, int]]()
        while todo:
            at = x, is_turned = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            makers = self.makers.get(x, ())
            writes = sum(not _is_move(i) for i in makers)
            ends.update((*at, n) for n in range(writes if makers else 1))
            for i in filter(_is_move, makers):
                turns = i.fn == "permute" and tuple(i.kwargs["dims"]) != (0, 1)
                todo.append((i.reads[0], is_turned != turns))
        return frozenset(ends)


def _is_move(i: Instruction) -> bool:
    """Return whether an instruction changes how the elements of a value lie, and no element."""
    if i.comm is not None:
        return i.comm.kind in _POSTS_THAT_MOVE and isinstance(i.inputs[0], str)
    return (i.fn or i.op) in _MOVES


def _is_of_columns(i: Instruction, shape: tuple[int, ...]) -> bool:
    """Return whether a slice, or what is joined, leaves parts, experts and rows as they are."""
    attrs = i.kwargs
    if i.fn == "cat":
        return bool(attrs["dim"] % len(shape) >= 3)
    if i.fn == "sum":
        return bool(attrs.get("keepdim")) and {d % len(shape) for d in attrs["dims"]} == {3}
    if i.fn not in ("slice", "slice_grad"):
        return True
    end = "ends" if i.fn == "slice" else "shape"
    starts, ends, steps = (tuple(attrs[k])[:3] for k in ("starts", end, "steps"))
    is_whole = all(end >= n for end, n in zip(ends, shape, strict=False))
    return is_whole and not any(starts) and set(steps) == {1}


# -- what instructions make --------------------------------------------------------------------


def _fetch(before: BufferType, after: BufferType) -> str | None:
    layout = before.placed
    if len(before.shape) != 2 or before.dtype.is_floating_point or before.dtype.is_complex:
        return "what is fetched is integers, of parts and experts"
    chunk = chunk_of(layout)
    real = plain(layout, 2)
    is_of_parts = {*real.placements} <= {Replicate(), Shard(0)} and not real.reaches
    if not is_of_parts or (chunk is not None and chunk.op != "sum"):
        return f"ranks hold all counts of some parts of what is fetched, not {layout}"
    if (after.shape, after.dtype) != (before.shape, torch.int64):
        return f"it makes i64{list(before.shape)}"
    return None if is_alike(layout, after.placed, 2) else f"it makes {layout}"


def _pack(before: BufferType, after: BufferType) -> str | None:
    return _other_parts(before, after, "takes")


def _unpack(before: BufferType, after: BufferType) -> str | None:
    return _other_parts(after, before, "makes")


def _other_parts(whole: BufferType, rows: BufferType, does: str) -> str | None:
    """Return why a plain buffer does not hold rows part by part; None where it does."""
    (parts, _, *of_rows), grouped = rows.shape, is_grouped(whole, rows)
    want = [parts, *whole.shape[1:3], *of_rows[1:]] if grouped else [parts, *of_rows]
    if [*whole.shape] != want or whole.dtype != rows.dtype:
        return f"it {does} {want} of the same dtype"
    if whole.padding is not None or whole.flat:
        return "parts are neither padded nor flat"
    return _other_groups(whole, rows) if grouped else _other_whole_parts(whole, rows)


def _other_groups(whole: BufferType, rows: BufferType) -> str | None:
    """Return why groups of experts are not split as the experts are; None where they are."""
    layout, n = whole.placed, len(rows.shape)
    axes = plain(layout, n).split_axes(1)
    ranks = prod(layout.mesh.axis_size(a) for a in axes)
    if not is_alike(layout, rows.placed, n):
        return f"groups are {layout}, rows {rows.layout}"
    if axes and ranks != whole.shape[1]:
        return f"{ranks} ranks have experts of their own, and there are {whole.shape[1]} groups"
    return None


def _other_whole_parts(whole: BufferType, rows: BufferType) -> str | None:
    """Return why parts do not hold the rows of all experts, split alike; None where they do."""
    layout, n = whole.placed, len(rows.shape)
    if layout.split_axes(1):
        return f"the rows of a part are on one rank, not {layout}"
    there = plain(layout, n - 1).with_dims({0: 0, **{d - 1: d for d in range(2, n)}})
    return None if is_alike(there, rows.placed, n) else f"parts are {layout}, rows {rows.layout}"


_OF_TYPES: dict[str, Callable[[BufferType, BufferType], str | None]] = {
    "fetch": _fetch,
    "pack_rows": _pack,
    "unpack_rows": _unpack,
}


def check_made(types: Types, i: Instruction) -> None:
    """Check the result of a fetch, or of packing or unpacking rows."""
    after, kinds = types.result_type(i), types.program.types
    before = kinds.get(i.reads[0]) if i.reads else None
    if before is None:
        return  # the flow refuses what nothing computed
    if before.layout is None or after.layout is None:
        raise types.mismatch(i, f"{i.op} is for buffers, not for numbers")
    problem = _OF_TYPES[i.op](before, after)
    if problem is not None:
        raise types.mismatch(i, problem)


def posted_problem(comm: Communication, side: int, kind: BufferType) -> str | None:
    """Return why a buffer is not what a counted post reads (0) or writes (1); None where it is."""
    if comm.kind != "AllToAll" or {comm.dim, comm.to_dim} != {0, 1}:
        return "counted rows go from parts to experts, or back: an all-to-all of the dims 0 and 1"
    layout, n = (comm.source, comm.destination)[side], len(comm.shape)
    if kind.shape != comm.shape or not is_alike(kind.placed, layout, n):
        return f"it is to be {list(comm.shape)} {layout}"
    parts = (comm.source if comm.dim == 0 else comm.destination).local_shape(comm.shape)[0]
    if parts > 1:
        return f"a rank has {parts} parts, whose rows for another rank do not lie together"
    return None
