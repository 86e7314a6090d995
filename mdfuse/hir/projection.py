"""One rank's part of a host program: what it executes, with the attributes of its own parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mdfuse.errors import ProgramError
from mdfuse.extents.expressions import UNKNOWN, resolve
from mdfuse.hir.calls import blocks_of
from mdfuse.hir.instructions import BLOCKS, POSTS, op_of
from mdfuse.hir.passes import late_waits, local_streams
from mdfuse.hir.program import BufferType, HostProgram, Instruction, Known, joined, resolved
from mdfuse.ir.graph import Operand
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.mesh import DeviceMesh


def executed(program: HostProgram, rank: int) -> HostProgram:
    """Return the instructions that a rank executes, whose attributes are still for all ranks.

    The verifier reads these where nothing depends on the rank; `project` localizes them.
    """
    if program.rank is not None:
        return program
    if runs_all(program, rank):
        found = replace(program, rank=rank)
        vars(found)["is_straight"] = program.is_straight
        return found
    here = (n for m in (None, *program.meshes_of(rank)) for n in program.near.get(m, ()))
    block = [program.instructions[n] for n in sorted(set(here))]
    blocks = blocks_of(program)
    lost = {_block_key(i) for i in block if i.op == "call" and i.fn not in blocks}  # is an error
    kept = _block(program, block, rank, lost)
    return replace(program, instructions=tuple(kept), rank=rank)


def runs_all(program: HostProgram, rank: int) -> bool:
    """Return whether a rank is sure to execute all instructions: it has all buffers, in one mesh.

    No branch is taken on a number, and no loop is empty.
    """
    if len(program.meshes) != 1 or rank not in program.meshes[0]:
        return False
    return program.is_straight or not any(_may_be_left_out(i) for i in program.walk())


def _may_be_left_out(i: Instruction) -> bool:
    return i.op in BLOCKS and (i.op != "for" or not any(j.op != "next" for j in i.body))


def near(program: HostProgram) -> Mapping[DeviceMesh | None, list[int]]:
    """Mesh -> positions of the instructions that its ranks may execute; None: all ranks."""
    found: dict[DeviceMesh | None, list[int]] = defaultdict(list)
    handles: dict[str, set[DeviceMesh | None]] = {}
    for n, i in enumerate(program.instructions):
        for mesh in _reach(program, i, handles):
            found[mesh].append(n)
    return found


def _reach(
    program: HostProgram, i: Instruction, handles: dict[str, set[DeviceMesh | None]]
) -> set[DeviceMesh | None]:
    """Return meshes that have all ranks that may execute an instruction; None: all ranks."""
    if i.op in BLOCKS:
        inside = {m for j in (*i.body, *i.orelse) for m in _reach(program, j, handles)}
        return handles.setdefault(_block_key(i), inside) if i.op == "block" else inside
    if i.op == "next":
        return set()
    if i.op == "call":
        return handles.get(_block_key(i), {None})
    if i.op == "wait":
        return handles.get(i.reads[0], set())
    if i.comm is not None:
        found: set[DeviceMesh | None] = {i.comm.source.mesh, i.comm.destination.mesh}
    else:
        names = i.reads if i.op == "free" or i.op in POSTS else i.outputs
        layouts = [program.types[n].layout for n in names if n in program.types]
        found = {k.mesh if k is not None else None for k in layouts} or {None}
    if i.op in POSTS:
        handles.update(dict.fromkeys(i.outputs, found))
    return found


def _block_key(i: Instruction) -> str:
    """Return what stands for a block among handles of posts, which are names of values."""
    return f"@{i.fn}"


def project(program: HostProgram, rank: int) -> HostProgram:
    """Return the projection for one rank; a projection is returned as it is."""
    if program.rank is not None:
        return program
    known = program.knows(rank)
    kept = [localized(program, i, rank, known) for i in executed(program.checked, rank)]
    made = (n for i in kept for j in i.walk() for n in j.outputs)
    shared = (n for pair in program.aliases.items() for n in pair)
    named = dict.fromkeys((*program.inputs, *program.outputs, *made, *shared))
    types = _types_at(program, named, known)
    found = replace(program, types=types, instructions=tuple(kept), rank=rank)
    return late_waits.run(local_streams.run(found, program))


def _types_at(program: HostProgram, names: Iterable[str], known: Known) -> dict[str, BufferType]:
    """Return the types of names with all known terms replaced; one object where they are equal."""
    found: dict[BufferType, BufferType] = {}
    by_id: dict[int, BufferType] = {}
    types = {}
    for name in names:
        kind = program.types.get(name)
        if kind is not None:
            here = by_id.get(id(kind))
            if here is None:
                here = found.get(kind) or found.setdefault(kind, kind.at(known))
                by_id[id(kind)] = here
            types[name] = here
    return types


def _block(
    program: HostProgram, block: Iterable[Instruction], rank: int, handles: set[str]
) -> list[Instruction]:
    """Return the instructions of a block that a rank executes."""
    kept: list[Instruction] = []
    for i in block:
        match i.op:
            case "for":
                parts = [_block(program, part, rank, handles) for part in i.parts]
                if any(parts):
                    attrs = resolved(i.attrs, program.knows(rank))
                    kept.append(replace(i, attrs=attrs, body=joined(filter(None, parts))))
            case "block":
                body = _block(program, i.body, rank, handles)
                if body:
                    handles.add(_block_key(i))
                    kept.append(replace(i, body=tuple(body)))
            case "call":
                kept += [i] if _block_key(i) in handles else []
            case "if":
                kept += _branch(program, i, rank, handles)
            case "free":
                mine = tuple(n for n in i.reads if program.has(n, rank))
                kept += [i if mine == i.inputs else replace(i, inputs=mine)] if mine else []
            case "wait":
                kept += [i] if handles.intersection(i.reads) else []
            case _ if program.runs_on(i, rank):
                if i.op in POSTS:
                    handles.update(i.outputs)
                kept.append(_with_mine(program, i, rank))
    return kept


def _with_mine(program: HostProgram, i: Instruction, rank: int) -> Instruction:
    """Return an instruction with None for each buffer that a rank lacks."""
    if i.op == "return" or all(_is_mine(program, x, rank) for x in i.inputs):
        return i
    inputs = tuple(x if _is_mine(program, x, rank) else None for x in i.inputs)
    body = tuple(_with_mine(program, inner, rank) for inner in i.body)
    return replace(i, inputs=inputs, body=body)


def _is_mine(program: HostProgram, x: Operand, rank: int) -> bool:
    return not isinstance(x, str) or x not in program.types or program.has(x, rank)


def _branch(
    program: HostProgram, i: Instruction, rank: int, handles: set[str]
) -> list[Instruction]:
    """Return a rank's branch, or just the instructions of the side that surely runs."""
    attrs = resolved(i.attrs, program.knows(rank))
    test = dict(attrs)["test"]
    if isinstance(test, int):
        return _block(program, i.body if test else i.orelse, rank, handles)
    body = tuple(_block(program, i.body, rank, handles))
    orelse = tuple(_block(program, i.orelse, rank, handles))
    return [replace(i, attrs=attrs, body=body, orelse=orelse)] if body or orelse else []


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
    return i.made(inputs, i.outputs, attrs, comm, body, orelse)


