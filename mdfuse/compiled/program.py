"""Compiled programs, as `mf.compile` returns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mdfuse.caching import Cache, Forgetful
from mdfuse.communication import Communication
from mdfuse.compiled import overlap
from mdfuse.compiled.advice import advice, post_reason
from mdfuse.compiled.autotune import Trial
from mdfuse.compiled.backend_report import between_carriers, elsewhere, norms, staging, together
from mdfuse.compiled.microbatch_lines import microbatch_lines
from mdfuse.compiled.overlap import OverlapDecisions
from mdfuse.compiled.program_files import ProgramParts, from_files
from mdfuse.compiled.segments import Segment, last_uses, program_limit, segments_of
from mdfuse.compiled.specialisations import Lowering, Lowerings, lowerings_of
from mdfuse.config import Options, compiles, environment, not_options, options_from_environment
from mdfuse.errors import MdfuseError, ProgramError, counted, listed, shown
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.extents.extent import example, mapped, with_numbers
from mdfuse.frontend.cache import NamedDefinition, program_of
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.given import check_definition
from mdfuse.hir.copies import copies
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.traffic import received
from mdfuse.hir.uncapturable import eager
from mdfuse.interpreter.garbage import no_collection
from mdfuse.ir.graph import Fusion
from mdfuse.passes.segmentation import ShouldMerge, check_merge
from mdfuse.plan import helper_pool
from mdfuse.plan.inductor import start_workers
from mdfuse.plan.kept import Plans
from mdfuse.plan.progress_bar import stage
from mdfuse.runs.arguments import has_dtensors
from mdfuse.runs.extents import (
    LocalExtents,
    check_extents,
    complete_extents,
    known_extents,
    local_extents,
)
from mdfuse.runtime.backend_rows import BACKENDS
from mdfuse.runtime.communicator import init
from mdfuse.seeing.backward_memory import backward_lines
from mdfuse.torch_private import untraced

if TYPE_CHECKING:
    from mdfuse.pipelines.schedules import Schedule
    from mdfuse.seeing.costs import Costs
    from mdfuse.seeing.timeline import Timeline


@dataclass(frozen=True)
class Program(Forgetful):
    """One program for all ranks; printing it shows the global host program.

    Attributes:
        fusion: the fusion as lowered: every value with its layout, every reshard a set.
        segments: reshards, and runs of expressions without one, in order; see `segments.Segment`.
        host: the global host program.
        options: how the program runs; None: as the environment says.
        symbolic: where the definition has symbolic extents: all its lowerings. `fusion`, `segments`
            and `host` are those of the first.
        schedule: the order of stages on each mesh, where there are several: see `mf.pipeline`.
        overlap: with `Options.overlap`, the windows in chunks that hide communications, and why.
    """

    fusion: Fusion
    segments: tuple[Segment, ...]
    host: HostProgram
    options: Options | None = None
    symbolic: Lowerings | None = None
    schedule: Schedule | None = None
    overlap: OverlapDecisions | None = None

    def __str__(self) -> str:
        return str(self.host) if self.symbolic is None else str(self.symbolic.lowerings[0])

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.host)

    @property
    def lowerings(self) -> tuple[Lowering, ...]:
        """For a symbolic definition, the lowerings so far; each prints its guards."""
        return () if self.symbolic is None else tuple(self.symbolic.lowerings)

    def host_for(self, extents: Mapping[str, int] | None = None) -> HostProgram:
        """Return the global host program for some extents, from a lowering that serves them.

        Args:
            extents: every symbolic extent by name; none where the definition has none.

        Raises:
            MdfuseError: extents are missing or unknown; the definition means nothing for them.
        """
        symbols = () if self.symbolic is None else self.symbolic.symbols
        known = check_extents(self.host.name, symbols, extents)
        if self.symbolic is None:
            return self.host
        return self.symbolic.host_for(complete_extents(self.host.name, symbols, known))

    def with_extents(self, extents: Mapping[str, int]) -> Program:
        """Return the program for some extents, with numbers everywhere."""
        host = self.host_for(extents)
        if self.symbolic is None:
            return self
        key = tuple(extents[name] for name in self.symbolic.symbols)
        program = self._numbered.get(key)
        if program is None:
            of = self.symbolic.lowering_for(extents)
            segments = tuple(s.with_extents(extents) for s in of.segments)
            fusion = with_numbers(of.fusion, extents)
            program = Program(fusion, segments, host, self.options, schedule=self.schedule)
            self._numbered.put(key, program)
        return program

    @cached_property
    def _numbered(self) -> Cache[Program]:
        """The programs for extents that were asked for."""
        return Cache(program_limit(self.options))

    @cached_property
    def last_uses(self) -> tuple[tuple[int, ...], ...]:
        """For each segment, the ids of the definition that nothing needs any more once it ran."""
        return last_uses(self.segments, (self.fusion.ids[name] for name in self.fusion.outputs))

    def for_rank(self, rank: int, extents: Mapping[str, int] | None = None) -> HostProgram:
        """The program of one rank: it prints, and iterating yields its instructions."""
        return project(self.host_for(extents), rank)

    @property
    def communications(self) -> tuple[Communication, ...]:
        """The communications in order, each a family projected per rank."""
        return self.host.communications

    def bytes_received(
        self, rank: int, extents: Mapping[str, int] | None = None, at_worst: bool = False
    ) -> int:
        """Return the bytes that a rank receives in one run: ring model, padding included.

        Rows that a run counts are as many as are expected, where each part has all rows that it may
        have and all experts equally many; `at_worst` as many as may be.
        """
        return sum(size for _, size in received(self.host_for(extents), rank, at_worst))

    def timeline(
        self, costs: Costs, extents: Mapping[str, int] | None = None, at_worst: bool = False
    ) -> Timeline:
        """Return the predicted times of each rank's work, by a table of costs; nothing runs.

        Ranks that run alike are there once, so that programs for thousands of ranks take seconds.

        Args:
            costs: the time of each instruction, for example `mdfuse.seeing.H100`.
            extents: every symbolic extent by name.
            at_worst: as in `bytes_received`.

        Raises:
            MdfuseError: extents are missing; the ranks wait for each other.
            ProgramError: `costs` is no table of costs.
        """
        from mdfuse.seeing.costs import Costs
        from mdfuse.seeing.timeline import timeline

        if not isinstance(costs, Costs):
            raise ProgramError(
                f"a timeline by {shown(costs)}",
                because="times are predicted by a table of costs, an object",
                hint="mdfuse.seeing.H100, or cost_table(mdfuse.init()).costs of mdfuse.seeing",
            )
        return timeline(self.with_extents(extents or {}).host, costs, at_worst)

    def explain(self) -> str:
        """Return the choices of the compiler as text, with their reasons."""
        lines = [headline(self)]
        posted = (i for i in self.host.walk() if i.comm is not None or i.op == "recv")
        counts = Counter(map(post_reason, posted))
        posts = [f"{n} × {why}" if n > 1 else why for why, n in counts.items()]
        posts = posts or ["no communication: every operand is where it is needed"]
        fusion = self.fusion if self.symbolic is None else mapped(self.fusion, example)
        lines += [
            f"  {x}" for x in (*posts, *advice(fusion, self.options), *backward_lines(fusion))
        ]
        lines += [f"  {line}" for line in microbatch_lines(self.host, self.schedule)]
        lines += [f"  overlap: {line}" for line in self._overlap_told()]
        lines += [f"  {line}" for line in _streams(self.host)]
        lines += [f"  {line}" for line in (*copies(self.host), *together(self.host))]
        lines += [f"  {line}" for line in between_carriers(self.host, self.options)]
        lines += [f"  {line}" for line in (*norms(self.host), *staging(self.host, self.options))]
        lines += [f"  {line}" for line in elsewhere(self._evaluators.recent)]
        lines += [f"  {line}" for line in _graphs(self.host, self.options)]
        lines += [f"  {line}" for line in _launches(self.host, self._evaluators.recent)]
        for n, lowering in enumerate(self.lowerings):
            lines.append(f"  lowering {n}: for {', '.join(map(str, lowering.guards)) or 'all'}")
        return "\n".join(lines)

    @cached_property
    def plans(self) -> Plans:
        """The plans of earlier runs, for all extents, options and kinds of arguments.

        `plans.info()` counts hits, misses and evictions; `Options.plans` is the limit.
        """
        return Plans(options_from_environment(self.options).plans, program=self.host.name)

    @cached_property
    def _evaluators(self) -> Cache[HostIrEvaluator]:
        """The evaluators on this rank, one for each host program and options."""
        return Cache(program_limit(self.options))

    @cached_property
    def _local_extents(self) -> LocalExtents:
        assert self.symbolic is not None
        return local_extents(self.host, self.symbolic.fusion)

    @untraced
    def __call__(self, *inputs: Any, **named: Any) -> list[Any]:
        """Run with inputs by name, behind those in definition order: `run`.

        Raises:
            ProgramError: a name that is no input, or is also given in order; missing inputs.
        """
        names = self.fusion.inputs
        left = names[len(inputs) :]
        unknown = [name for name in named if name not in left]
        lacking = [name for name in left if name not in named]
        if unknown or lacking:
            what = f"no input {unknown[0]!r}" if unknown else f"lacks {', '.join(lacking[:3])}"
            problem = ProgramError(
                f"a call of @{self.fusion.name}: {what}",
                because=f"its inputs are {listed(names)}; {len(inputs)} are given in order",
                hint="program(**inputs) with all of them, once each",
            )
            self.refuse(problem)
        return self.run(*inputs, *(named[name] for name in left))

    @untraced
    def run(
        self,
        *inputs: Any,
        out: Sequence[Tensor | None] | None = None,
        extents: Mapping[str, int] | None = None,
        options: Options | None = None,
    ) -> list[Any]:
        """Run the program on this rank; all ranks run it alike.

        Args:
            inputs: local tensors or DTensors in definition order; None for an input whose mesh
                this rank is not in; numbers for scalars.
            out: buffers for the outputs, all or none.
            extents: symbolic extents by name: those that are sharded or that some rank does not
                see must be given, the others follow from the inputs, and from the global shapes
                of DTensors.
            options: instead of those given to `compile`.

        Returns:
            Local outputs; None where this rank is outside the output's mesh. Where an input or a
            buffer is a DTensor, DTensors on the same mesh of torch's, which on a rank outside of
            the mesh are empty; an output with a buffer is that buffer.

        Raises:
            ProgramError: arguments that do not fit the program; on every rank alike before the
                first run.
        """
        if extents is None and options is None and self.symbolic is None:
            return self._usual.call(inputs, out)
        if (problem := not_options(options)) is not None:
            self.refuse(problem)
        given = {} if extents is None else extents
        if not isinstance(given, Mapping) or any(type(n) is not int for n in given.values()):
            return self._run_other(None, inputs, out, extents, options)
        try:
            shapes = tuple([x.shape if isinstance(x, Tensor) else None for x in inputs])
        except RuntimeError:  # of tensors without them, as nested ones
            return self._run_other(None, inputs, out, extents, options)
        key = shapes, tuple(given.items()), options
        evaluator = self._chosen.get(key)
        if evaluator is None:
            return self._run_other(key, inputs, out, extents, options)
        return evaluator.call(inputs, out)

    def run_all(self, inputs: Sequence[Any], extents: Mapping[str, int] | None = None) -> list[Any]:
        """Run as `run`, with all inputs in one sequence."""
        if extents is None and self.symbolic is None:
            return self._usual.call(inputs)
        return self.run(*inputs, extents=extents)

    def refuse(self, problem: MdfuseError, options: Options | None = None) -> None:
        """Raise a problem instead of a run, so that no rank waits for this one."""
        last = self._evaluators.recent
        host = self.host if last is None else last.program  # one on which all ranks can fail
        self._evaluator(host, options or self.options).call((), None, problem)

    def _run_other(
        self,
        key: Hashable | None,
        inputs: Sequence[Any],
        out: Sequence[Tensor | None] | None,
        extents: Mapping[str, int] | None,
        options: Options | None,
    ) -> list[Any]:
        """Run with extents or options that are new here, and remember the evaluator under `key`."""
        options = options or self.options
        host, problem = self._host_for_run(inputs, extents, options)
        evaluator = self._evaluator(host, options)
        if problem is None and key is not None:
            self._chosen.put(key, evaluator)
        return evaluator.call(inputs, out, problem)

    @cached_property
    def _usual(self) -> HostIrEvaluator | Trial:
        """The evaluator of a program without symbolic extents, with the options of `compile`."""
        usual = self._evaluator(self.host, self.options)
        if self.overlap is None or not self.overlap.is_measured:
            return usual
        return Trial(self._evaluator(self.overlap.plain, self.options), usual, self._keep)

    def _keep(self, trial: Trial) -> None:
        """Run the faster form from now on."""
        self.__dict__["_usual"] = trial.best
        self.__dict__["_measured"] = trial.decision

    def _overlap_told(self) -> Iterator[str]:
        if self.overlap is not None:
            yield from self.overlap.decisions
            measured: str | None = self.__dict__.get("_measured")
            if measured is not None:
                yield measured

    @cached_property
    def _chosen(self) -> Cache[HostIrEvaluator]:
        """The evaluators of earlier runs, by the shapes, extents and options that they were given.

        Shapes determine the extents that were not given.
        """
        return Cache(program_limit(self.options))

    def _evaluator(self, host: HostProgram, options: Options | None) -> HostIrEvaluator:
        return self._evaluators.get_or(
            (id(host), options), lambda: HostIrEvaluator(host, None, options, self.plans)
        )

    def _host_for_run(
        self, inputs: Sequence[Any], extents: Mapping[str, int] | None, options: Options | None
    ) -> tuple[HostProgram, MdfuseError | None]:
        """Return the host program for a run; with a problem, one on which all ranks can fail."""
        try:
            if self.symbolic is None:
                return self.host_for(extents), None
            rank = init(options).rank
            if has_dtensors(inputs):
                from mdfuse.runs.dtensor_border import locals_of

                extents = known_extents(self._local_extents, inputs, extents)
                inputs = locals_of(inputs)
            return self.symbolic.host_for(self._local_extents.of(rank, inputs, extents)), None
        except MdfuseError as problem:
            last = self._evaluators.recent
            return last.program if last is not None else self.host, problem


def headline(program: Program) -> str:
    """Return a program's name and its size."""
    segments = counted(len(program.segments), "segment")
    return f"@{program.host.name}: {segments}, {counted(len(program.host), 'instruction')}"


