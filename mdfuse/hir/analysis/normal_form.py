"""Instructions without names, and the stretches of a program in which such instructions repeat.

    %h = matmul(%x, %w)              matmul(0, 1) -> 2
    %y = relu(%h)             ->     relu(2) -> 3

Two programs that differ in names alone have one normal form. A subclass says what stands for a
name: a number in the order of first use, the distance to where it is computed, or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from mdfuse.communication import Communication
from mdfuse.extents.expressions import UNKNOWN, Calc, Poly, Term, terms
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh

K = TypeVar("K", bound=Hashable)

#: The types of index expressions that are no number.
_INDICES = (*UNKNOWN, Poly)


class Numbers(dict[K, int]):
    """Keys as numbers, in the order in which they are first looked up.

    >>> numbers = Numbers()
    >>> [numbers[x] for x in "abac"]
    [0, 1, 0, 2]
    """

    def __missing__(self, key: K) -> int:
        number = self[key] = len(self)
        return number


@dataclass(slots=True)
class NormalForm:
    """Writes instructions as keys that are equal for instructions which are alike but for names."""

    program: HostProgram

    def operand(self, name: str) -> Hashable:
        """Return what stands for a name among the operands."""
        raise NotImplementedError

    def result(self, name: str) -> Hashable:
        """Return what stands for a name among the results."""
        raise NotImplementedError

    def index(self, index: Any) -> Hashable:
        """Return what stands for an index expression."""
        if isinstance(index, Calc):
            return index.op, self.index(index.left), self.index(index.right)
        if isinstance(index, Term):
            return self.term(index)
        return (index, *map(self.term, terms(index))) if isinstance(index, Poly) else index

    def term(self, term: Term) -> Hashable:
        """Return what stands for a term of an index expression."""
        return term

    def mesh(self, mesh: DeviceMesh) -> Hashable:
        """Return what stands for a mesh."""
        return mesh

    def instruction(self, i: Instruction) -> Hashable:
        """Return the key of an instruction; the name of a host unit does not count."""
        inputs = tuple([self.operand(x) if type(x) is str else self.value(x) for x in i.inputs])
        outputs = tuple([self.result(x) for x in i.outputs])
        attrs = tuple([(k, self.value(v)) for k, v in i.attrs]) if i.attrs else ()
        comm = self.posted(i.comm) if i.comm is not None else None
        body = tuple([self.instruction(j) for j in i.body]) if i.body else ()
        orelse = tuple([self.instruction(j) for j in i.orelse]) if i.orelse else ()
        fn = i.fn if i.op != "launch" else ""
        return i.op, fn, inputs, outputs, attrs, i.order, comm, body, orelse

    def value(self, x: Any) -> Hashable:
        """Return what stands for an operand without a name, or for an attribute."""
        kind = type(x)
        return self.index(x) if kind in _INDICES else (kind, x)

    def type_of(self, name: str) -> Hashable:
        """Return what stands for the type of a name; None where it has none."""
        kind = self.program.types.get(name)
        return self.kind(kind) if kind is not None else None

    def kind(self, kind: BufferType) -> Hashable:
        layout = self.layout(kind.layout) if kind.layout is not None else None
        if layout is kind.layout:
            return kind
        return kind.dtype, kind.shape, kind.padding, kind.flat, kind.counts, layout

    def posted(self, comm: Communication) -> Hashable:
        return *comm.beside_layouts, self.layout(comm.source), self.layout(comm.destination)

    def layout(self, layout: Layout) -> Hashable:
        mesh, chunk = self.mesh(layout.mesh), layout.stream
        if chunk is None or type(chunk.index) not in _INDICES:
            if mesh is layout.mesh:
                return layout
            return mesh, layout.placements, layout.splits, layout.reaches, chunk
        parts = chunk.dim, chunk.chunks, chunk.rotate, chunk.op, self.index(chunk.index)
        return mesh, layout.placements, layout.splits, layout.reaches, *parts


# -- what repeats ----------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """Codes in a row each of which equals the one a period later, as far as that is inside.

    Attributes:
        start: the position of the first one.
        period: how far equal codes are apart.
        length: how many codes there are, those of the last period included.
    """

    start: int
    period: int
    length: int


def stretches(codes: Sequence[Hashable], *, tried: int) -> Iterator[Stretch]:
    """Yield the longest stretches of two periods or more, all of one period after each other.

    >>> [*stretches("xabcabcabcy", tried=1)]
    [Stretch(start=1, period=3, length=9)]

    Args:
        codes: what stands for the elements of a sequence.
        tried: how many periods are tried, the most frequent distances between equal codes first.
    """
    numbers = Numbers[Hashable]()
    known = [numbers[code] for code in codes]
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for at, code in enumerate(known):
        if code in last:
            distances[at - last[code]] += 1
        last[code] = at
    for period, _ in distances.most_common(tried):
        start = 0
        for at, code in enumerate([*known[period:], -1]):
            if code != known[at]:
                if at - start >= period:
                    yield Stretch(start, period, at + period - start)
                start = at + 1
