"""Derive the layout of an op's result from those of its operands, by the labels of their dims.

    x: (tp=S1), w: (tp=S0)      matmul, where dim 1 of x and dim 0 of w are one label    (tp=P(sum))

Placements along axes of one rank do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from mdfuse.hir.index_terms import axes_of, depends_on_rank
from mdfuse.ir.dims import DimMap, Labels, always, reshape, unit_rows
from mdfuse.ir.dims_in_blocks import IN_BLOCKS, Taken, labels_in_blocks
from mdfuse.ir.op_table import OF_FIRST
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.blocks import Cut
from mdfuse.layouts.boxes import Box, Rows
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, Shard, Varies
from mdfuse.layouts.stream import JOINED, Stream
from mdfuse.mesh import DeviceMesh

Shape = tuple[int, ...]


class Contradiction(Exception):
    """An op cannot run on operands with these layouts; the text says why."""


@lru_cache(maxsize=16384)
def plain(layout: Layout, ndim: int) -> Layout:
    """Return the layout with non-negative dims and nothing along axes of one rank."""
    if not any(n == 1 for n in layout.mesh.shape) and all(d >= 0 for d, _ in layout.splits):
        return layout
    return layout.normalized(ndim, may_vary=True)


def box_text(box: Box) -> str:
    """Return a part of a tensor as text for an error message."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def rows_text(rows: Sequence[Rows]) -> str:
    """Return a part of a tensor of which dims are in blocks as text for an error message."""
    dims = (" ".join(f"{start}:{stop}" for start, stop in pieces) for pieces in rows)
    return f"[{', '.join(dims)}]"


def chunk_of(layout: Layout) -> Stream | None:
    """Return the chunk that a buffer is; None for a whole buffer."""
    stream = layout.stream
    return stream if stream is not None and stream.index is not None else None


def is_alike(a: Layout, b: Layout, ndim: int) -> bool:
    """Return whether two layouts mean the same for a tensor of `ndim` dims."""
    if a is b or a == b:
        return True
    if a.mesh != b.mesh:
        return False
    p, q = plain(a, ndim), plain(b, ndim)
    parts = [(x.placements, x.splits, x.reaches) for x in (p, q)]
    return parts[0] == parts[1] and is_one_chunk(p, q)


def is_one_chunk(a: Layout, b: Layout) -> bool:
    """Return whether two buffers are the same chunk of their part, or both whole.

    Two different index expressions may be equal: they are compared again when loops are written
    out. Expressions that depend on the rank must be equal, so that all ranks agree.
    """
    p, q = chunk_of(a), chunk_of(b)
    if p is None or q is None:
        return p is q
    is_zigzag = (p.op is None and p.zigzag, q.op is None and q.zigzag)
    if (p.dim, p.op, p.chunks) != (q.dim, q.op, q.chunks) or len({*is_zigzag}) > 1:
        return False
    if p.index == q.index:
        return True
    open_ends = [i for i in (p.index, q.index) if not isinstance(i, int)]
    return bool(open_ends) and not any(depends_on_rank(i) for i in open_ends)


