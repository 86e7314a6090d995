"""Let attention and its gradient read the heads that several heads of the query share.

    %a = unsqueeze(%k, dims=[2])                          # %k: [1,8,64,32]
    %b = expand(%a, shape=[1,8,4,64,32])
    %c = reshape(%b, shape=[1,32,64,32])                  # likewise %d, of %v
    %y, %l = attention(%q, %c, %d)
    %dq, %dc, %dd = attention_grad(%q, %c, %d, %y, %l, %dy)
    %e = reshape(%dc, shape=[1,8,4,64,32])
    %f = sum(%e, dims=[2], keepdim=True)
->
    %y, %l = attention(%q, %k, %v, enable_gqa=True)
    %dq, %dk, %dv = attention_grad(%q, %k, %v, %y, %l, %dy, enable_gqa=True)
    %f = unsqueeze(%dk, dims=[2])

A definition repeats each head, so that a split of the query's heads finds its part of them whatever
the numbers are. Where each rank has whole groups of heads, neither copies nor their gradients are
made, or travel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.ir.shapes import times_of_heads
from mdfuse.passes import propagate_layouts

name = "share_heads"

_ATTENTIONS = ("scaled_dot_product_attention", "attention", "attention_grad")

#: The position of the first gradient of keys or values among the results.
_FIRST = 1


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Key and value before their heads were repeated, and what becomes of their gradients.

    Attributes:
        heads: their names.
        sums: gradient of a repeated one -> its reshapes, and the sum over the heads that share;
            nothing where it is not read.
    """

    heads: tuple[str, ...]
    sums: Mapping[str, tuple[Expr, ...]]


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with attention that repeats no heads."""
    repeated = {e.outputs[0]: r for e in fusion.exprs if (r := _repeated(fusion, e)) is not None}
    if not repeated:
        return fusion
    values, exprs, changed = dict(fusion.values), list[Expr](), set[str]()
    gone: dict[str, Expr | None] = {}
    for expr in fusion.exprs:
        if (heads := repeated.get(expr.outputs[0])) is not None:
            expr = _shared(values, expr, heads, gone)
            changed.update(expr.outputs)
        elif expr.outputs[0] in gone:
            new = gone[expr.outputs[0]]
            if new is None:
                continue
            expr = new
            changed.update(expr.outputs)
        exprs.append(expr)
    free = {n: replace(values[n], layout=None) for n in changed if not values[n].is_law}
    return _laid_out(fusion, fusion.with_exprs(exprs, {**values, **free}), free)


def _laid_out(before: Fusion, fusion: Fusion, free: Collection[str]) -> Fusion:
    """Return the fusion with layouts of free values; others stay where these are as before."""
    inferred = propagate_layouts.run(fusion)
    pairs = [(before.values[n], inferred.values[n]) for n in free if n in before.values]
    is_as_before = all(old.like is None and old.layout == new.layout for old, new in pairs)
    return inferred if is_as_before else propagate_layouts.anew(fusion, free)


def _shared(
    values: dict[str, Value], expr: Expr, known: _Repeated, gone: dict[str, Expr | None]
) -> Expr:
    """Return attention that reads shared heads; note what replaces the sums of its gradients."""
    outputs = list(expr.outputs)
    for at, (old, opened) in enumerate(known.sums.items(), _FIRST):
        shape = values[known.heads[at - 1]].shape
        new = fresh_name(values, f"{old}.shared")
        values[new] = replace(
            values[old], name=new, shape=shape, order=(*range(len(shape)),), like=None,
            is_law=False, layout=None, copies=(),
        )  # fmt: skip
        outputs[at] = new
        gone.update((e.output, None) for e in opened)
        for total in opened[-1:]:
            gone[total.output] = replace(
                total, op="unsqueeze", inputs=(new,), attrs=(("dims", (len(shape) - 2,)),)
            )
    query, _, _, *others = expr.inputs
    attrs = {**expr.kwargs, "enable_gqa": True}
    return replace(
        expr, inputs=(query, *known.heads, *others), outputs=(*outputs,), attrs=(*attrs.items(),)
    )


# -- which -----------------------------------------------------------------------------------------


def _repeated(fusion: Fusion, expr: Expr) -> _Repeated | None:
    """Return the heads that an attention repeats, if each rank has whole groups of them."""
    if expr.op not in _ATTENTIONS or expr.kwargs.get("enable_gqa"):
        return None
    heads = tuple(h for x in expr.inputs[1:3] if (h := _before(fusion, x)) is not None)
    if len(heads) != 2 or len({_count(fusion, h) for h in heads}) != 1:
        return None
    parts = {_parts(fusion, str(x)) for x in (*expr.inputs[:3], *heads)}
    if any(_count(fusion, heads[0]) % n for n in parts):
        return None
    is_gradient = expr.op == "attention_grad"
    sums = dict(_sums(fusion, expr)) if is_gradient else {}
    return _Repeated(heads, sums) if len(sums) == (2 if is_gradient else 0) else None


def _count(fusion: Fusion, x: str) -> int:
    return fusion.values[x].shape[-3]


def _parts(fusion: Fusion, x: str) -> int:
    """Return the number of parts in which the heads of a value are."""
    layout = fusion.layout(x)
    dim = len(fusion.values[x].shape) - 3
    return math.prod(layout.mesh.axis_size(a) for a in layout.split_axes(dim))


def _before(fusion: Fusion, x: object) -> str | None:
    """Return the value whose heads a value repeats; None where it repeats none."""
    names = [str(x)]
    while names[-1] in fusion.producers and _is_as_it_lies(fusion, names[-1]):
        names.append(fusion.producers[names[-1]].reads[0])
    for op in ("expand", "unsqueeze"):
        expr = fusion.producers.get(names[-1])
        if expr is None or expr.op != op:
            return None
        names.append(expr.reads[0])
    if any(fusion.values[n].stream is not None for n in names):
        return None
    last = fusion.values[names[0]].shape
    repeated, opened, first = (fusion.values[n].shape for n in names[-3:])
    if not all(type(n) is int for n in first):
        return None
    return names[-1] if times_of_heads(last, repeated, opened, first) > 1 else None


def _is_as_it_lies(fusion: Fusion, x: str) -> bool:
    """Return whether a value has the elements of its operand in the same sequence."""
    expr = fusion.producers[x]
    is_same = expr.op == "expand" and fusion.values[x].shape == fusion.values[expr.reads[0]].shape
    return expr.op == "reshape" or is_same


def _sums(fusion: Fusion, expr: Expr) -> Iterator[tuple[str, tuple[Expr, ...]]]:
    """Yield each gradient of repeated heads, its reshapes, and its sum over those that share."""
    for x, key in zip(expr.outputs[_FIRST:], expr.inputs[_FIRST:], strict=False):
        chain, y = list[Expr](), x
        while len(fusion.consumers[y]) == 1 and y not in fusion.returned:
            (reader,) = fusion.consumers[y]
            chain.append(reader)
            if reader.op != "reshape":
                break
            y = reader.output
        shared = fusion.values[_before(fusion, key) or x].shape
        opened = (*shared[:-2], fusion.values[x].shape[-3] // max(shared[-3], 1), *shared[-2:])
        over = {"dims": (len(opened) - 3,), "keepdim": True}
        if not fusion.consumers[x] and x not in fusion.returned:
            yield x, ()
        is_summed = len(chain) > 1 and chain[-1].op == "sum" and fusion.values[y].shape == opened
        if is_summed and {k: v for k, v in chain[-1].attrs if v is not None} == over:
            yield x, (*chain,)
