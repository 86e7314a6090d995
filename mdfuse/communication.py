"""Communications: one description for all ranks, from which each rank's part is computed.

A `Communication` is one row of the transition table of `reshard/`, applied to one tensor. Nothing
here lists the ranks of a mesh unless one rank's part is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from mdfuse.caching import Forgetful
from mdfuse.errors import CommunicationError
from mdfuse.extents.expressions import Term
from mdfuse.extents.extent import is_symbolic
from mdfuse.layouts.boxes import box_size
from mdfuse.layouts.endpoints import Side
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.kinds import ALONG_SEVERAL, KINDS, POINT_TO_POINT, REDUCING, SPLITTING
from mdfuse.layouts.layout import REDUCE_OPS, Layout, Shard, replicated
from mdfuse.layouts.rank_part import RankPart, part_of
from mdfuse.layouts.recv_volume import taking_part
from mdfuse.mesh import DeviceMesh

_BITWISE = ("band", "bor", "bxor")


@dataclass(frozen=True, kw_only=True)
class Communication(Forgetful):
    """One communication of all ranks; each rank's part follows from its coordinates in the meshes.

    Attributes:
        kind: a row of `mdfuse.layouts.kinds`.
        source: the layout before.
        destination: the layout after.
        shape: global extents of the sent tensor.
        dtype: element type; None while only layouts are compared.
        axes: the mesh axes along which the placement changes, where it is along some: all-reduces,
            reduce-scatters and all-gathers may go along several at once, the outermost first.
        dim: the dim that is gathered, scattered or exchanged (of the source for AllToAll).
        to_dim: AllToAll: the dim that is split afterwards.
        reduce_op: for the kinds that reduce.
        backend: the one that carries it; None: the communicator's first backend.

    Raises:
        CommunicationError: a reduce op of a kind that does not reduce, a missing one, or one that
            the dtype does not have.
    """

    kind: str
    source: Layout
    destination: Layout
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    axes: tuple[str, ...] = ()
    dim: int | None = None
    to_dim: int | None = None
    reduce_op: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CommunicationError(f"{self.kind!r} is no kind", hint="one of " + ", ".join(KINDS))
        if (self.reduce_op is not None) != KINDS[self.kind].reduces:
            raise CommunicationError(
                f"{self.kind} with reduce_op={self.reduce_op!r}",
                because="exactly " + ", ".join(REDUCING) + " have a reduce op",
            )
        if self.reduce_op and self.dtype is not None:
            check_reduce_op(self.reduce_op, self.dtype)
        self._check_axis_and_dims()
        if KINDS[self.kind].splits != (self.dim is not None):
            raise CommunicationError(
                f"{self.kind} with dim={self.dim}",
                because="exactly " + ", ".join(SPLITTING) + " split a dim",
            )

    def _check_axis_and_dims(self) -> None:
        """Check that the axes exist, and the dims, too, where there is a dtype."""
        for axis in self.axes:
            self.split_mesh.axis_index(axis)
        if len(self.axes) > 1 and (
            self.kind not in ALONG_SEVERAL or len({*self.axes}) < len(self.axes)
        ):
            raise CommunicationError(
                f"{self.kind} along {', '.join(self.axes)}",
                because="exactly " + ", ".join(ALONG_SEVERAL) + " go along several different axes",
                hint="post one along each axis in turn",
            )
        n = len(self.shape)
        dims = [d for layout in (self.source, self.destination) for d, _ in layout.splits]
        dims += [d for d in (self.dim, self.to_dim) if d is not None]
        wrong = [d for d in dims if not 0 <= d < n] if self.dtype is not None else []
        if wrong:
            raise CommunicationError(
                f"{self.kind} of {list(self.shape)} along dim {wrong[0]}",
                because=f"it has {n} dims, which count from 0",
                hint="name a dim that it has",
            )

    # -- who -------------------------------------------------------------------------------------

    def team(self, rank: int) -> tuple[int, ...]:
        """The ranks that take part together with `rank`, in mesh order; () where it does not."""
        source = self.source.mesh
        if self.is_along_axes:
            return source.team(rank, *self.axes) if rank in source else ()
        if self.kind == "SendRecv":
            return self._pair(rank)
        team = self.whole_group
        return team if rank in team else ()

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the process group of `rank`: its team; all pairs of a SendRecv share one."""
        if self.kind in POINT_TO_POINT and not self.is_along_axes:
            group = self.whole_group
            return group if rank in group else ()
        return self.team(rank)

    @property
    def beside_layouts(self) -> tuple[Hashable, ...]:
        """All fields but the layouts, as a key."""
        what = self.kind, self.shape, self.dtype, self.axes
        return *what, self.dim, self.to_dim, self.reduce_op, self.backend

    @property
    def axis(self) -> str | None:
        """The axis, where it is one; None where there is none, or several."""
        return self.axes[0] if len(self.axes) == 1 else None

    @property
    def along(self) -> tuple[str, ...]:
        """The axes concerned: its own, or all along which an exchange changes the layout.

        () between meshes.
        """
        if self.axes or self.source.mesh != self.destination.mesh:
            return self.axes
        sizes = zip(self.source.mesh.axes, self.source.mesh.shape, strict=True)
        axes = tuple(a for a, n in sizes if n > 1)
        changed = tuple(a for a in axes if _at(self.source, a) != _at(self.destination, a))
        return changed or axes

    @property
    def is_along_axes(self) -> bool:
        """True if it goes along axes of one mesh."""
        return bool(self.axes) and self.source.mesh == self.destination.mesh

    @property
    def whole_group(self) -> tuple[int, ...]:
        """The team of a communication that has only one."""
        source, destination = self.source.mesh, self.destination.mesh
        if self.kind in ("Exchange", "ReduceExchange"):
            if is_symbolic(self.shape):
                return _exchanging(self.source, self.destination, self.shape)
            return _known_exchanging(self.source, self.destination, self.shape)
        if self.kind in ("Broadcast", "Scatter"):
            root = source.first
            lacking = tuple(r for r in destination.ranks if r not in source or r == root)
            return lacking if root in lacking else (root, *lacking)
        return (*source.ranks, *(r for r in destination.ranks if r not in source))

    def _pair(self, rank: int) -> tuple[int, ...]:
        source, destination = self.source.mesh, self.destination.mesh
        mesh = destination if rank in destination else source
        position = mesh.position(rank)
        if position is None:
            return ()
        sender, receiver = source.ranks[position], destination.ranks[position]
        return (sender,) if sender == receiver else (sender, receiver)

    def root(self, rank: int) -> int | None:
        """The root of the team that `rank` is in; None for kinds without, and outside the team.

        None as well where the root follows from a loop index that is not known yet.
        """
        team = self.team(rank)
        if not KINDS[self.kind].has_root or not team:
            return None
        if self.kind == "SendRecv":
            return team[0]
        if self.is_along_axes and self.kind in ("Broadcast", "Reduce"):
            return self._holder(rank, team)
        root = (self.destination if self.kind in ("Gather", "Reduce") else self.source).mesh.first
        assert root in team
        return root

    def at(self, known: Callable[[Term], int | None]) -> Communication:
        """Return this communication with the index of its chunk resolved by known terms."""
        source, destination = self.source.at(known), self.destination.at(known)
        if source is self.source and destination is self.destination:
            return self
        return replace(self, source=source, destination=destination)

    def _holder(self, rank: int, team: tuple[int, ...]) -> int | None:
        """Return the member of a team whose part is the chunk that all of them send or receive."""
        if self.kind == "Broadcast":
            split, chunk = self.source, self.destination
        else:
            split, chunk = self.destination, self.source
        index = chunk.stream.index if chunk.stream is not None else None
        if index is not None and not isinstance(index, int):
            return None
        wanted = chunk.rows(self.shape, rank)
        holders = [r for r in team if split.rows(self.shape, r) == wanted]
        # Several ranks match where the chunk is empty: take the one of this iteration.
        turn = [r for i, r in enumerate(team) if i == index and r in holders]
        return (*turn, *holders)[0]

    # -- how much --------------------------------------------------------------------------------

    @property
    def split_mesh(self) -> DeviceMesh:
        """The mesh that has the axes."""
        return self.destination.mesh if self.kind == "Scatter" else self.source.mesh

    @property
    def size(self) -> int:
        """The number of ranks that split the dim along the axes."""
        mesh = self.split_mesh
        return math.prod(map(mesh.axis_size, self.axes)) if self.axes else mesh.size

    @property
    def is_even(self) -> bool:
        """True if all blocks of all teams are known to be equally long."""
        assert self.dim is not None
        layout, parts = self.whole(), self.size
        for axis in layout.split_axes(self.dim):
            parts *= layout.mesh.axis_size(axis)
        return self.shape[self.dim] % parts == 0

    def whole(self) -> Layout:
        """Return the layout of the side on which the dim is not split along the axes."""
        gathers = self.kind in ("Gather", "Allgather")
        return self.destination if gathers else self.source

    def rows(self, rank: int) -> tuple[int, int]:
        """Return (rows of the dim that the team shares, rows per block, padding included)."""
        assert self.dim is not None and self.kind != "AllToAll"
        layout = self.whole()
        if rank in layout.mesh:
            start, stop = layout.box(self.shape, rank)[self.dim]
        else:
            start, stop = 0, self.shape[self.dim]
        return stop - start, -(-(stop - start) // self.size)

    def front(self) -> tuple[int, ...]:
        """Return the order of dims in the buffers, outermost first: the split dim leads.

        Dims keep their order where all before the split one have at most one element.
        """
        assert self.dim is not None
        split = self.destination if self.whole() == self.source else self.source
        chunk = split.stream
        if chunk is not None and chunk.index is not None:  # short chunks lie as the others do
            split = split.with_stream(chunk.at(chunk.largest))
        dims = range(len(self.shape))
        if all(n <= 1 for n in split.local_shape(self.shape)[: self.dim]):
            return tuple(dims)
        return (self.dim, *(d for d in dims if d != self.dim))

    def bytes_received(self, rank: int) -> int:
        """Return the bytes that reach a rank from others in one run: ring model, with padding."""
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
            local_count = call.recv_counts[call.team.index(rank)]
            return sum(call.recv_counts) - local_count
        if self.dim is not None:
            _, chunk = self.rows(rank)
            layout = self.whole()
            if rank not in layout.mesh:
                layout = replicated(layout.mesh).with_stream(layout.stream)
            local = layout.local_shape(self.shape, rank if rank in layout.mesh else None)
            block = chunk * math.prod(n for d, n in enumerate(local) if d != self.dim)
            if self.kind == "Gather":
                others = sum(r != root for r in self.source.mesh.ranks)
                return block * others if rank == root else 0
            if self.kind == "Scatter":
                return block if rank != root and rank in self.destination.mesh else 0
            return block * (n - 1)
        holder = team[0] if root is None else root
        elements = box_size(self.source.box(self.shape, holder))
        if self.kind == "Allreduce":
            return -(-2 * (n - 1) * elements // n)
        if self.kind == "Broadcast":
            return elements if rank != root else 0
        if self.kind == "Reduce":
            return elements if rank == root and n > 1 else 0
        return box_size(self.destination.box(self.shape, rank)) if n > 1 else 0

    # -- one rank's part -------------------------------------------------------------------------

    def part(self, rank: int) -> RankPart:
        """Return a rank's part: its posts, and its local copies."""
        part = part_of(self, rank) if is_symbolic(self.shape) else _known_part(self, rank)
        if self.backend is None or part.call is None:
            return part
        return replace(part, call=replace(part.call, backend=self.backend))

    def __str__(self) -> str:
        what = f"{self.kind}[{self.reduce_op}]" if self.reduce_op else self.kind
        carrier = f"backend={self.backend}" if self.backend else ""
        details = [self._axes_text(), self._dims_text(), carrier]
        return " ".join((what, *filter(None, details)))

    def _axes_text(self) -> str:
        if len(self.axes) > 1:
            return f"axes={','.join(self.axes)}"
        return f"axis={self.axis}" if self.axes else ""

    def _dims_text(self) -> str:
        if self.dim is None:
            return ""
        return f"dim={self.dim}" + (f"->{self.to_dim}" if self.to_dim is not None else "")


def _at(layout: Layout, axis: str) -> Hashable:
    """Return a layout's entries for an axis: the placement, outer axes, the halo and the chunk."""
    placement = layout.placement(axis)
    if not isinstance(placement, Shard):
        return placement
    axes = layout.split_axes(placement.dim)
    chunk = layout.stream if layout.stream and layout.stream.dim == placement.dim else None
    return placement, axes[: axes.index(axis)], dict(layout.reaches).get(placement.dim), chunk


@lru_cache(maxsize=64)
def _known_part(comm: Communication, rank: int) -> RankPart:
    """Return a part, cached: the verifier asks for those of few ranks again."""
    return part_of(comm, rank)


def _exchanging(source: Layout, destination: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that take part in an exchange."""
    return taking_part(Exchange(Side(source, shape), Side(destination, shape)))


_known_exchanging = lru_cache(maxsize=1024)(_exchanging)


def check_reduce_op(op: str, dtype: torch.dtype) -> None:
    """Raise CommunicationError where a reduce op is not defined on a dtype."""
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if op not in REDUCE_OPS:
        raise CommunicationError(
            f"there is no reduce op {op!r}", hint="one of " + ", ".join(REDUCE_OPS)
        )
    if op in _BITWISE:
        good, of = not is_inexact, "integers and bool"
    elif op == "avg":
        good, of = is_inexact, "floating and complex dtypes"
    elif op in ("min", "max"):
        good, of = not dtype.is_complex, "numbers that have an order, and bool"
    else:
        good, of = dtype != torch.bool, "numbers, not bool"
    if not good:
        raise CommunicationError(
            f"Partial({op!r}) of {dtype}",
            because=f"{op} is for {of}",
            hint="another reduce op, or cast the value to another dtype first",
        )
