"""Rewrite ops that need a dim whole which is split, so that fewer bytes travel.

    %y: f32[8,64] (tp=R) = log_softmax(%x, dim=1)                   # %x is (tp=S1)
    %z: f32[8,1] (tp=R) = slice(%x, starts=[0,63], ends=[8,64], steps=[1,1])
->
    %m: f32[8,1] (tp=P(max)) = max(%x, dims=[1], keepdim=True)
    %d: f32[8,64] (tp=S1) = sub(%x, %m)
    %e: f32[8,64] (tp=S1) = exp(%d)
    %s: f32[8,1] (tp=P(sum)) = sum(%e, dims=[1], keepdim=True)
    %l: f32[8,1] (tp=R) = log(%s)
    %y: f32[8,64] (tp=S1) = sub(%d, %l)
    %z: f32[8,1] (tp=P(sum)) = window(%x, reduce=sum, starts=[0,63], ends=[8,64], steps=[1,1])

This is done where it takes less than half the bytes of bringing the operand together, no other
expression needs the operand whole, and the result may stay split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Partial, Replicate
from mdfuse.passes.rewriting import Maker, Rule, laid_out
from mdfuse.passes.strategy import choose
from mdfuse.reshard import cost

name = "keep_splits"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with these ops rewritten wherever that moves fewer bytes."""
    while rules := {e.output: _RULES[e.op] for e in (*_split_rows(fusion), *_windows(fusion))}:
        fusion = laid_out(fusion, rules)
    return fusion


# -- which ---------------------------------------------------------------------------------------


def _split_rows(fusion: Fusion) -> Iterator[Expr]:
    """Yield softmaxes and norms to rewrite: their operand is split along dims that they reduce."""
    for expr in fusion.exprs:
        if expr.op not in _REDUCED_DIMS or fusion.values[expr.output].stream is not None:
            continue
        value, layout = fusion.values[expr.reads[0]], fusion.layout(expr.reads[0])
        dims = _REDUCED_DIMS[expr.op](expr, len(value.shape))
        axes = [a for d in dims for a in layout.split_axes(d)]
        if not axes or 0 in value.shape or value.expanded:
            continue
        kept_shape = tuple(1 if d in dims else n for d, n in enumerate(value.shape))
        whole = with_placements(layout, axes, Replicate())
        each = cost(with_placements(layout, axes, Partial()), whole, kept_shape) * max(
            value.dtype.itemsize, 4
        )
        is_less = 2 * 2 * each < cost(layout, whole, value.shape) * value.dtype.itemsize
        if is_less and may_stay(fusion, expr, dims) and not is_gathered(fusion, value, axes):
            yield expr


def may_stay(fusion: Fusion, expr: Expr, dims: Sequence[int]) -> bool:
    """Return whether the result may be split as the operand is, by its law or by its readers."""
    out, layout = fusion.values[expr.output], fusion.layout(expr.reads[0])
    if out.is_law or out.name in fusion.reuse:
        goal = fusion.layout(out.name)
        return goal.mesh == layout.mesh and all(
            goal.split_axes(d) == layout.split_axes(d) for d in dims
        )
    split = fusion.with_layouts({out.name: layout})
    wanted = [_wanted(split, reader, out.name) for reader in fusion.consumers[out.name]]
    return all(w.split_axes(d) == layout.split_axes(d) for w in wanted for d in dims)


def _windows(fusion: Fusion) -> Iterator[Expr]:
    """Yield slices to rewrite: they cut split dims, and joining their windows takes less."""
    for value in fusion.values.values():
        readers = fusion.consumers.get(value.name, ())
        slices = [e for e in readers if e.op == "slice" and _cut_axes(fusion, e)]
        if not slices or value.expanded or 0 in value.shape:
            continue
        layout = fusion.layout(value.name)
        axes = [*dict.fromkeys(a for e in slices for a in _cut_axes(fusion, e))]
        whole = (
            cost(layout, with_placements(layout, axes, Replicate()), value.shape)
            * value.dtype.itemsize
        )
        prices = [_price_of_window(fusion, e) for e in slices]
        if any(p is None for p in prices) or is_gathered(fusion, value, axes):
            continue
        if 2 * sum(p for p in prices if p is not None) < whole:
            yield from slices


def _cut_axes(fusion: Fusion, expr: Expr) -> tuple[str, ...]:
    """Return the axes that split the operand's sliced dims, not in blocks."""
    layout = fusion.layout(expr.reads[0])
    (labels,) = (
        TABLE["slice"]
        .rule([fusion.values[expr.reads[0]].shape], fusion.values[expr.output].shape, expr.kwargs)
        .operands
    )
    cut = [d for d, x in enumerate(labels) if x is None and d not in layout.blocked]
    return tuple(a for d in cut for a in layout.split_axes(d))


def _price_of_window(fusion: Fusion, expr: Expr) -> int | None:
    """Return the bytes to bring ranks' windows together; None if no two ranks have windows.

    Along some axes the operand may be gathered instead, beside the splits of the others.
    """
    out = fusion.values[expr.output]
    if out.stream is not None:
        return None
    law = out.layout if out.is_law else None
    # Windows of the other slices replace the copies that these need.
    operand = replace(fusion.values[expr.reads[0]], copies=())
    strategy = choose(_window(expr, out), {operand.name: operand, out.name: out}, law)
    axes = _cut_axes(fusion, expr)
    if strategy is None or not set(axes) & set(strategy.result.partial_axes):
        return None
    goal = law or with_placements(strategy.result, axes, Replicate())
    moved = cost(fusion.layout(operand.name), strategy.wanted[operand.name], operand.shape)
    return (moved + cost(strategy.result, goal, out.shape)) * out.dtype.itemsize


