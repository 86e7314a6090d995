"""Nodes that the backward computes again, in blocks: what a block reads and returns is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node

from mdfuse.frontend.importing.lines import mark_of


def recomputed_blocks(live: Iterable[Node]) -> Mapping[Node, str]:
    """Return the name of the block of each node that is computed again."""
    marks = {n: mark_of(n) for n in live if n.op == "call_function"}
    return {n: f"checkpoint {number}" for n, number in marks.items() if number is not None}
