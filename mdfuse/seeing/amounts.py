"""Amounts: how much an instruction reads, writes and computes, and in which order of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from mdfuse.hir.instructions import COMMUNICATIONS, MEMORY, PURE_VIEWS, op_of, row_of
from mdfuse.hir.orders import Dims
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.visible import tiles

#: Instructions that take no time by themselves; links give the times of communications.
_NOTHING = frozenset(
    (*MEMORY, *PURE_VIEWS, *COMMUNICATIONS, "return", "get_stream", "set_stream", "sync")
)

#: The number of products of the size of the first one in an attention, and in its gradient.
_ATTENTIONS = {
    "scaled_dot_product_attention": 2,
    "attention": 2,
    "attention_parts": 2,
    "attention_terms": 2,
    "attention_grad": 5,
    "attention_halo_grad": 5,
}

#: Queries of a head that a block of a GPU's attention computes: it goes through all keys.
QUERIES = 128

#: Work that reads as much of an operand as it writes, and its indices.
_PICKS = frozenset(("embedding", "index_select", "gather"))


class LocalShapes(Protocol):
    """Values by name, of which a rank has parts."""

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a rank's part."""


def is_work(i: Instruction) -> bool:
    """Return whether an instruction computes or copies on its rank."""
    if i.op in _NOTHING:
        return False
    op = op_of(i)
    return op is None or not op.is_view


def nbytes(program: HostProgram, i: Instruction) -> int:
    """Return the bytes that an instruction reads and writes on the rank of a projection."""
    if i.fn in _PICKS:
        written = sum(buffer_bytes(program, x) for x in i.outputs)
        indices = (x for x in i.reads if not program.types[x].dtype.is_floating_point)
        return 2 * written + sum(buffer_bytes(program, x) for x in indices)
    names = {*i.reads, *i.outputs}
    return sum(buffer_bytes(program, name) for name in names) + added_to(program, i)


def added_to(program: HostProgram, i: Instruction) -> int:
    """Return the bytes of a sum that an instruction adds to: it is read and written again."""
    row = row_of(i)
    is_added = row is not None and row.adds and len(i.inputs) == row.operands[1]
    return buffer_bytes(program, i.outputs[0]) if is_added else 0


def buffer_bytes(program: HostProgram, name: str) -> int:
    """Return the bytes that the rank of a projection has of a buffer; 0 for other values."""
    kind = program.types.get(name)
    if kind is None or kind.layout is None or program.rank not in kind.layout.mesh:
        return 0
    return math.prod(program.local_shape(name)) * kind.dtype.itemsize


def operations(program: LocalShapes, i: Instruction) -> int:
    """Return the floating-point operations of a product or an attention; 0 for other work."""
    if (sizes := product(program, i)) is not None:
        return 2 * math.prod(sizes)
    shapes = _shapes(program, i)
    if i.fn in _ATTENTIONS:
        q, k = shapes[:2]
        return 2 * _ATTENTIONS[i.fn] * math.prod(q) * _seen(i, q[-2], k[-2])[0]
    if i.fn == "convolution":
        places = shapes[0] if i.kwargs.get("transposed") else program.local_shape(i.outputs[0])
        return 2 * math.prod(places) * math.prod(shapes[1][1:])
    if i.fn == "convolution_weight":
        return 2 * math.prod(shapes[0]) * math.prod(program.local_shape(i.outputs[0])[1:])
    if i.fn in ("grouped_mm", "grouped_mm_grad"):
        return 2 * math.prod(shapes[0]) * (shapes[1][-1])
    if i.fn in ("routed_mm", "routed_mm_grad"):
        return 2 * math.prod(shapes[0][-2:]) * (shapes[1][-1])
    return 0


@dataclass(frozen=True, slots=True)
class Attention:
    """The size of an attention, or of its gradient, on a rank.

    Attributes:
        passes: how many passes forward it is.
        heads: of the whole batch.
        queries: of a head.
        keys: likewise.
        features: likewise.
        is_causal: whether it has a causal mask.
    """

    passes: float
    heads: int
    queries: int
    keys: int
    features: int
    is_causal: bool

    @property
    def blocks(self) -> int:
        """The number of blocks on a GPU, each of which goes through all keys."""
        return self.heads * math.ceil(self.queries / QUERIES)


def attention(program: HostProgram, i: Instruction) -> Attention | None:
    """Return the size of an attention or its gradient; None: the instruction is neither."""
    if i.fn not in _ATTENTIONS:
        return None
    (*batch, queries, features), (*_, keys, _) = _shapes(program, i)[:2]
    passes = _ATTENTIONS[i.fn] / _ATTENTIONS["attention"]
    seen, is_causal = _seen(i, queries, keys)
    return Attention(passes, math.prod(batch), queries, seen, features, is_causal)


