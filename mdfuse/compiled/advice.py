"""The reasons of posts; the largest reshards of a program, and cheaper ways to write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdfuse.communication import Communication
from mdfuse.config import Options, backend_choice, options_from_environment
from mdfuse.hir.program import Instruction
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.visible import Run, tiles
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, Shard
from mdfuse.passes import chunk_losses, count_rows
from mdfuse.passes.prices import received_bytes
from mdfuse.passes.strategy import dim_map
from mdfuse.reshard import Carriers

#: Reshards are mentioned that bring more than this share of all bytes that arrive.
_SHARE = 0.1

_ANOTHER_ORDER = "the axes split a dim in another order", "one order= for both"


def advice(fusion: Fusion, options: Options | None = None) -> Iterator[str]:
    """Yield lines about reshards of over a tenth of all bytes, large logits and uneven shares.

    Args:
        fusion: after all passes.
        options: as it was compiled; None: those of the environment.
    """
    chosen = options_from_environment(options)
    carriers = backend_choice(chosen.backend).carriers
    sets = (e for e in fusion.exprs if e.op == "set" and fusion.values[e.output].is_tensor)
    moved = {e.output: _bytes(fusion, e, carriers) for e in sets}
    total = sum(moved.values())
    for expr in fusion.exprs:
        size = moved.get(expr.outputs[0], 0)
        if size > _SHARE * total:
            yield from _lines(fusion, expr, size, total)
    yield from chunk_losses.explained(fusion, chosen.logits_bytes)
    yield from count_rows.explained(fusion, chosen.counts)
    yield from fusion.notes
    yield from uneven_shares(fusion)


def _bytes(fusion: Fusion, expr: Expr, carriers: Carriers) -> int:
    """Return the bytes that a set brings to the rank that receives most."""
    (x,), layout = expr.reads, fusion.layout
    return round(received_bytes(fusion.values[x], layout(x), layout(expr.output), carriers))


def _lines(fusion: Fusion, expr: Expr, size: int, total: int) -> Iterator[str]:
    value = fusion.values[expr.reads[0]]
    before, after = fusion.layout(value.name), fusion.layout(expr.output)
    share = f"{round(100 * size / total)} % of what arrives"
    where = f" ({expr.source})" if expr.source else ""
    yield f"moves {size} bytes to a rank, {share}: %{value.name} {before} -> {after}{where}"
    reason, instead = _because(fusion, expr, value, before, after)
    yield f"  because {reason}"
    yield f"  instead {instead}"


def _because(
    fusion: Fusion, expr: Expr, value: Value, before: Layout, after: Layout
) -> tuple[str, str]:
    """Return the reason for a reshard, and a cheaper way to write it."""
    readers = fusion.consumers[expr.output]
    if before.mesh != after.mesh:
        return f"it is read on {after.mesh}", f"compute what is read on {after.mesh} there"
    both = zip(before.mesh.axes, before.placements, after.placements, strict=True)
    changes = [c for c in both if c[1] != c[2]]
    if not changes:
        return _ANOTHER_ORDER
    axis, was, goal = changes[0]
    if isinstance(was, Partial):
        return _of_partial(value, axis, was, goal, before)
    if isinstance(goal, Shard) and isinstance(was, Shard):
        reason = f"it is split on dim {was.dim} and read split on dim {goal.dim}"
        return reason, f"split it on dim {goal.dim} where it is made: {_on(axis, goal.dim)}"
    if not isinstance(was, Shard):
        return _ANOTHER_ORDER
    if fusion.values[expr.output].is_law or not readers:
        reason = f"it is asked for whole along {axis}"
        return reason, f"leave it split: {_on(axis, was.dim)}; or make it smaller before"
    return _of_split(fusion, expr.output, readers, axis, was.dim)


def _of_partial(
    value: Value, axis: str, was: Partial, goal: Placement, layout: Layout
) -> tuple[str, str]:
    n = layout.mesh.axis_size(axis)
    dims = (d for d, extent in enumerate(value.shape) if extent >= n and not layout.split_axes(d))
    dim = next(dims, None)
    reason = f"the ranks along {axis} have parts of a {was.op}"
    if isinstance(goal, Replicate) and dim is not None:
        return reason, f"ask for it split, which moves half: {_on(axis, dim)}"
    return reason, "nothing: it is what joining them takes"


def _of_split(
    fusion: Fusion, copy: str, readers: Sequence[Expr], axis: str, dim: int
) -> tuple[str, str]:
    reader = readers[0]
    where = f" ({reader.source})" if reader.source else ""
    labels = dim_map(reader, fusion.values)
    of = labels.operands[reader.inputs.index(copy)]
    if labels.may_split(of[dim]):
        reason = f"{reader.op}{where} reads it whole along {axis}, as its other operands are"
        return reason, f"split these alike, or place its result so: {_on(axis, dim)}"
    free = [d for d, x in enumerate(of) if labels.may_split(x) and x not in labels.reduces]
    reason = f"{reader.op}{where} needs dim {dim} whole"
    if free:
        return reason, f"split dim {free[0]} where it is made: {_on(axis, free[0])}"
    return reason, f"nothing, as long as {reader.op} follows"


def _on(axis: str, dim: int) -> str:
    return f'.on(mesh, {{"{axis}": Shard({dim})}})'


def post_reason(i: Instruction) -> str:
    """Return the reason for a post or a receive."""
    if i.comm is not None:
        note = f" ({i.source.note})" if i.source is not None and i.source.note else ""
        return f"{i.comm}: {i.comm.source} -> {i.comm.destination}, {_why(i.comm)}{note}"
    along = f" along {i.kwargs['axis']}" if "axis" in i.kwargs else ""
    return f"Recv %{i.reads[0]} from {i.kwargs['from']}{along}, which sends it: a ring"


def _why(c: Communication) -> str:
    if c.kind == "ReduceExchange":
        return "no one collective does this; each rank receives the terms of what it is to have"
    if c.kind == "Exchange":
        return "no one collective does this; each rank receives just what it lacks"
    if c.is_along_axes:
        return f"the placement changes along {' and '.join(c.axes)}"
    return "the meshes differ"


# -- shares of causal attention --------------------------------------------------------------------


#: Ranks that compute up to this much of an equal share are not mentioned.
_EVEN = 1.1


def uneven_shares(fusion: Fusion) -> Iterator[str]:
    """Yield a line for the first causal attention whose rows are split so that some rank has most.

    Args:
        fusion: after all passes.
    """
    for expr in fusion.exprs:
        share = _most(fusion, expr) if expr.kwargs.get("is_causal") else None
        if share is None or share[0] <= _EVEN:
            continue
        times, axes = share
        where = f" ({expr.source})" if expr.source else ""
        yield (
            f"a rank computes {times:.2f} of its share of the causal attention{where}: positions "
            f"are split along {' and '.join(axes)} one after the other; in zigzag order, "
            "Shard(dim, zigzag=True), each rank has as much"
        )
        return


def _most(fusion: Fusion, expr: Expr) -> tuple[float, tuple[str, ...]] | None:
    """Return the share of the busiest rank, and the axes that split rows; None where none do."""
    q, k = (fusion.values[x] for x in expr.reads[:2])
    dim, layout = len(q.shape) - 2, fusion.layout(q.name)
    axes, extents = layout.split_axes(dim), (q.shape[dim], k.shape[-2])
    if not axes or not all(type(n) is int and n for n in extents):
        return None
    counts = [_pairs(rows, extents[1], expr) for rows in _rows(layout, dim, extents[0])]
    return max(counts) * len(counts) / max(sum(counts), 1), axes


def _rows(layout: Layout, dim: int, extent: int) -> Iterator[tuple[Run, ...]]:
    yield from (rows for _, rows in layout.parts(dim, extent).every())


def _pairs(rows: tuple[Run, ...], keys: int, expr: Expr) -> int:
    """Return how many pairs of a row and a key are visible."""
    first = expr.kwargs.get("q_offset", 0)
    by = first if isinstance(first, int) else 0
    placed = [(a + by, b + by) for a, b in rows]
    return sum(t.pairs for t in tiles(placed, [(0, keys)], True, expr.kwargs.get("window")))
