"""Make masks of attention where their rows and columns are read, not where they were made.

    %m: bool[1,1,64,64] = eq(%a, %b)    # %a: [1,1,64,1] (cp=S2), %b: [1,1,1,64] (cp=S3)
    %y = attention(%q, %k, %v, %m)      # %q: [1,8,64,4] (cp=S2)
->
    %c: i64[1,1,1,64] (cp=R)! = set(%b)
    %n: bool[1,1,64,64] (cp=S2) = eq(%a, %c)
    %y = attention(%q, %k, %v, %n)

So rows and columns are brought together, which are few, and never what is made of them. In a ring
each rank makes the columns of the keys that came: it never has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.dims import pointwise
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.stream import Stream
from mdfuse.passes.rewriting import Maker
from mdfuse.passes.sharded.split_attention import ROWS, SplitAttention

#: The operand of an attention, and of its gradient, that is a mask.
FORWARD, BACKWARD = 3, 6

#: Views that keep rows and columns as the last dims.
_VIEWS = ("expand", "unsqueeze")


@dataclass
class Masks:
    """The masks that attentions of a fusion read; it lives inside one call of a pass."""

    fusion: Fusion
    copies: dict[tuple[str, Layout], str] = field(default_factory=dict)

    def read(
        self, maker: Maker, by: Expr, split: SplitAttention, to: Layout, stream: Stream | None
    ) -> list[str]:
        """Return the mask, or numbers of documents, as attention reads them; nothing without.

        Args:
            maker: to which the expressions that make it are appended.
            by: the attention, or its gradient.
            split: the attention.
            to: the layout of its query where it is read.
            stream: of the keys; None where all are there.
        """
        exprs, ends = parts(split)
        read = {x: x for x in ends}
        read |= {x: self._brought(maker, by, x, at) for x, at in received(split, to)}
        if stream is not None:
            rows = split.hides[:-1]  # of which documents are
            some = {x: y for x, y in read.items() if x not in rows}
            read |= {x: _in_turn(maker, by, split, y, stream) for x, y in some.items()}
        for e in exprs:
            read[e.output] = self._again(maker, by, e, read, to if stream is None else None)
            if stream is not None:
                value = maker.values[read[e.output]]
                at = replace(stream, dim=len(value.shape) - 1)
                maker.values[value.name] = replace(value, stream=at)
        return [read[x] for x in split.hides]

    def _again(
        self, maker: Maker, by: Expr, e: Expr, read: dict[str, str], to: Layout | None
    ) -> str:
        """Return the result of an expression of copies; one that another attention has made."""
        key = (e.output, to) if to is not None else None
        if key is not None and key in self.copies:
            return self.copies[key]
        name = maker.op(by, e.op, *e.reading(read).inputs, **e.kwargs)
        if key is not None:
            self.copies[key] = name
        return name

    def _brought(self, maker: Maker, by: Expr, x: str, at: Layout) -> str:
        """Return a copy with the query's part of the rows, and with all columns."""
        if at == self.fusion.layout(x):
            return x
        if (x, at) not in self.copies:
            copy = maker.op(by, "set", x)
            maker.values[copy] = replace(maker.values[copy], layout=at, is_law=True)
            self.copies[x, at] = copy
        return self.copies[x, at]


#: For each dim, the dim of the query along which it is; None: along none.
_Along = tuple[int | None, ...]


def parts(split: SplitAttention) -> tuple[list[Expr], dict[str, _Along]]:
    """Return the expressions that make a mask of values with rows or columns alone; and these.

    Numbers of documents are such values themselves.
    """
    exprs, ends = dict[str, Expr](), dict[str, _Along]()

    def visit(x: str, along: _Along) -> None:
        along = along[max(len(along) - len(split.shape(x)), 0) :]
        expr = split.fusion.producers.get(x)
        if x in exprs:
            return
        if expr is None or not _is_made(split.fusion, expr):
            ends.setdefault(x, along)
            return
        if expr.op == "unsqueeze":
            new = {d % len(along) for d in expr.kwargs["dims"]}
            along = tuple(q for d, q in enumerate(along) if d not in new)
        for y in expr.reads:
            visit(y, along)
        exprs[x] = expr

    rows = len(split.shape(split.operands[0])) + ROWS
    ends_of = ((rows, None),) if split.mask is not None else ((rows,), (None,))
    for x, along in zip(split.hides, ends_of, strict=False):
        visit(x, (*range(rows), *along))
    return [*exprs.values()], ends


def _is_made(fusion: Fusion, expr: Expr) -> bool:
    """Return whether an expression makes rows by columns, an element at a time."""
    row, value = TABLE[expr.op], fusion.values[expr.outputs[0]]
    is_each = row.rule is pointwise and row.localize is None and expr.op != "set"
    if not (is_each or expr.op in _VIEWS) or value.is_law or value.stream is not None:
        return False
    if is_symbolic(value.shape) or len(value.shape) < 2 or 1 in value.shape[-2:]:
        return False
    mesh = fusion.layout(value.name).mesh
    operands = [fusion.values[x] for x in expr.reads]
    is_here = all(x.stream is None and fusion.layout(x.name).mesh == mesh for x in operands)
    is_behind = expr.op != "unsqueeze" or all(
        d % len(value.shape) < len(value.shape) - 2 for d in expr.kwargs["dims"]
    )
    return is_here and is_behind


def _placed(split: SplitAttention, x: str, along: _Along, to: Layout) -> Layout | None:
    """Return the layout of what a mask is made of, for a query in another; None: as it lies."""
    shape, query = split.shape(x), split.shape(split.operands[0])
    if not shape or is_symbolic(shape) or is_symbolic(query):
        return None
    return to.with_dims(
        {q: d for d, q in enumerate(along) if q is not None and shape[d] == query[q]}
    )


def _in_turn(maker: Maker, by: Expr, split: SplitAttention, x: str, stream: Stream) -> str:
    """Return columns in the sequence in which their keys come; as they are where there are none."""
    shape = maker.values[x].shape
    if not shape or shape[-1] != split.shape(split.operands[1])[ROWS]:
        return x
    copy = maker.op(by, "set", x)
    at = replace(stream, dim=len(shape) - 1)
    layout = maker.values[x].layout or split.fusion.layout(x)
    maker.values[copy] = replace(maker.values[copy], layout=layout, is_law=True, stream=at)
    return copy


def received(split: SplitAttention, to: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield what a mask is made of, and the layout in which a query in a layout reads it."""
    for x, along in parts(split)[1].items():
        at = _placed(split, x, along, to)
        if at is not None:
            yield x, at
