"""States of steps in files: each rank's part as it is, or boxes that any layout can read."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from mdfuse import files
from mdfuse.compiled import newest
from mdfuse.compiled.all_or_none import Together, first_alone, save_together, together
from mdfuse.compiled.background import Saver, Tensors
from mdfuse.compiled.program import Program
from mdfuse.errors import ProgramError
from mdfuse.frontend.given import flag
from mdfuse.frontend.importing import load as loading
from mdfuse.frontend.importing import save as saving
from mdfuse.frontend.importing.metadata import check_file
from mdfuse.ir.graph import Fusion
from mdfuse.runtime.communicator import Communicator, init

State = Mapping[str, Tensor | None]

#: Errors of reading a file that is missing, truncated, or no state.
_UNREADABLE = (
    OSError, RuntimeError, LookupError, TypeError, ValueError, EOFError, AttributeError,
    pickle.UnpicklingError,
)  # fmt: skip


class _Saved(NamedTuple):
    """A state in files that fits.

    Attributes:
        id: of the call that saved it, the same on all ranks.
        copy: reads it into the tensors of the step.
    """

    id: str
    copy: Callable[[], None]


class Asked(NamedTuple):
    """The arguments of a save; see `Step.save`."""

    folder: Path
    portable: bool = False
    wait: bool = True
    keep: int | None = None


class _Plan(NamedTuple):
    """A save that all ranks have agreed on.

    Attributes:
        path: what it returns.
        tensors: which this rank writes.
        write: writes them, or copies of them that it waits for, with all ranks.
    """

    path: Path
    tensors: Tensors
    write: Callable[[Together, Callable[[], Tensors]], None]


def save(
    program: Program,
    state: State,
    saver: Saver,
    given: Mapping[str, object],
    noted: Callable[[Path], AbstractContextManager[None]],
) -> Path:
    """Write a state, in a context of its path; see `Step.save`."""
    comm, fusion = init(program.options), program.fusion
    what = f"save the state of @{fusion.name}"
    saver.settle()
    do = partial(together, comm, what)
    asked = do(partial(_asked, what, **given))
    planned = _portable if asked.portable else partial(_by_rank, _agreed_id(comm))
    plan = do(partial(planned, what, asked, fusion, state, comm))

    def write(ranks: Together, tensors: Callable[[], Tensors]) -> None:
        with noted(plan.path):
            plan.write(ranks, tensors)

    if asked.wait:
        write(comm, lambda: plan.tensors)
        return plan.path
    copies = do(partial(saver.copies, plan.tensors))
    saver.begin(comm, what, lambda ranks: write(ranks, copies))
    return plan.path


def _asked(call: str, *, folder: object, portable: object, wait: object, keep: object) -> Asked:
    """Return the arguments of a save, which a user gives."""
    place, is_portable = files.as_path(folder), flag(call, "portable", portable)
    return Asked(
        place, is_portable, flag(call, "wait", wait), newest.check(call, place, keep, is_portable)
    )


def _portable(what: str, asked: Asked, fusion: Fusion, state: State, comm: Communicator) -> _Plan:
    folder, rank = asked.folder, comm.rank
    parts = saving.parts_of_state(fusion, state, rank)
    names, size, keep = [*state], comm.size, asked.keep

    def write(ranks: Together, tensors: Callable[[], Tensors]) -> None:
        def boxes() -> Iterator[saving.Part]:
            for (saved, box, _), x in zip(parts, tensors(), strict=True):
                assert x is not None
                yield saved, box, x

        do, finish = partial(together, ranks, what), partial(saving.finish_state, folder, fusion)
        if keep:
            do(first_alone(rank, partial(newest.make_room, folder, keep)))
        save_together(
            ranks,
            what,
            folder,
            lambda: saving.write_parts(folder, boxes(), rank),
            partial(finish, names, size),
        )
        if keep:
            do(first_alone(rank, partial(newest.point, folder, keep)))

    return _Plan(folder, [x for _, _, x in parts], write)


def _by_rank(
    id_: str, what: str, asked: Asked, fusion: Fusion, state: State, comm: Communicator
) -> _Plan:
    path = path_of(asked.folder, comm.rank)
    part, types = path.with_suffix(".part"), types_of(fusion, state)

    def write(ranks: Together, tensors: Callable[[], Tensors]) -> None:
        def content() -> None:
            saved = dict(zip(state, tensors(), strict=True))
            _write(part, {"id": id_, "types": types, "state": saved})

        try:
            together(ranks, what, content)
            together(ranks, what, partial(files.put, part, path))  # a file that is there is whole
        except Exception:
            files.remove(part)
            raise

    return _Plan(path, [*state.values()], write)


def load(program: Program, state: State, saver: Saver, place: str | Path, cast: bool) -> None:
    """Read a state; see `Step.load`."""
    saver.settle()
    comm, fusion = init(program.options), program.fusion
    what = f"load the state of @{fusion.name}"
    do = partial(together, comm, what)
    folder, cast = do(partial(_said, what, place, "cast", cast))
    saved = do(partial(_opened, fusion, state, folder, comm.rank, cast))
    _check_same(folder, comm.all_ok(saved.id))
    do(saved.copy)


def _said(call: str, place: object, name: str, value: object) -> tuple[Path, bool]:
    """Return the folder that a caller names, and True or False."""
    return files.as_path(place), flag(call, name, value)


def path_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank{rank:04d}.pt"


def types_of(fusion: Fusion, state: State) -> dict[str, str]:
    """Return a state as text: dtype, shape of this rank's part, layout."""
    types = {}
    for name, x in state.items():
        shape = None if x is None else [*x.shape]
        value = fusion.values[name]
        types[name] = (
            f"{value.dtype} {shape} on {value.layout and value.layout.mesh} {value.layout}"
        )
    return types


