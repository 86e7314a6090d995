"""Find where a communication could be hidden behind a product, and compute both in chunks.

    %x.whole: f32[64,32] (tp=R) = set(%x)
    %y: f32[64,64] (tp=S1) = matmul(%x.whole, %w)
->
    %x.whole: f32[64,32] (tp=R, stream(0,4)) = set(%x)
    %y: f32[64,64] (tp=S1, stream(0,4)) = matmul(%x.whole, %w)

A *window* is a set that communicates and the products beside it, which read it or which it reads,
or two such windows and the element-wise work between them. Its *forms* are the ways to compute it
in chunks. The choice among them depends on costs, and is made elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import networkx as nx
from networkx.utils import UnionFind

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Replicate, Shard
from mdfuse.layouts.stream import Stream
from mdfuse.passes import chunk_losses
from mdfuse.passes.segmentation import HostLoops, set_form, streams_read
from mdfuse.passes.sharded import ring
from mdfuse.passes.strategy import dim_map
from mdfuse.passes.streams import one_dim

#: Products, which take long enough to hide something.
PRODUCTS = ("matmul", "linear", "contract")


@dataclass(frozen=True, slots=True)
class Form:
    """A way to compute a window in chunks.

    Attributes:
        dims: of each value of the window, in order, the dim that is cut.
        chunks: the number of chunks.
        rotate: the axis along which ranks form a ring; None: all start with the first chunk.
    """

    dims: tuple[int, ...]
    chunks: int
    rotate: str | None = None

    def __str__(self) -> str:
        ring = f", a ring along {self.rotate}" if self.rotate else ""
        return f"{self.chunks} chunks{ring}"


@dataclass(frozen=True, slots=True)
class OverlapWindow:
    """Expressions that one loop could compute.

    Attributes:
        exprs: a set that communicates, products, and the work between, in the order of the fusion.
        parts: the windows that a chain joins; none for other windows.
    """

    exprs: tuple[Expr, ...]
    parts: tuple[OverlapWindow, ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        """The names of its results."""
        return tuple(e.output for e in self.exprs)

    @property
    def text(self) -> str:
        """Its sets and products, each with the user's line."""
        return ", ".join(_text(e) for e in self.exprs if e.op in ("set", *PRODUCTS))


def _text(expr: Expr) -> str:
    where = f" ({expr.source})" if expr.source else ""
    return f"%{expr.output} = {expr.op}({', '.join(f'%{x}' for x in expr.reads)}){where}"


# -- windows ---------------------------------------------------------------------------------------


def windows(fusion: Fusion) -> tuple[OverlapWindow, ...]:
    """Return the windows of a prepared fusion, each chain before the windows that it joins.

    There are none if the user streams a value: who writes a loop decides on all loops. Loops of
    losses, and rings of attention, stay as they are.
    """
    looped = looped_apart(fusion)
    if any(v.stream is not None and x not in looped for x, v in fusion.values.items()):
        return ()
    place = {e.outputs[0]: n for n, e in enumerate(fusion.exprs)}
    around = (w for e in fusion.exprs for w in _around(fusion, e, place))
    single = [w for w in around if looped.isdisjoint(w.values) and _is_free(fusion, w)]
    pairs = product(*([w for w in single if w.exprs[n].op == "set"] for n in (0, -1)))
    chains = [c for a, b in pairs if a is not b for c in _chain(fusion, a, b, place)]
    return (*(c for c in chains if _is_free(fusion, c)), *single)


def looped_apart(fusion: Fusion) -> frozenset[str]:
    """Return the values that loops of losses and rings of attention compute."""
    return chunk_losses.looped(fusion) | ring.looped(fusion)


