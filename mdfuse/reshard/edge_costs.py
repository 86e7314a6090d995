"""Edge costs and an admissible heuristic (lower bound) for the layout search on one mesh.

Nodes consist of numbers: a search visits thousands of nodes, and few become layouts. The heuristic
never exceeds the remaining cost. Without a Partial, and for costs in elements, it is exact, since
one Exchange brings each rank just its missing elements; with a Partial, each rank needs the sum of
the others' terms for its whole part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mdfuse.extents.expressions import terms
from mdfuse.layouts.dim_rows import DimRows, dims_of
from mdfuse.layouts.endpoints import Side
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.hosts import pairs_apart, rings
from mdfuse.layouts.inter_host_volume import crossing, messages
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, Shard
from mdfuse.layouts.recv_volume import (
    UNIT,
    arriving,
    dearer,
    is_lacking,
    is_special,
    lacks,
    most_and_mean,
    weighed,
)
from mdfuse.reshard.clock import is_timed, nanoseconds, through_teams
from mdfuse.reshard.nodes import Carriers, LayoutNode, Move, tables_of


@dataclass
class MoveCosts:
    """Costs of the moves from one layout to another on one mesh, for a tensor of some extents."""

    source: Layout
    goal: Layout
    shape: tuple[int, ...]
    itemsize: int
    carriers: Carriers = ()
    #: whether replicas share no reduction
    is_plain: bool = False
    layouts: dict[LayoutNode, Layout] = field(default_factory=dict)
    #: axis, whether replicas may share work -> the dims that it may split next
    known_dims: dict[tuple[int, bool], list[int]] = field(default_factory=dict)
    #: node -> moves along axes, and their costs
    known_moves: dict[LayoutNode, list[tuple[Move, int]]] = field(default_factory=dict)
    #: node without a Partial -> remaining cost
    left: dict[LayoutNode, int] = field(default_factory=dict)
    #: node -> lower bound of the remaining cost
    leasts: dict[LayoutNode, int] = field(default_factory=dict)
    #: exchange -> its time
    times: dict[tuple[LayoutNode, LayoutNode], int] = field(default_factory=dict)
    #: node without terms -> endpoint of an exchange
    sides: dict[LayoutNode, Side] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts, self.counts, self.teams, self.lacks = tables_of(self.source, self.shape)

    # -- nodes and layouts -----------------------------------------------------------------------

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return self.source.mesh.shape

    @cached_property
    def ops(self) -> dict[int, str]:
        """Axis whose Partial is to be reduced -> its reduce op."""
        pairs = enumerate(zip(self.source.placements, self.goal.placements, strict=True))
        return {i: p.op for i, (p, q) in pairs if isinstance(p, Partial) and p != q}

    @cached_property
    def goal_ops(self) -> dict[int, str]:
        """Axis that is to become Partial -> its reduce op."""
        pairs = enumerate(zip(self.source.placements, self.goal.placements, strict=True))
        return {i: q.op for i, (p, q) in pairs if isinstance(q, Partial) and p != q}

    @cached_property
    def dims(self) -> list[int]:
        """The dims whose splits may change; dims in blocks stay as they are."""
        return [d for d in range(len(self.shape)) if d not in self.source.blocked]

    @cached_property
    def staying_terms(self) -> int:
        """The number of terms of a Partial that stays."""
        pairs = zip(self.sizes, self.source.placements, self.goal.placements, strict=True)
        return math.prod(n for n, p, q in pairs if isinstance(p, Partial) and p == q)

    def splits(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        index = layout.mesh.axes.index
        return tuple(tuple(map(index, layout.split_axes(d))) for d in range(len(self.shape)))

    @cached_property
    def start(self) -> LayoutNode:
        return LayoutNode(self.splits(self.source), tuple(self.ops))

    @cached_property
    def end(self) -> LayoutNode:
        return LayoutNode(self.splits(self.goal), (), tuple(self.goal_ops))

    @cached_property
    def turns(self) -> bool:
        """True if ranks are at different chunks, so that an exchange between all of them mixes."""
        index = self.source.stream.index if self.source.stream is not None else None
        return any(term.kind in ("rank", "coord") for term in terms(index))

    @cached_property
    def target(self) -> tuple[int | None, ...]:
        """The dim that each axis splits in the destination; None if it splits no dim."""
        of = {a: d for d, axes in enumerate(self.end.splits) for a in axes}
        return tuple(of.get(a) for a in range(len(self.sizes)))

    def layout(self, node: LayoutNode) -> Layout:
        if node not in self.layouts:
            self.layouts[node] = self._layout(node)
        return self.layouts[node]

    def _layout(self, node: LayoutNode) -> Layout:
        if node == self.start:
            return self.source
        if node == self.end:
            return self.goal
        names, placements = self.source.mesh.axes, list[Placement]()
        for a, p in enumerate(self.source.placements):
            is_term = isinstance(p, Partial) and (a in node.partial or a not in self.ops)
            placements.append(p if is_term else Replicate())
        for a in node.goal_partial:
            placements[a] = Partial(self.goal_ops[a])
        splits = []
        for d, axes in enumerate(node.splits):
            cut = self.source.cuts.get(d)  # the same in all nodes
            for a in axes:
                placements[a] = Shard(d).in_pieces(cut.along(names[a]) if cut else None)
            if axes:
                splits.append((d, tuple([names[a] for a in axes])))
        mesh, stream = self.source.mesh, self.source.stream
        return Layout.checked(mesh, tuple(placements), tuple(splits), stream, ())

    # -- sizes -----------------------------------------------------------------------------------

    def rows(self, dim: int, axes: tuple[int, ...]) -> Any:
        """Return the first rank's number of rows in a dim."""
        return self.of_dims[dim].parts(axes).first

    def part(self, node: LayoutNode) -> int:
        """Return the elements of the largest part."""
        splits = node.splits
        elements = self.parts.get(splits)
        if elements is None:
            rows = [self.rows(d, axes) for d, axes in enumerate(splits)]
            elements = self.parts[splits] = math.prod(rows)
        return elements

    def count(self, axes: tuple[int, ...]) -> int:
        """Return the number of ranks along some axes."""
        size = self.counts.get(axes)
        if size is None:
            size = self.counts[axes] = math.prod([self.sizes[a] for a in axes])
        return size

    # -- costs -----------------------------------------------------------------------------------

    @cached_property
    def is_timed(self) -> bool:
        """True if costs are nanoseconds; else they are elements times `UNIT`."""
        return is_timed(self.source, self.goal, self.shape)

    @cached_property
    def is_special(self) -> bool:
        return is_special(self.source, self.goal, self.shape)

    def cost(self, move: Move, node: LayoutNode) -> int:
        """Return the cost of a move: its receive volume, or its time."""
        if move.kind in ("slice", "term"):
            return 0
        if move.kind == "Exchange":
            return self.exchange(node, move.after) if self.is_timed else self.to_go(node)
        if move.kind == "ReduceExchange":
            exchanged = self.exchange(node, move.after)
            return exchanged if self.is_timed else dearer(exchanged)
        parts = self.part(node), self.part(move.after)
        arrives = arriving(move.kind, self.count(move.axes), *parts)
        if not self.is_timed:
            return self.later(arrives, move, node)
        return nanoseconds(1, arrives, self.between_hosts(move, parts), self.itemsize)

    def later(self, arrives: int, move: Move, node: LayoutNode) -> int:
        """Return what arrives, an eighth dearer where a sum along one axis waits for no split.

        Gradients are split along an inner axis, and summed along an outer one, whose ranks may be
        on other hosts: where it shares them out first, it carries all of them for bytes that the
        other spares.
        """
        axes = move.axes if move.kind in ("Allreduce", "ReduceScatter") else ()
        is_whole = any(self.target[a] is None for a in axes)
        is_early = is_whole and any(self.target[a] is not None for a in node.partial)
        return arrives * 9 // 8 if is_early else arrives

    def between_hosts(self, move: Move, parts: tuple[int, int]) -> int:
        """Return the inter-host volume of a collective."""
        are_pairs, axes = move.kind == "AllToAll", move.axes
        teams = self.teams.get((are_pairs, axes))
        if teams is None:
            mesh, find = self.source.mesh, pairs_apart if are_pairs else rings
            teams = find(mesh, tuple(mesh.axes[a] for a in axes))
            self.teams[are_pairs, axes] = teams
        return through_teams(move.kind, teams, self.count(axes), *parts)

    def weighed(self, worst: int, average: int) -> int:
        """Return the cost from the largest and the average receive volume."""
        return worst if self.is_timed else weighed(worst, average)

    def exchange(self, node: LayoutNode, after: LayoutNode) -> int:
        """Return the cost of an exchange; it also reduces the node's Partial axes."""
        worst, average = self.lack(node, after, self.count(node.partial) - 1)
        if not self.is_timed:
            return self.weighed(UNIT * worst, average)
        if (node, after) not in self.times:
            between = Exchange(self.side(node), self.side(after))
            starts, crosses = messages(between), crossing(between)
            time = nanoseconds(starts, UNIT * worst, crosses, self.itemsize)
            self.times[node, after] = time
        return self.times[node, after]

    @cached_property
    def of_dims(self) -> tuple[DimRows, ...]:
        return dims_of(self.source, self.source, self.shape)

    def side(self, node: LayoutNode) -> Side:
        """Return a node as an endpoint of an exchange, before any axis becomes Partial."""
        if node not in self.sides:
            self.sides[node] = Side(self.layout(node._replace(goal_partial=())), self.shape)
        return self.sides[node]

    def to_go(self, node: LayoutNode) -> int:
        """Return the remaining cost in elements of a node without a Partial: one Exchange."""
        remaining = self.left.get(node)
        if remaining is None:
            worst, average = self.lack(node, self.end) if node.splits != self.end.splits else (0, 0)
            remaining = self.left[node] = self.weighed(UNIT * worst, average)
        return remaining

    def lack(self, node: LayoutNode, after: LayoutNode, copies: int = 0) -> tuple[int, int]:
        """Return the largest and the average receive volume of an exchange; see `lacks`."""
        if self.is_special:
            held = self.layout(node._replace(partial=(), goal_partial=()))
            return lacks(held, self.layout(after._replace(goal_partial=())), self.shape, copies)
        key = node.splits, after.splits, copies
        volumes = self.lacks.get(key)
        if volumes is None:
            volumes = self.lacks[key] = most_and_mean(self.missing(node, after, copies))
        return volumes

    def is_lacking(self, node: LayoutNode, after: LayoutNode) -> bool:
        """True if some rank needs more than its part; the first rank does if parts grow."""
        if self.is_special:
            return is_lacking(self.layout(node), self.layout(after), self.shape)
        return self.part(after) > self.part(node) or self.lack(node, after)[0] > 0

    def missing(self, node: LayoutNode, after: LayoutNode, copies: int) -> Any:
        """Return the receive volume of each rank: an array that broadcasts over the mesh."""
        needed: Any = copies + 1
        held: Any = 1
        for dim, (have, need) in enumerate(zip(node.splits, after.splits, strict=True)):
            rows, both = self.overlap(dim, have, need)
            needed, held = needed * rows, held * both
        return needed - held

    def overlap(self, dim: int, have: tuple[int, ...], need: tuple[int, ...]) -> tuple[Any, Any]:
        """Return the number of rows that each rank needs, and the number of these that it has."""
        return self.of_dims[dim].overlap(have, need)

    def least(self, node: LayoutNode) -> int:
        """Return a quick lower bound of the remaining cost."""
        if node not in self.leasts:
            self.leasts[node] = self._least(node)
        return self.leasts[node]

    def _least(self, node: LayoutNode) -> int:
        if not self.is_timed:
            return self.least_arriving(node)
        if self.goal_ops:
            return 0
        arrives = UNIT * self.part(self.end)
        if node.partial:
            arrives = max(arrives, self.shared(node))
        else:
            arrives = max(arrives - UNIT * self.part(node), 0)
        return nanoseconds(0, arrives, 0, self.itemsize)

    @cached_property
    def has_idle_axes(self) -> bool:
        """True if axes of size 1 split dims or have terms: their changes cost nothing."""
        placements = zip(self.sizes, self.source.placements, self.goal.placements, strict=True)
        return any(n == 1 and not p == q == Replicate() for n, p, q in placements)

    def least_messages(self, before: LayoutNode, after: LayoutNode) -> int:
        """Return a lower bound of the messages that the busiest rank sends or receives.

        The first rank has the largest parts; each overlaps at least as many parts as fit into it.
        """
        sent, got = 1, self.count(before.partial) // self.count(after.partial)
        for dim, (have, need) in enumerate(zip(before.splits, after.splits, strict=True)):
            held, needed = self.rows(dim, have), self.rows(dim, need)
            sent, got = sent * -(-held // needed), got * -(-needed // held)
        copies, turns = (self.alike(node) for node in (after, before))
        return max(-(-sent * copies // turns), got) - 1

    def alike(self, node: LayoutNode) -> int:
        """Return the number of ranks that hold the same part."""
        fixed = self.count(sum(node.splits, node.partial)) * self.staying_terms
        return math.prod(self.sizes) // fixed

    def least_arriving(self, node: LayoutNode) -> int:
        """Return a lower bound of the remaining receive volume, as a cost."""
        if self.goal_ops:
            return 0
        need = UNIT * self.part(self.end)
        if not node.partial:
            held = UNIT * self.part(node)
            return self.weighed(need - held, 0) if need > held else 0
        shared = self.shared(node)
        return self.weighed(shared if shared > need else need, shared)

    def shared(self, node: LayoutNode) -> int:
        """Return `UNIT` times a lower bound of the average receive volume of a reduction.

        The first rank with the sum of n terms received n - 1 of them; each further rank that needs
        the sum receives one more.
        """
        ranks = math.prod(self.sizes) // self.staying_terms
        n, wanted = self.count(node.partial), ranks // self.count(sum(self.end.splits, ()))
        return math.prod(self.shape) * UNIT * (n + wanted - 2) // ranks