def _streams(host: HostProgram) -> Iterator[str]:
    """Yield lines on the work of each stream."""
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


def _launches(host: HostProgram, last: HostIrEvaluator | None) -> Iterator[str]:
    """Yield lines on compiled launches, and on those that the last run could not compile."""
    units = [i for i in host.walk() if i.op == "launch"]
    if not units:
        return
    yield f"launches: {len(units)}, of {sum(len(i.body) for i in units)} local instructions"
    yield from (f"  {line}" for line in (last.fuser.report_lines() if last is not None else ()))


def _graphs(host: HostProgram, options: Options | None) -> Iterator[str]:
    """Yield lines on the parts that are captured as CUDA graphs, and on the others."""
    if options_from_environment(options).graph == "never":
        yield 'graphs: none, because graph="never"'
        return
    on_host = [b for b in host.backends if b in BACKENDS and not BACKENDS[b].can_capture]
    if on_host:
        yield f"graphs: none, because the host does the work of {' and '.join(on_host)}"
        return
    reasons: dict[str, list[str]] = {}
    for i, why in eager(host):
        reasons.setdefault(why, []).append(", ".join(f"%{n}" for n in i.outputs) or i.op)
    if not reasons:
        yield (
            "graphs: on GPUs the whole program is captured in the second run, and replayed from "
            "then on"
        )
        return
    yield "graphs: on GPUs captured in the second run, and replayed from then on, but for"
    for why, names in reasons.items():
        yield f"  {', '.join(names)}: {'runs' if len(names) == 1 else 'run'} eagerly, {why}"


