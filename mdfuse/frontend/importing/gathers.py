"""Warnings of gathers of inner values that layouts of parameters cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mdfuse.errors import counted
from mdfuse.frontend.importing.record_graph import Model
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.layouts.layout import Layout, Shard
from mdfuse.layouts.recv_volume import lacks


def warnings_of(model: Model, recorded: Fusion, lowered: Fusion) -> list[str]:
    """Return a line for each line of the module where a split value is brought together.

    Args:
        model: with the patterns that placed parameters.
        recorded: the fusion as recorded; its `set` expressions are wanted.
        lowered: the fusion with all reshards.
    """
    asked = {e.output for e in recorded.exprs if e.op == "set"}
    producers = {name: e for e in lowered.exprs for name in e.outputs}
    counts: Counter[str] = Counter()
    for expr in lowered.exprs:
        if expr.op != "set" or expr.output in asked:
            continue
        axes = _joined(lowered.layout(expr.reads[0]), lowered.layout(expr.output))
        if axes:
            counts[_line(model, lowered, producers, expr, axes)] += 1
    return [f"{text}{f', {n} times' if n > 1 else ''}" for text, n in counts.items()]


def _joined(before: Layout, after: Layout) -> list[str]:
    """Return the axes that split a value before, and not in the same way after."""
    pairs = zip(before.mesh.axes, before.placements, strict=True)
    return [
        axis
        for axis, p in pairs
        if isinstance(p, Shard) and before.mesh.axis_size(axis) > 1 and after.placement(axis) != p
    ]


def _line(
    model: Model, fusion: Fusion, makers: dict[str, Expr], expr: Expr, axes: list[str]
) -> str:
    value = fusion.values[expr.reads[0]]
    count = lacks(fusion.layout(value.name), fusion.layout(expr.output), value.shape)[0]
    where = f" ({expr.source})" if expr.source else ""
    text = f"a value split along {', '.join(axes)} is brought together{where}"
    of = {model.captured.parameters[n].name: p.pattern for n, p in model.placed.items()
          if n in model.captured.parameters}  # fmt: skip
    of |= {p.value_name: p.pattern for p in model.passed.values()}
    shapes, size = "", f", {counted(count * value.dtype.itemsize, 'byte')} to a rank"
    for step in _before(makers, value.name):
        if isinstance(step, Expr):
            if step.op == "reshape" and not shapes:
                old, new = (fusion.values[n].shape for n in (step.reads[0], step.output))
                shapes = f", behind the reshape {list(old)} -> {list(new)}"
            if (pattern := next(filter(None, map(of.get, step.outputs)), None)) is not None:
                return f"{text}{shapes}: {pattern} places it{size}"
        elif (pattern := _pattern(of, step)) is not None:
            return f"{text}{shapes}: {pattern} splits it"
    return text + shapes


def _pattern(of: dict[str, str], name: str) -> str | None:
    """Return the pattern of a parameter, or of one of its blocks."""
    return of.get(name) or of.get(name.rpartition(".")[0])


def _before(makers: dict[str, Expr], name: str) -> Iterator[Expr | str]:
    """Yield the ancestors of a value, the nearest first: expressions, and names of inputs."""
    left, seen = [name], {name}
    while left:
        name = left.pop(0)
        if name not in makers:
            yield name
            continue
        yield makers[name]
        new = [n for n in makers[name].reads if n not in seen]
        seen.update(new)
        left += new
