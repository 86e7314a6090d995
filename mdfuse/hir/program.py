"""Host programs: instructions over buffers, global or projected onto one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from mdfuse.communication import Communication
from mdfuse.errors import Source
from mdfuse.ir.graph import Operand, dtype_name
from mdfuse.ir.ops import TABLE, Part, local_attrs
from mdfuse.layout import Box, Layout, Replicate
from mdfuse.mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """A split dim rounded up so that every block of a team is equally long.

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
    """What a name of a host program stands for.

    Attributes:
        dtype: the element type.
        shape: global extents, dims in the buffer's own order.
        layout: over the same dims; None for a scalar, which every rank has.
        padding: rounds one dim up.
        flat: the elements of all dims in a row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    padding: Padding | None = None
    flat: bool = False

    def box(self, rank: int) -> Box:
        """The part of the whole that a rank holds, without padding."""
        assert self.layout is not None
        return self.layout.intervals(self.shape, rank)

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """The shape on one rank; without a rank the largest."""
        if self.layout is None:
            return ()
        shape = self.layout.local_shape(self.shape, rank)
        if self.padding is not None:
            shape = self._padded(self.padding, shape, rank)
        return (math.prod(shape),) if self.flat else shape

    def _padded(
        self, padding: Padding, shape: tuple[int, ...], rank: int | None
    ) -> tuple[int, ...]:
        assert self.layout is not None
        whole = self.layout
        if padding.side == "block" and padding.axis is not None:
            whole = whole.with_placement(padding.axis, Replicate())
        rows = whole.local_shape(self.shape, rank)[padding.dim]
        block = -(-rows // padding.parts)
        n = block * (padding.parts if padding.side == "team" else 1)
        return (*shape[: padding.dim], n, *shape[padding.dim + 1 :])

    def text(self, rank: int | None = None) -> str:
        """The local type: `f32[3,1,3]`."""
        shape = ",".join(map(str, self.local_shape(rank)))
        return f"{dtype_name(self.dtype)}[{shape}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One thing that the host does.

    Attributes:
        op: alloc, set, permute, binary, …, launch, post, wait, return.
        fn: the row of the op table that it runs, or the name of the host unit.
        inputs: names, numbers, or None (a buffer that this rank does not have).
        outputs: the names that it binds.
        attrs: global attributes; `mdfuse.ir.ops.local_attrs` makes them one rank's.
        order: the memory order that its result must have.
        comm: what a post posts.
        body: the instructions of a host unit.
        source: the user's line.
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

    @property
    def reads(self) -> tuple[str, ...]:
        """The names that it reads (for a post: also the buffer that it writes)."""
        return tuple(x for x in self.inputs if isinstance(x, str))

    def __str__(self) -> str:
        return f"{self.fn or self.op} -> {', '.join(self.outputs)}" if self.outputs else self.op


@dataclass(frozen=True, kw_only=True)
class HostProgram:
    """Instructions for all ranks, or for one.

    Attributes:
        name: of the fusion.
        types: buffer name -> type.
        inputs: names of the inputs, in definition order.
        outputs: names of the outputs, in definition order.
        instructions: one flat list; `body` nests.
        aliases: name -> the name whose buffer it shares.
        rank: None for the global program, else the rank it was projected onto.
    """

    name: str
    types: Mapping[str, BufferType]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def __str__(self) -> str:
        from mdfuse.hir.text import program_text

        return program_text(self)

    @cached_property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """The meshes of its buffers and communications."""
        found = [t.layout.mesh for t in self.types.values() if t.layout is not None]
        found += [m for c in self.communications for m in (c.source.mesh, c.destination.mesh)]
        return tuple(dict.fromkeys(found))

    @cached_property
    def last_rank(self) -> int:
        """The highest rank of any mesh."""
        return max((m.last_rank for m in self.meshes), default=0)

    @cached_property
    def communications(self) -> tuple[Communication, ...]:
        """What the posts post, in order."""
        return tuple(i.comm for i in self.instructions if i.comm is not None)

    def has(self, name: str, rank: int) -> bool:
        """Whether a rank has a part of a buffer."""
        layout = self.types[name].layout
        return layout is None or rank in layout.mesh

    def runs_on(self, i: Instruction, rank: int) -> bool:
        """Whether a rank executes an instruction: it takes part, or has what is computed."""
        if i.comm is not None:
            return bool(i.comm.team(rank)) or rank in i.comm.destination.mesh
        return all(self.has(name, rank) for name in i.outputs if name in self.types)

    def project(self, rank: int) -> HostProgram:
        """What one rank runs."""
        kept = []
        handles: set[str] = set()
        for i in self.instructions:
            waits = i.op == "wait"
            if not (any(x in handles for x in i.reads) if waits else self.runs_on(i, rank)):
                continue
            if i.op == "post":
                handles.update(i.outputs)
            kept.append(self._localized(i, rank))
        named = {*self.inputs, *self.outputs}
        named.update(n for i in kept for j in (i, *i.body) for n in j.outputs)
        types = {n: t for n, t in self.types.items() if n in named}
        return replace(self, types=types, instructions=tuple(kept), rank=rank)

    def _localized(self, i: Instruction, rank: int) -> Instruction:
        """An instruction with one rank's buffers and attributes."""
        body = tuple(self._localized(inner, rank) for inner in i.body)
        attrs = i.attrs
        if i.fn in TABLE and i.outputs and self.types[i.outputs[0]].layout is not None:
            attrs = tuple(local_attrs(TABLE[i.fn], dict(attrs), self._part(i, rank)).items())
        inputs = i.inputs if i.op == "return" else tuple(self._mine(x, rank) for x in i.inputs)
        return replace(i, inputs=inputs, attrs=attrs, body=body)

    def _part(self, i: Instruction, rank: int) -> Part:
        """What a rank holds of the operands and the result of an op of the table."""
        kinds = [self.types[x] if isinstance(x, str) else None for x in i.inputs]
        tensors = [k if k is not None and k.layout is not None else None for k in kinds]
        output = self.types[i.outputs[0]]
        return Part(
            shapes=tuple(k.shape if k is not None else None for k in tensors),
            boxes=tuple(k.box(rank) if k is not None else None for k in tensors),
            shape=output.shape,
            box=output.box(rank),
        )

    def _mine(self, operand: Operand, rank: int) -> Operand:
        if isinstance(operand, str) and operand in self.types:
            return operand if self.has(operand, rank) else None
        return operand
