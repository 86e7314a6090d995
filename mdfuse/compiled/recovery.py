"""States on the ranks that are left: a program that sends each box from a rank that holds it.

    %w f32[4,6] mesh(dp=2, tp=2 lost 3)(dp=R, tp=S0)  ->  %w f32[4,6] mesh(dp=3)(dp=S0)

Ranks are numbered as they are now; those that are lost, or whose part is half written, are marked
in the mesh before: an exchange asks them for nothing. Boxes that nobody else holds are missing.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mdfuse import files
from mdfuse.compiled.all_or_none import together
from mdfuse.compiled.program import Program, compile
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import ProgramError, counted, listed, user_source
from mdfuse.extents.extent import is_symbolic
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.importing import load as loading
from mdfuse.frontend.importing.module_lines import called_at
from mdfuse.ir.graph import Fusion, dtype_name
from mdfuse.layouts.boxes import Box, box_size, boxes_of, index_of, within
from mdfuse.layouts.endpoints import Side
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh
from mdfuse.runtime.communicator import Communicator
from mdfuse.runtime.membership import Member, Membership

_log = logging.getLogger("mdfuse.comm")

State = Mapping[str, Tensor | None]

#: Boxes of values that no rank holds: value -> rank -> its boxes, in rows of the whole.
Missing = Mapping[str, Mapping[int, Sequence[Box]]]


class ValueAt(NamedTuple):
    """A value of a state, with its layout in one program."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {[*self.shape]}"


