"""A training loop that saves as it goes, resumes, and goes on with the ranks that are left."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mdfuse import files
from mdfuse.bootstrap import RESPAWNED
from mdfuse.compiled import newest
from mdfuse.compiled.all_or_none import together
from mdfuse.compiled.program import Program
from mdfuse.compiled.step import Step, recover
from mdfuse.compiled.training import RunningStep, TrainingStep
from mdfuse.errors import BackendError, ProgramError, shown
from mdfuse.frontend import given
from mdfuse.mesh import DeviceMesh
from mdfuse.runtime.communicator import Communicator, init, live
from mdfuse.runtime.rebuilding import rebuild

_LOG = logging.getLogger("mdfuse.run")

#: Builds the step for a mesh: a program or a `TrainingStep`, and what returns the first state.
Build = Callable[[DeviceMesh], tuple[Any, Callable[[Communicator], Any]]]


class Run(Iterator[tuple[int, Any]]):
    """A training: iterating makes its steps, and yields the number of each and what it returns.

    A run begins with the newest checkpoint in its folder, on whatever mesh that was saved. Where a
    rank dies, those that are left build the step for the mesh without it, take the state from each
    other or else from the checkpoint, and go on: the batch of a step stays whole, as the others
    take over the rows of those that are lost. Steps after the state that is left are made, and
    yielded, again; a rank that takes the state of a step which others ended does not yield that
    step. A process that `mdfuse launch --respawn` starts joins before the next step.

    Args:
        build: mesh -> what to run, and what returns its first state. For imported models a
            `TrainingStep`, and a function of the communicator that returns weights, as
            `lambda comm: model.load(path, comm=comm)`; else a `Program`, and a function that
            returns the state of `mf.Step`. It is called anew for another mesh.
        mesh: of all ranks that were started.
        data: step, from 1 -> its batch, whole tensors and numbers, the same on all ranks whenever
            it is asked; None: the training is over.
        save_every: steps between checkpoints, which a thread writes; None: at the end alone.
        folder: of the checkpoints, `step-N` and the link `newest`; None: nothing is saved.
        keep: so many checkpoints stay.
        axis: the axis of the mesh that becomes shorter; by default the first one.
        double_buffer: as for `mf.Step`: survivors always have the state of the last whole step.

    Attributes:
        comm: the communicator; `comm.lost` says who was lost.
        mesh: of the ranks that are left.
        running: the `RunningStep`, or the `Step`.
        step: the number of the last step.

    Raises:
        ProgramError: wrong arguments; while iterating, what the step and its saves raise. The run
            can be iterated further.
        BackendError: the launcher ends survivors itself.

    >>> import torch, mdfuse as mf
    >>> def build(mesh):
    ...     with mf.FusionDefinition("mean") as fd:
    ...         w, x = fd.define_tensor([2], mesh=mesh, name="w"), fd.define_tensor([2], mesh=mesh)
    ...         fd.add_output((w - x).sum())
    ...         fd.add_output(w * 0.5 + x * 0.5, reuse=w)
    ...     return mf.compile(fd), lambda comm: {"w": torch.zeros(2)}
    >>> batch = lambda n: (torch.ones(2),) if n <= 3 else None
    >>> [(n, loss.item()) for n, loss in mf.Run(build, mf.DeviceMesh.arange(dp=1), batch)]
    [(1, -2.0), (2, -1.0), (3, -0.5)]
    """

    def __init__(
        self,
        build: Build,
        mesh: DeviceMesh,
        data: Callable[[int], Sequence[Any] | None],
        *,
        save_every: int | None = None,
        folder: str | Path | None = None,
        keep: int = 3,
        axis: str | None = None,
        double_buffer: bool = False,
    ) -> None:
        for name, value in (("build", build), ("data", data)):
            given.function("Run", name, value, "mf.Run(build, mesh, data): functions of mesh, step")
        if save_every is not None:
            _check_count("save_every", save_every)
        _check_count("keep", keep)
        self._build, self._whole, self._data = build, mesh, data
        self._every, self._keep = save_every, keep
        self._folder = None if folder is None else files.as_path(folder)
        self._axis = mesh.axes[0] if axis is None else axis
        self._is_double = given.flag("Run", "double_buffer", double_buffer)
        self.mesh, self.step = mesh, 0
        self.running: Any = None
        self._comm: Communicator | None = None
        #: the step at which the count of the state's versions began
        self._first = 0
        self._saved = 0

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks that are left."""
        if self._comm is None:
            is_new = os.environ.get(RESPAWNED) and live() is None
            self._comm = rebuild(join=True) if is_new else init()
        return self._comm

    def __iter__(self) -> Run:
        return self

    def __next__(self) -> tuple[int, Any]:
        """Make the next step; return its number, and what it returns."""
        while True:
            try:
                if self.running is None:
                    self._go_on()
                self._let_in()
                self._save_if_due()
                batch = self._data(self.step + 1)
                if batch is None:
                    self._finish()
                    raise StopIteration
                results = self.running(*self.running.shard(*batch))
                _inner(self.running).settle()  # a loss that the loop reads is there
            except BackendError as error:
                if self._comm is None:
                    raise
                self._rebuild(error)
                continue
            self.step += 1
            return self.step, results

    # -- checkpoints -----------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        if self._every and self.step % self._every == 0:
            self._save()

    def _save(self) -> None:
        if self._folder is None or self.step in (0, self._saved):
            return
        self._saved = self.step  # one that fails is not tried again
        folder = self._folder / f"step-{self.step}"
        self.running.save(folder, portable=True, wait=False, keep=self._keep)

    def _finish(self) -> None:
        self._save()
        self.running.saved()

    def _newest(self) -> Path | None:
        """Return the newest checkpoint, as rank 0 sees it."""
        there = newest.newest(self._folder) if self._folder and self.comm.rank == 0 else None
        name = self.comm.all_ok(None if there is None else there.name)[0]
        return None if name is None or self._folder is None else self._folder / name

    # -- the ranks that are left -----------------------------------------------------------------

    def _rebuild(self, error: BackendError) -> None:
        """Go on without the ranks that are lost; where one is lost meanwhile, once more."""
        lost: BackendError | None = error
        while lost is not None:
            self._comm = rebuild(lost)
            lost = None
            try:
                self._go_on()
            except BackendError as another:
                lost = another

    def _let_in(self) -> None:
        """Go on with processes that wait to join; they ask for others, too, once they are in."""
        while len(self.comm.membership.members) < self._whole.size:
            before = self.comm
            self._comm = rebuild(join=True)
            if self._comm is before:
                return
            self._go_on()

    def _go_on(self) -> None:
        """Build the step for the ranks there are, with the newest state that they or files have."""
        comm, last = self.comm, self._newest()
        self.mesh = _mesh_of(self._whole, comm, self._axis)
        what, begin = together(comm, "build the step", lambda: _built(self._build, self.mesh))
        said = comm.all_ok(None if self.running is None else str(self._first))
        first = next((int(x) for x in said if x is not None), None)
        if first is not None:
            self._first = first
            try:
                self._recover(what, last)
                return
            except ProgramError as error:
                _LOG.warning("rank %d: %s", comm.rank, error)
        self._begin(what, begin, last)

    def _recover(self, what: Any, last: Path | None) -> None:
        self.running = recover(self.running, what, or_from=last)
        self._enter(self._first + _inner(self.running).version, last)

    def _begin(self, what: Any, begin: Callable[[Communicator], Any], last: Path | None) -> None:
        """Begin with the newest checkpoint, or else with the first state."""
        state = together(self.comm, "make the first state", lambda: begin(self.comm))
        make = what.start if isinstance(what, TrainingStep) else lambda *a, **k: Step(what, *a, **k)
        self.running = make(state, double_buffer=self._is_double)
        if last is not None:
            self.running.load(last)
        self._first = 0 if last is None else _number(last)
        self._enter(self._first, last)

    def _enter(self, step: int, last: Path | None) -> None:
        self.step, self._saved = step, 0 if last is None else _number(last)
        _LOG.info("rank %d of %d goes on after step %d", self.comm.rank, self.comm.size, step)


