"""Classes of ranks that run alike: the same work on parts of the same shapes, among alike ranks.

A program for 1,024 ranks is simulated on one rank of each class. Ranks are alike if their parts
have the same shapes, their communications bring the same bytes and meet ranks that are alike, and
no index of the program differs between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mdfuse.communication import Communication
from mdfuse.extents.expressions import Calc, Term, terms
from mdfuse.hir.analysis.normal_form import Numbers
from mdfuse.hir.instructions import TRANSFERS
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.layouts.kinds import KINDS
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a program's ranks.

    Attributes:
        members: the ranks of each class, in order; the first represents it.
        of: rank -> the first rank of its class.
    """

    members: tuple[tuple[int, ...], ...]
    of: dict[int, int]

    @property
    def firsts(self) -> tuple[int, ...]:
        """The representatives."""
        return tuple(m[0] for m in self.members)


def rank_classes(program: HostProgram, *, are_rings_alike: bool = False) -> Classes:
    """Return the classes of the ranks of a program, which is for all ranks.

    Ranks that are in no mesh are left out.

    Args:
        program: whose ranks.
        are_rings_alike: ranks that differ in their place in a ring alone are one class if all
            chunks have one size. They run alike, each with another chunk in turn.
    """
    ranks = sorted({r for mesh in program.meshes for r in mesh})
    if program.rank is not None or not ranks:
        rank = program.rank or 0
        return Classes(((rank,),), {rank: rank})
    keys = _Criteria(program)
    plain = keys.apart({})
    if are_rings_alike and (by := keys.apart(_turned(program))) != plain:
        classes = _classes(ranks, keys, by)
        if len(classes.members) == 1:  # else rings go through several classes, which take turns
            return classes
    return _classes(ranks, keys, plain)


def _classes(ranks: Sequence[int], criteria: _Criteria, by: _Apart) -> Classes:
    numbers = _numbered(ranks, [criteria.key(r, by) for r in ranks])
    while True:
        among = _Among(criteria, numbers)
        finer = _numbered(ranks, [(numbers[r], among.key(r)) for r in ranks])
        if len({*finer.values()}) == len({*numbers.values()}):
            break
        numbers = finer
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(numbers[rank], []).append(rank)
    return Classes(
        tuple(map(tuple, members.values())),
        {r: alike[0] for alike in members.values() for r in alike},
    )


def _numbered(ranks: Sequence[int], keys: Sequence[Hashable]) -> dict[int, int]:
    known = Numbers[Hashable]()
    return {r: known[k] for r, k in zip(ranks, keys, strict=True)}


@dataclass(frozen=True, slots=True)
class _Apart:
    """The coordinates in meshes that tell ranks apart.

    Attributes:
        by_rank: each rank's own number does.
        axes: the coordinates along these axes do.
    """

    by_rank: bool
    axes: tuple[str, ...]


class _Criteria:
    """The criteria that tell the ranks of a program apart, each one computed once."""

    def __init__(self, program: HostProgram) -> None:
        self.program = program
        kinds = (k for k in program.types.values() if k.layout is not None)
        self.kinds: list[BufferType] = [*dict.fromkeys(kinds)]
        self.communications = [*dict.fromkeys(program.communications)]
        #: the mesh and the axis along which ranks send and receive
        self.ways = [*dict.fromkeys(_ways(program))]
        #: rank -> its part of the program, independent of its coordinates
        self.parts: dict[int, Hashable] = {}

    def apart(self, turned: Mapping[str, int]) -> _Apart:
        """Return the coordinates that tell ranks apart; see `_terms`."""
        all_terms = [*_terms(self.program, self.kinds, self.communications, turned)]
        axes = sorted({t.name for t in all_terms if t.kind == "coord"})
        axes += sorted({a for c in self.communications if _turns(c) for a in c.axes})
        return _Apart(any(t.kind == "rank" for t in all_terms), tuple(axes))

    def key(self, rank: int, by: _Apart) -> Hashable:
        if by.by_rank:
            return rank
        if rank not in self.parts:
            self.parts[rank] = self._part(rank)
        places = tuple(
            c[m.axis_index(a)] if (c := m.coordinate(rank)) is not None else None
            for a in by.axes
            for m in self.program.meshes
            if a in m.axes
        )
        return places, self.parts[rank]

    def _part(self, rank: int) -> Hashable:
        membership = tuple(rank in mesh for mesh in self.program.meshes)
        shapes = tuple(k.local_shape(rank) if _is_in(k, rank) else None for k in self.kinds)
        moved = tuple(_moved(c, rank) for c in self.communications)
        return membership, shapes, moved


#: Kinds for which a rank's parts before and after determine how much arrives.
_BY_PARTS = ("Allreduce", "Allgather", "ReduceScatter")


def _moved(c: Communication, rank: int) -> Hashable:
    """Return a key of the bytes that a communication brings to a rank, and of its root."""
    if c.kind in _BY_PARTS and c.is_along_axes:
        if rank not in c.source.mesh:
            return None
        return tuple(x.local_shape(c.shape, rank) for x in (c.source, c.destination))
    return c.bytes_received(rank), (KINDS[c.kind].has_root and c.root(rank) == rank)


def _is_in(kind: BufferType, rank: int) -> bool:
    return kind.layout is not None and rank in kind.layout.mesh


def _turns(c: Communication) -> bool:
    """Return whether the root of a communication is another one in each iteration of a loop."""
    chunks = (x.stream for x in (c.source, c.destination) if x.stream is not None)
    return KINDS[c.kind].has_root and any(not isinstance(s.index, int | None) for s in chunks)


