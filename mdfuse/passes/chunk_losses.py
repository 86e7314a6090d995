"""Compute the logits of a head, their losses and gradients together, a chunk of rows at a time.

    %l: bf16[8192,128256] = linear(%x, %w)              %l: … (stream(0,16)) = linear(%x, %w)
    %f: f32[8192,128256] = cast(%l, dtype=f32)          %f: … (stream(0,16)) = cast(%l, dtype=f32)
    …                                             ->    …
    %g: bf16[8192,128256] = cast(%df, dtype=bf16)       %g: … (stream(0,16)) = cast(%df, dtype=bf16)
    %dw: bf16[128256,2048] = matmul(%g^T, %x)           %dw: … = matmul(%g^T, %x)

One loop then holds a chunk of the logits, and of all of that size that is made of them. Weights are
gathered before it and gradients of weights are reduced behind it, once. Products of the logits'
gradient follow the loop where it has 16 bits and few enough bytes, so that they are rounded once;
else the loop adds the gradient of the weight up.

A head is a product with a matrix whose rows are compared along the classes, as a softmax does. It
stays whole where a gradient of the logits needs all losses first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from networkx.utils import UnionFind

from mdfuse.ir.dims import reduced_dims
from mdfuse.ir.graph import Expr, Fusion, Value, following, leading_to
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.stream import JOINED, Stream
from mdfuse.passes import decompose, microbatches
from mdfuse.passes.rewriting import rewritten
from mdfuse.passes.strategy import dim_map
from mdfuse.passes.streams import falls_together, one_dim, streamed_label

name = "chunk_losses"

#: The operations that compare a row along the classes.
ALONG = ("log_softmax", "max", "softmax")
#: Products that may follow the loop.
_PRODUCTS = ("contract", "linear", "matmul")
#: Views that may follow it with them.
_VIEWS = ("permute", "reshape", "squeeze", "unsqueeze")
#: Rows of a tile of a product on a GPU: a chunk of 521 rows takes as long as one of 640.
_TILE = 128
#: How many times the bytes of its sum in f32 the operand of a weight's gradient may take.
_WHOLE = 2


def run(fusion: Fusion, most: int) -> Fusion:
    """Return the fusion with heads in chunks.

    Args:
        fusion: with layouts and sets.
        most: bytes of a chunk of logits on each rank, in f32.
    """
    for head in [*heads(fusion, most)]:
        logits = head.logits
        head = head if head.fusion is fusion else _named(fusion, logits, most)
        if ends := decompose.ends(fusion, head.adds_up):
            head = _named(rewritten(fusion, ends), logits, most)
        if not head.because and head.count > 1:
            fusion = _chunked(head)
    return fusion


def _named(fusion: Fusion, logits: str, most: int) -> Head:
    return next(head for head in heads(fusion, most) if head.logits == logits)


def explained(fusion: Fusion, most: int) -> Iterator[str]:
    """Yield a line for each head whose logits take more than so many bytes in f32 on a rank."""
    for head in heads(fusion, most):
        stream = fusion.values[head.logits].stream
        if stream is not None:
            yield f"{head.text}: with losses and gradients in {stream.count} chunks of rows"
        elif most:
            yield f"{head.text}: at once, {head.because or 'since one row is not divided'}"


def looped(fusion: Fusion) -> frozenset[str]:
    """Return the values that loops of heads compute in chunks."""
    if all(v.stream is None for v in fusion.values.values()):
        return frozenset()
    loops = (h.region for h in heads(fusion) if fusion.values[h.logits].stream is not None)
    return frozenset().union(*loops)


@dataclass(frozen=True)
class Head:
    """A product whose rows are compared along the classes, and what is computed of it.

    Attributes:
        fusion: with layouts and sets.
        logits: the name of the product.
        rows: the dim of its rows, which is cut.
        classes: the dim of the classes.
        count: how many chunks.
        same: which dims, (value, dim), are one.
    """

    fusion: Fusion
    logits: str
    rows: int
    classes: int
    count: int
    same: UnionFind[tuple[str, int]]

    @property
    def text(self) -> str:
        """The logits, with the user's line."""
        value = self.fusion.values[self.logits]
        return f"logits %{self.logits}: {value.type_text()}" + (
            f" ({value.source})" if value.source else ""
        )

    def _local(self, x: str) -> tuple[int, ...]:
        return self.fusion.layout(x).local_shape(self.fusion.values[x].shape)

    def dims(self, x: str) -> list[int]:
        """Return the dims of a value that are the rows."""
        return self._dims(x, (self.logits, self.rows))

    def _dims(self, x: str, of: tuple[str, int]) -> list[int]:
        root = self.same[of]
        shape = self.fusion.values[x].shape
        return [d for d in range(len(shape)) if self.same[x, d] == root]

    @cached_property
    def wide(self) -> frozenset[str]:
        """The values with rows and classes."""
        at = (self.logits, self.classes)
        values = (x for x, v in self.fusion.values.items() if v.is_tensor)
        return frozenset(x for x in values if self.dims(x) and self._dims(x, at))

    def adds_up(self, fusion: Fusion, expr: Expr) -> bool:
        """Tell whether a reduction of the loop gives the rows up."""
        inside = expr.outputs[0] in self.region and fusion is self.fusion
        return inside and bool(self.dims(expr.reads[0])) and not self.dims(expr.outputs[0])

    @cached_property
    def region(self) -> frozenset[str]:
        """The values of the loop: what has the size of logits, reads it, or is between such."""
        core = {
            e.outputs[0]: e for e in self.fusion.exprs
            if not self.wide.isdisjoint((*e.outputs, *e.reads))
        }  # fmt: skip
        for x in self._behind(core):
            del core[x]
        inside = {n for e in self._between(core) for n in e.outputs}
        return frozenset(inside | {*self._followers(inside)})

    def _followers(self, inside: Set[str]) -> dict[str, None]:
        """Return the numbers of rows that follow, and their sums, where the loop has all of it."""
        fusion, followers, later = self.fusion, dict[str, None](), {*inside}
        logits = fusion.values[self.logits]
        for e in fusion.exprs:
            if later.isdisjoint(e.reads) or e.outputs[0] in later:
                continue
            (x, *others), there = e.outputs, inside | followers.keys()
            is_small = not others and fusion.values[x].size <= logits.size // logits.shape[-1]
            is_here = all(r in there or r not in later for r in e.reads)
            is_joined = e.op in ("sum", "mean") and any(map(self.dims, e.reads))
            is_by_row = TABLE[e.op].is_elementwise or e.op in ("squeeze", "unsqueeze")
            if is_small and is_here and (is_joined or (is_by_row and self.dims(x))):
                followers[x] = None
            later.update(e.outputs)
        return followers

    def _between(self, core: Mapping[str, Expr]) -> Iterable[Expr]:
        """Return expressions, and those that follow from some and lead to others."""
        exprs = self.fusion.exprs
        before = {*core, *(x for e in leading_to(exprs, core) for x in e.reads)}
        inside = following(exprs, core) & before
        return [e for e in exprs if e.outputs[0] in inside]

    def _behind(self, core: Mapping[str, Expr]) -> list[str]:
        """Return the views and products of a narrow gradient of the logits that follow the loop."""
        ends: dict[str, Expr] = {}
        for x, e in reversed([*core.items()]):
            wide = [self.fusion.values[r] for r in e.reads if r in self.wide]
            is_narrow = bool(wide) and all(v.dtype.itemsize <= 2 for v in wide)
            readers = [r.outputs[0] for r in self.fusion.consumers[x]]
            is_last = not any(r in core and r not in ends for r in readers)
            if is_narrow and is_last and e.op in (*_PRODUCTS, *_VIEWS, "sum"):
                ends[x] = e
        sums = [x for x, e in ends.items() if e.op in _PRODUCTS and not self.dims(x)]
        taken = {r for e in ends.values() for r in e.reads if r in self.wide and r not in ends}
        whole = sum(math.prod(self._local(x)) * self.fusion.values[x].dtype.itemsize for x in taken)
        if not sums or whole > _WHOLE * sum(4 * math.prod(self._local(x)) for x in sums):
            return []
        return [*ends]

    @cached_property
    def because(self) -> str:
        """The reason why it stays whole; "" where it may go in chunks."""
        outputs = [x for x in self.fusion.outputs if x in self.wide]
        if outputs:
            return f"because %{outputs[0]} is returned, which has a number for each of them"
        layouts = ((self.fusion.layout(x), self.dims(x)) for x in self.region)
        if any(at.blocked.get(d, "zigzag") != "zigzag" for at, dims in layouts for d in dims):
            return "because ranks have several runs of its rows, one of each block"
        values = self.values
        return next((r for e in self.exprs for r in self._reasons(e, values)), "")

    @property
    def values(self) -> dict[str, Value]:
        """All values; those with the rows that the loop computes have its stream."""
        values = dict(self.fusion.values)
        for x in self.region:
            for dim in self.dims(x):
                values[x] = replace(values[x], stream=Stream(dim, self.count))
        return values

    @cached_property
    def exprs(self) -> list[Expr]:
        """The expressions of the loop."""
        return [e for e in self.fusion.exprs if e.outputs[0] in self.region]

    def _reasons(self, expr: Expr, values: Mapping[str, Value]) -> Iterator[str]:
        (x, *others), fusion = expr.outputs, self.fusion
        line = f" ({expr.source})" if expr.source else ""
        readers = (r.outputs[0] for r in fusion.consumers[x])
        labels = dim_map(expr, values)
        label = streamed_label(expr, labels, values)
        if others or len(self.dims(x)) > 1 or not falls_together(expr, values):
            yield f"because {expr.op}{line} does not go row by row"
        elif fusion.values[x].stream is not None:
            yield f"because %{x} has a stream of its own"
        elif not self.dims(x) and not self.region.isdisjoint(readers):
            yield f"because a gradient of logits needs %{x}{line}, of which all rows are part"
        elif not self.dims(x) and not (label is not None and labels.reduces.get(label) in JOINED):
            yield f"because {expr.op}{line} needs all rows"
        elif expr.op == "set" and not microbatches.is_cut(fusion, expr, values[x]):
            yield f"because the ranks bring %{x}{line} together as a whole"


