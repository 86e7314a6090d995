"""Communications: what a change of layout sends, as families that are projected per rank.

`steps(source, destination, shape)` is the table *transition -> kinds*; a `Communication` is one row
of it applied to one tensor. Nothing lists the ranks of a mesh unless one rank's part is asked for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice, product

import torch

from mdfuse.backends.base import Call
from mdfuse.errors import CommunicationError, LayoutError
from mdfuse.layout import (
    Box,
    Layout,
    Partial,
    Replicate,
    Shard,
    box_size,
    intersect,
    nth_chunk,
    relative,
    replicated,
)
from mdfuse.mesh import DeviceMesh

#: kind -> (has a root, has a reduce op)
KINDS: dict[str, tuple[bool, bool]] = {
    "Gather": (True, False),
    "Allgather": (False, False),
    "Scatter": (True, False),
    "Reduce": (True, True),
    "Allreduce": (False, True),
    "ReduceScatter": (False, True),
    "Broadcast": (True, False),
    "SendRecv": (True, False),
    "AllToAll": (False, False),
    "Exchange": (False, False),
}
#: Kinds whose buffers have the dim that is split outermost.
SPLIT_OUTERMOST = ("Gather", "Allgather", "Scatter", "ReduceScatter", "AllToAll")
#: Kinds that move boxes between pairs of ranks, each buffer in its own dim order.
POINT_TO_POINT = ("SendRecv", "Exchange")

_BITWISE = ("band", "bor", "bxor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A step without communication.

    "slice": each rank keeps a part of what it has. "zeros": each rank puts what it has into zeros
    of the destination's size, which makes it Partial(sum).
    """

    kind: str
    source: Layout
    destination: Layout


