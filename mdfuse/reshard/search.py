"""Search the steps of a reshard on one mesh: the cheapest path through layouts (A*).

A node is written as numbers, since thousands of them are looked at and a few become layouts. What
is left at a node is never overrated: without a Partial it is known, as one Exchange brings each
rank just what it lacks; with one, each rank needs a sum of what others have for all that it needs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, count, permutations, product
from typing import Any, NamedTuple

import numpy as np

from mdfuse.layouts.blocks import segments, split
from mdfuse.layouts.boxes import Rows
from mdfuse.layouts.crossing import Crossing, crossing
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.lacks import (
    UNIT,
    arriving,
    cut,
    dearer,
    is_special,
    length,
    shared,
    worst_lack,
)
from mdfuse.layouts.layout import IDEMPOTENT, Layout, Partial, Placement, Replicate, Shard, commute
from mdfuse.layouts.side import Side
from mdfuse.reshard.clock import along, is_timed, nanoseconds


class Node(NamedTuple):
    """A layout on the mesh: axes are numbers, outermost first where several split one dim."""

    splits: tuple[tuple[int, ...], ...]
    #: axes whose Partial is still to be reduced
    partial: tuple[int, ...]
    #: axes that have become the Partial that the destination has
    made: tuple[int, ...] = ()


class Move(NamedTuple):
    """A step between two nodes; its kind is that of a communication or a local step."""

    kind: str
    after: Node
    axes: tuple[int, ...] = ()
    dim: int | None = None
    to_dim: int | None = None


@dataclass
class Search:
    """The way from one layout to another one on the same mesh, for a tensor of some extents."""

    source: Layout
    goal: Layout
    shape: tuple[int, ...]
    itemsize: int
    #: node -> elements of its largest part
    parts: dict[Node, int] = field(default_factory=dict)
    #: node without a Partial -> cost of all that is left
    left: dict[Node, int] = field(default_factory=dict)
    #: what exchanges take between hosts
    crossings: dict[tuple[Layout, Layout], Crossing] = field(default_factory=dict)
    #: (dim, axes that split it) -> the rows that each rank then has of those that it needs
    overlaps: dict[tuple[int, tuple[int, ...]], Any] = field(default_factory=dict)

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
    def made(self) -> dict[int, str]:
        """Axis that is to become Partial -> its reduce op."""
        pairs = enumerate(zip(self.source.placements, self.goal.placements, strict=True))
        return {i: q.op for i, (p, q) in pairs if isinstance(q, Partial) and p != q}

    @cached_property
    def dims(self) -> list[int]:
        """The dims whose splits may change: those in blocks are the same before and afterwards."""
        return [d for d in range(len(self.shape)) if d not in self.source.blocked]

    def blocks(self, dim: int) -> Rows:
        """Return the blocks of a dim, which are the same all the way."""
        return segments(self.source.blocked.get(dim), self.shape[dim])

    @cached_property
    def kept(self) -> int:
        """The number of terms of a Partial that stays."""
        pairs = zip(self.sizes, self.source.placements, self.goal.placements, strict=True)
        return math.prod(n for n, p, q in pairs if isinstance(p, Partial) and p == q)

    def splits(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        index = layout.mesh.axes.index
        return tuple(tuple(map(index, layout.split_axes(d))) for d in range(len(self.shape)))

    @cached_property
    def start(self) -> Node:
        return Node(self.splits(self.source), tuple(self.ops))

    @cached_property
    def end(self) -> Node:
        return Node(self.splits(self.goal), (), tuple(self.made))

    @cached_property
    def target(self) -> tuple[int | None, ...]:
        """The dim that each axis splits in the destination; None where it splits none."""
        of = {a: d for d, axes in enumerate(self.end.splits) for a in axes}
        return tuple(of.get(a) for a in range(len(self.sizes)))

    def layout(self, node: Node) -> Layout:
        if node == self.start:
            return self.source
        if node == self.end:
            return self.goal
        names, placements = self.source.mesh.axes, dict[str, Placement]()
        for a, (name, p) in enumerate(self.source.by_axis().items()):
            is_term = isinstance(p, Partial) and (a in node.partial or a not in self.ops)
            placements[name] = p if is_term else Replicate()
        for a in node.made:
            placements[names[a]] = Partial(self.made[a])
        for d, axes in enumerate(node.splits):
            cut = self.source.cuts.get(d)  # which is the same all the way
            along = ((names[a], Shard(d, cut.along(names[a]) if cut else None)) for a in axes)
            placements.update(along)
        order = {d: [names[a] for a in axes] for d, axes in enumerate(node.splits) if axes}
        return Layout(self.source.mesh, placements, order, self.source.stream)

    # -- sizes -----------------------------------------------------------------------------------

    def rows(self, dim: int, axes: tuple[int, ...]) -> int:
        """Return the rows of a dim that the first rank has."""
        rows, names = self.blocks(dim), self.source.mesh.axes
        if len(rows) > 1:
            for a in axes:
                rows = split(rows, self.sizes[a], 0, self.source.is_plain(dim, names[a]))
            return sum(stop - start for start, stop in rows)
        n = self.shape[dim]
        for a in axes:
            n = -(-n // self.sizes[a])
        return n

    def part(self, node: Node) -> int:
        if node not in self.parts:
            rows = (self.rows(d, axes) for d, axes in enumerate(node.splits))
            self.parts[node] = math.prod(rows)
        return self.parts[node]

    def count(self, axes: tuple[int, ...]) -> int:
        return math.prod([self.sizes[a] for a in axes])

    # -- costs -----------------------------------------------------------------------------------

    @cached_property
    def is_timed(self) -> bool:
        """Whether costs are nanoseconds; else they are elements times `UNIT`."""
        return is_timed(self.source, self.goal, self.shape)

    def cost(self, move: Move, here: Node) -> int:
        """Return what a move costs: what arrives at a rank, or how long that takes."""
        if move.kind in ("slice", "term"):
            return 0
        if move.kind == "Exchange":
            return self.exchange(here, move.after) if self.is_timed else self.to_go(here)
        if move.kind == "ReduceExchange":
            found = self.exchange(here, move.after)
            return found if self.is_timed else dearer(found)
        parts = self.part(here), self.part(move.after)
        arrives = arriving(move.kind, self.count(move.axes), *parts)
        if not self.is_timed:
            return arrives
        mesh = self.source.mesh
        names = tuple(mesh.axes[a] for a in move.axes)
        return nanoseconds(1, arrives, along(move.kind, mesh, names, *parts), self.itemsize)

    def exchange(self, here: Node, after: Node) -> int:
        """Return what an exchange costs, which reduces what is to be reduced."""
        copies = self.count(here.partial) - 1
        held = self.layout(here._replace(partial=(), made=()))
        need = self.layout(after._replace(made=()))
        arrives = UNIT * worst_lack(held, need, self.shape, copies)
        if not self.is_timed:
            return arrives
        terms = self.layout(here._replace(made=()))
        found = self.crossing(terms, need)
        return nanoseconds(found.messages, arrives, found.busiest, self.itemsize)

    def crossing(self, held: Layout, need: Layout) -> Crossing:
        """Return what an exchange takes between hosts."""
        if (held, need) not in self.crossings:
            found = crossing(Exchange(Side(held, self.shape), Side(need, self.shape)))
            self.crossings[held, need] = found
        return self.crossings[held, need]

    def to_go(self, node: Node) -> int:
        """Return what all that is left costs at least, for a node without a Partial.

        Where elements count, one Exchange costs just that.
        """
        if node not in self.left:
            lack = UNIT * self.lack(node)
            if self.is_timed and lack:
                held, need = (self.layout(x._replace(made=())) for x in (node, self.end))
                lack = nanoseconds(1, lack, self.crossing(held, need).least, self.itemsize)
            self.left[node] = lack
        return self.left[node]

    def lack(self, node: Node) -> int:
        """Return the most elements that a rank needs from others, for a node without a Partial."""
        if is_special(self.source, self.goal, self.shape):
            aim = self.layout(self.end._replace(made=()))
            return worst_lack(self.layout(node._replace(made=())), aim, self.shape)
        held: Any = 1
        for dim, axes in enumerate(node.splits):
            if (dim, axes) not in self.overlaps:
                need, have = (self.cut(dim, x) for x in (self.end.splits[dim], axes))
                self.overlaps[dim, axes] = shared(need, have)
            held = held * self.overlaps[dim, axes]
        return int(np.max(self.needed - held))

    def cut(self, dim: int, axes: tuple[int, ...]) -> list[tuple[Any, Any]]:
        """Return where the parts of all ranks begin and end, in each block of a dim."""
        names = self.source.mesh.axes
        is_plain = (self.source.is_plain(dim, names[a]) for a in axes)
        splits = [(self.sizes[a], self.grid[a], p) for a, p in zip(axes, is_plain, strict=True)]
        return cut(self.blocks(dim), splits)

    @cached_property
    def grid(self) -> Any:
        """The coordinate of all ranks on each axis."""
        return np.ogrid[tuple(slice(n) for n in self.sizes)]

    @cached_property
    def needed(self) -> Any:
        """The elements that each rank needs: an array that broadcasts over the mesh."""
        needed: Any = 1
        for dim, axes in enumerate(self.end.splits):
            needed = needed * length(self.cut(dim, axes))
        return needed

    def least(self, node: Node) -> int:
        """Return a cost that is quickly known, and that all that is left has at least."""
        arrives = self.least_arriving(node)
        return nanoseconds(0, arrives, 0, self.itemsize) if self.is_timed else arrives

    def least_arriving(self, node: Node) -> int:
        """Return what arrives at least."""
        if self.made:
            return 0
        need = UNIT * self.part(self.end)
        if not node.partial:
            here = UNIT * self.part(node)
            return need - here if need > here else 0
        shared = self.shared(node)
        return shared if shared > need else need

    def shared(self, node: Node) -> int:
        """Return what arrives at a rank on average where a Partial is reduced, at least.

        The first rank that has the sum of n terms has got n - 1, and each other one that needs the
        sum gets one more.
        """
        ranks = math.prod(self.sizes) // self.kept
        n, wanted = self.count(node.partial), ranks // self.count(sum(self.end.splits, ()))
        return math.prod(self.shape) * UNIT * (n + wanted - 2) // ranks

    # -- moves -----------------------------------------------------------------------------------

    def moves(self, here: Node) -> Iterator[Move]:
        for a in range(len(self.sizes)):
            yield from self.along(here, a)
        yield from self.along_several(here)
        if here.partial:
            if here == self.start and len({*self.ops.values()}) == 1 and self.is_free:
                for after in self.refined:
                    yield Move("ReduceExchange", after)
        elif here.made == () and here.splits != self.end.splits:
            for after in self.refined if self.is_timed else (self.end._replace(made=()),):
                yield Move("Exchange", after)

    @cached_property
    def is_free(self) -> bool:
        """Whether parts of all dims may change hands: no dim is taken in chunks."""
        return self.source.stream is None or self.source.stream.index is None

    def along(self, here: Node, a: int) -> Iterator[Move]:
        """Yield the one-axis rows of the table that can help on the way."""
        to = self.target[a]
        is_free = here.partial or self.is_timed  # replicas may share what follows
        dims = [d for d in self.dims if d != to] if is_free else []
        if self.source.stream is not None:
            dims = []
        dims = [to, *dims] if to is not None and to in self.dims else dims
        if a in here.partial:
            rest = here._replace(partial=tuple(p for p in here.partial if p != a))
            yield Move("Allreduce", rest, (a,))
            for d in dims:
                yield Move("ReduceScatter", _split(rest, a, d), (a,), d)
            return
        dim = next((d for d, axes in enumerate(here.splits) if a in axes), None)
        if dim is None and a not in here.made and self.is_whole(a):
            for d in dims:
                yield Move("slice", _split(here, a, d))
            if a in self.made:
                yield from self.making(here, a, self.made[a] in IDEMPOTENT)
        elif dim is not None and dim in self.dims and here.splits[dim][-1] == a:
            gathered = _joined(here, dim, 1)
            yield Move("Allgather", gathered, (a,), dim)
            if to is not None and to != dim:
                yield Move("AllToAll", _split(gathered, a, to), (a,), dim, to)
            elif a in self.made and self.made[a] != "avg":
                yield from self.making(gathered, a)

    def is_whole(self, a: int) -> bool:
        """Whether an axis is not Partial in the source, or no longer."""
        return a in self.ops or not isinstance(self.source.placements[a], Partial)

    def making(self, here: Node, a: int, is_same: bool = False) -> Iterator[Move]:
        """Yield the local step by which an axis becomes Partial, where it may stand by others.

        Args:
            here: before, with the axis joined.
            a: the axis.
            is_same: each rank's term is what it has.
        """
        stays = [p.op for p in self.source.placements if isinstance(p, Partial)]
        found = [self.ops[b] for b in here.partial] + [self.made[b] for b in here.made]
        kept = [op for op in stays if op not in self.ops.values()]
        if commute((*found, *kept, self.made[a])):
            kind = "slice" if is_same else "term"
            yield Move(kind, here._replace(made=tuple(sorted((*here.made, a)))), (a,))

    def along_several(self, here: Node) -> Iterator[Move]:
        """Yield all-reduces, reduce-scatters and all-gathers along several axes at once."""
        for n in range(2, len(here.partial) + 1):
            for axes in combinations(here.partial, n):
                if len({self.ops[a] for a in axes}) > 1:
                    continue
                rest = here._replace(partial=tuple(p for p in here.partial if p not in axes))
                yield Move("Allreduce", rest, axes)
                for order, d in product(permutations(axes), self.dims):
                    if self.is_even(d, (*here.splits[d], *order)) and self.source.stream is None:
                        after = rest
                        for a in order:
                            after = _split(after, a, d)
                        yield Move("ReduceScatter", after, order, d)
        for d, axes in ((d, here.splits[d]) for d in self.dims):
            for n in range(2, len(axes) + 1):
                if self.is_even(d, axes):
                    yield Move("Allgather", _joined(here, d, n), axes[-n:], d)

    def is_even(self, dim: int, axes: tuple[int, ...]) -> bool:
        return self.shape[dim] % self.count(axes) == 0

    @cached_property
    def refined(self) -> list[Node]:
        """The splits of the destination over ranks that hold the same: each may be gathered."""
        here = self.end._replace(made=())
        free = [a for a, d in enumerate(self.target) if d is None and self.is_whole(a)]
        found = []
        for n in range(len(free) + 1):
            for axes in permutations(free, n):
                for dims in product(self.dims, repeat=n):
                    node = here
                    for a, d in zip(axes, dims, strict=True):
                        node = _split(node, a, d)
                    found.append(node)
        return list(dict.fromkeys(found))

    @property
    def direct(self) -> tuple[Node, Move] | None:
        """The row of the table for a change along one axis, innermost before and after; else None.

        Where it reduces, ranks that hold the same along another axis could share that work.
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
        found = (move for move in self.along(self.start, changed[0]) if move.after == self.end)
        move = next(found, None)
        return (self.start, move) if move is not None else None

    # -- the search ------------------------------------------------------------------------------

    def path(self) -> list[tuple[Node, Move]]:
        """Return the moves of the cheapest way; of several, of the least effort."""
        tick = count()
        Path = tuple[tuple[Node, Move], ...]
        frontier: list[tuple[int, int, int, int, Node, Path, bool]] = [
            (self.least(self.start), 0, next(tick), 0, self.start, (), False)
        ]
        done: set[Node] = set()
        best: dict[Node, tuple[float, int]] = {}  # what it takes to a node, but by a ReduceExchange
        while frontier:
            _, effort, _, spent, here, path, is_known = heapq.heappop(frontier)
            if here in done:
                continue
            if not is_known:
                known = self.settled(here, spent, path)
                if known is not None:
                    spent, total = known
                    heapq.heappush(frontier, (total, effort, next(tick), spent, here, path, True))
                    continue
            if here == self.end:
                return list(path)
            done.add(here)
            for move in self.moves(here):
                if move.after in done:
                    continue
                is_late = move.kind == "ReduceExchange"  # its cost is found when its turn comes
                more = self.least_of(move) if is_late else self.cost(move, here)
                weight = effort + _effort(move, path)
                if not is_late:
                    if best.get(move.after, (math.inf, 0)) <= (spent + more, weight):
                        continue
                    best[move.after] = spent + more, weight
                total = spent + more + self.least(move.after)
                item = (*path, (here, move))
                heapq.heappush(
                    frontier,
                    (total, weight, next(tick), spent + more, move.after, item, False),
                )
        raise AssertionError(f"no way from {self.source} to {self.goal}")

    def least_of(self, move: Move) -> int:
        """Return what a ReduceExchange costs at least."""
        arrives = UNIT * self.part(move.after) * (self.count(tuple(self.ops)) - 1)
        return nanoseconds(1, arrives, 0, self.itemsize) if self.is_timed else dearer(arrives)

    def settled(
        self, here: Node, spent: int, path: tuple[tuple[Node, Move], ...]
    ) -> tuple[int, int] | None:
        """Return the cost so far and in all, where these are now known better; else None."""
        if path and path[-1][1].kind == "ReduceExchange":
            spent = self.cost(path[-1][1], path[-1][0])
        elif here.partial or self.made:
            return None
        return spent, spent + self.to_go(here)


def _split(node: Node, a: int, dim: int) -> Node:
    splits = list(node.splits)
    splits[dim] = (*splits[dim], a)
    return node._replace(splits=tuple(splits))


def _joined(node: Node, dim: int, n: int) -> Node:
    splits = list(node.splits)
    splits[dim] = splits[dim][:-n]
    return node._replace(splits=tuple(splits))


def _effort(move: Move, path: tuple[tuple[Node, Move], ...]) -> int:
    """Return the weight of a step, which decides between paths of equal bytes.

    Two collectives come before one Exchange, which comes before a collective whose result is
    sliced (some ranks then receive what they throw away).
    """
    if move.kind in ("slice", "term"):
        return 3 if any(m.kind not in ("slice", "term") for _, m in path) else 1
    return 3 if move.kind in ("Exchange", "ReduceExchange") else 1
