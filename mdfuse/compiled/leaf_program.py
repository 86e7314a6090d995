"""Programs whose results have the same bits on every number of ranks (`Options.same_bits`).

A definition is lowered for a mesh of fixed size, whose ranks are *leaves*. So the program is the
same, to the letter, for every mesh of the user's, and each rank runs some of its ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mdfuse import hir_lowering
from mdfuse.compiled.advice import post_reason
from mdfuse.compiled.program import Program
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import LoweringError, ProgramError, counted, listed
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify.check import verify_once
from mdfuse.hir_lowering import Batch
from mdfuse.ir.graph import Fusion
from mdfuse.leaves.carrier import JobCarrier, LocalCarrier
from mdfuse.leaves.deal import Deal
from mdfuse.leaves.leaf_run import LeafCode, LeafRun, on_ranks
from mdfuse.mesh import DeviceMesh
from mdfuse.passes import meshes
from mdfuse.passes.segmentation import ShouldMerge
from mdfuse.plan.runnable import ByCall, Runnable
from mdfuse.runtime.agreement.programs import agree, fingerprint
from mdfuse.runtime.communicator import Communicator
from mdfuse.seeing.costs import Costs
from mdfuse.seeing.timeline import Timeline


@dataclass(frozen=True)
class LeafProgram(Program):
    """A program with `Options.same_bits`; see `Program`.

    `host` and printed text are those of the leaves, which are its ranks; layouts in `fusion` are on
    the mesh of the definition, as `run` takes and returns tensors. It has no segments.
    """

    mesh: DeviceMesh = field(kw_only=True)

    @cached_property
    def code(self) -> LeafCode:
        """The program of the leaves, and who computes them."""
        return LeafCode(self.host, Deal(self.mesh))

    def explain(self) -> str:
        """Return the choices of the compiler as text, with their reasons, and the cost."""
        posted = (i for i in self.host.walk() if i.comm is not None)
        posts = Counter(map(post_reason, posted)).items()
        lines = [f"@{self.host.name}: {counted(len(self.host), 'instruction')} of each leaf"]
        lines += [f"{n} × {why}" if n > 1 else why for why, n in posts]
        return "\n  ".join((*lines, *self._costs()))

    def _costs(self) -> Iterator[str]:
        deal = self.code.deal
        yield f"same bits: leaves along {deal}; sums in one tree over them"
        most = max(len(deal.leaves_of(rank)) for rank in deal.mesh.ranks)
        yield (
            f"same bits: a step runs up to {most} times on a rank, once where its values are whole"
        )
        yield "same bits: nothing overlaps, no CUDA graph is captured, no unit is compiled"
        if options_from_environment(self.options).compile != "never":
            yield "same bits: terms of large sums are added in one compiled kernel on GPUs"
        if idle := [rank for rank in deal.mesh.ranks if not deal.leaves_of(rank)]:
            yield f"same bits: no leaf is left for ranks {listed([*map(str, idle)])}, idle"
        borders, why = self.code.borders, "since parts of ranks are no parts of leaves"
        far = [f"%{n}" for n in self.host.inputs if (b := borders[n]) and not b.is_cut]
        if far:
            yield f"same bits: gathered before each run, {why}: {', '.join(far)}"
        far = [f"%{n}" for n in self.host.outputs if (b := borders[n]) and not b.is_joined]
        if far:
            yield f"same bits: gathered after each run, {why}: {', '.join(far)}"
        yield "same bits: on CPUs one thread computes; on GPUs not with kernels that add atomically"

    def bytes_received(
        self, rank: int, extents: Mapping[str, int] | None = None, at_worst: bool = False
    ) -> int:
        """Return the bytes that a rank receives in one run, those of gathered parts included."""
        return self._received.get(rank, 0)

    @cached_property
    def _received(self) -> dict[int, int]:
        """Rank -> bytes of a run, which goes through all steps without numbers."""
        carrier, device = LocalCarrier(), torch.device("meta")
        ranks, shown = self.mesh.ranks, self.code.shown
        given = {
            r: [
                torch.empty(t.local_shape(r), dtype=t.dtype, device=device) if t.layout else 1
                for t in map(shown.types.__getitem__, shown.inputs)
            ]
            for r in ranks
        }
        LeafRun(self.code, ranks, carrier, device).run(given)
        return carrier.received

    def timeline(
        self, costs: Costs, extents: Mapping[str, int] | None = None, at_worst: bool = False
    ) -> Timeline:
        """Refuse: a timeline is of ranks that each run one program.

        Raises:
            ProgramError: always.
        """
        raise ProgramError(
            f"a timeline of @{self.host.name} with same_bits",
            because="a rank runs several leaves of it, which tables of costs do not know",
            hint="compile without same_bits, or measure a run",
        )

    def _evaluator(self, host: HostProgram, options: Options | None) -> HostIrEvaluator:
        code, plans = self.code, self.plans
        return self._evaluators.get_or(
            options, lambda: LeafEvaluator(code.shown, None, options, plans, code=code)
        )


@dataclass
class LeafEvaluator(HostIrEvaluator):
    """Runs the leaves of this rank; see `HostIrEvaluator`.

    Attributes:
        code: the program of the leaves; `program` has its inputs and outputs as callers see them.
    """

    code: LeafCode | None = field(default=None, kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _evaluator_of, (self.code, self.options)

    @cached_property
    def communicates(self) -> bool:
        """True if several ranks compute it."""
        assert self.code is not None
        return self.code.deal.mesh.size > 1

    def _begin(self, problem: BaseException | None, communicator: Communicator) -> None:
        """Let all ranks agree before the first run, and make their teams in program order."""
        assert self.code is not None
        options, code = options_from_environment(self.options), self.code
        if problem is None and options.verify:
            try:
                verify_once(code.host)
            except BaseException as error:  # of any type: the others are told before it is raised
                problem = error
        what = f"{code.deal.mesh}\n{fingerprint(code.host, options)}"
        agree(self.program.name, problem, communicator, what)
        communicator.open(code.host.backends)
        for name in (None, *code.host.backends):
            communicator.prepare(_teams(code, communicator.rank, name), name)
        self._count_runs(communicator, may_capture=False)
        self._local, self._device_type = self.program, communicator.device.type

    def _first(
        self, arguments: Sequence[Any], out: Sequence[Any] | None, communicator: Communicator
    ) -> Runnable:
        assert self.code is not None and self._posters is not None
        rank, code = communicator.rank, self.code
        carrier = JobCarrier(self._posters(), communicator.device)
        options = options_from_environment(self.options)
        ranks = [rank] if rank in code.deal.mesh else []
        run = LeafRun(
            code, ranks, carrier, communicator.device, options.poison, self._checks,
            compiles=options.compile != "never",
        )  # fmt: skip
        nothing = [None] * len(code.host.outputs)

        def once(arguments: Sequence[Any], out: Sequence[Any] | None) -> list[Any]:
            buffers = None if out is None else {rank: out}
            return run.run({rank: arguments}, buffers).get(rank, nothing)

        xs = (*arguments, *(out or ()))
        plan = ByCall(
            call=once,
            numbers=any(code.shown.types[n].layout is None for n in code.shown.inputs),
            may_overlap=bool(code.shown.aliases) or out is not None,
            records=any(isinstance(x, Tensor) and x.requires_grad for x in xs),
            release=run.forget,
        )
        return self._checked(plan, communicator)


def _evaluator_of(code: LeafCode, options: Options | None) -> LeafEvaluator:
    return LeafEvaluator(code.shown, None, options, code=code)


def _teams(code: LeafCode, rank: int, backend: str | None) -> list[tuple[int, ...]]:
    """Return the teams of a rank, in an order that all ranks share; None: of the first backend."""
    teams: dict[tuple[int, ...], None] = {}
    if backend is None:
        teams[code.deal.mesh.ranks] = None  # parts that are gathered
    for comm in code.host.communications:
        if comm.backend == backend:
            for leaf in code.deal.leaf_mesh.ranks:
                teams[code.deal.team(comm.team(leaf))] = None
    return [team for team in teams if len(team) > 1 and rank in team]


def on_leaves(
    fusion: Fusion,
    examples: Mapping[str, int],
    options: Options,
    should_merge: ShouldMerge | None,
    batch: Callable[[Fusion], Batch | None] | None = None,
) -> LeafProgram:
    """Return the program of a definition with `Options.same_bits`.

    Args:
        fusion: as defined.
        examples: of its symbolic extents.
        options: as the environment and the caller have them.
        should_merge: see `mdfuse.passes.segmentation.segment`.
        batch: returns the inputs in microbatches, for the fusion of the leaves; None: at once.

    Raises:
        LoweringError: the definition has symbolic extents, no mesh, several, or more ranks than
            leaves; inputs or outputs that are Partial; it was imported for a number of ranks.
    """
    if fusion.by_ranks:
        because = "for another number of ranks the module is imported as another definition"
        raise _refused(fusion.name, fusion.by_ranks, because)
    deal = Deal(_mesh(fusion, examples))
    lowered_for = replace(options, overlap="never")
    fusion = meshes.on_mesh(fusion, deal.leaf_mesh)
    cut = batch(fusion) if batch is not None else None
    prepared, _, host = hir_lowering.lower(fusion, should_merge, options=lowered_for, batch=cut)
    _check(host)
    values = {
        name: value
        if value.layout is None
        else replace(value, layout=on_ranks(value.layout, len(value.shape), deal))
        for name, value in prepared.values.items()
    }
    shown = replace(prepared, values=values)
    program = LeafProgram(shown, (), host, options, mesh=deal.mesh)
    if not all(map(deal.leaves_of, deal.mesh.ranks)):
        for name in (n for n in host.outputs if host.types[n].layout is None):
            raise _refused(host.name, f"%{name} is a number", "a rank without leaves computes none")
    _ = program.code.programs  # refuses leaves that are not alike
    return program


def _mesh(fusion: Fusion, examples: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of a definition that leaves can compute."""
    if examples:
        what = f"extents that a run chooses: {listed(examples)}"
        raise _refused(fusion.name, what, "leaves are cut from numbers of rows that are known")
    every = {v.layout.mesh for v in fusion.values.values() if v.layout is not None}
    if len(every) != 1:
        what = f"{len(every)} meshes" if every else "no mesh"
        raise _refused(fusion.name, what, "its leaves are those of one mesh")
    for name, value in fusion.values.items():
        if value.layout is not None and value.layout.partial_axes and value.is_law:
            because = "its terms are those of ranks, and as many as there are ranks"
            raise _refused(fusion.name, f"%{name} is Partial", because, fusion.where(name))
    (mesh,) = every
    return mesh


def _check(host: HostProgram) -> None:
    """Refuse instructions that leaves cannot run."""
    for i in host.walk():
        if i.op in ("send", "recv"):
            because = "ranks of a ring begin at different chunks"
            raise _refused(host.name, "a ring", because, [str(i.source or i)])
    for name in (*host.inputs, *host.outputs):
        layout = host.types[name].layout
        if layout is not None and layout.partial_axes:
            because = "its terms are those of ranks, and as many as there are ranks"
            raise _refused(host.name, f"%{name} is Partial", because)


def _refused(
    name: str,
    what: str,
    because: str,
    where: Sequence[str] = (),
    hint: str = "leave same_bits out for it: results then depend on the number of ranks",
) -> LoweringError:
    text = f"@{name} with same_bits: {what}"
    return LoweringError(text, where=[*where], because=because, hint=hint)
