"""Label the dims of operations on rows grouped by expert: see `mdfuse.ir.ragged`.

Axes that split tokens split the parts of a ragged value. A loop that takes tokens in chunks takes
the rows of each part in chunks: there a rank has tokens of one part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from mdfuse.extents.extent import are_same, is_symbolic
from mdfuse.ir.dims import DimMap, Labels, Shape, Shapes, present
from mdfuse.layouts.boxes import nth_chunk

Attrs = Mapping[str, Any]

#: The labels: parts (of tokens), experts, what is summed over, columns; rows of a part; tokens.
_P, _E, _K, _D, _R, _T = range(6)

#: label -> that of a dim that axes split: those of tokens split parts. Rows of a part are whole.
_SPLIT = {_T: _P, _R: None}
#: label -> that of a dim that a loop takes in chunks: tokens are rows of a part.
_CHUNKED = {_T: _R, _P: None, _D: None}


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


def _of_ids(shape: Shape) -> Labels:
    return (_T, None)[: len(shape)]


def _named(every: Sequence[Labels], names: Mapping[int, int | None]) -> tuple[Labels, ...]:
    """Return labels of dims under other names."""
    return tuple(tuple(x if x is None else names.get(x, x) for x in labels) for labels in every)


def _by_parts(
    ids: Shape,
    parts: int,
    attrs: Attrs,
    operands: Sequence[Labels],
    results: Sequence[Labels],
    terms: tuple[int, ...] = (),
    bound: int | None = None,
) -> DimMap:
    """Label dims that axes split with tokens, or that a loop takes in chunks of tokens.

    Chunks of tokens are chunks of the rows of each part: each rank has one part.

    Args:
        ids: [t] or [t,k], the experts of each token.
        parts: into which tokens are split.
        attrs: of the operation, which may say how many tokens each part has.
        operands: the labels of operands: tokens, parts, rows of a part, and columns.
        results: those of results.
        terms: see `DimMap`.
        bound: how many rows a part has room for, in chunks of one length; None: for all.
    """
    tokens, room = ids[0], None if bound is None else bound // max(choices(ids), 1)

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

    chunks = _named(results, _CHUNKED)
    return DimMap(
        operands=_named(operands, _SPLIT),
        results=_named(results, _SPLIT),
        fits=_fitting(tokens, parts, attrs),
        terms=terms,
        in_chunks=DimMap(
            operands=_named(operands, _CHUNKED),
            results=chunks,
            reduces={} if any(_R in labels for labels in chunks) else {_R: "sum"},
            fits=fits,
            terms=terms,
        ),
    )


def of_count(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `ids[t,k]`: tokens are split as parts are."""
    (ids,) = present(shapes)
    return _by_parts(ids, result[0], attrs, (_of_ids(ids),), ((_P, None),))


def of_places(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `ids[t,k], n[p,e]`: each rank looks at its tokens."""
    ids, n = present(shapes)
    labels = _of_ids(ids)
    return _by_parts(ids, n[0], attrs, (labels, (_P, None)), (labels,), terms=(1,))


def _into_parts(shapes: Shapes, rows: Labels, bound: int, attrs: Attrs) -> DimMap:
    x, ids, n, *at = present(shapes)
    tokens = (_T, None, _D) if len(x) == 3 else (_T, _D)
    operands = (tokens, _of_ids(ids), (_P, None), *map(_of_ids, at))
    return _by_parts(ids, n[0], attrs, operands, (rows,), (2,), bound)


def of_group(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[t,d], ids[t,k], n[p,e]`: each rank groups the rows of its tokens."""
    return _into_parts(shapes, (_P, None, _R, _D), result[2], attrs)


def of_line_up(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[t,d], ids[t,k], n[p,e]`: each rank lines up the rows of its tokens."""
    return _into_parts(shapes, (_P, _R, _D), result[1], attrs)


def _from_parts(shapes: Shapes, rows: Labels, attrs: Attrs) -> DimMap:
    y, ids, n, *at = present(shapes)
    operands = (rows, _of_ids(ids), (_P, None), *map(_of_ids, at))
    return _by_parts(ids, n[0], attrs, operands, ((_T, None, _D),), (2,), y[-2])


def of_ungroup(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `y[p,e,b,d], ids[t,k], n[p,e]`."""
    return _from_parts(shapes, (_P, None, _R, _D), attrs)


def of_put_back(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `y[p,b,d], ids[t,k], n[p,e]`."""
    return _from_parts(shapes, (_P, _R, _D), attrs)


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
    rows, x, _ = present(shapes)
    wide = (*x[:2], result[3])
    labels = zip(rows, wide, (_P, _E, _D), strict=True)
    repeated = tuple(label if are_same(n, m) else None for n, m, label in labels)
    read = (_P, _E, _R, _D if are_same(x[3], result[3]) else None)
    return DimMap(operands=(repeated, read, (_P, _E)), results=((_P, _E, _R, _D),), terms=(2,))


def of_mask(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label `x[p,e,b,d], n[p,e]`."""
    return DimMap(operands=((_P, _E, _R, _D), (_P, _E)), results=((_P, _E, _R, _D),), terms=(1,))
