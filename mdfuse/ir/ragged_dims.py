"""Label the dims of operations on rows grouped by expert: see `mdfuse.ir.ragged`.

Axes that split tokens split the parts of a ragged value. A loop that takes tokens in chunks takes
the rows of each part in chunks: there a rank has tokens of one part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from mdfuse.extents.extent import are_same, is_symbolic
from mdfuse.ir.dims import DimMap, Shape, Shapes
from mdfuse.layouts.boxes import nth_chunk

Attrs = Mapping[str, Any]

#: The labels: parts (of tokens), experts, what is summed over, columns; rows, taken in chunks.
_P, _E, _K, _D, _R = range(5)


def choices(ids: Shape) -> int:
    """Return the number of experts that a token has."""
    return ids[1] if len(ids) == 2 else 1


def _fitting(tokens: int, parts: int, attrs: Attrs) -> Any:
    """Return whether tokens and parts are split at the same places, for `DimMap.fits`."""
    stated = attrs.get("sizes")

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        if label != _P:
            return True
        if is_symbolic((tokens,)):
            return bool(tokens % parts == 0) and all(parts % n == 0 for n in sizes)
        each = -(-tokens // parts)
        ends = stated or [each] * parts
        ends = [min(n, tokens) for n in accumulate(ends, initial=0)]
        cut = [ends[n] for n in _ends(parts, sizes)]
        return cut == _ends(tokens, sizes)

    return fits


def _ends(extent: int, sizes: tuple[int, ...]) -> list[int]:
    """Return where each part of a dim ends that axes of some sizes split."""
    spans = [(0, extent)]
    for size in sizes:
        spans = [nth_chunk(span, size, i) for span in spans for i in range(size)]
    return [end for _, end in spans]


def _of_ids(shape: Shape, label: int = _P) -> tuple[int | None, ...]:
    return (label, None)[: len(shape)]


def _in_chunks(
    tokens: int, parts: int, attrs: Attrs, room: int | None = None, **labels: Any
) -> DimMap:
    """Label chunks of tokens, which are chunks of the rows of each part: each rank has one part.

    Args:
        tokens: how many there are.
        parts: into which they are split.
        attrs: of the operation, which may say how many tokens each part has.
        room: for the tokens of a part, in chunks of one length; None: as many as there are.
        labels: those of operands and results.
    """

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        *axes, count = sizes
        if label != _R:
            return True
        if math.prod(axes) != parts:
            return False
        if is_symbolic((tokens,)):
            return bool(tokens % max(parts * count, 1) == 0)
        of_part = max(attrs.get("sizes", ()), default=-(-tokens // max(parts, 1)))
        return room is None or (room % count == 0 and -(-of_part // count) * count <= room)

    return DimMap(fits=fits, **labels)


def _room(bound: int, ids: Shape) -> int:
    """Return for how many tokens of a part there is room, each with its choices."""
    return bound // max(choices(ids), 1)


def of_count(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `ids[t,k]`: tokens are split as parts are."""
    (ids,) = (s for s in shapes if s is not None)
    results = ((_P, None),)
    return DimMap(
        operands=(_of_ids(ids),),
        results=results,
        fits=_fitting(ids[0], result[0], attrs),
        in_chunks=_in_chunks(
            ids[0],
            result[0],
            attrs,
            operands=(_of_ids(ids, _R),),
            results=((None, None),),
            reduces={_R: "sum"},
        ),
    )


