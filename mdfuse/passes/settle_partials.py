"""Decide where a Partial is reduced: once, if several expressions read it.

    %p: f32[8,16] (tp=P(sum)) = linear(%x, %w)      # read by the first mul, and by the second
    %s: f32[8,16] (tp=R) = mul(%p, %p)              # needs %p whole
    %y: f32[8,16] (tp=P(sum)) = mul(%p, %r)         # would pass it on
->
    %p: f32[8,16] (tp=R) = linear(%x, %w)
    %s: f32[8,16] (tp=R) = mul(%p, %p)
    %y: f32[8,16] (tp=R) = mul(%p, %r)

An expression that may take a Partial as it is passes it on, which costs nothing where it is the
only reader. Where there are several, what each passes on is reduced by itself. So for each value,
from the last to the first, the bytes of reducing it at once are compared with those of later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.layouts.layout import Layout, Placement, Replicate
from mdfuse.mesh import DeviceMesh
from mdfuse.passes.insert_reshards import suffix
from mdfuse.passes.propagate_layouts import anew
from mdfuse.passes.strategy import choose_here
from mdfuse.reshard import cost

name = "settle_partials"


@dataclass(frozen=True)
class _Flow:
    """What becomes of a Partial along an axis, if it stays one.

    Attributes:
        ends: the values that are reduced in the end, with the bytes that it takes.
        passed: the values that are Partial only because it is.
        beside: other Partials that expressions take together with it, or with what is passed on.
    """

    ends: dict[str, int] = field(default_factory=dict)
    passed: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()


@dataclass
class _Sweep:
    """What a pass over the Partials of a fusion has found and decided so far."""

    fusion: Fusion
    #: (value, axis) -> what becomes of it.
    flows: dict[tuple[str, str], _Flow] = field(default_factory=dict)
    #: value -> the layout that it should have instead.
    settled: dict[str, Layout] = field(default_factory=dict)


def run(fusion: Fusion) -> Fusion:
    """Return the fusion in which inferred values are Partial only where that pays."""
    done: set[str] = set()
    while True:
        sweep = _Sweep(fusion)
        for value in reversed((*fusion.inputs, *(n for e in fusion.exprs for n in e.outputs))):
            layout = fusion.values[value].layout
            if layout is not None and value not in done:
                _settle(sweep, value, layout)
        if not sweep.settled:
            return fusion
        done |= sweep.settled.keys()
        fusion = _applied(fusion, sweep.settled)


def _settle(sweep: _Sweep, value: str, layout: Layout) -> None:
    """Decide along each Partial axis of a value whether it is reduced at once or later."""
    if not layout.partial_axes:
        return
    readers = {
        r.outputs[0]: _wanted(sweep.fusion, r, value) for r in _free_readers(sweep.fusion, value)
    }
    for axis in layout.partial_axes:
        goals = {g for g in readers.values() if axis not in g.partial_axes}
        flow = _flow(sweep, value, [r for r in readers if readers[r] not in goals], axis)
        to = _common(goals, layout.mesh, axis)
        here = _price(sweep.fusion, value, axis, to)
        read = [_price(sweep.fusion, value, axis, _common({g}, layout.mesh, axis)) for g in goals]
        beside = [_price(sweep.fusion, u, axis, Replicate()) for u in flow.beside]
        later = [*flow.ends.values(), *read]
        if len(readers) > 1 and (here + sum(beside), 1 + len(beside)) < (sum(later), len(later)):
            settled = sweep.settled.get(value, layout)
            sweep.settled[value] = settled.with_placement(axis, to)
            flow = _Flow()
        if goals or not flow.ends:
            flow = replace(flow, ends={**flow.ends, value: here})
        sweep.flows[value, axis] = flow


def _flow(sweep: _Sweep, value: str, readers: Sequence[str], axis: str) -> _Flow:
    """Return what becomes of the Partial that some readers pass on."""
    fusion, found = sweep.fusion, _Flow()
    for name in readers:
        expr = fusion.producers[name]
        others = {x for x in expr.reads if _is_partial(fusion, x, axis) and x != value}
        after = sweep.flows.get((name, axis)) or _Flow({name: _price_of_result(fusion, expr, axis)})
        found = _Flow(
            ends={**found.ends, **after.ends},
            passed=found.passed | after.passed | {name},
            beside=found.beside | after.beside | {x for x in others if x not in sweep.settled},
        )
    return replace(found, beside=found.beside - found.passed - {value})


def _is_partial(fusion: Fusion, value: str, axis: str) -> bool:
    return fusion.values[value].is_tensor and axis in fusion.layout(value).partial_axes


def _free_readers(fusion: Fusion, value: str) -> Iterator[Expr]:
    """Yield the readers, except for those whose result the user wants Partial."""
    readers = fusion.consumers[value]
    return (r for r in readers if not any(_is_wanted(fusion, name) for name in r.outputs))


def _is_wanted(fusion: Fusion, value: str) -> bool:
    """Whether the user wants the value Partial: by a law, or in the place of a Partial input."""
    is_fixed = fusion.values[value].is_law or value in fusion.outputs
    return is_fixed and bool(fusion.layout(value).partial_axes)


def _price_of_result(fusion: Fusion, expr: Expr, axis: str) -> int:
    """Return the bytes it takes to reduce what an expression yields into its result's layout."""
    out, layout = fusion.values[expr.output], fusion.layout(expr.output)
    strategy = choose_here(expr, fusion.values)
    assert strategy is not None
    return _bytes(out, strategy.result, axis, _common({layout}, strategy.result.mesh, axis))


