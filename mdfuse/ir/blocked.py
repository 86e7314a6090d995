"""Dim labels of an op whose operands, or results, are split in blocks.

    x: [4,12] (tp=S1/3)     slice [0:4, 4:8]        dim 1 has a label all the same: (tp=S1)
                            reshape to [4,3,2,2]    dim 1 becomes dim 2: (tp=S2)
                            add a bias              (tp=S1/3)

Blocks pass wherever a rank's part of the result depends on its parts of the operands alone, and
not on where these lie. Of all other ops an operand in blocks is resharded before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.dims import DimMap, Shape, Shapes, boundaries, reshape, reshape_groups, window
from mdfuse.ir.op_table import Op
from mdfuse.layouts.blocks import Blocks, as_blocks, part_of_blocks, segments

#: dim -> its blocks, of the dims of a tensor that are split; None: it is one block
Held = Mapping[int, Blocks | None]
#: Attributes of a part that follow from its extents, wherever it lies.
_BY_EXTENT = (
    None,
    of_part.local_shape,
    of_part.local_ends,
    of_part.local_squeeze,
    of_part.global_count,
    of_part.with_identity,
)


def with_blocks(
    row: Op,
    labels: DimMap,
    shapes: Shapes,
    result: Shape,
    attrs: Mapping[str, Any],
    held: Sequence[Held],
    asked: Sequence[Held] = (),
) -> DimMap:
    """Return the labels of an op of which dims are split in blocks, and the blocks of labels.

    Args:
        row: the op's.
        labels: as for dims without blocks.
        shapes: of the operands.
        result: of the first result.
        attrs: of the op.
        held: for each operand, which dims are split; of those that differ the largest decides.
        asked: likewise for each result; they decide where no operand does.
    """
    if row.localize not in _BY_EXTENT or not any(any(x.values()) for x in (*held, *asked)):
        return labels
    found = _Blocks(labels, shapes, result, attrs)
    sizes = [math.prod(shape) if shape is not None else 0 for shape in shapes]
    for at in sorted(range(len(shapes)), key=lambda i: -sizes[i]):
        for dim, blocks in held[at].items():
            found.take(row, at, dim, blocks)
    for of, dims in zip(labels.results, asked, strict=False):
        for dim, blocks in dims.items():
            label = of[dim]
            if label is not None and row.rule is not reshape:
                found.same(label, blocks)
    return found.made()


class _Blocks:
    """The labels under construction."""

    def __init__(self, labels: DimMap, shapes: Shapes, result: Shape, attrs: Mapping[str, Any]):
        self.labels, self.shapes, self.result, self.attrs = labels, shapes, result, attrs
        self.operands = [list(of) for of in labels.operands]
        self.after = list(labels.results[0])
        #: label -> the blocks of operands, and of results
        self.blocks: dict[int, tuple[Blocks | None, Blocks | None]] = {}
        self.fits: dict[int, Callable[[tuple[int, ...]], bool]] = {}

    def take(self, row: Op, at: int, dim: int, blocks: Blocks | None) -> None:
        """Let a dim of an operand decide, where none has decided yet for its label."""
        label = self.operands[at][dim]
        if label in self.blocks:
            return
        if row.rule is window and label is None and blocks is not None:
            self.cut(dim, blocks)
        elif row.rule is reshape and label is not None:
            self.regroup(dim, label, blocks)
        elif label is not None:
            self.same(label, blocks)

    def same(self, label: int, blocks: Blocks | None) -> None:
        """All dims of a label are in the same blocks, if they are equally long."""
        shapes = [*zip(self.labels.operands, self.shapes, strict=True)]
        shapes.append((self.labels.results[0], self.result))
        extents = {
            shape[of.index(label)] for of, shape in shapes if shape is not None and label in of
        }
        if len(extents) == 1:
            self.blocks.setdefault(label, (blocks, blocks))

    def cut(self, dim: int, blocks: Blocks) -> None:
        """A slice that takes whole blocks is taken from each rank's part."""
        start, end, step = (self.attrs[name][dim] for name in ("starts", "ends", "steps"))
        shape = self.shapes[0] or ()
        taken = part_of_blocks(blocks, shape[dim], (start, min(end, shape[dim])))
        if step == 1 and taken != 0:
            self.operands[0][dim] = self.after[dim] = dim
            self.blocks[dim] = (blocks, taken)

    def regroup(self, dim: int, label: int, blocks: Blocks | None) -> None:
        """Equal blocks become a dim of their own; others stay, where rows become rows."""
        if blocks is None:
            return
        shape = self.shapes[0] or ()
        old, new = next(g for g in reshape_groups(shape, self.result) if dim in g[0])
        lengths = [stop - start for start, stop in segments(blocks, shape[dim])]
        inner = math.prod(shape[d] for d in old if d > dim)
        whole = 1
        for d in new:
            rest = math.prod(self.result[e] for e in new if e > d)
            if whole == len(lengths) and len({*lengths}) == 1 and self.result[d] != 1:
                self.after = [None if x == label else x for x in self.after]
                self.after[d] = label
                self.blocks[label] = (blocks, None)
                self.know(label, [(lengths[0], inner, self.result[d], rest)])
                return
            whole *= self.result[d]
        first = next(d for d in new if self.result[d] != 1)
        rest = math.prod(self.result[d] for d in new if d > first)
        if all(n * inner % rest == 0 for n in lengths):
            rows = [n * inner // rest for n in lengths]
            self.blocks[label] = (blocks, as_blocks(rows))
            self.know(label, [(n, inner, m, rest) for n, m in zip(lengths, rows, strict=True)])

    def know(self, label: int, pairs: list[tuple[int, int, int, int]]) -> None:
        """Note that the parts of each block must have the same boundaries before and after."""
        self.fits[label] = lambda sizes: all(
            boundaries(n, p, sizes) == boundaries(m, q, sizes) for n, p, m, q in pairs
        )

    def made(self) -> DimMap:
        before, fits = self.labels.fits, self.fits

        def now(label: int, sizes: tuple[int, ...]) -> bool:
            return fits[label](sizes) if label in fits else before(label, sizes)

        return replace(
            self.labels,
            operands=tuple(map(tuple, self.operands)),
            results=(tuple(self.after), *self.labels.results[1:]),
            fits=now if fits else before,
            blocks={x: both for x, both in self.blocks.items() if any(both)},
        )
