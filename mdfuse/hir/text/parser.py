"""Read the text of a host program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from lark import Lark, Token
from lark.exceptions import UnexpectedInput

from mdfuse.communication import Communication
from mdfuse.errors import MdfuseError, ProgramError, near
from mdfuse.extents.expressions import Term
from mdfuse.hir.forms import (
    attributes_problem,
    check_nesting,
    kind_problem,
    problem,
    program_problem,
    refuse,
)
from mdfuse.hir.instructions import CALLS, INSTRUCTIONS
from mdfuse.hir.program import BufferType, HostProgram, Instruction, mesh_of_block
from mdfuse.hir.text.values import (
    Node,
    alias_orders,
    before_of,
    check_depth,
    counted_by,
    counts_in,
    dtype_of,
    extents_of,
    int_of,
    mesh_of,
    name_of,
    no_program,
    operand_of,
    order_of,
    padding_of,
    placement_of,
    rank_of,
    reach_of,
    settings_of,
    shapes_of,
    team_text,
    tokens,
    trees,
    type_problem,
    value_of,
)
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.halo import Reach
from mdfuse.layouts.kinds import KINDS
from mdfuse.layouts.layout import Layout, Placement
from mdfuse.layouts.stream import Stream
from mdfuse.mesh import DeviceMesh

#: Stands for a type that is not given.
_NUMBER = BufferType(dtype=torch.int64)
_KINDS = {kind.lower(): kind for kind in KINDS}


def parse(text: str) -> HostProgram:
    """Return the program that `str(program)` printed; comments are ignored.

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
    if not isinstance(text, str):
        raise ProgramError(
            f"a {type(text).__name__} is no text of a program", hint="pass what str(program) gives"
        )
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise no_program(error, text) from None
    check_depth(tree)
    return _Reader(text.splitlines()).program(tree)


@cache
def _parser() -> Lark:
    how: dict[str, Any] = {"start": "program", "parser": "lalr", "propagate_positions": True}
    return Lark.open("grammar.lark", rel_to=__file__, **how)


def keywords() -> set[str]:
    """Return the words that have a meaning of their own in the text."""
    return {t.pattern.value for t in _parser().terminals if t.pattern.type == "str"}


