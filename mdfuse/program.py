"""Compiled programs: what `mf.compile` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from mdfuse import hir_lowering
from mdfuse.communication import Communication
from mdfuse.config import Options
from mdfuse.errors import DefinitionError, ProgramError
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.traffic import received
from mdfuse.ir.graph import Fusion
from mdfuse.segmentation import Segment, ShouldMerge


@dataclass(frozen=True)
class Program:
    """One program for all ranks; printing it shows the global host program.

    Attributes:
        fusion: the fusion as lowered: every value with its layout, every reshard a set.
        segments: runs of expressions without a reshard.
        host: the global host program.
        options: how it runs.
    """

    fusion: Fusion
    segments: tuple[Segment, ...]
    host: HostProgram
    options: Options | None = None

    def __str__(self) -> str:
        return str(self.host)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.host)

    def for_rank(self, rank: int) -> HostProgram:
        """What one rank runs: prints, and iterating yields its instructions."""
        return self.host.project(rank)

    @property
    def communications(self) -> tuple[Communication, ...]:
        """The communications in order, each a family projected per rank."""
        return self.host.communications

    def bytes_received(self, rank: int) -> int:
        """Bytes that arrive at a rank from others in one run, ring model, padding included."""
        return sum(size for _, size in received(self.host, rank))

    def explain(self) -> str:
        """The choices that were made, and why, as text."""
        lines = [f"@{self.host.name}: {len(self.segments)} segments, {len(self.host)} instructions"]
        posts = [_why(i) for i in self.host.walk() if i.comm is not None or i.op == "recv"]
        posts = posts or ["no communication: every operand is where it is needed"]
        lines += [f"  {line}" for line in posts]
        lines += [f"  {line}" for line in _streams(self.host)]
        lines.append("  graphs: runs are not captured")
        return "\n".join(lines)

    @cached_property
    def _evaluators(self) -> dict[Options | None, HostIrEvaluator]:
        """What runs the program on this rank, for each options it was run with."""
        return {}

    def run(
        self,
        *inputs: Any,
        out: Sequence[Tensor | None] | None = None,
        extents: Mapping[str, int] | None = None,
        options: Options | None = None,
    ) -> list[Any]:
        """Run on this rank.

        Args:
            inputs: local tensors in definition order; None for an input whose mesh this rank is
                not in; numbers for scalars.
            out: buffers for the outputs, all or none.
            extents: symbolic extents by name.
            options: instead of those given to `compile`.

        Returns:
            Local outputs; None where this rank is outside the output's mesh.
        """
        problem = None
        if extents:
            problem = ProgramError(
                f"extents {dict(extents)}",
                because="this program has no symbolic extents",
                hint="leave extents= out",
            )
        options = options or self.options
        if options not in self._evaluators:
            self._evaluators[options] = HostIrEvaluator(self.host, None, options)
        return self._evaluators[options].call(inputs, out, problem)


def _streams(host: HostProgram) -> Iterator[str]:
    """What runs on which stream."""
    loops = [i for i in host.instructions if i.op == "for" and any(j.outputs for j in i.body)]
    if not loops:
        yield "streams: every instruction runs on the caller's stream"
    for i in loops:
        used = [j for j in i.body if j.op == "set_stream"]
        stream = used[0].kwargs["stream"] if used else None
        how = "on the caller's stream"
        if isinstance(stream, int):
            how = "transfers on stream 1, the rest on stream 0"
        elif stream is not None:
            how = f"iteration %{i.outputs[0]} on stream {stream}"
        where = f" ({i.source})" if i.source else ""
        yield f"streams: {i.kwargs['stop']} chunks{where}, {how}"


def _why(i: Instruction) -> str:
    """What a post or a receive is there for."""
    if i.comm is not None:
        return f"{i.comm}: {i.comm.source} -> {i.comm.destination}, {_reason(i.comm)}"
    along = f" along {i.kwargs['axis']}" if "axis" in i.kwargs else ""
    return f"Recv %{i.reads[0]} from {i.kwargs['from']}{along}, which sends it: a ring"


def _reason(c: Communication) -> str:
    if c.kind == "Exchange":
        return "no one collective does this; each rank receives just what it lacks"
    if c.axis is not None and c.source.mesh == c.destination.mesh:
        return f"the placement changes along {c.axis}"
    return "the meshes differ"


def compile(
    definition: FusionDefinition,
    options: Options | None = None,
    should_merge: ShouldMerge | None = None,
) -> Program:
    """Lower a definition: pure, for any number of ranks, without process group or GPU.

    Args:
        definition: its `with` block has ended.
        options: how the program will run.
        should_merge: see `mdfuse.segmentation.segment`.

    Raises:
        MdfuseError: what does not fit, with the user's line.
    """
    if not isinstance(definition, FusionDefinition):
        raise DefinitionError(
            f"compile takes a FusionDefinition, not {type(definition).__name__}",
            hint="for a traced function: mf.compile(f.define(...))",
        )
    fusion, segments, host = hir_lowering.lower(definition.fusion, should_merge, options=options)
    return Program(fusion, segments, host, options)
