"""Host programs: instructions over buffers, global or projected onto one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from mdfuse.caching import Forgetful
from mdfuse.communication import Communication
from mdfuse.errors import ProgramError, Source
from mdfuse.extents.expressions import UNKNOWN, Index, Term, resolve
from mdfuse.hir.forms import check_forms, check_nesting
from mdfuse.hir.instructions import BLOCKS, POSTS
from mdfuse.hir.orders import Order, orders_of
from mdfuse.ir.graph import Operand, dtype_name
from mdfuse.layouts.boxes import Box, Rows
from mdfuse.layouts.layout import Layout, Replicate
from mdfuse.layouts.meshes_by_rank import MeshesByRank
from mdfuse.mesh import DeviceMesh

Known = Callable[[Term], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """The rounding up of a split dim, so that all blocks of a team are equally long.

    Attributes:
        side: "block": one rank's block; "team": all blocks of the team.
        dim: the dim of the buffer.
        parts: how many blocks.
        axis: the mesh axis that splits the dim, where the buffer's mesh has it.
    """

    side: Literal["block", "team"]
    dim: int
    parts: int
    axis: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferType:
    """The type of a buffer or number that a name of a host program stands for.

    Attributes:
        dtype: the element type.
        shape: global extents, dims in the buffer's own order.
        layout: over the same dims; None for a scalar, which every rank has.
        padding: rounds one dim up.
        flat: the elements of all dims in a row.
        counts: the fetched numbers that say how many rows of dim 2 are there at each place of the
            dims 0 and 1; only these rows are stored, one after the other. At each place of dim 0
            there are at most as many in all as dim 2 has.
        each: the most of these rows at one place; None: any. Where the host does not know the
            counts, buffers have room for as many.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    padding: Padding | None = None
    flat: bool = False
    counts: str | None = None
    each: int | None = None

    @property
    def placed(self) -> Layout:
        """The layout of what is no number."""
        assert self.layout is not None
        return self.layout

    def box(self, rank: int) -> Box:
        """Return the part of the whole that a rank holds, without padding; see `Layout.box_at`."""
        return self.placed.box(self.shape, rank)

    def runs(self, rank: int) -> dict[int, Rows]:
        """Return for each dim in blocks the rows that a rank holds of it."""
        if self.layout is None or not self.layout.in_runs:
            return {}
        rows = self.layout.rows(self.shape, rank)
        return {d: rows[d] for d in self.layout.in_runs}

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Return the shape on one rank, padding included; without a rank the largest shape.

        Counted rows are as many as there may be.
        """
        if self.layout is None:
            return ()
        shape = self.layout.local_shape(self.shape, rank)
        if self.counts is not None:
            rows = shape[2] if self.each is None else min(shape[2], self.each * shape[1])
            return (shape[0] * rows, *shape[3:])
        if self.padding is not None:
            shape = self._padded(self.padding, shape, rank)
        return (math.prod(shape),) if self.flat else shape

    def nbytes(self) -> int:
        """Return the bytes of a part, the largest."""
        return math.prod(self.local_shape(), start=self.dtype.itemsize)

    def _padded(
        self, padding: Padding, shape: tuple[int, ...], rank: int | None
    ) -> tuple[int, ...]:
        whole = self.placed
        if padding.side == "block" and padding.axis is not None:
            whole = whole.with_placement(padding.axis, Replicate())
        rows = whole.local_shape(self.shape, rank)[padding.dim]
        block = -(-rows // padding.parts)
        n = block * (padding.parts if padding.side == "team" else 1)
        return (*shape[: padding.dim], n, *shape[padding.dim + 1 :])

    def at(self, known: Known) -> BufferType:
        """Return this type with all known terms in the index of its chunk replaced by numbers."""
        layout = self.layout.at(known) if self.layout is not None else None
        return self if layout is self.layout else replace(self, layout=layout)

    def text(self, rank: int | None = None) -> str:
        """Return the dtype and the local shape as text: `f32[3,1,3]`."""
        shape = ",".join(map(str, self.local_shape(rank)))
        at_most = "" if self.counts is None else "<="
        return f"{dtype_name(self.dtype)}[{at_most}{shape}]"


def brings_together(before: BufferType, after: BufferType) -> bool:
    """Return whether a part of a buffer has several runs of its rows, which it copies together."""
    if after.layout is None or before.layout is None or not after.layout.in_runs:
        return False
    return not {*after.layout.in_runs} <= {*before.layout.in_runs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction of a host program, which holds nested ones where it is a block or a unit.

    Attributes:
        op: alloc, free, set, permute, binary, …, launch, post, wait, for, if, …, return.
        fn: the row of the op table that it runs, or the name of the host unit.
        inputs: names, numbers, index expressions, or None (a buffer that this rank lacks).
        outputs: the names that it binds; the index of a loop, the handle of a post.
        attrs: global attributes; `mdfuse.ir.ops.local_attrs` makes them one rank's.
        order: the memory order that its result must have.
        comm: what a post posts, or the ranks of a barrier.
        body: the instructions of a host unit, a loop, or a branch.
        orelse: the instructions of the other branch.
        source: the user's line.
        reads: the names among the operands; of a post or recv also the buffer that is written.
    """

    op: str
    fn: str = ""
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()
    order: tuple[int, ...] | None = None
    comm: Communication | None = None
    body: tuple[Instruction, ...] = ()
    orelse: tuple[Instruction, ...] = ()
    source: Source | None = field(default=None, compare=False)
    reads: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        reads = tuple([x for x in self.inputs if isinstance(x, str)])
        object.__setattr__(self, "reads", reads)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The attributes by name."""
        return dict(self.attrs)

    @property
    def indices(self) -> tuple[Index, ...]:
        """The index expressions in its operands and attributes."""
        indices: list[Any] = [x for x in self.inputs if type(x) in UNKNOWN]
        if self.attrs:
            indices += [v for _, v in self.attrs if type(v) in UNKNOWN]
        return tuple(indices)

    def walk(self) -> Iterator[Instruction]:
        """Return the instruction, then all instructions inside it."""
        return self._nested() if self.body or self.orelse else iter((self,))

    def _nested(self) -> Iterator[Instruction]:
        yield self
        for inner in (*self.body, *self.orelse):
            yield from inner.walk()

    def renamed(self, names: Mapping[str, str]) -> Instruction:
        """Return the instruction with other names for some buffers, inside its blocks, too."""
        if not (self.body or self.orelse) and names.keys().isdisjoint((*self.reads, *self.outputs)):
            return self
        return self.changed(
            inputs=tuple([names.get(x, x) if isinstance(x, str) else x for x in self.inputs]),
            outputs=tuple([names.get(x, x) for x in self.outputs]),
            body=tuple([i.renamed(names) for i in self.body]),
            orelse=tuple([i.renamed(names) for i in self.orelse]),
        )

    def changed(self, **fields: Any) -> Instruction:
        """Return the instruction with these fields; itself where it has them already."""
        pairs = [(getattr(self, name), value) for name, value in fields.items()]
        is_same = all(old is new or old == new for old, new in pairs)
        return self if is_same else replace(self, **fields)

    def rebuilt(
        self,
        inputs: tuple[Operand, ...],
        outputs: tuple[str, ...],
        attrs: tuple[tuple[str, Any], ...],
        comm: Communication | None,
        body: tuple[Instruction, ...],
        orelse: tuple[Instruction, ...],
    ) -> Instruction:
        """Return the instruction with other names and numbers; itself where they are the same."""
        is_same = comm is self.comm and inputs == self.inputs and outputs == self.outputs
        if is_same and (attrs, body, orelse) == (self.attrs, self.body, self.orelse):
            return self
        return Instruction(
            op=self.op,
            fn=self.fn,
            inputs=inputs,
            outputs=outputs,
            attrs=attrs,
            order=self.order,
            comm=comm,
            body=body,
            orelse=orelse,
            source=self.source,
        )

    @property
    def parts(self) -> tuple[tuple[Instruction, ...], ...]:
        """The parts of the body of a loop, which `next` divides."""
        if "next" not in [i.op for i in self.body]:
            return (self.body,)
        parts: list[list[Instruction]] = [[]]
        for i in self.body:
            if i.op == "next":
                parts.append([])
            else:
                parts[-1].append(i)
        return tuple(map(tuple, parts))

    def __str__(self) -> str:
        return f"{self.fn or self.op} -> {', '.join(self.outputs)}" if self.outputs else self.op


@dataclass(frozen=True, kw_only=True)
class HostProgram(Forgetful):
    """A host program: instructions for all ranks, or for one.

    Attributes:
        name: of the fusion.
        types: buffer name -> type; loop indices are i64 scalars.
        inputs: names of the inputs, in definition order.
        outputs: names of the outputs, in definition order.
        instructions: one flat list; `body` and `orelse` nest.
        aliases: name -> the name whose buffer it shares.
        alias_orders: alias of an input -> the memory order in which the caller's buffer must lie.
        rank: None for the global program, else the rank it was projected onto.
    """

    name: str
    types: Mapping[str, BufferType]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    alias_orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rank: int | None = None

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def __str__(self) -> str:
        from mdfuse.hir.text.printer import program_text

        check_nesting(self)
        return program_text(self)

    def walk(self) -> Iterator[Instruction]:
        """Yield all instructions, those inside loops, branches and host units included."""
        return iter(self._every)

    @cached_property
    def _every(self) -> tuple[Instruction, ...]:
        code: list[Instruction] = []
        for i in self.instructions:
            if i.body or i.orelse:
                code += i.walk()
            else:
                code.append(i)
        return tuple(code)

    @cached_property
    def checked(self) -> HostProgram:
        """This program, after a check that each instruction has the form that its row says.

        Raises:
            ProgramError: one has not; see `mdfuse.hir.forms`.
        """
        check_forms(self)
        return self

    @cached_property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """The meshes of its buffers and communications."""
        meshes = [t.layout.mesh for t in self.types.values() if t.layout is not None]
        meshes += [m for c in self.communications for m in (c.source.mesh, c.destination.mesh)]
        return tuple(dict.fromkeys({id(m): m for m in meshes}.values()))

    @cached_property
    def _local_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a buffer has on the rank of a projection."""
        shape = self._local_shapes.get(name)
        if shape is None:
            shape = self._local_shapes[name] = self.types[name].local_shape(self.rank)
        return shape

    @cached_property
    def _by_rank(self) -> MeshesByRank:
        return MeshesByRank(self.meshes)

    def meshes_of(self, rank: int) -> tuple[DeviceMesh, ...]:
        """Return the meshes that have a rank, in the order of `meshes`."""
        return self._by_rank.of(rank)

    @cached_property
    def last_rank(self) -> int:
        """The highest rank of any mesh that is not lost."""
        ends = ({*m} - m.lost if m.lost else {m.last_rank} for m in self.meshes)
        return max((rank for ranks in ends for rank in ranks), default=0)

    @cached_property
    def communications(self) -> tuple[Communication, ...]:
        """The communications of the posts, in order; a post in a loop counts once."""
        return tuple(i.comm for i in self.walk() if i.comm is not None)

    @cached_property
    def backends(self) -> tuple[str, ...]:
        """The backends that posts name, each once, in program order."""
        named = (i.comm.backend if i.comm else i.kwargs.get("backend") for i in self.walk())
        return tuple(dict.fromkeys(name for name in named if name))

    @cached_property
    def orders(self) -> Mapping[str, Order]:
        """Name with a buffer of its own -> its memory order; see `mdfuse.hir.orders`."""
        return orders_of(self)

    @cached_property
    def likely_orders(self) -> Mapping[str, Order]:
        """The same where inputs lie row by row."""
        return orders_of(self, has_dense_inputs=True)

    @cached_property
    def written_inputs(self) -> frozenset[str]:
        """The inputs whose buffers are written: those that have aliases."""
        return frozenset(map(self.root, self.aliases)).intersection(self.inputs)

    @cached_property
    def has_frees(self) -> bool:
        """True if it frees buffers, also in loops and branches."""
        return any(i.op == "free" for i in self.walk())

    def has(self, name: str, rank: int) -> bool:
        """Return whether a rank has a part of a buffer; every rank has every number."""
        layout = self.types[name].layout
        return layout is None or rank in layout.mesh

    def root(self, name: str) -> str:
        """Return the name whose buffer a name acts on; chains of aliases resolve in any order.

        Raises:
            ProgramError: the aliases go round in a circle.
        """
        if name not in self.aliases:
            return name
        seen = [name]
        while seen[-1] in self.aliases:
            seen.append(self.aliases[seen[-1]])
            if seen[-1] in seen[:-1]:
                raise ProgramError(
                    f"@{self.name}: the aliases " + " = ".join(f"%{n}" for n in seen) + " form a "
                    "cycle",
                    because="an alias shares the buffer of a name that has one",
                    hint="leave one of them out",
                )
        return seen[-1]

    # -- projection ------------------------------------------------------------------------------

    def runs_on(self, i: Instruction, rank: int) -> bool:
        """Return whether a rank executes an instruction: it takes part, or has what is computed."""
        if i.comm is not None:
            return bool(i.comm.team(rank)) or (i.op == "post" and rank in i.comm.destination.mesh)
        if i.op in POSTS:
            return all(self.has(name, rank) for name in i.reads)
        return all(self.has(name, rank) for name in i.outputs if name in self.types)

    @cached_property
    def is_straight(self) -> bool:
        """True if there is no loop, no branch and no index expression."""
        return not any(i.op in BLOCKS or bool(i.indices) for i in self.walk())

    @cached_property
    def blocks(self) -> Mapping[str, Instruction]:
        """Its blocks by name; see `mdfuse.hir.block_calls`."""
        return {i.fn: i for i in self.instructions if i.op == "block"}

    def knows(self, rank: int, mesh: DeviceMesh | None = None) -> Known:
        """Return a lookup of index terms on a rank: the number of a term, None for a loop index.

        Coordinates are those in `mesh`, else in the first mesh that has the axis and the rank.
        """

        def known(term: Term) -> int | None:
            match term.kind:
                case "rank":
                    return rank
                case "coord":
                    return self._coordinate(term.name, rank, mesh)
                case "extent":
                    kind = self.types[term.name]
                    is_fixed = kind.layout is not None and kind.layout == kind.layout.at(_first)
                    return kind.local_shape(rank)[term.dim] if is_fixed else None
            return None

        return known

    def _coordinate(self, axis: str, rank: int, first: DeviceMesh | None) -> int:
        """Return the coordinate on the first mesh that has the axis and the rank; -1 outside."""
        for mesh in (first, *self.meshes) if first is not None else self.meshes:
            coordinate = mesh.coordinate(rank) if axis in mesh.axes else None
            if coordinate is not None:
                return coordinate[mesh.axis_index(axis)]
        if not any(axis in mesh.axes for mesh in self.meshes):
            raise ProgramError(
                f"@{self.name}: coord({axis}), but no mesh has an axis {axis!r}",
                hint="the axes: " + ", ".join(a for m in self.meshes for a in m.axes),
            )
        return -1


def mesh_of_block(types: Mapping[str, BufferType], block: Instruction) -> DeviceMesh | None:
    """Return the mesh that a block computes on; None where it has several, or none."""
    kinds = (types.get(n) for i in block.body for j in i.walk() for n in j.outputs)
    meshes = {k.layout.mesh for k in kinds if k is not None and k.layout is not None}
    for i in block.body:
        if i.comm is not None:
            meshes |= {i.comm.source.mesh, i.comm.destination.mesh}
    return meshes.pop() if len(meshes) == 1 else None


def joined(parts: Iterable[Iterable[Instruction]]) -> tuple[Instruction, ...]:
    """Return the body of a loop of these parts, with `next` between them."""
    code = [i for part in parts for i in (Instruction(op="next"), *part)]
    return tuple(code[1:])


def resolved(attrs: tuple[tuple[str, Any], ...], known: Known) -> tuple[tuple[str, Any], ...]:
    """Return attributes with their index expressions resolved as far as terms are known."""
    return tuple((k, resolve(v, known)) for k, v in attrs)


def _first(term: Term) -> int:
    return 0
