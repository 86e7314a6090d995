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

A factor is multiplied into the sum, not into its terms, which it might round, or make overflow:

    %y: f32[8,16] (tp=P(sum)) = mul(%p, %r)         # the only reader
->
    %y: f32[8,16] (tp=R) = mul(%p, %r)              # of %p, reduced

unless the terms take fewer bytes behind it, as where they are added up further.

What is added to a Partial becomes one first, where that takes no more bytes; see `cheap_operands`,
which decides anew behind what is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mdfuse.ir.graph import Expr, Fusion, fresh_name
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, Shard
from mdfuse.mesh import DeviceMesh
from mdfuse.passes import reduce_scatter_creation
from mdfuse.passes.insert_reshards import suffix
from mdfuse.passes.prices import brought_cost, move_cost
from mdfuse.passes.propagate_layouts import anew
from mdfuse.passes.sharded import cheap_operands
from mdfuse.passes.strategy import choose_laid, read_layouts, strategy_of

name = "settle_partials"


@dataclass(frozen=True)
class _LaterUses:
    """The later uses of a Partial that is not reduced at once along an axis.

    Attributes:
        ends: the values that are reduced in the end, or gathered beside it, with the bytes of each.
        passed: the values that are Partial only because it is.
        beside: other Partials that expressions take together with it, or with what is passed on.
    """

    ends: dict[str, int] = field(default_factory=dict)
    passed: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()


@dataclass
class _Sweep:
    """The decisions of a pass over the Partials of a fusion so far."""

    fusion: Fusion
    #: the fusion as `reduce_scatter_creation` would have it: which layouts readers want.
    pushed: Fusion
    #: (value, axis) -> its later uses.
    flows: dict[tuple[str, str], _LaterUses] = field(default_factory=dict)
    #: (value, axis) -> the placement in which what becomes of it would have it; None: any.
    goals: dict[tuple[str, str], Placement | None] = field(default_factory=dict)
    #: (value, axis) -> the bytes to reduce it whole: each term of a sum asks for all others.
    whole: dict[tuple[str, str], int] = field(default_factory=dict)
    #: value -> the layout that it should have instead.
    settled: dict[str, Layout] = field(default_factory=dict)


def run(fusion: Fusion) -> Fusion:
    """Return the fusion in which inferred values are Partial only where that pays."""
    done: set[str] = set()
    while True:
        before = fusion
        fusion = cheap_operands.with_terms(fusion)
        done = {x for x in done if fusion.values[x].layout == before.values[x].layout}
        sweep = _Sweep(fusion, reduce_scatter_creation.run(fusion))
        for value in reversed((*fusion.inputs, *fusion.producers)):
            layout = fusion.values[value].layout
            if layout is not None and value not in done:
                _settle(sweep, value, layout)
        if not sweep.settled:
            return fusion
        done |= sweep.settled.keys()
        fusion = cheap_operands.run(_applied(fusion, sweep.settled))


def _settle(sweep: _Sweep, value: str, layout: Layout) -> None:
    """Decide along each Partial axis of a value whether it is reduced at once or later."""
    if not layout.partial_axes:
        return
    readers = {
        r.outputs[0]: read_layouts(r, sweep.pushed)[value]
        for r in _free_readers(sweep.fusion, value)
    }
    for axis in layout.partial_axes:
        goals = {g for g in readers.values() if axis not in g.partial_axes}
        passing = [r for r in readers if readers[r] not in goals]
        flow = _flow(sweep, value, passing, axis)
        sweep.goals[value, axis] = _goal(sweep, value, axis, goals, passing)
        is_factor = any(_is_factor(sweep.fusion, r) for r in passing)
        to = sweep.goals[value, axis] if is_factor else None
        to = to or _common(goals, layout.mesh, axis)
        price_here = _price(sweep.fusion, value, axis, to)
        read = [_price(sweep.fusion, value, axis, _common({g}, layout.mesh, axis)) for g in goals]
        for u in flow.beside - {u for u, of in sweep.whole if of == axis}:
            sweep.whole[u, axis] = _price(sweep.fusion, u, axis, Replicate())
        beside = [sweep.whole[u, axis] for u in flow.beside]
        later = [*flow.ends.values(), *read]
        price = price_here + sum(beside), 1 + len(beside)
        is_less = len(readers) > 1 and price < (sum(later), len(later))
        if is_less or (is_factor and price <= (sum(later), len(later))):
            settled = sweep.settled.get(value, layout)
            sweep.settled[value] = settled.with_placement(axis, to)
            for result in flow.passed:  # no Partial along the axis then: the next sweep decides
                sweep.settled.pop(result, None)
            flow = _LaterUses({value: price_here})
        elif goals or _ends_here(sweep.fusion, value, axis):
            flow = replace(flow, ends={**flow.ends, value: price_here})
        sweep.flows[value, axis] = flow


def _is_factor(fusion: Fusion, result: str) -> bool:
    """Return whether a result is a product that is rounded: integers are not."""
    dtype = fusion.values[result].dtype
    is_rounded = dtype.is_floating_point or dtype.is_complex
    return is_rounded and TABLE[fusion.producers[result].op].partial == "factor"


def _goal(
    sweep: _Sweep, value: str, axis: str, goals: set[Layout], passing: Sequence[str]
) -> Placement | None:
    """Return the placement along an axis that all readers want; None if any will do.

    Sums take it however it is split. Where readers differ, it is whole.
    """
    producers, mesh = sweep.fusion.producers, sweep.fusion.layout(value).mesh
    others = (r for r in passing if TABLE[producers[r].op].partial != "reduce")
    asked = {_behind(sweep, value, r, axis) for r in others} - {None}
    asked |= {_common({g}, mesh, axis) for g in goals}
    return asked.pop() if len(asked) == 1 else Replicate() if asked else None


