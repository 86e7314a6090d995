"""Leaves of the syntax tree of a host program: names, numbers, layouts, index expressions."""

from __future__ import annotations

from typing import Any, cast

import torch
from lark import Token, Tree

from mdfuse.errors import ProgramError
from mdfuse.hir.program import BufferType, Padding
from mdfuse.index import Calc, Term
from mdfuse.ir.graph import DTYPE_NAMES
from mdfuse.layout import Partial, Placement, Replicate, Shard, Varies
from mdfuse.mesh import DeviceMesh

Node = Tree[Token]

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def before_of(children: list[Any], tree: Node) -> Token | None:
    """The mesh's name right in front of a layout."""
    at = next(i for i, child in enumerate(children) if child is tree)
    before = children[at - 1] if at else None
    return before if isinstance(before, Token) and before.type == "LAYOUT_NAME" else None


def trees(tree: Node, data: str | None = None) -> list[Node]:
    """The children that are trees, or those of one kind."""
    found = [t for t in tree.children if isinstance(t, Tree)]
    return [t for t in found if data is None or t.data == data]


def tokens(tree: Node) -> list[Token]:
    """The children that are tokens."""
    return [t for t in tree.children if isinstance(t, Token)]


def name_of(token: Token) -> str:
    """%x is named x."""
    return str(token).removeprefix("%")


def mesh_of(tree: Node) -> DeviceMesh:
    """A mesh of the first line: axes with sizes, then the ranks."""
    sizes = [tokens(t) for t in trees(tree, "axis_size")]
    axes, shape = tuple(str(a) for a, _ in sizes), [int(n) for _, n in sizes]
    ranks = list(range(torch.Size(shape).numel()))
    for span in trees(tree, "span"):
        first, last = map(int, tokens(span))
        ranks = list(range(first, last + 1))
    for listed in trees(tree, "listed"):
        ranks = [int(t) for t in tokens(listed)]
    if len(ranks) != torch.Size(shape).numel():
        raise ProgramError(f"a mesh of shape {shape} with {len(ranks)} ranks")
    return DeviceMesh(torch.tensor(ranks).reshape(shape), axes)


def placement_of(text: str) -> Placement:
    """R, S0, P(sum) or varies."""
    if text in ("R", "varies"):
        return Replicate() if text == "R" else Varies()
    return Partial(text[2:-1]) if text.startswith("P") else Shard(int(text[1:]))


def dtype_of(name: str) -> torch.dtype:
    """f32, or torch's own name."""
    found = _DTYPES.get(str(name)) or getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ProgramError(f"there is no dtype {name}", hint="one of " + ", ".join(_DTYPES))
    return found


def extents_of(tree: Node) -> tuple[int, ...]:
    """[3,4]"""
    return tuple(int(t) for t in tokens(tree))


def padding_of(tree: Node) -> Padding:
    """pad=block(dim=0,parts=4,axis=x)"""
    settings: dict[str, Any] = {"axis": None, **dict(setting_of(t) for t in trees(tree))}
    return Padding(side=cast("Any", str(tokens(tree)[0])), **settings)


def order_of(tree: Node, kind: BufferType) -> tuple[int, ...]:
    """The memory order that a result must have."""
    for listed in trees(tree):
        return cast("tuple[int, ...]", value_of(listed))
    return tuple(range(len(kind.shape)))


def setting_of(tree: Node) -> tuple[str, Any]:
    """name=value"""
    name, value = tree.children
    return str(name), value_of(value)


def value_of(tree: Any) -> Any:
    """A number, word, index expression, or list of them."""
    match tree.data:
        case "list":
            return tuple(map(value_of, tree.children))
        case "true" | "false":
            return tree.data == "true"
        case "none":
            return None
        case "rank_term":
            return Term("rank")
        case "calculation":
            left, op, right = tree.children
            return Calc(str(op), value_of(left), value_of(right))
        case "negative":
            return -int(tree.children[1])
        case "extent":
            name, dim = tree.children
            return Term("extent", name_of(name), int(dim))
    (token,) = tree.children
    match tree.data:
        case "name":
            return Term("index", name_of(token))
        case "coord":
            return Term("coord", str(token))
        case "integer":
            return int(token)
        case "real":
            return float(token)
        case "string":
            return str(token)[1:-1]
        case _:
            word = str(token)
            is_dtype = word in _DTYPES or isinstance(getattr(torch, word, None), torch.dtype)
            return dtype_of(token) if is_dtype else word


def operand_of(value: Any) -> Any:
    """What an instruction reads: %x alone is a name, in a larger expression an index."""
    return value.name if isinstance(value, Term) and value.kind == "index" else value
