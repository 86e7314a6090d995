"""Run every rank of a program in this process, step by step, on the `sim` backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.sim import SimNetwork
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import CommunicationError, ProgramError
from mdfuse.evaluator import check_arguments, check_global, numbers
from mdfuse.hir.program import HostProgram
from mdfuse.plan import Plan, build
from mdfuse.posts import Slots
from mdfuse.program import Program
from mdfuse.sharding import shard_tensor, unshard_tensor


@dataclass(frozen=True)
class Simulated:
    """What a simulated run gave.

    Attributes:
        per_rank: for each rank from 0 to the highest of any mesh, its local outputs.
        outputs: the global outputs.
    """

    per_rank: tuple[list[Any], ...]
    outputs: list[Tensor]


@dataclass
class _Rank:
    """One simulated rank on its way through its plan."""

    plan: Plan
    slots: Slots
    at: int = 0

    def step(self) -> bool:
        """Go on to the next wait that is not done; whether anything ran."""
        start = self.at
        while self.at < len(self.plan.thunks):
            handle = self.plan.waits.get(self.at)
            if handle is not None and not _is_done(self.slots[handle]):
                break
            self.plan.thunks[self.at](self.slots)
            self.at += 1
        return self.at > start

    @property
    def is_done(self) -> bool:
        return self.at == len(self.plan.thunks)


def _is_done(pending: Any) -> bool:
    return pending.work is None or pending.work.is_done


def simulate(
    program: Program | HostProgram,
    inputs: Sequence[Any] | None = None,
    extents: Mapping[str, int] | None = None,
    *,
    per_rank: Sequence[Mapping[str, Any]] | None = None,
    options: Options | None = None,
) -> Simulated:
    """Run all ranks in lockstep; deterministic.

    Args:
        program: a compiled program, or a host program.
        inputs: global tensors (numbers for scalars) in definition order.
        extents: symbolic extents by name.
        per_rank: instead of `inputs`: for each rank, name -> local tensor.
        options: `poison` is the one that matters here.

    Raises:
        ProgramError: the inputs do not fit.
        CommunicationError: posts of different ranks do not fit, or ranks wait for each other.
    """
    host = program.host if isinstance(program, Program) else program
    if not isinstance(host, HostProgram):
        raise ProgramError(
            f"{type(program).__name__} is no program", hint="pass what mf.compile(fd) returns"
        )
    if extents:
        raise ProgramError(
            f"extents {dict(extents)}",
            because="this program has no symbolic extents",
            hint="leave extents= out",
        )
    size = host.last_rank + 1
    arguments = _arguments(host, inputs, per_rank, size)
    network = SimNetwork()
    poison = options_from_environment(options).poison
    device = _device(arguments)
    ranks = []
    for rank in range(size):
        check_arguments(host, rank, arguments[rank], device)
        plan = build(host.project(rank), network.backend(rank).bind, device, poison)
        ranks.append(_Rank(plan, plan.start(numbers(host, arguments[rank]))))
    _run(ranks, network)
    outputs = tuple(r.plan.finish(r.slots) for r in ranks)
    if isinstance(program, Program):
        outputs = tuple(
            program._reused(a, list(o)) for a, o in zip(arguments, outputs, strict=True)
        )
    return Simulated(
        outputs, [_global(host, name, i, outputs) for i, name in enumerate(host.outputs)]
    )


def _arguments(
    host: HostProgram,
    inputs: Sequence[Any] | None,
    per_rank: Sequence[Mapping[str, Any]] | None,
    size: int,
) -> list[list[Any]]:
    if per_rank is not None:
        if len(per_rank) != size:
            raise ProgramError(
                f"{len(per_rank)} dicts of inputs for {size} ranks",
                hint=f"pass one for each of the ranks 0 to {size - 1}",
            )
        _check_names(host, inputs, per_rank)
        return [[given.get(name) for name in host.inputs] for given in per_rank]
    inputs = inputs or []
    if len(inputs) != len(host.inputs):
        raise ProgramError(
            f"@{host.name}: {len(inputs)} arguments for {len(host.inputs)} inputs",
            hint="pass global tensors, in this order: " + ", ".join(host.inputs),
        )
    pairs = list(zip(host.inputs, inputs, strict=True))
    for name, x in pairs:
        kind = host.types[name]
        shape = kind.shape if kind.layout is not None else None
        check_global(host.name, name, x, shape, kind.dtype)
    return [[_local(host, name, x, rank) for name, x in pairs] for rank in range(size)]


def _check_names(
    host: HostProgram, inputs: Sequence[Any] | None, per_rank: Sequence[Mapping[str, Any]]
) -> None:
    if inputs is not None:
        raise ProgramError("inputs and per_rank= at once", hint="pass one of them")
    for rank, given in enumerate(per_rank):
        unknown = [name for name in given if name not in host.inputs]
        if unknown:
            raise ProgramError(
                f"@{host.name} on rank {rank}: unknown {unknown}",
                hint="its inputs are " + ", ".join(host.inputs),
            )


def _local(host: HostProgram, name: str, x: Any, rank: int) -> Any:
    layout = host.types[name].layout
    if layout is None:
        return x
    return shard_tensor(x, layout, rank=rank) if rank in layout.mesh else None


def _device(arguments: Sequence[Sequence[Any]]) -> torch.device:
    found = (x.device for row in arguments for x in row if isinstance(x, Tensor))
    return next(found, torch.device("cpu"))


def _run(ranks: Sequence[_Rank], network: SimNetwork) -> None:
    while not all(r.is_done for r in ranks):
        progress = [r.step() for r in ranks]
        if not any(progress):
            stuck = [
                f"rank {i} waits at {r.plan.labels[r.at]}"
                for i, r in enumerate(ranks)
                if not r.is_done
            ]
            raise CommunicationError(
                "no rank can go on",
                where=[*stuck, *network.leftovers()],
                because="each waits for a communication that another rank has not posted",
            )
    left = network.leftovers()
    if left:
        raise CommunicationError("posts that nobody answered", where=left)


def _global(host: HostProgram, name: str, index: int, outputs: Sequence[Sequence[Any]]) -> Tensor:
    layout = host.types[name].layout
    assert layout is not None
    return unshard_tensor([outputs[r][index] for r in layout.mesh.ranks], layout)