def compile(
    definition: FusionDefinition,
    options: Options | None = None,
    should_merge: ShouldMerge | None = None,
) -> Program:
    """Lower a definition to a program for all its ranks; this needs no process group and no GPU.

    An equal definition that was compiled before gives the same program (`FusionCache`).

    Args:
        definition: a definition whose `with` block has ended.
        options: how the program will run.
        should_merge: see `mdfuse.passes.segmentation.segment`.

    Returns:
        The program, which runs on each rank and prints as one for all of them.

    Raises:
        MdfuseError: the definition cannot be compiled; the error names the user's line.
    """
    check_definition("compile", definition)
    if not isinstance(options, Options | None):
        raise ProgramError(
            f"options={shown(options)} of compile", hint="mf.compile(fd, mf.Options())"
        )
    if should_merge is not None:
        check_merge(should_merge)
    named = definition.named
    key = should_merge, options, None if options else environment()
    return program_of(named, key, lambda s: lowered(s, options, should_merge))


@no_collection()  # a program's parts stay alive
@stage("lowering")
def lowered(
    named: NamedDefinition,
    options: Options | None = None,
    should_merge: ShouldMerge | None = None,
) -> Program:
    """Return the program of a definition, lowered anew; see `compile`."""
    chosen = options_from_environment(options)
    if compiles(chosen) and not helper_pool.start_for(len(named.fusion.exprs)):
        start_workers()
    if chosen.same_bits:
        from mdfuse.compiled.leaf_program import on_leaves

        return on_leaves(named.fusion, named.examples, chosen, should_merge)
    if chosen.sizes:
        from mdfuse.compiled.sizes import sized

        return sized(named, chosen, should_merge)
    if named.examples:
        symbolic = lowerings_of(named.fusion, named.examples, named.assumed, should_merge, options)
        (first,) = symbolic.lowerings
        left = overlap.left(first.host, "it has symbolic extents", chosen)
        return Program(first.fusion, first.segments, first.host, options, symbolic, overlap=left)
    lower = partial(_lowered, named.fusion, options, should_merge)
    x = from_files(named.fusion, options, ("compile",) if should_merge is None else None, lower)
    return Program(x.fusion, x.segments, x.host, options, overlap=x.overlap)


def _lowered(
    fusion: Fusion, options: Options | None, should_merge: ShouldMerge | None
) -> ProgramParts:
    (fusion, parts, host), decisions = overlap.lower(fusion, should_merge, options)
    return ProgramParts(fusion, segments_of(fusion, parts, host, options), host, decisions)
