"""Memory orders: requirements go to the op that computes a value, outputs get hints.

    %t: f32[4,6] (tp=R) = mul(%x, 2.0)
    %y: f32[4,6] (tp=R) order=[1,0]! = stride_order(%t, order=[1,0])
    %z: f32[2,4] (tp=R) = sum(%c, dims=[2])                 # %c: f32[2,4,3] lies as [1,0,2]
->
    %y: f32[4,6] (tp=R) order=[1,0]! = mul(%x, 2.0)
    %z: f32[2,4] (tp=R) order=[1,0] = sum(%c, dims=[2])

A hint is the order of the input with most dims, as far as its dims are dims of the output. Only an
op that writes it as easily takes it, and only where no reader would have to copy: a hint costs
nothing. `Value.order` is what the producer and every reader go by, so it changes for all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mdfuse.ir.dims import reshape_groups
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.infer import inferred
from mdfuse.ir.ops import TABLE
from mdfuse.passes.strategy import dim_map

name = "choose_orders"

#: The dims of an output, each as a dim of another value; None where it has none.
Traced = tuple[int | None, ...]


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with the orders of its values settled."""
    return _hinted(_required(fusion))


# -- requirements --------------------------------------------------------------------------------


def _required(fusion: Fusion) -> Fusion:
    """Leave out each `stride_order` whose operand's producer can write the order itself."""
    values, exprs = dict(fusion.values), {e.outputs[0]: e for e in fusion.exprs}
    for expr in fusion.exprs:
        current = expr
        while (
            current.op == "stride_order" and (producer := exprs.get(current.reads[0])) is not None
        ):
            if not _may_replace(fusion, values, producer, current):
                break
            gone, y = values.pop(producer.output), current.output
            values[y] = replace(values[y], stream=gone.stream)
            is_again = producer.op == "stride_order"
            current = (
                replace(current, inputs=producer.inputs)
                if is_again
                else replace(producer, outputs=(y,))
            )
            del exprs[y]  # it goes where that one was, so that a loop over chunks stays one
            exprs = {
                e.outputs[0]: e for e in (current if x is producer else x for x in exprs.values())
            }
    return replace(fusion, values=values, exprs=tuple(exprs.values()))


def _may_replace(fusion: Fusion, values: Mapping[str, Value], maker: Expr, by: Expr) -> bool:
    """Return whether `maker` can write in the order that `by`, its only reader, asks for."""
    if len(maker.outputs) > 1:
        return False
    before, after = values[maker.output], values[by.output]
    if before.name in fusion.returned or len(fusion.consumers[before.name]) > 1:
        return False
    if before.layout != after.layout or after.stream not in (None, before.stream):
        return False
    # In a loop only what is kept as a whole has an order; communications write it in their own.
    return before.stream is None or (maker.op != "set" and after.name in fusion.returned)


# -- hints ---------------------------------------------------------------------------------------


def _hinted(fusion: Fusion) -> Fusion:
    """Give outputs hints, and infer the orders of dependent values again."""
    values = dict(fusion.values)
    changed: set[str] = set()
    for expr in fusion.exprs:
        first = values[expr.outputs[0]]
        if not first.is_tensor or first.is_order_required:
            continue
        if not changed.isdisjoint(expr.reads):
            inferences = inferred(TABLE[expr.op], expr.inputs, expr.kwargs, values, expr.source)
            for name, fields in zip(expr.outputs, inferences, strict=True):
                values[name] = replace(values[name], order=fields["order"])
        hint = _hint(fusion, values, expr)
        if hint is not None:
            values[first.name] = replace(values[first.name], order=hint, order_from="hint")
        changed |= {n for n in expr.outputs if values[n].order != fusion.values[n].order}
    return replace(fusion, values=values) if changed else fusion


def _hint(fusion: Fusion, values: Mapping[str, Value], expr: Expr) -> tuple[int, ...] | None:
    """Return an order other than the op's own that costs nothing; None where there is none."""
    out = values[expr.outputs[0]]
    if out.name not in fusion.returned or out.name in fusion.reuse or len(out.shape) < 2:
        return None
    options = _options(expr, values) - {out.order}
    if not options or not _may_be_read(fusion, out.name):
        return None
    order = _reference_order(fusion, out)
    return order if order in options else None