def _seen(i: Instruction, queries: int, keys: int) -> tuple[int, bool]:
    """Return the keys per query, and whether a causal mask hides half of them.

    Where positions are those of parts, those that a query sees count, on average.
    """
    how = i.kwargs
    if not how.get("is_causal"):
        return keys, False
    firsts = how.get("q_offset", 0), how.get("k_offset", 0)
    is_part = any(firsts) or any(how.get(x) for x in ("rows", "keys", "window"))
    if not is_part or not all(type(first) is int for first in firsts):
        return keys, True
    rows, columns = (
        [(a + first, b + first) for a, b in how.get(name) or ((0, n),)]
        for name, n, first in zip(("rows", "keys"), (queries, keys), firsts, strict=True)
    )
    pairs = sum(t.pairs for t in tiles(rows, columns, is_causal=True, window=how.get("window")))
    return math.ceil(pairs / max(queries, 1)), False


def product(program: LocalShapes, i: Instruction) -> tuple[int, int, int, int] | None:
    """Return how many products [m, k] x [k, n] an instruction is, m, n and k; None: it is none."""
    shapes = _shapes(program, i)
    if i.op == "addmm":
        (*batch, m, n), k = program.local_shape(i.outputs[0]), shapes[-2][-1]
        count = math.prod(batch)
        return (1, count * m, n, k) if len(shapes[-1]) == 2 else (count, m, n, k)
    if i.fn == "linear" or (i.fn == "matmul" and len(shapes[1]) <= 2):
        shape = program.local_shape(i.outputs[0])
        n = shapes[1][-1 if i.fn == "matmul" else 0] if len(shapes[1]) == 2 else 1
        return 1, math.prod(shape) // max(n, 1), n, shapes[0][-1]
    if i.fn == "matmul":
        shape = program.local_shape(i.outputs[0])
        m = shapes[0][-2] if len(shapes[0]) > 1 else 1
        n = shapes[1][-1]
        return math.prod(shape) // max(m * n, 1), m, n, shapes[0][-1]
    if i.fn == "contract":
        return _contraction(i, shapes)
    return None


def _contraction(i: Instruction, shapes: list[tuple[int, ...]]) -> tuple[int, int, int, int]:
    """Return the product that a contraction of two labelled operands is."""
    left, right = (dict(zip(i.kwargs[s], x, strict=True)) for s, x in _sides(shapes))
    both, in_output = left.keys() & right.keys(), {*i.kwargs["kept"]}
    return (
        math.prod(max(left[d], right[d]) for d in both & in_output),
        math.prod(n for d, n in left.items() if d not in both),
        math.prod(n for d, n in right.items() if d not in both),
        math.prod(max(left[d], right[d]) for d in both - in_output),
    )


def _sides(shapes: list[tuple[int, ...]]) -> zip[tuple[str, tuple[int, ...]]]:
    return zip(("left", "right"), shapes[:2], strict=True)


def _shapes(program: LocalShapes, i: Instruction) -> list[tuple[int, ...]]:
    return [program.local_shape(x) if isinstance(x, str) else () for x in i.inputs]


# -- across: work that reads memory in another order than it writes it -----------------------------


def is_across(program: HostProgram, i: Instruction) -> bool:
    """Return whether elementwise work reads operands that lie in different memory orders.

        %y = add(%x, %z)      %x lies row by row, %z as [1,0]: %z is read column by column

    Each element read is then in another cache line, so bytes take longer. Operands whose order is
    not known count as row-major, as inputs mostly are.
    """
    op = op_of(i)
    return op is not None and op.is_elementwise and are_across(program, i.reads, i.outputs)


def are_across(program: HostProgram, reads: Iterable[str], results: Iterable[str]) -> bool:
    """Return whether full-size operands have different memory orders.

    Full-size operands have the shape of a result; broadcast operands are ignored.
    """
    shapes = {program.local_shape(x) for x in results if _is_tensor(program, x)}
    full_size = (x for x in reads if _is_tensor(program, x) and program.local_shape(x) in shapes)
    return len({_innermost(program, x) for x in full_size}) > 1


def _innermost(program: HostProgram, name: str) -> int:
    """Return the dim whose elements are next to each other in a buffer; -1: there is none."""
    shape = program.local_shape(name)
    likely = program.likely_orders.get(name)
    order: Dims = tuple(range(len(shape)))
    if likely is not None and likely.lies is not None and len(likely.lies) == len(shape):
        order = likely.lies
    return next((d for d in reversed(order) if shape[d] != 1), -1)


def _is_tensor(program: HostProgram, name: str) -> bool:
    kind = program.types.get(name)
    return kind is not None and kind.layout is not None and program.rank in kind.layout.mesh
