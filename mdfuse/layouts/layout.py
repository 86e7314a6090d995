"""Layouts: which part of a tensor each rank of a mesh holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from mdfuse.caching import Forgetful
from mdfuse.errors import LayoutError, MeshError, shown
from mdfuse.extents.expressions import Term, resolve
from mdfuse.layouts.blocks import Blocks, Cut, chunks_as_blocks
from mdfuse.layouts.boxes import Box, Interval, Rows, box_shape
from mdfuse.layouts.dim_parts import Parts, length
from mdfuse.layouts.halo import Reach
from mdfuse.layouts.placements import (
    IDEMPOTENT,
    REDUCE_OPS,
    Partial,
    Placement,
    Replicate,
    Shard,
    Varies,
    check_dicts,
    check_placement,
    commute,
    wrapped,
)
from mdfuse.layouts.stream import Stream
from mdfuse.mesh import DeviceMesh, as_mesh

if TYPE_CHECKING:
    from mdfuse.layouts.picture import Picture

__all__ = [
    "IDEMPOTENT", "REDUCE_OPS", "Layout", "Partial", "Placement", "Replicate", "Shard", "Varies",
    "commute", "replicated",
]  # fmt: skip


class Layout(Forgetful):
    """A mesh, one placement per mesh axis, and the order of axes that split one dim.

    Args:
        mesh: the mesh, or a torch `DeviceMesh`.
        placements: axis name -> placement; axes not named are `Replicate()`.
        order: dim -> the axes that split it, outermost first; mesh order where it is not given.
        stream: a `Stream`, where the host loops over chunks of a dim.
        reaches: split dim -> which rows each rank has of it, where these are not those of its part;
            in programs alone, in front of what reads them.

    Raises:
        MeshError: an axis that the mesh does not have.
        LayoutError: an order that does not name exactly the axes that split the dim; reduce ops
            along several axes whose order matters.

    >>> layout = Layout(DeviceMesh.arange(dp=2, tp=2), {"dp": Shard(0), "tp": Shard(0)})
    >>> layout, layout.local_shape((5, 3), 0), layout.local_shape((5, 3), 3)
    ((dp=S0, tp=S0), (2, 3), (1, 3))
    """

    __slots__ = ("__dict__", "mesh", "placements", "reaches", "splits", "stream")

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    #: dim -> the axes that split it, outermost first; only dims that are split.
    splits: tuple[tuple[int, tuple[str, ...]], ...]
    stream: Stream | None
    #: of dims that are split
    reaches: tuple[tuple[int, Reach], ...]

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Mapping[str, Placement] | None = None,
        order: Mapping[int, Sequence[str]] | None = None,
        stream: Stream | None = None,
        reaches: Mapping[int, Reach] | None = None,
    ) -> None:
        mesh = as_mesh(mesh)
        if not isinstance(mesh, DeviceMesh):
            raise LayoutError(
                f"{shown(mesh)} is not a mesh", hint="Layout(mesh, {axis: placement})"
            )
        if not (stream is None or isinstance(stream, Stream)):
            raise LayoutError(f"stream={shown(stream)}", hint="stream=Stream(dim, chunks), or none")
        check_dicts(placements, order, reaches)
        placements = dict(placements or {})
        for axis, placement in placements.items():
            mesh.axis_index(axis)
            check_placement(axis, placement)
        self.mesh = mesh
        self.placements = tuple(placements.get(a, Replicate()) for a in mesh.axes)
        self.stream = stream
        self.splits = self._order(order or {})
        self.reaches = tuple((d, reaches[d]) for d, _ in self.splits if reaches and d in reaches)
        self._check_blocks()
        if len(self.partial_axes) > 1 and not commute(self.reduce_ops.values()):
            raise LayoutError(
                f"a value that is Partial in several ways: {self.reduce_ops}",
                because="what it stands for depends on which axis is reduced first: only sum and "
                "avg may be mixed",
                hint="one op along all of these axes, or reduce along one first with another set",
            )

    def _order(self, order: Mapping[int, Sequence[str]]) -> tuple[tuple[int, tuple[str, ...]], ...]:
        splits: dict[int, tuple[str, ...]] = {}
        for axis, p in self.by_axis().items():
            if isinstance(p, Shard):
                splits[p.dim] = (*splits.get(p.dim, ()), axis)
        for dim, axes in order.items():
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            named = tuple(a for a in axes if a != "stream")
            if sorted(named) != sorted(splits.get(dim, ())):
                raise LayoutError(
                    f"order {{{dim}: {axes}}} for axes {splits.get(dim, ())}",
                    because=f"an order names exactly the axes that split dim {dim}, each once",
                    hint="leave order= out where the axes' order in the mesh will do",
                )
            if named and "stream" in axes[:-1]:
                cut = Shard(dim, chunks_as_blocks(dim, axes, self.stream))
                self.placements = tuple(cut if a in named else p for a, p in self.by_axis().items())
            if named:
                splits[dim] = named
        return tuple(sorted(splits.items()))

    def _check_blocks(self) -> None:
        """Check that the axes which split a dim agree on its blocks, and that no loop cuts them."""
        for dim, axes in self.splits:
            blocks = {p.pieces for a in axes if isinstance(p := self.placement(a), Shard)} - {None}
            if len(blocks) > 1:
                raise LayoutError(
                    f"{' and '.join(axes)} split dim {dim} in different blocks",
                    because="the blocks are those of the dim: an axis splits every one of them, or "
                    "what others leave as one",
                    hint="give all axes that split blocks of the dim the same blocks=",
                )
            if blocks and self.stream is not None and self.stream.dim == dim:
                self.cuts[dim].check_chunks(dim, axes, self.stream)
            if blocks:
                self.cuts[dim].check(dim, axes, self.mesh.axis_size)

    # -- reading ---------------------------------------------------------------------------------

    def placement(self, axis: str) -> Placement:
        """Return the placement along a named axis."""
        return self.placements[self.mesh.axis_index(axis)]

    def split_axes(self, dim: int) -> tuple[str, ...]:
        """Return the axes that split a dim, outermost first."""
        for d, axes in self.splits:
            if d == dim:
                return axes
        return ()

    def reach(self, dim: int) -> Reach | None:
        """Return which rows ranks have of a split dim; None: those of their parts."""
        return dict(self.reaches).get(dim) if self.reaches else None

    @cached_property
    def blocked(self) -> Mapping[int, Blocks]:
        """Dims that are split in blocks -> their blocks."""
        return {p.dim: p.pieces for p in self.placements if isinstance(p, Shard) and p.pieces}

    @cached_property
    def in_runs(self) -> Collection[int]:
        """Dims of which a rank may have several runs of rows."""
        dim = self.stream.runs if self.stream is not None else None
        return self.blocked if dim is None else {*self.blocked, dim}

    @cached_property
    def cuts(self) -> Mapping[int, Cut]:
        """Dims that are split in blocks -> these, and the axes that split the dim plainly."""
        plain = {a for a, p in self.by_axis().items() if isinstance(p, Shard) and not p.pieces}
        axes = dict(self.splits)
        return {d: Cut(n, frozenset(plain.intersection(axes[d]))) for d, n in self.blocked.items()}

    def is_plain(self, dim: int, axis: str) -> bool:
        """Return whether an axis splits what a rank has of a dim as one, and not every block."""
        return dim not in self.cuts or axis in self.cuts[dim].plain

    def without_blocks(self, dims: Collection[int]) -> Layout:
        """Return this layout with some dims split by the same axes as one block."""
        if not any(d in self.blocked for d in dims):
            return self
        plain = {
            a: Shard(p.dim) if isinstance(p, Shard) and p.dim in dims else p
            for a, p in self.by_axis().items()
        }
        return Layout(self.mesh, plain, self.order, self.stream, dict(self.reaches))

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes along which the value is Partial."""
        return tuple([a for a, p in self.by_axis().items() if isinstance(p, Partial)])

    @cached_property
    def varying_axes(self) -> tuple[str, ...]:
        """The axes of several ranks along which the placement is `Varies`."""
        axes = [a for a, p in self.by_axis().items() if isinstance(p, Varies)]
        return tuple([a for a in axes if self.mesh.axis_size(a) > 1])

    @property
    def reduce_ops(self) -> dict[str, str]:
        """Partial axis of several ranks -> its reduce op."""
        ops = {a: p.op for a, p in self.by_axis().items() if isinstance(p, Partial)}
        return {a: op for a, op in ops.items() if self.mesh.axis_size(a) > 1}

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds the whole value."""
        return all(isinstance(p, Replicate) for p in self.placements)

    @cached_property
    def _places(self) -> dict[int, tuple[int, ...]]:
        """Split dim -> the indices in the mesh of the axes that split it."""
        index = self.mesh.axes.index
        return {d: tuple([index(a) for a in axes]) for d, axes in self.splits}

    @cached_property
    def _parts(self) -> dict[tuple[int, int], Parts]:
        """(dim, extent) -> its parts."""
        return {}

    def parts(self, dim: int, extent: int) -> Parts:
        """Return the parts of a dim, by coordinates along the axes that split it, in this order.

        A chunk whose index only the running loop knows counts as the largest.
        """
        if type(extent) is not int:  # symbolic: comparing it with others would assume something
            return self._parts_of(dim, extent)
        if (dim, extent) not in self._parts:
            self._parts[dim, extent] = self._parts_of(dim, extent)
        return self._parts[dim, extent]

    def _parts_of(self, dim: int, extent: int) -> Parts:
        chunk, sizes = self.stream, self.mesh.shape
        is_chunk = chunk is not None and chunk.index is not None and chunk.dim == dim
        sizes = tuple([sizes[i] for i in self._places.get(dim, ())])
        if not self.blocked and not self.reaches and not is_chunk:
            return Parts(extent, sizes, (True,) * len(sizes))
        plain = tuple([self.is_plain(dim, a) for a in self.split_axes(dim)])
        blocks, reach = self.blocked.get(dim), self.reach(dim)
        return Parts(extent, sizes, plain, blocks, reach, chunk if is_chunk else None)

    def rows_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Rows, ...]:
        """Return the rows of each dim that the rank at a mesh coordinate holds."""
        rows = list[Rows]()
        for dim, extent in enumerate(shape):
            places = self._places.get(dim)
            if places is None and self.stream is None:
                rows.append(((0, extent),))
            else:
                rows.append(self.parts(dim, extent).at([coordinate[i] for i in places or ()]))
        return tuple(rows)

    def rows(self, shape: Sequence[int], rank: int) -> tuple[Rows, ...]:
        """Return the rows of each dim that a rank holds; MeshError where it is not in the mesh."""
        return self.rows_at(shape, self._coordinate(rank))

    def box_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """Return the box of a tensor that a rank holds; a dim in blocks counts from 0."""
        rows = self.rows_at(shape, coordinate)
        if not self.in_runs:
            return tuple([runs[0] for runs in rows])
        return tuple(
            self._run(d, shape[d], runs, coordinate) if d in self.in_runs else runs[0]
            for d, runs in enumerate(rows)
        )

    def _run(self, dim: int, extent: int, rows: Rows, coordinate: Sequence[int]) -> Interval:
        """Return where in a rank's part of a dim in blocks some rows are: all, or one chunk."""
        before, parts = 0, self.parts(dim, extent)
        if parts.chunk is not None and dim in self.blocked:
            every = parts.whole.at([coordinate[i] for i in self._places[dim]])
            before, _ = parts.chunk.within(every, parts.chunk.number)
        return before, before + length(rows)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Return `box_at` for a rank; MeshError where it is not in the mesh."""
        return self.box_at(shape, self._coordinate(rank))

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            hint = "a rank outside holds no part of it"
            raise MeshError(f"rank {shown(rank)} is not in {self.mesh}", hint=hint)
        return coordinate

    def local_shape(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's part; without a rank, of the largest."""
        if rank is None and self.in_runs:
            return tuple([self.parts(d, n).first for d, n in enumerate(shape)])
        at = self._coordinate(rank) if rank is not None else (0,) * self.mesh.ndim
        return box_shape(self.box_at(shape, at))

    def chunks_of(self, dim: int, extent: int) -> Iterator[tuple[tuple[int, ...], Interval]]:
        """Yield (coordinates on the axes that split a dim, interval of the dim) for all of them."""
        parts = self.parts(dim, extent)
        if parts.chunk is not None and not isinstance(parts.chunk.index, int):
            parts = parts.whole
        for choice, rows in parts.every():
            for interval in rows:
                yield choice, interval

    def picture(self, shape: Sequence[int]) -> Picture:
        """Return a picture of a tensor that lies so: print it, or take its `.svg()`."""
        from mdfuse.layouts.picture import Picture

        return Picture(self, tuple(shape))

    # -- changing --------------------------------------------------------------------------------

    @property
    def order(self) -> dict[int, tuple[str, ...]]:
        """The splits as an `order` argument."""
        return dict(self.splits)

    def by_axis(self) -> dict[str, Placement]:
        """Return the placements as a `placements` argument."""
        return dict(zip(self.mesh.axes, self.placements, strict=True))

    def with_placement(self, axis: str, placement: Placement) -> Layout:
        """Return this layout with one axis changed; a new split comes innermost.

        It is in the blocks that other axes split, where these do so alike; plain where they do not.
        """
        cut = placement.pieces if isinstance(placement, Shard) else None
        if self.blocked or cut is not None or self.stream is not None or self.reaches:
            return self._with_placement(axis, placement)  # extents may be symbols, which no key is
        return _with_placement(self, axis, placement)

    def _with_placement(self, axis: str, placement: Placement) -> Layout:
        if isinstance(placement, Shard):
            others = (p for a, p in self.by_axis().items() if a != axis and isinstance(p, Shard))
            blocks = {p.pieces for p in others if p.dim == placement.dim} or {placement.pieces}
            placement = placement.in_pieces(blocks.pop() if len(blocks) == 1 else None)
        placements = {**self.by_axis(), axis: placement}
        order = {d: tuple(a for a in axes if a != axis) for d, axes in self.splits}
        if isinstance(placement, Shard):
            order[placement.dim] = (*order.get(placement.dim, ()), axis)
        return Layout(self.mesh, placements, order, self.stream, dict(self.reaches))

    def at(self, known: Callable[[Term], int | None]) -> Layout:
        """Return this layout with the index of its chunk resolved by what is known of terms."""
        chunk = self.stream
        if chunk is None or chunk.index is None or isinstance(chunk.index, int):
            return self
        return self.with_stream(chunk.at(resolve(chunk.index, self._knows(known))))

    def _knows(self, known: Callable[[Term], int | None]) -> Callable[[Term], int | None]:
        """Return a lookup of terms that takes coordinates from this layout's mesh."""

        def lookup(term: Term) -> int | None:
            rank = known(Term("rank"))
            if term.kind != "coord" or rank is None or term.name not in self.mesh.axes:
                return known(term)
            coordinate = self.mesh.coordinate(rank)
            return coordinate[self.mesh.axis_index(term.name)] if coordinate else known(term)

        return lookup

    def with_stream(self, stream: Stream | None) -> Layout:
        """Return this layout with another stream, or none."""
        if self.blocked or not (stream is None or isinstance(stream, Stream)):
            return Layout(self.mesh, self.by_axis(), self.order, stream, dict(self.reaches))
        # only blocks have to do with chunks: all else is checked
        return Layout.checked(self.mesh, self.placements, self.splits, stream, self.reaches)

    @classmethod
    def checked(
        cls, mesh: DeviceMesh, placements: Any, splits: Any, stream: Any, reaches: Any
    ) -> Layout:
        """Return a layout of parts that are known to fit, as its attributes have them."""
        layout = object.__new__(cls)
        layout.mesh, layout.placements, layout.splits = mesh, placements, splits
        layout.stream, layout.reaches = stream, reaches
        return layout

    def reaching(self, reaches: Mapping[int, Reach], shape: Sequence[int]) -> Layout:
        """Return this layout with ranks that have other rows of some dims than their parts.

        Reaches that are no more than the parts of a tensor of this shape are left out.
        """
        if not reaches:
            return self.without_reaches
        plain = self.without_reaches
        layout = Layout(self.mesh, self.by_axis(), self.order, self.stream, reaches)
        kept_reaches = {
            d: reach
            for d, reach in layout.reaches
            if [*layout.chunks_of(d, shape[d])] != [*plain.chunks_of(d, shape[d])]
        }
        return Layout(self.mesh, self.by_axis(), self.order, self.stream, kept_reaches)

    @property
    def without_reaches(self) -> Layout:
        """This layout with the parts themselves."""
        return Layout(self.mesh, self.by_axis(), self.order, self.stream) if self.reaches else self

    def permuted(self, dims: Sequence[int]) -> Layout:
        """Return the layout of `permute(x, dims)` where this is the layout of x."""
        return self.with_dims({d: i for i, d in enumerate(dims)})

    def with_dims(self, new: Mapping[int, int]) -> Layout:
        """Return this layout with dims renamed; splits of dims not in `new` are dropped."""
        placements: dict[str, Placement] = {
            a: (replace(p, dim=new[p.dim]) if p.dim in new else Replicate())
            if isinstance(p, Shard)
            else p
            for a, p in self.by_axis().items()
        }
        order = {new[d]: axes for d, axes in self.splits if d in new}
        stream = self.stream
        if stream is not None and stream.op is None:
            stream = replace(stream, dim=new[stream.dim]) if stream.dim in new else None
        reaches = {new[d]: reach for d, reach in self.reaches if d in new}
        return Layout(self.mesh, placements, order, stream, reaches)

    def normalized(self, ndim: int, may_vary: bool = False, singles: bool = False) -> Layout:
        """Return this layout, dims counted from 0; without `singles` axes of size 1 replicated."""
        placements: dict[str, Placement] = {}
        for axis, placement in self.by_axis().items():
            if isinstance(placement, Varies) and not may_vary and self.mesh.axis_size(axis) > 1:
                raise LayoutError(
                    f"axis {axis}: {placement}",
                    because="a tensor in global view has one value, which its parts add up to",
                    hint="only buffers of host programs may vary; say Shard, Replicate or Partial",
                )
            if isinstance(placement, Shard):
                dim = wrapped(placement.dim, ndim, f"axis {axis}: {shown(placement)}")
                placement = replace(placement, dim=dim)
            is_real = singles or self.mesh.axis_size(axis) > 1
            placements[axis] = placement if is_real else Replicate()
        order: dict[int, tuple[str, ...]] = {}
        for dim, axes in self.splits:
            real_axes = tuple(a for a in axes if singles or self.mesh.axis_size(a) > 1)
            # Shard(-1) and Shard(1) of a matrix name one dim: then mesh order decides.
            d = dim % ndim
            joined = (*order.get(d, ()), *real_axes)
            order[d] = joined if dim >= 0 else tuple(sorted(joined, key=self.mesh.axis_index))
        stream = self.stream
        if stream is not None and stream.op is None:
            stream = replace(stream, dim=wrapped(stream.dim, ndim, str(stream)))
        if stream is not None and stream.rotate is not None:
            self.mesh.axis_index(stream.rotate)
        reaches = {d % ndim: reach for d, reach in self.reaches}
        split = {d: a for d, a in order.items() if a}
        layout = Layout(self.mesh, placements, split, stream, reaches)
        return layout._with_whole_blocks_first() if layout.blocked else layout

    def _with_whole_blocks_first(self) -> Layout:
        """Return the one form of equal layouts: axes that share out whole blocks are outermost.

        Where a rank is left with one block, that is the plain layout of these axes in this order.
        """
        placements, order = self.by_axis(), self.order
        for dim, cut in self.cuts.items():
            order[dim], is_plain = cut.whole_first(order[dim], self.mesh.axis_size)
            if is_plain:
                placements.update(dict.fromkeys(order[dim], Shard(dim)))
        return Layout(self.mesh, placements, order, self.stream, dict(self.reaches))

    # -- identity --------------------------------------------------------------------------------

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return (self.mesh, self.placements, self.splits, self.stream, self.reaches)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        parts = [f"{a}={p}" for a, p in zip(self.mesh.axes, self.placements, strict=True)]
        for dim, axes in self.splits:
            if len(axes) > 1 and axes != tuple(a for a in self.mesh.axes if a in axes):
                parts.append(f"order {dim}:{'>'.join(axes)}")
        if self.stream:
            parts.append(str(self.stream))
        parts += [reach.text(dim) for dim, reach in self.reaches]
        return f"({', '.join(parts)})"


#: Passes change the same layouts for each expression; equal ones are one object, compared at once.
_with_placement = lru_cache(maxsize=4096)(Layout._with_placement)


def replicated(mesh: DeviceMesh) -> Layout:
    """Return the layout in which every rank of the mesh holds the whole."""
    return Layout(mesh, {})