def _price(fusion: Fusion, value: str, axis: str, to: Placement) -> int:
    """Return the bytes it takes to reduce a value along an axis."""
    return _bytes(fusion.values[value], fusion.layout(value), axis, to)


def _bytes(value: Value, layout: Layout, axis: str, to: Placement) -> int:
    shape, (before, after) = value.travels(layout, layout.with_placement(axis, to))
    return cost(before, after, shape) * value.dtype.itemsize


def _wanted(fusion: Fusion, expr: Expr, value: str) -> Layout:
    """Return the layout in which an expression reads a value; for a set, that of its result."""
    if expr.op == "set":
        return fusion.layout(expr.output)
    strategy = choose_here(expr, fusion.values)
    assert strategy is not None
    return strategy.wanted[value]


def _common(goals: set[Layout], mesh: DeviceMesh, axis: str) -> Placement:
    """Return the placement along an axis that all goals want; Replicate where they differ."""
    found = {g.placement(axis) if g.mesh == mesh else Replicate() for g in goals}
    return found.pop() if len(found) == 1 else Replicate()


def _applied(fusion: Fusion, settled: dict[str, Layout]) -> Fusion:
    """Return the fusion with these values reduced; in a copy where the user wants Partial."""
    layouts: dict[str, Layout] = {}
    copies = set()
    for value, layout in settled.items():
        free = [*_free_readers(fusion, value)]
        if _is_wanted(fusion, value) or len(free) < len(fusion.consumers[value]):
            fusion, copy = _with_copy(fusion, value, layout, free)
            copies.add(copy)
        else:
            layouts[value] = layout
    return anew(fusion.with_layouts(layouts), copies | layouts.keys())


def _with_copy(
    fusion: Fusion, value: str, layout: Layout, readers: Sequence[Expr]
) -> tuple[Fusion, str]:
    """Return the fusion in which some readers read a copy in another layout, and its name."""
    copy = fresh_name(fusion.values, f"{value}.{suffix(layout)}")
    of = replace(fusion.values[value], name=copy, layout=layout, stream=None, is_law=False)
    made = Expr(op="set", inputs=(value,), outputs=(copy,), source=readers[0].source)
    exprs: list[Expr] = []
    for expr in fusion.exprs:
        if expr is readers[0]:
            exprs.append(made)
        exprs.append(_reading(expr, value, copy) if expr in readers else expr)
    values = {**fusion.values, copy: replace(of, order_from="op")}
    return replace(fusion, values=values, exprs=tuple(exprs)), copy


def _reading(expr: Expr, old: str, new: str) -> Expr:
    """Return the expression with another operand."""
    return replace(expr, inputs=tuple(new if x == old else x for x in expr.inputs))
