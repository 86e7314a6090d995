"""The evaluator: checks arguments, builds a plan per rank, keeps it, runs it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mdfuse.arguments import check_arguments, check_names, check_outputs, numbers
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import BackendError, MdfuseError, ProgramError
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify import verify
from mdfuse.plan.build import Plan, build
from mdfuse.plan.posts import groups

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator


_serials = itertools.count()


@dataclass
class HostIrEvaluator:
    """Runs a global host program on this rank.

    Args:
        program: for all ranks, then it is projected onto this one; or the projection itself.
        communicator: by default what `mdfuse.init()` gives.
        options: by default those of the environment.

    Raises:
        ProgramError: an input is an alias, aliases form a cycle, or a name means nothing.
    """

    program: HostProgram
    communicator: Communicator | None = None
    options: Options | None = None
    _plan: Plan | None = field(default=None, init=False, repr=False)
    _local: HostProgram | None = field(default=None, init=False, repr=False)
    #: Tells this evaluator and its runs from others; all ranks make the same ones in one order.
    _serial: int = field(default=0, init=False, repr=False)
    _runs: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_names(self.program)

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
        return self.call([arguments.get(n) for n in names], out, problem, is_partial=True)

    def call(
        self,
        arguments: Sequence[Any],
        out: Sequence[Tensor | None] | None = None,
        problem: MdfuseError | None = None,
        is_partial: bool = False,
    ) -> list[Any]:
        """`run` with positional arguments; `is_partial`: some outputs may have no buffer."""
        communicator = self._communicator()
        if problem is None:
            problem = self._problem(arguments, out, is_partial, communicator)
        if self._plan is None:
            problem = problem or self._check(communicator)
            self._agree(problem, communicator)
            self._prepare(communicator)
        assert self._plan is not None
        self._runs += 1
        if problem is not None:
            if self._communicates:
                communicator.refuse(self._occasion, str(problem))
            raise problem
        try:
            return self._plan.run(numbers(self.program, arguments), out)
        except BackendError as error:
            raise self._refused(communicator) or error from error

    @cached_property
    def _communicates(self) -> bool:
        return any(i.comm is not None or i.op in ("send", "recv") for i in self.program.walk())

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
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None,
        is_partial: bool,
        communicator: Communicator,
    ) -> MdfuseError | None:
        try:
            if self.program.last_rank >= communicator.size:
                raise ProgramError(
                    f"@{self.program.name} runs on ranks up to {self.program.last_rank}, "
                    f"but there are {communicator.size} processes",
                    because="every rank of a mesh is one process",
                    hint=f"start {self.program.last_rank + 1} processes, or use a smaller mesh",
                )
            if self.program.rank not in (None, communicator.rank):
                raise ProgramError(
                    f"@{self.program.name} is the projection onto rank {self.program.rank}, but "
                    f"this is rank {communicator.rank}",
                    hint="pass the global program, or each rank its own projection",
                )
            check_arguments(self.program, communicator.rank, arguments, communicator.device)
            if out is not None:
                rank, device = communicator.rank, communicator.device
                check_outputs(self.program, rank, arguments, out, device, is_partial)
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

    def _check(self, communicator: Communicator) -> MdfuseError | None:
        """What is wrong with the program, if anything; before its first run."""
        try:
            if options_from_environment(self.options).verify:
                verify(self.program)
            self._local = self.program.project(communicator.rank)
        except MdfuseError as error:
            return error
        return None

    def _prepare(self, communicator: Communicator) -> None:
        """Make the teams in program order, build the plan.

        Raises:
            ProgramError: the program means nothing on some rank; on every rank alike.
        """
        problem, plan = None, None
        options, local = options_from_environment(self.options), self._local
        assert local is not None
        communicator.prepare(groups(local, communicator.rank))
        try:
            plan = build(local, communicator.poster, communicator.device, options.poison)
        except MdfuseError as error:
            problem = error
        self._agree(problem, communicator)
        self._serial, self._runs = next(_serials), 0
        self._plan = plan
