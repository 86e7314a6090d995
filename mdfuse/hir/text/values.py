"""Read the leaves of a host program's syntax tree: names, numbers, layouts, index expressions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lark import Token, Tree
from lark.exceptions import UnexpectedInput

from mdfuse.errors import ProgramError, counted
from mdfuse.extents.expressions import DEEPEST, LARGEST, Calc, Term
from mdfuse.hir.forms import attributes_problem
from mdfuse.hir.program import BufferType, Padding
from mdfuse.ir.attributes import attr
from mdfuse.ir.graph import DTYPE_NAMES
from mdfuse.layouts.halo import Reach
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, Shard, Varies
from mdfuse.mesh import MOST_RANKS, DeviceMesh

Node = Tree[Token]

#: How many digits the largest number has.
_DIGITS = len(str(LARGEST))
#: The depth of a program's tree whose blocks and expressions are nested as deeply as allowed.
_DEEPEST_TREE = 4 * DEEPEST
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def before_of(children: list[Any], tree: Node) -> Token | None:
    """Return the mesh's name right in front of a layout; None where there is none."""
    at = next(i for i, child in enumerate(children) if child is tree)
    before = children[at - 1] if at else None
    return before if isinstance(before, Token) and before.type == "LAYOUT_NAME" else None


def trees(tree: Node, data: str | None = None) -> list[Node]:
    """Return the children that are trees; with `data`, only those of that kind."""
    all_trees = [t for t in tree.children if isinstance(t, Tree)]
    return [t for t in all_trees if data is None or t.data == data]


def check_depth(tree: Node) -> None:
    """Raise ProgramError where a tree is nested too deeply for recursion."""
    level: list[Node] = [tree]
    for _ in range(_DEEPEST_TREE):
        level = [child for t in level for child in trees(t)]
        if not level:
            return
    raise ProgramError(
        "blocks, lists or index expressions are nested too deeply",
        where="host …",
        because=f"at most {DEEPEST} are one inside the other",
        hint="one loop over i, with i // n and i mod n, does what two do",
    )


def no_program(error: UnexpectedInput, text: str) -> ProgramError:
    """Return the error for a text that does not follow the grammar."""
    at = (error.line, error.column)
    place = f"line {at[0]}, column {at[1]}" if all(isinstance(n, int) and n > 0 for n in at) else ""
    context = error.get_context(text).rstrip().splitlines() if place else ()
    return ProgramError(
        f"{place or 'the end of the text'} is no host program",
        where=context or "host …",
        hint="docs/host_ir.md has the grammar, at its end",
    )


def tokens(tree: Node) -> list[Token]:
    """Return the children that are tokens."""
    return [t for t in tree.children if isinstance(t, Token)]


def int_of(token: Token | str, is_negative: bool = False) -> int:
    """Return the integer of a token; raise ProgramError where it needs more than 64 bits."""
    number = int(token) if len(token) <= _DIGITS else LARGEST + 2
    if number > LARGEST + is_negative:
        shown = token if len(token) <= 2 * _DIGITS else f"{token[:_DIGITS]}…"
        raise ProgramError(
            f"the number {shown}",
            because="numbers have 64 bits",
            hint=f"write one from {-LARGEST - 1} to {LARGEST}",
        )
    return -number if is_negative else number


def name_of(token: Token) -> str:
    """Return the name without its %: `%x` is named x."""
    return str(token).removeprefix("%")