@dataclass(frozen=True, kw_only=True)
class Communication:
    """One global post: every rank's part follows from its coordinates.

    Attributes:
        kind: a key of `KINDS`.
        source: the layout before.
        destination: the layout after.
        shape: global extents of what is sent.
        dtype: element type; None while only layouts are compared.
        axis: the mesh axis along which the placement changes, where it is one.
        dim: the dim that is gathered, scattered or exchanged (of the source for AllToAll).
        to_dim: AllToAll: the dim that is split afterwards.
        reduce_op: for the kinds that reduce.

    Raises:
        CommunicationError: a reduce op where none belongs, or none where one does, or one that the
            dtype does not have.
    """

    kind: str
    source: Layout
    destination: Layout
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    axis: str | None = None
    dim: int | None = None
    to_dim: int | None = None
    reduce_op: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CommunicationError(f"{self.kind!r} is no kind", hint="one of " + ", ".join(KINDS))
        if (self.reduce_op is not None) != KINDS[self.kind][1]:
            raise CommunicationError(
                f"{self.kind} with reduce_op={self.reduce_op!r}",
                because="exactly Reduce, Allreduce and ReduceScatter have a reduce op",
            )
        if self.reduce_op and self.dtype is not None:
            check_reduce_op(self.reduce_op, self.dtype)
        if (self.kind in SPLIT_OUTERMOST) != (self.dim is not None):
            raise CommunicationError(
                f"{self.kind} with dim={self.dim}",
                because="exactly " + ", ".join(SPLIT_OUTERMOST) + " split a dim",
            )

    # -- who -------------------------------------------------------------------------------------

    def team(self, rank: int) -> tuple[int, ...]:
        """The ranks that take part together with `rank`, in mesh order; () where it does not."""
        source = self.source.mesh
        if self.axis is not None and self._is_along_axis:
            return source.team(rank, self.axis) if rank in source else ()
        if self.kind == "SendRecv":
            return self._pair(rank)
        team = self._group
        return team if rank in team else ()

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks that share one process group with `rank` for this: the team, except that all
        pairs of a SendRecv share one."""
        if self.kind in POINT_TO_POINT and not self._is_along_axis:
            group = self._group
            return group if rank in group else ()
        return self.team(rank)

    @property
    def _is_along_axis(self) -> bool:
        return self.axis is not None and self.source.mesh == self.destination.mesh

    @property
    def _group(self) -> tuple[int, ...]:
        """The team of a communication that has only one."""
        source, destination = self.source.mesh, self.destination.mesh
        if self.kind in ("Broadcast", "Scatter"):
            root = source.first
            lacking = tuple(r for r in destination.ranks if r not in source or r == root)
            return lacking if root in lacking else (root, *lacking)
        return (*source.ranks, *(r for r in destination.ranks if r not in source))

    def _pair(self, rank: int) -> tuple[int, ...]:
        source, destination = self.source.mesh.ranks, self.destination.mesh.ranks
        for sender, receiver in zip(source, destination, strict=True):
            if rank in (receiver, sender) and (rank == receiver or rank not in destination):
                return (sender,) if sender == receiver else (sender, receiver)
        return ()

    def root(self, rank: int) -> int | None:
        """The root of the team that `rank` is in; None for kinds without, and outside the team."""
        team = self.team(rank)
        if not KINDS[self.kind][0] or not team:
            return None
        if self.kind == "SendRecv":
            return team[0]
        root = (self.destination if self.kind in ("Gather", "Reduce") else self.source).mesh.first
        assert root in team
        return root

    # -- how much --------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many ranks split the dim along the axis."""
        mesh = self.destination.mesh if self.kind == "Scatter" else self.source.mesh
        return mesh.axis_size(self.axis) if self.axis is not None else mesh.size

    def whole(self) -> Layout:
        """The layout of the side on which the dim is not split along the axis."""
        gathers = self.kind in ("Gather", "Allgather")
        return self.destination if gathers else self.source

    def rows(self, rank: int) -> tuple[int, int]:
        """(rows of the dim that the team shares, rows per block, padding included)."""
        assert self.dim is not None and self.kind != "AllToAll"
        layout = self.whole()
        if rank in layout.mesh:
            start, stop = layout.intervals(self.shape, rank)[self.dim]
        else:
            start, stop = 0, self.shape[self.dim]
        return stop - start, -(-(stop - start) // self.size)

    def front(self) -> tuple[int, ...]:
        """The dims of its buffers, outermost first: the split one leads.

        They stay as they are where those before it have one element.
        """
        assert self.dim is not None
        split = self.destination if self.whole() == self.source else self.source
        dims = range(len(self.shape))
        if all(n <= 1 for n in split.local_shape(self.shape)[: self.dim]):
            return tuple(dims)
        return (self.dim, *(d for d in dims if d != self.dim))

    def bytes_received(self, rank: int) -> int:
        """Bytes that arrive at a rank from others in one run, ring model, padding included."""
        team = self.team(rank)
        itemsize = self.dtype.itemsize if self.dtype is not None else 1
        return itemsize * (self._elements_received(rank, team) if team else 0)

    def _elements_received(self, rank: int, team: tuple[int, ...]) -> int:
        n, root = len(team), self.root(rank)
        if self.kind in POINT_TO_POINT:
            return sum(map(box_size, self.part(rank).recvs))
        if self.kind == "AllToAll":
            call = self.part(rank).call
            assert call is not None
            own = call.recv_counts[call.team.index(rank)]
            return sum(call.recv_counts) - own
        if self.dim is not None:
            _, chunk = self.rows(rank)
            layout = self.whole() if rank in self.whole().mesh else replicated(self.whole().mesh)
            local = layout.local_shape(self.shape, rank if rank in layout.mesh else None)
            block = chunk * math.prod(n for d, n in enumerate(local) if d != self.dim)
            if self.kind == "Gather":
                others = sum(r != root for r in self.source.mesh.ranks)
                return block * others if rank == root else 0
            if self.kind == "Scatter":
                return block if rank != root and rank in self.destination.mesh else 0
            return block * (n - 1)
        holder = team[0] if root is None else root
        elements = box_size(self.source.intervals(self.shape, holder))
        if self.kind == "Allreduce":
            return -(-2 * (n - 1) * elements // n)
        if self.kind == "Broadcast":
            return elements if rank != root else 0
        return elements if rank == root and n > 1 else 0  # Reduce

    # -- one rank's part -------------------------------------------------------------------------

    def part(self, rank: int) -> Part:
        """What a rank posts and copies."""
        team = self.team(rank)
        if self.kind == "Exchange":
            return _exchange(self, rank)
        if self.kind == "SendRecv":
            return _send_recv(self, rank)
        if self.kind == "AllToAll":
            return _all_to_all(self, rank, team) if team else Part()
        return _with_root(self, rank, team)

    def __str__(self) -> str:
        what = f"{self.kind}[{self.reduce_op}]" if self.reduce_op else self.kind
        details = [f"axis={self.axis}" if self.axis else "", self._dims_text()]
        return " ".join((what, *filter(None, details)))

    def _dims_text(self) -> str:
        if self.dim is None:
            return ""
        return f"dim={self.dim}" + (f"->{self.to_dim}" if self.to_dim is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a communication.

    Attributes:
        call: what the backend posts; None for nothing.
        sends: for each of `call.sends`, the box of the source buffer.
        recvs: for each of `call.recvs`, the box of the destination buffer.
        copies: (box of the source buffer, box of the destination buffer) that stay on the rank.
    """

    call: Call | None = None
    sends: tuple[Box, ...] = ()
    recvs: tuple[Box, ...] = ()
    copies: tuple[tuple[Box, Box], ...] = ()


def check_reduce_op(op: str, dtype: torch.dtype) -> None:
    """Raise CommunicationError where a reduce op means nothing for a dtype."""
    floats = dtype.is_floating_point
    if op in _BITWISE:
        good, of = not floats, "integers and bool"
    elif op == "avg":
        good, of = floats, "floating dtypes"
    elif op in ("min", "max"):
        good, of = True, "numbers and bool"
    else:
        good, of = dtype != torch.bool, "numbers, not bool"
    if not good:
        raise CommunicationError(
            f"Partial({op!r}) of {dtype}",
            because=f"{op} is for {of}",
            hint="another reduce op, or cast the value to another dtype first",
        )


def _whole(box: Box) -> Box:
    return tuple((0, stop - start) for start, stop in box)


def _with_root(comm: Communication, rank: int, team: tuple[int, ...]) -> Part:
    """The collectives whose buffers are whole: everything but AllToAll and point-to-point."""
    source, destination = comm.source.mesh, comm.destination.mesh
    copies: tuple[tuple[Box, Box], ...] = ()
    parts: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    if comm.kind == "Scatter":
        receivers = destination.ranks
        lacking = [(i, r) for i, r in enumerate(receivers) if r not in source]
        parts, blocks = tuple(r for _, r in lacking), tuple(i for i, _ in lacking)
        if rank in source and rank in destination:
            copies = (_own_block(comm, receivers.index(rank)),)
    elif comm.kind == "Broadcast" and rank in source and rank in destination:
        box = _whole(comm.source.intervals(comm.shape, rank))
        copies = ((box, box),)
    elif comm.kind == "Gather":
        parts = source.ranks
    if len(team) < 2 and comm.kind in ("Broadcast", "Scatter"):
        return Part(copies=copies)
    if not team:
        return Part(copies=copies)
    call = Call(
        kind=comm.kind,
        team=team,
        rank=rank,
        root=comm.root(rank),
        reduce_op=comm.reduce_op,
        parts=parts,
        blocks=blocks,
        source_blocks=comm.size if comm.kind == "Scatter" else None,
    )
    return Part(call=call, copies=copies)


def _own_block(comm: Communication, i: int) -> tuple[Box, Box]:
    """Scatter: the i-th block of the padded, permuted source, and the whole destination buffer."""
    assert comm.dim is not None
    _, chunk = comm.rows(comm.source.mesh.first)

    def rows(start: int, stop: int) -> Box:
        return tuple((start, stop) if d == comm.dim else (0, comm.shape[d]) for d in comm.front())

    return rows(i * chunk, (i + 1) * chunk), rows(0, chunk)


def _all_to_all(comm: Communication, rank: int, team: tuple[int, ...]) -> Part:
    """Blocks (rows of `dim` that a rank has) x (its share of `to_dim`), one per member."""
    assert comm.dim is not None and comm.to_dim is not None
    here = comm.source.intervals(comm.shape, rank)
    after = comm.destination.intervals(comm.shape, rank)
    n = len(team)
    shared = after[comm.dim]
    target = here[comm.to_dim]
    rest = math.prod(
        stop - start for d, (start, stop) in enumerate(here) if d not in (comm.dim, comm.to_dim)
    )
    rows, mine = _length(here[comm.dim]), _length(after[comm.to_dim])
    call = Call(
        kind="AllToAll",
        team=team,
        rank=rank,
        send_counts=tuple(rows * rest * _length(nth_chunk(target, n, i)) for i in range(n)),
        recv_counts=tuple(mine * rest * _length(nth_chunk(shared, n, i)) for i in range(n)),
    )
    return Part(call=call)


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def _send_recv(comm: Communication, rank: int) -> Part:
    """The i-th sender's part to the i-th receiver."""
    sends: list[tuple[int, Box]] = []
    recvs: list[tuple[int, Box]] = []
    copies: list[tuple[Box, Box]] = []
    pairs = zip(comm.source.mesh.ranks, comm.destination.mesh.ranks, strict=True)
    for sender, receiver in pairs:
        if rank not in (sender, receiver):
            continue
        box = _whole(comm.source.intervals(comm.shape, sender))
        if sender == receiver:
            copies.append((box, box))
        elif rank == sender:
            sends.append((receiver, box))
        else:
            recvs.append((sender, box))
    return _point_to_point(comm, rank, sends, recvs, copies)


def _exchange(comm: Communication, rank: int) -> Part:
    """Each rank receives exactly the blocks that it lacks, each from one of those that hold it."""
    source, destination, shape = comm.source, comm.destination, comm.shape
    sends: list[tuple[int, Box]] = []
    recvs: list[tuple[int, Box]] = []
    copies: list[tuple[Box, Box]] = []
    have = source.intervals(shape, rank) if rank in source.mesh else None
    if rank in destination.mesh:
        need = destination.intervals(shape, rank)
        index = destination.mesh.ranks.index(rank)
        for holders, block in _holders(source, shape, need):
            inside = relative(block, need)
            if rank in holders:
                assert have is not None
                copies.append((relative(block, have), inside))
            else:
                recvs.append((_choose(holders, index), inside))
    if have is not None and box_size(have):
        for index, receiver in enumerate(destination.mesh.ranks):
            wanted = intersect(have, destination.intervals(shape, receiver))
            if wanted is None or receiver == rank:
                continue
            holders = _holders_at(source, rank)
            if receiver not in holders and _choose(holders, index) == rank:
                sends.append((receiver, relative(wanted, have)))
    return _point_to_point(comm, rank, sends, recvs, copies)


def _holders(source: Layout, shape: Sequence[int], need: Box) -> Iterator[tuple[list[int], Box]]:
    """The pieces of a box as the source layout cuts it, each with the ranks that hold it."""
    chunks = []
    for dim, extent in enumerate(shape):
        start, stop = need[dim]
        chunks.append(
            [
                (dict(zip(source.split_axes(dim), choice, strict=True)), interval)
                for choice, interval in source.chunks_of(dim, extent)
                if max(start, interval[0]) < min(stop, interval[1])
            ]
        )
    for pieces in product(*chunks):
        fixed = {axis: i for choice, _ in pieces for axis, i in choice.items()}
        block = intersect(tuple(interval for _, interval in pieces), need)
        if block is not None:
            yield _ranks_with(source.mesh, fixed), block


def _holders_at(source: Layout, rank: int) -> list[int]:
    """The ranks that hold what `rank` holds."""
    coordinate = source.mesh.coordinate(rank)
    assert coordinate is not None
    here = dict(zip(source.mesh.axes, coordinate, strict=True))
    return _ranks_with(source.mesh, {a: here[a] for _, axes in source.splits for a in axes})


def _ranks_with(mesh: DeviceMesh, fixed: dict[str, int]) -> list[int]:
    ranges = [
        (fixed[a],) if a in fixed else range(n) for a, n in zip(mesh.axes, mesh.shape, strict=True)
    ]
    return [mesh.rank_at(c) for c in product(*ranges)]


def _choose(holders: list[int], index: int) -> int:
    """Spread the receivers over the ranks that hold a block."""
    return holders[index % len(holders)]


def _point_to_point(
    comm: Communication,
    rank: int,
    sends: list[tuple[int, Box]],
    recvs: list[tuple[int, Box]],
    copies: list[tuple[Box, Box]],
) -> Part:
    sends = [(peer, box) for peer, box in sends if box_size(box)]
    recvs = [(peer, box) for peer, box in recvs if box_size(box)]
    kept = tuple(pair for pair in copies if box_size(pair[0]))
    if not sends and not recvs:
        return Part(copies=kept)
    call = Call(
        kind=comm.kind,
        team=comm._group,
        rank=rank,
        sends=tuple(peer for peer, _ in sends),
        recvs=tuple(peer for peer, _ in recvs),
    )
    return Part(
        call=call,
        sends=tuple(box for _, box in sends),
        recvs=tuple(box for _, box in recvs),
        copies=kept,
    )


# -- the table: transition -> steps --------------------------------------------------------------

Step = Local | Communication


@lru_cache(maxsize=4096)
def steps(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps that turn one layout into another.

    Args:
        source: the layout before.
        destination: the layout after.
        shape: global extents; they decide which of several ways sends the fewest bytes.

    Returns:
        Local steps and communications (without dtype) in order; none where nothing changes.

    Raises:
        LayoutError: into a Partial that the source cannot become.

    >>> from mdfuse import DeviceMesh, Layout, Partial, Shard
    >>> mesh = DeviceMesh.arange(tp=4)
    >>> before, after = Layout(mesh, {"tp": Partial()}), Layout(mesh, {"tp": Shard(0)})
    >>> [str(step) for step in steps(before, after, (8,))]
    ['ReduceScatter[sum] axis=tp dim=0']
    """
    if source == destination:
        return ()
    if source.mesh == destination.mesh:
        _check_into_partial(source, destination)
    elif destination.partial_axes:
        raise LayoutError(
            f"{source} on {source.mesh} cannot become {destination} on {destination.mesh}",
            because="only a Partial on the same mesh can be made",
            hint="move the value first, then make it Partial",
        )
    if 0 in shape:
        return (Local(kind="empty", source=source, destination=destination),)
    if source.mesh == destination.mesh:
        path = _same_mesh(source, destination, shape)
        return tuple(_without_idle_posts(step, shape) for step in path)
    return _across(source, destination, shape)


def cost(source: Layout, destination: Layout, shape: tuple[int, ...]) -> float:
    """Elements that arrive at a rank for a change of layout."""
    return sum(_step_cost(step, shape) for step in steps(source, destination, shape))


def _check_into_partial(source: Layout, destination: Layout) -> None:
    before = source.by_axis()
    for axis, after in destination.by_axis().items():
        if not isinstance(after, Partial) or before[axis] == after:
            continue
        ops = {Replicate: ("sum", "min", "max", "avg"), Shard: ("sum",), Partial: ()}
        if after.op not in ops[type(before[axis])]:
            raise LayoutError(
                f"axis {axis}: {before[axis]} cannot become {after}",
                because="R becomes P(sum), P(min), P(max) or P(avg), and S(d) becomes P(sum)",
                hint="make it Replicate() first with another set, or leave it Partial",
            )


def _same_mesh(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """One row of the table where one suffices, else the cheapest sequence (Dijkstra)."""
    direct = _direct(source, destination)
    if direct is not None:
        return (direct,)
    tick = count()
    frontier: list[tuple[float, int, int, Layout, tuple[Step, ...]]] = [
        (0.0, 0, next(tick), source, ())
    ]
    done: set[Layout] = set()
    while frontier:
        spent, weight, _, here, path = heapq.heappop(frontier)
        if here == destination:
            return path
        if here in done:
            continue
        done.add(here)
        for step in _moves(here, destination):
            effort = weight + _effort(step, path)
            total = spent + _step_cost(step, shape)
            item = (total, effort, next(tick), step.destination, (*path, step))
            heapq.heappush(frontier, item)
    raise AssertionError(f"no way from {source} to {destination}")


def _effort(step: Step, path: tuple[Step, ...]) -> int:
    """What decides at equal bytes: two collectives before one Exchange, which comes before a
    collective whose result is sliced (some ranks then receive what they throw away)."""
    if isinstance(step, Local):
        return 3 if any(isinstance(s, Communication) for s in path) else 1
    return 3 if step.axis is None else 1


def _without_idle_posts(step: Step, shape: tuple[int, ...]) -> Step:
    """Where nobody lacks anything (only short dims do that) there is nothing to send."""
    if isinstance(step, Local) or step.reduce_op is not None:
        return step
    if _is_lacking(step.source, step.destination, shape):
        return step
    return Local(kind="slice", source=step.source, destination=step.destination)


def _direct(source: Layout, destination: Layout) -> Step | None:
    """The row of the table for a change along one axis that is innermost before and after."""
    before, after = source.by_axis(), destination.by_axis()
    changed = [a for a in before if before[a] != after[a]]
    if len(changed) != 1:
        return None
    (axis,) = changed
    for step in _axis_moves(source, axis, destination):
        if step.destination == destination:
            return step
    return None


def _moves(here: Layout, destination: Layout) -> Iterator[Step]:
    for axis in here.mesh.axes:
        yield from _axis_moves(here, axis, destination)
    goal = destination
    for axis in destination.partial_axes:
        goal = goal.with_placement(axis, Replicate())
    if not here.partial_axes and here != goal:
        yield Communication(kind="Exchange", source=here, destination=goal)


def _axis_moves(here: Layout, axis: str, destination: Layout) -> Iterator[Step]:
    """The one-axis rows of the table that can help on the way to a destination."""
    now, goal = here.placement(axis), destination.placement(axis)
    to = goal.dim if isinstance(goal, Shard) else None

    def step(kind: str, layout: Layout, **more: int | str | None) -> Communication:
        fields = {"kind": kind, "source": here, "destination": layout, "axis": axis, **more}
        return Communication(**fields)  # type: ignore[arg-type]

    gathered = here.with_placement(axis, Replicate())
    if isinstance(now, Partial):
        yield step("Allreduce", gathered, reduce_op=now.op)
        if to is not None:
            split = gathered.with_placement(axis, Shard(to))
            yield step("ReduceScatter", split, reduce_op=now.op, dim=to)
    elif isinstance(now, Replicate):
        if to is not None:
            split = here.with_placement(axis, Shard(to))
            yield Local(kind="slice", source=here, destination=split)
        elif isinstance(goal, Partial):
            kind = "zeros" if goal.op == "sum" else "slice"
            made = here.with_placement(axis, goal)
            yield Local(kind=kind, source=here, destination=made)
    elif here.split_axes(now.dim)[-1] == axis:
        yield step("Allgather", gathered, dim=now.dim)
        if to is not None and to != now.dim:
            moved = gathered.with_placement(axis, Shard(to))
            yield step("AllToAll", moved, dim=now.dim, to_dim=to)
        elif isinstance(goal, Partial):
            made = gathered.with_placement(axis, goal)
            yield Local(kind="zeros", source=here, destination=made)


def _step_cost(step: Step, shape: tuple[int, ...]) -> float:
    """Elements that arrive at a rank, without padding."""
    if isinstance(step, Local):
        return 0.0
    before = math.prod(step.source.local_shape(shape))
    if step.kind == "Exchange":
        return _lacking(step.source, step.destination, shape)
    if step.kind in ("SendRecv", "Broadcast", "Gather", "Scatter", "Reduce"):
        return max(before, math.prod(step.destination.local_shape(shape)))
    n = step.size
    if step.kind == "Allgather":
        return before * (n - 1)
    return before * (n - 1) / n * (2 if step.kind == "Allreduce" else 1)


def _lacking(
    source: Layout, destination: Layout, shape: tuple[int, ...], sample: int = 64
) -> float:
    """The most elements that a rank lacks, over a sample of ranks spread over the mesh."""
    mesh = destination.mesh
    stride = max(1, mesh.size // sample)
    worst = 0
    for rank in islice(mesh, 0, None, stride):
        worst = max(worst, _lacks(source, destination, shape, rank))
    return float(worst)


def _is_lacking(source: Layout, destination: Layout, shape: tuple[int, ...]) -> bool:
    """Some rank has no part of the source, or needs more than its part."""
    return any(
        rank not in source.mesh or _lacks(source, destination, shape, rank)
        for rank in destination.mesh
    )


def _lacks(source: Layout, destination: Layout, shape: tuple[int, ...], rank: int) -> int:
    need = destination.intervals(shape, rank)
    if rank not in source.mesh:
        return box_size(need)
    both = intersect(need, source.intervals(shape, rank))
    return box_size(need) - (box_size(both) if both is not None else 0)


def _across(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """The rows of the table for two meshes."""
    if source.partial_axes:
        return _reduce_across(source, destination, shape)
    if not _is_lacking(source, destination, shape):
        return (Local(kind="slice", source=source, destination=destination),)
    before, after = _only_split(source), _only_split(destination)

    def one(kind: str, dim: int | None = None, axis: str | None = None) -> tuple[Step, ...]:
        return (
            Communication(kind=kind, source=source, destination=destination, dim=dim, axis=axis),
        )

    if source.is_replicated and destination.is_replicated:
        return one("Broadcast")
    if source.is_replicated and after is not None:
        return one("Scatter", after[1], after[0])
    if before is not None and destination.is_replicated and destination.mesh.size == 1:
        return one("Gather", before[1], before[0])
    if before and after and before[1] == after[1] and source.mesh.size == destination.mesh.size:
        return one("SendRecv")
    return one("Exchange")


def _only_split(layout: Layout) -> tuple[str, int] | None:
    """(axis, dim) where one axis splits one dim and the mesh has no other ranks."""
    if len(layout.splits) != 1 or len(layout.splits[0][1]) != 1:
        return None
    dim, (axis,) = layout.splits[0]
    return (axis, dim) if layout.mesh.axis_size(axis) == layout.mesh.size else None


def _reduce_across(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Reduce at one sender where that is all there is to do, else scatter the sum and go on."""
    mesh, (axis, *_) = source.mesh, source.partial_axes
    placement = source.placement(axis)
    assert isinstance(placement, Partial)
    if mesh.axis_size(axis) == mesh.size and destination.is_replicated:
        root = next((r for r in destination.mesh.ranks if r in mesh), mesh.first)
        at_root = replicated(DeviceMesh([root]))
        if destination.mesh.ranks == (root,):
            at_root = destination
        reduced = Communication(
            kind="Reduce", source=source, destination=at_root, reduce_op=placement.op
        )
        if at_root == destination:
            return (reduced,)
        if destination.mesh.size == 1:
            sent = Communication(kind="SendRecv", source=at_root, destination=destination)
            return (reduced, sent)
        return (reduced, *steps(at_root, destination, shape))
    done = source
    for axis in source.partial_axes:
        n = mesh.axis_size(axis)
        gathered = done.with_placement(axis, Replicate())
        room = gathered.local_shape(shape)
        dim = next((d for d, extent in enumerate(room) if extent >= n), None)
        done = gathered if dim is None else gathered.with_placement(axis, Shard(dim))
    return (*steps(source, done, shape), *steps(done, destination, shape))


def with_type(step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    """A step applied to a tensor."""
    return replace(step, shape=shape, dtype=dtype) if isinstance(step, Communication) else step


__all__ = [
    "KINDS",
    "POINT_TO_POINT",
    "SPLIT_OUTERMOST",
    "Communication",
    "Local",
    "Part",
    "Step",
    "check_reduce_op",
    "cost",
    "steps",
    "with_type",
]
