"""Let rows that fill a batch up write nothing: their indices are dropped.

    %i0 = floor_divide(%pos, 16)                    %i0 = floor_divide(%pos, 16)
    %n = index_copy(%i0, %s, %c, along=0)   ->      %j = where(%is_row, %i0, -4611686018427387904)
                                                    %n = index_copy(%j, %s, %c, along=0, drops=True)

A run of five rows takes the plan of eight: three rows are computed that nobody asked for. That is
right where each row of each output follows from one row of each input, which labels tell: the
label of the dim is one of all results, and never reduced. Else the op is refused, with its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mdfuse.errors import LoweringError
from mdfuse.extents.assumptions import Assumptions, assuming
from mdfuse.extents.extent import Extent, are_same
from mdfuse.ir.dims import Labels
from mdfuse.ir.element_writes import NOWHERE
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.symbolic import with_new_examples
from mdfuse.passes.rewriting import Maker, rewritten
from mdfuse.passes.strategy import dim_map

name = "drop_rows"

#: The ops whose indices may be dropped.
_WRITES = ("index_copy", "index_put", "scatter")

_HINT = "leave the size out of Options(sizes=...): then each size has a program of its own"


def run(fusion: Fusion, masks: Mapping[str, str]) -> Fusion:
    """Return the fusion with rows dropped.

    Args:
        fusion: without layouts that were inferred.
        masks: symbol -> the input that says which rows of it are there.

    Raises:
        LoweringError: rows are not independent of each other.
    """
    with assuming(Assumptions()):
        several = _of_several(fusion, masks)
        for symbol in masks:
            _check_values(several, symbol)
        for expr in several.exprs:
            for symbol in masks:
                _check(several, expr, symbol)
    rules = {
        e.outputs[0]: partial(_drop, masks=masks)
        for e in fusion.exprs
        if e.op in _WRITES and any(_dims(fusion.values[x], s) for x in e.reads[:-1] for s in masks)
    }
    return rewritten(fusion, rules)


def _of_several(fusion: Fusion, masks: Mapping[str, str]) -> Fusion:
    """Return the fusion with examples of several rows: dims of one row have no label in places."""
    extents = [n for x in fusion.values.values() for n in x.shape if isinstance(n, Extent)]
    examples = {s: number for n in extents for s, number in n.examples.items()}
    if all(examples.get(s, 2) > 1 for s in masks):
        return fusion
    return with_new_examples(
        fusion, {s: max(n, 2) if s in masks else n for s, n in examples.items()}
    )


def depends(n: object, symbol: str) -> bool:
    """Return whether an extent depends on a symbol."""
    return isinstance(n, Extent) and symbol in n.poly.symbols()


def _dims(value: Value, symbol: str) -> list[int]:
    return [d for d, n in enumerate(value.shape) if depends(n, symbol)]


def _check_values(fusion: Fusion, symbol: str) -> None:
    """Refuse values of which the rows that are there are not the first ones, and such states."""
    for name, value in fusion.values.items():
        dims = _dims(value, symbol)
        if len(dims) > 1:
            raise _refusal(f"%{name} has {symbol} in the dims {dims}", "rows are those of one dim",
                           value)  # fmt: skip
        if dims and name in fusion.reuse.values():
            because = "a state has one size in all runs"
            raise _refusal(f"the state %{name} has the dim {symbol} itself", because, value)


def _refusal(what: str, because: str, at: Value | Expr) -> LoweringError:
    where = at.source.quote() if at.source else ()
    return LoweringError(f"sizes: {what}", where=where, because=because, hint=_HINT)


def _check(fusion: Fusion, expr: Expr, symbol: str) -> None:
    """Refuse an expression that mixes rows, or takes their number."""
    if any(depends(x, symbol) for x in expr.inputs):
        raise _refusal(f"{expr.op} computes with {symbol}", "it is more where rows are filled up",
                       expr)  # fmt: skip
    labels = dim_map(expr, fusion.values)
    for at, (x, of) in enumerate(zip(expr.inputs, labels.operands, strict=True)):
        if not isinstance(x, str) or not fusion.values[x].is_tensor:
            continue
        is_written = expr.op in _WRITES and at < len(expr.inputs) - 1
        for d in _dims(fusion.values[x], symbol):
            if _is_by_row(of, d, labels.results) or (is_written and of[d] is None):
                continue
            because = f"dim {d} of %{x} is {symbol}, and its rows are not independent of each other"
            raise _refusal(f"{expr.op} reads all rows at once", because, expr)


def _is_by_row(of: Labels, dim: int, results: tuple[Labels, ...]) -> bool:
    return of[dim] is not None and all(of[dim] in labels for labels in results)


def _drop(maker: Maker, expr: Expr, masks: Mapping[str, str]) -> None:
    """Append a write whose indices are nowhere where there is no row."""
    count = len(expr.inputs) - 2
    at = list(expr.inputs[:count])
    for symbol, mask in masks.items():
        for n, index in enumerate(at):
            shape = maker.values[str(index)].shape
            dims = _dims(maker.values[str(index)], symbol)
            if dims:
                wide = _spread(maker, expr, mask, shape, dims[0])
                at[n] = maker.op(expr, "where", wide, index, NOWHERE)
    attrs = {**expr.kwargs, "drops": True}
    maker.op(expr, expr.op, *at, *expr.inputs[count:], last=True, **attrs)


def _spread(maker: Maker, expr: Expr, mask: str, shape: tuple[int, ...], dim: int) -> str:
    """Return the mask of rows for a dim that merges rows with dims behind them."""
    (rows,) = maker.values[mask].shape
    if not are_same(shape[dim], rows):
        each = shape[dim] // rows
        column = maker.op(expr, "reshape", mask, shape=(rows, 1))
        wide = maker.op(expr, "expand", column, shape=(rows, each))
        mask = maker.op(expr, "reshape", wide, shape=(shape[dim],))
    behind = (1,) * (len(shape) - 1 - dim)
    return maker.op(expr, "reshape", mask, shape=(shape[dim], *behind)) if behind else mask
