"""Check one rank's instructions in order: bindings, contents, frees, communications and streams.

The instructions are straight-line: loops are written out and aliases resolved, so that a name is a
buffer. Nothing here knows of other ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mdfuse.errors import ProgramError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify import refusals
from mdfuse.hir.verify.accesses import (
    CALLER,
    Access,
    Clocks,
    OpenPost,
    Storage,
    View,
    conflict,
    missing,
    note_written,
    record,
)
from mdfuse.hir.verify.post_sizes import uses
from mdfuse.hir.verify.terms import Ledger
from mdfuse.hir.verify.view_regions import (
    is_author_s,
    is_slice,
    is_view,
    may_copy,
    pieces_of,
    shape_of,
    whole,
)
from mdfuse.ir.graph import Operand
from mdfuse.layouts.boxes import Box

Steps = dict[str, Callable[[Any, Instruction], None]]


@dataclass
class Flow:
    """A walk over the instructions of one rank that raises ProgramError at the first wrong one.

    Args:
        program: straight-line, with the rank that runs it.
        updated: inputs that an alias writes into.
        has_frees: the program must free each buffer that it binds.
    """

    program: HostProgram
    updated: frozenset[str] = frozenset()
    has_frees: bool = False
    is_streamed: bool = False
    bound: dict[str, View] = field(default_factory=dict)
    #: names of host numbers that are known
    numbers: set[str] = field(default_factory=set)
    freed: dict[str, Instruction] = field(default_factory=dict)
    posted: dict[str, OpenPost] = field(default_factory=dict)
    #: name of a buffer, or of its memory -> how many posts under way use it
    busy: Counter[str] = field(default_factory=Counter)
    waited: dict[str, Instruction] = field(default_factory=dict)
    #: values of get_stream -> the stream
    streams: dict[str, int] = field(default_factory=dict)
    #: names of numbers that the host waited for
    fetched: set[str] = field(default_factory=set)
    clocks: Clocks = field(default_factory=Clocks)
    #: the terms of sums in buffers; None where ranks send none, or another walk follows them
    terms: Ledger | None = None

    @property
    def steps(self) -> Steps:
        """op -> the method for its instructions; all others are local ops."""
        return _STEPS

    def __post_init__(self) -> None:
        program = self.program
        self.is_streamed = any(i.op == "set_stream" for i in program.instructions)
        self.kept = {*program.inputs, *program.outputs}
        self.fetched = {x for i in program.instructions if i.op == "fetch" for x in i.outputs}
        for name in program.inputs:
            layout = program.types[name].layout
            if layout is None:
                self.numbers.add(name)
            elif self.rank in layout.mesh:
                first = [Access(CALLER, 0, None, True, None)] if self.is_streamed else []
                self.bound[name] = View(Storage(name, accesses=first, is_input=True))

    @property
    def rank(self) -> int:
        assert self.program.rank is not None
        return self.program.rank

    def run(self) -> None:
        """Check all instructions.

        Raises:
            ProgramError: the first one that is wrong.
        """
        steps = self.steps
        for i in self.program.instructions:
            steps.get(i.op, Flow.compute)(self, i)
        if not self.program.instructions or self.program.instructions[-1].op != "return":
            self.end(None)

    # -- reading and writing ---------------------------------------------------------------------

    def view(self, name: str, i: Instruction) -> View | None:
        """Return the view that a name stands for; None for a number."""
        view = self.bound.get(name)
        if view is None and name not in self.numbers:
            raise self.unbound(name, i)
        return view

    def incomplete(self, name: str, view: View, i: Instruction) -> ProgramError:
        count = len(view.storage.parts or ())
        return refusals.INCOMPLETE(self.program, i, name=name, count=count)

    def unbound(self, name: str, i: Instruction) -> ProgramError:
        return refusals.unbound(self.program, name, i, self.freed.get(name))

    def read(self, name: str, i: Instruction) -> View | None:
        """Check and note that work on the current stream reads a name; return its view."""
        view = self.view(name, i)
        if view is None:
            return None
        if view.storage.accesses or view.born is not None:
            self.check_order(name, view, False, i)
        if view.storage.written is not None:
            self.check_written(name, view, i)
        if view.storage.parts is not None:
            raise self.incomplete(name, view, i)
        if self.is_streamed:
            self.record(view, False, i)
        return view

    def write(self, name: str, i: Instruction) -> None:
        """Check and note that work on the current stream writes a name; bind it if it is new."""
        view = self.bound.get(name)
        if view is not None:
            self.check_writable(name, view, i)
            self.check_order(name, view, True, i)
            if view.storage.parts is not None:
                raise self.incomplete(name, view, i)
            note_written(view.storage, view.region, self.box(view.storage))
        elif self.program.types[name].layout is None:
            self.numbers.add(name)
            return
        else:
            self.bound[name] = view = View(Storage(name))
        if self.is_streamed:
            self.check_callers(name, i)
            self.record(view, True, i)

    def box(self, storage: Storage) -> Box:
        """Return the box of all of a storage."""
        return whole(self.program.types[storage.name], self.rank)

    def record(self, view: View, is_write: bool, i: Instruction) -> None:
        clocks = self.clocks
        stream = clocks.current
        record(view, Access(stream, clocks.now[stream], view.region, is_write, i))

    def check_written(self, name: str, view: View, i: Instruction) -> None:
        box = self.box(view.storage) if view.region is None else view.region
        lacking = missing(view.storage, box)
        if lacking:
            raise refusals.UNWRITTEN(
                self.program, i, name=name, lacking=lacking, buffer=view.storage.name
            )

    def check_writable(self, name: str, view: View, i: Instruction) -> None:
        """Raise ProgramError where a write would overwrite another value, an input or an output."""
        storage, made_by = view.storage, view.made_by
        if made_by is not None and not is_slice(made_by):
            raise refusals.OVERWRITES_VIEW(self.program, i, made_by, name=name, view=made_by)
        if storage.is_input and storage.name not in self.updated:
            raise refusals.OVERWRITES_INPUT(self.program, i, name=name, buffer=storage.name)
        frozen_by = storage.frozen_by
        if frozen_by is not None and name not in frozen_by.outputs:
            output = frozen_by.outputs[0]
            raise refusals.OVERWRITES_OUTPUT(self.program, i, frozen_by, name=name, output=output)

    # -- order -----------------------------------------------------------------------------------

    def check_order(self, name: str, view: View, is_write: bool, i: Instruction) -> None:
        """Raise ProgramError where an access that this one conflicts with may not be over."""
        clock = self.clocks.now
        other = conflict(view, is_write, clock)
        if other is not None:
            raise self.race(name, other, is_write, i)
        if view.born is not None and clock.get(view.born[0], -1) < view.born[1]:
            birth = Access(*view.born, None, True, view.made_by)
            raise self.race(name, birth, is_write, i)

    def race(self, name: str, other: Access, is_write: bool, i: Instruction) -> ProgramError:
        return refusals.race(self.program, name, i, is_write, self.clocks.current, other)

    def check_callers(self, name: str, i: Instruction) -> None:
        """Raise ProgramError if an output's stream has not waited for the caller's stream.

        An output may be a buffer that the caller passed.
        """
        if name in self.kept and CALLER not in self.clocks.now:
            raise self.race(name, Access(CALLER, 0, None, True, None), True, i)

    # -- local ops -------------------------------------------------------------------------------

    def compute(self, i: Instruction) -> None:
        """Follow a local op: a row of the op table, or a buffer op."""
        output = i.outputs[0]
        if output not in self.bound and is_view(self.program, i):
            self.bind_view(output, i)
            return
        if self.terms is not None:
            self.compute_terms(i, self.terms)
            return
        for x in i.inputs:
            if type(x) is str:
                self.read(x, i)
        for output in i.outputs:
            self.write(output, i)

    def compute_terms(self, i: Instruction, terms: Ledger) -> None:
        """Follow a local op, and the terms of sums in its results."""
        views = {x: view for x in i.reads if (view := self.read(x, i)) is not None}
        held = terms.computed(i, views)
        for output in i.outputs:
            self.write(output, i)
            if output in self.bound:
                terms.note(output, self.bound[output], held)

    def accumulate(self, i: Instruction) -> None:
        """Follow the addition of a chunk's part to a sum, to which each part is added once."""
        (part,), (output,) = i.reads, i.outputs
        source = self.read(part, i)
        held = self.terms.held(part, source, i) if self.terms and source is not None else None
        layout = self.program.types[part].layout
        chunk = layout.stream if layout is not None else None
        view = self.bound.get(output)
        if view is None and output in self.freed:
            raise refusals.ADDED_TO_FREED(self.program, i, self.freed[output], name=output)
        done = (view.storage.parts if view is not None else None) or set()
        if view is not None:
            view.storage.parts = None
        self.write(output, i)
        assert chunk is not None and isinstance(chunk.index, int)
        # in a summary of a loop, one iteration adds the parts of several
        parts: range = i.kwargs.get("parts", range(chunk.index, chunk.index + 1))
        count = i.kwargs.get("of", chunk.count)
        if not done.isdisjoint(parts) or self.bound[output].region is not None:
            raise refusals.ADDED_TWICE(self.program, i, chunk=chunk.index, name=output)
        if self.terms is not None:
            self.terms.add_part(output, self.bound[output], i, held, not done)
        done.update(parts)
        self.bound[output].storage.parts = done if len(done) < count else None

    def bind_view(self, output: str, i: Instruction) -> None:
        """Bind the result of a view op to its operand's memory; others, as counts, are read."""
        source = i.inputs[0]
        for x in filter(lambda x: x not in self.fetched, i.reads[1:]):
            self.read(x, i)
        view = self.view(source, i) if isinstance(source, str) else None
        if view is None or not isinstance(source, str):
            self.numbers.add(output)
            return
        storage, born = view.storage, None
        is_delicate = self.is_streamed or storage.accesses or storage.written is not None
        if output in self.kept or (is_delicate and may_copy(self.program, i)):
            self.read(source, i)
            storage.frozen_by = i if output in self.kept else storage.frozen_by
            if self.is_streamed:
                self.check_callers(output, i)
                born = self.clocks.current, self.clocks.now[self.clocks.current]
        region, dims = shape_of(self.program, view, i)
        is_said = view.is_said or is_author_s(self.program, i)
        self.bound[output] = View(storage, region, dims, i, born, is_said)

    def launch(self, i: Instruction) -> None:
        """Follow the instructions inside a host unit, and forget its own values at the end."""
        for name in i.reads:
            self.view(name, i)
        for inner in i.body:
            run = Flow.accumulate if inner.op == "accumulate" else Flow.compute
            run(self, inner)
        for name in {n for inner in i.body for n in inner.outputs}.difference(i.outputs):
            self.bound.pop(name, None)

    # -- buffers ---------------------------------------------------------------------------------

    def alloc(self, i: Instruction) -> None:
        """Bind a name to a buffer, filled or without contents, unless it has one already."""
        (name,) = i.outputs
        for counts in i.reads:
            self.read(counts, i)
        if name not in self.bound:
            self.bind_new(name, i)
        if i.kwargs.get("fill") is not None:
            self.write(name, i)
            if self.terms is not None:
                self.terms.note(name, self.bound[name], None)

    def bind_new(self, name: str, i: Instruction) -> None:
        """Bind a name to new memory without contents."""
        self.bound[name] = view = View(Storage(name, written={}))
        if self.is_streamed:
            self.check_callers(name, i)
            self.record(view, True, i)

    def free(self, i: Instruction) -> None:
        for name in i.inputs:
            if not isinstance(name, str):  # a buffer that this rank lacks
                continue
            if name in self.kept:
                role = "an input" if name in self.program.inputs else "an output"
                raise refusals.NOT_TO_FREE(self.program, i, name=name, role=role)
            if self.busy[name]:
                self.check_idle(name, i)
            view = self.bound.pop(name, None)
            if view is None and name not in self.numbers:
                raise self.unbound(name, i)
            if view is not None and view.storage.parts is not None and view.storage.name == name:
                raise self.incomplete(name, view, i)
            self.numbers.discard(name)
            self.freed[name] = i

    def check_idle(self, name: str, i: Instruction) -> None:
        """Raise ProgramError where a communication under way uses a buffer that is freed."""
        for posted in self.posted.values():
            if name in posted.names:
                raise refusals.FREED_IN_USE(self.program, i, posted.i, name=name, post=posted.i)

    # -- communications --------------------------------------------------------------------------

    def post(self, i: Instruction) -> None:
        assert i.comm is not None
        source, destination, *_ = i.inputs
        takes, gives = uses(self.program, i, self.rank)
        buffers = [(source, False)] if takes else []
        buffers += [(destination, True)] if gives else []
        buffers += [(x, False) for x in i.inputs[2:] if x not in self.fetched]
        self.begin(i, buffers, i.kwargs.get("pieces") if i.attrs else None)

    def send(self, i: Instruction) -> None:
        self.begin(i, [(i.inputs[0], False)])

    def recv(self, i: Instruction) -> None:
        self.begin(i, [(i.inputs[0], True)])

    def begin(
        self, i: Instruction, buffers: list[tuple[Operand, bool]], count: int | None = None
    ) -> None:
        """Begin a communication, after what is queued on the current stream.

        Args:
            i: the instruction.
            buffers: those that it uses, and whether it writes them.
            count: of its pieces; None where it is one.
        """
        (handle,) = i.outputs
        if handle in self.posted:
            raise refusals.POSTED_TWICE(self.program, i, self.posted[handle].i)
        views = [self.view(name, i) for name in i.reads]
        names = {*i.reads, *(v.storage.name for v in views if v is not None)}
        self.busy.update(names)
        used = [
            (name, view, is_write)
            for name, is_write in buffers
            if isinstance(name, str) and (view := self.access(name, is_write, i)) is not None
        ]
        if self.terms is not None:
            self.terms.begin(i, [(name, view) for name, view, is_write in used if not is_write])
        clock = self.clocks.snapshot(self.clocks.current) if self.is_streamed else {}
        self.posted[handle] = OpenPost(i, clock, pieces_of(self.program, i, used, count), names)

    def access(self, name: str, is_write: bool, i: Instruction) -> View | None:
        """Check that a communication may use a buffer; return its view, None for a number."""
        if not is_write:
            return self.read(name, i)
        view = self.view(name, i)
        if view is not None:
            self.check_writable(name, view, i)
            self.check_order(name, view, True, i)
        return view

    def wait(self, i: Instruction) -> None:
        """Let the current stream go on only after the communication, or a piece of it, is done."""
        handle = i.reads[0]
        posted = self.posted.get(handle)
        if posted is None:
            raise refusals.nothing_to_wait_for(self.program, i, self.waited.get(handle))
        piece = i.kwargs["piece"] if i.attrs else None
        if piece is not None and piece not in posted.pieces:
            raise refusals.no_piece(self.program, i, piece, posted.i)
        for n in [piece] if piece is not None else list(posted.pieces):
            for view, access in posted.pieces.pop(n):
                self.finish(view, access)
        if self.is_streamed:
            self.clocks.join(posted.clock)
        if not posted.pieces:
            del self.posted[handle]
            self.busy.subtract(posted.names)
            self.waited[handle] = i

    def finish(self, view: View, access: Access) -> None:
        """Count what a communication accessed as work of the stream that waited for it."""
        access.who = self.clocks.current
        access.tick = self.clocks.now[access.who]
        if not self.is_streamed:
            view.storage.accesses.remove(access)
        if access.is_write:
            note_written(view.storage, view.region, self.box(view.storage))
            if self.terms is not None and access.by is not None:
                self.terms.finish(access.by, view)

    # -- streams ---------------------------------------------------------------------------------

    def get_stream(self, i: Instruction) -> None:
        self.streams[i.outputs[0]] = self.clocks.current

    def set_stream(self, i: Instruction) -> None:
        self.clocks.current = self.stream(i)

    def sync(self, i: Instruction) -> None:
        other = self.stream(i)
        if other != self.clocks.current:
            self.clocks.join(self.clocks.snapshot(other))

    def stream(self, i: Instruction) -> int:
        """Return the number of the stream that an instruction names."""
        value = i.kwargs["stream"] if i.attrs else i.inputs[0]
        if isinstance(value, str) and value in self.streams:
            return self.streams[value]
        if isinstance(value, int) and value >= 0:
            return value
        raise refusals.no_stream(self.program, i, value)

    # -- the end ---------------------------------------------------------------------------------

    def end(self, i: Instruction | None) -> None:
        """Check that everything is waited for, the outputs are there, and nothing else is left."""
        for posted in self.posted.values():
            raise refusals.never_waited(self.program, posted.i, posted.pieces)
        self.clocks.current = CALLER
        for name in i.reads if i is not None else ():
            if i is not None and self.program.has(name, self.rank):
                self.hand_over(name, i)
        for name in self.program.inputs:
            if name in self.bound and self.is_streamed:
                self.check_joined(name, self.bound[name], i)
        if self.has_frees:
            self.check_leaks()

    def hand_over(self, name: str, i: Instruction) -> None:
        """Check that an output can be the caller's from now on."""
        view = self.read(name, i)
        if view is not None and self.terms is not None:
            self.terms.claim(name, view, i)
        if view is not None and self.is_streamed:
            self.check_joined(name, view, i)

    def check_joined(self, name: str, view: View, i: Instruction | None) -> None:
        """Raise ProgramError where the caller's stream has not waited for all uses of a buffer."""
        other = conflict(view, True, self.clocks.now)
        if other is not None:
            raise refusals.not_joined(self.program, name, i, other)

    def check_leaks(self) -> None:
        for name in self.bound:
            if name not in self.kept:
                binder = next((i for i in self.program.instructions if name in i.outputs), None)
                raise refusals.LEAK(self.program, binder, name=name)


def _nothing(flow: Flow, i: Instruction) -> None:
    """Do nothing: the instruction touches no buffer of the program."""


_STEPS: Steps = {
    "launch": Flow.launch,
    "accumulate": Flow.accumulate,
    "alloc": Flow.alloc,
    "free": Flow.free,
    "post": Flow.post,
    "send": Flow.send,
    "recv": Flow.recv,
    "wait": Flow.wait,
    "barrier": _nothing,
    "group_start": _nothing,
    "group_end": _nothing,
    "get_stream": Flow.get_stream,
    "set_stream": Flow.set_stream,
    "sync": Flow.sync,
    "return": Flow.end,
}
