"""Keep rows as the dims that they are made of, where rows as one dim would lose a split.

    %f: f32[40,7] (dp=S0, cp=R) = reshape(%x)                       # %x: f32[4,10,7] (dp=S0, cp=S1)
    %e: f32[40,7] (dp=S0, cp=R) = exp(%f)
    %s: f32[40] (dp=S0, cp=R) = sum(%e, dims=[1])
    %t: f32[] (dp=P(sum), cp=R) = sum(%s, dims=[0])
->
    %e: f32[4,10,7] (dp=S0, cp=S1) = exp(%x)
    %s: f32[4,10] (dp=S0, cp=S1) = sum(%e, dims=[2])
    %t: f32[] (dp=P(sum), cp=P(sum)) = sum(%s, dims=[0,1])

Losses of logits have this form, where the batch and positions are split. It is done for all values
with these rows that elementwise operations, reductions, softmaxes, views and products with matrices
compute. A gradient of a matrix reads rows as one dim; see `sum_rows`. Where another operation does,
all stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.dims import pointwise, reduced_dims
from mdfuse.ir.graph import Expr, Fusion, Operand, Value
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout
from mdfuse.passes.prices import move_cost
from mdfuse.passes.propagate_layouts import anew
from mdfuse.passes.rewriting import Maker
from mdfuse.passes.strategy import choose, choose_here

name = "open_rows"

#: Views that keep rows, whatever becomes of the other dims.
_VIEWS = ("reshape", "squeeze", "unsqueeze")
#: Operations that may read rows as one dim: gradients of matrices.
_OF_MATRICES = ("permute", "matmul")

#: Products of rows, and what compares the numbers of a row.
_PRODUCTS, _ALONG = ("linear", "matmul"), ("softmax", "log_softmax")

Rows = tuple[int, ...]
#: The operands of an expression, and its attributes that change.
_Form = tuple[list[Operand], dict[str, object]]


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with such rows as several dims."""
    for rows in dict.fromkeys(rows for e in fusion.exprs if (rows := _lost(fusion, e))):
        form = _OpenRows(fusion, rows)
        with_rows = form.fusion()
        if with_rows is not None:
            new = {x for e in with_rows.exprs for x in e.outputs if x not in fusion.values}
            with_rows = anew(with_rows, new | form.again)
            # Passes behind spare some of these changes, sums of rows above all: hence a margin.
            if 4 * _sent(with_rows, fusion) <= 5 * _sent(fusion, with_rows):
                fusion = with_rows
    return fusion


def _sent(fusion: Fusion, other: Fusion) -> int:
    """Return the cost of changes of layout, each once, where another fusion may have others.

    What reads the same values counts, too: it shares their copies. Sums over rows, which read them
    as one dim, are another pass's.
    """
    differ = {name for name in fusion.values if _differs(name, fusion, other)}
    read = {x for e in fusion.exprs if not differ.isdisjoint(e.outputs) for x in e.reads} | differ
    moves: dict[tuple[str, Layout], int] = {}
    for e in fusion.exprs:
        if read.isdisjoint(e.reads):
            continue
        if e.op == "reshape" and all(_is_of_matrix(r) for r in fusion.consumers[e.output]):
            continue
        strategy = choose_here(e, fusion.values)
        for x, wanted in strategy.wanted.items() if strategy is not None else ():
            value = fusion.values[x]
            if value.layout not in (None, wanted) and (x, wanted) not in moves:
                moves[x, wanted] = move_cost(value, fusion.layout(x), wanted)
    return sum(moves.values())


def _differs(name: str, fusion: Fusion, other: Fusion) -> bool:
    value = other.values.get(name)
    return value is None or value.layout != fusion.values[name].layout


def _lost(fusion: Fusion, expr: Expr) -> Rows:
    """Return the dims of rows that a view makes one of, where it gathers a split of them."""
    if expr.op != "reshape" or all(_is_of_matrix(e) for e in fusion.consumers[expr.output]):
        return ()
    (x,) = expr.reads
    layout, rows = fusion.values[x].layout, _merged(fusion, expr)
    strategy = choose(expr, fusion.values) if rows else None
    if strategy is None or layout is None or strategy.wanted[x].mesh != layout.mesh:
        return ()
    wanted = strategy.wanted[x]
    is_lost = any(
        a not in wanted.split_axes(d) for d in range(len(rows)) for a in layout.split_axes(d)
    )
    return rows if is_lost else ()


def _merged(fusion: Fusion, expr: Expr) -> Rows:
    """Return the dims of rows that a view makes one of; none where it does another thing."""
    before, after = fusion.values[expr.reads[0]].shape, fusion.values[expr.output].shape
    count = len(before) - len(after) + 1
    if count < 2 or is_symbolic(before) or before[count:] != after[1:] or 0 in before:
        return ()
    return before[:count]


def _is_of_matrix(expr: Expr) -> bool:
    return expr.op in _OF_MATRICES


