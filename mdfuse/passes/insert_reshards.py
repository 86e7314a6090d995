"""Make every change of layout a `set`: of operands that do not fit, of results wanted elsewhere.

    %c: f32[8,8] (tp=S0) = add(%a, %b)              # %b is (tp=S1)
->
    %b.tp_S0: f32[8,8] (tp=S0) = set(%b)
    %c: f32[8,8] (tp=S0) = add(%a, %b.tp_S0)

Afterwards `set` is the only expression whose operand and result differ in layout. A value that is
wanted in one layout several times is resharded once, from whichever copy of it costs least. A view
of a value is taken of the value's copy where that has the wanted layout:

    %rows: f32[8,8] (tp=S0) = reshape(%x)           # %x: f32[1,8,8] (tp=S1) is there whole
->
    %rows.whole: f32[8,8] (tp=R) = reshape(%x.whole)

or where that costs less to bring there: one of the heads that a view repeats is sent, not each. At
equal costs the value is moved before its views where others read it, too: they may take its copy.

A choice counts on what others need (`passes/readers.py`). So that no two count on each other, it is
noted where it differs from what was expected before the next one is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name, leading_to
from mdfuse.layouts.layout import Layout, Replicate
from mdfuse.layouts.stream import Stream
from mdfuse.layouts.streamed_sets import FORMS, form
from mdfuse.passes.prices import brought_cost, move_cost
from mdfuse.passes.readers import Readers
from mdfuse.passes.strategy import is_view, strategy_of, viewed_as, viewed_from
from mdfuse.passes.streams import operand_streams
from mdfuse.reshard import costs

name = "insert_reshards"


@dataclass
class _Rewriter:
    """The fusion under construction; it lives inside one call of `run`."""

    values: dict[str, Value]
    #: who reads these values in which layouts
    notes: Readers
    #: the first results of expressions that lead to an output
    live: Set[str]
    #: the values that several expressions read.
    shared: Set[str]
    exprs: list[Expr] = field(default_factory=list)
    #: value -> its copies in other layouts, itself included.
    copies: dict[str, list[str]] = field(default_factory=dict)
    #: value -> what its expression yields, where a set makes it of that
    origins: dict[str, str] = field(default_factory=dict)

    def layout(self, value: str) -> Layout:
        return self.values[value].placed

    def form(self, source: str, layout: Layout, stream: Stream) -> str | None:
        """Return the form of a streamed set; None: it goes whole, as with expanded dims."""
        value = self.values[source]
        if value.expanded and self.layout(source) != layout:
            return None
        return form(self.layout(source), layout, stream, value.shape[stream.dim])

    def new_value(self, like: Value, base: str, layout: Layout, stream: Stream | None) -> str:
        output = fresh_name(self.values, base)
        self.values[output] = replace(
            like, name=output, layout=layout, stream=stream, is_law=False, order_from="op"
        )
        return output

    def cheapest(self, copies: list[str], layout: Layout) -> str:
        """Return the copy of a value from which a layout costs least; of equal ones, the first."""
        like = self.values[copies[0]]
        copies = [c for c in copies if not self.layout(c).reaches]
        prices = costs([self.layout(c) for c in copies], layout, like.shape, like.dtype.itemsize)
        return copies[prices.index(min(prices))]

    def with_made(self, copies: list[str]) -> list[str]:
        """Return copies of a value, and what it was made of where ranks have more of it there."""
        local = self.origins.get(copies[0])
        is_copy = local is not None and not self.layout(local).partial_axes
        return [*copies, local] if local is not None and is_copy else copies

    def reshard(self, value: str, layout: Layout, expr: Expr, stream: Stream | None = None) -> str:
        """Return the name of a value's copy in a layout, made by a new set where there is none."""
        copies = self.copies.setdefault(value, [value])
        for copy in copies:
            if self.layout(copy) == layout:
                return copy
        source = self.cheapest(self.with_made(copies) if layout.reaches else copies, layout)
        before = self.moved_before(value, source, layout)
        if before is not None:
            self.reshard(*before, expr)
        source = self.viewed(value, source, layout, expr)
        if self.layout(source) == layout:
            return source
        if stream is not None and self.form(source, layout, stream) is None:
            stream = None
        output = self.new_value(self.values[value], f"{value}.{suffix(layout)}", layout, stream)
        reshard = Expr(op="set", inputs=(source,), outputs=(output,), source=expr.source)
        self.exprs.insert(self.place(reshard, expr), reshard)
        copies.append(output)
        return output

    def moved_before(self, value: str, source: str, layout: Layout) -> tuple[str, Layout] | None:
        """Return the operand of a view, and its layout, where to move that costs less.

        It does where the view repeats rows of it.
        """
        view, is_streamed = self.notes.views.get(value), self.values[value].stream is not None
        if view is None or is_streamed or layout.reaches or self.layout(source).partial_axes:
            return None
        (operand,) = view.reads
        before = viewed_from(view, self.values, layout)
        if before is None:
            return None
        there = self.cheapest(self.copies.get(operand, [operand]), before)
        is_shared = self.is_shared(operand)
        prices = [brought_cost(self.values, *x) for x in ((there, before), (source, layout))]
        is_less = prices[0] <= prices[1] if is_shared else prices[0] < prices[1]
        return (operand, before) if is_less else None

    def is_shared(self, value: str) -> bool:
        """Return whether others than a view read what it is of, or what that is a view of."""
        outer = self.notes.views.get(value)
        return value in self.shared or (outer is not None and self.is_shared(outer.reads[0]))

    def viewed(self, value: str, source: str, layout: Layout, expr: Expr) -> str:
        """Return the copy of a value that costs least: the source, or a view of its operand's."""
        of, views = self.values[value], tuple[tuple[Expr, Layout], ...]()
        may_move = not layout.reaches and not is_symbolic(of.shape)  # a comparison is a guard
        is_view_of = may_move and value in self.notes.views
        least = brought_cost(self.values, source, layout) if is_view_of else 0
        for copy, steps in self.through_views(value):
            there = steps[-1][1] if steps else self.layout(copy)
            if steps and there == layout:
                source, views = copy, steps
                break
            if steps and least and not there.partial_axes:
                price = move_cost(of, there, layout)
                if price < least:
                    source, views, least = copy, steps, price
        for view, reached in views:
            like = self.values[view.output]
            copy = self.new_value(like, f"{view.output}.{suffix(reached)}", reached, None)
            again = replace(view, inputs=(source, *view.inputs[1:]), outputs=(copy,))
            self.exprs.insert(self.place(again, expr), again)
            self.copies.setdefault(view.output, [view.output]).append(copy)
            source = copy
        return source

    def through_views(self, value: str) -> Iterator[tuple[str, tuple[tuple[Expr, Layout], ...]]]:
        """Yield copies from which views lead to a value, and the views with their layouts."""
        copies = (c for c in self.copies.get(value, [value]) if self.values[c].stream is None)
        yield from ((c, ()) for c in copies)
        view = self.notes.views.get(value)
        if view is not None:
            for source, views in self.through_views(view.reads[0]):
                layout = views[-1][1] if views else self.layout(source)
                reached = viewed_as(view, self.values, layout)
                if reached is not None:
                    yield source, (*views, (view, reached))

    def place(self, maker: Expr, expr: Expr) -> int:
        """Return where a new set goes: if possible, before the streamed ones ahead of `expr`.

        Between them it would end their loop.
        """

        def is_streamed(e: Expr) -> bool:
            return self.values[e.outputs[0]].stream is not None

        at = len(self.exprs)
        if is_streamed(maker) or not is_streamed(expr):
            return at
        run = list(takewhile(is_streamed, reversed(self.exprs)))
        return at if any(name in maker.reads for e in run for name in e.outputs) else at - len(run)


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with explicit sets."""
    shared = {x for x, readers in fusion.consumers.items() if len(readers) > 1}
    values = dict(fusion.values)
    live = {expr.outputs[0] for expr in leading_to(fusion.exprs, fusion.outputs)}
    rewriter = _Rewriter(values, Readers(values), live, shared)
    for expr in fusion.exprs:
        _rewrite(rewriter, expr)
    return replace(fusion, values=values, exprs=tuple(rewriter.exprs))


def _rewrite(rewriter: _Rewriter, expr: Expr) -> None:
    if not rewriter.values[expr.outputs[0]].is_tensor:
        rewriter.exprs.append(expr)
        return
    if expr.op == "set":
        out, (operand,) = rewriter.values[expr.output], expr.reads
        source = _best_copy(rewriter, operand, rewriter.layout(expr.output))
        layout = rewriter.layout(expr.output)
        if out.stream is not None and rewriter.form(source, layout, out.stream) is None:
            rewriter.values[expr.output] = replace(out, stream=None)
        rewriter.exprs.append(replace(expr, inputs=(source,)))
        return
    strategy = strategy_of(expr, rewriter.values)
    names = {}
    streams = _copy_streams(expr, rewriter.values)
    if expr.outputs[0] in rewriter.live:
        rewriter.notes.read(expr, strategy.wanted)
    for operand, layout in strategy.wanted.items():
        names[operand] = rewriter.reshard(operand, layout, expr, streams.get(operand))
    local_names = {}
    for name, layout in zip(expr.outputs, strategy.results, strict=True):
        is_there = rewriter.layout(name) == layout
        local_names[name] = name if is_there else _local(rewriter, rewriter.values[name], layout)
    outputs = tuple(local_names.values())
    if is_view(expr):
        rewriter.notes.add(expr)
    read = expr.reading(names)
    rewriter.exprs.append(read if outputs == expr.outputs else replace(read, outputs=outputs))
    for name, local in local_names.items():
        if local != name:
            moved = Expr(op="set", inputs=(local,), outputs=(name,), source=expr.source)
            rewriter.exprs.append(moved)
            rewriter.origins[name] = local


def _copy_streams(expr: Expr, values: Mapping[str, Value]) -> dict[str, Stream | None]:
    """Return the streams of the copies of operands: those in which the expression reads them."""
    if values[expr.outputs[0]].stream is None:
        return {}
    streams: dict[str, Stream | None] = {}
    for x, stream in zip(expr.inputs, operand_streams(expr, values), strict=True):
        if isinstance(x, str):
            streams[x] = stream if streams.get(x, stream) == stream else None
    return streams


def _local(rewriter: _Rewriter, out: Value, layout: Layout) -> str:
    """Add a value for an expression's local result, which a set then reshards; return its name.

    It is streamed with the result, where the set between them reads it in chunks. What chunks are
    joined to is there behind their loop, where the set then stands.
    """
    how, is_joined = None, out.stream is not None and out.stream.op is not None
    if out.stream is not None and not out.expanded and not is_joined:
        how = form(layout, out.placed, out.stream, out.shape[out.stream.dim])
    if how is None:
        rewriter.values[out.name] = replace(out, stream=None)
    is_cut = how is not None and FORMS[how][0]
    stream = out.stream if is_cut or is_joined else None
    return rewriter.new_value(out, f"{out.name}.{suffix(layout)}", layout, stream)


def _best_copy(rewriter: _Rewriter, operand: str, layout: Layout) -> str:
    """Return the copy of its operand from which a user's set costs least."""
    copies = rewriter.copies.get(operand, [operand])
    if layout.partial_axes:  # it is not defined from every copy
        return copies[0]
    return rewriter.cheapest(copies, layout)


def suffix(layout: Layout) -> str:
    """Return the suffix of the name of a copy in a layout."""
    if layout.partial_axes:
        return "partial"
    if layout.reaches:
        return "halo"
    parts = [f"{a}_{p}" for a, p in layout.by_axis().items() if not isinstance(p, Replicate)]
    return re.sub(r"\W+", "_", "_".join(parts)).rstrip("_") or "whole"