def of_places(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `ids[t,k], n[p,e]`: each rank looks at its tokens."""
    ids, n = (s for s in shapes if s is not None)
    chunks = _in_chunks(
        ids[0],
        n[0],
        attrs,
        operands=(_of_ids(ids, _R), (None, None)),
        results=(_of_ids(ids, _R),),
        terms=(1,),
    )
    return DimMap(
        operands=(_of_ids(ids), (_P, None)),
        results=(_of_ids(ids),),
        fits=_fitting(ids[0], n[0], attrs),
        in_chunks=chunks,
        terms=chunks.terms,
    )


def of_group(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[t,d], ids[t,k], n[p,e]`: each rank groups the rows of its tokens."""
    x, ids, n, *at = (s for s in shapes if s is not None)
    chunks = _in_chunks(
        ids[0],
        n[0],
        attrs,
        _room(result[2], ids),
        operands=(
            (_R, None, None)[: len(x)],
            _of_ids(ids, _R),
            (None, None),
            *(_of_ids(i, _R) for i in at),
        ),
        results=((None, None, _R, None),),
        terms=(2,),
    )
    return DimMap(
        operands=(
            (_P, None, _D) if len(x) == 3 else (_P, _D),
            _of_ids(ids),
            (_P, None),
            *map(_of_ids, at),
        ),
        results=((_P, None, None, _D),),
        fits=_fitting(ids[0], result[0], attrs),
        in_chunks=chunks,
        terms=chunks.terms,
    )


def of_ungroup(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `y[p,e,b,d], ids[t,k], n[p,e]`."""
    y, ids, n, *at = (s for s in shapes if s is not None)
    chunks = _in_chunks(
        ids[0],
        n[0],
        attrs,
        _room(y[2], ids),
        operands=(
            (None, None, _R, None),
            _of_ids(ids, _R),
            (None, None),
            *(_of_ids(i, _R) for i in at),
        ),
        results=((_R, None, None),),
        terms=(2,),
    )
    return DimMap(
        operands=((_P, None, None, _D), _of_ids(ids), (_P, None), *map(_of_ids, at)),
        results=((_P, None, _D),),
        fits=_fitting(ids[0], y[0], attrs),
        in_chunks=chunks,
        terms=chunks.terms,
    )


def of_line_up(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[t,d], ids[t,k], n[p,e]`: each rank lines up the rows of its tokens."""
    parts, bound, d = result
    whole = of_group(shapes, (parts, 0, bound, d), attrs)
    chunks = replace(whole.of_chunks, results=((None, _R, None),))
    return replace(whole, results=((_P, None, _D),), in_chunks=chunks)


def of_put_back(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `y[p,b,d], ids[t,k], n[p,e]`."""
    y, *others = (s for s in shapes if s is not None)
    parts, bound, d = y
    whole = of_ungroup(((parts, 0, bound, d), *others), result, attrs)
    chunks = whole.of_chunks
    chunks = replace(chunks, operands=((None, _R, None), *chunks.operands[1:]))
    return replace(whole, operands=((_P, None, _D), *whole.operands[1:]), in_chunks=chunks)


def of_multiply(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[p,e,b,k], w[e,k,n], n[p,e]`: ranks add up their shares of k."""
    return DimMap(
        operands=((_P, _E, _R, _K), (_E, _K, _D), (_P, _E)),
        results=((_P, _E, _R, _D),),
        reduces={_K: "sum"},
        terms=(2,),
    )


def of_multiply_grad(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[p,e,b,k], ct[p,e,b,n], n[p,e]`: ranks add up their parts."""
    return DimMap(
        operands=((_P, _E, _R, _K), (_P, _E, _R, _D), (_P, _E)),
        results=((_E, _K, _D),),
        reduces={_P: "sum", _R: "sum"},
        terms=(2,),
    )


def of_total(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[p,e,b,d], n[p,e]`: rows are whole."""
    return DimMap(
        operands=((_P, _E, _R, _D), (_P, _E)),
        results=((_P, _E, _D),),
        reduces={_R: "sum"},
        terms=(1,),
    )


def of_spread(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `rows[p,e,d], x[p,e,b,d], n[p,e]`: what is repeated is whole."""
    rows, x, _ = (s for s in shapes if s is not None)
    wide = (*x[:2], result[3])
    labels = zip(rows, wide, (_P, _E, _D), strict=True)
    repeated = tuple(label if are_same(n, m) else None for n, m, label in labels)
    read = (_P, _E, _R, _D if are_same(x[3], result[3]) else None)
    return DimMap(operands=(repeated, read, (_P, _E)), results=((_P, _E, _R, _D),), terms=(2,))


def of_mask(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[p,e,b,d], n[p,e]`."""
    return DimMap(operands=((_P, _E, _R, _D), (_P, _E)), results=((_P, _E, _R, _D),), terms=(1,))
