"""Products of parts that each rank adds to a buffer: their types, and their place in a sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from mdfuse.extents.expressions import Term, terms
from mdfuse.hir.program import BufferType
from mdfuse.ir import dims, shapes
from mdfuse.ir.dims import Labels
from mdfuse.layouts.layout import Partial, Replicate, Shard, Varies


def adds_to(into: torch.dtype, factors: torch.dtype) -> bool:
    """Return whether products of a dtype are added as they are computed to a buffer of another."""
    is_narrow = factors in (torch.float16, torch.bfloat16)
    return into == factors or (is_narrow and into == torch.float32)


def product_problem(into: BufferType, a: BufferType, b: BufferType, rank: int | None) -> str | None:
    """Return why `into + a @ b` is no sum of parts; None where each rank may add its own product.

    Args:
        into: what is added to.
        a, b: matrices, or batches of them.
        rank: whose program it is; None for the global one.
    """
    kinds = (into, a, b)
    try:
        shape = shapes.matmul((a.shape, b.shape), {})
    except (ValueError, IndexError, AssertionError):
        return "there is no product of these"
    if shape != into.shape or len(a.shape) != len(shape) or len(b.shape) not in (2, len(shape)):
        return f"the product has the shape {list(shape)}"
    if len({k.layout.mesh for k in kinds if k.layout is not None}) > 1:
        return "it computes on one mesh"
    labels = dims.matmul((a.shape, b.shape), into.shape, {})
    return _placement_problem(*kinds) or _rows_problem(
        kinds, (labels.result, *labels.operands), rank
    )


def own_problem(whole: BufferType, term: BufferType, rank: int | None) -> str | None:
    """Return why a rank's term of a sum does not lie where its part of the sum is; None: it does.

    Args:
        whole: the sum.
        term: what a rank adds to it.
        rank: whose program it is; None for the global one.
    """
    p, q = whole.layout, term.layout
    assert p is not None and q is not None
    for axis in p.mesh.axes:
        held, given = p.placement(axis), q.placement(axis)
        is_term = isinstance(held, Shard) and isinstance(given, Partial) and given.op == "sum"
        if p.mesh.axis_size(axis) > 1 and held != given and not is_term:
            return f"along {axis} {given} is no term of {held}"
    labels = tuple(range(len(whole.shape)))
    return _rows_problem((whole, term), (labels, labels), rank)


def _is_known(kind: BufferType) -> bool:
    """Return whether the number of a buffer's chunk is known; in a loop it is not."""
    stream = kind.layout.stream if kind.layout is not None else None
    return stream is None or all(t.kind in ("rank", "coord") for t in terms(stream.index))


def _placement_problem(into: BufferType, a: BufferType, b: BufferType) -> str | None:
    layouts = [k.layout for k in (into, a, b) if k.layout is not None]
    for axis in layouts[0].mesh.axes:
        if layouts[0].mesh.axis_size(axis) == 1:
            continue
        to, *factors = (layout.placement(axis) for layout in layouts)
        for p in (to, *factors):
            if isinstance(p, Partial | Varies):
                return f"a rank adds its own product, and along {axis} one buffer is {p}"
        if isinstance(to, Replicate) and not all(isinstance(p, Replicate) for p in factors):
            return f"along {axis} all ranks have the same sum, and other products"
        if isinstance(to, Shard) and all(isinstance(p, Replicate) for p in factors):
            return f"along {axis} the ranks have parts of the sum, and the same product"
    return None


def _rows_problem(
    kinds: Sequence[BufferType], labels: Sequence[Labels], rank: int | None
) -> str | None:
    """Return that ranks have other rows of one buffer than of another, along one dim."""
    mesh = kinds[0].layout.mesh if kinds[0].layout is not None else None
    if mesh is None or not all(map(_is_known, kinds)):
        return None
    for r in (mesh.first, mesh.last_rank) if rank is None else (rank,):
        by_label: dict[int | None, object] = {}
        for kind, its_labels in zip(kinds, labels, strict=True):
            layout = kind.placed.at(partial(_known, r))
            for label, rows in zip(its_labels, layout.rows(kind.shape, r), strict=True):
                if label is not None and by_label.setdefault(label, rows) != rows:
                    return f"rank {r} has other rows of one buffer than of another"
    return None


def _known(rank: int, term: Term) -> int | None:
    return rank if term.kind == "rank" else None
