"""Run every rank of a program in this process, on the `sim` backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mdfuse.compiled.leaf_program import LeafProgram
from mdfuse.compiled.program import Program
from mdfuse.compiled.sizes import SizedProgram
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import ProgramError, counted, listed
from mdfuse.hir.instructions import counts_of
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.traffic import received
from mdfuse.hir.verify.bindings import check_bindings
from mdfuse.hir.verify.check import verify_once
from mdfuse.ir.tensors import resolved, why_not
from mdfuse.layouts.sharding import shard_tensor, unshard_tensor
from mdfuse.leaves.carrier import LocalCarrier
from mdfuse.leaves.leaf_run import LeafRun
from mdfuse.plan.build import Plan
from mdfuse.plan.context import PlanStep
from mdfuse.plan.index_checks import IndexChecks
from mdfuse.plan.invalid_names import check_names
from mdfuse.plan.lines import Slots
from mdfuse.runs.arguments import (
    check_arguments,
    check_global,
    check_no_gradients,
    check_outputs,
    described,
    numbers,
)
from mdfuse.runs.extents import check_extents, global_extents
from mdfuse.simulation.network import SimNetwork
from mdfuse.simulation.prepared import PreparedSimulation, device_of, keep, known
from mdfuse.simulation.shuffled import run_shuffled

#: What can be simulated: a compiled program, a host program, or the projection of each rank.
Simulable = Program | HostProgram | Sequence[HostProgram]


@dataclass(frozen=True)
class Simulated:
    """The outputs of a simulated run, and what it took.

    Attributes:
        per_rank: for each rank from 0 to the highest of any mesh, its local outputs.
        outputs: the global outputs (numbers for scalars; None for what varies from rank to rank);
            empty where each rank has a program of its own.
        peak_bytes: for each rank, the most bytes of buffers that it held at once, inputs included;
            empty for a shuffled schedule.
        arrived: for each rank, the bytes that reached it of rows which the run counted.
        programs: what each rank ran.
    """

    per_rank: tuple[list[Any], ...]
    outputs: list[Any]
    peak_bytes: tuple[int, ...] = ()
    arrived: tuple[int, ...] = field(default=(), repr=False)
    programs: tuple[HostProgram, ...] = field(default=(), repr=False)

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """For each rank, the bytes that reached it from others: ring model, padding included."""
        return tuple(
            n + sum(size for i, size in received(p, rank) if counts_of(i) is None)
            for rank, (n, p) in enumerate(zip(self.arrived, self.programs, strict=True))
        )


@dataclass
class _Memory:
    """Counts the bytes of the buffers in a rank's slots, and their peak."""

    #: storage of an input -> bytes of the rank's part, which may be a view of a global tensor
    sizes: dict[int, int] = field(default_factory=dict)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    now: int = 0
    peak: int = 0

    def update(self, slot: int, x: Any) -> None:
        """Note that a slot holds a value from now on, which may be a buffer."""
        if slot in self.held:
            key, size = self.held.pop(slot)
            self.users[key] -= 1
            self.now -= 0 if self.users[key] else size
        if isinstance(x, Tensor) and x.untyped_storage().nbytes():
            storage = x.untyped_storage()
            key = storage.data_ptr()
            size = self.sizes.get(key, storage.nbytes())
            self.now += 0 if self.users.get(key) else size
            self.users[key] = self.users.get(key, 0) + 1
            self.held[slot] = key, size
            self.peak = max(self.peak, self.now)


@dataclass
class _SimulatedRank:
    """One simulated rank on its way through its plan."""

    plan: Plan
    slots: Slots
    memory: _Memory = field(default_factory=_Memory)
    at: int = 0

    def __post_init__(self) -> None:
        for slot, x in enumerate(self.slots):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.memory.sizes[storage.data_ptr()] = min(storage.nbytes(), x.nbytes)
            self.memory.update(slot, x)

    def step(self) -> bool:
        """Run up to the next wait that would block, and tell whether anything ran."""
        start = self.at
        while self.at < len(self.plan.steps):
            step = self.plan.steps[self.at]
            if step.waits is not None and not self.may_go(step.waits):
                break
            self.run(step)
            for slot in (*step.outputs, *(step.inputs if step.op == "free" else ())):
                self.memory.update(slot, self.slots[slot])
            self.at += 1
        return self.at > start

    def run(self, step: PlanStep) -> None:
        try:
            step.run(self.slots)
        except Exception as error:
            error.add_note(f"in {step.label}")
            raise

    def may_go(self, waits: tuple[int, int | None]) -> bool:
        """Tell whether a wait would not block."""
        handle, piece = waits
        return bool(self.slots[handle].is_done(piece))

    @property
    def is_done(self) -> bool:
        return self.at == len(self.plan.steps)