def _around(fusion: Fusion, expr: Expr, place: dict[str, int]) -> Iterator[OverlapWindow]:
    """Yield a set with the product that it reads, and with the products that read it.

    Products that sum over what the set brings together, as gradients of weights do, need all of it:
    they are left out if others do not.
    """
    if not _communicates(fusion, expr):
        return
    computed = _computed(fusion, expr.reads[0])
    if computed and computed[0].op in PRODUCTS:
        yield _ordered([*computed, expr], place)
    readers = [e for e in fusion.consumers[expr.output] if e.op in PRODUCTS]
    if readers:
        yield _ordered([expr, *([e for e in readers if _keeps(fusion, expr, e)] or readers)], place)


def _keeps(fusion: Fusion, moved: Expr, product: Expr) -> bool:
    """Return whether a product has the dims along which a set that it reads moves parts."""
    before, after = fusion.layout(moved.reads[0]), fusion.layout(moved.output)
    splits = (before.placement(axis) for axis in _axes(before, after))
    dims = [p.dim for p in splits if isinstance(p, Shard)]
    labels = dim_map(product, fusion.values)
    read = [labels.operands[at] for at, x in enumerate(product.inputs) if x == moved.output]
    return all(of[d] in labels.results[0] for of in read for d in dims)


def _computed(fusion: Fusion, name: str) -> list[Expr]:
    """Return a product and its element-wise consumers, up to a value that only a set reads."""
    exprs: list[Expr] = []
    while name in fusion.producers and name not in fusion.returned:
        expr = fusion.producers[name]
        if len(fusion.consumers[name]) > 1 or len(expr.outputs) > 1:
            return []
        exprs.insert(0, expr)
        if expr.op in PRODUCTS:
            return exprs
        if not TABLE[expr.op].is_elementwise or len(expr.reads) != 1:
            return []
        (name,) = expr.reads
    return []


def _communicates(fusion: Fusion, expr: Expr) -> bool:
    """Return whether a set brings ranks of one mesh what others have."""
    if expr.op != "set" or not fusion.values[expr.output].is_tensor:
        return False
    before, after = fusion.layout(expr.reads[0]), fusion.layout(expr.output)
    return before.mesh == after.mesh and bool(_axes(before, after))


def _axes(before: Layout, after: Layout) -> list[str]:
    """Return the axes along which a set has to communicate."""
    new = after.by_axis()
    return [
        axis
        for axis, old in before.by_axis().items()
        if old not in (new[axis], Replicate()) and before.mesh.axis_size(axis) > 1
    ]


def _ordered(exprs: Iterable[Expr], place: dict[str, int], *parts: OverlapWindow) -> OverlapWindow:
    return OverlapWindow(tuple(sorted(exprs, key=lambda e: place[e.outputs[0]])), parts)


def _chain(
    fusion: Fusion, a: OverlapWindow, b: OverlapWindow, place: dict[str, int]
) -> Iterator[OverlapWindow]:
    """Yield chains: a window that begins with a set, element-wise work, and one that ends so."""
    between: dict[str, Expr] = {}
    waiting = [x for e in b.exprs if e.op in PRODUCTS for x in e.reads]
    while waiting:
        producer = fusion.producers.get(waiting.pop())
        if producer is None or producer in a.exprs or not TABLE[producer.op].is_elementwise:
            continue
        if len(producer.outputs) > 1 or producer.output in between:
            continue
        between[producer.output] = producer
        waiting += producer.reads
    inner = _behind(a, between)
    joined = {x for e in inner.values() for x in e.outputs} | {e.output for e in a.exprs[1:]}
    is_read = any(x in joined for e in b.exprs if e.op in PRODUCTS for x in e.reads)
    if is_read and not {*a.values} & {*b.values}:
        yield _ordered([*a.exprs, *inner.values(), *b.exprs], place, a, b)


def _behind(a: OverlapWindow, between: dict[str, Expr]) -> dict[str, Expr]:
    """Return the expressions that depend on the results of a window's products."""
    names, readers = {e.output for e in a.exprs[1:]}, dict[str, Expr]()
    waiting = True
    while waiting:
        waiting = False
        for name, expr in between.items():
            if name not in readers and not names.isdisjoint(expr.reads):
                readers[name] = expr
                names.add(name)
                waiting = True
    return readers


