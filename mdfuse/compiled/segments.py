"""Segments: the parts of a program that run by themselves, one after the other for instance:

values = dict(zip(fd.inputs, inputs))
for segment, last in zip(program.segments, program.last_uses):
    results = segment.run(*(values[segment.map[i]] for i in segment.inputs))
    values.update(zip((segment.map[i] for i in segment.outputs), results))
    for i in last:
        del values[i]
outputs = [values[i] for i in fd.outputs]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mdfuse import hir_lowering
from mdfuse.caching import Cache, Forgetful
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import MdfuseError, ProgramError
from mdfuse.extents.assumptions import Guard
from mdfuse.extents.extent import with_numbers
from mdfuse.hir.emit.sets import Orders
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.interpreter.garbage import no_collection
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.ir.writes import fresh_write
from mdfuse.passes.segment_ids import Dim, extent_ids, input_extents
from mdfuse.passes.segmentation import Section
from mdfuse.runs.extents import check_extents, complete_extents
from mdfuse.torch_private import untraced

if TYPE_CHECKING:
    from mdfuse.compiled.program import Program

#: How many programs of known extents are kept at least, of a program and of each of its segments.
LIMIT = 32


def program_limit(options: Options | None) -> int:
    """Return the limit on programs of known extents: a plan is reached through its program."""
    return max(LIMIT, options_from_environment(options).plans)


@dataclass(frozen=True, kw_only=True)
class Segment(Forgetful):
    """A part of a program that runs by itself: a reshard, or expressions between reshards.

    Attributes:
        name: `seg0`, `seg1`, … in topological order.
        fusion: its expressions as a fusion of their own, every value with the layout that it has in
            the program; names are those of the whole fusion, `fusion.ids` are the segment's own.
        map: ids of the segment -> ids of the definition: of values, and of those extents of its
            inputs (-1, -2, …) that are extents of the definition's inputs.
        orders: the memory orders in which the program writes its results.
        options: those that the program was compiled with.
        guards: the conditions on the program's symbolic extents under which it is valid.
        examples: the program's symbolic extents, with examples; none where it has numbers.

    >>> import mdfuse as mf
    >>> mesh = mf.DeviceMesh.arange(tp=2)
    >>> with mf.FusionDefinition("f") as fd:
    ...     x = fd.define_tensor([8, 4], mesh=mesh, layout={"tp": mf.Shard(0)})
    ...     y = fd.ops.set(x).on(mesh, {})
    ...     fd.add_output(y.T + 1)
    >>> reshard, transpose, add = mf.compile(fd).segments
    >>> transpose.inputs, transpose.outputs, transpose.extents
    ([0], [1], [-1, -2])
    >>> transpose.map
    {0: 1, 1: 2, -1: -1, -2: -2}
    >>> add.map
    {0: 2, 1: 3, -1: -2, -2: -1}
    """

    name: str
    fusion: Fusion
    map: Mapping[int, int]
    orders: Orders = field(default_factory=dict, repr=False)
    options: Options | None = None
    guards: tuple[Guard, ...] = ()
    examples: Mapping[str, int] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return str(self.fusion)

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The segment's expressions."""
        return self.fusion.exprs

    @property
    def inputs(self) -> list[int]:
        """The segment's own ids of its inputs: 0, 1, …"""
        return [self.fusion.ids[name] for name in self.fusion.inputs]

    @property
    def outputs(self) -> list[int]:
        """The segment's own ids of its outputs: results that others read or the program returns."""
        return [self.fusion.ids[name] for name in self.fusion.outputs]

    @property
    def extents(self) -> list[int]:
        """The segment's own ids of its inputs' extents: -1, -2, …"""
        return list(input_extents(self.fusion).values())

    @cached_property
    def program(self) -> Program:
        """The program of this segment alone, made once.

        Raises:
            ProgramError: it has symbolic extents.
        """
        from mdfuse.compiled.program import Program

        if self.examples:
            raise ProgramError(
                f"@{self.name} has symbolic extents: {', '.join(self.examples)}",
                because="a segment runs for extents that are known",
                hint="take a segment of program.with_extents({...}), or segment.run(..., extents=)",
            )
        section = Section(name=self.name, fusion=self.fusion)
        emitted = hir_lowering.emitted(self.fusion, (section,), self.options, self.orders)
        host = emitted.program()
        itself = replace(self, map={i: i for i in self.map})
        return Program(self.fusion, (itself,), host, self.options)

    @untraced
    def run(
        self,
        *inputs: Any,
        out: Sequence[Tensor | None] | None = None,
        extents: Mapping[str, int] | None = None,
        options: Options | None = None,
    ) -> list[Any]:
        """Run on this rank; all ranks run it, as they run the program.

        Args:
            inputs: local tensors in the order of `segment.inputs`; None for an input whose mesh
                this rank is not in; numbers for scalars.
            out: buffers for the outputs, all or none.
            extents: all symbolic extents of the program, by the names they have there.
            options: instead of those given to `compile`.

        Returns:
            Local outputs, in the order of `segment.outputs`; None where this rank is outside the
            output's mesh.

        Raises:
            ProgramError: arguments that do not fit; extents that are missing, or others than those
                that the segment is for.
        """
        if not self.examples:
            return self.program.run(*inputs, out=out, extents=extents, options=options)
        try:
            chosen = self.with_extents(extents)
        except MdfuseError as problem:
            self._some.program.refuse(problem, options)
            raise
        return chosen.program.run(*inputs, out=out, options=options)

    def with_extents(self, extents: Mapping[str, int] | None) -> Segment:
        """Return the segment for some extents, with numbers everywhere.

        Args:
            extents: all symbolic extents of the program, by the names they have there.

        Raises:
            ProgramError: extents are missing or unknown, or the segment is for others.
        """
        known = check_extents(self.name, self.examples, extents)
        if not self.examples:
            return self
        _check_complete(self, known)
        key = tuple(known[name] for name in self.examples)
        return self._numbered.get_or(
            key, lambda: replace(with_numbers(self, known), guards=(), examples={})
        )

    @cached_property
    def _numbered(self) -> Cache[Segment]:
        """The segments for extents that were asked for."""
        return Cache(program_limit(self.options))

    @property
    def _some(self) -> Segment:
        """The segment as it ran last, else for the examples: one on which all ranks can fail."""
        return self._numbered.recent or self.with_extents(self.examples)


