"""The strategies of mesh axes for an expression: split a label, leave a Partial, or neither.

Rules look at each axis by itself, at operands as they lie and at results as laws want them. Where
none applies, the bytes that arrive at a rank decide, for all axes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.dims import DimMap, Labels
from mdfuse.ir.graph import Expr, Value
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.halo import Reach
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, Shard, commute
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
    #: the layouts in which it is a view of what they read elsewhere
    viewed: tuple[Layout, ...] = ()


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


#: How an axis is used: it splits a label, or leaves Partials by a reduce op, or neither.
Choice = int | str | None


def ways(
    expr: Expr,
    mesh: DeviceMesh,
    operands: Sequence[Operand],
    labels: DimMap,
    results: Sequence[Result],
) -> list[dict[str, Choice]]:
    """Return axis -> its strategy, in all ways among which bytes decide."""
    axes = {
        a: options(expr, a, operands, labels, results) for a in mesh.axes if mesh.axis_size(a) > 1
    }
    return [dict(zip(axes, way, strict=True)) for way in product(*axes.values())]


def options(
    expr: Expr,
    axis: str,
    operands: Sequence[Operand],
    labels: DimMap,
    results: Sequence[Result],
) -> Sequence[Choice]:
    """Return the strategies of an axis among which bytes decide; one, where a rule does."""
    passed = _passes_partial(expr, axis, operands, labels, results[0])
    if passed is not None:
        return (passed,)
    candidates: list[int | None] = []
    moves = False
    for o in operands:
        placement = o.layout.placement(axis) if o.layout else None
        if isinstance(placement, Shard):
            candidates.append(o.labels[placement.dim])
        moves = moves or isinstance(placement, Partial)
    asked = [(r.labels, p) for r in results if isinstance(p := r.wanted(axis), Shard)]
    if not candidates and not asked:
        return (_cut(axis, labels, results) if not moves else None,)
    if candidates and not moves and _is_free(candidates, axis, results):
        return (candidates[0],)
    is_moved = not _has_whole_matrix(expr, axis, operands)
    if len(candidates) > 1 and is_moved and _is_contracted(candidates, labels):
        return (candidates[0],)
    candidates += [of[placement.dim] for of, placement in asked]
    candidates = [c for c in candidates if labels.may_split(c)]
    staying = _stays(expr, axis, operands, labels)
    if staying in candidates and all(r.allows(axis, staying) for r in results):
        return (staying,)
    return (*dict.fromkeys(candidates), None)


def _cut(axis: str, labels: DimMap, results: Sequence[Result]) -> Choice:
    """Return the label on which ranks cut operands that all have, so that results are terms.

    It is that of a dim that is reduced, where the results are to be Partial by that reduction.
    """
    wanted = {r.wanted(axis) for r in results}
    op = wanted.pop() if len(wanted) == 1 else None
    if not isinstance(op, Partial):
        return None
    return next(
        (x for x, by in labels.reduces.items() if by == op.op and labels.may_split(x)), None
    )


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


def _has_whole_matrix(expr: Expr, axis: str, operands: Sequence[Operand]) -> bool:
    """Return whether other expressions read the operand that stays whole along an axis.

    It is no weight of a row-parallel linear then, but tokens of which a weight's gradient is made.
    """
    position = TABLE[expr.op].stays
    if position is None:
        return False
    name = expr.inputs[position]
    there = [c for o in operands if o.value.name == name for c in (*o.copies, *o.viewed)]
    return any(axis in c.mesh.axes and c.placement(axis) == Replicate() for c in there)


#: The dims of the operand that stays, where it is more than one matrix.
_DIMS = {"rows_mm": 3}


def _stays(expr: Expr, axis: str, operands: Sequence[Operand], labels: DimMap) -> int | None:
    """Return the result's label on which an axis splits the operand that stays, if any.

    Columns of experts come to rows whose parts the axis splits where that takes fewer bytes: moved
    along it, rows are dense.
    """
    position = TABLE[expr.op].stays
    if position is None:
        return None
    name = expr.inputs[position]
    for o in operands:
        placement = o.layout.placement(axis) if o.layout else None
        is_matrix = len(o.labels) == _DIMS.get(expr.op, 2)
        if o.value.name == name and is_matrix and isinstance(placement, Shard):
            label = o.labels[placement.dim]
            is_kept = label in labels.result and not _are_columns(expr, axis, operands, label)
            return label if is_kept else None
    return None


def _are_columns(expr: Expr, axis: str, operands: Sequence[Operand], label: int | None) -> bool:
    """Return whether an axis splits the parts of rows, and a label is none of theirs."""
    rows = next(o for o in operands if o.value.name == expr.inputs[0])
    is_split = rows.layout is not None and rows.layout.placement(axis) == Shard(0)
    return expr.op in _DIMS and is_split and label not in rows.labels


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
    alone = _is_alone(expr, operands, placements, out)
    if rule == "view":
        return op if alone and _commutes(op, axis, operands, labels) else None
    if op in ("sum", "prod") and not all(_keeps(x.dtype, out.dtype, expr.op) for x in terms):
        return None
    alike = len(partials) == len(operands) and partials.count(partials[0]) == len(partials)
    if rule == "all":
        return op if alike else None
    if rule == "reduce":
        return op if alone and op in labels.reduces.values() else None
    if op != "sum":
        return None
    if rule == "sum":  # a number would be added on every rank
        tensors = {o.value.name for o in operands}
        every = tensors.issuperset(x for x in expr.inputs if x is not None)
        asked = result.wanted(axis) == Partial()
        return op if every and (alike or asked or _is_sum_of_scalars(out, placements)) else None
    asked = rule != "quotient" or isinstance(result.wanted(axis), Partial)
    return op if alone and asked else None


def _is_alone(
    expr: Expr, operands: Sequence[Operand], placements: Sequence[Placement | None], out: Value
) -> bool:
    """Return whether one operand is Partial, one that may be so alone, and is read once.

    Others that are split are gathered, where that and the result take less than the terms do. A
    rounded factor is gathered where it is smaller: `settle_partials` reduces the terms before a
    product unless that takes more.
    """
    pairs = [*zip(operands, placements, strict=True)]
    terms = [o.value for o, p in pairs if isinstance(p, Partial)]
    gathered = [o.value for o, p in pairs if isinstance(p, Shard)]
    op = TABLE[expr.op]
    is_settled = op.partial == "factor" and out.dtype.is_floating_point
    if len(terms) != 1 or (gathered and not _is_less(gathered, [] if is_settled else [out], terms)):
        return False
    (name,) = (x.name for x in terms)
    may = op.partial == "factor" or expr.inputs[op.term] == name
    return may and expr.inputs.count(name) == 1


def _commutes(op: str, axis: str, operands: Sequence[Operand], labels: DimMap) -> bool:
    """Return whether a result may be Partial by an op, and by those of labels that others split."""
    split = [
        (a, o.labels[placement.dim])
        for o in operands
        if o.layout is not None
        for a, placement in o.layout.by_axis().items()
        if isinstance(placement, Shard)
    ]
    others = {at for a, at in split if a != axis}
    return commute([op, *(by for label, by in labels.reduces.items() if label in others)])


def _is_less(gathered: Sequence[Value], reduced: Sequence[Value], terms: Sequence[Value]) -> bool:
    """Return whether gathered operands and reduced results take less than reduced terms.

    Extents that a run chooses are not compared, since each comparison is a guard.
    """
    if any(is_symbolic(v.shape) for v in (*gathered, *reduced, *terms)):
        return False
    taken = sum(v.bytes for v in gathered) + 2 * sum(v.bytes for v in reduced)
    return taken < sum(v.bytes for v in terms)


def _is_sum_of_scalars(out: Value, placements: Sequence[Placement | None]) -> bool:
    """Return whether replicated addends become terms of one rank, which makes one reduction of all.

    A larger value would be copied for that, which is done where the result is to be terms.
    """
    return not out.shape and all(p in (Partial(), Replicate()) for p in placements)


def _keeps(term: torch.dtype, result: torch.dtype, op: str) -> bool:
    """True if terms have the sum of which a result is made: integers in another dtype wrap apart.

    Floats in a wider dtype are the same numbers.
    """
    if term == result or op == "round_terms":
        return True
    is_floating = term.is_floating_point and result.is_floating_point
    return is_floating and term.itemsize < result.itemsize