def heads(fusion: Fusion, most: int = 0) -> Iterator[Head]:
    """Yield the heads of a fusion whose logits take more than so many bytes in f32 on a rank."""
    softened = (e for e in fusion.exprs if e.op in ALONG)
    compared = {x: e for e in softened for x in products(fusion, e.reads[0])}
    same = _dims(fusion) if compared else UnionFind()
    for x, e in compared.items():
        classes = len(fusion.values[x].shape) - 1
        shape = fusion.layout(x).local_shape(fusion.values[x].shape)
        along = reduced_dims(_along(e), len(fusion.values[e.reads[0]].shape))
        is_along = [same[e.reads[0], d] for d in along] == [same[x, classes]]
        of_all = 4 * math.prod(shape)
        if not is_along or not of_all > most:
            continue
        rows = sorted(range(classes), key=lambda d: -shape[d])
        count = -(-of_all // most) if most else 2
        each = [Head(fusion, x, d, classes, _even(shape[d], count), same) for d in rows]
        yield next((head for head in each if not head.because), each[0])


def _even(rows: int, count: int) -> int:
    """Return how many chunks there are if large ones have whole tiles of rows.

    >>> _even(32_768, 63), _even(8192, 16), _even(5, 8)
    (64, 16, 5)
    """
    each = -(-rows // max(count, 1))
    if type(each) is int and each >= 2 * _TILE:
        count = -(-rows // (each - each % _TILE))
    return min(count, rows)


def _along(expr: Expr) -> Sequence[int] | None:
    dim = expr.kwargs.get("dim")
    return expr.kwargs.get("dims", (0,)) if dim is None else (dim,)


def products(fusion: Fusion, x: str) -> Iterator[str]:
    """Yield the product with a matrix that a value is made of, element by element."""
    while (expr := fusion.producers.get(x)) is not None and len(expr.outputs) == 1:
        value = fusion.values[x]
        if expr.op in ("linear", "matmul"):
            if len(value.shape) > 1 and len(fusion.values[expr.reads[1]].shape) == 2:
                yield x
            return
        is_cut = expr.op == "slice"
        operands = [r for r in expr.reads if is_cut or fusion.values[r].size == value.size]
        if len(operands) != 1:
            return
        (x,) = operands


def _dims(fusion: Fusion) -> UnionFind[tuple[str, int]]:
    """Return which dims, (value, dim), are one; a softmax keeps that along which it compares."""
    same: UnionFind[tuple[str, int]] = UnionFind()
    for expr in fusion.exprs:
        if not fusion.values[expr.outputs[0]].is_tensor:
            continue
        for first, *others in one_dim(expr, dim_map(expr, fusion.values)):
            same.union(first, *others)
        if expr.op in ("softmax", "log_softmax"):
            for d in range(len(fusion.values[expr.outputs[0]].shape)):
                same.union((expr.reads[0], d), (expr.outputs[0], d))
    return same


def _chunked(head: Head) -> Fusion:
    """Return the fusion with a head in chunks: its loop in one piece, behind what it needs."""
    fusion, values = head.fusion, head.values
    for expr in head.exprs:
        for value in microbatches.streamed(fusion, expr, values):
            values[value.name] = value
    near = {
        r for e in fusion.exprs for r in e.reads
        if not head.wide.isdisjoint((*e.reads, *e.outputs))
    }  # fmt: skip
    fusion = replace(fusion, values=values, exprs=_in_order(fusion, head))
    return microbatches.once(fusion, near.__contains__)


def _in_order(fusion: Fusion, head: Head) -> tuple[Expr, ...]:
    """Return the expressions with those of the loop side by side."""
    leading = leading_to(fusion.exprs, (), lambda e: e.outputs[0] in head.region)
    needed = {x for e in leading for x in e.reads}
    places = [n for n, e in enumerate(fusion.exprs) if e.outputs[0] in head.region]
    before, inside = fusion.exprs[: places[0]], fusion.exprs[places[0] : places[-1] + 1]
    beside = [e for e in inside if e.outputs[0] not in head.region]
    first = [e for e in beside if not needed.isdisjoint(e.outputs)]
    later = [e for e in beside if needed.isdisjoint(e.outputs)]
    return (*before, *first, *_sets_late(head), *later, *fusion.exprs[places[-1] + 1 :])


def _sets_late(head: Head) -> list[Expr]:
    """Return the expressions of the loop so that few kernels read the logits.

    What leads to no change of layout goes behind the last one, but for reductions of logits that do
    not wait for it: they go in front of it, beside those that it brings together.
    """
    exprs, layout = head.exprs, head.fusion.layout
    moved = leading_to(
        exprs, (), lambda e: e.op == "set" and layout(e.reads[0]) != layout(e.output)
    )
    if not moved:
        return exprs
    (*others, last), early = moved, {id(e) for e in moved}
    behind, reduced, small = following(exprs, last.outputs), set[str](), list[Expr]()
    for e in reversed(exprs):
        is_free = id(e) not in early and behind.isdisjoint(e.outputs)
        if is_free and not (reduced.isdisjoint(e.outputs) and head.wide.issuperset(e.outputs)):
            reduced.update(e.reads)
            small.append(e)
    placed = early | {id(e) for e in small}
    return [*others, *small[::-1], last, *(e for e in exprs if id(e) not in placed)]