@dataclass
class _OpenRows:
    """A fusion under construction, in which some values have their rows as several dims.

    Attributes:
        of: the fusion.
        rows: these dims.
        opened: value -> its name with rows as several dims.
        closed: opened values that are there with rows as one dim, too.
        again: other values whose layouts are inferred again.
    """

    of: Fusion
    rows: Rows
    opened: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)

    def fusion(self) -> Fusion | None:
        """Return the fusion; None where an operation reads many rows as one dim."""
        self.maker, self.count = Maker(dict(self.of.values)), math.prod(self.rows)
        likes = {v.like.of for v in self.of.values.values() if v.like is not None}
        self.fixed = {*likes, *self.of.outputs}
        for e in self.of.exprs:
            if not self._open(e):
                for x in dict.fromkeys(e.reads):
                    if x in self.opened and not self._close(x, e):
                        return None
                self.maker.exprs.append(e)
        return self.of.with_exprs(self.maker.exprs, self.maker.values)

    def _open(self, e: Expr) -> bool:
        """Append an expression with rows as several dims, if there is such a form."""
        value = self.of.values[e.outputs[0]]
        if len(e.outputs) > 1 or not value.is_tensor or value.stream is not None:
            return False
        is_flat = bool(value.shape) and value.shape[0] == self.count
        is_free = not value.is_law and value.like is None and value.name not in self.fixed
        if is_flat and not is_free:
            return False
        is_view = is_flat and e.op == "reshape" and e.reads[0] not in self.opened
        if is_view and _merged(self.of, e) == self.rows:
            self.opened[value.name] = e.reads[0]
            return True
        if not any(x in self.opened for x in e.reads):
            return False
        if e.op == "reshape" and value.shape[: len(self.rows)] == self.rows:
            self.maker.op(e, "reshape", self.opened[e.reads[0]], last=True, shape=value.shape)
            self._infer_again(value)
            return True
        form = self._form(e, value, is_flat)
        if form is None:
            return False
        inputs, attrs = form
        is_last = not is_flat and not (e.kwargs.get("keepdim") and "dims" in attrs)
        name = self.maker.op(e, e.op, *inputs, last=is_last, **{**e.kwargs, **attrs})
        if is_flat:
            self.opened[value.name] = name
            return True
        if not is_last:  # rows are one dim of one element
            self.maker.op(e, "reshape", name, last=True, shape=value.shape)
        self._infer_again(value)
        return True

    def _infer_again(self, value: Value) -> None:
        if not value.is_law and value.like is None:
            self.again.add(value.name)
            self.maker.values[value.name] = replace(value, layout=None)

    def _form(self, e: Expr, value: Value, is_flat: bool) -> _Form | None:
        """Return the operands and the changed attributes of an expression; None: it has no form."""
        op, added = TABLE[e.op], len(self.rows) - 1
        if is_flat and e.op != "expand" and op.rule is pointwise and op.localize is None:
            inputs = [*self._operands(e, len(value.shape))]
            return (inputs, {}) if len(inputs) == len(e.inputs) else None
        first, *others = e.inputs
        if first not in self.opened or any(x in self.opened for x in others):
            return None
        inputs, shape = [self.opened[str(first)], *others], self._shape(first)
        if {"dims", "keepdim"} <= {a.name for a in op.attrs}:
            return self._reduced(e, inputs, shape, is_flat)
        if not is_flat:
            return None
        opened = (*self.rows, *value.shape[1:])
        if e.op == "expand" and len(shape) == len(value.shape):
            return inputs, {"shape": opened}
        if e.op in _VIEWS:
            return self._viewed(e, inputs, opened)
        if e.op in _PRODUCTS and len(shape) > 1 and len(self._shape(others[0])) == 2:
            return inputs, {}
        if e.op in _ALONG and e.kwargs["dim"] % len(shape):
            return inputs, {"dim": e.kwargs["dim"] % len(shape) + added}
        return None

    def _reduced(self, e: Expr, inputs: list[Operand], shape: Rows, is_flat: bool) -> _Form | None:
        """Return the form of a reduction, of rows or of other dims."""
        added, dims = len(self.rows) - 1, reduced_dims(e.kwargs.get("dims"), len(shape))
        if 0 in dims and is_flat:
            return None
        of_rows = [*range(added + 1)] if 0 in dims else []
        return inputs, {"dims": (*of_rows, *(d + added for d in dims if d))}

    def _viewed(self, e: Expr, inputs: list[Operand], shape: Rows) -> _Form | None:
        """Return the form of a view that keeps rows."""
        if e.op == "reshape":
            return inputs, {"shape": shape}
        added, ndim = len(self.rows) - 1, len(self._shape(e.inputs[0]))
        ndim += len(e.kwargs["dims"]) * (e.op == "unsqueeze")
        dims = [d % ndim for d in e.kwargs["dims"]]
        return None if 0 in dims else (inputs, {"dims": tuple(d + added for d in dims)})

    def _operands(self, e: Expr, ndim: int) -> Iterator[Operand]:
        """Yield the operands of an elementwise operation; fewer, where some have no such form."""
        for x in e.inputs:
            shape = self._shape(x)
            if x in self.opened and len(shape) < ndim:  # rows are compared with another dim
                return
            if x in self.opened:
                yield self.opened[str(x)]
            elif len(shape) < ndim:
                yield x
            elif shape[0] == self.count:
                yield self.maker.op(e, "reshape", x, shape=(*self.rows, *shape[1:]))
            else:
                yield self.maker.op(e, "reshape", x, shape=(*(1 for _ in self.rows), *shape[1:]))

    def _shape(self, x: Operand) -> tuple[int, ...]:
        return self.maker.values[x].shape if isinstance(x, str) else ()

    def _close(self, x: str, reader: Expr) -> bool:
        """Append a view of opened rows as one dim, for a reader; False where that is not done."""
        value = self.of.values[x]
        if math.prod(value.shape) > self.count and not _is_of_matrix(reader):
            return False
        if x not in self.closed:
            self.closed.add(x)
            by = replace(self.of.producers[x], outputs=(x,))
            self.maker.op(by, "reshape", self.opened[x], last=True, shape=value.shape)
            self._infer_again(value)
        return True