def _turned(program: HostProgram) -> dict[str, int]:
    """Return the axes that have one extent in all meshes of a program, with that extent."""
    sizes: dict[str, set[int]] = {}
    for mesh in program.meshes:
        for axis in mesh.axes:
            sizes.setdefault(axis, set()).add(mesh.axis_size(axis))
    return {axis: extents.pop() for axis, extents in sizes.items() if len(extents) == 1}


def _terms(
    program: HostProgram,
    kinds: Sequence[BufferType],
    communications: Sequence[Communication],
    turned: Mapping[str, int],
) -> Iterator[Term]:
    """Yield the terms in the index expressions of a program that tell ranks apart.

    The position in a ring along an axis of `turned` (axis -> extent) does not count.
    """
    for i in program.walk():
        ring = {a: n for a, n in turned.items() if i.op in TRANSFERS and a == i.kwargs.get("axis")}
        for index in i.inputs:
            yield from terms(index)
        for name, x in i.attrs:
            yield from _apart(x, ring if name in ("to", "from") else {})
        if i.op in TRANSFERS:
            yield from _place(i)
    pairs = [(k.layout, k.shape) for k in kinds if k.layout is not None]
    pairs += [(x, c.shape) for c in communications for x in (c.source, c.destination)]
    for layout, shape in pairs:
        if layout.stream is not None and not (turned and _is_even(layout, shape)):
            yield from terms(layout.stream.index)


def _place(i: Instruction) -> Iterator[Term]:
    """Yield the coordinate by which a transfer's peer tells ranks apart, where no term does."""
    axis, peer = i.kwargs.get("axis"), i.kwargs["to" if i.op == "send" else "from"]
    if axis is None:
        yield Term("rank")
    elif all(t.kind != "coord" for t in terms(peer)):
        yield Term("coord", axis)


def _ways(program: HostProgram) -> Iterator[tuple[DeviceMesh, str]]:
    """Yield the mesh and the axis along which each send and receive goes."""
    for i in program.walk():
        layout = program.types[i.reads[0]].layout if i.op in TRANSFERS else None
        if layout is not None and (axis := i.kwargs.get("axis")) is not None:
            yield layout.mesh, axis


def _apart(index: Any, turned: Mapping[str, int]) -> Iterator[Term]:
    """Yield the terms of an expression, but for coordinates that are added up around a ring."""
    if not turned or not isinstance(index, Calc):
        yield from terms(index)
        return
    for side in (index.left, index.right):
        for x in _addends(side) if index.op == "mod" and side is index.left else (side,):
            is_turn = index.op == "mod" and isinstance(x, Term) and x.kind == "coord"
            if not is_turn or turned.get(x.name) != index.right:
                yield from _apart(x, turned)


def _addends(index: Any) -> Iterator[Any]:
    """Yield the addends of an expression, and the subtrahends."""
    if isinstance(index, Calc) and index.op in ("+", "-"):
        yield from _addends(index.left)
        yield from _addends(index.right)
    else:
        yield index


def _is_even(layout: Layout, shape: Sequence[Any]) -> bool:
    """Return whether all chunks of all ranks have one size."""
    stream = layout.stream
    if stream is None or not isinstance(stream.chunks, int) or not 0 <= stream.dim < len(shape):
        return False
    extent, axes = shape[stream.dim], layout.split_axes(stream.dim)
    parts = stream.chunks * (1 + stream.zigzag) * prod(layout.mesh.axis_size(a) for a in axes)
    return isinstance(extent, int) and extent % parts == 0 and stream.dim not in layout.blocked


class _Among:
    """The classes among which each communication takes place."""

    def __init__(self, criteria: _Criteria, numbers: dict[int, int]) -> None:
        self.numbers = numbers
        self.communications, self.ways = criteria.communications, criteria.ways
        self.whole: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        #: number of a communication, coordinates of a team -> the classes in it
        self.teams: dict[tuple[int, tuple[int, ...]], frozenset[int]] = {}
        #: ranks along an axis -> their classes
        self.rings: dict[tuple[int, ...], tuple[int, ...]] = {}

    def key(self, rank: int) -> Hashable:
        teams = (self.team(n, c, rank) for n, c in enumerate(self.communications))
        return *teams, *(self.ring(mesh, axis, rank) for mesh, axis in self.ways)

    def team(self, n: int, c: Communication, rank: int) -> frozenset[int] | tuple[int, ...]:
        if c.is_along_axes:
            coordinate = c.source.mesh.coordinate(rank)
            if coordinate is None:
                return frozenset()
            pairs = zip(c.source.mesh.axes, coordinate, strict=True)
            key = n, tuple(at for axis, at in pairs if axis not in c.axes)
            if key not in self.teams:
                self.teams[key] = frozenset(self.numbers[r] for r in c.team(rank))
            return self.teams[key]
        if c.kind == "SendRecv":
            return self.pair(c, rank)
        if n not in self.whole:
            group = frozenset(c.whole_group)
            self.whole[n] = group, frozenset(self.numbers[r] for r in group)
        group, classes = self.whole[n]
        return classes if rank in group else frozenset()

    def ring(self, mesh: DeviceMesh, axis: str, rank: int) -> tuple[int, ...]:
        """Return the classes of the ranks along an axis, by their place there."""
        if rank not in mesh:
            return ()
        team = mesh.team(rank, axis)
        if team not in self.rings:
            self.rings[team] = tuple(self.numbers[r] for r in team)
        return self.rings[team]

    def pair(self, c: Communication, rank: int) -> tuple[int, ...]:
        """Return the classes of the ranks that a rank sends to, and receives from."""
        to, of = c.source.mesh.position(rank), c.destination.mesh.position(rank)
        return (
            -1 if to is None else self.numbers[c.destination.mesh.ranks[to]],
            -1 if of is None else self.numbers[c.source.mesh.ranks[of]],
        )
