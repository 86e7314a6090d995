"""Look once where the rows of tokens lie by expert, for all that group them or put them back.

    %s: f32[4,8,<=64:%n,16] = group_rows(%x, %ids, %n)
    %y: f32[64,2,16] = ungroup_rows(%b, %ids, %n)
->
    %ids.places: i64[64,2] = row_places(%ids, %n)
    %s: f32[4,8,<=64:%n,16] = group_rows(%x, %ids, %n, %ids.places)
    %y: f32[64,2,16] = ungroup_rows(%b, %ids, %n, %ids.places)

It sorts the rows. Gradients go both ways, too, so that a step sorts once where it did four times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name

name = "place_rows"

#: Operations that read places, with ids and counts behind their first operand.
_READERS = ("group_rows", "ungroup_rows")


def run(fusion: Fusion) -> Fusion:
    """Return the fusion, whose counted rows are known, with the places of rows that go often."""
    often = Counter(key for e in fusion.exprs if (key := _key(fusion, e)) is not None)
    values, exprs, places = dict(fusion.values), list[Expr](), dict[object, str]()
    for e in fusion.exprs:
        key = _key(fusion, e)
        if key is None or often[key] < 2:
            exprs.append(e)
            continue
        if key not in places:
            ids, n, attrs = e.reads[1], e.reads[2], _attrs(e)
            at = fresh_name(values, f"{ids}.places")
            places[key], values[at] = at, _like(values[ids], at)
            exprs.append(
                Expr(op="row_places", inputs=(ids, n), outputs=(at,), attrs=attrs, source=e.source)
            )
        exprs.append(replace(e, inputs=(*e.inputs, places[key])))
    return replace(fusion, values=values, exprs=tuple(exprs)) if places else fusion


def _key(fusion: Fusion, e: Expr) -> object:
    """Return the ids and counts by which an expression moves rows that are counted; None: none."""
    if e.op not in _READERS or len(e.inputs) > 3:
        return None
    rows = fusion.values[e.output if e.op == "group_rows" else e.reads[0]]
    return (*e.reads[1:3], _attrs(e)) if rows.is_counted else None


def _attrs(e: Expr) -> tuple[tuple[str, object], ...]:
    return tuple((k, x) for k, x in e.attrs if k == "sizes")


def _like(ids: Value, at: str) -> Value:
    """Return the value of places, which lie as the ids do."""
    order = tuple(range(len(ids.shape)))
    return Value(
        name=at, shape=ids.shape, dtype=torch.int64, order=order, layout=ids.layout,
        stream=ids.stream, source=ids.source,
    )  # fmt: skip