def mesh_of(tree: Node) -> DeviceMesh:
    """Read a mesh of the first line: axes with sizes, then ranks, hosts, lost ranks."""
    sizes = [tokens(t) for t in trees(tree, "axis_size")]
    axes, shape = tuple(str(a) for a, _ in sizes), tuple(int_of(n) for _, n in sizes)
    size = math.prod(shape)
    first, last = 0, size - 1
    for span in trees(tree, "span"):
        first, last = map(int_of, tokens(span))
    listed = [int_of(n) for t in trees(tree, "listed") for n in tokens(t)]
    count = len(listed) or last - first + 1
    if count != size:
        raise ProgramError(
            f"a mesh of shape {shape} with {counted(count, 'rank')}",
            because="it has one rank at each coordinate",
            hint=f"name {size} ranks, or none for 0 to {size - 1}",
        )
    runs = [[int_of(n) for n in tokens(t)[::2]] for t in trees(tree, "hosts")]
    hosts = [host for host, n in runs for _ in range(min(n, size + 1))]
    lost = [int_of(n) for t in trees(tree, "lost") for n in tokens(t)]
    mesh = DeviceMesh.of(shape, listed or range(first, last + 1), axes, hosts or None)
    return mesh.with_lost(lost) if lost else mesh


def rank_of(tree: Node) -> int:
    """Read the rank of a projection."""
    rank = int_of(tokens(tree)[0])
    if rank > MOST_RANKS:
        raise ProgramError(
            f"rank {rank}", because=f"a job has at most {MOST_RANKS} ranks, which count from 0"
        )
    return rank


def team_text(tree: Node) -> str:
    """Return the team and the root of a post, as a projection shows them."""
    members = " ".join(str(int_of(t)) for t in tokens(tree))
    roots = "".join(f" root={int_of(tokens(t)[0])}" for t in trees(tree, "root"))
    return (f"team=({members})" if members else "local") + roots


def placement_of(text: str) -> Placement:
    """Read a placement: R, S0, S0/3, S0/[4,2,2], S0/zigzag, P(sum) or varies."""
    if text in ("R", "varies"):
        return Replicate() if text == "R" else Varies()
    if text.startswith("P"):
        return Partial(text[2:-1])
    dim, _, blocks = text[1:].partition("/")
    if not blocks or blocks == "zigzag":
        return Shard(int_of(dim), zigzag=bool(blocks))
    sizes = tuple(int_of(n) for n in blocks.strip("[]").split(","))
    return Shard(int_of(dim), sizes if blocks.startswith("[") else sizes[0])


def reach_of(tree: Node) -> dict[int, Reach]:
    """Read the rows of a dim that ranks have: `reach(dim,of,up,down,first,last)`."""
    dim, of, up, down = map(int_of, tokens(tree)[1:])
    first, last = (-int_of(t[-1]) if len(t) > 1 else int_of(t[0]) for t in map(tokens, trees(tree)))
    return {dim: Reach(of=of, up=up, down=down, first=first, last=last)}


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype by its short name, as f32, or by torch's own."""
    dtype = _DTYPES.get(str(name)) or getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ProgramError(f"there is no dtype {name}", hint="one of " + ", ".join(_DTYPES))
    return dtype


def extents_of(tree: Node) -> tuple[int, ...]:
    """Read extents: `[3,4]`, or `[<=3:%c,4]`."""
    return tuple(int_of(t) for t in tokens(tree) if t.type == "INT")