def _built(build: Build, mesh: DeviceMesh) -> tuple[Any, Callable[[Communicator], Any]]:
    """Return what a user's function returns for a mesh; ProgramError where that does not run."""
    pair = build(mesh)
    is_pair = isinstance(pair, tuple) and len(pair) == 2 and callable(pair[1])
    if not is_pair or not isinstance(pair[0], TrainingStep | Program):
        raise ProgramError(
            f"build of a Run returned {shown(pair)}",
            because="it returns a TrainingStep or a Program, and what returns the first state",
            hint="return step, lambda comm: model.load(path, comm=comm)",
        )
    return pair


def _mesh_of(whole: DeviceMesh, comm: Communicator, axis: str) -> DeviceMesh:
    """Return a mesh of the ranks that were started without those that are lost, numbered anew."""
    ranks = {place: n for n, (place, _) in enumerate(comm.membership.members)}
    left = whole.without([r for r in whole.ranks if r not in ranks], axis)
    return DeviceMesh.of(left.shape, [ranks[r] for r in left.ranks], left.axes, left.hosts)


def _inner(running: Any) -> Step:
    """Return the step with the state."""
    step = running.step if isinstance(running, RunningStep) else running
    assert isinstance(step, Step)
    return step


def _number(folder: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(re.findall(r"\d+", folder.name)[-1])


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProgramError(f"Run with {name}={shown(value)}", hint=f"{name}=3")