def _is_free(fusion: Fusion, window: OverlapWindow) -> bool:
    """Return whether the window's values have no requirement that a loop would violate."""
    read = {x for e in window.exprs for x in e.reads}
    values = [fusion.values[x] for x in (*read, *window.values)]
    window_values = [fusion.values[x] for x in window.values]
    return (
        all(v.is_tensor and not v.is_order_required and not v.expanded for v in window_values)
        and all(v.name not in fusion.reuse for v in window_values)
        and not any(is_symbolic(n) for v in values for n in v.shape)
    )


# -- forms -----------------------------------------------------------------------------------------


def forms(fusion: Fusion, window: OverlapWindow) -> dict[Form, Fusion]:
    """Return the ways to compute a window in chunks: form -> the fusion with these streams."""
    streamed_by: dict[Form, Fusion] = {}
    for dims in _cuts(fusion, window):
        for chunks, rotate in _counts(fusion, window, dims):
            form = Form(dims, chunks, rotate)
            streamed = apply(fusion, {window: form})
            if streamed is not None:
                streamed_by[form] = streamed
    return streamed_by


def _cuts(fusion: Fusion, window: OverlapWindow) -> Iterator[tuple[int, ...]]:
    """Yield the dims, one of each value, that are one dim of the whole window.

    The last dim of a product is excluded: its chunks would be columns, which are not contiguous.
    """
    same: UnionFind[tuple[str, int]] = UnionFind()
    for expr in window.exprs:
        for dims_alike in _one_dim(fusion, expr):
            same.union(*dims_alike)
    first = window.values[0]
    for start in range(len(fusion.values[first].shape)):
        root = same[first, start]
        dims = [
            [d for d in range(len(fusion.values[v].shape)) if same[v, d] == root]
            for v in window.values
        ]
        if all(len(d) == 1 for d in dims) and not any(
            e.op in PRODUCTS and d[0] == len(fusion.values[e.output].shape) - 1
            for e, d in zip(window.exprs, dims, strict=True)
        ):
            yield tuple(d[0] for d in dims)


def _one_dim(fusion: Fusion, expr: Expr) -> Iterable[list[tuple[str, int]]]:
    if expr.op != "set":
        return one_dim(expr, dim_map(expr, fusion.values))
    dims = range(len(fusion.values[expr.output].shape))
    return [[(expr.output, d), (expr.reads[0], d)] for d in dims]


def _counts(
    fusion: Fusion, window: OverlapWindow, dims: Sequence[int]
) -> Iterator[tuple[int, str | None]]:
    """Yield numbers of chunks, and which axis is rotated."""
    sets = [e for e in window.exprs if _communicates(fusion, e)]
    mesh = fusion.layout(sets[0].output).mesh
    axes = [a for e in sets for a in _axes(fusion.layout(e.reads[0]), fusion.layout(e.output))]
    size = {a: mesh.axis_size(a) for a in axes}
    values = (fusion.values[v] for v in window.values)
    rows = min(_rows(v, d, axes) for v, d in zip(values, dims, strict=True))
    counts = {2, 4} | {n * k for n in size.values() for k in (1, 2, 4)}
    yield from ((n, None) for n in sorted(counts) if n <= rows)
    yield from ((n * k, axis) for axis, n in size.items() for k in (1, 2, 4) if n * k <= rows)


def _rows(value: Value, dim: int, moved: Sequence[str]) -> int:
    """Return the number of rows of a dim, split by axes along which nothing moves."""
    layout = value.placed
    fixed = (layout.mesh.axis_size(a) for a in layout.split_axes(dim) if a not in moved)
    return value.shape[dim] // math.prod(fixed)


