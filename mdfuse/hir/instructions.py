"""The table of host instructions, whose rows passes, the verifier and plans read.

A row of the op table is an instruction, too, with the same properties (`row_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from mdfuse.ir.attributes import Attr, attr, word
from mdfuse.ir.ops import TABLE, Op

if TYPE_CHECKING:
    from mdfuse.hir.program import Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table: one host instruction.

    Attributes:
        name: its name in programs.
        operands: how many it takes at least, and at most; None: any number.
        takes: the kind of its operands: names of buffers (or of handles, for wait), or also
            numbers and nothing, as the op table takes them.
        attrs: its attributes; there are no others.
        makes: the kind of the name that it defines; None: it defines none.
        results: how many names it defines, where it makes values.
        is_view: the result may share the memory of the operand.
        may_copy: the view has to be a copy where the elements do not lie so, or always where it
            pads; it then reads, and belongs on a stream as any work.
        is_slice: a view whose buffer may be written: a part of a larger one that is filled piece
            by piece. `unexpand` is none: its one element stands for many.
        is_memory: it only makes or drops a buffer.
        is_post: it begins a communication; such alone stand in a group.
        communicates: it belongs to communications: projections for a team keep it.
        is_block: it holds instructions that run as the host decides.
        sets: POST's and a barrier's own settings, which are a `Communication`'s fields.
        write: writes the result of one operand, of the operand's type, into a buffer:
            `write(x, *, out, **attributes)`, where `out` may be `x`. It computes element by
            element, of whole values. None: verifier and plans each have a function for it.
        adds: with all of its operands, it adds to the value in its result's buffer, which costs
            another pass over it.
        is_library: a library's kernels run it, which a compiler calls as well.
    """

    name: str
    operands: tuple[int, int | None] = (0, 0)
    takes: Literal["names", "values"] = "names"
    attrs: tuple[Attr, ...] = ()
    makes: Literal["value", "handle", "stream", "index", "values"] | None = None
    is_view: bool = False
    may_copy: bool = False
    is_slice: bool = False
    is_memory: bool = False
    is_post: bool = False
    communicates: bool = False
    is_block: bool = False
    sets: tuple[Attr, ...] = ()
    results: int = 1
    write: Callable[..., object] | None = None
    adds: bool = False
    is_library: bool = False

    @property
    def is_pure_view(self) -> bool:
        """True if a view reads no element, and so does nothing on a device."""
        return self.is_view and not self.may_copy

    @property
    def indices(self) -> frozenset[str]:
        """The attributes that may be index expressions."""
        return frozenset(a.name for a in self.attrs if a.is_index)


_ONE = (1, 1)
_MEMORY = word("memory", "device", "host", "pinned", "symmetric")
_AXIS = attr("axis", "axis")
_AXES = attr("axes", "axes")
#: The axis of the team of a transfer whose peer is a rank.
_ALONG = attr("along", "axis")
_BACKEND = attr("backend", "axis")
_STREAM = attr("stream", "index")

_ROWS = (
    # -- buffers
    Row(name="alloc", operands=(0, 1), attrs=(_MEMORY, attr("fill", "number")), makes="value",
        is_memory=True),
    Row(name="free", operands=(1, None), is_memory=True),
    Row(name="narrow", operands=_ONE, makes="value", is_view=True, is_slice=True),
    Row(name="chunk", operands=_ONE, makes="value", is_view=True, is_slice=True),
    Row(name="select", operands=_ONE,
        attrs=(attr("dim", "dim", True), attr("index", "index", True)), makes="value", is_view=True,
        is_slice=True),
    Row(name="unexpand", operands=_ONE, attrs=(attr("dims", "dims", True),), makes="value",
        is_view=True),
    Row(name="own", operands=_ONE, makes="value", is_view=True, is_slice=True),
    Row(name="pad", operands=_ONE, attrs=(attr("dim", "dim", True),), makes="value", is_view=True,
        may_copy=True),
    Row(name="pack", operands=_ONE,
        attrs=(attr("dim", "dim", True), attr("to_dim", "dim", True), attr("axis", "axis", True)),
        makes="value"),
    Row(name="term", operands=_ONE, makes="value"),
    Row(name="accumulate", operands=_ONE, makes="value", adds=True),
    Row(name="addmm", operands=(2, 3), makes="value", adds=True, is_library=True),
    # -- rows that are counted
    Row(name="fetch", operands=_ONE, attrs=(attr("most", "extent", True), attr("each", "extent")),
        makes="value"),
    Row(name="pack_rows", operands=(2, 2), makes="value", is_view=True, may_copy=True),
    Row(name="unpack_rows", operands=(2, 2), makes="value", is_view=True,
        may_copy=True),
    # -- communications
    Row(name="post", operands=(2, 3), attrs=(attr("pieces", "count"), word("then", "row_norm")),
        makes="handle", is_post=True, communicates=True,
        sets=(_AXIS, _AXES, attr("dim", "dim"), attr("to_dim", "dim"), _BACKEND)),
    Row(name="send", operands=_ONE, attrs=(attr("to", "index", True), _AXIS, _ALONG, _BACKEND),
        makes="handle", is_post=True, communicates=True),
    Row(name="recv", operands=_ONE, attrs=(attr("from", "index", True), _AXIS, _ALONG, _BACKEND),
        makes="handle", is_post=True, communicates=True),
    Row(name="wait", operands=_ONE, attrs=(attr("piece", "index"),), communicates=True),
    Row(name="barrier", communicates=True, sets=(_AXIS, _BACKEND)),
    Row(name="group_start", communicates=True),
    Row(name="group_end", communicates=True),
    # -- blocks
    Row(name="for", attrs=tuple(attr(name, "index", True) for name in ("start", "stop", "step")),
        makes="index", is_block=True),
    Row(name="next"),
    Row(name="if", attrs=(attr("test", "index", True),), is_block=True),
    Row(name="block", makes="index", is_block=True),
    Row(name="call", attrs=(attr("index", "index", True),)),
    Row(name="launch", operands=(0, None), makes="values"),
    Row(name="return", operands=(0, None)),
    # -- streams
    Row(name="get_stream", makes="stream"),
    Row(name="set_stream", operands=(0, 1), attrs=(_STREAM,)),
    Row(name="sync", operands=(0, 1), attrs=(_STREAM,)),
)  # fmt: skip

