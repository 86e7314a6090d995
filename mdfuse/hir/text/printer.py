"""Print host programs; `parser.py` reads them back, `grammar.lark` is the grammar."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mdfuse.communication import Communication
from mdfuse.hir.instructions import BLOCKS, counts_of
from mdfuse.hir.program import BufferType, HostProgram, Instruction, mesh_of_block
from mdfuse.ir.graph import Operand, attr_text, attrs_text, dtype_name, operand_text
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh

_WIDEST = 100


@dataclass(slots=True)
class _Printer:
    """A printer of one program, which knows the types that it has printed."""

    program: HostProgram
    #: names whose type has been printed
    typed: set[str] = field(default_factory=set)

    # -- meshes, layouts, types ------------------------------------------------------------------

    def mesh(self, mesh: DeviceMesh) -> str:
        """Return the mesh's name where the program has several meshes, else nothing."""
        meshes = self.program.meshes
        return f"m{meshes.index(mesh)}" if len(meshes) > 1 else ""

    def layout(self, layout: Layout) -> str:
        """Return `(tp=S0)`, with the mesh's name in front where there are several."""
        return self.mesh(layout.mesh) + repr(layout)

    def header(self) -> str:
        meshes = self.program.meshes
        texts = [mesh_text(m) for m in meshes]
        if len(meshes) > 1:
            texts = [f"m{i}={text}" for i, text in enumerate(texts)]
        rank = "" if self.program.rank is None else f" rank {self.program.rank}"
        on = f" on {', '.join(texts)}" if texts else ""
        return f"host @{self.program.name}{on}{rank} {{"

    def type(self, kind: BufferType) -> str:
        """Return a type as text: local shape, global shape where it differs, layout."""
        rank = self.program.rank
        if kind.layout is None:
            return f"{dtype_name(kind.dtype)} scalar"
        absent = rank is not None and rank not in kind.layout.mesh
        local = None if absent else kind.local_shape(rank)
        parts = [dtype_name(kind.dtype) + _local_extents(local, kind)]
        if local != kind.shape:
            parts.append(f"of {_extents(kind.shape)}")
        parts.append(self.layout(kind.layout))
        if kind.padding is not None:
            p = kind.padding
            axis = f",axis={attr_text(p.axis)}" if p.axis else ""
            parts.append(f"pad={p.side}(dim={p.dim},parts={p.parts}{axis})")
        return " ".join((*parts, *(["flat"] if kind.flat else [])))

    def bound(self, name: str) -> str:
        """Return a name that is bound or written into, with its type the first time."""
        kind = self.program.types.get(name)
        if kind is None or name in self.typed:
            return f"%{name}"
        self.typed.add(name)
        return f"%{name}: {self.type(kind)}"

    # -- instructions ----------------------------------------------------------------------------

    def rows(self, instruction: Instruction, indent: str) -> list[tuple[str, str]]:
        """Return (text, comment) for each line of an instruction and its body."""
        touched = written_bytes(self.program, instruction)
        notes = [str(instruction.source or ""), f"writes {touched} bytes" if touched else ""]
        note = _on_a_line("; ".join(filter(None, notes)))
        text = indent + self.instruction(instruction)
        if not instruction.body and instruction.op not in ("launch", *BLOCKS):
            return [(text, note)]
        rows = [(text + " {", note), *self.block(instruction.body, indent + "  ")]
        if instruction.orelse:
            rows += [(indent + "} else {", ""), *self.block(instruction.orelse, indent + "  ")]
        return [*rows, (indent + "}", "")]

    def block(self, block: Sequence[Instruction], indent: str) -> list[tuple[str, str]]:
        return [row for i in block for row in self.rows(i, indent)]

    def instruction(self, i: Instruction) -> str:
        """Return one instruction as text, without its body."""
        match i.op:
            case "post":
                return self.post(i)
            case "barrier":
                return self.barrier(i)
            case "wait":
                piece = f"[{i.kwargs['piece']}]" if i.attrs else ""
                return f"wait {_operands(i.inputs)}{piece}"
            case "return":
                return f"return {', '.join(map(self.bound, i.reads))}".rstrip()
            case "launch":
                return f"launch {i.fn}({_operands(i.inputs)}) -> {_operands(i.outputs)}"
            case "for":
                start, stop, step = (i.kwargs[k] for k in ("start", "stop", "step"))
                pace = "" if step == 1 else f" step {step}"
                self.typed.add(i.outputs[0])
                return f"for %{i.outputs[0]} in {start}..{stop}{pace}"
            case "if":
                return f"if {i.kwargs['test']}"
            case "block":
                self.typed.add(i.outputs[0])
                mesh = mesh_of_block(self.program.types, i)
                named = self.mesh(mesh) if mesh is not None else ""
                on = f" on {named}" if named else ""
                return f"block @{i.fn}(%{i.outputs[0]}){on}"
            case "call":
                return f"call {i.fn}({i.kwargs['index']})"
            case "set_stream" | "sync":
                return f"{i.op} {i.kwargs['stream'] if i.attrs else _operands(i.inputs)}"
            case "free":
                return f"free {_operands(i.inputs)}"
            case "group_start" | "group_end" | "next":
                return i.op
        name = i.fn or i.op
        arguments = ", ".join(filter(None, (_operands(i.inputs), attrs_text(i.attrs))))
        call = f"{name}({arguments})" if arguments else name
        order = "" if i.order is None else f" {_order_text(i.order)}"
        return f"{', '.join(map(self.bound, i.outputs))} = {call}{order}"

    def post(self, i: Instruction) -> str:
        comm = i.comm
        assert comm is not None and comm.dtype is not None
        source, destination, *_ = i.inputs
        op = f"[{comm.reduce_op}]" if comm.reduce_op else ""
        parts = [
            f"%{i.outputs[0]} = post {comm.kind.lower()}{op}"
            f"({'' if source is None else operand_text(source)})"
        ]
        if destination is not None:
            parts.append(f"-> {operand_text(destination)}")
        before, after = self.layout(comm.source), self.layout(comm.destination)
        parts.append(f"{dtype_name(comm.dtype)}{_extents(comm.shape)} {before} => {after}")
        settings = {
            "axis": comm.axis,
            "axes": comm.axes if len(comm.axes) > 1 else None,
            "dim": comm.dim,
            "to_dim": comm.to_dim,
            "backend": comm.backend,
            **i.kwargs,
        }
        by = [f"counts=%{name}"] if (name := counts_of(i)) is not None else []
        return " ".join((*parts, *_settings(settings), *by, *self.team(comm)))

    def barrier(self, i: Instruction) -> str:
        comm = i.comm
        assert comm is not None
        settings = _settings({"axis": comm.axis, "backend": comm.backend})
        return " ".join(("barrier", self.layout(comm.source), *settings, *self.team(comm)))

    def alias(self, name: str) -> str:
        order = self.program.alias_orders.get(name)
        text = f"alias {self.bound(name)} = %{self.program.aliases[name]}"
        return text if order is None else f"{text} {_order_text(order)}"

    def team(self, comm: Communication) -> list[str]:
        """Return this rank's team and root, which only projections show."""
        rank = self.program.rank
        if rank is None:
            return []
        team, root = comm.team(rank), comm.root(rank)
        parts = [f"team=({' '.join(map(str, team))})" if team else "local"]
        return [*parts, f"root={root}"] if root is not None else parts