@dataclass(slots=True)
class _Row:
    """The layout of a row's result under construction, from the layouts of its operands.

    Dims of operands and result that are one dim of the op share a label (`mdfuse.ir.dims`).
    """

    fn: str
    labels: DimMap
    mesh: DeviceMesh
    #: per tensor operand: its position, layout and labels
    operands: list[tuple[int, Layout, tuple[int | None, ...]]]
    #: whether each operand is a tensor, a number, or absent (None)
    is_tensor: tuple[bool | None, ...]
    #: per operand: its global shape, where the op has reaches
    shapes: Sequence[Shape | None] = ()
    splits: dict[int, tuple[str, ...]] = field(default_factory=dict)
    #: of each split label; those of a slice's result, where they are others
    cuts: dict[int, Cut | None] = field(default_factory=dict)
    taken: Mapping[int, Cut | None] = field(default_factory=dict)
    chunks: dict[int, Stream] = field(default_factory=dict)
    #: of a reshape: dim -> that of the result with the same rows where one of the two has one row,
    #: the extents after and before; and a chunk of such a dim
    units: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    #: of a reshape: label -> the extents of that dim, after and before
    extents: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    unit_chunk: Stream | None = None

    def split(self) -> None:
        """Note which axes split each label; raise Contradiction where operands differ."""
        for at, layout, dims in self.operands:
            for dim, axes in layout.splits:
                label = dims[dim]
                if label is None:
                    raise Contradiction(
                        f"{self.fn} needs dim {dim} of operand {at} as a whole, which "
                        f"{' and '.join(axes)} splits"
                    )
                if self.splits.setdefault(label, axes) != axes:
                    raise self.apart(at, dim)
                self.note_blocks(at, layout, dim, label)
        for at, layout, dims in self.operands:
            for dim, label in enumerate(dims):
                if label is not None and layout.split_axes(dim) != self.splits.get(label, ()):
                    raise self.apart(at, dim)
            self.check_reaches(at, layout)
        axes_used = [a for axes in self.splits.values() for a in axes]
        for axis in axes_used:
            if axes_used.count(axis) > 1:
                raise Contradiction(f"{axis} splits dims of {self.fn} that are not the same")
        for label, axes in self.splits.items():
            sizes = tuple(map(self.mesh.axis_size, axes))
            if not self.labels.fits(label, sizes):
                raise Contradiction(f"the parts of {self.fn} do not fall together")

    def check_reaches(self, at: int, layout: Layout) -> None:
        """Raise Contradiction where ranks have other rows of an operand than the op reads."""
        asked = {d: reach for (operand, d), reach in self.labels.reaches.items() if operand == at}
        shape = self.shapes[at] if asked else None
        wanted = layout.reaching(asked, shape or ()).reaches
        if layout.reaches != wanted:
            shown = " and ".join(reach.text(d) for d, reach in wanted) or "its parts"
            raise Contradiction(f"{self.fn} reads {shown} of operand {at}, which is {layout}")

    def note_blocks(self, at: int, layout: Layout, dim: int, label: int) -> None:
        """Note the blocks of a split label; raise Contradiction where the op cannot have them."""
        cut = layout.cuts.get(dim)
        if self.cuts.setdefault(label, cut) != cut:
            raise Contradiction(f"dim {dim} of operand {at} of {self.fn} is in other blocks")
        if cut is None or label in self.taken:
            return
        if not TABLE[self.fn].takes_blocks(self.labels, label, cut.blocks):
            raise Contradiction(f"{self.fn} needs dim {dim} of operand {at} in one block")

    def apart(self, at: int, dim: int) -> Contradiction:
        return Contradiction(f"dim {dim} of operand {at} is not split as the others' of {self.fn}")

    def chunk(self, declared: Layout) -> None:
        """Note which label is taken in chunks; all operands that have it must be at one chunk."""
        terms = list[tuple[int, Stream]]()
        for at, layout, _ in self.operands:
            dims, chunk = self.labels.of_chunks.operands[at], chunk_of(layout)
            if chunk is None:
                continue
            if chunk.op is not None and self.fn == "set":  # a copy of it is added up as well
                self.unit_chunk = chunk
                continue
            if chunk.op is not None and at in self.labels.terms:
                terms.append((at, chunk))
                continue
            if chunk.op is not None:
                raise Contradiction(f"{self.fn} of {chunk}, which is only added to what there is")
            label = dims[chunk.dim]
            if self.is_of_units(chunk, label, declared):
                self.unit_chunk = self.of_units(chunk)
                continue
            of = self.labels.of_chunks
            op = of.reduces.get(label) if label is not None else None
            if label is None or (label not in of.result and op not in JOINED):
                raise Contradiction(f"{self.fn} needs dim {chunk.dim} of operand {at}, not a chunk")
            self.chunks[label] = chunk
        if len(self.chunks) > 1:
            raise Contradiction(f"{self.fn} of chunks of several dims")
        for label, chunk in self.chunks.items():
            if label in self.labels.reaching:
                raise Contradiction(f"{self.fn} reads rows of several chunks of dim {chunk.dim}")
            self.check_chunks(label, chunk)
        for at, term in terms:
            self.check_term(at, term)

    def check_term(self, at: int, term: Stream) -> None:
        """Raise Contradiction unless an operand is what the chunk that is read adds to a sum."""
        of = [Stream.over("sum", x.chunks, x.index) for x in self.chunks.values()]
        a, *others = (Layout(self.mesh, {}, None, x) for x in (term, *of))
        if len(others) != 1 or not is_one_chunk(a, others[0]):
            raise Contradiction(f"operand {at} of {self.fn} is {term}, of other chunks")

    def is_of_units(self, chunk: Stream, label: int | None, declared: Layout) -> bool:
        """Return whether a chunk of a reshape's operand is along a dim without a label."""
        wanted = chunk_of(declared)
        to, *_ = self.units.get(chunk.dim, (None,))
        return to is not None and (label is None or (wanted is not None and wanted.dim == to))

    def of_units(self, chunk: Stream) -> Stream:
        """Return the chunk of the result where it has all rows of the dim, or none."""
        to, after, before = self.units[chunk.dim]
        rows = chunk.scaled(after, before)
        if rows is None or (after != before and isinstance(rows.chunks, int) and rows.count > 1):
            raise Contradiction(f"the chunks of {self.fn} do not fall together")
        return replace(rows, dim=to)

    def check_chunks(self, label: int, chunk: Stream) -> None:
        sizes: Sequence[int] = ()
        for at, layout, _ in self.operands:
            dims = self.labels.of_chunks.operands[at]
            if label not in dims:
                continue
            sizes = [*map(self.mesh.axis_size, layout.split_axes(dims.index(label)))] or sizes
            if layout.stream is chunk and dims.index(label) == chunk.dim:
                continue
            moved = layout.with_stream(replace(chunk, dim=dims.index(label)))
            if not is_one_chunk(layout, moved):
                other = chunk_of(layout)
                raise Contradiction(
                    f"operand {at} of {self.fn} is {other or 'whole'}, another one {chunk}"
                )
        if self.labels.in_chunks is not None and not isinstance(chunk.chunks, int):
            raise Contradiction(f"{self.fn} takes chunks of equal length, not {chunk}")
        fits = self.labels.of_chunks.fits
        if isinstance(chunk.chunks, int) and not fits(label, (*sizes, chunk.chunks)):
            raise Contradiction(f"the chunks of {self.fn} do not fall together")

    def reduced(self) -> dict[str, Placement]:
        """Return the axes along which the result is Partial, since they split a reduced dim."""
        placements: dict[str, Placement] = {}
        for label, axes in self.splits.items():
            if label in self.labels.result:
                continue
            op = self.labels.reduces.get(label)
            if op is None:
                raise Contradiction(f"{self.fn} cannot be split over a dim that it gives up")
            placements.update(dict.fromkeys(axes, Partial(op)))
        return placements

    def passed(self, axis: str) -> Placement | None:
        """Return the result's placement along an axis where operands are Partial or vary.

        None where no operand is: then splits and reductions alone tell the placement.
        """
        held = [(at, layout.placement(axis)) for at, layout, _ in self.operands]
        partial = [(at, p) for at, p in held if isinstance(p, Partial)]
        varying = [p for _, p in held if isinstance(p, Varies)]
        if partial:
            return self.passed_partial(axis, held, partial)
        if not varying:
            return None
        if any(isinstance(p, Shard) for _, p in held):
            raise Contradiction(
                f"one operand of {self.fn} varies along {axis}, which splits another; set that one "
                "to a value that varies, too"
            )
        return Varies()

    def passed_partial(
        self,
        axis: str,
        held: Sequence[tuple[int, Placement]],
        partial: Sequence[tuple[int, Partial]],
    ) -> Placement:
        """Return the placement that Partial operands pass on; raise Contradiction if none."""
        op, (first, placement) = TABLE[self.fn], partial[0]
        present = [x for x in self.is_tensor if x is not None]
        alike = all(p == placement for _, p in held)
        others = all(isinstance(p, Replicate) for at, p in held if at != first)
        alone = (first == op.term or op.partial == "factor") and others
        may = {
            "view": alone,
            "all": alike and all(present),
            "reduce": alone and placement.op in self.labels.reduces.values(),
            "sum": alike and placement.op == "sum" and all(present),
            **dict.fromkeys(OF_FIRST, placement.op == "sum" and alone),
        }
        if not may.get(op.partial, False):
            raise Contradiction(f"{self.fn} of {placement} along {axis} is no {placement}")
        return placement

    def free(self, placements: Mapping[str, Placement], declared: Layout) -> None:
        """Take the declared splits and chunk for dims of the result that no operand has."""
        known = {label for *_, dims in self.operands for label in dims}
        known |= {label for dims in self.labels.of_chunks.operands for label in dims}
        taken = {a for axes in self.splits.values() for a in axes} | {*placements}
        chunk = chunk_of(declared)
        for dim, label in enumerate(self.labels.result):
            if label is None or label in known:
                continue
            axes = declared.split_axes(dim)
            if axes and taken.isdisjoint(axes):
                self.splits[label] = axes
                cut = declared.cuts.get(dim)
                if cut is None or TABLE[self.fn].takes_blocks(self.labels, label, cut.blocks):
                    self.cuts[label] = cut
            if chunk is not None and chunk.dim == dim and not self.chunks:
                self.chunks[label] = chunk

    def scaled(self, label: int, dim: int) -> Stream:
        """Return the chunk of a dim of the result; Contradiction if it has no whole rows there."""
        chunk = self.chunks[label]
        rows = chunk.scaled(*self.extents[label]) if label in self.extents else chunk
        if rows is None:
            raise Contradiction(f"the chunks of {self.fn} do not fall together")
        return rows if rows.dim == dim else replace(rows, dim=dim)

    def result(self, numbers: frozenset[str], declared: Layout) -> Layout:
        self.split()
        self.chunk(declared)
        placements = self.reduced()
        for axis in self.mesh.axes:
            passed = self.passed(axis)
            if passed is not None:
                placements[axis] = passed
        self.free(placements, declared)
        order: dict[int, tuple[str, ...]] = {}
        stream = self.unit_chunk
        for dim, label in enumerate(self.labels.result):
            if label is None:
                continue
            if label in self.splits:
                order[dim] = self.splits[label]
                cut = self.taken.get(label, self.cuts.get(label))
                for axis in self.splits[label]:
                    pieces = cut.along(axis) if cut is not None else None
                    placements[axis] = Shard(dim).in_pieces(pieces)
        of = self.labels.of_chunks
        for dim, label in enumerate(of.result):
            if label is not None and label in self.chunks:
                stream = self.scaled(label, dim)
        for label in self.chunks.keys() - {*of.result}:
            chunk = self.chunks[label]
            stream = Stream.over(of.reduces[label], chunk.chunks, chunk.index)
        for axis in numbers:  # along a split each rank has its own part anyway
            if not isinstance(placements.get(axis), Shard):
                placements[axis] = Varies()
        return Layout(self.mesh, placements, order, stream)


