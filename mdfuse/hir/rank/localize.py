"""Attributes, numbers and peers of an instruction on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdfuse.errors import ProgramError
from mdfuse.extents.expressions import UNKNOWN, resolve
from mdfuse.hir.expr_parts import expr_part
from mdfuse.hir.instructions import POSTS, op_of
from mdfuse.hir.program import HostProgram, Instruction, Known, resolved
from mdfuse.ir.local_attributes import ExprPart


def localized(program: HostProgram, i: Instruction, rank: int, known: Known) -> Instruction:
    """Return an instruction that a rank executes with this rank's attributes and numbers."""
    attrs, comm, op = i.attrs, i.comm, op_of(i)
    if op is not None and op.localize is None and not i.indices and not i.body:
        return i
    if i.op in POSTS and comm is None:
        layout = program.types[i.reads[0]].layout
        known = program.knows(rank, layout.mesh if layout is not None else None)
        attrs = _peer(program, i, dict(resolved(attrs, known)), rank)
    elif any(type(v) in UNKNOWN for _, v in attrs):
        attrs = resolved(attrs, known)
    localize = op.localize if op is not None else None
    if localize is not None and program.types[i.outputs[0]].layout is not None:
        attrs = tuple(localize(dict(attrs), _part(program, i, rank)).items())
    if comm is not None:
        comm = comm.at(known)
    inputs = i.inputs
    if any(type(x) in UNKNOWN for x in inputs):
        inputs = tuple([resolve(x, known) if type(x) in UNKNOWN else x for x in inputs])
    body, orelse = i.body, i.orelse
    if body or orelse:
        body = tuple([localized(program, inner, rank, known) for inner in body])
        orelse = tuple([localized(program, inner, rank, known) for inner in orelse])
    return i.rebuilt(inputs, i.outputs, attrs, comm, body, orelse)


def globalized(program: HostProgram, i: Instruction, rank: int) -> Instruction:
    """Return an instruction of a rank with attributes of the whole.

    They are made local again where types became more exact: made local twice, the ends of blocks
    and the windows of parts that are summed up would be others.
    """
    op, first = op_of(i), i.inputs[0] if i.inputs else None
    layout = program.types[first].layout if isinstance(first, str) else None
    if op is None or op.globalize is None or layout is None:
        return i
    return replace(i, attrs=tuple(op.globalize(dict(i.attrs), _part(program, i, rank)).items()))


def _peer(
    program: HostProgram, i: Instruction, attrs: dict[str, Any], rank: int
) -> tuple[tuple[str, Any], ...]:
    """Return a transfer's attributes, with a rank in place of a position along an axis."""
    side = "to" if i.op == "send" else "from"
    axis, peer = attrs.get("axis"), attrs[side]
    if axis is None or not isinstance(peer, int):
        return tuple(attrs.items())
    layout = program.types[i.reads[0]].placed
    team = layout.mesh.team(rank, axis)
    if not 0 <= peer < len(team):
        raise ProgramError(
            f"@{program.name}: {i.op} %{i.reads[0]} has {side}={peer} along {axis}",
            where=[i.source.quote()] if i.source else (),
            because=f"the positions along {axis} are 0 to {len(team) - 1}",
            hint="take it modulo the size of the axis",
        )
    del attrs["axis"]
    along = {"along": axis} if "backend" in attrs else {}  # it need not reach the whole mesh
    return tuple({**attrs, **along, side: team[peer]}.items())


def transfer_team(program: HostProgram, i: Instruction, rank: int) -> tuple[int, ...]:
    """Return the ranks among which a send or receive of a rank takes place.

    The ranks of the buffer; of these, those along its axis where it names a backend, which need not
    reach the others.
    """
    layout = program.types[i.reads[0]].placed
    along = i.kwargs.get("along", i.kwargs.get("axis") if "backend" in i.kwargs else None)
    return layout.mesh.ranks if along is None else layout.mesh.team(rank, along)


def _part(program: HostProgram, i: Instruction, rank: int) -> ExprPart:
    """Return what a rank holds of the operands and the result of an op of the table."""
    operands = [program.types.get(x) if isinstance(x, str) else None for x in i.inputs]
    return expr_part(operands, program.types[i.outputs[0]], rank)
