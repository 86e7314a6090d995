"""Host programs as text."""

from __future__ import annotations

from collections.abc import Mapping

from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.ir.graph import Operand, attr_text, attrs_text, operand_text

Types = Mapping[str, BufferType]


def program_text(program: HostProgram) -> str:
    """The whole program: inputs, instructions, source lines as comments."""
    rows: list[tuple[str, str]] = []
    for name in program.inputs:
        rows.append((_input_text(program, name), "input"))
    for instruction in program.instructions:
        rows += _rows(instruction, program.types, program.rank, "")
    width = min(max((len(text) for text, _ in rows), default=0), 92)
    lines = [f"  {text:<{width}}  # {note}" if note else f"  {text}" for text, note in rows]
    on = ", ".join(map(repr, program.meshes))
    who = "" if program.rank is None else f" rank {program.rank}"
    return "\n".join((f"host @{program.name} on {on}{who} {{", *lines, "}"))


def _input_text(program: HostProgram, name: str) -> str:
    kind = program.types[name]
    if kind.layout is None:
        return f"%{name}: {kind.text()} scalar"
    if program.rank is not None and program.rank not in kind.layout.mesh:
        return f"%{name}: none"
    return f"%{name}: {kind.text(program.rank)} {kind.layout}"


def _rows(
    instruction: Instruction, types: Types, rank: int | None, indent: str
) -> list[tuple[str, str]]:
    note = str(instruction.source) if instruction.source else ""
    text = indent + instruction_text(instruction, types, rank)
    if not instruction.body:
        return [(text, note)]
    inner = [row for i in instruction.body for row in _rows(i, types, rank, indent + "  ")]
    return [(text + " {", note), *inner, (indent + "}", "")]


def instruction_text(instruction: Instruction, types: Types, rank: int | None) -> str:
    """One instruction, without its body."""
    match instruction.op:
        case "post":
            return _post_text(instruction, types, rank)
        case "wait":
            return f"wait {_operands(instruction.inputs)}"
        case "return":
            return f"return {', '.join(_returned(x, types) for x in instruction.inputs)}".rstrip()
        case "launch":
            return (
                f"launch {instruction.fn}({_operands(instruction.inputs)}) -> "
                f"{_operands(instruction.outputs)}"
            )
    name = instruction.fn or instruction.op
    arguments = ", ".join(
        filter(None, (_operands(instruction.inputs), attrs_text(instruction.attrs)))
    )
    call = name if name == "alloc" else f"{name}({arguments})"
    flags = "" if instruction.order is None else f" {_order_text(instruction.order)}"
    (output,) = instruction.outputs
    kind = types.get(output)
    result = f": {kind.text(rank)}" if kind is not None else ""
    return f"%{output}{result} = {call}{flags}"


def _order_text(order: tuple[int, ...]) -> str:
    in_order = order == tuple(range(len(order)))
    return "contiguous" if in_order else f"order={attr_text(order)}"


def _operands(operands: tuple[Operand, ...]) -> str:
    return ", ".join(operand_text(x) for x in operands)


def _returned(operand: Operand, types: Types) -> str:
    kind = types.get(operand) if isinstance(operand, str) else None
    layout = f" {kind.layout}" if kind is not None and kind.layout is not None else ""
    return operand_text(operand) + layout


def _post_text(instruction: Instruction, types: Types, rank: int | None) -> str:
    comm = instruction.comm
    assert comm is not None
    source, destination = instruction.inputs
    op = f"[{comm.reduce_op}]" if comm.reduce_op else ""
    parts = [
        f"%{instruction.outputs[0]} = post {comm.kind.lower()}{op}"
        f"({'' if source is None else operand_text(source)})"
    ]
    if destination is not None:
        parts.append(f"-> {operand_text(destination)}")
    if rank is None:
        if comm.axis is not None:
            parts.append(f"axis={comm.axis}")
        if comm.source.mesh != comm.destination.mesh:
            parts.append(f"from {comm.source.mesh} to {comm.destination.mesh}")
    else:
        parts += _team_text(instruction, rank)
    return " ".join(parts)


def _team_text(instruction: Instruction, rank: int) -> list[str]:
    comm = instruction.comm
    assert comm is not None
    team, root = comm.team(rank), comm.root(rank)
    parts = [f"team=({' '.join(map(str, team))})"] if team else ["local"]
    return parts + ([f"root={root}"] if root is not None else [])
