"""The versions of a state that is written in place: how many runs it has behind it, and if whole.

A run that breaks off may have written a part of the state. The lines that it had begun say whether
it has; where it has, only a second set of buffers holds the version before.
"""

from __future__ import annotations

from collections.abc import Mapping
from traceback import walk_tb

import torch
from torch import Tensor

from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.runtime.communicator import live
from mdfuse.runtime.interruption import DeviceRuns, can_rebuild
from mdfuse.runtime.watch.plan_position import causes, wrote

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
        tensors = [x for x in state.values() if isinstance(x, Tensor)]  # numbers are refused later
        self._device = next((x.device for x in tensors if x.is_cuda), None)
        self._runs: DeviceRuns | None = None
        #: whether runs have marks; None: there was no run yet
        self._is_marked: bool | None = None if self._device else False
        #: from the begin of a run until it is counted: an error of the watchdog may come between
        self._is_open = False
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
        self._is_open = True
        if not self._copies or not self.is_whole:
            return
        _, copy = self._copies[0]
        self._copies[0] = None, copy
        with torch.no_grad():
            for name, x in copy.items():
                if x is not None:
                    x.copy_(self._state[name])  # type: ignore[arg-type]  # both are None, or none
        self._copies = [*self._copies[1:], (self.number, copy)]

    def end(self) -> None:
        """Count a run; on a device, note when it is done where survivors could go on."""
        self.number += 1
        self._mark()
        self._is_open = False

    def resume(self, number: int) -> None:
        """Begin at a version that the device is about to have."""
        self.number = number
        self._mark()

    def loaded(self) -> None:
        """Note that the state was read from files: what was kept before is of another one."""
        self.is_whole, self._is_open, self._runs = True, False, None
        self._copies = [(None, copy) for _, copy in self._copies]

    def _mark(self) -> None:
        if self._is_marked is None:
            self._is_marked = _may_be_interrupted()
        if self._is_marked and self._device is not None:
            self._runs = self._runs or DeviceRuns(CudaDevice(self._device))
            self._runs.mark(self.number)

    def settle(self) -> None:
        """Wait until the device has done all runs, where survivors could go on without it."""
        if self._runs is not None:
            torch.cuda.synchronize(self._device)

    def broke_off(self, error: BaseException) -> None:
        """Note that a run raised an error."""
        if may_have_written(self._state, error):
            self.is_whole = False
        self._is_open = False

    def states(self) -> dict[int, State]:
        """Return the versions that this rank holds whole, each with its tensors."""
        states: dict[int, State] = {n: x for n, x in self._copies if n is not None}
        if self.is_whole and not self._is_open:
            states[self.number] = self._state
        last = self.last
        return states if last is None else {n: x for n, x in states.items() if n <= last}

    @property
    def last(self) -> int | None:
        """The last version that the device had made before its posts were ended; None: never."""
        return None if self._runs is None else self._runs.last


def _may_be_interrupted() -> bool:
    """Return whether the watchdog may end what a device does, and survivors go on."""
    comm = live()
    return comm is not None and can_rebuild(comm)


def may_have_written(names: State, error: BaseException) -> bool:
    """Return whether the run that raised an error may have written some of its inputs.

    On a GPU, and in a graph's replay, nobody knows how far the device is: there each run that has
    begun may have.
    """
    written = wrote(error)
    if written is None or any(x is not None and x.is_cuda for x in names.values()):
        return written is not None or any(map(_is_of_run, causes(error)))
    return not written.isdisjoint(names)


def _is_of_run(error: BaseException) -> bool:
    """Return whether an error came out of a run that had begun."""
    code = HostIrEvaluator._run.__code__
    return any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__))
