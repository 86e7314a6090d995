"""Classes of ranks that run alike: the same work on parts of the same shapes, among alike ranks.

A program for 1,024 ranks is looked at on one rank of each class. Ranks are alike where their parts
have the same shapes, their communications bring the same bytes and meet ranks that are alike, and
no index of the program tells them apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mdfuse.communication import Communication
from mdfuse.extents.expressions import Term, terms
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.layouts.kinds import KINDS
from mdfuse.layouts.layout import Layout


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


def rank_classes(program: HostProgram) -> Classes:
    """Return the classes of the ranks of a program, which is for all ranks.

    Ranks that are in no mesh are left out.
    """
    ranks = sorted({r for mesh in program.meshes for r in mesh})
    if program.rank is not None or not ranks:
        rank = program.rank or 0
        return Classes(((rank,),), {rank: rank})
    told = _Told(program)
    numbers = _numbered(ranks, [told.key(r) for r in ranks])
    while True:
        among = _Among(told.communications, numbers)
        finer = _numbered(ranks, [(numbers[r], among.key(r)) for r in ranks])
        if len({*finer.values()}) == len({*numbers.values()}):
            break
        numbers = finer
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(numbers[rank], []).append(rank)
    return Classes(
        tuple(map(tuple, members.values())),
        {r: found[0] for found in members.values() for r in found},
    )


def _numbered(ranks: Sequence[int], keys: Sequence[Hashable]) -> dict[int, int]:
    known: dict[Hashable, int] = {}
    return {r: known.setdefault(k, len(known)) for r, k in zip(ranks, keys, strict=True)}


class _Told:
    """What tells the ranks of a program apart, each thing once."""

    def __init__(self, program: HostProgram) -> None:
        self.program = program
        kinds = (k for k in program.types.values() if k.layout is not None)
        self.kinds: list[BufferType] = [*dict.fromkeys(kinds)]
        self.communications = [*dict.fromkeys(program.communications)]
        found = [*_terms(program, self.kinds, self.communications)]
        self.by_rank = any(t.kind == "rank" for t in found)
        self.axes = sorted({t.name for t in found if t.kind == "coord"})
        self.axes += sorted({a for c in self.communications if _turns(c) for a in c.axes})

    def key(self, rank: int) -> Hashable:
        if self.by_rank:
            return rank
        program = self.program
        here = tuple(rank in mesh for mesh in program.meshes)
        places = tuple(
            c[m.axis_index(a)] if (c := m.coordinate(rank)) is not None else None
            for a in self.axes
            for m in program.meshes
            if a in m.axes
        )
        shapes = tuple(k.local_shape(rank) if _is_in(k, rank) else None for k in self.kinds)
        moved = tuple(_moved(c, rank) for c in self.communications)
        return here, places, shapes, moved


#: Kinds of which the parts of a rank before and after say how much arrives.
_BY_PARTS = ("Allreduce", "Allgather", "ReduceScatter")


def _moved(c: Communication, rank: int) -> Hashable:
    """Return what tells how much a communication brings to a rank, and whether it is the root."""
    if c.kind in _BY_PARTS and c.is_along_axes:
        if rank not in c.source.mesh:
            return None
        return tuple(x.local_shape(c.shape, rank) for x in (c.source, c.destination))
    return c.bytes_received(rank), _is_root(c, rank)


def _is_in(kind: BufferType, rank: int) -> bool:
    return kind.layout is not None and rank in kind.layout.mesh


def _is_root(c: Communication, rank: int) -> bool:
    return KINDS[c.kind].has_root and c.root(rank) == rank


def _turns(c: Communication) -> bool:
    """Return whether the root of a communication is another one in each iteration of a loop."""
    chunks = (x.stream for x in (c.source, c.destination) if x.stream is not None)
    return KINDS[c.kind].has_root and any(not isinstance(s.index, int | None) for s in chunks)


def _terms(
    program: HostProgram, kinds: Sequence[BufferType], communications: Sequence[Communication]
) -> Iterator[Term]:
    """Yield the terms in the index expressions of a program."""
    for i in program.walk():
        for index in _indices(i):
            yield from terms(index)
    layouts: list[Layout] = [k.layout for k in kinds if k.layout is not None]
    layouts += [x for c in communications for x in (c.source, c.destination)]
    for layout in layouts:
        if layout.stream is not None:
            yield from terms(layout.stream.index)


def _indices(i: Instruction) -> Iterator[Any]:
    yield from i.indices
    yield from (v for _, v in i.attrs)


class _Among:
    """The classes among which each communication takes place."""

    def __init__(self, communications: Sequence[Communication], numbers: dict[int, int]) -> None:
        self.numbers = numbers
        self.communications = communications
        self.whole: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        #: number of a communication, coordinates of a team -> the classes in it
        self.teams: dict[tuple[int, tuple[int, ...]], frozenset[int]] = {}

    def key(self, rank: int) -> Hashable:
        return tuple(self.team(n, c, rank) for n, c in enumerate(self.communications))

    def team(self, n: int, c: Communication, rank: int) -> frozenset[int] | tuple[int, ...]:
        if c.is_along_axes:
            here = c.source.mesh.coordinate(rank)
            if here is None:
                return frozenset()
            pairs = zip(c.source.mesh.axes, here, strict=True)
            key = n, tuple(at for axis, at in pairs if axis not in c.axes)
            if key not in self.teams:
                self.teams[key] = frozenset(self.numbers[r] for r in c.team(rank))
            return self.teams[key]
        if c.kind == "SendRecv":
            return tuple(self.numbers[r] for r in c.team(rank))
        if n not in self.whole:
            group = frozenset(c.whole_group)
            self.whole[n] = group, frozenset(self.numbers[r] for r in group)
        group, classes = self.whole[n]
        return classes if rank in group else frozenset()