def simulate(
    program: Simulable,
    inputs: Sequence[Any] | None = None,
    extents: Mapping[str, int] | None = None,
    *,
    per_rank: Sequence[Mapping[str, Any]] | None = None,
    options: Options | None = None,
    schedule: int | None = None,
) -> Simulated:
    """Run all ranks of a program in this process, deterministically.

    Args:
        program: a compiled program, a host program, or the projections of all ranks in rank order.
        inputs: global tensors (numbers for scalars) in definition order.
        extents: symbolic extents by name; by default those of the global inputs.
        per_rank: instead of `inputs`: for each rank, name -> local tensor; names of outputs give
            preallocated buffers.
        options: `verify`, `poison` and `check_indices` are those that matter here.
        schedule: None: the ranks go on in lockstep, and a wait blocks its rank. A number: each
            stream of each rank and each transfer goes on by itself, as on GPUs, in a random order
            drawn from this seed. A result that nothing ordered before its use is then wrong.

    Raises:
        ProgramError: the program is wrong, or the inputs do not fit.
        IndexRangeError: with `check_indices`, an index is out of range.
        CommunicationError: posts of different ranks do not fit, or ranks wait for each other.
    """
    if isinstance(program, LeafProgram | SizedProgram):
        return _of_another_form(program, inputs, extents, per_rank, options, schedule)
    if isinstance(program, Program):
        program = _with_extents(program, inputs, extents)
    elif extents is not None:
        check_extents(_host(program).name, (), extents)
    host = _host(program)
    prepared = _prepared(program)
    _verify(prepared, options)
    arguments, out = _arguments(host, inputs, per_rank, len(prepared.locals_))
    arguments = [_resolved(host, given, at) for at, given in enumerate(arguments)]
    for given, buffers in zip(arguments, out, strict=True):
        check_no_gradients(host.name, host.inputs, given)
        check_no_gradients(host.name, host.outputs, buffers)
    how = options_from_environment(options)
    key, ready = prepared.take(arguments, out, how, is_late=schedule is not None)
    plans, network, checks = ready
    with torch.no_grad(), torch.autocast(device_of(arguments).type, enabled=False):
        slots = [
            plan.start(numbers(host, given), buffers)
            for plan, given, buffers in zip(plans, arguments, out, strict=True)
        ]
        if schedule is None:
            results, peaks = _run_in_lockstep(plans, slots, network)
        else:
            results, peaks = run_shuffled(plans, slots, network, checks, schedule), ()
        if checks.error is not None:
            raise checks.error
    arrived = tuple(network.arrived.pop(rank, 0) for rank in range(len(prepared.locals_)))
    prepared.give_back(key, ready)
    named = [] if host.rank is not None else enumerate(host.outputs)
    outputs = [_global(host, name, i, results) for i, name in named]
    return Simulated(results, outputs, peaks, arrived, prepared.locals_)


def _of_another_form(
    program: LeafProgram | SizedProgram,
    inputs: Sequence[Any] | None,
    extents: Mapping[str, int] | None,
    per_rank: Sequence[Mapping[str, Any]] | None,
    options: Options | None,
    schedule: int | None,
) -> Simulated:
    """Simulate a program that ranks do not run as it is printed."""
    if isinstance(program, SizedProgram):
        return _filled_up(program, inputs, extents, options, schedule)
    check_extents(program.host.name, (), extents)
    return _on_leaves(program, inputs, per_rank, options, schedule)


def _on_leaves(
    program: LeafProgram,
    inputs: Sequence[Any] | None,
    per_rank: Sequence[Mapping[str, Any]] | None,
    options: Options | None,
    schedule: int | None,
) -> Simulated:
    """Simulate a program with the same bits: each rank computes its leaves, as in a job."""
    code, how = program.code, options_from_environment(options)
    shown, ranks = code.shown, range(code.shown.last_rank + 1)
    if schedule is not None:
        raise ProgramError(
            f"@{shown.name} with same_bits and schedule={schedule}",
            because="the leaves of a rank go on step by step, and communications end at once",
            hint="leave schedule= out",
        )
    if how.verify:
        verify_once(program.host)
    arguments, out = _arguments(shown, inputs, per_rank, len(ranks))
    arguments = [_resolved(shown, given, at) for at, given in enumerate(arguments)]
    device, checks = device_of(arguments), IndexChecks()
    for rank, (given, buffers) in enumerate(zip(arguments, out, strict=True)):
        check_no_gradients(shown.name, shown.inputs, given)
        check_no_gradients(shown.name, shown.outputs, buffers)
        check_arguments(shown, rank, given, device)
        check_outputs(shown, rank, given, buffers, device, is_partial=True)
    carrier = LocalCarrier()
    computing = [rank for rank in ranks if rank in code.deal.mesh]
    run = LeafRun(
        code, computing, carrier, device, how.poison, checks if how.check_indices else None,
        compiles=how.compile != "never",
    )  # fmt: skip
    with torch.autocast(device.type, enabled=False):
        by_rank = run.run(dict(enumerate(arguments)), dict(enumerate(out)))
    if checks.error is not None:
        raise checks.error
    results = tuple(by_rank.get(rank, [None] * len(shown.outputs)) for rank in ranks)
    outputs = [_global(shown, name, i, results) for i, name in enumerate(shown.outputs)]
    arrived = tuple(carrier.received.get(rank, 0) for rank in ranks)
    return Simulated(results, outputs, (), arrived, (shown,) * len(ranks))