def _reference_order(fusion: Fusion, out: Value) -> tuple[int, ...] | None:
    """Return the order of the input with most non-broadcast dims; None if several disagree."""
    orders: dict[int, set[tuple[int, ...]]] = {}
    for source, dims in _inputs_of(fusion, out).items():
        value = fusion.values[source]
        size = sum(n != 1 for n in value.shape)
        orders.setdefault(size, set()).add(_mapped_order(value, dims))
    candidates = orders[max(orders)] if orders else set()
    return candidates.pop() if len(candidates) == 1 else None


def _mapped_order(reference: Value, dims: Traced) -> tuple[int, ...]:
    """Return the order in which the reference's dims lie as they do there, all others outermost."""
    place = {d: at for at, d in enumerate(reference.order)}
    results = range(len(dims))
    return tuple(sorted(results, key=lambda o: -1 if (d := dims[o]) is None else place[d]))


def _inputs_of(fusion: Fusion, out: Value) -> dict[str, Traced]:
    """Return the inputs that share dims with a value, each with the value's dims as its own."""
    traced: dict[str, Traced] = {out.name: tuple(range(len(out.shape)))}
    for expr in reversed(fusion.exprs):
        for at, name in enumerate(expr.outputs):
            if name in traced and fusion.values[name].is_tensor:
                for operand, dims in _traced(fusion, expr, at, traced[name]):
                    traced.setdefault(operand, dims)
    return {x: traced[x] for x in fusion.inputs if any(d is not None for d in traced.get(x, ()))}


def _traced(fusion: Fusion, expr: Expr, at: int, dims: Traced) -> Iterable[tuple[str, Traced]]:
    """Yield each operand with traced dims of an expression's result as dims of the operand."""
    for x, pairs in zip(expr.inputs, _corresponding(expr, fusion.values, at), strict=True):
        if isinstance(x, str) and fusion.values[x].is_tensor:
            yield x, tuple(None if d is None else pairs.get(d) for d in dims)


def _corresponding(expr: Expr, values: Mapping[str, Value], at: int = 0) -> list[dict[int, int]]:
    """Return for each operand: dim of a result -> the operand's dim that corresponds to it."""
    if expr.op == "reshape":
        shapes = values[expr.reads[0]].shape, values[expr.output].shape
        groups = reshape_groups(*shapes)
        return [{new[0]: old[0] for old, new in groups if len(old) == len(new) == 1}]
    labels = dim_map(expr, values)
    result = labels.results[at]
    if expr.op == "scaled_dot_product_attention":  # it lies as its query does
        ndim = len(result)
        return [{d: d for d in range(ndim)}, *({} for _ in expr.inputs[1:])]
    correspondences = []
    for dims in labels.operands:
        pairs = {d: dims.index(x) for d, x in enumerate(result) if x in dims}
        if len(dims) == len(result):  # a dim that is whole, or reduced and kept, stays
            inserted = (d for d, x in enumerate(result) if x is None)
            pairs |= {d: d for d in inserted}
        correspondences.append(pairs)
    return correspondences


def _options(expr: Expr, values: Mapping[str, Value]) -> set[tuple[int, ...]]:
    """Return the orders in which the op writes its result as easily as in its own."""
    if len(expr.outputs) > 1:
        return set()
    row, out = TABLE[expr.op], values[expr.output]
    operands = [values[x] for x in expr.reads if values[x].is_tensor]
    if row.is_elementwise and row.writes.is_exact:
        return {x.order for x in operands if x.shape == out.shape and not x.expanded}
    if row.host == "reduce" and row.writes.form is not None:
        (pairs,) = _corresponding(expr, values)
        return {_mapped_order(operands[0], tuple(map(pairs.get, range(len(out.shape)))))}
    return {operands[0].order} if row.host == "attention" and _is_fused(operands) else set()


def _is_fused(operands: Sequence[Value]) -> bool:
    """True if torch runs a fused kernel, which writes as the query lies, unlike meta tensors.

    They take no mask, and heads of one size whose elements lie side by side.
    """
    q, k, v, *mask = operands
    alike = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.shape[-1] == v.shape[-1]
    return not mask and alike and len(q.shape) == 4 and q.order[-1] == 3


def _may_be_read(fusion: Fusion, name: str) -> bool:
    """True if the value may have another order than its op's own without a copy for any reader.

    Reductions read any order; element-wise ops hand it on to their own readers.
    """
    seen, waiting = {name}, [name]
    while waiting:
        for reader in fusion.consumers[waiting.pop()]:
            row = TABLE[reader.op]
            if not row.is_elementwise and row.host != "reduce":
                return False
            if row.is_elementwise and reader.output not in seen:
                seen.add(reader.output)
                waiting.append(reader.output)
    return True
