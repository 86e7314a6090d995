"""Labels of dims in blocks: which views of them, and what is joined, are local.

%q: f32[4,8,2] (tp=S1) = slice(%h: f32[4,24,2] (tp=S1/3), starts=[0,0,0], ends=[4,8,2])
%r: f32[4,3,8,2] (tp=S2) = reshape(%h)
%h: f32[4,24,2] (tp=S1/3) = reshape(%r)
%h: f32[4,24,2] (tp=S1/3) = cat(%q, %k, %v, dim=1)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mdfuse.ir.dims import DimMap, Shape, fall_together, reshape_groups
from mdfuse.layouts.blocks import Cut, as_blocks, part_of_blocks
from mdfuse.layouts.layout import Layout

#: How many blocks a reshape makes of dims before a split one, at most: as fused projections have.
_FEW_BLOCKS = 8


#: How the result is cut along each dim of the operand that is in blocks, or becomes so; None:
#: plainly.
Taken = dict[int, Cut | None]


#: The ops that have labels of their own where dims are in blocks.
IN_BLOCKS = frozenset({"slice", "reshape", "cat"})


def labels_in_blocks(
    op: str,
    attrs: Mapping[str, Any],
    shapes: Sequence[Shape | None],
    result: Shape,
    layouts: Sequence[Layout | None],
    labels: DimMap,
) -> tuple[DimMap, Taken]:
    """Label the dims of one of `IN_BLOCKS` so that more of them stay split.

    Args:
        op: which one.
        attrs: its attributes.
        shapes: of its operands.
        result: the shape of its result.
        layouts: of its operands, as far as they are known.
        labels: those without blocks.
    """
    shape, layout = shapes[0], layouts[0]
    if shape is None or layout is None:
        return labels, {}
    if op == "slice":
        return along_blocks(labels, attrs, shape, layout.cuts)
    if op == "reshape":
        return reshape_of_blocks(labels, shape, result, layout)
    return joined_blocks(labels, attrs["dim"] % len(result), shapes, layouts)


def along_blocks(
    labels: DimMap, attrs: Mapping[str, Any], shape: Shape, cuts: Mapping[int, Cut]
) -> tuple[DimMap, Taken]:
    """Label the dims of a slice that takes whole blocks of them: they may stay split.

    Args:
        labels: those of a `window`.
        attrs: its attributes.
        shape: of its operand.
        cuts: dims of the operand that are in blocks -> how they are cut.

    Returns:
        the labels, and for each such dim how the result is cut; None: plainly.
    """
    cut_of: Taken = {}
    for d, cut in cuts.items():
        is_cut = labels.result[d] is None or (0, d) in labels.reaches
        if is_cut and attrs["steps"][d] == 1 and not cut.plain:
            taken = part_of_blocks(cut.blocks, shape[d], (attrs["starts"][d], attrs["ends"][d]))
            if taken != 0:
                cut_of[d] = Cut(taken) if taken else None
    if not cut_of:
        return labels, cut_of
    dims = tuple(d if d in cut_of else label for d, label in enumerate(labels.result))
    reaches = {at: reach for at, reach in labels.reaches.items() if at[1] not in cut_of}
    return replace(labels, operands=(dims,), results=(dims,), reaches=reaches), cut_of


def joined_blocks(
    labels: DimMap, dim: int, shapes: Sequence[Shape | None], layouts: Sequence[Layout | None]
) -> tuple[DimMap, Taken]:
    """Label a concatenation of tensors that are split along its dim alike: each is a block."""
    known = [x for x in layouts if x is not None]
    extents = [shape[dim] for shape in shapes if shape is not None]
    places = {(x.mesh, x.split_axes(dim), x.cuts.get(dim), x.stream) for x in known}
    has_reaches = any(x.reaches for x in known)
    is_known = len(known) == len(shapes) and all(type(n) is int for n in extents)
    if not is_known or len(places) != 1 or has_reaches:
        return labels, {}
    ((_, axes, cut, stream),) = places
    blocks = as_blocks(extents) if any(extents) else None
    is_streamed = stream is not None and stream.dim == dim
    if not axes or cut is not None or is_streamed or blocks is None:
        return labels, {}
    dims = tuple(dim if d == dim else label for d, label in enumerate(labels.result))

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        return label == dim or labels.fits(label, sizes)

    same = (dims,) * len(shapes)
    joined = replace(labels, operands=same, results=(dims,), fits=fits, reaches={})
    return joined, {dim: Cut(blocks)}


def reshape_of_blocks(
    labels: DimMap, shape: Shape, result: Shape, operand: Layout
) -> tuple[DimMap, Taken]:
    """Label the dims of a reshape from and into blocks: more of them may stay split.

    A dim that the reshape keeps stays in blocks; of one that falls into its equal blocks, the dim
    behind that of the blocks is split, plainly. The other way round, a dim that is split behind a
    few others is in blocks when they are one; not behind the first dim, which is a batch.

    Args:
        labels: those of a `reshape`.
        shape: of its operand.
        result: of its result.
        operand: the layout of its operand.

    Returns:
        the labels, and for each such dim of the operand how the result is cut; None: plainly.
    """
    before, after = [*labels.operands[0]], [*labels.result]
    taken, inner = Taken(), dict[int, tuple[int, int, int, int]]()
    for old, new in reshape_groups(shape, result):
        split = [d for d in old if operand.split_axes(d)]
        large = [d for d in old if shape[d] != 1], [d for d in new if result[d] != 1]
        if len(split) != 1 or not large[1]:
            continue
        (d,), cut = split, operand.cuts.get(split[0])
        if cut is not None and len(large[0]) == len(large[1]) == 1:
            taken[d] = cut
            continue
        j, blocks = large[1][0], math.prod(shape[e] for e in old if e < d)
        if cut is not None:
            behind = (
                _behind(result, large[1], cut.blocks) if not cut.plain and blocks == 1 else None
            )
            if behind is None or not isinstance(cut.blocks, int):
                continue
            after[j], j, taken[d] = None, behind, None
            rows = shape[d] // cut.blocks, result[j]
        elif len(large[1]) == 1 and old[0] and _are_few(blocks, shape[d], result[j]):
            before[large[0][0]], taken[d] = None, Cut(blocks)
            rows = shape[d], result[j] // blocks
        else:
            continue
        before[d], after[j] = d, d
        inside = (
            math.prod(shape[e] for e in old if e > d),
            math.prod(result[e] for e in new if e > j),
        )
        inner[d] = rows[0], inside[0], rows[1], inside[1]

    def fits(label: int, sizes: tuple[int, ...]) -> bool:
        if label in inner:
            return fall_together(*inner[label], sizes)
        return label in taken or labels.fits(label, sizes)

    if not taken:
        return labels, taken
    return replace(labels, operands=(tuple(before),), results=(tuple(after),), fits=fits), taken


def _are_few(blocks: int, rows: int, extent: int) -> bool:
    """True if dims before a split one may be blocks of what they make up: all are numbers."""
    is_known = all(type(n) is int for n in (blocks, rows, extent))
    return is_known and 1 < blocks <= _FEW_BLOCKS and rows > 1


def _behind(result: Shape, dims: Sequence[int], blocks: object) -> int | None:
    """Return the dim behind those that number some blocks; None where none do."""
    n = 1
    for d in dims:
        if n == blocks:
            return d
        n *= result[d]
    return None
