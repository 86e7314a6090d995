"""Write out a projection with many iterations of a loop as one that has all their chunks.

    for %i in 0..512 {                          %y.i@1: … chunk(0,512,0) = chunk(%y)
      %y.i: … chunk(0,512,%i) = chunk(%y)       %y.i@1 = exp(%x.i@1)
      %y.i = exp(%x.i)                    ->    %y.i@2: … chunk(0,[1,511],1) = chunk(%y)
    }                                           %y.i@2 = exp(%x.i@2)

A summary keeps some iterations as they are, and writes each run of equal ones as one iteration. If
the verifier accepts the summary, it accepts the program with all iterations written out:

Lemma 1 (runs). Iterations with the same branches and chunk sizes run the same instructions, so the
    loop is cut into runs of such iterations. The first iteration of each run is kept: its entry
    state may differ. An iteration leaves the streams and names as the next one finds them, so all
    later entry states are equal. Iteration 0 and the first after a change of branch get another
    kept iteration behind them, unless the body sets all streams and binds all names itself.
Lemma 2 (distance). Where `next` divides the body into k parts, only iterations less than k apart
    interleave. k iterations of each run are kept, so each pair of iterations is represented by a
    pair in the summary at the same distance, capped at k.
Lemma 3 (order). The summary is a subsequence of the instructions that run. Accesses that it orders
    are ordered in the program, too, and by Lemmas 1 and 2 each pair of accesses has a
    representative in the summary.
Lemma 4 (sums). The parts of chunks that a run adds up are added by its representative, all at once.
Lemma 5 (chunks). In each iteration, a buffer from outside of the loop is used as a whole, or as a
    chunk that no other iteration of the run uses. The representative reads and writes the union of
    these chunks, so it conflicts with every access that one of its iterations conflicts with.

Where a condition is not sure, there is no summary, and all iterations are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from mdfuse.communication import Communication
from mdfuse.errors import MdfuseError
from mdfuse.extents.expressions import Calc, Term, resolve, terms
from mdfuse.extents.linear import Linear, linear
from mdfuse.hir.analysis.dataflow import shared_operand, storage
from mdfuse.hir.instructions import TRANSFERS, op_of, row_of
from mdfuse.hir.once import once
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.rank.unroll import LIMIT, Turn, Unrolled
from mdfuse.hir.rank.unrolled import WAITS
from mdfuse.hir.verify.result_layouts import chunk_of
from mdfuse.layouts.boxes import nth_chunk
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.stream import Stream

#: Loops of fewer iterations are written out as they are.
FEWEST = 4


class _Unfit(Exception):
    """A loop has no summary: all its iterations are written out."""


def folded(program: HostProgram) -> FoldedProgram | None:
    """Return the summary of a projection; None where a condition of the lemmas is not sure.

    It is None, too, where writing it out is an error, which is then raised without a summary.
    """
    writer = _Folded(program)
    try:
        summary = writer.write()
        for _, run in WAITS:
            summary = run(summary)
    except (_Unfit, MdfuseError):
        return None
    if len(writer.code) + writer.saved >= LIMIT:
        return None
    values = {row.name: getattr(summary, row.name) for row in fields(HostProgram)}
    return FoldedProgram(**values, repeated=frozenset(map(id, writer.repeated)))


@dataclass(frozen=True, kw_only=True)
class FoldedProgram(HostProgram):
    """A projection written out, with one iteration for each run of equal ones.

    Attributes:
        repeated: ids of the instructions that represent several iterations.
    """

    repeated: frozenset[int]


@once
def _ambiguous(program: HostProgram) -> frozenset[str]:
    """Return the names that several views may bind to different memory, and views of such names."""
    views, memories = [*_views(program)], storage(program)
    names = {n for n, of in views if memories.get(n, n) != memories.get(of, of)}
    added = names
    while added:
        added = {n for n, of in views if of in added} - names
        names |= added
    return frozenset(names)


def _views(program: HostProgram) -> Iterator[tuple[str, str]]:
    """Yield (name, operand) where a name may be bound to an operand's memory.

    A name that an instruction outside of all blocks has bound is written instead. Instructions of a
    named block run at its calls, so names that are bound before the block may be unbound there.
    """
    root, inside = program.root, (j for i in program.instructions for j in (*i.body, *i.orelse))
    freed = {root(n) for top in inside for i in top.walk() if i.op == "free" for n in i.reads}
    bound = {*map(root, program.inputs)}
    for top in program.instructions:
        for i in top.walk():
            operand = shared_operand(i)
            if operand is not None:
                is_here, results = top.op != "block", map(root, i.outputs)
                yield from ((n, root(operand)) for n in results if not (is_here and n in bound))
        if top.op == "free":
            bound.difference_update(map(root, top.reads))
        elif not top.body:
            bound.update(n for n in map(root, top.outputs) if n not in freed)


@dataclass
class _Folded(Unrolled):
    #: how many instructions were left out
    saved: int = 0
    #: those that represent several iterations
    repeated: list[Instruction] = field(default_factory=list)
    #: in the representative of several iterations: the loop's index, and its last number
    last: tuple[str, int] | None = None
    #: a loop that only switches streams -> its instructions, written out
    switches: dict[Hashable, list[Instruction]] = field(default_factory=dict)
    #: layout -> its number of a chunk, by the index of the current loop
    _which: dict[Layout, Linear | None] = field(default_factory=dict)

    def loop(self, i: Instruction) -> None:
        """Write out a loop; equal loops that only switch streams are written out once."""
        if self.env or not self.only_switches(i):
            super().loop(i)
            return
        key = i.outputs, i.attrs, i.body
        known = self.switches.get(key)
        if known is not None:
            self.count(len(range(*(i.kwargs[k] for k in ("start", "stop", "step")))), i)
            self.code += known
            return
        before = len(self.code)
        super().loop(i)
        self.switches[key] = self.code[before:]

    def only_switches(self, loop: Instruction) -> bool:
        """Return whether a short loop switches streams alone, to the same ones everywhere."""
        if any(j.op not in ("set_stream", "sync") or j.indices for j in loop.body):
            return False
        bounds = [v for _, v in loop.attrs]
        if any(type(v) is not int for v in bounds) or max(map(abs, bounds)) >= FEWEST:
            return False
        return self.names.keys().isdisjoint(x for j in loop.body for x in j.reads)

    def turns(self, loop: Instruction, numbers: range) -> list[range]:
        """Keep as many iterations of each run as the loop has parts; Lemma 2."""
        if len(numbers) < FEWEST:
            return [*super().turns(loop, numbers)]
        runs, first = list[range](), len(loop.parts)
        for run in self.runs(loop, numbers):
            runs += super().turns(loop, run[:first])
            runs += [run[first:]] if len(run) > first else []
        return runs

    def part(self, loop: Instruction, part: tuple[Instruction, ...], turn: Turn) -> None:
        """Write out a part, and note the instructions that represent several; Lemma 3."""
        before = len(self.code)
        if len(turn.numbers) > 1:
            self.last = loop.outputs[0], turn.numbers[-1]
        super().part(loop, part, turn)
        if self.last is not None:
            self.code[before:] = [replace(i) for i in self.code[before:]]  # new ids
            self.repeated += self.code[before:]
        self.last = None
        self.saved += (len(turn.numbers) - 1) * (len(self.code) - before)

    def type_now(self, kind: BufferType) -> BufferType:
        """Return a type with all chunks of a run; Lemma 5."""
        at_first, layout = super().type_now(kind), kind.layout
        if self.last is None or kind is at_first or layout is None or layout.stream is None:
            return at_first
        if layout.stream.op is not None:
            return at_first  # see `at`
        spanned = self.spanning(layout, kind.shape)
        return at_first if spanned is None else replace(at_first, layout=spanned)

    def spanning(self, layout: Layout, shape: Sequence[int]) -> Layout | None:
        """Return a layout with the chunks of a run as one; None: all have one chunk. Lemma 5."""
        assert self.last is not None and layout.stream is not None
        index, last = self.last
        chunk, first = layout.stream, self.env[index]
        numbers = []
        for n in (first, last):
            self.env[index] = n
            numbers.append(resolve(chunk.index, self.known))
        self.env[index] = first
        low, high = sorted(numbers)  # type: ignore[type-var]
        if (low == high and first != last) or not isinstance(low, int) or not isinstance(high, int):
            return None
        if not isinstance(chunk.chunks, int) or chunk.zigzag or high - low != last - first:
            raise _Unfit
        key = layout, (*shape, low, high)
        if (known := self._layouts.get(key)) is not None:
            return known
        whole = layout.with_stream(None)
        rows = whole.local_shape(tuple(shape), self.program.rank)[chunk.dim]
        start, stop = (nth_chunk((0, rows), chunk.chunks, n) for n in (low, high))
        lengths = start[0], stop[1] - start[0], rows - stop[1]
        spanned = whole.with_stream(Stream(chunk.dim, lengths, chunk.rotate, 1))
        self._layouts[key] = spanned
        return spanned

    def posted(self, comm: Communication) -> Communication:
        """Return a communication of all chunks of a run; Lemma 5."""
        first = super().posted(comm)
        if self.last is None or first == comm:
            return first
        source, destination = (
            (k.stream is not None and self.spanning(k, comm.shape)) or layout
            for k, layout in ((comm.source, first.source), (comm.destination, first.destination))
        )
        return replace(first, source=source, destination=destination)

    def at(self, name: str, kind: BufferType, i: Instruction) -> BufferType:
        """Return a type; that of a part of a sum has the chunk lengths of the operands. Lemma 4."""
        at_first = super().at(name, kind, i)
        if at_first is kind or self.last is None:
            return at_first
        chunk = chunk_of(kind.layout) if kind.layout is not None else None
        if chunk is None or chunk.op is None:
            return at_first
        operands = (self.types[self.name(x)].layout for x in i.reads if self.name(x) in self.types)
        streams = [k.stream for k in operands if k is not None and k.stream is not None]
        lengths = {x.chunks for x in streams if isinstance(x.chunks, tuple)}
        if len(lengths) != 1:
            raise _Unfit
        stream = Stream.over(chunk.op, lengths.pop(), 1)
        return replace(at_first, layout=at_first.placed.with_stream(stream))

    def renamed(self, i: Instruction) -> Instruction:
        """Add to an instruction the parts of sums, or the peers, of all iterations; Lemma 4."""
        new = super().renamed(i)
        if i.op in TRANSFERS and self.last is not None:
            return new.changed(attrs=(*new.attrs, ("turns", self.turned(i))))
        if i.op != "accumulate" or self.last is None:
            return new
        layout = self.program.types[self.program.root(i.reads[0])].placed
        assert layout.stream is not None
        index, last = self.last
        parts, count = range(self.env[index], last + 1), layout.stream.count
        return new.changed(attrs=(("parts", parts), ("of", count)))

    def turned(self, i: Instruction) -> tuple[int, int] | None:
        """Return by how much the peer's place grows per iteration, and the number of iterations.

        None where this is not known.
        """
        assert self.last is not None
        index, last = self.last
        layout = self.program.types[self.program.root(i.reads[0])].layout
        axis, peer = i.kwargs.get("axis"), i.kwargs["to" if i.op == "send" else "from"]
        count, term = last - self.env[index] + 1, Term("index", index)
        if term not in terms(peer):
            return 0, count
        if axis is None or layout is None:
            return None
        place = linear(resolve(peer, self.before(term)), layout.mesh.axis_size(axis))
        is_known = place is not None and all(t == term for t, _ in place.factors)
        return (place.factor(term), count) if is_known and place is not None else None

    def is_of_part(self, i: Instruction) -> bool:
        return i.op not in TRANSFERS and super().is_of_part(i)

    # -- the runs of a loop ----------------------------------------------------------------------

    def runs(self, loop: Instruction, numbers: range) -> list[range]:
        """Return the runs of equal iterations; single ones where this is not sure. Lemma 1."""
        inside = [j for i in loop.body for j in i.walk()]
        index = Term("index", loop.outputs[0])
        self._which.clear()
        try:
            if numbers.step != 1 or any(i.op == "for" for i in inside):
                raise _Unfit
            starts, is_anew = {numbers.start}, self.begins_anew(loop)
            if not is_anew:
                starts.add(numbers.start + 1)
            done: set[tuple[BufferType, Linear]] = set()
            for name, which in self.chunks(index, inside).items():
                kind = self.program.types[name]
                if (kind, which) not in done:
                    done.add((kind, which))
                    starts.update(self.borders(kind, which, index, numbers))
            for i in inside:
                _check(i, index)
                starts.update(self.branches(i, index, is_anew) if i.op == "if" else ())
        except _Unfit:
            return [numbers[at : at + 1] for at in range(len(numbers))]
        borders = [*sorted(n for n in starts if n in numbers), numbers.stop]
        return [range(a, b) for a, b in pairwise(borders)]

    def begins_anew(self, loop: Instruction) -> bool:
        """Return whether the first iteration has the entry state of all later ones; Lemma 1.

        Each part of the body sets its stream first, and each name that it binds belongs to one
        iteration, or has a buffer before the loop.
        """
        if not all(map(self.sets_stream, loop.parts)):
            return False
        bound, root = {*self.dependent(loop), *(self.bound - self.left)}, self.program.root
        return bound.issuperset(root(n) for i in loop.body for j in i.walk() for n in j.outputs)

    def sets_stream(self, part: tuple[Instruction, ...]) -> bool:
        """Return whether a part of a loop does no work before it sets its stream."""
        outputs = self.program.outputs
        work = (i for i in part if i.op != "chunk" or i.outputs[0] in outputs)
        first = next(work, None)
        return first is not None and first.op == "set_stream"

    def chunks(self, index: Term, inside: list[Instruction]) -> dict[str, Linear]:
        """Return the buffers that are another chunk in each iteration, and its number; Lemma 5."""
        root, chunks = self.program.root, dict[str, Linear]()
        for name in {root(n) for i in inside for n in (*i.outputs, *i.reads)}:
            which = self.which(name, index)
            if which is not None:
                chunks[name] = which
        if not chunks.keys().isdisjoint(self.bound - self.left):
            raise _Unfit
        cut: dict[str, Linear] = {}
        known = {*chunks.values()}
        for i in inside:
            for layout in (i.comm.source, i.comm.destination) if i.comm is not None else ():
                which, chunk = self.which_of(layout, index), chunk_of(layout)
                if which is not None and chunk is not None and chunk.op is not None:
                    raise _Unfit
                if which is not None and which not in known:
                    raise _Unfit  # no buffer is that chunk: where these begin anew is not known
            row = row_of(i)
            if row is not None and row.is_view and i.reads:
                self.check_view(i, row.is_slice, chunks, cut)
        return chunks

    def check_view(
        self, i: Instruction, is_slice: bool, places: dict[str, Linear], cut: dict[str, Linear]
    ) -> None:
        """Raise _Unfit where views take several chunks of one buffer, or parts of one; Lemma 5."""
        of, made_of = (self.program.root(n) for n in (i.reads[0], i.outputs[0]))
        which, types = places.get(made_of), self.program.types
        if of not in places:
            memory = storage(self.program).get(of, of)
            if which is None or not is_slice:
                return  # it shows all of the buffer, whatever the iteration
            is_known = i.op == "chunk" and of not in _ambiguous(self.program)
            if not is_known or cut.setdefault(memory, which) != which:
                raise _Unfit
            return
        before, after = (_extent(types[n]) for n in (of, made_of))
        if is_slice or places[of] != which or before != after:
            raise _Unfit

    def which(self, name: str, index: Term) -> Linear | None:
        """Return the number of the chunk that a buffer is; None where all iterations have one."""
        kind = self.program.types.get(name)
        if kind is None or kind.layout is None:
            return None
        chunk = self.which_of(kind.layout, index)
        if chunk is not None and kind.padding is not None:
            raise _Unfit
        return chunk

    def which_of(self, layout: Layout, index: Term) -> Linear | None:
        """Return the number of a layout's chunk; None where all iterations have one."""
        if layout not in self._which:
            self._which[layout] = self.chunk_in(layout, index)
        return self._which[layout]

    def chunk_in(self, layout: Layout, index: Term) -> Linear | None:
        """Compute `which_of`."""
        chunk = chunk_of(layout)
        if chunk is None or index not in terms(chunk.index):
            return None
        known = resolve(chunk.index, self.before(index))
        if chunk.op is not None and known != index:
            raise _Unfit
        is_there = known == index or (
            isinstance(known, Calc) and known.op == "mod" and known.right == chunk.chunks
        )
        if not is_there or not isinstance(chunk.chunks, int):
            raise _Unfit
        number = linear(known, chunk.chunks)
        if number is None or number.factor(index) not in (1, chunk.count - 1):
            raise _Unfit
        if len(number.factors) != 1:
            raise _Unfit
        return number

    def before(self, index: Term) -> Callable[[Term], int | None]:
        """Return a lookup of the terms that are known before the loop over an index."""
        return lambda term: self.known(term) if term != index else None

    def borders(
        self, kind: BufferType, which: Linear, index: Term, numbers: range
    ) -> Iterator[int]:
        """Yield the iterations at which chunks wrap around, or have another size; Lemma 1."""
        count, constant = which.modulus, which.constant
        assert kind.placed.stream is not None
        if kind.placed.stream.op is not None:
            return  # a part of as many elements as all others
        shape = kind.placed.with_stream(None).local_shape(kind.shape, self.program.rank)
        rows = shape[kind.placed.stream.dim]
        if type(rows) is not int:
            raise _Unfit
        full = rows // -(-rows // count) if rows else count  # how many are as long as the first
        is_up = which.factor(index) == 1
        places = (0, full, full + 1) if is_up else (count - 1, full - 1, full)
        for place in (n for n in places if 0 <= n < count):
            turn = place - constant if is_up else constant - place
            first = numbers.start + (turn - numbers.start) % count
            yield from range(first, numbers.stop, count)

    def branches(self, i: Instruction, index: Term, is_anew: bool) -> Iterator[int]:
        """Yield the iterations at which an `if` may begin to take the other branch; Lemma 1.

        Yield also the ones behind, unless each iteration has the same entry state (`is_anew`).
        """
        test = resolve(i.kwargs["test"], self.before(index))
        if index not in terms(test):
            return
        if not isinstance(test, Calc) or test.op not in _COMPARISONS:
            raise _Unfit
        sides = linear(test.left), linear(test.right)
        if sides[0] is None or sides[1] is None:
            raise _Unfit
        apart = sides[0].plus(sides[1], -1)
        factor = apart.factor(index)
        if abs(factor) != 1 or len(apart.factors) != 1:
            raise _Unfit
        equal = -apart.constant * factor
        yield from (equal, equal + 1)
        if not is_anew:
            yield equal + 2


_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


def _extent(kind: BufferType) -> int | None:
    """Return the extent of the dim of a buffer that is taken in chunks; None: parts are added."""
    assert kind.placed.stream is not None
    if kind.placed.stream.op is not None:
        return None
    return kind.shape[kind.placed.stream.dim]


def _check(i: Instruction, index: Term) -> None:
    """Raise _Unfit where an instruction may do something else in each iteration; Lemma 1.

    `get_stream` may yield another stream in every second iteration. The peer of a transfer may
    change: the flow of one rank does not depend on it, and another check matches transfers.
    """
    if i.op == "get_stream" or (index.name in i.inputs and op_of(i) is None):
        raise _Unfit
    if not i.indices:
        return
    attrs = () if i.op in (*TRANSFERS, "if") else i.attrs
    numbers = [x for x in i.inputs if not isinstance(x, str)] if op_of(i) is None else []
    if any(index in terms(x) for x in (*(v for _, v in attrs), *numbers)):
        raise _Unfit
