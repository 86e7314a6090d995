"""The versions of a state that is written in place: how many runs it has behind it, and if whole.

A run that breaks off may have written a part of the state. The lines that it had begun say whether
it has; where it has, only a second set of buffers holds the version before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mdfuse.compiled.program import Program
from mdfuse.errors import BackendError
from mdfuse.hir.analysis.dataflow import dataflow
from mdfuse.hir.rank.pipelines import as_run, project
from mdfuse.runtime.communicator import init
from mdfuse.runtime.watch.plan_position import ActiveStep, causes, raised

State = Mapping[str, Tensor | None]


class Versions:
    """The count of runs of a state, and the state before the last one where it is kept.

    Args:
        state: the tensors that runs write.
        is_double: keep the state before each run in buffers of its own.

    Attributes:
        number: the runs that are done.
        is_whole: False once a run broke off that may have written.
    """

    def __init__(self, state: State, is_double: bool) -> None:
        self._state, self.number, self.is_whole = state, 0, True
        #: copies before the last two runs, the older one first: ranks may be a run apart
        self._copies: list[tuple[int | None, State]] = []
        for _ in range(2 * is_double):
            pairs = state.items()
            copy = {n: None if x is None else torch.empty_like(x) for n, x in pairs}
            self._copies.append((None, copy))

    @property
    def is_double(self) -> bool:
        """True if the state before each run is kept."""
        return bool(self._copies)

    def begin(self) -> None:
        """Keep the state as it is before a run."""
        if not self._copies or not self.is_whole:
            return
        _, copy = self._copies[0]
        self._copies[0] = None, copy
        with torch.no_grad():
            for name, x in copy.items():
                if x is not None:
                    x.copy_(self._state[name])  # type: ignore[arg-type]  # both are None, or none
        self._copies = [*self._copies[1:], (self.number, copy)]

    def broke_off(self, program: Program, error: BaseException) -> None:
        """Note that a run raised an error."""
        if may_have_written(program, self._state, error):
            self.is_whole = False

    def states(self) -> dict[int, State]:
        """Return the versions that this rank holds whole, each with its tensors."""
        states: dict[int, State] = {n: x for n, x in self._copies if n is not None}
        if self.is_whole:
            states[self.number] = self._state
        return states


def may_have_written(program: Program, names: State, error: BaseException) -> bool:
    """Return whether the run that raised an error may have written some of its inputs.

    On a GPU, and in a graph's replay, nobody knows how far the device is: there each run that a
    communication ended may have.
    """
    at = raised(error)
    is_queued = any(x is not None and x.is_cuda for x in names.values())
    if at is None or is_queued:
        return is_queued and (at is not None or any(map(_is_broken, causes(error))))
    code = at.plan.code
    flow = dataflow(as_run(project(program.host, init(program.options).rank)))
    memories = {flow.memory(name) for name in names}
    begun = code[: _stop(at)]
    return any(not memories.isdisjoint(flow.effects(i).writes) for i in begun)


def _stop(at: ActiveStep) -> int:
    """Return how many instructions had begun at a step, those of its unit among them."""
    later = (step.instruction for step in at.plan.steps[at.number + 1 :])
    last = max(step.instruction for step in at.plan.steps[: at.number + 1])
    return next((n for n in later if n > last), len(at.plan.code))


def _is_broken(error: BaseException) -> bool:
    return isinstance(error, BackendError)
