"""A write into a view, as the write into what the view shows.

%f = reshape(%c, shape=[8,4])                   %i0 = floor_divide(%at, 4)
%w = index_copy(%at, %s, %f, along=0)    ->     %i1 = remainder(%at, 4)
                                                %n = index_put(%i0, %i1, %s, %c, dims=[0,1])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mdfuse.extents.extent import are_same
from mdfuse.ir.dims import reshape_groups
from mdfuse.ir.element_writes import OUT_OF_RANGE
from mdfuse.ir.graph import Expr
from mdfuse.passes.in_place.chains import Shape, ViewStep
from mdfuse.passes.rewriting import Maker

#: The ops that write a part of their last operand.
WRITES = ("index_copy", "index_put", "scatter", "slice_scatter")


@dataclass
class Appender:
    """It appends expressions in the place of one, each of which once."""

    maker: Maker
    by: Expr
    known: dict[Any, str] = field(default_factory=dict)

    def __call__(self, op: str, *inputs: Any, **attrs: Any) -> str:
        """Append an expression, and return the name of its result."""
        key = (op, inputs, tuple((k, str(v)) for k, v in attrs.items()))
        if key not in self.known:
            self.known[key] = self.maker.op(self.by, op, *inputs, **attrs)
        return self.known[key]

    def shape(self, name: str) -> Shape:
        return self.maker.values[name].shape

    def range(self, n: int) -> str:
        return self("arange", 0, 1, shape=(n,), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class RowWrite:
    """Elements written at places that vectors of indices name.

    Attributes:
        at: dim -> its vector of indices.
        source: of shape [indices, *other dims], as `index_put` takes it.
        accumulate: whether they are added.
        from_end: whether negative indices count from the end.
    """

    at: dict[int, str]
    source: str
    accumulate: bool
    from_end: bool


@dataclass(frozen=True, slots=True)
class SliceWrite:
    """Elements written into a slice; see `slice_scatter`."""

    source: str
    starts: Shape
    steps: Shape


Write = RowWrite | SliceWrite


def write_of(expr: Expr, emit: Appender) -> Write:
    """Return what an expression writes into its last operand."""
    attrs, (*given, _) = expr.kwargs, expr.reads
    if expr.op == "slice_scatter":
        return SliceWrite(given[0], attrs["starts"], attrs["steps"])
    *indices, source = given
    if expr.op == "index_put":
        at = dict(zip(attrs["dims"], indices, strict=True))
        return RowWrite(at, source, bool(attrs.get("accumulate")), True)
    shape, along = emit.shape(source), attrs["along"]
    if expr.op == "index_copy":
        order = (along, *(d for d in range(len(shape)) if d != along))
        return RowWrite({along: indices[0]}, _permuted(emit, source, order), False, False)
    count = math.prod(shape)
    at = {along: emit("reshape", indices[0], shape=(count,))}
    for d, n in enumerate(shape):
        if d != along:
            row = emit("reshape", emit.range(n), shape=(n, *(1,) * (len(shape) - 1 - d)))
            at[d] = emit("reshape", emit("expand", row, shape=shape), shape=(count,))
    return RowWrite(at, emit("reshape", source, shape=(count,)), False, False)


def emitted(write: Write, into: str, emit: Appender) -> str:
    """Append a write into a value; return its result."""
    if isinstance(write, SliceWrite):
        return emit("slice_scatter", write.source, into, starts=write.starts, steps=write.steps)
    how = {"accumulate": True} if write.accumulate else {}
    at = write.at
    return emit("index_put", *at.values(), write.source, into, dims=tuple(at), **how)


def through(write: Write, step: ViewStep, emit: Appender) -> Write | None:
    """Return a write into a view as one into what the view shows; None where it cannot be said."""
    kind = "put" if isinstance(write, RowWrite) else "window"
    return _THROUGH[kind, step.op](write, step, emit)


def _permuted(emit: Appender, x: str, order: Sequence[int]) -> str:
    is_same = [*order] == [*range(len(order))]
    return x if is_same else emit("permute", x, dims=tuple(order))


# -- windows -------------------------------------------------------------------------------------


def _window_permuted(write: SliceWrite, step: ViewStep, emit: Appender) -> Write:
    order = sorted(range(len(step.dims)), key=step.dims.__getitem__)
    starts, steps = (tuple(x[d] for d in order) for x in (write.starts, write.steps))
    return SliceWrite(_permuted(emit, write.source, order), starts, steps)


def _window_sliced(write: SliceWrite, step: ViewStep, emit: Appender) -> Write:
    pairs = [*zip(step.starts, step.steps, write.starts, write.steps, strict=True)]
    starts = tuple(first + by * start for first, by, start, _ in pairs)
    return SliceWrite(write.source, starts, tuple(by * pace for _, by, _, pace in pairs))


def _window_reshaped(write: SliceWrite, step: ViewStep, emit: Appender) -> Write | None:
    """Move a window through a reshape that keeps the dims which it cuts."""
    shape = emit.shape(write.source)
    source, starts, steps = [*step.before], [0] * len(step.before), [1] * len(step.before)
    whole = {d for d, n in enumerate(shape) if are_same(n, step.after[d])}
    cut = {*range(len(shape))} - whole
    for old, new in reshape_groups(step.before, step.after):
        (*_, d), is_kept = new, cut.isdisjoint(new)
        if is_kept:
            continue
        long = [k for k in old if not are_same(step.before[k], 1)]
        wide = [k for k in new if not are_same(step.after[k], 1)]
        if len(long) != 1 or len(wide) != 1 or not cut.intersection(new) <= {*wide}:
            return None
        (k,), (d,) = long, wide
        source[k], starts[k], steps[k] = shape[d], write.starts[d], write.steps[d]
        cut.discard(d)
    if cut:
        return None
    reshaped = emit("reshape", write.source, shape=tuple(source))
    return SliceWrite(reshaped, tuple(starts), tuple(steps))


# -- indices -------------------------------------------------------------------------------------


def _put_permuted(write: RowWrite, step: ViewStep, emit: Appender) -> Write:
    others = [step.dims[d] for d in range(len(step.dims)) if d not in write.at]
    order = sorted(range(len(others)), key=others.__getitem__)
    source = _permuted(emit, write.source, (0, *(1 + d for d in order)))
    return replace(write, at={step.dims[d]: i for d, i in write.at.items()}, source=source)


def _put_sliced(write: RowWrite, step: ViewStep, emit: Appender) -> Write:
    for d, (n, m) in enumerate(zip(step.before, step.after, strict=True)):
        if are_same(n, m) and are_same(step.starts[d], 0):
            continue
        if d not in write.at and are_same(m, 1):
            write = _with_place(write, d, step.starts[d], step.after, emit)
            continue
        if d in write.at:
            index = _in_range(write, d, m, emit)
        else:
            write = _with_all(write, d, step.after, emit)
            index = write.at[d]
        if not are_same(step.steps[d], 1):
            index = emit("mul", index, step.steps[d])
        if not are_same(step.starts[d], 0):
            index = emit("add", index, step.starts[d])
        write = replace(write, at={**write.at, d: index})
    return write


def _in_range(write: RowWrite, dim: int, n: int, emit: Appender) -> str:
    """Return indices from 0 on; those out of range stay so wherever they are counted from."""
    index = write.at[dim]
    if write.from_end:
        index = emit("where", emit("lt", index, 0), emit("add", index, n), index)
    is_wrong = emit("logical_or", emit("lt", index, 0), emit("ge", index, n))
    return emit("where", is_wrong, OUT_OF_RANGE, index)


def _with_place(write: RowWrite, dim: int, place: int, shape: Shape, emit: Appender) -> RowWrite:
    """Index a dim of one place by a number."""
    count = emit.shape(write.source)[0]
    others = [d for d in range(len(shape)) if d not in write.at and d != dim]
    source = emit("reshape", write.source, shape=(count, *(shape[d] for d in others)))
    index = emit("full", place, shape=(count,), dtype=torch.int64)
    return replace(write, at={**write.at, dim: index}, source=source)


def _with_all(write: RowWrite, dim: int, shape: Shape, emit: Appender) -> RowWrite:
    """Index a dim that is written whole: each place of it for each of the indices."""
    count, m = emit.shape(write.source)[0], shape[dim]
    others = [d for d in range(len(shape)) if d not in write.at]
    place = 1 + others.index(dim)
    order = (0, place, *(d for d in range(1, 1 + len(others)) if d != place))
    behind = tuple(shape[d] for d in others if d != dim)
    source = _permuted(emit, write.source, order)
    source = emit("reshape", source, shape=(count * m, *behind))

    def repeated(index: str, form: Shape) -> str:
        wide = emit("expand", emit("reshape", index, shape=form), shape=(count, m))
        return emit("reshape", wide, shape=(count * m,))

    at = {d: repeated(i, (count, 1)) for d, i in write.at.items()}
    at[dim] = repeated(emit.range(m), (1, m))
    return replace(write, at=at, source=source)


def _put_reshaped(write: RowWrite, step: ViewStep, emit: Appender) -> Write | None:
    groups = reshape_groups(step.before, step.after) if 0 not in step.before else []
    covered = {d for _, new in groups for d in new}
    if any(d not in covered for d in write.at):
        return None
    for _, new in groups:
        if any(d in write.at for d in new):
            for d in new:
                if d not in write.at and not are_same(step.after[d], 1):
                    write = _with_all(write, d, step.after, emit)
    at: dict[int, str] = {}
    for old, new in groups:
        indexed = [d for d in new if d in write.at]
        long = [k for k in old if not are_same(step.before[k], 1)]
        if indexed and not long:
            return None
        if indexed:
            at |= _split(_merged(write, indexed, long, step, emit), long, step, emit)
    count = emit.shape(write.source)[0]
    others = tuple(n for d, n in enumerate(step.before) if d not in at)
    source = emit("reshape", write.source, shape=(count, *others))
    return replace(write, at=at, source=source)


def _merged(
    write: RowWrite, dims: Sequence[int], old: Sequence[int], step: ViewStep, emit: Appender
) -> str:
    """Return the index into the dims as one."""
    if len(dims) == len(old) == 1:
        return write.at[dims[0]]
    merged: str | None = None
    for d in dims:
        index = _in_range(write, d, step.after[d], emit)
        if merged is None:
            merged = index
            continue
        is_wrong = emit("logical_or", emit("ge", merged, OUT_OF_RANGE // 2),
                        emit("ge", index, OUT_OF_RANGE // 2))  # fmt: skip
        joined = emit("add", emit("mul", merged, step.after[d]), index)
        merged = emit("where", is_wrong, OUT_OF_RANGE, joined)
    assert merged is not None
    return merged


def _split(index: str, dims: Sequence[int], step: ViewStep, emit: Appender) -> dict[int, str]:
    """Return the index of each dim, from that into all of them as one."""
    at = {}
    for d in reversed(dims[1:]):
        at[d] = emit("remainder", index, step.before[d])
        index = emit("floor_divide", index, step.before[d])
    at[dims[0]] = index
    return {d: at[d] for d in dims}


_THROUGH: dict[tuple[str, str], Callable[[Any, ViewStep, Appender], Write | None]] = {
    ("window", "permute"): _window_permuted,
    ("window", "slice"): _window_sliced,
    ("window", "reshape"): _window_reshaped,
    ("put", "permute"): _put_permuted,
    ("put", "slice"): _put_sliced,
    ("put", "reshape"): _put_reshaped,
}
