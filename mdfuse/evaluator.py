"""The evaluator: checks arguments, builds a plan per rank, keeps it, runs it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mdfuse.config import Options, options_from_environment
from mdfuse.errors import BackendError, MdfuseError, ProgramError
from mdfuse.hir.program import HostProgram
from mdfuse.plan import Plan, as_number, build

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator


_serials = itertools.count()


@dataclass
class HostIrEvaluator:
    """Runs a global host program on this rank.

    Args:
        program: for all ranks; it is projected onto this one.
        communicator: by default what `mdfuse.init()` gives.
        options: by default those of the environment.
    """

    program: HostProgram
    communicator: Communicator | None = None
    options: Options | None = None
    _plan: Plan | None = field(default=None, init=False, repr=False)
    #: Tells this evaluator and its runs from others; all ranks make the same ones in one order.
    _serial: int = field(default=0, init=False, repr=False)
    _runs: int = field(default=0, init=False, repr=False)

    def run(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Run once.

        Args:
            arguments: name -> local tensor (None where this rank is outside the input's mesh) or
                number; names of outputs give preallocated buffers.

        Returns:
            The local outputs; None where this rank is outside the output's mesh.

        Raises:
            ProgramError: an argument is missing, unknown, or does not fit the program. Before the
                first run all ranks agree, so it is raised on every rank alike.
        """
        names = self.program.inputs
        given = {n: arguments[n] for n in arguments if n not in names}
        unknown = [n for n in given if n not in self.program.outputs]
        problem: MdfuseError | None = None
        missing = [n for n in names if n not in arguments]
        if unknown or missing:
            problem = ProgramError(
                f"@{self.program.name}: missing {missing}, unknown {unknown}",
                hint="pass a tensor, None or a number for each of " + ", ".join(names),
            )
        out = [given.get(n) for n in self.program.outputs] if given else None
        return self.call([arguments.get(n) for n in names], out, problem)

    def call(
        self,
        arguments: Sequence[Any],
        out: Sequence[Tensor | None] | None = None,
        problem: MdfuseError | None = None,
    ) -> list[Any]:
        """`run` with positional arguments."""
        communicator = self._communicator()
        if problem is None:
            problem = self._problem(arguments, out, communicator)
        if self._plan is None:
            self._agree(problem, communicator)
            self._prepare(communicator)
        assert self._plan is not None
        self._runs += 1
        if problem is not None:
            if self.program.communications:
                communicator.refuse(self._occasion, str(problem))
            raise problem
        try:
            results = self._plan.run(numbers(self.program, arguments))
        except BackendError as error:
            raise self._refused(communicator) or error from error
        return results if out is None else _into(results, out)

    @property
    def _occasion(self) -> str:
        """This run, by a name that is the same on all ranks."""
        return f"{self._serial}/{self._runs}"

    def _refused(self, communicator: Communicator) -> ProgramError | None:
        """Why a communication broke, where another rank refused this run."""
        reason = communicator.why_refused(self._occasion)
        if reason is None:
            return None
        return ProgramError(
            f"@{self.program.name} broke off on rank {communicator.rank}: another rank refused it",
            where=reason.splitlines(),
            because="all ranks run, or none does",
        )

    def _communicator(self) -> Communicator:
        if self.communicator is None or self.communicator.is_closed:
            from mdfuse.runtime.communicator import init

            self.communicator, self._plan = init(self.options), None
        return self.communicator

    def _problem(
        self, arguments: Sequence[Any], out: Sequence[Any] | None, communicator: Communicator
    ) -> MdfuseError | None:
        try:
            if self.program.last_rank >= communicator.size:
                raise ProgramError(
                    f"@{self.program.name} runs on ranks up to {self.program.last_rank}, "
                    f"but there are {communicator.size} processes",
                    because="every rank of a mesh is one process",
                    hint=f"start {self.program.last_rank + 1} processes, or use a smaller mesh",
                )
            check_arguments(self.program, communicator.rank, arguments, communicator.device)
            if out is not None:
                check_outputs(self.program, communicator.rank, out, communicator.device)
        except MdfuseError as error:
            return error
        return None

    def _agree(self, problem: MdfuseError | None, communicator: Communicator) -> None:
        """Raise on every rank where one has a problem, before anything is posted."""
        reports = communicator.all_ok(str(problem) if problem is not None else None)
        if problem is not None:
            raise problem
        for rank, report in enumerate(reports):
            if report is not None:
                raise ProgramError(
                    f"rank {rank} refused to run @{self.program.name}",
                    where=report.splitlines(),
                    because="all ranks run, or none does",
                )

    def _prepare(self, communicator: Communicator) -> None:
        """Project, make the teams in program order, build the plan."""
        rank = communicator.rank
        local = self.program.project(rank)
        teams = [c.group(rank) for c in local.communications]
        communicator.prepare(t for t in dict.fromkeys(teams) if len(t) > 1)
        options = options_from_environment(self.options)
        self._serial, self._runs = next(_serials), 0
        self._plan = build(local, communicator.poster, communicator.device, options.poison)


