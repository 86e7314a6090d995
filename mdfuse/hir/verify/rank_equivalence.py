"""What one rank runs, but for its number and for names: stages that do the same are checked once.

    rank 4  %x2: … on mesh(tp=2: 4 5)               rank 6  %x3: … on mesh(tp=2: 6 7)
            %y2 = gelu(%x2)                    ==           %y3 = gelu(%x3)
            post broadcast(%y2) … to 6 7                    post broadcast(%y3) … to 8 9

Two ranks with equal keys post the same to ranks as far off, and do the same with buffers of the
same types.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mdfuse.communication import Communication
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.rank.execute import near
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh

#: Names of inputs, and of outputs, by the mesh that has them; None: every rank has them.
Ends = tuple[Mapping[DeviceMesh | None, list[str]], Mapping[DeviceMesh | None, list[str]]]


class _Unlike(Exception):
    """What a rank runs is not like what any other one does."""


def key_of(mine: HostProgram, written: frozenset[str]) -> Hashable:
    """Return what stands for all that one rank runs; None where it stands for itself alone.

    Args:
        mine: straight-line, with the inputs and outputs that the rank has.
        written: the inputs whose buffers the program writes.
    """
    assert mine.rank is not None
    writer = _Key(mine, written, mine.rank)
    try:
        code = tuple([writer.instruction(i) for i in mine.instructions])
        ends = [tuple([writer.name(n) for n in names]) for names in (mine.inputs, mine.outputs)]
    except _Unlike:
        return None
    return code, *ends, tuple(writer.said)


def key_near(program: HostProgram, meshes: Sequence[DeviceMesh], ends: Ends) -> Hashable:
    """Return what stands for all that may concern the ranks of some meshes.

    Ranks that are as far from the first rank of their first mesh, with equal keys of all meshes
    that have them, have equal `key_of`. None where each rank stands for itself alone.

    Args:
        program: straight-line, for all ranks.
        meshes: those that have a rank, in the order of the program.
        ends: names of inputs, and of outputs, by the mesh that has them; None: every rank has them.
    """
    writer = _Key(program, program.written_inputs, meshes[0].first)
    every = (None, *meshes)
    here = sorted({n for m in every for n in near(program).get(m, ())})
    code = [program.instructions[n] for n in here]
    try:
        said = tuple([writer.instruction(i) for i in code if i.op != "return"])
        held = [
            tuple([(writer.name(n), m is None) for m in every for n in by_mesh.get(m, ())])
            for by_mesh in ends
        ]
    except _Unlike:
        return None
    return said, *held, tuple(writer.said)


@dataclass(slots=True)
class _Key:
    program: HostProgram
    written: frozenset[str]
    rank: int
    #: name -> its number, in the order in which names appear
    numbers: dict[str, int] = field(default_factory=dict)
    #: what is said of each name: its type, and whose buffer it has
    said: list[Hashable] = field(default_factory=list)
    #: what was made of meshes, by their identity
    meshes: dict[int, Hashable] = field(default_factory=dict)

    def instruction(self, i: Instruction) -> Hashable:
        if i.body or i.orelse:
            raise _Unlike
        inputs = tuple([self.name(x) if type(x) is str else (type(x), x) for x in i.inputs])
        outputs = tuple([self.name(x) for x in i.outputs])
        comm = self.posted(i.comm) if i.comm is not None else None
        return i.op, i.fn, inputs, outputs, i.attrs, i.order, comm

    def name(self, name: str) -> int:
        number = self.numbers.get(name)
        if number is None:
            number = self.numbers[name] = len(self.numbers)
            self.said.append(None)
            kind, root = self.program.types.get(name), self.program.root(name)
            buffer = number if root == name else self.name(root)
            self.said[number] = (self.kind(kind) if kind else None, buffer, name in self.written)
        return number

    def kind(self, kind: BufferType) -> Hashable:
        layout = self.layout(kind.layout) if kind.layout is not None else None
        return kind.dtype, kind.shape, kind.padding, kind.flat, layout

    def posted(self, comm: Communication) -> Hashable:
        return *comm.beside_layouts, self.layout(comm.source), self.layout(comm.destination)

    def layout(self, layout: Layout) -> Hashable:
        mesh = self.meshes.get(id(layout.mesh))
        if mesh is None:
            mesh = self.meshes[id(layout.mesh)] = self.mesh(layout.mesh)
        return mesh, layout.placements, layout.splits, layout.stream, layout.reaches

    def mesh(self, mesh: DeviceMesh) -> Hashable:
        """Return a mesh by how far its ranks are off."""
        if not mesh.is_consecutive or mesh.hosts is not None:
            raise _Unlike
        return mesh.axes, mesh.shape, mesh.first - self.rank
