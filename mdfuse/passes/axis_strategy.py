"""The strategy of one mesh axis for an expression: split a label, leave a Partial, or neither.

Each axis is asked by itself, of operands as they lie and of results as laws want them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mdfuse.ir.dims import DimMap, Labels
from mdfuse.ir.graph import Expr, Value
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.halo import Reach
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, Shard
from mdfuse.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand, its dim labels, and where it lies."""

    value: Value
    labels: Labels
    layout: Layout | None
    #: dim -> which rows of it are read, where these are not those of a part
    reaches: Mapping[int, Reach] = field(default_factory=dict)
    #: the layouts in which other expressions read it
    copies: tuple[Layout, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A result, its dim labels, and where it must lie."""

    value: Value
    labels: Labels
    #: the layout that it must have in the end, where that is on the expression's mesh
    law: Layout | None

    def wanted(self, axis: str) -> Placement | None:
        return self.law.placement(axis) if self.law is not None else None

    def allows(self, axis: str, label: int | None) -> bool:
        """Return whether the law, if there is one, splits the result's dim with this label."""
        wanted = self.wanted(axis)
        return wanted is None or (isinstance(wanted, Shard) and self.labels[wanted.dim] == label)


def vote(
    expr: Expr,
    axis: str,
    mesh: DeviceMesh,
    operands: Sequence[Operand],
    labels: DimMap,
    results: Sequence[Result],
    chosen: Mapping[str, int | str | None],
) -> int | str | None:
    """Choose the strategy of an axis: split a label, leave a Partial, or neither (None).

    `chosen` has the strategies of the other axes: only the part of a value that they leave to a
    rank arrives there.
    """
    passed = _passes_partial(expr, axis, operands, labels, results[0])
    if passed is not None:
        return passed
    candidates: list[int | None] = []
    moves = False
    for o in operands:
        placement = o.layout.placement(axis) if o.layout else None
        if isinstance(placement, Shard):
            candidates.append(o.labels[placement.dim])
        moves = moves or isinstance(placement, Partial)
    asked = [(r.labels, p) for r in results if isinstance(p := r.wanted(axis), Shard)]
    if not candidates and not asked:
        return None
    if candidates and not moves and _is_free(candidates, axis, results):
        return candidates[0]
    if len(candidates) > 1 and _is_contracted(candidates, labels):
        return candidates[0]
    candidates += [of[placement.dim] for of, placement in asked]
    candidates = [c for c in candidates if labels.may_split(c)]
    if not candidates:
        return None
    staying = _stays(expr, axis, operands, labels)
    if staying in candidates and all(r.allows(axis, staying) for r in results):
        return staying
    options = [*dict.fromkeys(candidates), None]
    prices = [_price(c, axis, mesh, operands, labels, results, chosen) for c in options]
    return options[prices.index(min(prices))]


def _is_free(candidates: Sequence[int | None], axis: str, results: Sequence[Result]) -> bool:
    """True if all split operands are split on one label, and the results may stay split on it."""
    (label, *others) = candidates
    if label is None or any(c != label for c in others):
        return False
    return all(label in r.labels and r.allows(axis, label) for r in results)


def _is_contracted(candidates: Sequence[int | None], labels: DimMap) -> bool:
    """Return whether several operands are split on the label over which they are contracted.

    Then they stay, and the result is Partial, even where to gather them would move fewer bytes: a
    row-parallel linear is one all-reduce whatever the batch, as the user who split it so expects.
    """
    (label, *others) = candidates
    return label in labels.reduces and all(c == label for c in others)


def _stays(expr: Expr, axis: str, operands: Sequence[Operand], labels: DimMap) -> int | None:
    """Return the result's label on which an axis splits the operand that stays, if any."""
    position = TABLE[expr.op].stays
    if position is None:
        return None
    name = expr.inputs[position]
    for o in operands:
        placement = o.layout.placement(axis) if o.layout else None
        if o.value.name == name and len(o.labels) == 2 and isinstance(placement, Shard):
            label = o.labels[placement.dim]
            return label if label in labels.result else None
    return None


def _price(
    label: int | None,
    axis: str,
    mesh: DeviceMesh,
    operands: Sequence[Operand],
    labels: DimMap,
    results: Sequence[Result],
    chosen: Mapping[str, int | str | None],
) -> int:
    """Return the bytes that reach a rank if `axis` (n ranks) splits `label`.

    The unit is 1 / (n * ranks of the mesh), in which all prices are integers.
    """
    total, n = 0, mesh.axis_size(axis)
    for o in operands:
        if o.layout is not None:
            wanted: Placement = Replicate()
            if label is not None and label in o.labels:
                wanted = Shard(o.labels.index(label))
            changes = [_change(p, wanted, n) for p in _placements(o, axis)]
            total += min(changes) * _part(o.value, axis, mesh, _splitting(o.layout))
    for r in results:
        placement: Placement = Replicate()
        if label is not None:
            is_kept = label in r.labels
            placement = Shard(r.labels.index(label)) if is_kept else Partial(labels.reduces[label])
        goal = r.wanted(axis)
        if goal is None:
            goal = Replicate() if isinstance(placement, Partial) else placement
        splitting = [b for b, c in chosen.items() if isinstance(c, int) and c in r.labels]
        total += _change(placement, goal, n) * _part(r.value, axis, mesh, splitting)
    return total


def _placements(operand: Operand, axis: str) -> list[Placement]:
    """Return the placements along an axis in which an operand is there, other axes being alike."""
    layout = operand.layout
    assert layout is not None
    alike = (c for c in operand.copies if c.mesh == layout.mesh)
    placements = [
        c.placement(axis) for c in alike if c.with_placement(axis, layout.placement(axis)) == layout
    ]
    return [layout.placement(axis), *placements]


def _part(value: Value, axis: str, mesh: DeviceMesh, splitting: Iterable[str]) -> int:
    """Return the bytes of a value that other axes leave to a rank, in units of n / ranks."""
    part = value.bytes * (mesh.size // mesh.axis_size(axis))
    for other in splitting:
        if other != axis:
            part //= mesh.axis_size(other)
    return part


def _splitting(layout: Layout) -> Iterable[str]:
    """Return the axes that split a dim of a layout."""
    return (axis for _, axes in layout.splits for axis in axes)


def _change(before: Placement, after: Placement, n: int) -> int:
    """Return the share of a tensor that a rank receives in a change along one axis of n ranks.

    The unit is 1 / n² of the tensor, so that prices are integers, which compare exactly.
    """
    is_split_so = isinstance(before, Shard) and isinstance(after, Shard) and before.dim == after.dim
    if before == after or isinstance(before, Replicate) or is_split_so:
        return 0
    if isinstance(before, Partial):
        return (n - 1) * n * (1 if isinstance(after, Shard) else 2)
    return (n - 1) * (1 if isinstance(after, Shard) else n)


def _passes_partial(
    expr: Expr, axis: str, operands: Sequence[Operand], labels: DimMap, result: Result
) -> str | None:
    """Return the reduce op where the op takes operands along the axis Partial as they are.

    None: it may not, or more would have to be reduced later.
    """
    rule, out = TABLE[expr.op].partial, result.value
    placements = [o.layout.placement(axis) if o.layout else None for o in operands]
    partials = [p for p in placements if isinstance(p, Partial)]
    if not rule or not partials or any(o.layout is None for o in operands):
        return None
    op = partials[0].op
    terms = [o.value for o, p in zip(operands, placements, strict=True) if isinstance(p, Partial)]
    if out.bytes > sum(x.bytes for x in terms):
        return None
    if rule == "view":
        return op
    if op in ("sum", "prod") and not all(_keeps(x.dtype, out.dtype, expr.op) for x in terms):
        return None
    alike = len(partials) == len(operands) and partials.count(partials[0]) == len(partials)
    if rule == "all":
        return op if alike else None
    if rule == "reduce":
        return op if op in labels.reduces.values() else None
    if op != "sum":
        return None
    if rule == "sum":  # a number would be added on every rank
        tensors = {o.value.name for o in operands}
        every = tensors.issuperset(x for x in expr.inputs if x is not None)
        return op if every and (alike or _is_sum_of_scalars(out, placements)) else None
    # The first operand alone is Partial, and it is read once.
    alone = expr.inputs[0] == operands[0].value.name and isinstance(placements[0], Partial)
    others = all(isinstance(p, Replicate) for p in placements[1:])
    once = expr.inputs.count(operands[0].value.name) == 1
    asked = rule != "quotient" or isinstance(result.wanted(axis), Partial)
    return op if alone and others and once and asked else None


def _is_sum_of_scalars(out: Value, placements: Sequence[Placement | None]) -> bool:
    """Return whether replicated addends become terms of one rank, which makes one reduction of all.

    A larger value would be copied for that.
    """
    return not out.shape and all(isinstance(p, Partial | Replicate) for p in placements)


def _keeps(term: torch.dtype, result: torch.dtype, op: str) -> bool:
    """True if terms have the sum of which a result is made: integers in another dtype wrap apart.

    Floats in a wider dtype are the same numbers.
    """
    if term == result or op == "round_terms":
        return True
    is_floating = term.is_floating_point and result.is_floating_point
    return is_floating and term.itemsize < result.itemsize
