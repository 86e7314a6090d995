"""The terms of sums in the buffers of one rank, and the ops that join or keep them.

    %r: {3}, %y: {1, 2}           %y = add(%y, %r)        %y: {1, 2, 3}
    %all: {1}, {2} side by side   %y = sum(%all)          %y: {1, 2}
    %r: {3}                       %h = mul(%r, 2.0)       %h: {3}
    %r: {3}                       %h = exp(%r)            refused: exp is not linear

`terms.py` has the messages that bring terms from other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce

from mdfuse.errors import ProgramError
from mdfuse.hir.instructions import op_of
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify import refusals
from mdfuse.hir.verify.accesses import Storage, Terms, View, covers, outside, overlap
from mdfuse.hir.verify.spaces import Space, spaces_of
from mdfuse.hir.verify.view_regions import whole
from mdfuse.ir.op_table import OF_FIRST
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.boxes import Box, box_size, intersect
from mdfuse.layouts.layout import IDEMPOTENT, Layout
from mdfuse.mesh import DeviceMesh

#: reduce op -> the op that joins two sets of terms; those of an average are joined by none.
JOINS = {
    "sum": "add",
    "max": "maximum",
    "min": "minimum",
    "prod": "mul",
    "bor": "logical_or",
    "band": "logical_and",
    "bxor": "logical_xor",
}


#: No term at all.
_NONE = Terms("sum", 0)


class Unclear(ProgramError):
    """One iteration does not represent others: all have to be written out."""


@dataclass
class HeldTerms:
    """Follows the terms in one rank's buffers.

    Attributes:
        program: straight-line, with its rank.
        repeated: ids of the instructions that represent several iterations.
    """

    program: HostProgram
    repeated: frozenset[int] = frozenset()
    spaces: Mapping[DeviceMesh, Space] = field(init=False)

    def __post_init__(self) -> None:
        self.spaces = spaces_of(self.program)

    @property
    def rank(self) -> int:
        assert self.program.rank is not None
        return self.program.rank

    def layout(self, name: str) -> Layout:
        layout = self.program.types[name].placed
        return layout

    def usual(self, layout: Layout) -> int:
        """Return the terms that a buffer of a layout holds on this rank."""
        return self.spaces[layout.mesh].usual(layout, self.rank)

    # -- what is read ----------------------------------------------------------------------------

    def entries(self, name: str, view: View) -> list[tuple[Box | None, Terms]]:
        storage, part = view.storage, self.empty_part(name, view)
        if part in storage.of_empty:
            return [(view.region, storage.of_empty[part])]
        return [(b, t) for b, t in storage.terms.items() if overlap(b, view.region)]

    def empty_part(self, name: str, view: View) -> object:
        """Return a key of a view without elements; None: it has elements, or is a whole buffer.

        Other ranks have elements in such a part, so its terms are followed, too. Several empty
        parts may have one box; the chunk tells them apart, also under a name of another layout.
        """
        region, i = view.region, view.made_by
        if region is None or all(start < stop for start, stop in region):
            return None
        if i is not None and (i.fn or i.op) in ("own", "set") and i.reads[0] != view.storage.name:
            (name,) = i.reads
        layout = self.program.types[name].layout
        return region, layout.stream if layout is not None else None

    def held(self, name: str, view: View, i: Instruction) -> Terms | None:
        """Return the terms that a buffer holds; None where they are as its layout says."""
        layout = self.program.types[name].layout
        if layout is None or view.is_said or layout.mesh not in self.spaces:
            return None
        entries = self.entries(name, view)
        if not entries:
            return self.unlike(view.storage, layout)
        kinds = {terms for _, terms in entries}
        if len(kinds) == 1 and self.is_covered(view, entries):
            (terms,) = kinds
            return terms
        wanting = [t for t in kinds if t.held != self.usual(layout) or t.is_spread]
        if not wanting:
            return None
        raise self.wanting(name, layout, wanting[0], i)

    def unlike(self, storage: Storage, layout: Layout) -> Terms | None:
        """Return the terms of a buffer that is read by a name of another layout (`own`)."""
        whole_of = self.layout(storage.name)
        if whole_of is layout or whole_of.mesh != layout.mesh:
            return None
        usual = self.usual(whole_of)
        if usual == self.usual(layout):
            return None
        ops = [*layout.reduce_ops.values(), *whole_of.reduce_ops.values()]
        return Terms(ops[0], usual)

    def is_covered(self, view: View, parts: list[tuple[Box | None, Terms]]) -> bool:
        if any(covers(b, view.region) for b, _ in parts):
            return True
        box = whole(self.program.types[view.storage.name], self.rank)
        region = view.region or box
        shared = (intersect(b, region) for b, _ in parts if b is not None)
        return sum(box_size(b) for b in shared if b is not None) >= box_size(region)

    def is_usual(self, layout: Layout, terms: Terms | None) -> bool:
        """Return whether terms are those that a layout says, or repeat some, where that is idle."""
        if terms is None or terms.is_spread:
            return terms is None
        usual = self.usual(layout)
        return terms.held == usual or (terms.op in IDEMPOTENT and not usual & ~terms.held)

    def claim(self, name: str, view: View, i: Instruction) -> None:
        """Raise ProgramError unless a buffer holds the terms that its layout says."""
        if not view.storage.terms and name == view.storage.name:
            return
        terms = self.held(name, view, i)
        layout = self.program.types[name].layout
        if terms is not None and layout is not None and not self.is_usual(layout, terms):
            raise self.wanting(name, layout, terms, i)

    def wanting(self, name: str, layout: Layout, terms: Terms, i: Instruction) -> ProgramError:
        if terms.is_spread or id(i) in self.repeated:
            return Unclear(f"{i} reads terms of several iterations")
        space, usual = self.spaces[layout.mesh], self.usual(layout)
        lacking, surplus = usual & ~terms.held, terms.held & ~usual
        return refusals.wanting(
            self.program, name, i, space.ranks(lacking, self.rank), space.ranks(surplus, self.rank)
        )

    # -- what is computed ------------------------------------------------------------------------

    def computed(self, i: Instruction, views: Mapping[str, View]) -> Terms | None:
        """Return the terms that the result of a local op holds; None: as its layout says.

        Args:
            i: the op.
            views: of the buffers that it reads.
        """
        if i.op == "addmm":
            return self.added(i, views)
        aside = self.side_by_side(i, views)
        if aside is not None:
            return aside
        held = {n: self.held(n, v, i) for n, v in views.items()}
        if not any(held.values()):
            return None
        for name, terms in held.items():
            self.check_alone(name, views[name], terms, i)
        joined = self.joined(i, held, views)
        if joined is not None:
            return joined
        odd = {n: t for n, t in held.items() if not self.is_usual(self.layout(n), t)}
        for name, terms in odd.items():
            assert terms is not None
            if not self.passes(i, name, terms, odd):
                raise self.wanting(name, self.layout(name), terms, i)
        return next(iter(odd.values()), None)

    def check_alone(self, name: str, view: View, terms: Terms | None, i: Instruction) -> None:
        """Raise Unclear where iterations after the first read terms again."""
        if terms is None or self.is_usual(self.layout(name), terms):
            return
        if id(i) in self.repeated and not terms.is_spread and name not in i.outputs:
            raise Unclear(f"{i} reads terms that another iteration left")

    def joined(
        self, i: Instruction, held: Mapping[str, Terms | None], views: Mapping[str, View]
    ) -> Terms | None:
        """Return the terms of an op that joins two sets of them; None for other ops."""
        if len(i.inputs) != 2 or not all(type(x) is str for x in i.inputs):
            return None
        a, b = (self.operand(x, held, i) for x in i.reads)
        names = i.reads
        ops = {t.op for t in (a, b) if t is not None}
        if len(ops) != 1 or i.fn != JOINS.get(*ops):
            return None
        if a is None or b is None:
            some, other = (a, names[1]) if b is None else (b, names[0])
            assert some is not None
            layout = self.layout(other)
            space = self.spaces[layout.mesh]
            if other not in views or space.agree(layout, some.held, self.rank):
                return self.gathered(i, some, other)  # the other operand is no term
            a, b = some, Terms(some.op, self.usual(layout))
        return self.union(i, names, a, b)

    def operand(self, name: str, held: Mapping[str, Terms | None], i: Instruction) -> Terms | None:
        """Return the terms of an operand; None: as its layout says, unless the op writes there."""
        terms = held.get(name)
        if terms is None or name in i.outputs or not self.is_usual(self.layout(name), terms):
            return terms
        return None

    def union(self, i: Instruction, names: Iterable[str], a: Terms, b: Terms) -> Terms:
        if a.held & b.held and a.op not in IDEMPOTENT:
            if a.is_spread or b.is_spread:
                raise Unclear(f"{i} adds terms of several iterations")
            name = next(iter(names))
            space = self.spaces[self.layout(name).mesh]
            ranks = refusals.ranks_text(space.ranks(a.held & b.held, self.rank))
            raise refusals.DOUBLED(self.program, i, ranks=ranks, name=i.outputs[0])
        both = Terms(a.op, a.held | b.held, a.is_spread or b.is_spread)
        to = [n for n, t in zip(names, (a, b), strict=False) if not t.is_spread]
        return self.gathered(i, both, *to)

    def gathered(self, i: Instruction, terms: Terms, *to: str) -> Terms:
        """Return the terms of a buffer to which those of several iterations are added."""
        if terms.is_spread and not {*to}.intersection(i.outputs):
            raise Unclear(f"{i} adds terms of several iterations")
        return Terms(terms.op, terms.held)

    def passes(
        self, i: Instruction, name: str, terms: Terms, odd: Mapping[str, Terms | None]
    ) -> bool:
        """Return whether an op is linear: applied to a term, it yields a term of its result."""
        if terms.is_spread:
            raise Unclear(f"{i} reads terms of several iterations")
        op = op_of(i)
        if op is None:
            return i.op in ("pad", "pack")
        is_only = len(odd) == 1
        tensors = [x for x in i.reads if self.program.types[x].layout is not None]
        is_there = i.inputs[op.term : op.term + 1] == (name,) and tensors.count(name) == 1
        match op.partial:
            case "view":
                return is_only and is_there
            case "all":
                return len({*odd.values()}) == 1 and {*odd} == {*tensors}
            case "reduce":
                return is_only and is_there and self.reduces(i) == terms.op
            case rule if rule in OF_FIRST:  # rounded or not, it is the term of the product
                return is_only and terms.op == "sum" and (is_there or op.partial == "factor")
            case "sum":
                return is_only and terms.op == "sum" and is_there
        return False

    def reduces(self, i: Instruction) -> str | None:
        """Return the reduce op of a reduction over dims."""
        shapes = [self.program.types[x].shape for x in i.reads]
        labels = TABLE[i.fn].rule(shapes, self.program.types[i.outputs[0]].shape, i.kwargs)
        ops = {*labels.reduces.values()}
        return ops.pop() if len(ops) == 1 else None

    def side_by_side(self, i: Instruction, views: Mapping[str, View]) -> Terms | None:
        """Return the terms of a reduction over terms side by side; None for other ops."""
        if i.op != "reduce" or len(views) != 1:
            return None
        ((name, view),) = views.items()
        entries = self.entries(name, view)
        layout = self.layout(name)
        odd = [t for _, t in entries if not self.is_usual(layout, t)]
        if len({*odd}) < 2 or view.dims is not None or view.is_said:
            return None
        if any(t.op != i.fn or t.is_spread for t in odd) or id(i) in self.repeated:
            raise self.wanting(name, layout, odd[0], i)
        n = len(self.program.types[name].shape)
        dims = {d % n for d in (i.kwargs.get("dims") or range(n))}
        rows: dict[object, list[Terms]] = defaultdict(list)
        for box, terms in entries:
            assert box is not None
            rows[tuple(x for d, x in enumerate(box) if d not in dims)].append(terms)
        sums = {reduce(partial(self.union, i, (name,)), some) for some in rows.values()}
        boxes = [*rows]
        if len(sums) > 1 or not _are_apart(boxes):
            raise self.wanting(name, layout, odd[0], i)
        return sums.pop()

    def added(self, i: Instruction, views: Mapping[str, View]) -> Terms | None:
        """Return the terms of a sum to which a rank's own product is added."""
        (into,), (a, b) = i.outputs, i.reads[-2:]
        for name in (a, b):
            if name in views:
                self.claim(name, views[name], i)
        layout, factor = self.layout(into), self.layout(a)
        space = self.spaces.get(layout.mesh)
        axes = factor.split_axes(len(self.program.types[a].shape) - 1)
        before = self.held(into, views[into], i) if len(i.inputs) == 3 else None
        if space is None or not {*axes}.intersection(space.axes):
            return before
        term = Terms("sum", space.places_of(axes, self.rank))
        if id(i) in self.repeated:
            raise Unclear(f"{i} adds terms of several iterations")
        return term if before is None else self.union(i, (into,), before, term)

    # -- what is written -------------------------------------------------------------------------

    def note(self, name: str, view: View, terms: Terms | None) -> None:
        """Note what a buffer holds from now on; None: what its layout says."""
        storage, layout = view.storage, self.program.types[name].layout
        if layout is None or layout.mesh not in self.spaces:
            return
        if terms is None and storage.name != name:  # as in `own`
            kind = self.program.types[storage.name].layout
            if kind is not None and kind.mesh == layout.mesh:
                usual = self.usual(layout)
                is_other = usual != self.usual(kind)
                terms = Terms(self.op_of(layout), usual) if is_other else None
        part = self.empty_part(name, view)
        if part is not None:
            storage.of_empty.pop(part, None)
            if terms is not None:
                storage.of_empty[part] = terms
            return
        if view.region is None:
            storage.of_empty.clear()
        if storage.terms:
            _cut_out(storage.terms, view.region, whole(self.program.types[storage.name], self.rank))
        if terms is not None:
            storage.terms[view.region] = terms

    def op_of(self, layout: Layout) -> str:
        return next(iter(layout.reduce_ops.values()), "sum")

    def add_part(
        self, name: str, view: View, i: Instruction, terms: Terms | None, is_first: bool
    ) -> None:
        """Note a part of a sum over chunks, all of which hold the same terms."""
        before = view.storage.terms.get(view.region)
        if not is_first and before != terms:
            raise self.wanting(name, self.layout(name), terms or before or _NONE, i)
        self.note(name, view, terms)


def _are_apart(boxes: list[object]) -> bool:
    """Return whether boxes are disjoint."""
    return all(
        not overlap(a, b)  # type: ignore[arg-type]
        for n, a in enumerate(boxes)
        for b in boxes[:n]
        if a
    )


def _touching(boxes: Iterable[Box], region: Box) -> list[Box]:
    """Return the boxes that overlap a region; terms may stand side by side along the first dim."""
    if not region:
        return [*boxes]
    start, stop = region[0]
    near = [b for b in boxes if b[0][0] < stop and start < b[0][1]]
    return [b for b in near if overlap(b, region)]


def _cut_out(terms: dict[Box | None, Terms], region: Box | None, box: Box) -> None:
    """Forget what is known of a region of a storage."""
    if region is None or None in terms:
        known = dict(terms)
        terms.clear()
        if region is not None:
            terms.update((part, known[None]) for part in outside(box, region))
        return
    if region in terms:
        del terms[region]
        return
    for other in _touching([b for b in terms if b is not None], region):
        parted = terms.pop(other)
        terms.update((part, parted) for part in outside(other, region))