def globalized(program: HostProgram, i: Instruction, rank: int) -> Instruction:
    """Return an instruction of a rank that says of dims in blocks what it takes of the whole.

    Elsewhere attributes are made local again as they are: they end where the part ends.
    """
    op, first = op_of(i), i.inputs[0] if i.inputs else None
    layout = program.types[first].layout if isinstance(first, str) else None
    if op is None or op.globalize is None or layout is None or not layout.cuts:
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
    layout = program.types[i.reads[0]].layout
    assert layout is not None
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
    layout = program.types[i.reads[0]].layout
    assert layout is not None
    along = i.kwargs.get("along", i.kwargs.get("axis") if "backend" in i.kwargs else None)
    return layout.mesh.ranks if along is None else layout.mesh.team(rank, along)


def _part(program: HostProgram, i: Instruction, rank: int) -> ExprPart:
    """Return what a rank holds of the operands and the result of an op of the table."""
    kinds = [program.types.get(x) if isinstance(x, str) else None for x in i.inputs]
    tensors = [k if k is not None and k.layout is not None else None for k in kinds]
    output = program.types[i.outputs[0]]
    return ExprPart(
        shapes=tuple(k.shape if k is not None else None for k in tensors),
        boxes=tuple(k.box(rank) if k is not None else None for k in tensors),
        shape=output.shape,
        box=output.box(rank),
        blocks=tensors[0].blocks(rank) if tensors and tensors[0] is not None else {},
        cuts=output.layout.cuts if output.layout is not None else {},
    )