def _check_complete(segment: Segment, known: Mapping[str, int]) -> None:
    why = "a segment sees some of the program's inputs, and is told all its extents"
    complete_extents(segment.name, segment.examples, known, why)
    broken = [guard for guard in segment.guards if not guard.holds(known)]
    if broken:
        raise ProgramError(
            f"@{segment.name} for the extents {dict(known)}",
            because="it was lowered for " + ", ".join(map(str, broken)),
            hint="take the segments of program.with_extents({...}), which are for these extents",
        )


@no_collection()
def segments_of(
    fusion: Fusion, sections: Iterable[Section], host: HostProgram, options: Options | None
) -> tuple[Segment, ...]:
    """Return the segments of a lowered fusion, whose values all have ids."""
    extents, orders = extent_ids(fusion), _orders(host)
    return tuple(_segment(fusion, section, extents, orders, options) for section in sections)


def _segment(
    fusion: Fusion,
    section: Section,
    extents: Mapping[Dim, int],
    orders: Orders,
    options: Options | None,
) -> Segment:
    names = (*section.inputs, *(n for e in section.exprs for n in e.outputs))
    values = dict(section.fusion.values)
    for name in section.inputs:  # inputs are whole, and not expanded
        value = values[name]
        if value.stream is not None or value.expanded:
            values[name] = replace(value, stream=None, expanded=frozenset())
    part = replace(section.fusion, values=values, ids={name: i for i, name in enumerate(names)})
    ids = {i: fusion.ids[name] for i, name in enumerate(names)}
    dims = {i: extents[dim] for dim, i in input_extents(part).items() if dim in extents}
    stated = {name: orders[name] for name in section.outputs if name in orders}
    return Segment(
        name=section.name, fusion=part, map={**ids, **dims}, orders=stated, options=options
    )


def last_uses(segments: Sequence[Segment], lasting: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return for each segment the ids of the definition that nothing needs after it.

    Ids in `lasting` are needed to the end.
    """
    needed, unneeded = {*lasting}, []
    for segment in reversed(segments):
        used = dict.fromkeys(segment.map[i] for i in (*segment.inputs, *segment.outputs))
        unneeded.append(tuple(i for i in used if i not in needed))
        needed.update(used)
    return tuple(reversed(unneeded))


# -- memory orders -------------------------------------------------------------------------------


def _orders(host: HostProgram) -> Orders:
    """Return the memory orders in which a program computes its values.

    Results of reductions depend in their last bits on where the elements lie, so a segment leaves
    its results as the program does.
    """
    orders: dict[str, tuple[int, ...] | None] = {}
    keeps_buffers = not any(i.op == "set_stream" for i in host.walk())
    for i in host.walk():
        for name in i.outputs if i.op != "launch" else ():
            if name not in host.aliases:
                order = _row_major(host, i) if keeps_buffers and i.order is None else i.order
                orders.setdefault(name, order)
    return orders


def _row_major(host: HostProgram, i: Instruction) -> tuple[int, ...] | None:
    """Return row-major order where a plan gives the result a new buffer of its own; else None."""
    if i.fn not in TABLE:
        return None
    tensors = [x for x in i.reads if host.types[x].layout is not None]
    if not tensors or i.inputs[0] != tensors[0]:
        return None
    if fresh_write(TABLE[i.fn], [None] * len(tensors)) is None:
        return None
    return tuple(range(len(host.types[i.outputs[0]].shape)))