def apply(fusion: Fusion, chosen: Mapping[OverlapWindow, Form]) -> Fusion | None:
    """Return the fusion with each window in one loop; None where a loop cannot compute one."""
    values = dict(fusion.values)
    for window, form in chosen.items():
        for name, dim in zip(window.values, form.dims, strict=True):
            values[name] = replace(values[name], stream=Stream(dim, form.chunks, form.rotate))
    streamed = _together(replace(fusion, values=values), [*chosen])
    if streamed is None:
        return None
    exprs = [e for window in chosen for e in window.exprs]
    if not all(_may_cut(streamed, e) and _is_plain(streamed, e) for e in exprs):
        return None
    loops = HostLoops(streamed)
    is_right = all(loops.may_share(w.exprs[:-1], w.exprs[-1:]) for w in chosen)
    return streamed if is_right else None


def _may_cut(fusion: Fusion, expr: Expr) -> bool:
    """True if a set goes in chunks, and sums are not rounded once per rank, as those of 8 bits."""
    if expr.op != "set":
        return True
    how, size = set_form(fusion, expr), fusion.values[expr.output].dtype.itemsize
    return how is not None and (how != "ring_reduce" or size > 1)


def _is_plain(fusion: Fusion, expr: Expr) -> bool:
    """Return whether no dim in chunks is split in blocks."""
    read = zip(expr.inputs, streams_read(fusion, expr), strict=True)
    written = ((x, fusion.values[x].stream) for x in expr.outputs)
    cut = [(x, s.dim) for x, s in (*read, *written) if isinstance(x, str) and s is not None]
    return all(fusion.layout(x).cuts.get(dim) is None for x, dim in cut)


def _together(fusion: Fusion, windows: Sequence[OverlapWindow]) -> Fusion | None:
    """Return the fusion with the expressions of each window side by side; None: they cannot be.

    Otherwise expressions stay in their order as far as they can.
    """
    at = {name: n for n, e in enumerate(fusion.exprs) for name in e.outputs}
    home, members = dict[int, int](), dict[int, OverlapWindow]()
    for window in windows:
        places = [at[v] for v in window.values]
        home.update(dict.fromkeys(places, min(places)))
        members[min(places)] = window
    graph: nx.DiGraph[int] = nx.DiGraph()
    for n, expr in enumerate(fusion.exprs):
        node = home.get(n, n)
        graph.add_node(node)
        producers = (home.get(at[x], at[x]) for x in expr.reads if x in at)
        graph.add_edges_from((m, node) for m in producers if m != node)
    if not nx.is_directed_acyclic_graph(graph):
        return None
    order = nx.lexicographical_topological_sort(graph)
    placed = [members[n].exprs if n in members else (fusion.exprs[n],) for n in order]
    return replace(fusion, exprs=tuple(e for exprs in placed for e in exprs))


# -- windows by themselves -------------------------------------------------------------------------


def alone(fusion: Fusion, window: OverlapWindow) -> Fusion:
    """Return a window as a fusion of its own, whose costs are those of the window."""
    names = {*window.values}
    inputs = tuple(dict.fromkeys(x for e in window.exprs for x in e.reads if x not in names))
    is_read = {
        x
        for x in window.values
        if x in fusion.returned or any(r.outputs[0] not in names for r in fusion.consumers[x])
    }
    return Fusion(
        name=fusion.name,
        values={x: fusion.values[x] for x in (*inputs, *window.values)},
        exprs=window.exprs,
        inputs=inputs,
        outputs=tuple(x for x in window.values if x in is_read),
    )


def likeness(fusion: Fusion) -> object:
    """Return a key of a window without names: windows with equal keys take equal times."""
    number = {x: n for n, x in enumerate(fusion.values)}
    kinds = tuple((v.shape, v.dtype, v.layout, v.order) for v in fusion.values.values())
    exprs = tuple(
        (e.op, tuple(number.get(x, x) if isinstance(x, str) else x for x in e.inputs), e.attrs)
        for e in fusion.exprs
    )
    return kinds, exprs, tuple(number[x] for x in fusion.outputs)