Values = Mapping[str, ValueAt]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The way of a state from the layouts of one program into those of another.

    Attributes:
        program: takes the values in the layouts before, and returns them in those after.
        missing: the boxes that no rank holds; the program leaves them as they are.
    """

    program: Program
    missing: Missing

    def __str__(self) -> str:
        return "\n".join([str(self.program), *_lines(self.missing)])


def values_of(fusion: Fusion, names: Sequence[str]) -> dict[str, ValueAt]:
    """Return the types of inputs of a fusion.

    Raises:
        ProgramError: one is Partial, or has symbolic extents.
    """
    values = {}
    for name in names:
        value, layout = fusion.values[name], fusion.layout(name)
        if layout.partial_axes or is_symbolic(value.shape):
            raise ProgramError(
                f"recovery of %{name}: {value.type_text()}",
                because="it has parts of wholes, or extents that no run chooses",
                hint="keep a state whole or split, of known extents",
            )
        values[name] = ValueAt(tuple(value.shape), value.dtype, layout)
    return values


def renumbered(layout: Layout, numbers: Mapping[int, int], lost: Collection[int]) -> Layout:
    """Return a layout with other ranks in its mesh, of which some are lost."""
    mesh = layout.mesh
    ranks = [numbers[rank] for rank in mesh.ranks]
    mesh = DeviceMesh.of(mesh.shape, ranks, mesh.axes, mesh.hosts).with_lost(lost)
    return Layout(mesh, layout.by_axis(), layout.order, layout.stream, dict(layout.reaches))


def planned(before: Values, after: Values, options: Options | None = None) -> Recovery:
    """Return the way of values from one program to another.

    Args:
        before: the values as they lie; the meshes mark the ranks to which nothing is sent.
        after: the same values as they are to lie.
        options: of the program.

    >>> import torch, mdfuse as mf
    >>> four = mf.DeviceMesh.arange(dp=2, tp=2).with_lost([3])
    >>> rows = mf.Layout(four, {"dp": mf.Shard(0)}), mf.Layout(four, {"tp": mf.Shard(0)})
    >>> whole = mf.Layout(mf.DeviceMesh.arange(dp=2))
    >>> before = {n: ValueAt((4,), torch.float32, x) for n, x in zip("ab", rows)}
    >>> recovery = planned(before, {n: x._replace(layout=whole) for n, x in before.items()})
    >>> recovery.missing
    {}
    >>> a, b = torch.arange(4.0), torch.arange(4.0) + 10
    >>> mf.simulate(recovery.program, [a, b]).outputs[1].tolist()
    [10.0, 11.0, 12.0, 13.0]
    """
    with FusionDefinition("recover") as fd:
        for name, value in before.items():
            x = fd.define_tensor(value.shape, value.dtype, layout=value.layout, name=name)
            new = re.sub(r"\W", "_", f"new_{name}")  # on all ranks alike, whatever line calls
            moved = called_at(user_source(), new, fd.ops.set)(x)
            fd.add_output(moved.on(after[name].layout))
    plain = options_from_environment(options)  # parts are moved as they are, so bits are the same
    plain = replace(plain, overlap="never", graph="never", same_bits=False)
    return Recovery(program=compile(fd, plain), missing=missing_of(before, after))


def missing_of(before: Values, after: Values) -> Missing:
    """Return the boxes of values that only lost ranks hold."""
    missing = {}
    for name, value in before.items():
        goal = after[name].layout
        exchange = Exchange(Side(value.layout, value.shape), Side(goal, value.shape))
        boxes = {rank: [b for b in exchange.missing(rank) if box_size(b)] for rank in goal.mesh}
        if any(boxes.values()):
            missing[name] = {rank: of for rank, of in boxes.items() if of}
    return missing


def _lines(missing: Missing) -> list[str]:
    """Return missing boxes as text, a line for each value."""
    lines = []
    for name, by_rank in missing.items():
        boxes = sorted({box for of in by_rank.values() for box in of})
        texts = ("[" + ", ".join(f"{a}:{b}" for a, b in box) + "]" for box in boxes)
        lines.append(f"%{name}: no rank holds {listed(texts)}")
    return lines


class Holding(NamedTuple):
    """The state of this rank before, as `recover` needs it.

    Attributes:
        values: the types of all values.
        fixed: the names of those that no run writes.
        members: the processes of the ranks that the meshes name; see `Communicator.members`.
        states: version of the state -> this rank's parts, of fixed values, too.
        parts: this rank's parts as they are, whole or not.
        saved: folder -> the version of the state that was saved there, or read; the last one last.
        last: the last version that the device had made before its posts were ended; None: they
            were not.
    """

    values: Values
    fixed: Collection[str]
    members: Sequence[Member]
    states: Mapping[int, State]
    parts: State
    saved: Mapping[str, int]
    last: int | None = None


class RecoveredVersion(NamedTuple):
    """The decision of all ranks.

    Attributes:
        version: of the state that is recovered; 0 where it is read, and nobody knows which.
        before: the values that ranks send each other, as they lie.
        saved: folder -> the version of the state that was saved there.
        read: the names of those that are read from a checkpoint.
    """

    version: int
    before: Values
    saved: Mapping[str, int]
    read: Sequence[str] = ()


def recovered(
    holding: Holding | None,
    after: Fusion,
    names: Sequence[str],
    comm: Communicator,
    or_from: str | Path | None,
    options: Options | None,
) -> tuple[dict[str, Tensor | None], RecoveredVersion, Recovery | None]:
    """Return this rank's parts of a state in the layouts of a program, from ranks or files.

    All ranks call it together.

    Args:
        holding: what this rank has of it; None: it is a new process.
        after: the fusion with the layouts.
        names: of all values.
        comm: of the ranks that are left.
        or_from: a portable checkpoint, for boxes that no rank holds; None: there is none.
        options: of the program that moves them.

    Returns:
        the parts; the choice of their version; the program that moved them, None where all were
        read.

    Raises:
        ProgramError: boxes that nobody holds, or of other names, shapes or dtypes; on all ranks.
    """
    do = partial(together, comm, f"recover the state of @{after.name}")
    goal = do(partial(_checked, holding, after, names))
    versions = comm.all_ok(_holding_text(holding))
    choice = do(partial(_chosen, holding, goal, versions, comm, or_from))
    recovery, parts = None, dict[str, Tensor | None]()
    if choice.before:
        recovery = do(partial(planned, choice.before, goal, options))
        if comm.rank == 0:
            _log.info("version %d of the state of @%s: %s", choice.version, after.name, recovery)
        state = recovery.program.run(*_arguments(holding, choice))
        parts |= zip(choice.before, state, strict=True)
        do(partial(_fill, recovery.missing, parts, goal, comm.rank, or_from))
    if choice.read:
        read = {name: goal[name] for name in choice.read}
        parts |= do(partial(_read_all, read, comm, or_from))
    return {name: parts[name] for name in goal}, choice, recovery


def _checked(holding: Holding | None, after: Fusion, names: Sequence[str]) -> Values:
    """Return the values in the new layouts; ProgramError where they are not those of before."""
    goal = values_of(after, names)
    before = goal if holding is None else holding.values
    others = {*before} ^ {*goal}
    wrong = [n for n in goal if n not in others and before[n][:2] != goal[n][:2]]
    for name in (*sorted(others), *wrong):
        there, now = before.get(name), goal.get(name)
        raise ProgramError(
            f"recovery of @{after.name}: %{name} is {now or 'no state'}, and was "
            f"{there or 'no state'}",
            because="a state goes on as it was, in other layouts",
            hint="build the program by the same function, with the mesh alone changed",
        )
    return goal


def _holding_text(holding: Holding | None) -> str | None:
    """Return this rank's versions for the others, with the layouts of all values; None: it is new.

    A new process learns them so; all others have the same.
    """
    if holding is None:
        return None
    rows = [(n, x.shape, x.dtype, x.layout) for n, x in holding.values.items()]
    types = base64.b64encode(pickle.dumps((rows, [*holding.fixed], [*holding.members]))).decode()
    return json.dumps([[*holding.states], {**holding.saved}, types, holding.last])


def _chosen(
    holding: Holding | None,
    goal: Values,
    said: Sequence[str | None],
    comm: Communicator,
    or_from: str | Path | None,
) -> RecoveredVersion:
    """Return the newest version of which nothing is missing, or that a checkpoint completes.

    Where devices had posts ended, it is one that all of them had made: a post that one rank ends
    may bring garbage to another rank, whose device then goes on as if nothing were wrong.
    """
    rows = {rank: json.loads(text) for rank, text in enumerate(said) if text is not None}
    if not rows:
        raise ProgramError("no rank has a state", hint="pass the step to recover on survivors")
    _, saved, types, _ = rows[min(rows)]
    values, fixed, members = pickle.loads(base64.b64decode(types))
    values = {n: ValueAt(*x) for n, *x in values}
    numbers = _numbers(members, comm.membership.members)
    last = min([x for *_, x in rows.values() if x is not None], default=None)
    held = {
        rank: {n for n in states if last is None or n <= last}
        for rank, (states, *_) in rows.items()
    }

    def before(version: int) -> Values:
        lost = {*numbers.values()} - {*rows}
        half = {rank for rank, known in held.items() if version not in known}
        return {
            n: x._replace(layout=renumbered(x.layout, numbers, lost if n in fixed else lost | half))
            for n, x in values.items()
        }

    candidates = sorted({v for known in held.values() for v in known}, reverse=True)
    lacking: Missing = {n: {0: [tuple((0, k) for k in x.shape)]} for n, x in goal.items()}
    for version in candidates:
        missing = missing_of(before(version), goal)
        if not missing:
            return RecoveredVersion(version, before(version), saved)
        lacking = missing if version == candidates[0] else lacking
    if or_from is None:
        raise _refusal(lacking, held)
    folder = os.path.realpath(files.as_path(or_from))
    version = saved.get(folder, 0)
    alike = [name for name, of in saved.items() if of == version]
    if version in candidates and folder in alike[-1:]:  # a load makes a version another state
        return RecoveredVersion(version, before(version), saved)
    of_ranks = {name: x for name, x in before(version).items() if name in fixed}
    return RecoveredVersion(version, of_ranks, saved, [name for name in goal if name not in fixed])


def _refusal(lacking: Missing, held: Mapping[int, Collection[int]]) -> ProgramError:
    """Return the error for boxes that no rank holds in one version."""
    half = [rank for rank, versions in held.items() if not versions]
    return ProgramError(
        f"{counted(len(lacking), 'value')} of the state cannot be recovered from the ranks left",
        where=[
            *_lines(lacking)[:8],
            *([f"half written on ranks {half}"] if half else []),
        ],
        because="a box comes from a rank that holds it whole, all boxes in one version",
        hint='or_from="folder" of a portable checkpoint; Step(double_buffer=True) keeps a version',
    )


def members_of(meshes: Iterable[DeviceMesh]) -> tuple[Member, ...]:
    """Return the processes of meshes, where ranks are as they were started."""
    return Membership.first(max(mesh.last_rank for mesh in meshes) + 1).members


def _numbers(before: Sequence[Member], now: Sequence[Member]) -> dict[int, int]:
    """Return rank before -> rank now; numbers that nobody has for ranks that are lost."""
    places = {member: rank for rank, member in enumerate(now)}
    numbers, free = {}, len(now)
    for rank, member in enumerate(before):
        numbers[rank] = places.get(member, free)
        free += numbers[rank] == free
    return numbers


def _arguments(holding: Holding | None, choice: RecoveredVersion) -> list[Tensor | None]:
    """Return this rank's parts before, whole or not, in the order of the program's inputs."""
    if holding is None:
        return [None] * len(choice.before)
    state = holding.states.get(choice.version, holding.parts)
    return [state[name] for name in choice.before]


def _fill(
    missing: Missing, parts: State, goal: Values, rank: int, or_from: str | Path | None
) -> None:
    """Read the boxes that no rank holds from a checkpoint."""
    if not missing:
        return
    checkpoint = _opened(or_from, {n: goal[n] for n in missing})
    for name, boxes in missing.items():
        x, (shape, dtype, layout) = parts[name], goal[name]
        for box in boxes.get(rank, ()):
            assert x is not None
            read = loading.read(checkpoint, name, dtype, box)
            x[index_of(within(box, layout.rows(shape, rank)))] = read.to(x.device)


def _read_all(
    goal: Values, comm: Communicator, folder: str | Path | None
) -> dict[str, Tensor | None]:
    """Read this rank's part of each value from a checkpoint."""
    checkpoint, parts = _opened(folder, goal), dict[str, Tensor | None]()
    for name, (shape, dtype, layout) in goal.items():
        is_here = comm.rank in layout.mesh
        local = layout.local_shape(shape, comm.rank) if is_here else ()
        x = torch.empty(local, dtype=dtype, device=comm.device) if is_here else None
        parts[name] = x
        if x is not None:
            boxes = tuple(boxes_of(layout.rows(shape, comm.rank)))
            x.copy_(loading.joined(boxes, partial(loading.read, checkpoint, name, dtype)))
    return parts


def _opened(folder: str | Path | None, values: Values) -> loading.Distributed:
    """Return the checkpoint; ProgramError where it lacks a value, or has it of another shape."""
    checkpoint = loading.Distributed(files.as_path(folder))
    loading.check_names(checkpoint, [(name,) for name in values])
    for name, value in values.items():
        loading.check_shape(checkpoint, name, value.shape)
    return checkpoint
