"""Check across ranks that values which are equal along an axis are computed in the same way there.

rank 0   %y: f32[4] (x=R) = mul(%x, 2.0)        ProgramError: %y is the same on the ranks along
rank 1   %y: f32[4] (x=R) = mul(%x, 3.0)   ->   x, by its type; rank 0 and rank 1 make it in
                                                different ways
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mdfuse.errors import CommunicationError
from mdfuse.hir.instructions import counts_of, received
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.verify.error_report import disagreement
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Replicate

#: Attributes that follow from the part that a rank has.
_OF_THE_PART = ("count", "identity", "part", "box", "shape", "ends")
#: Instructions that compute no value; `point_to_point` compares messages.
_SILENT = ("alloc", "free", "wait", "barrier", "send", "group_start", "group_end", "return")

#: How an instruction computes a name: op, numbers, types of its operands.
Way = tuple[object, ...]


@dataclass(slots=True, eq=False)
class _Computed:
    """The ways in which a program makes each name, and the chunks in which it writes a buffer."""

    ways: dict[str, list[tuple[Way, Instruction]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    chunks: dict[str, dict[object, Instruction]] = field(default_factory=lambda: defaultdict(dict))


def check_alike(programs: Mapping[int, HostProgram]) -> None:
    """Raise CommunicationError where ranks compute one value in different ways.

    Each rank is compared with the first one of its team along each axis.

    Args:
        programs: straight-line, by rank.
    """
    ways = _ways_by_class(programs)
    done: set[tuple[int, int, str]] = set()
    for rank, program in programs.items():
        for mesh in program.meshes:
            coordinate = mesh.coordinate(rank)
            for at, axis in enumerate(mesh.axes if coordinate is not None else ()):
                assert coordinate is not None
                first = mesh.rank_at((*coordinate[:at], 0, *coordinate[at + 1 :]))
                pair = id(ways[first]) if first in ways else 0, id(ways[rank]), axis
                if first in programs and pair[0] != pair[1] and pair not in done:
                    done.add(pair)
                    _check_ends(programs[first], program)
                    _compare(programs[first], ways[first], program, ways[rank], axis)


def _ways_by_class(programs: Mapping[int, HostProgram]) -> dict[int, _Computed]:
    """Return how each rank makes each name: one object for all ranks whose programs are equal."""
    by_program: dict[object, _Computed] = {}
    result = {}
    for rank, program in programs.items():
        key = program.instructions, tuple(program.types.items())
        if key not in by_program:
            by_program[key] = _ways(program)
        result[rank] = by_program[key]
    return result


def _ways(program: HostProgram) -> _Computed:
    """Return how a program makes each name."""
    ways, slices = _Computed(), dict[str, str]()
    numbers: dict[str, Way] = {}  # name of a number -> how it is computed
    for i in program.instructions:
        for inner in i.body if i.op == "launch" else (i,):
            for name in _makes(inner):
                way = _way(program, inner, numbers)
                ways.ways[name].append((way, inner))
                if name in slices:
                    ways.chunks[slices[name]][_chunk(program, name)] = inner
                elif inner.op == "chunk":
                    slices[name] = inner.reads[0]
                if name in program.types and program.types[name].layout is None:
                    numbers[name] = way
    return ways


def _chunk(program: HostProgram, name: str) -> object:
    """Return the chunk that a buffer is, without what it starts with; None for a whole one."""
    layout = program.types[name].layout
    stream = layout.stream if layout is not None else None
    return (stream.dim, stream.op, stream.chunks, stream.index) if stream is not None else None


def _makes(i: Instruction) -> Iterator[str]:
    """Yield the names of buffers and numbers that an instruction binds or writes."""
    if i.op == "post":
        yield from received(i)
    elif i.op == "recv":
        yield from i.reads
    elif i.op not in _SILENT:
        yield from i.outputs


def _way(program: HostProgram, i: Instruction, numbers: Mapping[str, Way]) -> Way:
    """Return the computation of an instruction, without attributes of the rank's part."""
    if i.op == "post":
        return i.op, i.comm, i.inputs[0], counts_of(i)
    if i.op == "recv":
        return (i.op,)
    attrs = i.attrs
    if i.fn in TABLE:
        attrs = tuple((k, v) for k, v in attrs if k not in _OF_THE_PART)
    inputs = tuple(numbers.get(x, x) if isinstance(x, str) else x for x in i.inputs)
    return i.fn or i.op, inputs, attrs, tuple(map(program.types.get, i.reads))


