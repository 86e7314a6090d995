"""A program and the state that it writes in place: a training step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from mdfuse.compiled import states
from mdfuse.compiled.background import Saver
from mdfuse.compiled.program import Program
from mdfuse.compiled.recovery import (
    Holding,
    RecoveredVersion,
    Recovery,
    members_of,
    recovered,
    values_of,
)
from mdfuse.compiled.step_parts import part_of_batch
from mdfuse.compiled.versions import Versions
from mdfuse.errors import ProgramError, counted
from mdfuse.frontend.given import by_name, flag, refused
from mdfuse.runtime.communicator import init
from mdfuse.runtime.rebuilding import members
from mdfuse.torch_private import untraced


class Step:
    """A program whose state is kept between runs: the inputs that outputs overwrite (`reuse=`).

    It holds no copies: a run writes the tensors that were passed, and they stay where they are.

    Args:
        program: with outputs that reuse inputs.
        state: this rank's part of each of these inputs, by name; None where it has none.
        double_buffer: copy the state before each run into buffers beside it, so that this rank
            holds whole versions whenever a run breaks off; see `mdfuse.recover`. Ranks may be a run
            apart, so there are two such sets: three times the memory of the state.

    Attributes:
        program: as passed.
        state: the tensors by name, as the last run left them.
        recovery: the way by which `mdfuse.recover` brought the state here; None: it did not.

    Raises:
        ProgramError: no output reuses an input; other names than those of the inputs that are.

    >>> import torch, mdfuse as mf
    >>> with mf.FusionDefinition("count") as fd:
    ...     n, by = fd.define_tensor([2], name="n"), fd.define_tensor([2], name="by")
    ...     fd.add_output(n.sum())
    ...     fd.add_output(n + by, reuse=n)
    >>> step = mf.Step(mf.compile(fd), {"n": torch.zeros(2)})
    >>> [step(torch.ones(2)) for _ in range(3)]
    [tensor(0.), tensor(2.), tensor(4.)]
    >>> step.state
    {'n': tensor([3., 3.])}
    """

    def __init__(
        self,
        program: Program,
        state: Mapping[str, Tensor | None],
        *,
        double_buffer: bool = False,
    ) -> None:
        if not isinstance(program, Program):
            raise ProgramError(
                f"Step of {type(program).__name__}", hint="Step(mf.compile(definition), {...})"
            )
        fusion = program.fusion
        state = by_name(f"Step of @{fusion.name}", "state", state, ProgramError)
        written = {*fusion.reuse.values()}
        names = [name for name in fusion.inputs if name in written]
        if {*state} != {*names} or not names:
            raise ProgramError(
                f"Step of @{fusion.name} with the state {', '.join(map(str, state)) or '(none)'}",
                because=(
                    f"its outputs are written into {', '.join(names)}"
                    if names
                    else "none of its outputs is written into an input"
                ),
                hint="add_output(new, reuse=old) makes an input state; pass each of them by name",
            )
        self.program = program
        self.state = {name: state[name] for name in names}
        flag(f"Step of @{fusion.name}", "double_buffer", double_buffer)
        self._versions = Versions(self.state, double_buffer)
        self._members = members()
        self._saved: dict[str, int] = {}
        self.recovery: Recovery | None = None
        self._saver = Saver()
        self._others = [name for name in fusion.inputs if name not in written]
        given = [*names, *self._others]
        places = {name: n for n, name in enumerate(given)}
        #: puts state and other inputs in definition order; None where they are in it already
        self._ordered = (
            None
            if given == [*fusion.inputs]
            else itemgetter(*(places[name] for name in fusion.inputs))
        )
        results = [i for i, name in enumerate(fusion.outputs) if name not in fusion.reuse]
        #: picks the outputs that a call returns; None where there are none
        self._results = itemgetter(*results) if results else None

    @untraced
    def __call__(self, *inputs: Any, extents: Mapping[str, int] | None = None) -> Any:
        """Run the program on this rank; all ranks run it alike.

        Args:
            inputs: all but the state, in definition order, as `Program.run` takes them.
            extents: symbolic extents, as `Program.run` takes them.

        Returns:
            The outputs that are written into no input: one, or a tuple of several, or None.

        Raises:
            ProgramError: another number of inputs; inputs that do not fit the program; a save in
                the background failed.
        """
        self._saver.enter()
        if len(inputs) != len(self._others):
            problem = ProgramError(
                f"Step of @{self.program.fusion.name} with {counted(len(inputs), 'input')}",
                because=f"besides its state it has {len(self._others)}",
                hint=f"pass, in this order: {', '.join(self._others)}",
            )
            self.program.refuse(problem)
        given: Sequence[Any] = (*self.state.values(), *inputs)
        if self._ordered is not None:
            given = self._ordered(given)
        self._versions.begin()
        try:
            outputs = self.program.run_all(given, extents)
        except BaseException as error:
            self._versions.broke_off(error)
            raise
        self._versions.end()
        return None if self._results is None else self._results(outputs)

    def settle(self) -> None:
        """Wait for the device where survivors of a lost rank could go on; else return at once.

        An error of a device that hangs is raised here then, and not where a result is read.
        """
        self._versions.settle()

    @property
    def version(self) -> int:
        """The number of runs that the state has behind it, also those before a recovery.

        It says which batch comes next: after a recovery all ranks have the same.
        """
        return self._versions.number

    @property
    def is_double(self) -> bool:
        """True if the state before each run is kept."""
        return self._versions.is_double

    def shard(self, *batch: Any) -> list[Any]:
        """Return this rank's parts of a batch, on the device of its state.

        Args:
            batch: all inputs but the state, or the first of them, in definition order: whole
                tensors, or this rank's parts; numbers stay.

        Returns:
            As many; None where this rank has nothing of one.

        Raises:
            ProgramError: too many of them; a shape that is neither.
        """
        fusion, rank = self.program.fusion, init(self.program.options).rank
        if len(batch) > len(self._others):
            what = f"shard of {counted(len(batch), 'input')} for @{fusion.name}"
            raise ProgramError(what, because=f"a run takes {', '.join(self._others) or 'none'}")
        pairs = zip(self._others, batch, strict=False)
        parts = [part_of_batch(fusion, name, x, rank) for name, x in pairs]
        device = next((x.device for x in self.state.values() if x is not None), None)
        return [x.to(device) if isinstance(x, Tensor) else x for x in parts]

    # -- recovery --------------------------------------------------------------------------------

    def holding(self, fixed: Mapping[str, Tensor | None] | None = None) -> Holding:
        """Return the versions of the state that this rank holds, with inputs that no run writes."""
        fixed = fixed or {}
        states = {n: {**x, **fixed} for n, x in self._versions.states().items()}
        values = values_of(self.program.fusion, [*self.state, *fixed])
        return Holding(
            values=values,
            fixed=[*fixed],
            members=self._members or members_of(x.layout.mesh for x in values.values()),
            states=states,
            parts={**self.state, **fixed},
            saved=self._saved,
            last=self._versions.last,
        )

    # -- files -----------------------------------------------------------------------------------

    def save(
        self,
        folder: str | Path,
        *,
        portable: bool = False,
        wait: bool = True,
        keep: int | None = None,
    ) -> Path:
        """Write this rank's part of the state to a folder; all ranks save together.

        Files that are there already are replaced once all ranks have written theirs. A save waits
        for one under way first.

        Args:
            folder: of the state, which all ranks may share.
            portable: as `torch.distributed.checkpoint` does, for any layout and number of ranks,
                into a folder that all ranks share. Else for the same program.
            wait: until the files are on the disk. Else the state is copied into the host's memory,
                a thread writes the copy, and steps go on; `saved` waits for it, and an error of a
                rank is raised by the next call of this step on all ranks.
            keep: so many checkpoints stay, this one among them: the last of those beside it whose
                names have other numbers. The link `newest` beside them leads to the last one that
                is whole, at any moment. Needs `portable`.

        Returns:
            The file: `rank0003.pt` for rank 3; the folder, where it is portable.

        Raises:
            ProgramError: the folder cannot be written, on all ranks where one cannot; portable, and
                the folder has a checkpoint (with keep=: the newest), or a state is Partial, or of
                extents that a run chooses; the save under way failed.
        """
        given = {"folder": folder, "portable": portable, "wait": wait, "keep": keep}
        noted = partial(self._saving, self.version)
        return states.save(self.program, self.state, self._saver, given, noted)

    def saved(self) -> None:
        """Wait for the end of a save under way; all ranks do so together.

        The end of the process waits for it, too, but only logs an error.

        Raises:
            ProgramError: a rank could not save, on all ranks.
            BackendError: a rank has not saved within `Options.timeout_s`.
        """
        self._saver.settle()

    def load(self, folder: str | Path, *, cast: bool = False) -> None:
        """Read a saved state into the tensors of the state: a run then goes on to the bit.

        All ranks load together. Any error leaves the state unchanged, unless files of a portable
        folder turn out to be damaged while they are copied.

        Args:
            folder: that `save` was given.
            cast: cast floats to the floating dtype that the state has here.

        Raises:
            ProgramError: there is no such file, or it is of a state with other names, shapes, or
                dtypes (but for `cast`), and where it is not portable of other layouts; files of
                several saves. On all ranks, where one cannot.
        """
        states.load(self.program, self.state, self._saver, folder, cast)
        self._versions.loaded()
        self._note_saved(folder, self.version)

    def _note_saved(self, folder: str | Path, version: int) -> None:
        """Note that a checkpoint has a version of the state, for `mdfuse.recover`."""
        others = {name: of for name, of in self._saved.items() if name != os.path.realpath(folder)}
        self._saved = {**others, os.path.realpath(folder): version}

    @contextmanager
    def _saving(self, version: int, folder: Path) -> Iterator[None]:
        """Note a checkpoint while it is written: ranks may be lost as it is whole already."""
        before = self._saved
        self._note_saved(folder, version)
        try:
            yield
        except ProgramError:
            self._saved = before
            raise


def recover(step: Any, program: Any, or_from: str | Path | None = None) -> Any:
    """Return a step of another program with the state of a step, from the ranks that are left.

    Each box of the state comes from a rank that holds it whole, in the newest version of which
    nothing is missing; boxes that no rank holds come from a checkpoint, where it is of this
    version, else all of them do. All ranks of the communicator call it together; a new process
    passes None for the step.

    Args:
        step: a `Step`, or a `RunningStep`; its program may be of ranks that are gone.
        program: of the same state in other layouts, as the same function builds it for another
            mesh; for a `RunningStep` the `TrainingStep`.
        or_from: a folder that `save(portable=True)` wrote; None: there is none.

    Returns:
        The step, which goes on at `step.version`. Parts that stay where they are are not copied.

    Raises:
        ProgramError: boxes that nobody holds; other names, shapes or dtypes. On all ranks.

    >>> import torch, mdfuse as mf
    >>> with mf.FusionDefinition("count") as fd:
    ...     n = fd.define_tensor([2], name="n", mesh=mf.DeviceMesh.arange(dp=1))
    ...     fd.add_output(n + 1, reuse=n)
    >>> step = mf.Step(mf.compile(fd), {"n": torch.zeros(2)})
    >>> step()
    >>> again = mf.recover(step, mf.compile(fd))
    >>> again.state, again.version
    ({'n': tensor([1., 1.])}, 1)
    """
    if step is None and hasattr(program, "joined"):
        return program.joined(or_from)
    if hasattr(step, "recovered"):
        return step.recovered(program, or_from)
    if not isinstance(program, Program) or not isinstance(step, Step | None):
        raise refused(
            "recover",
            "program",
            program,
            because="a step goes on with a program, a step of an imported model with its own",
            hint="mf.recover(step, build(mesh), or_from=folder)",
            kind=ProgramError,
        )
    names = [n for n in program.fusion.inputs if n in {*program.fusion.reuse.values()}]
    holding = None if step is None else step.holding()
    state, choice, recovery = moved(program, names, holding, or_from)
    return resumed(program, state, choice, recovery, step is not None and step.is_double)


def moved(
    program: Program, names: Sequence[str], holding: Holding | None, or_from: str | Path | None
) -> tuple[dict[str, Tensor | None], RecoveredVersion, Recovery | None]:
    """Return this rank's parts of a state in the layouts of a program; see `recovered`."""
    options = program.options
    return recovered(holding, program.fusion, names, init(options), or_from, options)


def resumed(
    program: Program,
    state: Mapping[str, Tensor | None],
    choice: RecoveredVersion,
    recovery: Recovery | None,
    is_double: bool,
) -> Step:
    """Return a step with a state that has runs behind it."""
    step = Step(program, state, double_buffer=is_double)
    step.recovery, step._saved = recovery, {**choice.saved}
    step._versions.resume(choice.version)
    return step
