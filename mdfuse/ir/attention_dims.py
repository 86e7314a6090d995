"""Dim labels of attention, of parts and terms of it, and of its gradient; see `dims`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mdfuse.ir.dims import DimMap, Labels, Shape, Shapes, aligned, always
from mdfuse.layouts.halo import Reach

#: The label of positions of keys: no other label of attention is as large.
_KEYS = 64


def attention(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label `q[…,l,e], k[…,s,e], v[…,s,f]`, and what hides keys: all but e and s may be split."""
    batch = rows = len(result) - 2
    q, k, v, *hides = shapes
    assert q is not None and k is not None and v is not None
    heads, is_grouped = batch - 1, bool(attrs.get("enable_gqa"))
    shared = k[-3] if is_grouped else 1
    is_shared = is_grouped and not (type(shared) is int and shared == q[-3])
    if is_grouped:
        k, v = with_heads(k, q), with_heads(v, q)
    lead = [aligned(shape[:-2], result[:-2]) for shape in (q, k, v)]

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        return label != heads or shared % math.prod(sizes) == 0

    hidden = [_without_columns(x, (*result[:-1], k[-2])) for x in hides]
    if len(hides) == 2:  # numbers of documents
        hidden = [aligned(x, (*result[:-2], n)) for x, n in zip(hides, (q[-2], k[-2]), strict=True)]
        hidden[1] = (*hidden[1][:-1], None)
    reach = _reach_of_window(q, k, attrs) if not any(hides) else None
    keys = rows if reach is not None else None
    plain = [heads] * is_shared + [rows] * (reach is not None)
    return DimMap(
        operands=(
            (*lead[0], rows, None),
            (*lead[1], keys, None),
            (*lead[2], keys, batch + 1),
            *hidden,
        ),
        results=((*range(batch), rows, batch + 1),),
        fits=fits if is_shared else always,
        plain=frozenset(plain) if plain else None,
        reaches={(at, len(x) - 2): reach for at, x in ((1, k), (2, v))} if reach else {},
    )


def _without_columns(shape: Shape | None, result: Shape) -> Labels:
    """Label a mask, whose columns must be whole."""
    last = len(result) - 1
    return tuple(None if x == last else x for x in aligned(shape, result))


def _reach_of_window(q: Shape, k: Shape, attrs: Mapping[str, Any]) -> Reach | None:
    """Return which keys the rows of a causal attention with a window see; None: all may be seen."""
    window, first = attrs.get("window"), attrs.get("q_offset", 0)
    numbers = (window, first, attrs.get("k_offset", 0), q[-2], k[-2])
    if not all(type(n) is int for n in numbers):
        return None
    shift = first - attrs.get("k_offset", 0)
    return Reach(of=q[-2], up=1, down=1, first=shift - window + 1, last=shift + 1)


def attended(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label attention with a number per row: as `attention`, but for f, which must be whole."""
    of = attention(shapes, result, attrs)
    feature = of.result[-1]
    operands = tuple(tuple(None if x == feature else x for x in labels) for labels in of.operands)
    rows = of.result[:-1]
    return replace(of, operands=operands, results=((*rows, None), rows))


def attention_parts(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label attention to parts of its keys, one for each rank of the axes that split them."""
    of = attended(shapes, result[1:], attrs)
    (q, k, v, *hides), (out, sums) = of.operands, of.results
    part = _KEYS
    keys = _with_keys(k, v, hides, shapes)

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        return math.prod(sizes) == attrs["parts"] if label == part else of.fits(label, sizes)

    return replace(
        of, operands=(q, *keys), results=((part, *out), (part, *sums)), fits=fits, reaches={}
    )


def attention_terms(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label attention to some of its keys, whose terms join by `lse`."""
    of = attended(shapes, result, attrs)
    (q, k, v, *hides), (out, _) = of.operands, of.results
    keys = _with_keys(k, v, hides, shapes)
    plain = of.plain - {out[-2]} if of.plain is not None else None
    return replace(
        of, operands=(q, *keys), results=(out,), reduces={_KEYS: "lse"}, plain=plain, reaches={}
    )


def attention_grad(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label the gradient of attention: with rows split, keys and values add up, and vice versa."""
    given = (*shapes[:3], *shapes[6:])
    of = attended(given, (*result[:-1], 0), attrs)
    (q, k, v, *hides), (out, sums) = of.operands, of.results
    k, v, *hides = _with_keys(k, v, hides, given)
    rows, given_out = sums[-1], shapes[3]
    assert rows is not None
    first = sums if given_out is not None and len(given_out) == len(sums) else out
    return replace(
        of,
        operands=(q, k, v, first, sums, out, *hides)[: len(shapes)],
        results=(q, k, v),
        reduces={rows: "sum", _KEYS: "sum"},
        reaches={},
    )


def _with_keys(k: Labels, v: Labels, hides: Sequence[Labels], shapes: Shapes) -> list[Labels]:
    """Return the labels of key, value and what hides keys, with that of the positions of keys."""
    keys = shapes[1]
    assert keys is not None
    labels = [(*x[:-2], _KEYS, None) for x in (k, v)]
    for x, shape in zip(hides, shapes[3:], strict=False):
        is_each = bool(shape) and shape is not None and shape[-1] == keys[-2]
        labels.append((*x[:-1], _KEYS if is_each else None) if x else x)
    if len(hides) == 2:  # the first numbers are of rows, also where there are as many keys
        labels[2] = hides[0]
    return labels


def with_heads(shape: Shape, query: Shape) -> Shape:
    """Return the shape of key or value as if each head stood there for each that shares it."""
    if min(len(shape), len(query)) < 3 or not shape[-3] or query[-3] % shape[-3]:
        raise ValueError("enable_gqa: the heads of the query are a multiple of the others")
    return (*shape[:-3], query[-3], *shape[-2:])
