"""Attention whose positions are split: which axes split them, and where its operands may lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mdfuse.ir.graph import Expr, Fusion
from mdfuse.layouts.halo import Reach
from mdfuse.layouts.layout import Layout, Replicate, Shard
from mdfuse.passes.strategy import dim_map

#: The ops of attention, but its gradient.
ATTENTIONS = ("scaled_dot_product_attention", "attention")

#: The heads and the positions of query, key and value, from the last dim.
HEADS, ROWS = -3, -2


@dataclass(frozen=True)
class SplitAttention:
    """An attention whose positions are split.

    Attributes:
        fusion: with layouts.
        expr: the attention.
        axes: those that split the rows of its query.
        gradients: the expressions of its gradients.
    """

    fusion: Fusion
    expr: Expr
    axes: tuple[str, ...]
    gradients: tuple[Expr, ...] = ()

    @property
    def is_trained(self) -> bool:
        return bool(self.gradients)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The number of gradients of query, keys and values that somebody reads."""
        fusion, each = self.fusion, zip(*(e.outputs for e in self.gradients), strict=True)
        counts = (sum(bool(fusion.consumers[x]) or x in fusion.returned for x in xs) for xs in each)
        return (*counts,) if self.gradients else (0, 0, 0)

    @property
    def operands(self) -> tuple[str, str, str]:
        q, k, v = map(str, self.expr.inputs[:3])
        return q, k, v

    @property
    def hides(self) -> tuple[str, ...]:
        """The mask, or the numbers of the documents of rows and of keys; () where there is none."""
        return (*self.expr.reads[3:],)

    @property
    def mask(self) -> str | None:
        """The mask; None where there is none."""
        return self.hides[0] if len(self.hides) == 1 else None

    def shape(self, x: str) -> tuple[int, ...]:
        return self.fusion.values[x].shape

    @property
    def rows(self) -> Layout:
        """The layout of the result: that of the query."""
        return self.fusion.layout(self.operands[0])

    @property
    def is_shared(self) -> bool:
        """True if heads of the query share those of keys, of which ranks would have parts."""
        q, k, _ = self.operands
        heads, shared = self.shape(q)[HEADS], self.shape(k)[HEADS]
        return heads != shared and shared % self.parts != 0

    @property
    def parts(self) -> int:
        """The number of parts in which the heads are, split along these axes, too."""
        parts = 1
        for axis in self.over_heads(self.operands[0]).split_axes(self.dim(HEADS)):
            parts *= self.rows.mesh.axis_size(axis)
        return parts

    @property
    def is_usual(self) -> bool:
        """True if query, key, value and result are split alike: prices hold."""
        names = (*self.operands, self.expr.outputs[0])
        rows = {self.fusion.layout(x).split_axes(self.dim(ROWS)) for x in names}
        return len(rows) == 1 and len({len(self.shape(x)) for x in names}) == 1

    def dim(self, back: int) -> int:
        return len(self.shape(self.operands[0])) + back

    def over_heads(self, x: str) -> Layout:
        """Return the layout of query, key, value or result where the axes split the heads."""
        layout = self.fusion.layout(x)
        outer = [a for a in self.rows.split_axes(self.dim(HEADS)) if a not in self.axes]
        for axis in self.axes:
            layout = layout.with_placement(axis, Replicate())
        for axis in (*outer, *self.axes):
            layout = layout.with_placement(axis, Shard(self.dim(HEADS)))
        return layout

    def read(self, x: str) -> Layout:
        """Return the layout in which keys or values are read by rows: whole, or as windows reach.

        Gradients without halos read them whole.
        """
        layout, dim = self.fusion.layout(x), self.dim(ROWS)
        reach = self._reach
        if reach is None or dim in layout.blocked or (self.is_trained and not self.has_halos):
            return self.whole(x)
        return layout.reaching({dim: reach}, self.shape(x))

    @property
    def _reach(self) -> Reach | None:
        """The keys that belong to a part of the rows, where windows reach so many; else None."""
        reaches = dim_map(self.expr, self.fusion.values).reaches
        return next((r for (at, d), r in reaches.items() if d == self.dim(ROWS) and at), None)

    @property
    def has_halos(self) -> bool:
        """True if a rank lacks just the keys before its own that its windows reach.

        Rows and keys are split alike by one axis, and row i sees keys up to i.
        """
        q, k, _v = map(self.shape, self.operands)
        reach, rows = self._reach, Shard(self.dim(ROWS))
        if reach is None or reach.last != 1 or len(self.axes) > 1 or not q[ROWS] == k[ROWS] > 0:
            return False
        layouts = map(self.fusion.layout, self.operands)
        return {x.placement(self.axes[0]) for x in layouts} == {rows} and all(
            self.fusion.layout(x).split_axes(rows.dim) == self.axes for x in self.operands
        )

    def whole(self, x: str) -> Layout:
        """Return the layout of keys or values of which each rank has all positions."""
        layout = self.fusion.layout(x)
        for axis in self.axes:
            layout = layout.with_placement(axis, Replicate())
        return layout

    @property
    def because(self) -> str:
        """The reason why the heads cannot be split along these axes; "" where they can."""
        q, k, _ = self.operands
        if len(self.shape(q)) < 3 or len(self.shape(q)) != len(self.shape(k)):
            return "there are no heads"
        if self.shape(q)[HEADS] < self.parts:
            return f"it has {self.shape(q)[HEADS]} heads for {self.parts} ranks"
        return ""


def splits(fusion: Fusion) -> Iterator[SplitAttention]:
    """Yield the attentions whose positions are split."""
    gradients: dict[object, tuple[Expr, ...]] = {}
    for e in fusion.exprs:
        if e.op == "attention_grad":
            gradients[e.inputs[4]] = (*gradients.get(e.inputs[4], ()), e)
    for e in fusion.exprs:
        if e.op not in ATTENTIONS or any(fusion.values[x].stream is not None for x in e.reads):
            continue
        layouts = [fusion.layout(x) for x in e.reads]
        query = layouts[0]
        rows = query.split_axes(len(fusion.values[e.reads[0]].shape) + ROWS)
        axes = tuple(a for a in rows if query.mesh.axis_size(a) > 1)
        is_plain = all(x.mesh == query.mesh and not x.partial_axes for x in layouts)
        out = fusion.values[e.outputs[0]].layout
        if axes and is_plain and out is not None and out.mesh == query.mesh:
            yield SplitAttention(fusion, e, axes, gradients.get(e.outputs[-1], ()))
