"""Chains of views: the elements of a base that they show; equal chains are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mdfuse.extents.extent import are_same
from mdfuse.ir.graph import Expr, Value

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStep:
    """One view of a chain.

    Attributes:
        op: "reshape", "permute" or "slice".
        before: the shape of what it shows.
        after: its own shape.
        dims: the dims before, in the order of those after, of a permutation.
        starts: per dim, the first place that a slice shows.
        steps: per dim, of a slice.
    """

    op: str
    before: Shape
    after: Shape
    dims: Shape = ()
    starts: Shape = ()
    steps: Shape = ()

    @property
    def is_nothing(self) -> bool:
        """True if it shows what it is a view of."""
        if self.op == "permute":
            return self.dims == tuple(range(len(self.dims)))
        is_from_start = all(are_same(s, 0) for s in self.starts)
        return is_from_start and same(self.before, self.after)


def same(a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether shapes or places are the same in all runs, without a guard."""
    return len(a) == len(b) and all(map(are_same, a, b))


def are_alike(a: ViewStep, b: ViewStep) -> bool:
    """Return whether two views show the same."""
    return (
        (a.op, a.dims) == (b.op, b.dims)
        and same(a.before, b.before)
        and same(a.after, b.after)
        and same(a.starts, b.starts)
        and same(a.steps, b.steps)
    )


def starts_with(chain: Sequence[ViewStep], prefix: Sequence[ViewStep]) -> bool:
    """Return whether a chain begins with the views of another."""
    return len(chain) >= len(prefix) and all(map(are_alike, chain, prefix))


def _permute(expr: Expr, before: Shape, after: Shape) -> ViewStep:
    dims = tuple(d % len(before) for d in expr.kwargs["dims"])
    return ViewStep(op="permute", before=before, after=after, dims=dims)


def _slice(expr: Expr, before: Shape, after: Shape) -> ViewStep:
    window = expr.kwargs
    return ViewStep(
        op="slice", before=before, after=after, starts=window["starts"], steps=window["steps"]
    )


def _reshape(expr: Expr, before: Shape, after: Shape) -> ViewStep:
    return ViewStep(op="reshape", before=before, after=after)


_STEPS: Mapping[str, Callable[[Expr, Shape, Shape], ViewStep]] = {
    **dict.fromkeys(("reshape", "squeeze", "unsqueeze", "set", "detach"), _reshape),
    "permute": _permute,
    "slice": _slice,
}


def step_of(expr: Expr, values: Mapping[str, Value]) -> ViewStep | None:
    """Return the view that an expression is; None: it is none that is followed."""
    make = _STEPS.get(expr.op)
    if make is None or not values[expr.outputs[0]].is_tensor:
        return None
    return make(expr, values[expr.reads[0]].shape, values[expr.output].shape)


def extended(chain: tuple[ViewStep, ...], step: ViewStep) -> tuple[ViewStep, ...]:
    """Return a chain with one view more, joined with the last one where both are of one kind."""
    if step.is_nothing:
        return chain
    last = chain[-1] if chain else None
    if last is None or last.op != step.op or step.op == "slice":
        return (*chain, step)
    dims = tuple(last.dims[d] for d in step.dims)
    joined = ViewStep(op=step.op, before=last.before, after=step.after, dims=dims)
    return chain[:-1] if joined.is_nothing else (*chain[:-1], joined)
