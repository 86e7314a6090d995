"""Read the text of a host program."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from lark import Lark, Token
from lark.exceptions import UnexpectedInput

from mdfuse.communication import Communication
from mdfuse.errors import MdfuseError, ProgramError
from mdfuse.hir.leaves import (
    Node,
    before_of,
    dtype_of,
    extents_of,
    mesh_of,
    name_of,
    operand_of,
    order_of,
    padding_of,
    placement_of,
    setting_of,
    tokens,
    trees,
    value_of,
)
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.index import Term
from mdfuse.ir.ops import TABLE
from mdfuse.layout import Layout, Placement, Stream
from mdfuse.layouts.kinds import KINDS
from mdfuse.mesh import DeviceMesh

_KINDS = {kind.lower(): kind for kind in KINDS}
#: Instructions on buffers that are no rows of the op table.
_BUFFER_OPS = (
    "alloc", "narrow", "chunk", "select", "unexpand", "pad", "pack", "zeros",
)  # fmt: skip
#: Instructions written alike whose result is no buffer.
_HANDLE_OPS = ("send", "recv", "get_stream")

#: What a block is made of, as the grammar names it.
_STATEMENTS = (
    "define", "post", "wait", "launch", "free", "loop", "branch", "set_stream", "sync",
    "group_start", "group_end", "barrier", "return_",
)  # fmt: skip


def parse(text: str) -> HostProgram:
    """The program that `str(program)` printed; comments are not read.

    Raises:
        ProgramError: the text is no host program; the message shows where.

    >>> program = parse('''
    ... host @double on mesh(x=2) {
    ...   input %x: f32[2] of [4] (x=S0)
    ...   %y: f32[2] of [4] (x=S0) = add(%x, %x)
    ...   return %y
    ... }''')
    >>> parse(str(program)) == program
    True
    """
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise ProgramError(
            f"line {error.line}, column {error.column} is no host program",
            where=error.get_context(text).rstrip().splitlines(),
            hint="docs/host_ir.md has the grammar",
        ) from None
    return _Reader().program(tree)


@cache
def _parser() -> Lark:
    grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    return Lark(grammar, start="program", parser="lalr")


class _Reader:
    """From trees to IR; knows the meshes that the header named and the types read so far."""

    def __init__(self) -> None:
        self.meshes: list[DeviceMesh] = []
        self.types: dict[str, BufferType] = {}
        self.streams: set[str] = set()

    def program(self, tree: Node) -> HostProgram:
        self.meshes = [mesh_of(t) for t in trees(tree, "mesh_def")]
        rank = next((int(tokens(t)[0]) for t in trees(tree, "rank")), None)
        inputs = [name_of(tokens(t)[0]) for t in trees(tree, "input")]
        aliases = {name_of(a): name_of(b) for a, b in map(tokens, trees(tree, "alias"))}
        for item in trees(tree):
            if item.data in ("input", "alias"):
                for kind in trees(item):
                    self.types[name_of(tokens(item)[0])] = self.type(kind)
        self.type_aliases(aliases)
        skipped = ("mesh_def", "rank", "alias", "input")
        instructions = self.block([t for t in trees(tree) if t.data not in skipped])
        outputs = next((i.reads for i in instructions if i.op == "return"), ())
        unknown = [n for n in outputs if n not in self.types]
        if unknown:
            raise ProgramError(f"return of undefined {unknown}", hint="define them, or drop them")
        return HostProgram(
            name=str(tokens(tree)[0]),
            types=self.in_order_of_meshes(),
            inputs=tuple(inputs),
            outputs=outputs,
            instructions=instructions,
            aliases=aliases,
            rank=rank,
        )

    def in_order_of_meshes(self) -> dict[str, BufferType]:
        """The types such that the program numbers its meshes as the first line does."""

        def number(kind: BufferType) -> int:
            return self.meshes.index(kind.layout.mesh) if kind.layout is not None else -1

        return dict(sorted(self.types.items(), key=lambda named: number(named[1])))

    def type_aliases(self, aliases: dict[str, str]) -> None:
        """Of an alias and what it stands for, one has the type of the other where it has none."""
        for _ in aliases:
            for name, of in aliases.items():
                for this, other in ((name, of), (of, name)):
                    if this not in self.types and other in self.types:
                        self.types[this] = self.types[other]

    def block(self, trees: list[Node]) -> tuple[Instruction, ...]:
        return tuple(map(self.instruction, trees))

    # -- types -----------------------------------------------------------------------------------

    def layout(self, name: Token | None, tree: Node) -> Layout:
        index = int(name[1:]) if name else 0
        if index >= len(self.meshes):
            raise ProgramError(f"there is no mesh m{index}", hint="name it in the first line")
        placements: dict[str, Placement] = {}
        order: dict[int, list[str]] = {}
        stream = None
        for item in trees(tree):
            first, *rest = tokens(item)
            match item.data:
                case "placement":
                    placements[str(first)] = placement_of(str(rest[0]))
                case "split_order":
                    order[int(first)] = [str(axis) for axis in rest]
                case _:
                    stream = self.stream(item)
        return Layout(self.meshes[index], placements, order, stream)

    def stream(self, tree: Node) -> Stream:
        _, dim, *axis = tokens(tree)
        chunks, *index = map(value_of, trees(tree))
        stream = Stream(int(dim), chunks, str(axis[0]) if axis else None)
        return stream.at(index[0]) if index else stream

    def type(self, tree: Node) -> BufferType:
        dtype = dtype_of(tokens(tree)[0])
        if tree.data == "scalar":
            return BufferType(dtype=dtype)
        extents = [extents_of(t) for t in trees(tree, "extents")]
        (layout,) = trees(tree, "layout")
        named = next((t for t in tokens(tree) if t.type == "LAYOUT_NAME"), None)
        padding = next((padding_of(t) for t in trees(tree, "padding")), None)
        flat = any(t.type == "FLAT" for t in tokens(tree))
        return BufferType(
            dtype=dtype,
            shape=extents[-1],
            layout=self.layout(named, layout),
            padding=padding,
            flat=flat,
        )

    # -- instructions ----------------------------------------------------------------------------

    def instruction(self, tree: Node) -> Instruction:
        read = {
            "define": self.define,
            "post": self.post,
            "wait": self.wait,
            "launch": self.launch,
            "loop": self.loop,
            "branch": self.branch,
            "barrier": self.barrier,
            "return_": self.return_,
        }
        if tree.data in read:
            return read[str(tree.data)](tree)
        match tree.data:
            case "free":
                return Instruction(op="free", inputs=tuple(map(name_of, tokens(tree))))
            case "set_stream" | "sync":
                return self.on_stream(tree)
        return Instruction(op=str(tree.data))

    def return_(self, tree: Node) -> Instruction:
        names = []
        for item in trees(tree, "returned"):
            names.append(name_of(tokens(item)[0]))
            for kind in trees(item):
                self.types[names[-1]] = self.type(kind)
        return Instruction(op="return", inputs=tuple(names))

    def wait(self, tree: Node) -> Instruction:
        attrs = tuple(("piece", value_of(t)) for t in trees(tree))
        return Instruction(op="wait", inputs=(name_of(tokens(tree)[0]),), attrs=attrs)

    def on_stream(self, tree: Node) -> Instruction:
        """set_stream and sync take the index of a stream, or one that get_stream gave."""
        op, (index,) = str(tree.data), map(value_of, trees(tree))
        if isinstance(index, Term) and index.name in self.streams:
            return Instruction(op=op, inputs=(index.name,))
        return Instruction(op=op, attrs=(("stream", index),))

    def loop(self, tree: Node) -> Instruction:
        (index,) = tokens(tree)
        found = [t for t in trees(tree) if t.data not in _STATEMENTS]
        start, stop, step = [*map(value_of, found), 1][:3]
        self.types[name_of(index)] = BufferType(dtype=torch.int64)
        return Instruction(
            op="for",
            outputs=(name_of(index),),
            attrs=(("start", start), ("stop", stop), ("step", step)),
            body=self.block([t for t in trees(tree) if t.data in _STATEMENTS]),
        )

    def branch(self, tree: Node) -> Instruction:
        test, *blocks = trees(tree)
        body, orelse = [*(self.block(trees(b)) for b in blocks), ()][:2]
        return Instruction(op="if", attrs=(("test", value_of(test)),), body=body, orelse=orelse)

    def barrier(self, tree: Node) -> Instruction:
        (layout,) = trees(tree, "layout")
        here = self.layout(before_of(tree.children, layout), layout)
        settings = dict(setting_of(t) for t in trees(tree, "setting"))
        comm = Communication(kind="Barrier", source=here, destination=here, **settings)
        return Instruction(op="barrier", comm=comm)

    def define(self, tree: Node) -> Instruction:
        output, call = tokens(tree)
        kinds = trees(tree, "tensor") + trees(tree, "scalar")
        name, op = name_of(output), str(call)
        for kind in kinds:
            self.types[name] = self.type(kind)
        if op not in TABLE and op not in (*_BUFFER_OPS, *_HANDLE_OPS):
            raise ProgramError(
                f"%{name}: there is no op {op!r}",
                hint="the ops: " + ", ".join(sorted((*TABLE, *_BUFFER_OPS, *_HANDLE_OPS))),
            )
        if op in _HANDLE_OPS:
            if op == "get_stream":
                self.streams.add(name)
        elif name not in self.types:
            raise ProgramError(
                f"%{name} = {op}: %{name} has no type",
                because="the type stands where a name is bound first",
                hint=f"write %{name}: f32[4] (tp=R) = {op}(...)",
            )
        operands = [operand_of(value_of(t.children[0])) for t in trees(tree, "argument")]
        attrs = [setting_of(t) for t in trees(tree, "setting")]
        order = next((order_of(t, self.types[name]) for t in trees(tree, "order")), None)
        return Instruction(
            op=TABLE[op].host if op in TABLE else op,
            fn=op if op in TABLE else "",
            inputs=tuple(operands),
            outputs=(name,),
            attrs=tuple(attrs),
            order=order,
        )

    def launch(self, tree: Node) -> Instruction:
        """The unit's name, then inputs and outputs: what the body does not define is an input."""
        unit, *values = tokens(tree)
        body = tuple(self.instruction(t) for t in trees(tree))
        defined = {name for i in body for name in i.outputs}
        names = [name_of(v) for v in values]
        return Instruction(
            op="launch",
            fn=str(unit),
            inputs=tuple(n for n in names if n not in defined),
            outputs=tuple(n for n in names if n in defined),
            body=body,
        )

    def post(self, tree: Node) -> Instruction:
        found = tokens(tree)
        handle, *others = [t for t in found if t.type == "VALUE"]
        kind, *words = [str(t) for t in found if t.type == "NAME"]
        dtype, extents = dtype_of(words[-1]), extents_of(trees(tree, "extents")[0])
        # each layout may have a mesh's name in front
        layouts = [self.layout(before_of(tree.children, t), t) for t in trees(tree, "layout")]
        kind = kind.replace("_", "")
        if kind not in _KINDS:
            raise ProgramError(
                f"%{name_of(handle)}: there is no communication {kind!r}",
                hint="one of " + ", ".join(_KINDS),
            )
        settings: dict[str, Any] = dict(setting_of(t) for t in trees(tree, "setting"))
        pieces = [("pieces", settings.pop("pieces"))] if "pieces" in settings else []
        try:
            comm = Communication(
                kind=_KINDS[kind],
                source=layouts[0],
                destination=layouts[1],
                shape=extents,
                dtype=dtype,
                reduce_op=words[0] if len(words) > 1 else None,
                **settings,
            )
        except (TypeError, MdfuseError) as error:
            raise ProgramError(f"%{name_of(handle)}: {error}") from error
        source = next((name_of(tokens(t)[0]) for t in trees(tree, "source")), None)
        inputs = (source, name_of(others[0]) if others else None)
        return Instruction(
            op="post", inputs=inputs, outputs=(name_of(handle),), attrs=tuple(pieces), comm=comm
        )
