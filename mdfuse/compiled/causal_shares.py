"""Shares of causal attention: how much the rank with the last positions computes of it."""

from __future__ import annotations

from collections.abc import Iterator

from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.visible import Run, tiles
from mdfuse.layouts.layout import Layout

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
