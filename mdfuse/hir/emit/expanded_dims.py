"""Find expanded dims, which repeat one element: they do not travel.

A communication writes repeated elements out. Its result is no longer expanded, though its values
are equal: a program does not state that, so its verifier could not know.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.infer import inferred
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout


@dataclass(frozen=True)
class Squeezed:
    """A reshard with the expanded dims reduced to extent 1."""

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    source: Layout
    target: Layout


def without_expanded(fusion: Fusion, expr: Expr) -> Squeezed | None:
    """Return a set with its operand's expanded dims left out; None where none can be."""
    return _squeezed(fusion, expr, expanded_dims(fusion, expr.reads[0]))


def expanded_dims(fusion: Fusion, name: str) -> frozenset[int]:
    """Return the dims of a value that `expand` made and no set has written out since."""
    views: list[Expr] = []
    while fusion.values[name].expanded and (expr := fusion.producers.get(name)) is not None:
        if not TABLE[expr.op].is_view:
            break
        views.append(expr)
        name = expr.reads[0]
    dims = frozenset[int]()
    for expr in reversed(views):
        dims = _behind(fusion, expr, dims)
    return dims


def _behind(fusion: Fusion, expr: Expr, dims: frozenset[int]) -> frozenset[int]:
    """Return the expanded dims of a view's result; `dims` are its operand's."""
    operand, viewed = expr.reads[0], fusion.values[expr.output]
    if viewed.stream is not None:  # its chunks are written into a whole buffer
        return frozenset()
    value = fusion.values[operand]
    if expr.op == "set" and value.layout != viewed.layout:
        return dims if _squeezed(fusion, expr, dims) is not None else frozenset()
    if dims == value.expanded:
        return viewed.expanded
    known = {x: fusion.values[x] for x in expr.reads} | {operand: replace(value, expanded=dims)}
    (kind,) = inferred(TABLE[expr.op], expr.inputs, expr.kwargs, known, expr.source)
    expanded: frozenset[int] = kind["expanded"]
    return expanded


def _squeezed(fusion: Fusion, expr: Expr, expanded: Collection[int]) -> Squeezed | None:
    value, moved = fusion.values[expr.reads[0]], fusion.values[expr.output]
    source, target, dims = value.layout, moved.layout, tuple(sorted(expanded))
    assert source is not None and target is not None
    if not dims or source == target or value.stream is not None:
        return None
    if source.reaches or target.reaches:  # `expand` reads and makes no rows of others
        return None
    if any(_some_rank_is_empty(value, source, d) for d in dims):
        return None
    other_dims = {d: d for d in range(len(value.shape)) if d not in dims}
    shape = tuple(1 if d in dims else n for d, n in enumerate(value.shape))
    return Squeezed(dims, shape, source.with_dims(other_dims), target.with_dims(other_dims))


def _some_rank_is_empty(value: Value, layout: Layout, dim: int) -> bool:
    last = tuple(n - 1 for n in layout.mesh.shape)
    start, stop = layout.box_at(value.shape, last)[dim]
    return start == stop