def _filled_up(
    program: SizedProgram,
    inputs: Sequence[Any] | None,
    extents: Mapping[str, int] | None,
    options: Options | None,
    schedule: int | None,
) -> Simulated:
    """Simulate a program with sizes: inputs are filled up, and the global outputs cut."""
    user = replace(program.definition, inputs=program.fusion.inputs)
    known = global_extents(user, inputs or (), extents)
    given, sizes = program.filled_up(inputs or (), known)
    run = simulate(program.whole, given, sizes, options=options, schedule=schedule)
    return replace(run, outputs=[*program.cut_all(run.outputs, known)])


def _resolved(host: HostProgram, given: Sequence[Any], at: int) -> list[Any]:
    """Return the arguments of one rank, with the elements of each in its memory.

    Inputs that are written stay as they are, and so does what does not fit, which is refused later.
    """
    rank = at if host.rank is None else host.rank
    unresolved = [
        n
        for n, name in enumerate(host.inputs)
        if name in host.written_inputs or not _fits(host, name, given[n], rank)
    ]
    return [*resolved(given, unresolved)]


def _fits(host: HostProgram, name: str, x: Any, rank: int) -> bool:
    """Tell whether an argument is a plain tensor of the shape that a rank holds."""
    kind = host.types[name]
    is_here = kind.layout is not None and rank in kind.layout.mesh
    is_plain = isinstance(x, Tensor) and why_not(x) is None  # a nested one has no shape
    return is_here and is_plain and x.shape == kind.local_shape(rank)


def _verify(prepared: PreparedSimulation, options: Options | None) -> None:
    if options_from_environment(options).verify:
        prepared.check()
        return
    for local in prepared.locals_:
        check_bindings(local)


def _with_extents(
    program: Program, inputs: Sequence[Any] | None, extents: Mapping[str, int] | None
) -> HostProgram:
    """Return the host program for the extents that are given, or that global inputs have."""
    if program.symbolic is not None and inputs is not None:
        extents = global_extents(program.symbolic.fusion, inputs, extents)
    return program.host_for(extents)


def _host(program: Simulable) -> HostProgram:
    """Return the host program whose inputs and outputs count; of projections the first."""
    host = program.host if isinstance(program, Program) else program
    if isinstance(host, Sequence) and host and all(isinstance(p, HostProgram) for p in host):
        host = host[0]
    if not isinstance(host, HostProgram):
        raise ProgramError(
            f"{type(program).__name__} is no program", hint="pass what mf.compile(fd) returns"
        )
    return host


def _prepared(program: HostProgram | Sequence[HostProgram]) -> PreparedSimulation:
    """Return the program of each rank, and what is left of the last simulation."""
    given = program if isinstance(program, HostProgram) else tuple(program)
    prepared = known(given)
    if prepared is None:
        prepared = PreparedSimulation(given, tuple(_projections(given)))
        keep(prepared)
    return prepared


def _projections(host: HostProgram | tuple[HostProgram, ...]) -> Sequence[HostProgram]:
    """Return the program of each rank."""
    if isinstance(host, tuple):
        _check_projections(host)
        return host
    check_names(host)
    if host.rank is not None:
        raise ProgramError(
            f"@{host.name} is the projection onto rank {host.rank} alone",
            hint="pass the global program, or the projections of all ranks",
        )
    return [project(host, rank) for rank in range(host.last_rank + 1)]


