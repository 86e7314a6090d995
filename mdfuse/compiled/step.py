"""A program and the state that it writes in place: a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from mdfuse.compiled import states
from mdfuse.compiled.background import Saver
from mdfuse.compiled.program import Program
from mdfuse.errors import ProgramError, counted
from mdfuse.frontend.given import by_name
from mdfuse.torch_private import untraced


class Step:
    """A program whose state is kept between runs: the inputs that outputs overwrite (`reuse=`).

    It holds no copies: a run writes the tensors that were passed, and they stay where they are.

    Args:
        program: with outputs that reuse inputs.
        state: this rank's part of each of these inputs, by name; None where it has none.

    Attributes:
        program: as passed.
        state: the tensors by name, as the last run left them.

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

    def __init__(self, program: Program, state: Mapping[str, Tensor | None]) -> None:
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
        outputs = self.program.run_all(given, extents)
        return None if self._results is None else self._results(outputs)

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
        return states.save(self.program, self.state, self._saver, given)

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