def program_text(program: HostProgram) -> str:
    """Return the text of a program; source lines stand behind the instructions as comments."""
    printer = _Printer(program)
    rows = [(f"input {printer.bound(n)}", "") for n in program.inputs]
    rows += [(printer.alias(name), "") for name in program.aliases]
    rows += printer.block(program.instructions, "")
    width = min(max((len(text) for text, _ in rows), default=0), _WIDEST)
    lines = [f"  {text:<{width}}  # {note}" if note else f"  {text}" for text, note in rows]
    return "\n".join((printer.header(), *lines, "}"))


def written_bytes(program: HostProgram, i: Instruction) -> int | None:
    """Return the bytes that a write of a few elements touches at most; None for other instructions.

    Where it does not write into the buffer of the value itself, it touches all of the result.
    """
    row = TABLE.get(i.fn)
    if row is None or row.keeps is None or program.types.get(i.outputs[0]) is None:
        return None
    is_in_place = i.outputs[0] == i.inputs[row.keeps]
    name = i.inputs[row.keeps - 1] if is_in_place else i.outputs[0]
    return nbytes_held(program, program.types[str(name)])


def nbytes_held(program: HostProgram, kind: BufferType) -> int:
    """Return the bytes of a value: of the rank's part in a projection, else of all."""
    shape = kind.shape if program.rank is None else kind.local_shape(program.rank)
    return math.prod(shape) * kind.dtype.itemsize


def _on_a_line(text: str) -> str:
    """Return a comment's text without line breaks and other characters that do not print.

    A comment ends with its line, and the name of a file may hold anything.
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def _settings(settings: Mapping[str, object]) -> list[str]:
    return [f"{k}={attr_text(v)}" for k, v in settings.items() if v is not None]


def mesh_text(mesh: DeviceMesh) -> str:
    """Return a mesh with all its ranks: `mesh(x=4)`, `mesh(x=2: 4..5)`, `mesh(x=3: 1 0 2)`.

    With known hosts, runs of ranks on one host follow: `mesh(x=4 on 0*2 1*2)`; last, lost ranks.
    """
    text = ", ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.shape, strict=True))
    first, ranks = mesh.first, mesh.ranks
    if ranks != tuple(range(first, first + mesh.size)) or (first and mesh.size == 1):
        text += f": {' '.join(map(str, ranks))}"
    elif first:
        text += f": {first}..{ranks[-1]}"
    runs = " ".join(f"{host}*{n}" for host, n in mesh.host_runs)
    return f"mesh({text} on {runs}{mesh.lost_text})" if runs else f"mesh({text}{mesh.lost_text})"


def _extents(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _local_extents(local: Sequence[int] | None, kind: BufferType) -> str:
    """Return what a rank holds: nothing, extents, or as many rows as some counts say."""
    by = "" if kind.counts is None else f":%{kind.counts}"
    if kind.each is not None:
        by += f"<={kind.each}"
    if local is None or kind.counts is None:
        return f" none{by}" if local is None else _extents(local)
    rows, *inner = local
    return f"[{','.join((f'<={rows}{by}', *map(str, inner)))}]"


def _order_text(order: tuple[int, ...]) -> str:
    in_order = order == tuple(range(len(order)))
    return "contiguous" if in_order else f"order={attr_text(order)}"


def _operands(operands: Sequence[Operand]) -> str:
    return ", ".join(operand_text(x) for x in operands)