def shapes_of(tree: Node) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Read the extents of a type: local ones (None: no part), and global ones."""
    listed = [t for t in trees(tree) if t.data in ("extents", "counted")]
    is_none = any(t.type == "NONE" for t in tokens(tree))
    if not listed or listed[-1].data != "extents":
        raise ProgramError(
            "none, or rows that are counted, without `of [...]`",
            hint="the global extents stand behind of",
        )
    local = None if is_none else extents_of(listed[0])
    return local, extents_of(listed[-1])


def counted_by(tree: Node) -> dict[str, Any]:
    """Read by which counts the rows of a type are counted, and the most of them at a place."""
    nodes = [tree, *trees(tree, "counted")]
    values = [name_of(v) for t in nodes for v in tokens(t) if v.type == "VALUE"]
    most = [extents_of(bound)[0] for t in nodes for bound in trees(t, "at_most")]
    return dict(zip(("counts", "each"), (*values, *most), strict=False))


def counts_in(tree: Node) -> tuple[str, ...]:
    """Read the counts of a post: `counts=%c`."""
    given = [value for name, value in settings_of(tree) if name == "counts"]
    if any(not isinstance(x, Term) or x.kind != "index" for x in given) or len(given) > 1:
        raise ProgramError(
            f"post with counts={', '.join(map(str, given))}",
            because="one fetched value says how many rows go from each rank to each other",
            hint="counts=%c, with %c = fetch(%n, most=...)",
        )
    return tuple(x.name for x in given)


_PADDING = (attr("dim", "int", True), attr("parts", "count", True), attr("axis", "axis"))


def padding_of(tree: Node, layout: Layout) -> Padding:
    """Read a padding: `pad=block(dim=0,parts=4,axis=x)`."""
    side, settings = str(tokens(tree)[0]), settings_of(tree)
    problem = attributes_problem(f"pad={side}", _PADDING, settings)
    if problem is not None:
        raise ProgramError(problem.what, because=problem.because, hint=problem.hint)
    if side not in ("block", "team"):
        raise ProgramError(f"pad={side}", because="a dim is padded to one block, or to all of them")
    fields: dict[str, Any] = {"axis": None, **dict(settings)}
    if fields["axis"] is not None:
        layout.mesh.axis_index(fields["axis"])
    return Padding(side=cast("Any", side), **fields)


def order_of(tree: Node, kind: BufferType) -> tuple[int, ...]:
    """Return the memory order that a result must have."""
    for listed in trees(tree):
        return cast("tuple[int, ...]", value_of(listed))
    return tuple(range(1 if kind.flat else len(kind.shape)))


def alias_orders(
    aliases: Sequence[Node], types: Mapping[str, BufferType]
) -> dict[str, tuple[int, ...]]:
    """Return the memory orders that aliases ask for, by their names."""
    named = ((name_of(tokens(alias)[0]), trees(alias, "order")) for alias in aliases)
    return {n: order_of(asked[0], types[n]) for n, asked in named if asked and n in types}


def settings_of(tree: Node) -> tuple[tuple[str, Any], ...]:
    """Return the attributes among the arguments; None and False are the same as none."""
    settings = (setting_of(t) for t in trees(tree, "setting"))
    return tuple((k, v) for k, v in settings if v is not None and v is not False)


def setting_of(tree: Node) -> tuple[str, Any]:
    """Read an attribute: `name=value`."""
    name, value = tree.children
    return str(name), value_of(value)


def value_of(tree: Any) -> Any:
    """Read a number, word, index expression, or list of them."""
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
            return int_of(tree.children[1], is_negative=True)
        case "extent":
            name, dim = tree.children
            return Term("extent", name_of(name), int_of(dim))
    (token,) = tree.children
    match tree.data:
        case "name":
            return Term("index", name_of(token))
        case "coord":
            return Term("coord", str(token))
        case "integer":
            return int_of(token)
        case "real":
            number = float(token)
            return number if number == number else math.nan  # one object equals itself in tuples
        case "string":
            return _string(token)
        case _:
            word = str(token)
            is_dtype = word in _DTYPES or isinstance(getattr(torch, word, None), torch.dtype)
            return dtype_of(token) if is_dtype else word


def _string(token: Token) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        raise ProgramError(
            f"the string {token}", because='a \\ stands before ", \\, n, t or uXXXX'
        ) from None


def operand_of(value: Any) -> Any:
    """Return an operand: %x alone is a name, in a larger expression an index."""
    return value.name if isinstance(value, Term) and value.kind == "index" else value


def type_problem(name: str, op: str, is_value: bool) -> ProgramError:
    """Return the error for a result that has no type, or one where it is no value."""
    if is_value:
        return ProgramError(
            f"%{name} = {op}: %{name} has no type",
            because="the type stands where a name is bound first",
            hint=f"write %{name}: f32[4] (tp=R) = {op}(...)",
        )
    return ProgramError(
        f"%{name} = {op}: %{name} has a type",
        because=f"what {op} gives is no value",
        hint="leave the type out, or name it otherwise",
    )
