"""Read the text of a host program."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

from mdfuse.communication import KINDS, Communication
from mdfuse.errors import MdfuseError, ProgramError
from mdfuse.hir.program import BufferType, HostProgram, Instruction, Padding
from mdfuse.ir.graph import DTYPE_NAMES
from mdfuse.ir.ops import TABLE
from mdfuse.layout import Layout, Partial, Placement, Replicate, Shard
from mdfuse.mesh import DeviceMesh

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_KINDS = {kind.lower(): kind for kind in KINDS}
#: Instructions on buffers that are no rows of the op table.
_BUFFER_OPS = ("alloc", "narrow", "select", "pad", "pack", "zeros")

Node = Tree[Token]


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

    def program(self, tree: Node) -> HostProgram:
        self.meshes = [_mesh(t) for t in _trees(tree, "mesh_def")]
        rank = next((int(_tokens(t)[0]) for t in _trees(tree, "rank")), None)
        aliases = {_name(a): _name(b) for a, b in map(_tokens, _trees(tree, "alias"))}
        inputs = []
        for item in _trees(tree, "input"):
            inputs.append(_name(_tokens(item)[0]))
            self.types[inputs[-1]] = self.type(_trees(item)[0])
        skipped = ("mesh_def", "rank", "alias", "input")
        body = [t for t in _trees(tree) if t.data not in skipped]
        instructions = tuple(self.instruction(t) for t in body)
        outputs = next((i.reads for i in instructions if i.op == "return"), ())
        unknown = [n for n in outputs if n not in self.types]
        if unknown:
            raise ProgramError(f"return of undefined {unknown}", hint="define them, or drop them")
        return HostProgram(
            name=str(_tokens(tree)[0]),
            types=self.types,
            inputs=tuple(inputs),
            outputs=outputs,
            instructions=instructions,
            aliases=aliases,
            rank=rank,
        )

    # -- types -----------------------------------------------------------------------------------

    def layout(self, name: Token | None, tree: Node) -> Layout:
        index = int(name[1:]) if name else 0
        if index >= len(self.meshes):
            raise ProgramError(f"there is no mesh m{index}", hint="name it in the first line")
        placements: dict[str, Placement] = {}
        order: dict[int, list[str]] = {}
        for item in _trees(tree):
            first, *rest = _tokens(item)
            if item.data == "placement":
                placements[str(first)] = _placement(str(rest[0]))
            else:
                order[int(first)] = [str(axis) for axis in rest]
        return Layout(self.meshes[index], placements, order)

    def type(self, tree: Node) -> BufferType:
        dtype = _dtype(_tokens(tree)[0])
        if tree.data == "scalar":
            return BufferType(dtype=dtype)
        extents = [_extents(t) for t in _trees(tree, "extents")]
        (layout,) = _trees(tree, "layout")
        named = next((t for t in _tokens(tree) if t.type == "LAYOUT_NAME"), None)
        padding = next((_padding(t) for t in _trees(tree, "padding")), None)
        flat = any(t.type == "FLAT" for t in _tokens(tree))
        return BufferType(
            dtype=dtype,
            shape=extents[-1],
            layout=self.layout(named, layout),
            padding=padding,
            flat=flat,
        )

    # -- instructions ----------------------------------------------------------------------------

    def instruction(self, tree: Node) -> Instruction:
        match tree.data:
            case "define":
                return self.define(tree)
            case "post":
                return self.post(tree)
            case "wait":
                return Instruction(op="wait", inputs=(_name(_tokens(tree)[0]),))
            case "launch":
                return self.launch(tree)
        for item in _trees(tree, "returned"):
            for kind in _trees(item):
                self.types[_name(_tokens(item)[0])] = self.type(kind)
        names = tuple(_name(_tokens(item)[0]) for item in _trees(tree, "returned"))
        return Instruction(op="return", inputs=names)

    def define(self, tree: Node) -> Instruction:
        output, call = _tokens(tree)
        kind, *rest = _trees(tree)
        name = _name(output)
        self.types[name] = self.type(kind)
        op = str(call)
        if op not in TABLE and op not in _BUFFER_OPS:
            raise ProgramError(
                f"%{name}: there is no op {op!r}",
                hint="the ops: " + ", ".join(sorted((*TABLE, *_BUFFER_OPS))),
            )
        operands = [_value(t.children[0]) for t in rest if t.data == "argument"]
        attrs = [_setting(t) for t in rest if t.data == "setting"]
        order = next((_order(t, self.types[name]) for t in rest if t.data == "order"), None)
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
        unit, *values = _tokens(tree)
        body = tuple(self.instruction(t) for t in _trees(tree))
        defined = {name for i in body for name in i.outputs}
        names = [_name(v) for v in values]
        return Instruction(
            op="launch",
            fn=str(unit),
            inputs=tuple(n for n in names if n not in defined),
            outputs=tuple(n for n in names if n in defined),
            body=body,
        )

    def post(self, tree: Node) -> Instruction:
        children = tree.children
        tokens = _tokens(tree)
        handle, *others = [t for t in tokens if t.type == "VALUE"]
        kind, *words = [str(t) for t in tokens if t.type == "NAME"]
        dtype = _dtype(words[-1])
        extents = _extents(_trees(tree, "extents")[0])
        layouts = [
            self.layout(_before(children, t), t) for t in _trees(tree, "layout")
        ]  # each may have a mesh's name in front
        if kind not in _KINDS:
            raise ProgramError(f"%{_name(handle)}: there is no communication {kind!r}")
        settings: dict[str, Any] = dict(_setting(t) for t in _trees(tree, "setting"))
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
            raise ProgramError(f"%{_name(handle)}: {error}") from error
        source = next((_name(_tokens(t)[0]) for t in _trees(tree, "source")), None)
        inputs = (source, _name(others[0]) if others else None)
        return Instruction(op="post", inputs=inputs, outputs=(_name(handle),), comm=comm)


def _before(children: list[Any], tree: Node) -> Token | None:
    """The mesh's name right in front of a layout."""
    at = next(i for i, child in enumerate(children) if child is tree)
    before = children[at - 1] if at else None
    return before if isinstance(before, Token) and before.type == "LAYOUT_NAME" else None


