"""The strategy of one expression on a mesh: the layouts of its operands and of its results.

A pure function of the operands' layouts, the layout that the user asked of the result, and the op's
dim labels. Every pass that needs the answer asks here again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter, is_

from mdfuse.caching import Cache
from mdfuse.extents.assumptions import active_assumptions
from mdfuse.ir.dims import DimMap, Labels
from mdfuse.ir.dims_in_blocks import IN_BLOCKS, labels_in_blocks
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.blocks import Cut
from mdfuse.layouts.layout import Layout, Partial, Placement, Shard
from mdfuse.mesh import DeviceMesh
from mdfuse.passes.axis_strategy import Choice, Operand, Result, ways
from mdfuse.passes.prices import cheapest
from mdfuse.reshard import costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Layouts of an expression that runs without communication.

    Attributes:
        wanted: value name -> the layout that the expression reads it in.
        results: the layouts of what it yields, one for each result.
    """

    wanted: Mapping[str, Layout]
    results: tuple[Layout, ...]

    @property
    def result(self) -> Layout:
        """The layout of the only result."""
        (layout,) = self.results
        return layout


#: A strategy of an expression, behind its operands and results, and their laws: an expression has
#: the last one without laws, while its results are inferred, and the last one with some.
_Answer = tuple[list[Value], tuple[Layout | None, ...], Strategy]

#: The fields of a value that a strategy depends on, besides its layout and the copies of it.
_KIND = attrgetter("shape", "dtype", "expanded")


def choose(expr: Expr, values: Mapping[str, Value], *laws: Layout | None) -> Strategy | None:
    """Return the strategy of an expression; None while nothing around it has a layout.

    Args:
        expr: the expression.
        values: all values; operands without a layout have no say.
        laws: for each result the layout that it must have in the end; none: there are no laws.
    """
    law = laws[0] if laws else None
    if expr.op == "stride_order" and law is not None:
        # A memory order is required of the value where it is in the end, so a reshard comes before.
        return Strategy(wanted=dict.fromkeys(expr.reads, law), results=(law,))
    laws = laws or (None,) * len(expr.outputs)
    if active_assumptions() is not None:  # each decision about a symbolic extent leaves a guard
        return _chosen(expr, values, laws)
    asked = [values[name] for name in (*expr.reads, *expr.outputs)]
    last: tuple[_Answer | None, _Answer | None] = expr.answer or (None, None)
    is_stated = any(laws)
    answer = last[is_stated]
    if answer is not None and answer[1] == laws and _are_alike(asked, answer[0]):
        return answer[2]
    strategy = _known(expr, values, laws)
    if strategy is not None:
        answer = asked, laws, strategy
        both = (last[0], answer) if is_stated else (answer, last[1])
        object.__setattr__(expr, "answer", both)
    return strategy


def _are_alike(some: Sequence[Value], others: Sequence[Value]) -> bool:
    return all(map(is_, some, others)) or all(map(_is_alike, some, others))


def _is_alike(one: Value, other: Value) -> bool:
    """Return whether two values are one for a strategy."""
    return one is other or (
        one.layout == other.layout and one.copies == other.copies and _KIND(one) == _KIND(other)
    )


def _known(
    expr: Expr, values: Mapping[str, Value], laws: tuple[Layout | None, ...]
) -> Strategy | None:
    """Return the strategy of an expression, which one like it may have as well."""
    names, key = _question(expr, values, laws)
    answer = CHOICES.find(key)
    if answer is None:
        strategy = _chosen(expr, values, laws)
        if strategy is None:
            return None
        answer = tuple(strategy.wanted[name] for name in names), strategy.results
        CHOICES.put(key, answer)
    wanted, results = answer
    return Strategy(wanted=dict(zip(names, wanted, strict=True)), results=results)


def choose_here(expr: Expr, values: Mapping[str, Value]) -> Strategy | None:
    """Return the strategy of an expression whose results are to have the layouts in `values`."""
    return choose(expr, values, *[values[name].layout for name in expr.outputs])


def choose_laid(
    expr: Expr, values: Mapping[str, Value], layouts: Mapping[str, Layout]
) -> Strategy | None:
    """Return the strategy of an expression where some of its values have other layouts."""
    near = {x: values[x] for x in (*expr.reads, *expr.outputs)}
    return choose_here(expr, near | {x: near[x].having(layout=y) for x, y in layouts.items()})


def strategy_of(expr: Expr, values: Mapping[str, Value]) -> Strategy:
    """Return the strategy of an expression whose operands have layouts; see `choose_here`."""
    strategy = choose_here(expr, values)
    assert strategy is not None
    return strategy