def _check_ends(a: HostProgram, b: HostProgram) -> None:
    """Raise CommunicationError where inputs or outputs differ in type, chunks apart."""
    for name in (*a.inputs, *a.outputs):
        kinds = [p.types.get(name) for p in (a, b)]
        if None not in kinds and len({_without_chunk(k) for k in kinds if k is not None}) > 1:
            shown = " and ".join(f"{k.text(None)} {k.layout}" for k in kinds if k is not None)
            raise disagreement(
                [(a, None), (b, None)],
                f"%{name} is {shown} on ranks {a.rank} and {b.rank}",
                because="inputs and outputs have the same type on all ranks",
                hint="declare them alike",
            )


def _without_chunk(kind: BufferType) -> BufferType:
    layout = kind.layout
    return replace(kind, layout=layout.with_stream(None) if layout is not None else None)


def _compare(a: HostProgram, ways: _Computed, b: HostProgram, others: _Computed, axis: str) -> None:
    """Raise CommunicationError where two ranks compute a value differently that both must have."""
    for name in dict.fromkeys((*ways.ways, *others.ways, *ways.chunks, *others.chunks)):
        kind = a.types.get(name)
        if kind is None or b.types.get(name) != kind or not _is_same_along(kind, axis, a, b):
            continue
        mine, theirs = ways.ways.get(name, ()), others.ways.get(name, ())
        parts, other_parts = ways.chunks.get(name, {}), others.chunks.get(name, {})
        if parts.keys() != other_parts.keys():
            mine = [((), i) for i in parts.values()]
            raise _differently(a, mine, b, [((), i) for i in other_parts.values()], name, axis)
        at = _first_difference(mine, theirs)
        if at is not None:
            raise _differently(a, mine[at:], b, theirs[at:], name, axis)


def _is_same_along(kind: BufferType, axis: str, a: HostProgram, b: HostProgram) -> bool:
    """Return whether the type of a buffer says that two ranks of one team hold the same."""
    layout: Layout | None = kind.layout
    if layout is None or axis not in layout.mesh.axes or a.rank is None or b.rank is None:
        return False
    is_there = b.rank in layout.mesh and a.rank in layout.mesh.team(b.rank, axis)
    return is_there and isinstance(layout.placement(axis), Replicate)


def _first_difference(
    mine: Sequence[tuple[Way, Instruction]], theirs: Sequence[tuple[Way, Instruction]]
) -> int | None:
    """Return the position of the first way in which two ranks differ; None where they agree."""
    for at, ((p, _), (q, _)) in enumerate(zip(mine, theirs, strict=False)):
        if p != q and not _is_one_post(p, q):
            return at
    return min(len(mine), len(theirs)) if len(mine) != len(theirs) else None


def _is_one_post(p: Way, q: Way) -> bool:
    """Return whether both are one post, in which only one of the ranks sends."""
    return p[0] == q[0] == "post" and p[1] == q[1] and None in (p[2], q[2])


def _differently(
    a: HostProgram,
    mine: Sequence[tuple[Way, Instruction]],
    b: HostProgram,
    theirs: Sequence[tuple[Way, Instruction]],
    name: str,
    axis: str,
) -> CommunicationError:
    """Return the error for a value that two ranks make in different ways."""
    return disagreement(
        [(a, mine[0][1] if mine else None), (b, theirs[0][1] if theirs else None)],
        f"%{name} is the same on all ranks along {axis}, by its type, but rank {a.rank} and rank "
        f"{b.rank} make it in different ways",
        because="R means that every rank along the axis holds the same",
        hint=f"declare it {axis}=varies, and set it to a layout once it has one",
    )
