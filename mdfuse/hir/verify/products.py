"""Products of a rank's own parts that are added to what it has: which are right, and where."""

from __future__ import annotations

from mdfuse.extents.expressions import terms
from mdfuse.hir.program import BufferType
from mdfuse.ir import dims, shapes
from mdfuse.layouts.layout import Partial, Replicate, Shard, Varies


def product_problem(into: BufferType, a: BufferType, b: BufferType, rank: int | None) -> str | None:
    """Return why `into + a @ b` is no sum of parts; None where each rank may add its own product.

    Args:
        into: what is added to.
        a, b: matrices, or batches of them.
        rank: whose program it is; None for the global one.
    """
    kinds = (into, a, b)
    try:
        made = shapes.matmul((a.shape, b.shape), {})
    except (ValueError, IndexError, AssertionError):
        return "there is no product of these"
    if made != into.shape or len(a.shape) != len(made) or len(b.shape) not in (2, len(made)):
        return f"the product has the shape {list(made)}"
    if len({k.layout.mesh for k in kinds if k.layout is not None}) > 1:
        return "it computes on one mesh"
    problem = _placement_problem(*kinds)
    mesh = into.layout.mesh if into.layout is not None else None
    if problem is not None or mesh is None or not all(map(_is_known, kinds)):
        return problem
    ranks = (mesh.first, mesh.last_rank) if rank is None else (rank,)
    return next((p for p in (_rows_problem(*kinds, r) for r in ranks) if p is not None), None)


def _is_known(kind: BufferType) -> bool:
    """Tell whether it is known which chunk a buffer is: in a loop it is once that is written out."""
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


def _rows_problem(into: BufferType, a: BufferType, b: BufferType, rank: int) -> str | None:
    """Return which rows of one dim a rank has of one buffer, and others of another."""
    found: dict[int | None, object] = {}
    labels = dims.matmul((a.shape, b.shape), into.shape, {})
    for kind, own in zip((into, a, b), (labels.result, *labels.operands), strict=True):
        assert kind.layout is not None
        here = kind.layout.at(lambda term: rank if term.kind == "rank" else None)
        for label, rows in zip(own, here.rows(kind.shape, rank), strict=True):
            if label is not None and found.setdefault(label, rows) != rows:
                return f"rank {rank} has other rows of one dim than of the other"
    return None
