"""Keys of the programs of ranks, without names and rank numbers: equal stages are checked once.

    rank 4  %x2: … on mesh(tp=2: 4 5)               rank 6  %x3: … on mesh(tp=2: 6 7)
            %y2 = gelu(%x2)                    ==           %y3 = gelu(%x3)
            post broadcast(%y2) … to 6 7                    post broadcast(%y3) … to 8 9

Two ranks with equal keys post the same communications to ranks that are as far off, and do the
same with buffers of the same types.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mdfuse.hir.analysis.normal_form import NormalForm, Numbers
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.execute import near
from mdfuse.mesh import DeviceMesh

#: Names of inputs, and of outputs, by the mesh that has them; None: every rank has them.
Ends = tuple[Mapping[DeviceMesh | None, list[str]], Mapping[DeviceMesh | None, list[str]]]


class _UnlikeRank(Exception):
    """The program of a rank equals that of no other rank."""


def representatives(program: HostProgram) -> Iterator[tuple[int, int]]:
    """Yield the first and last rank of each class of ranks that run the same instructions.

    The ranks of a class are in the same meshes, and first in the same. The first rank of a mesh has
    the largest parts, the last one the smallest.
    """
    meshes = program.meshes
    if not meshes:
        yield 0, 0  # a program of numbers alone: any rank represents all
    elif len(meshes) == 1:
        yield meshes[0].first, meshes[0].rank_at([n - 1 for n in meshes[0].shape])
    else:
        classes: dict[tuple[tuple[int, bool], ...], list[int]] = defaultdict(list)
        for rank in sorted({r for mesh in meshes for r in _borders(mesh)}):
            classes[tuple((id(m), rank == m.first) for m in program.meshes_of(rank))].append(rank)
        yield from ((ranks[0], ranks[-1]) for places, ranks in classes.items() if places)


def _borders(mesh: DeviceMesh) -> set[int]:
    """Return the ranks of a mesh beside which the next rank may be in other meshes."""
    ends = (mesh.first, mesh.first + mesh.size - 1)
    return {r + d for r in (ends if mesh.is_consecutive else mesh.ranks) for d in (-1, 0, 1)}


def key_of(mine: HostProgram, written: frozenset[str]) -> Hashable:
    """Return the key of the program of one rank; None where no other rank can have an equal one.

    Args:
        mine: straight-line, with the inputs and outputs that the rank has.
        written: the inputs whose buffers the program writes.
    """
    assert mine.rank is not None
    writer = _Key(mine, written, mine.rank)
    try:
        code = tuple([writer.instruction(i) for i in mine.instructions])
        ends = [tuple([writer.operand(n) for n in names]) for names in (mine.inputs, mine.outputs)]
    except _UnlikeRank:
        return None
    return code, *ends, tuple(writer.facts)


def key_near(program: HostProgram, meshes: Sequence[DeviceMesh], ends: Ends) -> Hashable:
    """Return the key of all instructions that the ranks of some meshes may run.

    If the meshes of two ranks have equal keys, and the ranks are as far from the first rank of
    their first mesh, then their `key_of` are equal, too. None: each rank is checked by itself.

    Args:
        program: straight-line, for all ranks.
        meshes: those that have a rank, in the order of the program.
        ends: names of inputs, and of outputs, by the mesh that has them; None: every rank has them.
    """
    writer = _Key(program, program.written_inputs, meshes[0].first)
    every = (None, *meshes)
    positions = sorted({n for m in every for n in near(program).get(m, ())})
    code = [program.instructions[n] for n in positions]
    try:
        keys = tuple([writer.instruction(i) for i in code if i.op != "return"])
        ends_held = [
            tuple([(writer.operand(n), m is None) for m in every for n in by_mesh.get(m, ())])
            for by_mesh in ends
        ]
    except _UnlikeRank:
        return None
    return keys, *ends_held, tuple(writer.facts)


@dataclass(slots=True)
class _Key(NormalForm):
    """Names as numbers, and meshes by how far their ranks are from one rank."""

    written: frozenset[str]
    rank: int
    #: name -> its number
    numbers: Numbers[str] = field(default_factory=Numbers)
    #: for each number: the type of the name, whose buffer it has, whether that is written
    facts: list[Hashable] = field(default_factory=list)
    #: id of a mesh -> what stands for it
    meshes: dict[int, Hashable] = field(default_factory=dict)

    def instruction(self, i: Instruction) -> Hashable:
        if i.body or i.orelse:
            raise _UnlikeRank
        return NormalForm.instruction(self, i)

    def operand(self, name: str) -> int:
        if name in self.numbers:
            return self.numbers[name]
        number, root = self.numbers[name], self.program.root(name)
        self.facts.append(None)
        buffer = number if root == name else self.operand(root)
        self.facts[number] = self.type_of(name), buffer, name in self.written
        return number

    result = operand

    def mesh(self, mesh: DeviceMesh) -> Hashable:
        key = self.meshes.get(id(mesh))
        if key is None:
            if not mesh.is_consecutive or mesh.hosts is not None or mesh.lost:
                raise _UnlikeRank
            key = self.meshes[id(mesh)] = mesh.axes, mesh.shape, mesh.first - self.rank
        return key