def _behind(sweep: _Sweep, value: str, result: str, axis: str) -> Placement | None:
    """Return the placement of a reduced value that fits the later uses of a result."""
    fusion, expr = sweep.pushed, sweep.pushed.producers[result]
    before, after = fusion.layout(value), fusion.layout(result)
    if after.mesh != before.mesh:  # it is added up before it leaves the mesh
        return Replicate()
    to = sweep.goals.get((result, axis), after.placement(axis))
    if to is None:
        return None
    reduced = before.with_placement(axis, Replicate()), after.with_placement(axis, to)
    strategy = choose_laid(expr, fusion.values, {value: reduced[0], result: reduced[1]})
    assert strategy is not None
    return _common({strategy.wanted[value]}, before.mesh, axis)


def _flow(sweep: _Sweep, value: str, readers: Sequence[str], axis: str) -> _LaterUses:
    """Return the later uses of the Partial that some readers pass on."""
    fusion, flow = sweep.fusion, _LaterUses()
    for name in readers:
        expr = fusion.producers[name]
        placements = {x: _placement(fusion, x, axis) for x in {*expr.reads} - {value}}
        others = {x for x, p in placements.items() if isinstance(p, Partial)}
        stays = fusion.layout(name).mesh == fusion.layout(value).mesh
        after = sweep.flows.get((name, axis)) if stays else None
        after = after or _LaterUses({name: _price_of_result(fusion, expr, axis)})
        split = [x for x, p in placements.items() if isinstance(p, Shard)]
        gathered = {x: _price(fusion, x, axis, Replicate()) for x in split}
        flow = _LaterUses(
            ends={**flow.ends, **after.ends, **gathered},
            passed=flow.passed | after.passed | {name},
            beside=flow.beside | after.beside | {x for x in others if x not in sweep.settled},
        )
    return replace(flow, beside=flow.beside - flow.passed - {value})


def _placement(fusion: Fusion, value: str, axis: str) -> Placement | None:
    """Return the placement of a value along an axis; None for a number."""
    return fusion.layout(value).placement(axis) if fusion.values[value].is_tensor else None


def _free_readers(fusion: Fusion, value: str) -> Iterator[Expr]:
    """Yield the readers, except for those whose result the user wants Partial."""
    readers = fusion.consumers[value]
    return (r for r in readers if not any(_is_wanted(fusion, name) for name in r.outputs))


def _ends_here(fusion: Fusion, value: str, axis: str) -> bool:
    """True if nobody passes a value on, or who does so for the user reduces it along an axis."""
    readers = fusion.consumers[value]
    passed = [name for r in readers for name in r.outputs if _is_wanted(fusion, name)]
    is_last = not readers and not _is_wanted(fusion, value)
    return is_last or any(axis not in fusion.layout(name).partial_axes for name in passed)


def _is_wanted(fusion: Fusion, value: str) -> bool:
    """True if the user wants the value Partial: by a law, or in the place of a Partial input."""
    is_fixed = fusion.values[value].is_law or value in fusion.returned
    return is_fixed and bool(fusion.layout(value).partial_axes)


def _price_of_result(fusion: Fusion, expr: Expr, axis: str) -> int:
    """Return the bytes to reduce an expression's Partial into its result's layout."""
    terms = strategy_of(expr, fusion.values).result
    goal = _common({fusion.layout(expr.output)}, terms.mesh, axis)
    return move_cost(fusion.values[expr.output], terms, terms.with_placement(axis, goal))


def _price(fusion: Fusion, value: str, axis: str, to: Placement) -> int:
    """Return the bytes to reduce a value along an axis."""
    return brought_cost(fusion.values, value, fusion.layout(value).with_placement(axis, to))


def _common(goals: set[Layout], mesh: DeviceMesh, axis: str) -> Placement:
    """Return the placement along an axis that all goals want; Replicate where they differ."""
    placements = {g.placement(axis) if g.mesh == mesh else Replicate() for g in goals}
    return placements.pop() if len(placements) == 1 else Replicate()


def _applied(fusion: Fusion, settled: dict[str, Layout]) -> Fusion:
    """Return the fusion with these values reduced; in a copy where the user wants Partial."""
    layouts: dict[str, Layout] = {}
    copies = set()
    for value, layout in settled.items():
        free = [*_free_readers(fusion, value)]
        if _is_wanted(fusion, value) or len(free) < len(fusion.consumers[value]):
            fusion, copy = _with_set(fusion, value, layout, free)
            copies.add(copy)
        else:
            layouts[value] = layout
    return anew(fusion.with_layouts(layouts), copies | layouts.keys())


def _with_set(
    fusion: Fusion, value: str, layout: Layout, readers: Sequence[Expr]
) -> tuple[Fusion, str]:
    """Return the fusion in which some readers read a copy in another layout, and its name."""
    copy = fresh_name(fusion.values, f"{value}.{suffix(layout)}")
    of = replace(fusion.values[value], name=copy, layout=layout, stream=None, is_law=False)
    set_expr = Expr(op="set", inputs=(value,), outputs=(copy,), source=readers[0].source)
    exprs: list[Expr] = []
    for expr in fusion.exprs:
        if expr is readers[0]:
            exprs.append(set_expr)
        exprs.append(expr.reading({value: copy}) if expr in readers else expr)
    values = {**fusion.values, copy: replace(of, order_from="op")}
    return replace(fusion, values=values, exprs=tuple(exprs)), copy