def result_layout(
    fn: str,
    attrs: Mapping[str, Any],
    shapes: Sequence[Shape | None],
    layouts: Sequence[Layout | None],
    shape: Shape,
    declared: Layout,
    numbers: frozenset[str],
    absent: Sequence[bool],
    at: int = 0,
) -> Layout:
    """Return the layout that a row of the op table gives one of its results.

    Args:
        fn: the row.
        attrs: its attributes, global ones.
        shapes: global shapes of the operands; None for those that are not tensors.
        layouts: theirs.
        shape: the global shape of the first result.
        declared: the layout of the result, where the op leaves one open.
        numbers: the axes along which a number among the operands may be another one.
        absent: which operands are None.
        at: which result.

    Raises:
        Contradiction: it cannot run on them.
    """
    try:
        labels = TABLE[fn].rule(shapes, shape, attrs)
    except (AssertionError, TypeError, ValueError, LookupError):
        raise Contradiction(f"{fn} does not take these operands") from None
    if len(labels.results) > 1:
        labels = replace(labels, results=labels.results[at : at + 1])
    taken: Taken = {}
    if fn in IN_BLOCKS:
        operands = [
            None if x is None or of is None else plain(x, len(of))
            for x, of in zip(layouts, shapes, strict=True)
        ]
        in_blocks, taken = labels_in_blocks(fn, attrs, shapes, shape, operands, labels)
        if fn == "cat" and not {*taken} & {*declared.blocked}:
            taken = {}  # parts that fall together either way
        labels = in_blocks if taken else labels
    if taken or labels.fits is not always or labels.reaches or labels.terms:
        known = shapes if TABLE[fn].rule is reshape or labels.reaches else ()
        given = (tuple(layouts), declared, numbers, tuple(absent), known, shape, taken)
        return _result(fn, labels, *given)
    key = labels.operands, labels.result, tuple(labels.reduces.items()), labels.plain
    layout = _known_result(fn, key, tuple(layouts), declared, numbers, tuple(absent))
    if isinstance(layout, str):
        raise Contradiction(layout)
    return layout