def read_layouts(expr: Expr, fusion: Fusion) -> Mapping[str, Layout]:
    """Return the layouts in which an expression reads its operands: a set in that of its result."""
    if expr.op == "set":
        return dict.fromkeys(expr.reads, fusion.layout(expr.output))
    strategy = choose_here(expr, fusion.values)
    return strategy.wanted if strategy is not None else {}


def is_view(expr: Expr) -> bool:
    """Return whether an expression yields a view of the only tensor that it reads."""
    return TABLE[expr.op].is_view and len(expr.reads) == 1


def viewed_as(view: Expr, values: Mapping[str, Value], layout: Layout) -> Layout | None:
    """Return the layout of a view of its operand in a layout; None where that must move."""
    (operand,) = view.reads
    read = values[operand].having(layout=layout, copies=())
    strategy = _of_view(view, read, values[view.output], None)
    is_read_so = strategy is not None and strategy.wanted[operand] == layout
    return strategy.result if strategy is not None and is_read_so else None


def viewed_from(view: Expr, values: Mapping[str, Value], layout: Layout) -> Layout | None:
    """Return the layout of its operand of which a view has a layout; None where there is none."""
    (operand,) = view.reads
    open_operand = values[operand].having(layout=None, copies=())
    strategy = _of_view(view, open_operand, values[view.output], layout)
    if strategy is None or strategy.result != layout:
        return None
    before = strategy.wanted[operand]
    return before if viewed_as(view, values, before) == layout else None


def _of_view(view: Expr, operand: Value, out: Value, law: Layout | None) -> Strategy | None:
    """Return what `choose` does, and leave alone its last answer to the view's real question."""
    ask = _known if active_assumptions() is None else _chosen
    return ask(view, {operand.name: operand, out.name: out}, (law,))


#: What was chosen: layouts of the operands and of the results. Passes ask several times about an
#: expression, and layers of a model ask the same.
CHOICES: Cache[tuple[tuple[Layout, ...], tuple[Layout, ...]]] = Cache(limit=16384)

#: The labels of dims, by op, shapes and attributes.
LABELS: Cache[DimMap] = Cache(limit=16384)


def _question(
    expr: Expr, values: Mapping[str, Value], laws: tuple[Layout | None, ...]
) -> tuple[tuple[str, ...], Hashable]:
    """Return the tensors that an expression reads, and a key of all else that `_chosen` sees."""
    names = tuple(dict.fromkeys([x for x in expr.reads if values[x].kind == "tensor"]))
    pattern = tuple(
        [names.index(x) if x in names else None if x is None else -1 for x in expr.inputs]
    )
    read = [values[name] for name in names]
    operands = tuple([(_KIND(v), v.layout, v.copies and v.copies_beside(expr)) for v in read])
    results = tuple([_KIND(values[name]) for name in expr.outputs])
    return names, (expr.op, expr.attrs, pattern, operands, results, laws)


def _chosen(
    expr: Expr, values: Mapping[str, Value], laws: tuple[Layout | None, ...]
) -> Strategy | None:
    operands, labels = _operands(expr, values)
    plain = _by_labels(expr, values, laws, operands, labels, {})
    if plain is None or expr.op not in IN_BLOCKS:
        return plain
    shapes, layouts = zip(*((values[x].shape, values[x].layout) for x in expr.reads), strict=True)
    out = values[expr.outputs[0]].shape
    in_blocks, taken = labels_in_blocks(expr.op, expr.kwargs, shapes, out, layouts, labels)
    if not taken:
        return plain
    dims = dict(zip(expr.reads, in_blocks.operands, strict=True))
    at_most = {d: reach for (_, d), reach in in_blocks.reaches.items()}  # a slice has one operand
    operands = [replace(o, labels=dims[o.value.name], reaches=at_most) for o in operands]
    blocked, law = _by_labels(expr, values, laws, operands, in_blocks, taken), laws[0]
    if blocked is None or law is None or law.partial_axes:
        return blocked
    return min((plain, blocked), key=lambda x: _price(x, expr, values, law))


def _price(way: Strategy, expr: Expr, values: Mapping[str, Value], law: Layout) -> tuple[int, ...]:
    """Return the cost of a way, then whether its result changes, and how many operands do."""
    changed = sum(values[x].layout != to for x, to in way.wanted.items())
    return moved(way, expr, values, law), way.result != law, changed


def moved(way: Strategy, expr: Expr, values: Mapping[str, Value], law: Layout) -> int:
    """Return the cost of the layout changes of operands and result."""
    read = [(values[x].layout, to, values[x]) for x, to in way.wanted.items()]
    changes = [(way.result, law, values[expr.output]), *read]
    return sum(costs([old], to, x.shape, x.dtype.itemsize)[0] for old, to, x in changes if old)