def check_arguments(
    program: HostProgram, rank: int, arguments: Sequence[Any], device: torch.device
) -> None:
    """Raise ProgramError unless the arguments of one rank are what the program says."""
    if len(arguments) != len(program.inputs):
        raise ProgramError(
            f"@{program.name} on rank {rank}: {len(arguments)} arguments for "
            f"{len(program.inputs)} inputs",
            hint="pass, in this order: " + ", ".join(program.inputs),
        )
    for name, argument in zip(program.inputs, arguments, strict=True):
        _check(program, rank, name, argument, device, "input")


def check_global(
    program: str, name: str, x: Any, shape: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    """Raise ProgramError unless a global input is a tensor of a shape; without one, a number."""
    where = f"input %{name} of @{program}"
    if shape is None:
        if as_number(x, dtype) is None:
            raise _no_number(name, x, dtype, where)
        return
    if isinstance(x, Tensor) and (tuple(x.shape), x.dtype) == (shape, dtype):
        _check_strided(name, x, where)
        return
    found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
    raise ProgramError(
        f"{found} for %{name}, expected a global tensor: {dtype} {shape}",
        where=where,
        hint="pass the whole tensor, not the part of one rank",
    )


def _check_strided(name: str, x: Tensor, where: str) -> None:
    if x.layout is not torch.strided:
        raise ProgramError(
            f"%{name} is a {x.layout} tensor",
            where=where,
            because="a program computes with strided tensors",
            hint="pass x.to_dense()",
        )


def _no_number(name: str, x: Any, dtype: torch.dtype, where: str) -> ProgramError:
    return ProgramError(
        f"{_described(x)} for %{name}",
        where=where,
        because=f"this input is a number of dtype {dtype}",
        hint="pass such a number, or define the scalar with another dtype",
    )


def _described(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def check_outputs(
    program: HostProgram, rank: int, out: Sequence[Any], device: torch.device
) -> None:
    """Raise ProgramError unless preallocated outputs are what the program says: all or none."""
    if len(out) != len(program.outputs):
        raise ProgramError(
            f"@{program.name} on rank {rank}: {len(out)} buffers for {len(program.outputs)} "
            "outputs",
            hint="pass a buffer for every output, or none",
        )
    for name, buffer in zip(program.outputs, out, strict=True):
        _check(program, rank, name, buffer, device, "output")


def _check(
    program: HostProgram, rank: int, name: str, x: Any, device: torch.device, role: str
) -> None:
    kind = program.types[name]
    where = f"rank {rank}, {role} %{name} of @{program.name}"
    if kind.layout is None:
        if as_number(x, kind.dtype) is None:
            raise _no_number(name, x, kind.dtype, where)
        return
    if rank not in kind.layout.mesh:
        if x is not None:
            raise ProgramError(
                f"a tensor for %{name} on rank {rank}",
                where=where,
                because=f"it lives on {kind.layout.mesh}, which rank {rank} is not in",
                hint="pass None here",
            )
        return
    if not isinstance(x, Tensor):
        raise ProgramError(
            f"{type(x).__name__} for %{name}", where=where, hint="pass this rank's local tensor"
        )
    _check_strided(name, x, where)
    expected = kind.local_shape(rank)
    if tuple(x.shape) != expected:
        raise ProgramError(
            f"%{name} has shape {tuple(x.shape)} on rank {rank}, expected {expected}",
            where=where,
            because=f"its part of {kind.shape} laid out as {kind.layout} has that shape",
            hint="pass the local part: mdfuse.shard_tensor(global_tensor, mesh, layout, rank=...)",
        )
    if x.dtype != kind.dtype:
        raise ProgramError(
            f"%{name} has dtype {x.dtype}, expected {kind.dtype}",
            where=where,
            hint=f"pass x.to({kind.dtype}), or define the {role} with {x.dtype}",
        )
    if x.device != device:
        raise ProgramError(
            f"%{name} is on {x.device}, expected {device}",
            where=where,
            because=f"rank {rank} computes on {device}",
            hint=f"pass x.to({str(device)!r})",
        )


def numbers(program: HostProgram, arguments: Sequence[Any]) -> list[Any]:
    """The arguments, with those for scalars as Python numbers of the kind that was defined."""
    kinds = [program.types[name] for name in program.inputs]
    return [
        as_number(x, kind.dtype) if kind.layout is None else x
        for kind, x in zip(kinds, arguments, strict=True)
    ]


def _into(results: list[Any], out: Sequence[Tensor | None]) -> list[Any]:
    """Results in the caller's buffers."""
    for buffer, result in zip(out, results, strict=True):
        if buffer is not None and result is not None and buffer is not result:
            buffer.copy_(result)
    return list(out)
