"""A host loop over stream chunks, under construction: its chunks, and the code around it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from mdfuse.errors import LoweringError
from mdfuse.extents.expressions import Index, Term, calc
from mdfuse.hir.emit.sets import Emitter, local, value_type
from mdfuse.hir.program import BufferType, Instruction
from mdfuse.ir.graph import Expr, Fusion, fresh_name
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.stream import Stream

#: Terms of these dtypes are added up in f32.
_WIDENED = (torch.float16, torch.bfloat16)


@dataclass
class Loop:
    """One host loop under construction, within one call of `emit_loop`."""

    out: Emitter
    #: the code before the loop
    outside: list[Instruction]
    #: the name of the loop's index, and the chunk of this rank in an iteration
    name: str
    index: Index
    #: the values that the loop computes
    computed: frozenset[str]
    #: rings: the pieces of each rank's shard, and whether a rank's own shard comes last
    pieces: int = 1
    is_own_last: bool = False
    #: (value, dim) -> the name of its chunk
    chunks: dict[tuple[str, int], str] = field(default_factory=dict)
    #: the code right behind the loop
    behind: list[Instruction] = field(default_factory=list)

    @property
    def fusion(self) -> Fusion:
        return self.out.fusion

    @property
    def nth(self) -> Index:
        """The number of ring steps before this iteration."""
        index = Term("index", self.name)
        return calc("//", index, self.pieces) if self.pieces > 1 else index

    def chunk_type(self, value: str, stream: Stream) -> BufferType:
        """Return the type of a chunk of a value; its layout names the loop's index."""
        kind = value_type(self.fusion.values[value])
        is_zigzag = stream.zigzag and stream.op is None
        at_index = replace(stream, rotate=None, index=self.index, zigzag=is_zigzag)
        kind = replace(kind, layout=kind.placed.with_stream(at_index))
        if kind.counts is None:
            return kind
        rows = self.fusion.values[value].rows
        return replace(kind, counts=f"{self.chunks[str(rows), -1]}.counted")

    def read(self, value: str, stream: Stream | None) -> str:
        """Return the name that an iteration reads: a chunk of the value, or the whole value."""
        if stream is None:
            return value
        key = value, stream.dim
        if key not in self.chunks and stream.op is not None:
            raise LoweringError(
                f"%{value} counts rows of microbatches in another loop than the one of its rows",
                where=self.fusion.where(value),
                because="something needs the counts of the whole batch before rows are grouped",
                hint="count the ids of such a sum apart, or take the batch at once",
            )
        if key not in self.chunks:
            kind = self.chunk_type(value, stream)
            self.chunks[key] = self.out.op("chunk", f"{value}.{self.name}", kind, (value,))
        return self.chunks[key]

    def is_whole(self, value: str) -> bool:
        """Return whether a value is needed after the loop, or by other loops."""
        if value in self.fusion.outputs:
            return True
        return any(r.outputs[0] not in self.computed for r in self.fusion.consumers[value])

    def result(self, value: str) -> str:
        """Return the name that an iteration computes: a slice of the whole value, or a chunk."""
        if not self.is_whole(value):
            return self.chunk(value)
        if self.stream(value).zigzag:
            raise LoweringError(
                f"%{value} is computed in chunks in zigzag order, and read as a whole",
                where=self.fusion.where(value),
                because="such a chunk has two runs of rows, which do not lie side by side",
                hint="chunks one after the other, Stream(dim, chunks); or of a ring of attention: "
                'Options(context="gather"), or one layout of positions for all that it reads',
            )
        self.allocate(value)
        return self.read(value, self.stream(value))

    def chunk(self, value: str) -> str:
        """Return a new name for a chunk of a value."""
        stream = self.stream(value)
        name = self.out.new(f"{value}.{self.name}", self.chunk_type(value, stream))
        self.chunks[value, stream.dim] = name
        return name

    def stream(self, value: str) -> Stream:
        """Return the stream of a value that the loop computes.

        Raises:
            LoweringError: its layout says that it is whole, since others read it so.
        """
        stream = self.fusion.values[value].stream
        if stream is None:
            raise LoweringError(
                f"%{value} is computed in a loop over chunks, and its layout has none",
                where=self.fusion.where(value),
                because="a layout that is asked for splits its result along another dim",
                hint='Options(context="auto") chooses a form that can; or ask for that layout of a '
                "copy: fd.ops.set(y)",
            )
        return stream

    def landing(self, value: str) -> str:
        """Return a name for the buffer that receives a chunk of a value."""
        name = f"{value}.{self.name}"
        return fresh_name(self.out.types, f"{name}.new" if self.is_whole(value) else name)

    def order(self, value: str) -> tuple[int, ...]:
        """Return the memory order of a whole value: plain for a set's result, else its own.

        So chunks may arrive in their places. An order that the user requires stays.
        """
        kind = self.fusion.values[value]
        if self.fusion.producers[value].op == "set" and not kind.is_order_required:
            return tuple(range(len(kind.shape)))
        return kind.order

    def allocate(self, value: str, is_posted: bool = False) -> None:
        """Append the buffer of a whole value before the loop; plain if it is posted as a whole."""
        kind = self.fusion.values[value]
        self.out.types[value] = value_type(kind)
        order: tuple[int, ...] | None = self.order(value)
        if is_posted or order == tuple(range(len(kind.shape))):
            if value not in self.fusion.reuse:  # these have the order of the caller's tensors
                self.out.dense.add(value)
            order = None
        self.outside.append(
            Instruction(op="alloc", outputs=(value,), order=order, source=kind.source)
        )

    def accumulate(self, value: str, part: str, expr: Expr) -> None:
        """Append the addition of this iteration's part to a value; in f32 for 16 bits."""
        buffer = self.total(value, self.stream(value).op, expr)
        self.out.code.append(
            Instruction(op="accumulate", inputs=(part,), outputs=(buffer,), source=expr.source)
        )

    def total(self, value: str, op: str | None, expr: Expr) -> str:
        """Return the name of the buffer in which an op joins the parts of a value.

        Sums and products of 16 bits get a buffer in f32, which is rounded behind the loop.
        """
        buffer = self.wide(value) if op in ("sum", "prod") else None
        if buffer is None:
            self.allocate(value)
            return value
        self.out.types[value] = value_type(self.fusion.values[value])
        self.behind.append(self.rounding(value, buffer, expr))
        return buffer

    def wide(self, value: str) -> str | None:
        """Return the name of a new buffer in f32 for a value of 16 bits; None for others."""
        kind = self.fusion.values[value]
        if kind.dtype not in _WIDENED:
            return None
        buffer = self.out.new(f"{value}.sum", replace(value_type(kind), dtype=torch.float32))
        self.outside.append(Instruction(op="alloc", outputs=(buffer,), source=kind.source))
        return buffer

    def terms(self, value: str, count: int, expr: Expr) -> str | None:
        """Return the name of a new buffer for `count` terms of a value of 16 bits.

        The terms are added up behind the loop. None for values of other dtypes.
        """
        kind = self.fusion.values[value]
        if kind.dtype not in _WIDENED or kind.layout is None:
            return None
        layout = kind.layout.with_stream(None).with_dims({d: d + 1 for d in range(len(kind.shape))})
        type_ = replace(value_type(kind), shape=(count, *kind.shape), layout=layout)
        buffer = self.out.new(f"{value}.terms", type_)
        self.outside.append(Instruction(op="alloc", outputs=(buffer,), source=kind.source))
        added = Expr(op="sum", inputs=(buffer,), outputs=(value,), attrs=(("dims", (0,)),))
        self.behind.append(replace(local(added), source=expr.source))
        return buffer

    def rounding(self, value: str, wide: str, expr: Expr) -> Instruction:
        """Return the instruction that rounds a sum in f32 to the dtype of the value."""
        kind = self.fusion.values[value]
        fn = "round_terms" if kind.layout and kind.layout.partial_axes else "cast"
        cast = Expr(op=fn, inputs=(wide,), outputs=(value,), attrs=(("dtype", kind.dtype),))
        return replace(local(cast), source=expr.source)

    def chunk_layout(self, layout: Layout, stream: Stream) -> Layout:
        return layout.with_stream(replace(stream, rotate=None, index=self.index, op=None))
