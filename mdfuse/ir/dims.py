"""Dim labels: how the dims of an op's operands and result correspond, which gives its layouts.

Every dim of every operand and of the result carries a *label*, as in an einsum. Dims with one label
are split together. A label that the result lacks is reduced: splitting it makes the result Partial.
A dim without a label (None) must be whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from mdfuse.layouts.boxes import nth_chunk
from mdfuse.layouts.halo import Reach

Shape = tuple[int, ...]
Shapes = Sequence[Shape | None]
Labels = tuple[int | None, ...]


def present(shapes: Shapes) -> list[Shape]:
    """Return the shapes of the operands that are tensors, or numbers with the shape ()."""
    return [shape for shape in shapes if shape is not None]


def check_equal(shape: Shape, wanted: Shape) -> None:
    """Raise ValueError for the first extent of a shape that is not the one which is wanted."""
    for n, m in zip(shape, wanted, strict=True):
        if n != m:
            raise ValueError(f"{n} is not {m}")


def always(label: int, sizes: tuple[int, ...]) -> bool:
    """Allow every split: the parts of operand and result always fall together."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class DimMap:
    """Labels of the dims of an op.

    Attributes:
        operands: labels per operand; () for operands that are not tensors.
        results: labels of each result.
        reduces: label that a result lacks -> the reduce op that joins the results of a split. Any
            other label that may be split is one of all results.
        fits: (label, sizes of the axes that split it, outermost first) -> whether the parts of
            operands and result have the same boundaries.
        reaches: (operand, dim) -> which rows of it a part of the label's other dims needs, where
            these are not the part itself.
        plain: the labels of dims whose parts must be one run of rows each, since the op asks where
            a part lies; None: its row says so for all dims.
        in_chunks: the labels of dims that a loop takes in chunks, where they are not those of dims
            that axes split.
        terms: the operands of which a chunk of the result takes what the same chunk adds to a sum.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    reduces: Mapping[int, str] = field(default_factory=dict)
    fits: Callable[[int, tuple[int, ...]], bool] = always
    reaches: Mapping[tuple[int, int], Reach] = field(default_factory=dict)
    plain: frozenset[int] | None = None
    in_chunks: DimMap | None = None
    terms: tuple[int, ...] = ()

    @property
    def of_chunks(self) -> DimMap:
        """The labels of dims that a loop takes in chunks."""
        return self if self.in_chunks is None else self.in_chunks

    @property
    def reaching(self) -> set[int | None]:
        """The labels of dims with reaches."""
        return {self.operands[at][dim] for at, dim in self.reaches}

    @property
    def result(self) -> Labels:
        """Labels of the only result."""
        (labels,) = self.results
        return labels

    def may_split(self, label: int | None) -> bool:
        """True if dims with this label may be split: each result has it, or is reduced over it."""
        return label is not None and (
            label in self.reduces or all(label in labels for labels in self.results)
        )


#: (operands' shapes, shape of the first result, attributes) -> labels.
Rule = Callable[[Shapes, Shape, Mapping[str, Any]], DimMap]


def pointwise(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Align dims from the right, as broadcasting does; a dim that is repeated must be whole."""
    operands = tuple(aligned(shape, result) for shape in shapes)
    return DimMap(operands=operands, results=(tuple(range(len(result))),))


def aligned(shape: Shape | None, result: Shape) -> Labels:
    """Label an operand's dims as the result's, aligned from the right; None for a repeated dim."""
    if shape is None:
        return ()
    skip = len(result) - len(shape)
    return tuple(d + skip if n == result[d + skip] else None for d, n in enumerate(shape))


