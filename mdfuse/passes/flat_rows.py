"""Let a head multiply rows as one dim, where its losses read them so.

    %l: f32[2,4096,128256] = linear(%x, %w)             %r: f32[8192,2048] = reshape(%x)
    %f: f32[8192,128256] = reshape(%l)             ->   %f: f32[8192,128256] = linear(%r, %w)
    …                                                   …
    %g: f32[2,4096,128256] = reshape(%df)               %m: f32[8192,2048] = matmul(%df, %w)
    %dx: f32[2,4096,2048] = matmul(%g, %w)              %dx: f32[2,4096,2048] = reshape(%m)

Chunks of rows then fall together in all that has the size of logits (`chunk_losses`), and what a
reshape would bring together of split rows is narrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.graph import Expr, Fusion, Operand, Value
from mdfuse.ir.ops import TABLE
from mdfuse.passes.chunk_losses import ALONG, products
from mdfuse.passes.rewriting import Maker

name = "flat_rows"


def run(fusion: Fusion, most: int) -> Fusion:
    """Return the fusion with such heads.

    Args:
        fusion: without layouts but those that are stated.
        most: heads whose logits take at most so many bytes in f32, of all ranks, stay.
    """
    likes = {v.like.of for v in fusion.values.values() if v.like is not None}
    heads = (x for e in fusion.exprs if e.op in ALONG for x in products(fusion, e.reads[0]))
    for x in dict.fromkeys([*heads]):
        shape = fusion.values[x].shape
        if len(shape) < 3 or is_symbolic(shape) or 4 * math.prod(shape) <= most:
            continue
        wide = _wide(fusion, x)
        values = [fusion.values[w] for w in wide]
        is_free = all(v.layout is None and v.stream is None for v in values)
        if is_free and likes.isdisjoint(wide) and wide.isdisjoint(fusion.outputs):
            fusion = _Flat(fusion, x, wide).fusion()
    return fusion


def _wide(fusion: Fusion, logits: str) -> set[str]:
    """Return the values of the logits' shape that are made of them element by element."""
    shape, wide, after = fusion.values[logits].shape, {logits}, {logits}
    for e in fusion.exprs:
        if after.isdisjoint(e.reads):
            continue
        after.update(e.outputs)
        (x, *others) = e.outputs
        is_from = not wide.isdisjoint(e.reads) and TABLE[e.op].is_elementwise
        is_back = e.op == "reshape" and _is_flat(fusion.values[e.reads[0]], shape)
        if not others and fusion.values[x].shape == shape and (is_from or is_back):
            wide.add(x)
    return wide


def _is_flat(value: Value, shape: tuple[int, ...]) -> bool:
    return value.shape == (math.prod(shape[:-1]), shape[-1])


@dataclass
class _Flat:
    """A fusion under construction, in which some values have their rows as one dim.

    Attributes:
        of: the fusion.
        logits: the product.
        wide: the values of its shape.
        flat: value -> its name with rows as one dim, and other names for the same.
        whole: wide value -> a view of it that has its old shape.
    """

    of: Fusion
    logits: str
    wide: set[str]
    flat: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def fusion(self) -> Fusion:
        """Return the fusion."""
        self.maker = Maker(dict(self.of.values))
        self.shape = self.of.values[self.logits].shape
        self.rows = math.prod(self.shape[:-1])
        for e in self.of.exprs:
            flat = {x: self.flat[x] for x in e.reads if x in self.flat and x not in self.wide}
            self._append(e.reading(flat))
        return self.of.with_exprs(self.maker.exprs, self.maker.values)

    def _append(self, e: Expr) -> None:
        x, maker, wide = e.outputs[0], self.maker, [r for r in e.reads if r in self.wide]
        is_view = e.op == "reshape" and _is_flat(self.of.values[e.outputs[0]], self.shape)
        if x == self.logits:
            self.flat[x] = self._op(e, self._rows(e, e.reads[0]), *e.inputs[1:])
        elif x in self.wide and e.op == "reshape" and not wide:
            self.flat[x] = e.reads[0]
        elif x in self.wide and (inputs := [*self._operands(e)]):
            self.flat[x] = self._op(e, *inputs)
        elif x in self.wide:
            maker.exprs.append(self._read_whole(e))
            self.flat[x] = self._rows(e, x)
        elif is_view and wide and x not in self.of.returned:
            self.flat[x] = self.flat[wide[0]]
        elif wide == [*e.reads[:1]] and e.op in ("linear", "matmul") and self._is_matrix(e):
            product = self._op(e, self.flat[wide[0]], *e.inputs[1:])
            maker.op(e, "reshape", product, last=True, shape=self.of.values[x].shape)
        else:
            maker.exprs.append(self._read_whole(e))

    def _is_matrix(self, e: Expr) -> bool:
        return len(self.of.values[e.reads[1]].shape) == 2

    def _op(self, e: Expr, *inputs: Operand) -> str:
        return self.maker.op(e, e.op, *inputs, **e.kwargs)

    def _rows(self, e: Expr, x: str) -> str:
        shape = (self.rows, self.maker.values[x].shape[-1])
        return self.maker.op(e, "reshape", x, shape=shape)

    def _operands(self, e: Expr) -> Iterator[Operand]:
        """Yield operands with rows as one dim; nothing where some have no such form."""
        result: list[Operand] = []
        for x in e.inputs:
            shape = self.maker.values[x].shape if isinstance(x, str) else ()
            if isinstance(x, str) and x in self.wide:
                result.append(self.flat[x])
            elif len(shape) <= 1:
                result.append(x)
            elif isinstance(x, str) and shape[:-1] == self.shape[:-1]:
                result.append(self._rows(e, x))
            else:
                return
        yield from result

    def _read_whole(self, e: Expr) -> Expr:
        """Return an expression that reads wide values in their old shape."""
        for x in e.reads:
            if x in self.wide and x not in self.whole:
                view = self.maker.op(e, "reshape", self.flat[x], shape=self.shape)
                self.whole[x] = view
        return e.reading(self.whole)