def _trees(tree: Node, data: str | None = None) -> list[Node]:
    found = [t for t in tree.children if isinstance(t, Tree)]
    return [t for t in found if data is None or t.data == data]


def _tokens(tree: Node) -> list[Token]:
    return [t for t in tree.children if isinstance(t, Token)]


def _name(token: Token) -> str:
    return str(token).removeprefix("%")


def _mesh(tree: Node) -> DeviceMesh:
    sizes = [_tokens(t) for t in _trees(tree, "axis_size")]
    axes, shape = tuple(str(a) for a, _ in sizes), [int(n) for _, n in sizes]
    ranks = list(range(torch.Size(shape).numel()))
    for span in _trees(tree, "span"):
        first, last = map(int, _tokens(span))
        ranks = list(range(first, last + 1))
    for listed in _trees(tree, "listed"):
        ranks = [int(t) for t in _tokens(listed)]
    if len(ranks) != torch.Size(shape).numel():
        raise ProgramError(f"a mesh of shape {shape} with {len(ranks)} ranks")
    return DeviceMesh(torch.tensor(ranks).reshape(shape), axes)


def _placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    return Partial(text[2:-1]) if text.startswith("P") else Shard(int(text[1:]))


def _dtype(name: str) -> torch.dtype:
    found = _DTYPES.get(str(name)) or getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ProgramError(f"there is no dtype {name}", hint="one of " + ", ".join(_DTYPES))
    return found


def _extents(tree: Node) -> tuple[int, ...]:
    return tuple(int(t) for t in _tokens(tree))


def _padding(tree: Node) -> Padding:
    settings: dict[str, Any] = {"axis": None, **dict(_setting(t) for t in _trees(tree))}
    return Padding(side=cast("Any", str(_tokens(tree)[0])), **settings)


def _order(tree: Node, kind: BufferType) -> tuple[int, ...]:
    for listed in _trees(tree):
        return cast("tuple[int, ...]", _value(listed))
    return tuple(range(len(kind.shape)))


def _setting(tree: Node) -> tuple[str, Any]:
    name, value = tree.children
    return str(name), _value(value)


def _values(tree: Node) -> Iterator[Any]:
    return map(_value, tree.children)


def _value(tree: Any) -> Any:
    """A number, word or list of them; names come without %."""
    match tree.data:
        case "list":
            return tuple(_values(tree))
        case "true" | "false":
            return tree.data == "true"
        case "none":
            return None
    (token,) = tree.children
    match tree.data:
        case "name":
            return _name(token)
        case "integer":
            return int(token)
        case "real":
            return float(token)
        case "string":
            return str(token)[1:-1]
        case _:
            word = str(token)
            return _dtype(token) if word in _DTYPES or hasattr(torch, word) else word