@lru_cache(maxsize=4096)
def _known_result(
    fn: str,
    key: tuple[tuple[Labels, ...], Labels, tuple[tuple[int, str], ...], frozenset[int] | None],
    layouts: tuple[Layout | None, ...],
    declared: Layout,
    numbers: frozenset[str],
    absent: tuple[bool, ...],
) -> Layout | str:
    """Return the layout, or the contradiction; it depends on labels alone, not on extents."""
    labels = DimMap(operands=key[0], results=(key[1],), reduces=dict(key[2]), plain=key[3])
    try:
        return _result(fn, labels, layouts, declared, numbers, absent)
    except Contradiction as problem:
        return str(problem)


def _result(
    fn: str,
    labels: DimMap,
    layouts: tuple[Layout | None, ...],
    declared: Layout,
    numbers: frozenset[str],
    absent: tuple[bool, ...],
    shapes: Sequence[Shape | None] = (),
    shape: Shape = (),
    taken: Mapping[int, Cut | None] = MappingProxyType({}),
) -> Layout:
    operands, mesh = [], declared.mesh
    for at, (layout, dims) in enumerate(zip(layouts, labels.operands, strict=True)):
        if layout is not None:
            operands.append((at, _on(mesh, plain(layout, len(dims)), at), dims))
    is_tensor = tuple(
        None if no else layout is not None for layout, no in zip(layouts, absent, strict=True)
    )
    row = _Row(fn, labels, mesh, operands, is_tensor, shapes, taken=taken)
    if shapes and shapes[0] is not None and not labels.reaches:
        pairs = unit_rows(shapes[0], shape).items()
        row.units = {p: (q, shape[q], shapes[0][p]) for p, q in pairs}
        before = {label: shapes[0][d] for d, label in enumerate(labels.operands[0])}
        after = zip(labels.result, shape, strict=True)
        row.extents = {label: (n, before[label]) for label, n in after if label is not None}
    return row.result(numbers, plain(declared, len(labels.result)))