def _agreed_id(comm: Communicator) -> str:
    """Return a text that no other save has, rank 0's on all ranks."""
    said = comm.all_ok(uuid4().hex if comm.rank == 0 else None)
    return said[0] or ""


def _write(part: Path, content: Mapping[str, Any]) -> None:
    with files.new_file(part) as file:
        torch.save(content, file)


def _opened(fusion: Fusion, state: State, folder: Path, rank: int, cast: bool) -> _Saved:
    if loading.is_portable(folder):
        checkpoint = loading.state_of(folder, fusion, [*state], cast)
        return _Saved(checkpoint.id, partial(loading.copy_state, checkpoint, fusion, state, rank))
    path = path_of(folder, rank)
    try:
        check_file(path)
        saved = torch.load(path, weights_only=True, map_location="cpu")
        types = {name: str(x) for name, x in dict(saved["types"]).items()}
        there, id_ = dict(saved["state"]), str(saved["id"])
    except _UNREADABLE as error:
        raise _unreadable(path, str(error)) from error
    _check_types(path, types, types_of(fusion, state), cast)
    for name, x in state.items():
        y = there.get(name)
        if x is not None and not (isinstance(y, Tensor) and y.shape == x.shape):
            raise _unreadable(path, f"%{name} is not of the type that it says")
    return _Saved(id_, partial(_copy, state, there))


def _copy(state: State, there: State) -> None:
    for name, x in state.items():
        y = there[name]
        if x is not None and y is not None:
            x.copy_(y)


def _unreadable(path: Path, why: str) -> ProgramError:
    lines = why.splitlines() or ["it is empty"]
    return ProgramError(f"{path} cannot be read", because=lines[0], hint="Step.save wrote it")


def _check_types(
    path: Path, types: Mapping[str, str], wanted: Mapping[str, str], cast: bool
) -> None:
    """Raise ProgramError for a state of other names, dtypes (where none is cast), or layouts."""
    wrong = [n for n, said in wanted.items() if not _is_fit(types.get(n), said, cast)]
    gone = [n for n in types if n not in wanted]
    if wrong or gone:
        name = (wrong or gone)[0]
        others = _is_fit(types.get(name), wanted.get(name, ""), True)
        raise ProgramError(
            f"{path} is of another state: %{name} is {types.get(name, 'not in it')}",
            because=f"the program has {wanted.get(name, 'no such state')}",
            hint="load(folder, cast=True) casts floats"
            if others
            else "load what the same program saved, on as many ranks; for other layouts "
            "save(folder, portable=True)",
        )


def _is_fit(there: str | None, wanted: str, cast: bool) -> bool:
    """Return whether two types are equal, up to the floating dtype where floats are cast."""
    if there == wanted or there is None or not cast:
        return there == wanted
    (a, kind), (b, other) = (x.partition(" ")[::2] for x in (there, wanted))
    return kind == other and loading.is_cast(_dtype(a), _dtype(b))


def _dtype(name: str) -> torch.dtype | None:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _check_same(folder: Path, ids: Sequence[str | None]) -> None:
    """Raise ProgramError where ranks read files of different saves: one was broken off."""
    others = [n for n, id_ in enumerate(ids) if id_ != ids[0]]
    if others:
        raise ProgramError(
            f"{folder} has files of several saves: that of rank {others[0]} is of another one "
            "than that of rank 0",
            because="a save ended before all ranks had written theirs, or ranks read other folders",
            hint="load an older one; a folder for each save keeps them apart",
        )
