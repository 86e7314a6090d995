"""Name the backend of a post, where the user named one for its mesh axis.

With `Options(backend="gloo, dp=ucx")`:

    %c = post allreduce[sum](%x) -> %y ... axis=dp      ->      ... axis=dp backend=ucx

Sends and receives of rings along the axis name it, too. A post along several axes, as an exchange
may be, names the backend that all of them have.

Posts of the usual backend name none, so that the program runs on any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mdfuse.communication import Communication
from mdfuse.config import BETWEEN_MESHES, Options, backend_choice
from mdfuse.hir.instructions import TRANSFERS
from mdfuse.hir.program import HostProgram, Instruction

name = "name_backends"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with the backends that `options` names; the usual one is not named."""
    by_axis = backend_choice(options.backend).by_axis
    return replace(program, instructions=_block(program.instructions, by_axis))


def _block(block: tuple[Instruction, ...], by_axis: Mapping[str, str]) -> tuple[Instruction, ...]:
    return tuple(_named(i, by_axis) for i in block) if by_axis else block


def _named(i: Instruction, by_axis: Mapping[str, str]) -> Instruction:
    comm = i.comm
    if comm is not None and i.op == "post":
        named = {by_axis.get(axis) for axis in _axes(comm)}
        comm = replace(comm, backend=named.pop() if len(named) == 1 else None)
    elif i.op in TRANSFERS and i.kwargs.get("axis", "") in by_axis:
        i = replace(i, attrs=(*i.attrs, ("backend", by_axis[i.kwargs["axis"]])))
    return replace(i, comm=comm, body=_block(i.body, by_axis), orelse=_block(i.orelse, by_axis))


def _axes(comm: Communication) -> tuple[str, ...]:
    """Return the axes of a post, BETWEEN_MESHES, or "" for ranks of one mesh on no axis."""
    is_within = comm.source.mesh == comm.destination.mesh
    return (comm.along or ("",)) if is_within else (BETWEEN_MESHES,)
