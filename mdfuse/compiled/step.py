"""A program and the state that it writes in place: a training step."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdfuse.compiled.program import Program
from mdfuse.compiled.together import together
from mdfuse.errors import ProgramError, counted
from mdfuse.frontend.importing import load as loading
from mdfuse.frontend.importing import save as saving
from mdfuse.runtime.communicator import init
from mdfuse.torch_private import untraced

#: What a file that is missing, cut off or something else makes of reading it.
_UNREADABLE = (
    OSError, RuntimeError, LookupError, TypeError, EOFError, pickle.UnpicklingError,
)  # fmt: skip


class Step:
    """A program whose state is kept between runs: what some output is written into (`reuse=`).

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
        self._others = [name for name in fusion.inputs if name not in written]
        given = [*names, *self._others]
        places = {name: n for n, name in enumerate(given)}
        #: puts the state and the others in definition order; None where they are
        self._ordered = (
            None
            if given == [*fusion.inputs]
            else itemgetter(*(places[name] for name in fusion.inputs))
        )
        results = [i for i, name in enumerate(fusion.outputs) if name not in fusion.reuse]
        #: takes what a call returns from the outputs of a run; None where that is nothing
        self._results = itemgetter(*results) if results else None

    @untraced
    def __call__(self, *inputs: Any, extents: Mapping[str, int] | None = None) -> Any:
        """Run the program on this rank; all ranks run it alike.

        Args:
            inputs: those that are no state, in definition order, as `Program.run` takes them.
            extents: symbolic extents, as `Program.run` takes them.

        Returns:
            The outputs that are written into no input: one, or a tuple of several, or None.

        Raises:
            ProgramError: another number of inputs; what is passed does not fit the program.
        """
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

    def save(self, folder: str | Path, *, portable: bool = False) -> Path:
        """Write this rank's part of the state to a folder, which all ranks may share.

        Args:
            folder: of the state.
            portable: as `torch.distributed.checkpoint` does, for any layout and number of ranks;
                all ranks save together, into a folder that they share. Else for the same program.

        Returns:
            The file: `rank0003.pt` for rank 3; the folder, where it is portable.

        Raises:
            ProgramError: portable, and the folder has a checkpoint, or cannot be written; a state
                is Partial, or of extents that a run chooses.
        """
        if portable:
            return self._save_portable(Path(folder))
        path = self._path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save({"types": self._types(), "state": self.state}, part)
        part.replace(path)  # so that a file that is there is whole
        return path

    def _save_portable(self, folder: Path) -> Path:
        comm, fusion = init(self.program.options), self.program.fusion
        do = partial(together, comm, f"save the state of @{fusion.name}")
        do(partial(saving.check_folder, folder))
        do(partial(saving.write_state, folder, fusion, self.state, comm.rank))
        last = partial(saving.finish_state, folder, fusion, self.state, comm.size)
        do(last if comm.rank == 0 else _nothing)
        return folder

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote into the tensors of the state: a run then goes on to the bit.

        Raises:
            ProgramError: there is no such file, or it is of a state with other names, shapes, or
                dtypes, and where it is not portable of other layouts.
        """
        if (Path(folder) / ".metadata").exists():
            comm, fusion = init(self.program.options), self.program.fusion
            read = partial(loading.read_state, Path(folder), fusion, self.state, comm.rank)
            together(comm, f"load the state of @{fusion.name}", read)
            return
        path = self._path(folder)
        try:
            saved = torch.load(path, weights_only=True)
            types, state = saved["types"], saved["state"]
        except _UNREADABLE as error:
            raise ProgramError(
                f"{path} cannot be read",
                because=str(error).splitlines()[0],
                hint="Step.save wrote it",
            ) from error
        wrong = [n for n, here in self._types().items() if types.get(n) != here]
        gone = [n for n in types if n not in self.state]
        if wrong or gone:
            name = (wrong or gone)[0]
            raise ProgramError(
                f"{path} is of another state: %{name} is {types.get(name, 'not in it')}",
                because=f"the program has {self._types().get(name, 'no such state')}",
                hint="load what the same program saved, on as many ranks; for other layouts "
                "save(folder, portable=True)",
            )
        for name, x in self.state.items():
            if x is not None:
                x.copy_(state[name])

    def _path(self, folder: str | Path) -> Path:
        return Path(folder) / f"rank{init(self.program.options).rank:04d}.pt"

    def _types(self) -> dict[str, str]:
        """The state as text: dtype, shape of this rank's part, layout."""
        fusion, found = self.program.fusion, {}
        for name, x in self.state.items():
            shape = None if x is None else [*x.shape]
            value = fusion.values[name]
            found[name] = (
                f"{value.dtype} {shape} on {value.layout and value.layout.mesh} {value.layout}"
            )
        return found


def _nothing() -> None:
    """What ranks do that wait for another one."""
