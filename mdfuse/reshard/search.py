"""A* search for the steps of a reshard on one mesh: the cheapest path through layouts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, count, permutations, product
from typing import NamedTuple

from mdfuse.layouts.hosts import rings
from mdfuse.layouts.layout import IDEMPOTENT, Partial, Replicate, Shard, commute
from mdfuse.layouts.recv_volume import UNIT, dearer
from mdfuse.reshard.clock import nanoseconds
from mdfuse.reshard.edge_costs import MoveCosts
from mdfuse.reshard.nodes import LayoutNode, Move, spanned

#: Steps without communication.
_LOCAL = ("slice", "term")
#: Greater than any cost.
_FAR = (math.inf, 0, 0)


class _Way(NamedTuple):
    """A path to a node: the path before it, and the last move with its start node."""

    before: _Way | None = None
    last: tuple[LayoutNode, Move] | None = None
    has_posts: bool = False
    #: number of axes of several backends that its exchanges span
    spans: int = 0

    def moves(self) -> list[tuple[LayoutNode, Move]]:
        """Return the nodes and moves of the path, in order."""
        moves, way = list[tuple[LayoutNode, Move]](), self
        while way.before is not None and way.last is not None:
            moves.append(way.last)
            way = way.before
        return moves[::-1]


class _Reached(NamedTuple):
    """A node that a path reaches: entries of the frontier compare in this order.

    Attributes:
        spans: the number of axes of several backends that the path's exchanges span.
        total: a lower bound of the total cost.
        effort: decides between paths of equal cost.
        tick: decides between paths of equal effort.
        spent: the cost so far.
        node: the node.
        way: the path.
        is_priced: whether a late move is priced, with the exact heuristic if there is one; before
            that a quick bound stands for its price.
    """

    spans: int
    total: int
    effort: int
    tick: int
    spent: int
    node: LayoutNode
    way: _Way
    is_priced: bool = False


class Search(MoveCosts):
    """The search from one layout to another on one mesh, for a tensor of some extents."""

    # -- moves -----------------------------------------------------------------------------------

    def collectives(self, node: LayoutNode) -> list[tuple[Move, int]]:
        """Return the moves along axes, with their costs; these do not depend on the path."""
        priced = self.known_moves.get(node)
        if priced is None:
            moves = [move for a in range(len(self.sizes)) for move in self.along(node, a)]
            if len(node.partial) > 1 or len(max(node.splits, key=len, default=())) > 1:
                moves += self.along_several(node)
            priced = self.known_moves[node] = [(move, self.cost(move, node)) for move in moves]
        return priced

    def exchanges(self, node: LayoutNode) -> list[Move]:
        """Return the moves by which each rank receives just its missing elements."""
        if self.turns:
            return []
        # P[a] -> any splits: ReduceExchange
        if node.partial:
            may = node == self.start and len({*self.ops.values()}) == 1 and self.is_free
            may = may and not self.is_plain
            return [Move("ReduceExchange", after) for after in self.refined] if may else []
        # any splits -> any splits: Exchange
        may = node.goal_partial == () and node.splits != self.end.splits and self.may_exchange(node)
        ends = self.refined if self.is_timed else [self.end._replace(goal_partial=())]
        if may and self.is_mixed:
            gone = [a for a, n in enumerate(self.sizes) if n > 1 and self.is_gone(node, a)]
            ends = [x for x in (*ends, *self.but_some(node)) if not _splits(x, gone) and x != node]
        return [Move("Exchange", after) for after in ends] if may else []

    def but_some(self, node: LayoutNode) -> Iterator[LayoutNode]:
        """Yield the end with some axes left innermost as they are: these change separately."""
        there = [(d, a) for d in self.dims for a in node.splits[d]]
        for n in range(1, len(there)):
            for staying in combinations(there, n):
                stay = {a for _, a in staying}
                goal = (tuple(a for a in axes if a not in stay) for axes in self.end.splits)
                after = LayoutNode(tuple(goal), ())
                for d, a in staying:
                    after = _split(after, a, d)
                yield after

    def may_exchange(self, node: LayoutNode) -> bool:
        """True if an Exchange may come next; a timed search omits it after moves that it repeats.

        It starts from the source's parts, split further only along axes that were reduced, or that
        shared the reduction. After a reduction, prefixes of the destination's splits are gathered
        by collectives instead.
        """
        if not self.is_timed or self.is_mixed:
            return True
        if self.ops and all(
            x[: len(y)] == y for x, y in zip(node.splits, self.end.splits, strict=True)
        ):
            return False
        pairs = zip(self.source.placements, self.sizes, strict=True)
        new = {a for a, (p, n) in enumerate(pairs) if n > 1 and not isinstance(p, Shard)}
        new = new if self.ops else set()
        return all(
            tuple(a for a in axes if a not in new) == was
            for axes, was in zip(node.splits, self.start.splits, strict=True)
        )

    @cached_property
    def is_free(self) -> bool:
        """True if parts of all dims may be exchanged: no dim is in chunks."""
        return self.source.stream is None or self.source.stream.index is None

    def along(self, node: LayoutNode, a: int) -> list[Move]:
        """Return the one-axis moves that can lead to the destination."""
        splits, partial, new_terms = node
        to, dims = self.target[a], self.dims_along(a, bool(partial) or self.is_timed)
        # P[a] -> R[a]: Allreduce; P[a] -> S(d)[a]: ReduceScatter
        if a in partial:
            reduced = LayoutNode(splits, tuple([p for p in partial if p != a]), new_terms)
            moves = [Move("Allreduce", reduced, (a,))]
            return moves + [Move("ReduceScatter", _split(reduced, a, d), (a,), d) for d in dims]
        dim = None
        for d, axes in enumerate(splits):
            if a in axes:
                dim = d
        # R[a] -> S(d)[a]: slice; R[a] -> P[a]: slice or term
        if dim is None:
            if a in new_terms or not self.is_whole(a):
                return []
            if self.is_mixed and self.is_gone(node, a):
                return []
            moves = [Move("slice", _split(node, a, d)) for d in dims]
            if a in self.goal_ops:
                moves += self.making(node, a, self.goal_ops[a] in IDEMPOTENT)
            return moves
        if dim not in self.dims or splits[dim][-1] != a:
            return []
        # S(d)[a] -> R[a]: Allgather
        gathered = _joined(node, dim, 1)
        moves = [Move("Allgather", gathered, (a,), dim)]
        # S(d)[a] -> S(e)[a]: AllToAll; S(d)[a] -> P[a]: term
        if to is not None and to != dim:
            moves.append(Move("AllToAll", _split(gathered, a, to), (a,), dim, to))
        elif a in self.goal_ops and self.goal_ops[a] != "avg":
            moves += self.making(gathered, a)
        return moves

    def dims_along(self, a: int, is_free: bool) -> list[int]:
        """Return the dims that an axis may split next; if `is_free`, also other than the goal's.

        In this way replicas share a reduction, or, in a timed search, other work.
        """
        dims = self.known_dims.get((a, is_free))
        if dims is None:
            to = self.target[a]
            is_shared = to is None and self.is_plain  # its ranks hold copies at the end
            shares = is_free and self.source.stream is None and not is_shared
            dims = [d for d in self.dims if d != to] if shares else []
            dims = [to, *dims] if to is not None and to in self.dims else dims
            self.known_dims[a, is_free] = dims
        return dims

    def is_gone(self, node: LayoutNode, a: int) -> bool:
        """Return whether an axis was gathered or reduced on the way, so that ranks hold copies.

        Where each axis changes separately, a further split would only discard data.
        """
        whole = isinstance(self.source.placements[a], Replicate) or a in node.goal_partial
        return not whole and _at(node, a) is False

    def is_whole(self, a: int) -> bool:
        """Return whether an axis is not Partial in the source, or its Partial is to be reduced."""
        return a in self.ops or not isinstance(self.source.placements[a], Partial)

    def making(self, node: LayoutNode, a: int, is_same: bool = False) -> list[Move]:
        """Return the local step by which an axis becomes Partial, if its op commutes with others.

        Args:
            node: the node before, with the axis joined.
            a: the axis.
            is_same: whether each rank's term is its current value.
        """
        stays = [p.op for p in self.source.placements if isinstance(p, Partial)]
        ops = [self.ops[b] for b in node.partial] + [self.goal_ops[b] for b in node.goal_partial]
        staying_ops = [op for op in stays if op not in self.ops.values()]
        if not commute((*ops, *staying_ops, self.goal_ops[a])):
            return []
        after = node._replace(goal_partial=tuple(sorted((*node.goal_partial, a))))
        return [Move("slice" if is_same else "term", after, (a,))]

    def along_several(self, node: LayoutNode) -> Iterator[Move]:
        """Yield all-reduces, reduce-scatters and all-gathers along several axes at once."""
        for n in range(2, len(node.partial) + 1):
            for axes in combinations(node.partial, n):
                if len({self.ops[a] for a in axes}) > 1 or not self.is_one_carrier(axes):
                    continue
                # P[a] P[b] -> R[a] R[b]: Allreduce
                reduced = node._replace(partial=tuple(p for p in node.partial if p not in axes))
                yield Move("Allreduce", reduced, axes)
                even = [d for d in self.dims if self.is_even(d, (*node.splits[d], *axes))]
                is_shared = self.is_plain and any(self.target[a] is None for a in axes)
                even = even if self.source.stream is None and not is_shared else []
                # P[a] P[b] -> S(d)[a, b]: ReduceScatter
                for order, d in product(permutations(axes), even) if even else ():
                    after = reduced
                    for a in order:
                        after = _split(after, a, d)
                    yield Move("ReduceScatter", after, order, d)
        # S(d)[a, b] -> R[a] R[b]: Allgather
        for d, axes in ((d, node.splits[d]) for d in self.dims):
            if len(axes) > 1 and self.is_even(d, axes):
                for n in range(2, len(axes) + 1):
                    if self.is_one_carrier(axes[-n:]):
                        yield Move("Allgather", _joined(node, d, n), axes[-n:], d)

    def is_one_carrier(self, axes: Sequence[int]) -> bool:
        """True if one backend serves all of some axes, so that one communication can."""
        names = self.source.mesh.axes
        return not self.carriers or not spanned([names[a] for a in axes], self.carriers)

    @cached_property
    def is_mixed(self) -> bool:
        """True if the axes have several backends: each changes separately, if possible."""
        return not self.is_one_carrier([a for a, n in enumerate(self.sizes) if n > 1])

    def spanned(self, node: LayoutNode, move: Move) -> int:
        """Return the number of axes that an exchange spans; 0 if one backend serves all of them."""
        if not self.is_mixed or move.kind not in ("Exchange", "ReduceExchange"):
            return 0
        axes = [a for a, n in enumerate(self.sizes) if n > 1]
        axes = [a for a in axes if _at(node, a) != _at(move.after, a)]
        return 0 if self.is_one_carrier(axes) else len(axes)

    def is_even(self, dim: int, axes: tuple[int, ...]) -> bool:
        return self.shape[dim] % self.count(axes) == 0

    @cached_property
    def refined(self) -> list[LayoutNode]:
        """The destination, and its further splits over copies, each of which may be gathered."""
        goal = self.end._replace(goal_partial=())
        free = [a for a, d in enumerate(self.target) if d is None and self.is_whole(a)]
        nodes = []
        if self.is_timed:
            mesh = self.source.mesh
            near = [a for a in free if not rings(mesh, (mesh.axes[a],))]
            for axes in dict.fromkeys((tuple(near), tuple(free))):
                for d in self.dims if axes else ():
                    node = goal
                    for a in axes:
                        node = _split(node, a, d)
                    nodes.append(node)
            return [goal, *nodes]
        for n in range(len(free) + 1):
            for axes in permutations(free, n):
                for dims in product(self.dims, repeat=n):
                    node = goal
                    for a, d in zip(axes, dims, strict=True):
                        node = _split(node, a, d)
                    nodes.append(node)
        return list(dict.fromkeys(nodes))

    @property
    def direct(self) -> tuple[LayoutNode, Move] | None:
        """The single move for a change along one axis, innermost before and after; else None.

        A reduction whose work replicas could share is searched instead, and so is a gather with
        much padding.
        """
        pairs = enumerate(zip(self.source.placements, self.goal.placements, strict=True))
        changed = [a for a, (p, q) in pairs if p != q]
        if len(changed) != 1 or self.is_timed:
            return None
        shares = any(
            n > 1 and a not in changed and isinstance(p, Replicate)
            for a, (n, p) in enumerate(zip(self.sizes, self.source.placements, strict=True))
        )
        if self.ops and shares:
            return None
        matching = (move for move in self.along(self.start, changed[0]) if move.after == self.end)
        move = next(matching, None)
        is_alone = sum(n > 1 for n in self.sizes) == 1
        if move is None or (
            move.kind == "Allgather" and not is_alone and self.pads(move, self.start)
        ):
            return None
        return self.start, move

    def pads(self, move: Move, node: LayoutNode) -> bool:
        """Return whether a collective moves much padding, so that an exchange may move less."""
        if move.kind not in ("Allgather", "ReduceScatter") or move.dim is None:
            return False
        axes = max(node.splits[move.dim], move.after.splits[move.dim], key=len)
        return self.is_coarse(move.dim, axes)

    def is_coarse(self, dim: int, axes: tuple[int, ...]) -> bool:
        """Return whether padding is over 1/64 of a dim."""
        n = self.shape[dim]
        return type(n) is int and -n % self.count(axes) * 64 > n

    # -- the search ------------------------------------------------------------------------------

    def path(self) -> list[tuple[LayoutNode, Move]]:
        """Return the moves of the cheapest path; ties go to the least effort.

        The number of axes of several backends that its exchanges span counts before the cost.
        """
        tick, end = count(), self.end
        start = _Reached(0, self.least(self.start), 0, next(tick), 0, self.start, _Way())
        frontier = [start]
        done: set[LayoutNode] = set()
        best: dict[
            LayoutNode, tuple[float, int, int]
        ] = {}  # least cost to a node, except by late moves
        limit: tuple[float, int] = _FAR[:2]  # cost of the best path known
        while frontier:
            spans, total, effort, _, spent, node, way, is_priced = heapq.heappop(frontier)
            if node in done:
                continue
            if not is_priced and (priced := self.priced(spent, node, way)) is not None:
                total, spent = priced
                limit = min(limit, (spans, total)) if node == end else limit
                later = _Reached(spans, total, effort, next(tick), spent, node, way, True)
                heapq.heappush(frontier, later)
                continue
            if node == end:
                return way.moves()
            done.add(node)
            exchanges = [(move, -1) for move in self.exchanges(node)]
            for move, cost in (*self.collectives(node), *exchanges):
                after = move.after
                if after in done:
                    continue
                ahead, spans = spent + self.least(after), way.spans + self.spanned(node, move)
                if (spans, ahead) > limit:
                    continue
                weight = effort + _effort(move, way.has_posts)
                if self.is_late(move):
                    total, so_far = ahead + self.quickly(node, move), spent
                    if (spans, total) > limit:
                        continue
                else:
                    cost = self.cost(move, node) if cost < 0 else cost
                    total, so_far = ahead + cost, spent + cost
                    if (spans, total) > limit or best.get(after, _FAR) <= (spans, so_far, weight):
                        continue
                    best[after] = spans, so_far, weight
                    if after == end:
                        limit = spans, total
                on = _Way(way, (node, move), way.has_posts or move.kind not in _LOCAL, spans)
                reached = _Reached(spans, total, weight, next(tick), so_far, after, on)
                heapq.heappush(frontier, reached)
        raise AssertionError(f"no way from {self.source} to {self.goal}")

    def priced(self, spent: int, node: LayoutNode, way: _Way) -> tuple[int, int] | None:
        """Return (total, cost so far) of a frontier entry once its late move is priced, or None."""
        if way.last is not None and self.is_late(way.last[1]):
            before, move = way.last
            spent += self.cost(move, before)
        elif node.partial or self.goal_ops or self.is_timed:
            return None
        return spent + (self.least(node) if self.is_timed else self.to_go(node)), spent

    def is_late(self, move: Move) -> bool:
        """Return whether the cost of a move is computed lazily, because that takes long."""
        return move.kind == "ReduceExchange" or (move.kind == "Exchange" and self.is_timed)

    def quickly(self, node: LayoutNode, move: Move) -> int:
        """Return a quick lower bound of a late move's cost, from the first rank's parts."""
        after, is_reducing = move.after, move.kind == "ReduceExchange"
        if is_reducing:
            arrives = self.part(after) * (self.count(tuple(self.ops)) - 1)
        else:
            arrives = max(self.part(after) - self.part(node), 0)
        if not self.is_timed:
            return dearer(self.weighed(UNIT * arrives, self.shared(node)))
        starts = max(self.least_messages(node, after), 1)
        least = nanoseconds(starts, UNIT * arrives, 0, self.itemsize)
        # the total is at least the heuristic of this node
        return least if is_reducing else max(least, self.least(node) - self.least(after))


def _at(node: LayoutNode, a: int) -> tuple[int, tuple[int, ...]] | bool:
    """Return the dim that an axis splits and the outer axes; else whether it is Partial."""
    for d, axes in enumerate(node.splits):
        if a in axes:
            return d, axes[: axes.index(a)]
    return a in node.partial


def _splits(node: LayoutNode, axes: Sequence[int]) -> bool:
    return any(not isinstance(_at(node, a), bool) for a in axes)


def _split(node: LayoutNode, a: int, dim: int) -> LayoutNode:
    splits = [*node.splits]
    splits[dim] = (*splits[dim], a)
    return LayoutNode(tuple(splits), node.partial, node.goal_partial)


def _joined(node: LayoutNode, dim: int, n: int) -> LayoutNode:
    splits = [*node.splits]
    splits[dim] = splits[dim][:-n]
    return LayoutNode(tuple(splits), node.partial, node.goal_partial)


def _effort(move: Move, has_posts: bool) -> int:
    """Return the weight of a step, which decides between paths of equal bytes.

    One step along several axes is preferred to two, two collectives to one Exchange, and an
    Exchange to a collective with a slice behind it (some ranks then discard received data).
    """
    if move.kind in _LOCAL:
        return 6 if has_posts else 2
    return 6 if move.kind in ("Exchange", "ReduceExchange") else 2 + (len(move.axes) > 1)