def _on(mesh: DeviceMesh, layout: Layout, at: int) -> Layout:
    """Return the layout of an operand on the mesh where the result lives."""
    if layout.mesh == mesh:
        return layout
    if layout.is_replicated:
        return Layout(mesh, {}, None, layout.stream)
    raise Contradiction(f"operand {at} is {layout} on another mesh, {layout.mesh}")


def is_shown(computed: Layout, declared: Layout, ndim: int) -> bool:
    """Return whether a value of layout `computed` may be declared with a layout, or as varying."""
    if is_alike(computed, declared, ndim):
        return True
    if computed.mesh != declared.mesh:
        return False
    p, q = plain(computed, ndim), plain(declared, ndim)
    return (
        (p.splits, p.reaches) == (q.splits, q.reaches)
        and is_one_chunk(p, q)
        and all(
            a == b or (isinstance(b, Varies) and isinstance(a, Replicate))
            for a, b in zip(p.placements, q.placements, strict=True)
        )
    )


def may_be_said(before: Layout, after: Layout) -> bool:
    """Return whether a `set` may give a value this layout on the author's word.

    The value may begin or cease to vary along an axis; a chunk may become a value of its own, and
    such a value a chunk. Placements along other axes stay. Local shapes are not compared.
    """
    chunks = chunk_of(before), chunk_of(after)
    if any(c is not None and c.op is not None for c in chunks):
        return False
    is_said = bool(before.varying_axes or after.varying_axes) or (chunks[0] is None) != (
        chunks[1] is None
    )
    if before.mesh != after.mesh or not is_said:
        return False
    moving = {a for c in chunks if c is not None for a in axes_of(c.index or 0, before.mesh)}
    p, q = (layout.by_axis() for layout in (before, after))
    return all(
        isinstance(p[a], Varies)
        or isinstance(q[a], Varies)
        or (p[a] == q[a] and (a not in moving or isinstance(p[a], Shard)))
        for a in before.mesh.axes
        if before.mesh.axis_size(a) > 1
    )