class _Reader:
    """A walk from trees to IR that knows the header's meshes and the types read so far."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines
        self.meshes: list[DeviceMesh] = []
        self.rank: int | None = None
        self.types: dict[str, BufferType] = {}
        self.streams: set[str] = set()
        #: each instruction with the tree that it was read from
        self.read: list[tuple[Instruction, Node]] = []
        #: the error under way, with its place
        self.placed: ProgramError | None = None

    def program(self, tree: Node) -> HostProgram:
        self.header(tree)
        inputs, aliases = list[str](), dict[str, str]()
        for item in trees(tree):
            if item.data in ("input", "alias"):
                with self.at(item):
                    self.declare(item, inputs, aliases)
        self.type_aliases(aliases)
        instructions = self.block(*trees(tree, "block"))
        outputs = next((i.reads for i in instructions if i.op == "return"), ())
        program = HostProgram(
            name=str(tokens(tree)[0]),
            types=self.in_order_of_meshes(),
            inputs=tuple(inputs),
            outputs=outputs,
            instructions=instructions,
            aliases=aliases,
            alias_orders=alias_orders(trees(tree, "alias"), self.types),
            rank=self.rank,
        )
        self.check(program)
        return program

    def header(self, tree: Node) -> None:
        for n, item in enumerate(trees(tree, "mesh_def")):
            with self.at(item):
                named = tokens(item)
                if named and str(named[0]) != f"m{n}":
                    raise ProgramError(
                        f"mesh {n} is named {named[0]}",
                        because="the meshes are m0, m1, … in the order of the first line",
                        hint=f"name it m{n}",
                    )
                self.meshes.append(mesh_of(item))
        for item in trees(tree, "rank"):
            with self.at(item):
                self.rank = rank_of(item)

    def declare(self, item: Node, inputs: list[str], aliases: dict[str, str]) -> None:
        """Read an input, or an alias."""
        name, *of = map(name_of, tokens(item))
        if name in (aliases if of else inputs):
            raise ProgramError(f"%{name} is declared twice", hint="leave one out")
        for kind in (tree for tree in trees(item) if tree.data != "order"):
            self.bind(name, kind)
        if of:
            aliases[name] = of[0]
        else:
            inputs.append(name)

    def check(self, program: HostProgram) -> None:
        """Raise ProgramError for an instruction, or a program, of a wrong form."""
        check_nesting(program)
        for i, tree in self.read:
            with self.at(tree):
                refuse(problem(i, program.types, program.rank))
        refuse(program_problem(program))
        for name in program.outputs:
            if name not in self.types:
                raise ProgramError(f"return of undefined %{name}", hint="define it, or drop it")

    # -- places ----------------------------------------------------------------------------------

    @contextmanager
    def at(self, tree: Node) -> Iterator[None]:
        """Give errors inside the block the line of the text as their place."""
        try:
            yield
        except MdfuseError as error:
            if error is self.placed:
                raise
            self.placed = ProgramError(
                error.what, where=self.place(tree), because=error.because, hint=error.hint
            )
            raise self.placed from error

    def place(self, tree: Node) -> str:
        line = getattr(tree.meta, "line", 0)
        return f"line {line}: {self.lines[line - 1].strip()}" if line else "host …"

    def in_order_of_meshes(self) -> dict[str, BufferType]:
        """Return the types sorted so that the program numbers its meshes as the first line does."""

        def number(kind: BufferType) -> int:
            return self.meshes.index(kind.layout.mesh) if kind.layout is not None else -1

        return dict(sorted(self.types.items(), key=lambda named: number(named[1])))

    def type_aliases(self, aliases: dict[str, str]) -> None:
        """Give an alias and its buffer one type, where only one of them has it."""
        for _ in aliases:
            for name, of in aliases.items():
                for this, other in ((name, of), (of, name)):
                    if this not in self.types and other in self.types:
                        self.types[this] = self.types[other]

    def block(self, block: Node) -> tuple[Instruction, ...]:
        """Return the instructions of a block, inputs and aliases left out."""
        statements = [t for t in trees(block) if t.data not in ("input", "alias")]
        return tuple(map(self.statement, statements))

    def statement(self, tree: Node) -> Instruction:
        with self.at(tree):
            i = self.instruction(tree)
        self.read.append((i, tree))
        return i

    # -- types -----------------------------------------------------------------------------------

    def layout(self, name: Token | None, tree: Node) -> Layout:
        index = int_of(name[1:]) if name else 0
        if index >= len(self.meshes):
            raise ProgramError(f"there is no mesh m{index}", hint="name it in the first line")
        placements, stream = dict[str, Placement](), None
        order, reaches = dict[int, list[str]](), dict[int, Reach]()
        for item in trees(tree):
            first, *words = tokens(item)
            match item.data:
                case "placement":
                    placements[str(first)] = placement_of(str(words[0]))
                case "split_order":
                    order[int_of(words[0])] = [str(axis) for axis in words[1:]]
                case "reach":
                    reaches |= reach_of(item)
                case _:
                    stream = self.stream(item)
        return Layout(self.meshes[index], placements, order, stream, reaches)

    def stream(self, tree: Node) -> Stream:
        _, dim, *axis = tokens(tree)
        chunks, *index = map(value_of, trees(tree))
        if dim.startswith("P"):
            return Stream.over(str(dim)[2:-1], chunks, index[0] if index else None)
        along, _, zigzag = dim.removeprefix("S").partition("/")
        stream = Stream(int_of(along), chunks, str(axis[0]) if axis else None, zigzag=bool(zigzag))
        return stream.at(index[0]) if index else stream

    def type(self, tree: Node) -> BufferType:
        dtype = dtype_of(tokens(tree)[0])
        if tree.data == "scalar":
            return BufferType(dtype=dtype)
        _, shape = shapes_of(tree)
        (item,) = trees(tree, "layout")
        named = next((t for t in tokens(tree) if t.type == "LAYOUT_NAME"), None)
        layout = self.layout(named, item)
        padding = next((padding_of(t, layout) for t in trees(tree, "padding")), None)
        flat = any(t.type == "FLAT" for t in tokens(tree))
        how: dict[str, Any] = {"padding": padding, "flat": flat, **counted_by(tree)}
        return BufferType(dtype=dtype, shape=shape, layout=layout, **how)

    def bind(self, name: str, tree: Node) -> None:
        """Note the type of a name where it is bound first."""
        kind = self.type(tree)
        refuse(kind_problem(name, kind))
        if self.types.get(name, kind) != kind:
            raise ProgramError(
                f"%{name} has two types",
                because="the type stands where a name is bound first, and is one",
                hint="leave the second one out, or name it otherwise",
            )
        self.types[name] = kind
        if kind.layout is not None:
            self.check_extents(name, kind, tree)

    def check_extents(self, name: str, kind: BufferType, tree: Node) -> None:
        """Raise ProgramError where written local extents do not follow from the layout."""
        is_here = self.rank is None or self.rank in kind.placed.mesh
        local = kind.local_shape(self.rank) if is_here else None
        written, _ = shapes_of(tree)
        if written == local:
            return
        shown = "none" if written is None else list(written)
        raise ProgramError(
            f"%{name} has {shown} of {list(kind.shape)}",
            because=f"a rank's part with the layout {kind.placed} is "
            + ("none" if local is None else f"{list(local)}"),
            hint="the local extents come first, then `of` and the global ones where they differ",
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
            "named_block": self.named_block,
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
            case "call":
                (index,), (name,) = trees(tree), tokens(tree)
                attrs = (("index", value_of(index)),)
                return Instruction(op="call", fn=str(name), attrs=attrs)
        return Instruction(op=str(tree.data))

    def return_(self, tree: Node) -> Instruction:
        names = []
        for item in trees(tree, "returned"):
            names.append(name_of(tokens(item)[0]))
            for kind in trees(item):
                self.bind(names[-1], kind)
        return Instruction(op="return", inputs=tuple(names))

    def wait(self, tree: Node) -> Instruction:
        attrs = tuple(("piece", value_of(t)) for t in trees(tree))
        return Instruction(op="wait", inputs=(name_of(tokens(tree)[0]),), attrs=attrs)

    def on_stream(self, tree: Node) -> Instruction:
        """Read set_stream or sync: its stream is an index, or a result of get_stream."""
        op, (index,) = str(tree.data), map(value_of, trees(tree))
        if isinstance(index, Term) and index.name in self.streams:
            return Instruction(op=op, inputs=(index.name,))
        return Instruction(op=op, attrs=(("stream", index),))

    def index(self, token: Token) -> str:
        """Read the index of a loop or a block."""
        name, kind = name_of(token), BufferType(dtype=torch.int64)
        if self.types.setdefault(name, kind) != kind:
            raise ProgramError(
                f"a loop over %{name}, which is a buffer",
                because="an index is a number of the host",
                hint="name it otherwise",
            )
        return name

    def named_block(self, tree: Node) -> Instruction:
        fn, index, *on = tokens(tree)
        block, name = trees(tree, "block")[0], self.index(index)
        instruction = Instruction(op="block", fn=str(fn), outputs=(name,), body=self.block(block))
        mesh = mesh_of_block(self.types, instruction)
        if on and (mesh is None or self.meshes.index(mesh) != int_of(on[0][1:])):
            raise ProgramError(
                f"block {fn} on {on[0]}",
                because=f"it is on {'several' if mesh is None else f'm{self.meshes.index(mesh)}'}",
                hint="leave it out",
            )
        return instruction

    def loop(self, tree: Node) -> Instruction:
        (index,) = tokens(tree)
        *bounds, block = trees(tree)
        start, stop, step = [*map(value_of, bounds), 1][:3]
        name = self.index(index)
        return Instruction(
            op="for",
            outputs=(name,),
            attrs=(("start", start), ("stop", stop), ("step", step)),
            body=self.block(block),
        )

    def branch(self, tree: Node) -> Instruction:
        test, *blocks = trees(tree)
        body, orelse = [*map(self.block, blocks), ()][:2]
        return Instruction(op="if", attrs=(("test", value_of(test)),), body=body, orelse=orelse)

    def barrier(self, tree: Node) -> Instruction:
        (item,) = trees(tree, "layout")
        layout = self.layout(before_of(tree.children, item), item)
        settings = self.settings(tree, "barrier")
        comm = Communication(kind="Barrier", source=layout, destination=layout, **settings)
        self.check_team(tree, comm)
        return Instruction(op="barrier", comm=comm)

    def settings(self, tree: Node, op: str) -> dict[str, Any]:
        """Return the settings of a communication, or of its post."""
        row, given = INSTRUCTIONS[op], [x for x in settings_of(tree) if x[0] != "counts"]
        refuse(attributes_problem(op, (*row.sets, *row.attrs), given))
        settings = dict(given)
        if "axis" in settings and "axes" in settings:
            raise ProgramError(
                f"{op} with axis= and axes=",
                because="axis= names the one axis that it goes along, axes= several",
                hint="leave one of them out",
            )
        if "axis" in settings:
            settings["axes"] = (settings.pop("axis"),)
        return settings

    def check_team(self, tree: Node, comm: Communication) -> None:
        """Raise ProgramError where a projection's team or root does not follow from the layouts."""
        for item in trees(tree, "team"):
            shown = team_text(item)
            if self.rank is None:
                raise ProgramError(f"{shown} in the program of all ranks", hint="leave it out")
            team, root = comm.team(self.rank), comm.root(self.rank)
            want = f"team=({' '.join(map(str, team))})" if team else "local"
            want += f" root={root}" if root is not None else ""
            if shown != want:
                raise ProgramError(
                    f"{shown} on rank {self.rank}",
                    because=f"from the layouts follows {want}",
                    hint="leave it out",
                )

    def define(self, tree: Node) -> Instruction:
        output, call = tokens(tree)
        names, op = [name_of(output)], str(call)
        for item in trees(tree, "tensor") + trees(tree, "scalar"):
            self.bind(names[0], item)
        for further in trees(tree, "further"):
            names.append(name_of(tokens(further)[0]))
            for item in trees(further):
                self.bind(names[-1], item)
        name = names[0]
        if op not in TABLE and op not in CALLS:
            raise ProgramError(
                f"%{name}: there is no op {op!r}",
                because="an op is a row of the op table, or an instruction on buffers",
                hint=f"near it are {near(op, (*TABLE, *CALLS))}; docs/host_ir.md has what there is",
            )
        makes = "value" if op in TABLE else INSTRUCTIONS[op].makes
        if makes == "stream":
            self.streams.add(name)
        for n in names:
            if (makes == "value") != (n in self.types):
                raise type_problem(n, op, makes == "value")
        operands = [operand_of(value_of(t.children[0])) for t in trees(tree, "argument")]
        orders = trees(tree, "order")
        kind = self.types.get(name, _NUMBER)
        return Instruction(
            op=TABLE[op].host if op in TABLE else op,
            fn=op if op in TABLE else "",
            inputs=tuple(operands),
            outputs=tuple(names),
            attrs=settings_of(tree),
            order=order_of(orders[0], kind) if orders else None,
        )

    def launch(self, tree: Node) -> Instruction:
        """Read a host unit: its name, its inputs and outputs, and its body."""
        (unit,), (block,) = tokens(tree), trees(tree, "block")
        ends = {t.data: tuple(map(name_of, tokens(t))) for t in trees(tree) if t is not block}
        return Instruction(
            op="launch",
            fn=str(unit),
            inputs=ends.get("taken", ()),
            outputs=ends["made"],
            body=self.block(block),
        )

    def post(self, tree: Node) -> Instruction:
        words = tokens(tree)
        handle, *others = [t for t in words if t.type == "VALUE"]
        kind, *named = [str(t) for t in words if t.type == "NAME"]
        dtype, extents = dtype_of(named[-1]), extents_of(trees(tree, "extents")[0])
        # each layout may have a mesh's name in front
        layouts = [self.layout(before_of(tree.children, t), t) for t in trees(tree, "layout")]
        kind = kind.replace("_", "")
        if kind not in _KINDS:
            raise ProgramError(
                f"%{name_of(handle)}: there is no communication {kind!r}",
                hint="one of " + ", ".join(_KINDS),
            )
        settings = self.settings(tree, "post")
        of_post = [a.name for a in INSTRUCTIONS["post"].attrs if a.name in settings]
        attrs = tuple([(name, settings.pop(name)) for name in of_post])
        comm = Communication(
            kind=_KINDS[kind],
            source=layouts[0],
            destination=layouts[1],
            shape=extents,
            dtype=dtype,
            reduce_op=named[0] if len(named) > 1 else None,
            **settings,
        )
        self.check_team(tree, comm)
        source = next((name_of(tokens(t)[0]) for t in trees(tree, "source")), None)
        inputs = (source, name_of(others[0]) if others else None, *counts_in(tree))
        return Instruction(
            op="post", inputs=inputs, outputs=(name_of(handle),), attrs=attrs, comm=comm
        )