def rowwise(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label an op like softmax: `dim` must be whole, all others may be split."""
    whole = attrs["dim"] % max(len(result), 1)
    labels = tuple(None if d == whole else d for d in range(len(result)))
    return DimMap(operands=(labels,), results=(labels,))


def ranked(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label elements in order along `dim`, which must be whole, and their places there."""
    labels = rowwise(shapes, result, attrs)
    return replace(labels, results=labels.results * 2)


def without_last(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a tensor whose last dim goes, and must be whole."""
    labels = tuple(range(len(result)))
    return DimMap(operands=((*labels, None),), results=(labels,))


def with_last(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a tensor that gets a last dim, which is whole."""
    labels = tuple(range(len(result) - 1))
    return DimMap(operands=(labels,), results=((*labels, None),))


def flip(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a tensor turned round along dims: these must be whole, all others may be split."""
    turned = {d % len(result) for d in attrs["dims"]}
    labels = tuple(None if d in turned else d for d in range(len(result)))
    return DimMap(operands=(labels,), results=(labels,))


def permute(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a permutation: each label moves with its dim."""
    ndim = len(result)
    dims = tuple(d % ndim for d in attrs["dims"])
    return DimMap(operands=(tuple(range(ndim)),), results=(dims,))


def reduction(op: str) -> Rule:
    """Return the rule of a reduction: with a reduced dim split, the result is Partial(op)."""

    def rule(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
        shape = shapes[0] or ()
        dims = reduced_dims(attrs.get("dims"), len(shape))
        labels: list[int | None] = []
        for d in range(len(shape)):
            if d not in dims:
                labels.append(d)
            elif attrs.get("keepdim"):
                labels.append(None)
        return DimMap(
            operands=(tuple(range(len(shape))),),
            results=(tuple(labels),),
            reduces=dict.fromkeys(dims, op),
        )

    return rule


def reduced_dims(dims: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return the reduced dims, counted from 0; None means all dims."""
    return tuple(range(ndim)) if dims is None else tuple(d % ndim for d in dims)


def expand(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label an expansion: a dim that grows may be split in the result, not in the operand."""
    return pointwise(shapes, result, attrs)


def unsqueeze(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label inserted dims of extent 1: they must be whole."""
    new = {d % len(result) for d in attrs["dims"]}
    kept_dims = [d for d in range(len(result)) if d not in new]
    labels = tuple(None if d in new else d for d in range(len(result)))
    return DimMap(operands=(tuple(kept_dims),), results=(labels,))


def squeeze(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label removed dims of extent 1: they must be whole."""
    shape = shapes[0] or ()
    gone = {d % len(shape) for d in attrs["dims"] if shape[d] == 1}
    labels = tuple(None if d in gone else d for d in range(len(shape)))
    return DimMap(operands=(labels,), results=(tuple(x for x in labels if x is not None),))


def window(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a slice: dims that it cuts must be whole, dims taken entirely may be split."""
    shape = shapes[0] or ()
    taken = zip(attrs["starts"], attrs["ends"], attrs["steps"], shape, strict=True)
    labels = tuple(
        d if (start, step) == (0, 1) and end >= n else None
        for d, (start, end, step, n) in enumerate(taken)
    )
    return DimMap(operands=(labels,), results=(labels,))


def window_of_parts(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a slice that ranks reduce from what each has of it: dims it cuts may be split, too."""
    taken = window(shapes, result, attrs)
    cut = [d for d, label in enumerate(taken.result) if label is None]
    return DimMap(
        operands=(tuple(range(len(result))),),
        results=(taken.result,),
        reduces=dict.fromkeys(cut, attrs["reduce"]),
        plain=frozenset(cut),
    )


def concatenation(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a concatenation: the dim along which tensors are joined must be whole."""
    whole = attrs["dim"] % len(result)
    labels = tuple(None if d == whole else d for d in range(len(result)))
    return DimMap(operands=(labels,) * len(shapes), results=(labels,))


def matmul(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label `[…,m,k] @ […,k,n]` as `torch.matmul` takes it; a split k gives Partial(sum)."""
    a, b = shapes[0] or (), shapes[1] or ()
    rows, columns = len(a) > 1, len(b) > 1
    batch = len(result) - rows - columns
    m, n, k = batch, batch + rows, len(result)
    left = aligned(a[:-2], result[:batch]) if rows else ()
    right = aligned(b[:-2], result[:batch]) if columns else ()
    return DimMap(
        operands=((*left, m, k) if rows else (k,), (*right, k, n) if columns else (k,)),
        results=(tuple(range(len(result))),),
        reduces={k: "sum"},
    )


def linear(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label `x[…,k], w[n,k], b[n]`; without a bias k may be split, which gives Partial(sum)."""
    x, w, bias = (*shapes, None)[:3]
    assert x is not None and w is not None
    k, n = len(x) + len(w), len(x) - 1
    rows = tuple(range(len(x) - 1))
    has_n = len(w) == 2
    return DimMap(
        operands=((*rows, k), (n, k) if has_n else (k,), (n,) if bias else ())[: len(shapes)],
        results=((*rows, n) if has_n else rows,),
        reduces={k: "sum"} if bias is None else {},
    )


def embedding(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label `indices[…], table[v,d]`; with v split, ranks look up their rows: Partial(sum)."""
    d, v = len(result) - 1, len(result)
    indices = tuple(range(len(result) - 1))
    return DimMap(
        operands=(indices, (v, d)),
        results=((*indices, d),),
        reduces={v: "sum"},
        plain=frozenset({v}),
    )


def embedding_grad(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label `indices[…], ct[…,d]` and a table [v,d]: rows add up, each rank may make its own v."""
    n = len(shapes[0] or ())
    rows, d, v = tuple(range(n)), n, n + 1
    operands = (rows, (*rows, d))
    return DimMap(
        operands=operands,
        results=((v, d),),
        reduces=dict.fromkeys(rows, "sum"),
        plain=frozenset({v}),
    )


def window_grad(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a slice put into zeros: what it cut must be whole in it, and may be split in these."""
    taken = tuple(d if n == result[d] else None for d, n in enumerate(shapes[0] or ()))
    labels = tuple(range(len(result)))
    plain = frozenset(labels).difference(d for d in taken if d is not None)
    return DimMap(operands=(taken,), results=(labels,), plain=plain)


def layer_norm(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a layer or RMS norm: the normalised dims must be whole, all others may be split."""
    free = len(result) - len(attrs["normalized_shape"])
    labels = tuple(d if d < free else None for d in range(len(result)))
    whole = tuple((None,) * len(shape) if shape is not None else () for shape in shapes[1:])
    return DimMap(operands=(labels, *whole), results=(labels,))


def creation(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label the result of an op without tensor operands: every dim may be split."""
    return DimMap(operands=((),) * len(shapes), results=(tuple(range(len(result))),))


def likeness(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label the result as its first operand, which gives its layout and no numbers."""
    return pointwise((shapes[0], *(None for _ in shapes[1:])), result, attrs)


def reshape(shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
    """Label a reshape: in each of its `reshape_groups`, only the outermost dim may be split.

    The split must have the same boundaries before and after. Dims of extent 1 do not count, but
    stay split where there are such dims before and after: ranks that have no row keep none.
    """
    shape = shapes[0] or ()
    before: list[int | None] = [None] * len(shape)
    after: list[int | None] = [None] * len(result)
    inner: dict[int, tuple[int, int, int, int]] = {}
    for old, new in reshape_groups(shape, result):
        i = next((d for d in old if shape[d] != 1), None)
        j = next((d for d in new if result[d] != 1), None)
        if i is None or j is None:
            continue
        before[i] = after[j] = i
        inside = (
            math.prod(shape[d] for d in old if d > i),
            math.prod(result[d] for d in new if d > j),
        )
        inner[i] = (shape[i], inside[0], result[j], inside[1])
    units = _units(result)
    for at, dims in _units(shape).items():
        for i, j in zip(reversed(dims), reversed(units.get(at, ())), strict=False):
            before[i] = after[j] = i
            inner[i] = (1, 1, 1, 1)

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        return fall_together(*inner[label], sizes)

    return DimMap(operands=(tuple(before),), results=(tuple(after),), fits=fits)


def _units(shape: Shape) -> dict[int, list[int]]:
    """Return the product of the extents before -> the dims of extent 1 there."""
    units: dict[int, list[int]] = {}
    for d, n in enumerate(shape):
        if n == 1:
            units.setdefault(math.prod(shape[:d]), []).append(d)
    return units


def fall_together(n: int, n_inner: int, m: int, m_inner: int, sizes: tuple[int, ...]) -> bool:
    """Return whether the parts of a dim have the boundaries of those of another one.

    Args:
        n: rows of the one.
        n_inner: elements of a row.
        m: rows of the other one.
        m_inner: elements of such a row.
        sizes: of the axes that split them.
    """
    parts = math.prod(sizes)
    if (n == m and n_inner == m_inner) or (n % parts == 0 and m % parts == 0):
        return True
    return _boundaries(n, n_inner, sizes) == _boundaries(m, m_inner, sizes)


def reshape_groups(shape: Shape, result: Shape) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of dims, before and after, whose extents have one product.

    >>> reshape_groups((2, 3, 4), (6, 4))
    [([0, 1], [0]), ([2], [1])]
    """
    if 0 in shape:
        common = next(
            (d for d, (a, b) in enumerate(zip(shape, result, strict=False)) if a != b),
            min(len(shape), len(result)),
        )
        pairs = enumerate(zip(reversed(shape[common:]), reversed(result[common:]), strict=False))
        same = next((n for n, (a, b) in pairs if a != b), len(shape) - common)
        ends = range(-min(same, len(result) - common), 0)
        behind = [([len(shape) + d], [len(result) + d]) for d in ends]
        return [*(([d], [d]) for d in range(common)), *behind]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) and j < len(result):
        old, new = [i], [j]
        p, q = shape[i], result[j]
        i, j = i + 1, j + 1
        while p != q:
            if p < q:
                p, i = p * shape[i], i + 1
                old.append(i - 1)
            else:
                q, j = q * result[j], j + 1
                new.append(j - 1)
        groups.append((old, new))
    return groups


def unit_rows(shape: Shape, result: Shape) -> dict[int, int]:
    """Return outermost dim before -> that after, of the groups of a reshape where one has one row.

    One row before is then all rows after, or the other way round: a chunk has all or nothing.

    >>> unit_rows((1, 3, 4), (3, 4)), unit_rows((3, 4), (1, 3, 4)), unit_rows((2, 3), (6,))
    ({0: 0}, {0: 0}, {})
    """
    pairs = {old[0]: new[0] for old, new in reshape_groups(shape, result)}
    return {i: j for i, j in pairs.items() if shape[i] == 1 or result[j] == 1}


def _boundaries(extent: int, inner: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return where each part of a dim begins and ends, counted in elements of its group."""
    pieces = []
    for choice in product(*map(range, sizes)):
        interval = (0, extent)
        for size, i in zip(sizes, choice, strict=True):
            interval = nth_chunk(interval, size, i)
        pieces.append((interval[0] * inner, interval[1] * inner))
    return pieces