def is_gathered(
    fusion: Fusion, value: Value, axes: Sequence[str], but: Collection[str] = ()
) -> bool:
    """True if an expression, but of some ops, reads a value whole along one of these axes."""
    for reader in fusion.consumers[value.name]:
        if reader.op not in (but or _RULES) and fusion.values[reader.outputs[0]].is_tensor:
            wanted = _wanted(fusion, reader, value.name)
            if wanted.mesh == fusion.layout(value.name).mesh and any(
                isinstance(wanted.placement(a), Replicate) for a in axes
            ):
                return True
    return False


def _wanted(fusion: Fusion, expr: Expr, value: str) -> Layout:
    """Return the layout in which an expression reads a value: for a set with a law, the law's."""
    outputs = [fusion.values[name] for name in expr.outputs]
    if expr.op == "set" and outputs[0].is_law:
        return fusion.layout(expr.output)
    strategy = choose(expr, fusion.values, *(out.layout if out.is_law else None for out in outputs))
    assert strategy is not None
    return strategy.wanted[value]


def with_placements(layout: Layout, axes: Sequence[str], placement: Partial | Replicate) -> Layout:
    for axis in (*layout.partial_axes, *axes):
        layout = layout.with_placement(axis, placement if axis in axes else Replicate())
    return layout


# -- by what -------------------------------------------------------------------------------------


def _operand(maker: Maker, by: Expr) -> str:
    """Return the operand, first resharded to the result's law where there is one."""
    x, out = by.reads[0], maker.values[by.output]
    if out.layout is None or not out.is_law or out.layout == maker.values[x].layout:
        return x
    copy = maker.op(by, "set", x)
    maker.values[copy] = replace(maker.values[copy], layout=out.layout)
    return copy


def _softmax(maker: Maker, by: Expr) -> None:
    """Replace a softmax by exp(x - max) / sum, its logarithm by x - max - log(sum)."""
    x = _operand(maker, by)
    over: dict[str, Any] = {"dims": _row_dims(by, len(maker.values[x].shape)), "keepdim": True}
    top = maker.op(by, "max", x, **over)
    distance = maker.op(by, "sub", maker.wide(by, x), top)
    powers = maker.op(by, "exp", distance)
    total = maker.op(by, "sum", powers, **over)
    if by.op == "softmax":
        maker.result(by, "div", powers, total)
    else:
        maker.result(by, "sub", distance, maker.op(by, "log", total))


def _layer_norm(maker: Maker, by: Expr) -> None:
    """Replace a layer norm by (x - mean) / sqrt(variance + eps) * weight + bias."""
    x, (weight, bias) = _operand(maker, by), (*by.inputs[1:], None, None)[:2]
    over: dict[str, Any] = {"dims": _last_dims(by, len(maker.values[x].shape)), "keepdim": True}
    wide = maker.wide(by, x)
    distance = maker.op(by, "sub", wide, maker.op(by, "mean", wide, **over))
    power = maker.op(by, "mean", maker.op(by, "mul", distance, distance), **over)
    scale = maker.op(by, "rsqrt", maker.op(by, "add", power, by.kwargs["eps"]))
    steps = [("mul", scale), *(("mul", w) for w in (weight,) if w is not None)]
    steps += [("add", b) for b in (bias,) if b is not None]
    result = distance
    for op, operand in steps[:-1]:
        result = maker.op(by, op, result, operand)
    maker.result(by, steps[-1][0], result, steps[-1][1])


def _rms_norm(maker: Maker, by: Expr) -> None:
    """Replace an RMS norm by x / sqrt(mean square + eps) * weight."""
    x, weight = _operand(maker, by), by.inputs[1]
    over: dict[str, Any] = {"dims": _last_dims(by, len(maker.values[x].shape)), "keepdim": True}
    wide = maker.wide(by, x)
    power = maker.op(by, "mean", maker.op(by, "mul", wide, wide), **over)
    scale = maker.op(by, "rsqrt", maker.op(by, "add", power, by.kwargs["eps"]))
    if weight is None:
        maker.result(by, "mul", wide, scale)
    else:
        maker.result(by, "mul", maker.op(by, "mul", wide, scale), weight)


def _window(expr: Expr, out: Value) -> Expr:
    """Return the `window` for a slice: each rank's part of it in zeros, to be reduced."""
    reduce = "bor" if out.dtype == torch.bool else "sum"
    return replace(expr, op="window", attrs=(("reduce", reduce), *expr.attrs))


def _slice(maker: Maker, by: Expr) -> None:
    maker.exprs.append(_window(by, maker.values[by.output]))


def _row_dims(expr: Expr, ndim: int) -> tuple[int, ...]:
    return (expr.kwargs["dim"] % ndim,) if ndim else ()


def _last_dims(expr: Expr, ndim: int) -> tuple[int, ...]:
    return tuple(range(ndim - len(expr.kwargs["normalized_shape"]), ndim))


#: op -> the dims over which it reduces inside.
_REDUCED_DIMS: dict[str, Callable[[Expr, int], tuple[int, ...]]] = {
    "softmax": _row_dims,
    "log_softmax": _row_dims,
    "layer_norm": _last_dims,
    "rms_norm": _last_dims,
}

#: op -> the rule that replaces it.
_RULES: dict[str, Rule] = {
    "softmax": _softmax,
    "log_softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "slice": _slice,
}