def _by_labels(
    expr: Expr,
    values: Mapping[str, Value],
    laws: tuple[Layout | None, ...],
    operands: Sequence[Operand],
    labels: DimMap,
    taken: Mapping[int, Cut | None],
) -> Strategy | None:
    """Return the strategy that labels of dims lead to.

    Args:
        expr: the expression.
        values: all values.
        laws: for each result the layout that it must have in the end.
        operands: the tensors that it reads.
        labels: of their dims, and of those of its results.
        taken: labels of dims in blocks -> how the result is cut along them.
    """
    mesh = _mesh(operands, laws)
    if mesh is None:
        return None
    on_mesh = [
        replace(o, layout=o.layout if o.layout and o.layout.mesh == mesh else None)
        for o in operands
    ]
    results = [
        Result(values[name], of, law if law is not None and law.mesh == mesh else None)
        for name, of, law in zip(expr.outputs, labels.results, laws, strict=True)
    ]
    options = ways(expr, mesh, on_mesh, labels, results)
    labelled = _Labelled(expr, mesh, on_mesh, results, labels, taken)
    every = [labelled.strategy(way) for way in options]
    if len(every) == 1:
        return every[0]
    priced = [(way, x.wanted, x.results) for way, x in zip(options, every, strict=True)]
    return every[cheapest(priced, on_mesh, results)]


@dataclass(frozen=True, slots=True)
class _Labelled:
    """An expression on a mesh, with labels for the dims of what it reads and yields.

    Attributes:
        expr: the expression.
        mesh: that of the operands and results that have a layout here.
        operands: the tensors that it reads.
        results: what it yields.
        labels: of all dims.
        taken: labels of dims in blocks -> how the result is cut along them.
    """

    expr: Expr
    mesh: DeviceMesh
    operands: Sequence[Operand]
    results: Sequence[Result]
    labels: DimMap
    taken: Mapping[int, Cut | None]

    def strategy(self, way: Mapping[str, Choice]) -> Strategy:
        """Return the layouts of operands and results where axes are used in a way."""
        mesh, splits = self.mesh, self.splits(way)
        cuts = self.cuts(splits)
        is_sum = TABLE[self.expr.op].partial == "sum"
        wanted = {
            o.value.name: _layout(mesh, o.labels, splits, cuts, _partials(way, o, is_sum)).reaching(
                o.reaches, o.value.shape
            )
            for o in self.operands
        }
        passed = {a: Partial(op) for a, op in way.items() if isinstance(op, str)}
        layouts = []
        for result in self.results:
            reduced = {
                axis: Partial(self.labels.reduces[label])
                for label, axes in splits.items()
                if label not in result.labels
                for axis in axes
            }
            partials = {**passed, **reduced}
            layouts.append(_layout(mesh, result.labels, splits, {**cuts, **self.taken}, partials))
        return Strategy(wanted=wanted, results=tuple(layouts))

    def splits(self, way: Mapping[str, Choice]) -> dict[int, tuple[str, ...]]:
        """Return label -> the axes that split it, outermost first, where boundaries allow it."""
        mesh, splits = self.mesh, dict[int, tuple[str, ...]]()
        sides = [(o.layout, o.labels) for o in self.operands]
        sides += [(r.law, r.labels) for r in self.results]
        for label in dict.fromkeys(c for c in way.values() if isinstance(c, int)):
            axes = tuple(a for a in mesh.axes if way.get(a) == label)
            orders = [
                layout.split_axes(dims.index(label))
                for layout, dims in sides
                if layout is not None and label in dims
            ]
            axes = next((o for o in orders if sorted(o) == sorted(axes)), axes)
            while axes and not self.labels.fits(label, tuple(mesh.axis_size(a) for a in axes)):
                axes = axes[:-1]
            if axes:
                splits[label] = axes
        return splits

    def cuts(self, splits: Mapping[int, tuple[str, ...]]) -> dict[int, Cut]:
        """Return label -> the cut of its dims: that of the first operand in blocks, else a law's.

        These are `taken` labels of operands alone where parts must have the same boundaries.
        """
        takes_blocks = TABLE[self.expr.op].takes_blocks
        sides = [(o.layout, o.labels, {*self.taken}) for o in self.operands]
        sides += [(r.law, r.labels, set()) for r in self.results]
        cuts: dict[int, Cut] = {}
        for layout, dims, may in sides:
            for dim, cut in layout.cuts.items() if layout is not None else ():
                label = dims[dim]
                if label is None or label not in splits:
                    continue
                if label in may or takes_blocks(self.labels, label, cut.blocks):
                    is_as_there = layout is not None and layout.split_axes(dim) == splits[label]
                    cuts.setdefault(label, cut if is_as_there else Cut(cut.blocks))
        return cuts


