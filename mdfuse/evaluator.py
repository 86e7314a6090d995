"""The evaluator: checks arguments, builds a plan per kind of arguments, keeps it, runs it.

A run whose arguments look like those of an earlier one (shapes, strides, dtypes, devices) takes
the plan that was built then and makes its calls: nothing is inferred, checked or decided again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from sys import modules
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, autocast, is_autocast_enabled, is_grad_enabled

from mdfuse.config import Options, options_from_environment
from mdfuse.errors import BackendError, CountsError, IndexRangeError, MdfuseError
from mdfuse.hir.program import HostProgram
from mdfuse.interpreter.garbage import no_collection
from mdfuse.ir.tensors import resolved
from mdfuse.plan.build import Plan, build
from mdfuse.plan.dynamic_shapes import Lengths
from mdfuse.plan.fusing import Fuser
from mdfuse.plan.index_checks import IndexChecks, has_tables
from mdfuse.plan.invalid_names import check_names
from mdfuse.plan.kept import Plans
from mdfuse.plan.posting import groups
from mdfuse.plan.progress_bar import stage
from mdfuse.plan.runnable import ByCall, Once, Runnable, checked, once
from mdfuse.plan.signature import Signature, signature_of
from mdfuse.runs.arguments import (
    by_name,
    check_arguments,
    check_no_gradients,
    check_outputs,
    check_ranks,
    not_buffers,
    numbers,
)
from mdfuse.runs.capture_checks import captured_by_caller, check_capture, check_graph
from mdfuse.runs.repeated_runs import Again, never, permission, repeated
from mdfuse.runs.run_notes import align, noted, trace_of
from mdfuse.runtime.agreement.programs import agree, first_run
from mdfuse.runtime.sharing import Posters, arena, posters
from mdfuse.runtime.watch.plan_position import RunCount
from mdfuse.torch_private import untraced

if TYPE_CHECKING:
    from mdfuse.runs.dtensor_border import Border
    from mdfuse.runtime.communicator import Communicator


#: The plans of a program, for whatever shapes -> what was compiled for them; see `Fuser.lengths`.
_COMPILED: WeakKeyDictionary[Plans, Lengths] = WeakKeyDictionary()

_numbers = itertools.count()

#: The tally of an evaluator before its first run.
_NOTHING = RunCount(name="", serial=-1)

#: The last run: the key of its arguments, its plan.
_Last = tuple[Hashable | None, "Runnable | None"]

_NO_RUN = None, None


@dataclass
class HostIrEvaluator:
    """Runs a global host program on this rank.

    Args:
        program: the host program for all ranks, or its projection onto this one.
        communicator: by default that of `mdfuse.init()`.
        options: by default those of the environment.
        cache: keeps its plans, which others may share; by default one of its own.

    Attributes:
        plans: the plans by signature of the arguments; `plans.info()` counts.

    Raises:
        ProgramError: an input is an alias, aliases form a cycle, or a name means nothing.
    """

    program: HostProgram
    communicator: Communicator | None = None
    options: Options | None = None
    cache: Plans | None = field(default=None, repr=False)
    plans: Plans = field(init=False, repr=False)
    _number: int = field(default_factory=_numbers.__next__, init=False, repr=False)
    _last: _Last = field(default=_NO_RUN, init=False, repr=False)
    #: Runs with arguments that are known to be like those of the last two runs, else returns None.
    _again: Again = field(default_factory=lambda: never, init=False, repr=False)
    #: The projection that this rank runs, once all ranks agreed to.
    _local: HostProgram | None = field(default=None, init=False, repr=False)
    _signature: Signature | None = field(default=None, init=False, repr=False)
    #: Tells this evaluator and its runs from others; all ranks make theirs in the same order.
    _tally: RunCount = field(default=_NOTHING, init=False, repr=False)
    _device_type: str = field(default="cpu", init=False, repr=False)
    #: Memory of buffers that other ranks copy from in place.
    _arena: Tensor | None = field(default=None, init=False, repr=False)
    #: Makes the poster of each plan.
    _posters: Posters | None = field(default=None, init=False, repr=False)
    #: Returns True while the caller captures a CUDA graph that cannot contain this program; None:
    #: no graph is such.
    _is_captured: Callable[[], bool] | None = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        check_names(self.program)
        limit = options_from_environment(self.options).plans
        self.plans = self.cache or Plans(limit, program=self.program.name)
        self.plans.users[self._number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without plans: a copy has not run, and will on the communicator of its process."""
        return HostIrEvaluator, (self.program, None, self.options)

    @untraced
    def run(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Run once.

        Args:
            arguments: name -> local tensor (None where this rank is outside the input's mesh),
                DTensor or number; names of outputs give preallocated buffers.

        Returns:
            The local outputs; None where this rank is outside the output's mesh. With DTensors
            among the arguments: DTensors.

        Raises:
            ProgramError: an argument is missing, unknown, or does not fit the program. Before the
                first run all ranks agree, so it is raised on every rank alike.
        """
        values, out, problem = by_name(self.program, arguments)
        return self.call(values, out, problem, is_partial=True)

    @untraced
    def call(
        self,
        arguments: Sequence[Any],
        out: Sequence[Tensor | None] | None = None,
        problem: MdfuseError | None = None,
        is_partial: bool = False,
    ) -> list[Any]:
        """Run with positional arguments; see `run`.

        Args:
            arguments: in the order of the inputs.
            out: buffers in the order of the outputs.
            problem: why this rank cannot run; raised on all ranks.
            is_partial: some outputs may have no buffer.
        """
        if out is None and problem is None and (results := self._again(arguments)) is not None:
            return results
        if out is not None and not isinstance(out, list | tuple):
            problem, out = problem or not_buffers(self.program.name, out), None
        # `has_dtensors` without the call, since this is in the way of each run
        dtensor = getattr(modules.get("torch.distributed.tensor"), "DTensor", None)
        if dtensor is not None and (
            dtensor in map(type, arguments) or (out is not None and dtensor in map(type, out))
        ):
            return self._border.call(self.call, arguments, out, problem, is_partial)
        with self._lock:  # a plan's buffers serve one run at a time
            plan = self._known(arguments, out) if problem is None else None
            if plan is None:
                arguments = resolved(arguments, self._written)
                plan = self._plan(arguments, out, problem, is_partial)
            return self._run(plan, arguments, out)

    def _run(
        self,
        plan: Runnable,
        arguments: Sequence[Any],
        out: Sequence[Any] | None,
        at: tuple[int, ...] | None = None,
    ) -> list[Any]:
        """Run a plan of these arguments; `at` are their addresses where they are known."""
        self._tally.runs += 1
        communicator, concerns_others = self.communicator, self.communicates
        assert communicator is not None
        if concerns_others:
            communicator.is_ready = False  # for other threads
        try:
            if plan.numbers:
                arguments = numbers(self.program, arguments)
            if is_autocast_enabled(self._device_type):  # the program says the dtypes
                with autocast(self._device_type, enabled=False):
                    return plan.run(arguments, out, at)
            return plan.run(arguments, out, at)
        except BackendError as error:
            raise communicator.broke_off(self._tally, error) from error.__cause__
        except (CountsError, IndexRangeError):  # on all ranks, at the same place
            raise
        except BaseException as error:  # also Ctrl-C: this rank's next posts would not match
            if concerns_others:
                communicator.abandon(self._tally, error)
            raise
        finally:
            if concerns_others:
                communicator.is_ready = communicator.is_sound

    @cached_property
    def _checks(self) -> IndexChecks | None:
        """The checks of indices into tables; None where they are off, or there are no tables."""
        is_asked = options_from_environment(self.options).check_indices
        return IndexChecks() if is_asked and has_tables(self.program) else None

    @cached_property
    def _written(self) -> tuple[int, ...]:
        """The positions of inputs that are written."""
        return tuple(
            n for n, x in enumerate(self.program.inputs) if x in self.program.written_inputs
        )

    @cached_property
    def _border(self) -> Border:
        from mdfuse.runs.dtensor_border import Border

        return Border(self.program)

    # -- the plan of a run -----------------------------------------------------------------------

    def _known(self, arguments: Sequence[Any], out: Sequence[Any] | None) -> Runnable | None:
        """Return the plan of an earlier run of such arguments; None where they must be checked."""
        signature, communicator = self._signature, self.communicator
        if signature is None or communicator is None or not communicator.is_ready:
            return None
        if self._is_captured is not None and self._is_captured():
            return None
        key = signature.read(arguments, out)
        if key is None:
            return None
        plan = self._last[1] if key == self._last[0] else self.plans.find(key)
        if plan is None or isinstance(plan, Once) or (plan.records and is_grad_enabled()):
            return None
        if plan.may_overlap and not signature.are_apart(arguments, out):
            return None
        if plan.numbers and not self._are_numbers(signature, arguments):
            return None
        if not self.plans.again(key, plan):
            return None
        is_twice = key == self._last[0] and out is None
        self._last = key, plan
        self._again = self._repeated(signature, arguments) if is_twice else never
        return plan

    def _repeated(self, signature: Signature, arguments: Sequence[Any]) -> Again:
        """Return a call that runs the last plan again, for arguments like these."""
        (key, plan), communicator = self._last, self.communicator
        assert plan is not None and communicator is not None
        are_numbers = partial(self._are_numbers, signature) if plan.numbers else None
        # A signature that is alike has seen the stream; that of handle 0 is never captured.
        is_captured = self._is_captured if signature.stream() else None
        return repeated(
            plan,
            arguments,
            signature,
            cache=self.plans,
            key=key,
            may_run=permission(plan, are_numbers, is_captured),
            guarded=partial(self._run, plan),
            is_alone=not self.communicates and self._checks is None,
            communicator=communicator,
            tally=self._tally,
            lock=self._lock,
        )

    def _are_numbers(self, signature: Signature, arguments: Sequence[Any]) -> bool:
        """Tell whether each number is of its kind; a signature does not say so."""
        given = numbers(self.program, arguments)
        return not any(given[n] is None for n in signature.numbers)

    @no_collection()
    def _plan(
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None,
        problem: BaseException | None,
        is_partial: bool,
    ) -> Runnable:
        """Check arguments of a new kind, and return the plan of a run with them."""
        communicator = self._communicator()
        if problem is None:
            problem = self._problem(arguments, out, is_partial, communicator)
        if self._local is None:
            with communicator.first_run:
                try:
                    self._begin(problem, communicator)
                    plan, problem = self._cached(arguments, out, communicator)
                    agree(self.program.name, problem, communicator)
                except BaseException:
                    self.forget()
                    raise
        elif problem is None:
            plan, problem = self._cached(arguments, out, communicator)
        if problem is not None:
            self._refuse(problem, communicator)
        assert plan is not None
        return plan

    def _cached(
        self, arguments: Sequence[Any], out: Sequence[Any] | None, communicator: Communicator
    ) -> tuple[Runnable | None, BaseException | None]:
        """Return the plan of a signature, built if there is none; or why there cannot be one."""
        assert self._local is not None and self._signature is not None
        key = self._signature.read(arguments, out)
        plan = self.plans.get(key) if key is not None else None
        try:
            if plan is None:
                plan = self._first(arguments, out, communicator)
            elif isinstance(plan, Once):
                plan = self._captured(plan, arguments, out, communicator)
        except BaseException as error:  # any error is sent to the others before it is raised
            return None, error
        if key is not None:
            self.plans.keep(key, plan)
        return plan, None

    def _built(
        self, communicator: Communicator, arguments: Sequence[Any], out: Sequence[Any] | None,
        caller: int,
    ) -> Plan:  # fmt: skip
        assert self._local is not None and self._posters is not None
        return build(
            self._local,
            self._posters(),
            communicator.device,
            options_from_environment(self.options).poison,
            arguments,
            out,
            caller=caller,
            tally=self._tally,
            checks=self._checks,
            fuse=self.fuser if self._may_compile(communicator) else None,
            memory=self._memory if self._device_type == "cuda" else None,
        )

    def _memory(self, size: int) -> Tensor | None:
        """Return memory for the arena, the same for all plans: other ranks keep its address."""
        if self._arena is None and self.communicator is not None:
            self._arena = arena(self.communicator, size)
        return self._arena

    @cached_property
    def fuser(self) -> Fuser:
        """The compiler of the host units of this program."""
        options = options_from_environment(self.options)
        lengths = _COMPILED.setdefault(self.plans, Lengths())
        return Fuser(options.compile == "always", options.timeout_s, lengths)

    def _may_compile(self, communicator: Communicator) -> bool:
        """Tell whether units are compiled: a call costs the host more, but not in a graph."""
        mode = options_from_environment(self.options).compile
        return mode == "always" or (mode == "auto" and self._may_capture(communicator))

    # -- graphs ----------------------------------------------------------------------------------

    @stage("planning")
    def _first(
        self, arguments: Sequence[Any], out: Sequence[Any] | None, communicator: Communicator
    ) -> Runnable:
        """Return the plan of a first run; the second one is captured, if at all."""
        assert self._signature is not None
        plan = self._built(communicator, arguments, out, self._signature.stream())
        plan = noted(plan, self.options, communicator)
        if self._checks is not None or not self._may_capture(communicator):
            return self._checked(plan, communicator)
        return once(plan, plan.addresses(arguments, out))

    def _checked(self, plan: Plan | ByCall, communicator: Communicator) -> Plan | ByCall:
        meet = partial(agree, self.program.name, communicator=communicator)
        return plan if self._checks is None else checked(plan, self._checks, meet)

    def _may_capture(self, communicator: Communicator) -> bool:
        options = options_from_environment(self.options)
        may = options.graph != "never" and options.trace is None and options.ranges == "none"
        return may and communicator.can_capture(self.program.backends)

    def _captured(
        self,
        known: Once,
        arguments: Sequence[Any],
        out: Sequence[Any] | None,
        communicator: Communicator,
    ) -> Runnable:
        """Return the plan from the second run on: graphs, where there is something to capture.

        Raises:
            ProgramError: all was to be captured, and some of it cannot.
        """
        from mdfuse.plan.capture_plans import graphs_of

        assert self._signature is not None
        stream, name = self._signature.stream(), self._tally.title
        graphs = graphs_of(
            known,
            arguments,
            out,
            partial(self._built, communicator),
            name=self.program.name,
            device=communicator.device,
            stream=stream,
            watch=communicator.replays(name, stream) if self.communicates else None,
            is_all=options_from_environment(self.options).graph == "always",
        )
        if graphs is None:
            return known.plan
        communicator.hold(graphs)
        return graphs

    def let_go(self, plan: Runnable) -> None:
        """Release a plan that was dropped from the cache; see `Plans`."""
        if self._last[1] is plan:
            self._last, self._again = _NO_RUN, never

    def _communicator(self) -> Communicator:
        if self.communicator is None or self.communicator.is_closed:
            from mdfuse.runtime.rebuilding import successor

            self.communicator = successor(self.communicator, self.options)
            self.forget()
        if not self.communicator.is_ready and self.communicates:
            self.communicator.settle()
        return self.communicator

    def forget(self) -> None:
        """Make the next run a first one."""
        self._local, self._signature, self._last, self._again = None, None, _NO_RUN, never
        self._arena, self._posters = None, None
        self.plans.drop(self._number)

    # -- all ranks run, or none ------------------------------------------------------------------

    def _begin(self, problem: BaseException | None, communicator: Communicator) -> None:
        """Let all ranks agree before the first run, and make their teams in program order."""
        options = options_from_environment(self.options)
        local = first_run(self.program, options, problem, communicator)
        communicator.open(self.program.backends)
        for name in (None, *self.program.backends):
            communicator.prepare(groups(local, communicator.rank, name), name)
        self._count_runs(communicator, communicator.can_capture(self.program.backends))
        align(self.options, communicator, self._tally.serial)
        self._local, self._device_type = local, communicator.device.type
        if self.communicates:
            self._is_captured = captured_by_caller(self.program, communicator)

    def _count_runs(self, communicator: Communicator, may_capture: bool) -> None:
        """Tell runs by their arguments from here on, and count them on a communicator."""
        rank, device = communicator.rank, communicator.device
        self._signature = signature_of(self.program, rank, device, self._number, may_capture)
        self._tally = RunCount(name=self.program.name, serial=next(communicator.serials))
        self._posters = posters(communicator, self._tally.serial)
        communicator.count(self._tally, owner=self._posters)

    def _refuse(self, problem: BaseException | None, communicator: Communicator) -> None:
        """Raise a problem instead of a run that others may have begun, and tell them why."""
        assert problem is not None
        self._tally.runs += 1
        self._tally.refused += 1
        if self.communicates:
            communicator.refuse(self._tally.occasion, problem)
        elif self._checks is not None:  # they meet at the end
            agree(self.program.name, problem, communicator)
        raise problem

    @cached_property
    def communicates(self) -> bool:
        """True if a run posts to other ranks, or receives from them."""
        return any(i.comm is not None or i.op in ("send", "recv") for i in self.program.walk())

    def _problem(
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None,
        is_partial: bool,
        communicator: Communicator,
    ) -> MdfuseError | None:
        try:
            check_ranks(self.program, communicator.rank, communicator.size)
            trace_of(self.options, communicator)
            program, rank, device = self.program, communicator.rank, communicator.device
            if self.communicates and (crowded := communicator.crowded(program.name)):
                raise crowded
            if self.communicates:
                check_capture(program, communicator)
            check_graph(program, self.options, communicator)
            check_arguments(program, rank, arguments, device)
            check_no_gradients(program.name, program.inputs, arguments)
            if out is not None:
                check_outputs(program, rank, arguments, out, device, is_partial)
                check_no_gradients(program.name, program.outputs, out)
        except MdfuseError as error:
            return error
        return None
