"""The instructions of a program that one rank executes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mdfuse.hir.block_calls import blocks_of
from mdfuse.hir.instructions import BLOCKS, POSTS
from mdfuse.hir.once import once
from mdfuse.hir.program import BufferType, HostProgram, Instruction, Known, joined, resolved
from mdfuse.hir.rank.localize import localized
from mdfuse.ir.graph import Operand
from mdfuse.mesh import DeviceMesh


def executed(program: HostProgram, rank: int) -> HostProgram:
    """Return the instructions that a rank executes, whose attributes are still for all ranks.

    The verifier reads these where nothing depends on the rank; `project` localizes them.
    """
    if program.rank is not None:
        return program
    if runs_all(program, rank):
        local = replace(program, rank=rank)
        vars(local)["is_straight"] = program.is_straight
        return local
    positions = (n for m in (None, *program.meshes_of(rank)) for n in near(program).get(m, ()))
    block = [program.instructions[n] for n in sorted(set(positions))]
    blocks = blocks_of(program)
    lost = {_block_key(i) for i in block if i.op == "call" and i.fn not in blocks}  # is an error
    instructions = _block(program, block, rank, lost)
    return replace(program, instructions=tuple(instructions), rank=rank)


def runs_all(program: HostProgram, rank: int) -> bool:
    """Return whether a rank is sure to execute all instructions: it has all buffers, in one mesh.

    No branch is taken on a number, and no loop is empty.
    """
    if len(program.meshes) != 1 or rank not in program.meshes[0]:
        return False
    return program.is_straight or not any(_may_be_left_out(i) for i in program.walk())


def _may_be_left_out(i: Instruction) -> bool:
    return i.op in BLOCKS and (i.op != "for" or not any(j.op != "next" for j in i.body))


@once
def near(program: HostProgram) -> Mapping[DeviceMesh | None, list[int]]:
    """Mesh -> positions of the instructions that its ranks may execute; None: all ranks."""
    positions: dict[DeviceMesh | None, list[int]] = defaultdict(list)
    handles: dict[str, set[DeviceMesh | None]] = {}
    for n, i in enumerate(program.instructions):
        for mesh in _reach(program, i, handles):
            positions[mesh].append(n)
    return positions


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
        meshes: set[DeviceMesh | None] = {i.comm.source.mesh, i.comm.destination.mesh}
    else:
        names = i.reads if i.op == "free" or i.op in POSTS else i.outputs
        layouts = [program.types[n].layout for n in names if n in program.types]
        meshes = {k.mesh if k is not None else None for k in layouts} or {None}
    if i.op in POSTS:
        handles.update(dict.fromkeys(i.outputs, meshes))
    return meshes


def _block_key(i: Instruction) -> str:
    """Return what stands for a block among handles of posts, which are names of values."""
    return f"@{i.fn}"


def projected(program: HostProgram, rank: int) -> HostProgram:
    """Return the instructions that a rank executes, with its attributes, numbers and types."""
    known = program.knows(rank)
    instructions = [localized(program, i, rank, known) for i in executed(program.checked, rank)]
    bound = (n for i in instructions for j in i.walk() for n in j.outputs)
    shared = (n for pair in program.aliases.items() for n in pair)
    named = dict.fromkeys((*program.inputs, *program.outputs, *bound, *shared))
    types = _types_at(program, named, known)
    return replace(program, types=types, instructions=tuple(instructions), rank=rank)


def _types_at(program: HostProgram, names: Iterable[str], known: Known) -> dict[str, BufferType]:
    """Return the types of names with all known terms replaced; one object where they are equal."""
    by_type: dict[BufferType, BufferType] = {}
    by_id: dict[int, BufferType] = {}
    types = {}
    for name in names:
        kind = program.types.get(name)
        if kind is not None:
            local = by_id.get(id(kind))
            if local is None:
                local = by_type.get(kind) or by_type.setdefault(kind, kind.at(known))
                by_id[id(kind)] = local
            types[name] = local
    return types


def _block(
    program: HostProgram, block: Iterable[Instruction], rank: int, handles: set[str]
) -> list[Instruction]:
    """Return the instructions of a block that a rank executes."""
    instructions: list[Instruction] = []
    for i in block:
        match i.op:
            case "for":
                parts = [_block(program, part, rank, handles) for part in i.parts]
                if any(parts):
                    attrs = resolved(i.attrs, program.knows(rank))
                    instructions.append(replace(i, attrs=attrs, body=joined(filter(None, parts))))
            case "block":
                body = _block(program, i.body, rank, handles)
                if body:
                    handles.add(_block_key(i))
                    instructions.append(replace(i, body=tuple(body)))
            case "call":
                instructions += [i] if _block_key(i) in handles else []
            case "if":
                instructions += _branch(program, i, rank, handles)
            case "free":
                mine = tuple(n for n in i.reads if program.has(n, rank))
                instructions += [i if mine == i.inputs else replace(i, inputs=mine)] if mine else []
            case "wait":
                instructions += [i] if handles.intersection(i.reads) else []
            case _ if program.runs_on(i, rank):
                if i.op in POSTS:
                    handles.update(i.outputs)
                instructions.append(_with_mine(program, i, rank))
    return instructions


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