#: name -> row; the rows of the op table are not among them.
INSTRUCTIONS: dict[str, Row] = {row.name: row for row in _ROWS}


def _named(flag: str) -> tuple[str, ...]:
    return tuple(row.name for row in _ROWS if getattr(row, flag))


#: Instructions that begin a communication.
POSTS = _named("is_post")
#: Posts that name a peer, outside of communications of a whole team.
TRANSFERS = ("send", "recv")
#: Instructions that belong to communications.
COMMUNICATIONS = _named("communicates")
#: Instructions whose nested ones run, or not, as the host decides.
BLOCKS = _named("is_block")
#: Instructions whose `fn` is a name of their own, and no row of the op table.
NAMED = ("launch", "block", "call")
#: Instructions that only make or drop a buffer.
MEMORY = _named("is_memory")
#: Views that read no element; those of the op table are not among them.
PURE_VIEWS = _named("is_pure_view")
#: Views of the rows that a layout splits further.
CUTS = ("narrow", "chunk")
#: Local ops on existing buffers that are no rows of the op table.
BUFFER_OPS = tuple(r.name for r in _ROWS if r.makes == "value" and not r.is_memory)
#: Instructions written as `%x = name(...)`, besides the rows of the op table.
CALLS = tuple(r.name for r in _ROWS if r.makes in ("value", "handle", "stream") and not r.sets)


def received(i: Instruction) -> tuple[str, ...]:
    """Return the buffer that a post or a receive fills; none on a rank that only sends."""
    if i.op not in ("post", "recv"):
        return ()
    return tuple(x for x in i.inputs[i.op == "post" :][:1] if isinstance(x, str))


def counts_of(i: Instruction) -> str | None:
    """Return the name of the counts by which a post moves rows; None where types say how many."""
    given = i.inputs[2:] if i.op == "post" else ()
    return given[0] if given and isinstance(given[0], str) else None


def only_sends(i: Instruction) -> bool:
    """Return whether an instruction is a post of a rank at which nothing arrives."""
    return i.op == "post" and isinstance(i.inputs[0], str) and not isinstance(i.inputs[1], str)


def op_of(i: Instruction) -> Op | None:
    """Return the row of the op table that an instruction runs; None where it runs none.

    Host units and blocks run none by themselves, though they may have the name of one.
    """
    return TABLE.get(i.fn) if i.op not in NAMED else None


def is_elementwise(i: Instruction) -> bool:
    """Return whether an instruction computes each element of those at the same place."""
    op = op_of(i)
    return op is not None and i.op == op.host and op.is_elementwise


def is_library(i: Instruction) -> bool:
    """Return whether a library's kernels run an instruction, which no compiler makes itself."""
    row = row_of(i)
    return row is not None and row.is_library


def may_share(i: Instruction) -> bool:
    """Return whether the result of an instruction may share the memory of an operand."""
    row = row_of(i)
    return row is not None and row.is_view


def reads_nothing(i: Instruction) -> bool:
    """Return whether an instruction is a view that reads no element: no work for a device."""
    row = row_of(i)
    return i.order is None and row is not None and row.is_pure_view


def is_work(code: Sequence[Instruction]) -> bool:
    """Return whether there are two steps of work, not of a library alone; others need no unit."""
    works = [i for i in code if not reads_nothing(i)]
    return len(works) > 1 and not all(is_library(i) or i.op == "accumulate" for i in works)


def row_of(i: Instruction) -> Row | None:
    """Return the row of an instruction; None where there is no such instruction."""
    if not i.fn or i.op in NAMED:
        return INSTRUCTIONS.get(i.op)
    op = TABLE.get(i.fn)
    return _row_of_op(op.name) if op is not None and i.op == op.host else None


@cache
def _row_of_op(name: str) -> Row:
    op = TABLE[name]
    return Row(
        name=name,
        operands=op.operands,
        takes="values",
        attrs=op.attrs,
        makes="value",
        is_view=op.is_view,
        may_copy=op.may_copy,
        results=op.results,
        is_library=op.is_library,
    )


def is_local(i: Instruction) -> bool:
    """Return whether an instruction computes on its rank: a row of the op table, or a buffer op."""
    return bool(i.fn) and i.op not in NAMED if i.op not in BUFFER_OPS else True