def dim_map(expr: Expr, values: Mapping[str, Value]) -> DimMap:
    """Return the labels of an expression's dims."""
    shapes = tuple(
        values[x].shape if isinstance(x, str) and values[x].is_tensor else None for x in expr.inputs
    )
    rule, out = TABLE[expr.op].rule, values[expr.outputs[0]].shape
    if active_assumptions() is not None:
        return rule(shapes, out, expr.kwargs)
    key = rule, shapes, out, expr.attrs
    labels = LABELS.find(key)
    if labels is None:
        labels = rule(shapes, out, expr.kwargs)
        LABELS.put(key, labels)
    return labels


def _operands(expr: Expr, values: Mapping[str, Value]) -> tuple[list[Operand], DimMap]:
    labels = dim_map(expr, values)
    read: dict[str, list[int]] = {}
    for position, x in enumerate(expr.inputs):
        if isinstance(x, str) and values[x].is_tensor:
            read.setdefault(x, []).append(position)
    # Where a value is read twice, a dim with two labels would be split in two ways at once.
    dims = [
        [(labels.operands[p][dim], labels.reaches.get((p, dim))) for p in places]
        for places in read.values()
        for dim in range(len(labels.operands[places[0]]))
    ]
    clashing = {label for dim in dims if len({*dim}) > 1 for label, _ in dim}
    operands = [
        Operand(
            values[x],
            _without(labels.operands[at], clashing),
            values[x].layout,
            {d: reach for (p, d), reach in labels.reaches.items() if p == at},
            *values[x].copies_beside(expr),
        )
        for x, (at, *_) in read.items()
    ]
    results = tuple(_without(of, clashing) for of in labels.results)
    reduces = {label: op for label, op in labels.reduces.items() if label not in clashing}
    return operands, replace(labels, results=results, reduces=reduces)


def _without(labels: Labels, whole: Set[int | None]) -> Labels:
    return tuple(None if x in whole else x for x in labels)


def _mesh(operands: Sequence[Operand], laws: Sequence[Layout | None]) -> DeviceMesh | None:
    """Return the mesh of an expression: of several a law's, else the one with most bytes.

    Numbers without dims meet where the last of them is: a running sum travels, not each addend.
    """
    weight: dict[DeviceMesh, int] = {}
    for o in operands:
        if o.layout is not None:
            weight[o.layout.mesh] = weight.get(o.layout.mesh, 0) + o.value.bytes
    for law in laws:
        if law is not None and (law.mesh in weight or not weight):
            return law.mesh
    meshes = [*weight] if any(o.value.shape for o in operands) else [*reversed(weight)]
    return max(meshes, key=lambda m: weight[m]) if meshes else None


def _partials(
    chosen: Mapping[str, Choice], operand: Operand, is_addend: bool
) -> dict[str, Partial]:
    """Return the axes along which an operand is read as a Partial: it is one, or an addend."""
    if operand.layout is None:
        return {}
    passed = {a: Partial(op) for a, op in chosen.items() if isinstance(op, str)}
    return {
        a: p
        for a, p in passed.items()
        if isinstance(operand.layout.placement(a), Partial) or is_addend
    }


def _layout(
    mesh: DeviceMesh,
    labels: Labels,
    splits: Mapping[int, tuple[str, ...]],
    cuts: Mapping[int, Cut | None],
    partials: Mapping[str, Partial],
) -> Layout:
    split = [(d, x, splits[x]) for d, x in enumerate(labels) if x is not None and x in splits]
    by_dim = tuple([(dim, axes, cuts.get(label)) for dim, label, axes in split])
    # Sizes of blocks may be symbols, whose comparison with those of other definitions is a guard.
    find = _known_laid if all(cut is None for _, _, cut in by_dim) else _laid
    return find(mesh, by_dim, tuple(partials.items()))


def _laid(
    mesh: DeviceMesh,
    splits: tuple[tuple[int, tuple[str, ...], Cut | None], ...],
    partials: tuple[tuple[str, Partial], ...],
) -> Layout:
    """Return the layout of dims that axes split; equal ones are one object, compared at once."""
    placements: dict[str, Placement] = dict(partials)
    for dim, axes, cut in splits:
        for axis in axes:
            placements[axis] = Shard(dim).in_pieces(cut.along(axis) if cut is not None else None)
    return Layout(mesh, placements, {dim: axes for dim, axes, _ in splits})


_known_laid = lru_cache(maxsize=4096)(_laid)
