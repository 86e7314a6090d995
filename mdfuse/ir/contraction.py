"""Contractions of two tensors, as an einsum writes them: call, labels, shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.extents.extent import repeated
from mdfuse.ir.dims import DimMap, Shape, Shapes

Attrs = Mapping[str, Any]


def contract(
    a: Tensor, b: Tensor, *, left: Sequence[int], right: Sequence[int], kept: Sequence[int]
) -> Tensor:
    """Multiply where labels are equal, and sum over those that are not kept.

    Args:
        a: its dims have the labels `left`, each once.
        b: its dims have the labels `right`, each once.
        left, right: numbers from 0 to 51.
        kept: labels of the result's dims.
    """
    number = _numbers((a, left), (b, right))
    mine, others, results = ([number[x] for x in labels] for labels in (left, right, kept))
    return torch.einsum(a, mine, b, others, results)


def _numbers(*operands: tuple[Tensor, Sequence[int]]) -> dict[int, int]:
    """Return numbers for labels: einsum goes along those that are summed in ascending order.

    Dims that lie in this order are one dim of a matrix, where they are next to each other; in any
    other order einsum copies the operand. So the larger operand's order in memory counts.
    """
    if all(x.is_contiguous() for x, _ in operands):
        return {label: label for _, labels in operands for label in labels}
    first, second = sorted(operands, key=lambda pair: -pair[0].numel())
    lie = [
        label
        for x, labels in (first, second)
        for _, label in sorted(zip(x.stride(), labels, strict=True), key=lambda pair: -pair[0])
    ]
    return {label: n for n, label in enumerate(dict.fromkeys(lie))}


def of_contraction(shapes: Shapes, result: Shape, attrs: Attrs) -> DimMap:
    """Label each dim as it is labelled; a dim of extent 1 that meets a longer one must be whole."""
    extents = _extents(shapes, attrs)
    operands = tuple(
        tuple(x if n == extents[x] else None for x, n in zip(labels, shape or (), strict=True))
        for labels, shape in zip((attrs["left"], attrs["right"]), shapes, strict=True)
    )
    gone = extents.keys() - {*attrs["kept"]}
    return DimMap(
        operands=operands, results=(tuple(attrs["kept"]),), reduces=dict.fromkeys(gone, "sum")
    )


def _extents(shapes: Shapes, attrs: Attrs) -> dict[int, int]:
    extents: dict[int, int] = {}
    for labels, shape in zip((attrs["left"], attrs["right"]), shapes, strict=True):
        if shape is None or len({*labels}) < len(labels):
            raise ValueError(f"the labels {labels} are those of {shape}, each once")
        for x, n in zip(labels, shape, strict=True):
            extents[x] = repeated(extents.get(x, 1), n)
    return extents


def shape_of_contraction(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the extents of the labels that are kept."""
    extents, labels = _extents(shapes, attrs), attrs["kept"]
    if len({*labels}) < len(labels):
        raise ValueError(f"the labels {labels} stand once each")
    return tuple(extents[x] for x in labels)