def _check_projections(programs: Sequence[HostProgram]) -> None:
    first = programs[0]
    for rank, local in enumerate(programs):
        check_names(local)
        if local.rank != rank:
            raise ProgramError(
                f"the projection onto rank {local.rank} in place {rank}",
                hint="pass the projections of all ranks in rank order",
            )
        if (local.inputs, local.outputs) != (first.inputs, first.outputs):
            raise ProgramError(
                f"@{local.name} on rank {rank} has other inputs or outputs than on rank 0",
                where=[
                    f"rank {r}: {p.inputs} -> {p.outputs}" for r, p in ((0, first), (rank, local))
                ],
                because="the ranks run one program",
                hint="name them alike; a rank outside of one's mesh passes, and gets, None",
            )


def _arguments(
    host: HostProgram,
    inputs: Sequence[Any] | None,
    per_rank: Sequence[Mapping[str, Any]] | None,
    size: int,
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the arguments and the preallocated outputs of each rank."""
    nothing = [[None] * len(host.outputs) for _ in range(size)]
    for what, given in (("inputs", inputs), ("per_rank", per_rank)):
        if given is not None and not isinstance(given, list | tuple):
            raise ProgramError(
                f"@{host.name}: {what}={described(given)}", hint="pass a list, also for one"
            )
    if per_rank is not None:
        if len(per_rank) != size:
            raise ProgramError(
                f"{len(per_rank)} dicts of inputs for {counted(size, 'rank')}",
                hint=f"pass one for each of the ranks 0 to {size - 1}",
            )
        _check_names(host, inputs, per_rank)
        arguments = [[given.get(name) for name in host.inputs] for given in per_rank]
        buffers = [n if n not in host.inputs else None for n in host.outputs]
        return arguments, [[given.get(n) if n else None for n in buffers] for given in per_rank]
    inputs = inputs or []
    if len(inputs) != len(host.inputs):
        raise ProgramError(
            f"@{host.name}: {counted(len(inputs), 'argument')} for "
            f"{counted(len(host.inputs), 'input')}",
            hint="pass global tensors, in this order: " + listed(host.inputs),
        )
    pairs = list(zip(host.inputs, inputs, strict=True))
    for name, x in pairs:
        kind = host.types[name]
        shape = kind.shape if kind.layout is not None else None
        check_global(host.name, name, x, shape, kind.dtype)
    return [[_local(host, name, x, rank) for name, x in pairs] for rank in range(size)], nothing


def _check_names(
    host: HostProgram, inputs: Sequence[Any] | None, per_rank: Sequence[Mapping[str, Any]]
) -> None:
    if inputs is not None:
        raise ProgramError("inputs and per_rank= at once", hint="pass one of them")
    for rank, given in enumerate(per_rank):
        if not isinstance(given, Mapping):
            raise ProgramError(
                f"@{host.name} on rank {rank}: {described(given)} for the arguments",
                because="per_rank= has a dict for each rank, in which they stand by name",
                hint="its inputs and outputs are " + listed((*host.inputs, *host.outputs)),
            )
        unknown = [name for name in given if name not in (*host.inputs, *host.outputs)]
        if unknown:
            raise ProgramError(
                f"@{host.name} on rank {rank}: unknown {unknown}",
                hint="its inputs and outputs are " + listed((*host.inputs, *host.outputs)),
            )


def _local(host: HostProgram, name: str, x: Any, rank: int) -> Any:
    layout = host.types[name].layout
    if layout is None:
        return x
    if rank not in layout.mesh:
        return None
    part = shard_tensor(x, layout, rank=rank)
    # Ranks have memory of their own, which matters where one of them writes into it.
    return part.clone() if host.aliases else part


def _run_in_lockstep(
    plans: Sequence[Plan],
    slots: Sequence[Slots],
    network: SimNetwork,
) -> tuple[tuple[list[Any], ...], tuple[int, ...]]:
    """Run all ranks in turn; return the outputs of each, and its peak of memory in bytes."""
    ranks = [_SimulatedRank(plan, s) for plan, s in zip(plans, slots, strict=True)]
    while not all(r.is_done for r in ranks):
        progress = [r.step() for r in ranks]
        if not any(progress):
            network.check_finished(
                [
                    f"rank {i} waits at {r.plan.steps[r.at].label}"
                    for i, r in enumerate(ranks)
                    if not r.is_done
                ]
            )
    network.check_finished(())
    results = tuple(r.plan.finish(r.slots) for r in ranks)
    return results, tuple(r.memory.peak for r in ranks)


def _global(host: HostProgram, name: str, index: int, outputs: Sequence[Sequence[Any]]) -> Any:
    layout = host.types[name].layout
    if layout is None:
        return outputs[0][index]
    if layout.varying_axes:
        return None
    return unshard_tensor([outputs[r][index] for r in layout.mesh.ranks], layout)
