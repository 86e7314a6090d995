"""Verify a host program, before it first runs and, in tests, after passes.

    host @p on mesh(x=2) {                          ProgramError: @p: add -> y reads %b, which post
      ...                                           %c is still using
      %c = post allgather(%a) -> %b ...       ->      rank 0   %y: ... = add(%b, 1.0)
      %y: ... = add(%b, 1.0)                          because  what a communication reads and ...
      wait %c                                         try      wait %c before

A program for all ranks is checked once per class of ranks that run the same instructions, so the
cost does not grow with the number of ranks. Programs per rank, and those whose control flow depends
on the rank, are also compared with each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from mdfuse.errors import MdfuseError, ProgramError
from mdfuse.extents.expressions import terms
from mdfuse.hir.instructions import BLOCKS, COMMUNICATIONS, INSTRUCTIONS, POSTS, counts_of
from mdfuse.hir.once import once
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.execute import executed, runs_all
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unroll import is_numbered
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.hir.verify.flow import Flow
from mdfuse.hir.verify.loop_summary import FoldedProgram, folded
from mdfuse.hir.verify.post_sizes import check_sizes
from mdfuse.hir.verify.rank_equivalence import Ends, key_near, key_of, representatives
from mdfuse.hir.verify.result_types import check_types
from mdfuse.hir.verify.ring_matching import rotates, turns
from mdfuse.hir.verify.structure import check_defined, check_structure
from mdfuse.hir.verify.team_posts import check_teams
from mdfuse.hir.verify.terms import Ledger, has_terms
from mdfuse.hir.verify.terms_of_ranks import check_terms
from mdfuse.interpreter.garbage import no_collection
from mdfuse.mesh import DeviceMesh


@no_collection()  # most objects live to the end, so a collection would free next to nothing
def verify(program: HostProgram | Mapping[int, HostProgram], in_full: bool = False) -> None:
    """Raise an error where a host program is wrong.

    Args:
        program: for all ranks, or the projection of one; or rank -> its projection, for all ranks.
        in_full: write out every iteration, and the transfers of every rank, instead of a few that
            represent all. The verdict is the same.

    Raises:
        ProgramError: a value is read before it is there, a buffer is freed too early or never, a
            post is not waited for, accesses to a buffer are in no order, a type is wrong, …
        CommunicationError: ranks do not post the same, a send meets no receive, or ranks wait for
            each other; the message shows the instruction of each.
    """
    if not isinstance(program, HostProgram):
        _verify_ranks(program)
    elif program.rank is not None:
        _verify_written_out(_checked(program), program)
    else:
        _verify_whole(program, in_full)


@once
def verify_once(program: HostProgram) -> None:
    """Verify a program, unless that was done before; see `verify`."""
    verify(program)


# -- one program for all ranks -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _How:
    """The checks that a program for all ranks needs.

    Attributes:
        in_full: write out every iteration, and the transfers of every rank.
        is_turning: all transfers are proven to meet, for all ranks at once.
        follows: follow the terms of sums in one rank, which represents all.
        joins: follow them in the programs of all ranks together.
    """

    in_full: bool
    is_turning: bool
    follows: bool
    joins: bool


def _how(program: HostProgram, in_full: bool) -> _How:
    has_transfers = any(map(_is_transfer, _paths(program)))
    is_turning = has_transfers and rotates(program)
    if not has_transfers or not has_terms(program):
        return _How(in_full, is_turning, False, False)
    is_alike = is_turning or turns(program)
    return _How(in_full, is_turning, is_alike, not is_alike)


def _is_of_ranks(program: HostProgram) -> bool:
    """Return whether branches or peers depend on the rank so that each rank needs a check."""
    return any(map(_depends_on_rank, _paths(program)))


def _verify_whole(program: HostProgram, in_full: bool) -> None:
    check_structure(program)
    check_types(program)
    layouts = [k.layout for k in program.types.values() if k.layout is not None]
    special = [i for i in program.instructions if _is_special(i)]
    is_straight = program.is_straight and all(map(is_numbered, layouts))
    if special or not is_straight:
        check_defined(program)
    if _is_of_ranks(program):
        ranks = sorted({r for mesh in program.meshes for r in mesh})
        _verify_ranks({rank: project(program, rank) for rank in ranks})
        return
    how = _how(program, in_full)
    ends = _by_mesh(program, program.inputs), _by_mesh(program, program.outputs)
    written = program.written_inputs
    known: dict[Hashable, bool] = {}  # key of the program of a rank -> whether its flow was checked
    nears: dict[tuple[DeviceMesh, ...], Hashable] = {}
    for first, last in representatives(program):
        if not is_straight:
            _verify_looped_ranks(program, first, last, how)
            continue
        for rank in dict.fromkeys((first, last)):
            has_flow = rank == first or bool(special)
            is_alone = in_full or len(program.meshes) < 2
            near = None if is_alone else _near(program, rank, ends, nears)
            if near is not None and known.get(near, -1) >= has_flow:
                continue
            mine = _held(executed(program, rank), program, ends)
            key = None if is_alone else key_of(mine, written)
            if key is None or known.get(key, -1) < has_flow:
                _verify_straight(mine, program, has_flow, how)
                known[key] = has_flow
            known[near] = has_flow
    if any(map(_is_transfer, _paths(program))) and (in_full or not how.is_turning):
        _check_transfers(program)
    if how.joins:
        ranks = sorted({r for mesh in program.meshes for r in mesh})
        check_terms({rank: written_out(project(program, rank)) for rank in ranks})


def _near(
    program: HostProgram, rank: int, ends: Ends, keys: dict[tuple[DeviceMesh, ...], Hashable]
) -> Hashable:
    """Return a key that is equal for ranks that run equal programs; None: check the rank itself.

    `keys` caches `key_near`.
    """
    meshes = program.meshes_of(rank)
    if meshes not in keys:
        keys[meshes] = key_near(program, meshes, ends)
    key = keys[meshes]
    return None if key is None else (key, rank - meshes[0].first)


def _verify_straight(mine: HostProgram, program: HostProgram, has_flow: bool, how: _How) -> None:
    local = written_out(mine)
    if has_flow:
        _check_flow(local, program, how.follows)
    _check_sizes(local)


def _by_mesh(program: HostProgram, names: Iterable[str]) -> Mapping[DeviceMesh | None, list[str]]:
    by_mesh: dict[DeviceMesh | None, list[str]] = defaultdict(list)
    for name in names:
        layout = program.types[name].layout
        by_mesh[layout.mesh if layout is not None else None].append(name)
    return by_mesh


def _held(mine: HostProgram, program: HostProgram, ends: Ends) -> HostProgram:
    """Return the program of a rank with the inputs and outputs that the rank has."""
    assert mine.rank is not None
    if mine.instructions is program.instructions:
        return mine  # all ranks have all of them
    meshes = (None, *program.meshes_of(mine.rank))
    inputs, outputs = (tuple(n for m in meshes for n in by_mesh.get(m, ())) for by_mesh in ends)
    code = tuple(replace(i, inputs=outputs) if i.op == "return" else i for i in mine.instructions)
    return replace(mine, inputs=inputs, outputs=outputs, instructions=code)


def _verify_looped_ranks(program: HostProgram, first: int, last: int, how: _How) -> None:
    """Verify the projections of the first and the last rank of a class."""
    for rank in dict.fromkeys((first, last)):
        mine = project(program, rank)
        if rank != first or not runs_all(program, rank):
            check_defined(mine)
        _verify_looped(program, mine, how)


def _verify_looped(program: HostProgram, mine: HostProgram, how: _How) -> None:
    """Verify a projection with loops: its summary, else all iterations."""

    def check(local: HostProgram) -> None:
        _check_flow(local, program, how.follows)
        check_types(local)
        _check_sizes(local)

    # the terms of each iteration meet only if its transfers do, which a summary cannot show
    may_fold = not how.in_full and (how.is_turning or not how.follows)
    short = folded(mine) if may_fold else None
    if short is not None:
        try:
            return check(short)
        except MdfuseError:
            pass  # the longer program is checked, and its error is raised
    check(written_out(mine))


#: Instructions that may have an index expression, or take part of a buffer.
_SPECIAL = frozenset(name for name, row in INSTRUCTIONS.items() if row.indices or row.is_slice)


def _is_special(i: Instruction) -> bool:
    """Return whether an instruction may depend on an index or the rank, or takes a part."""
    return i.op in (*_SPECIAL, "block") and (i.op != "wait" or bool(i.attrs))


def _paths(program: HostProgram) -> list[Instruction]:
    """Return the blocks of a program, and its sends and receives, nested ones included."""
    return [i for i in program.walk() if i.op in _OF_PATHS]


_OF_PATHS = (*BLOCKS, *POSTS)


def _depends_on_rank(i: Instruction) -> bool:
    """Return whether a branch or peer depends on more of the rank than its place on one axis."""
    if i.op in BLOCKS:
        bounds = (t for _, v in i.attrs for t in terms(v))
        return any(t.kind != "index" for t in bounds)
    axis = i.kwargs.get("axis") if _is_transfer(i) else None
    if axis is None:
        return _is_transfer(i)
    peer = i.kwargs.get("to", i.kwargs.get("from"))
    return any(t.kind == "rank" or (t.kind == "coord" and t.name != axis) for t in terms(peer))


def _is_transfer(i: Instruction) -> bool:
    """Return whether an instruction is a `send` or `recv` rather than a post of a communication."""
    return i.op in POSTS and i.comm is None


def _check_transfers(program: HostProgram) -> None:
    """Check sends and receives along an axis on two teams of it: the first and the last."""
    teams: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for i in _paths(program):
        layout = program.types[i.reads[0]].layout if _is_transfer(i) else None
        if layout is not None:
            mesh, axis = layout.mesh, i.kwargs["axis"]
            for coordinate in ([0] * mesh.ndim, [n - 1 for n in mesh.shape]):
                teams[mesh.team(mesh.rank_at(coordinate), axis)].update(i.outputs)
    bare = replace(program, instructions=_communications(program)) if teams else program
    for team, handles in teams.items():
        check_teams({rank: written_out(project(bare, rank)) for rank in team}, handles)


def _communications(program: HostProgram) -> tuple[Instruction, ...]:
    """Return the communications of a program, with an `alloc` for each buffer that they use.

    Without the other instructions, the programs of many ranks are written out cheaply.
    """
    every, root = [*program.walk()], program.root
    posted = {root(n) for i in every if i.op in POSTS for n in i.reads}

    def bare(block: tuple[Instruction, ...]) -> Iterator[Instruction]:
        for i in block:
            if i.op in BLOCKS:
                yield replace(i, body=tuple(bare(i.body)), orelse=tuple(bare(i.orelse)))
            elif i.op in (*COMMUNICATIONS, "call"):
                yield i
            for name in i.outputs:
                if root(name) in posted:
                    yield Instruction(op="alloc", outputs=(name,))

    return tuple(bare(program.instructions))


# -- one rank's program --------------------------------------------------------------------------


def _checked(program: HostProgram) -> HostProgram:
    """Write out a projection, after the checks that writing it out relies on."""
    check_structure(program)
    if any(i.op in BLOCKS for i in program.instructions):
        check_types(program)
    check_defined(program)
    return written_out(program)


def _verify_written_out(local: HostProgram, program: HostProgram) -> None:
    """Verify a projection that is written out; `program` is the projection as it was before."""
    check_types(local)
    _check_flow(local, program)
    _check_sizes(local)


def _check_flow(local: HostProgram, program: HostProgram, follows: bool = False) -> None:
    """Check the flow of a straight-line program; `program` is what it was written out from."""
    updated = program.written_inputs.intersection(local.inputs)
    flow = Flow(local, updated, program.has_frees)
    if follows:
        repeated = local.repeated if isinstance(local, FoldedProgram) else frozenset()
        flow.terms = Ledger(local, repeated)
    flow.run()


def _check_sizes(local: HostProgram) -> None:
    assert local.rank is not None
    for i in local.instructions:
        if i.op == "post" and counts_of(i) is None:
            check_sizes(local, i, local.rank)


# -- a program for each rank ---------------------------------------------------------------------


def _verify_ranks(programs: Mapping[int, HostProgram]) -> None:
    """Verify each class of equal programs by itself, then all programs together."""
    projected = {rank: project(program, rank) for rank, program in programs.items()}
    written: dict[int, HostProgram] = {}
    classes: dict[object, list[int]] = defaultdict(list)
    for rank, program in projected.items():
        if program.rank != rank:
            raise ProgramError(
                f"@{program.name}: the program for rank {rank} is the projection of {program.rank}",
                hint="pass {rank: hir.project(program, rank)} for every rank",
            )
        local = written[rank] = _checked(program)
        types = tuple(local.types.items())
        classes[types, local.instructions, local.inputs, local.outputs].append(rank)
    for ranks in classes.values():
        for rank in dict.fromkeys((ranks[0], ranks[-1])):
            _verify_written_out(written[rank], projected[rank])
    check_teams(written)
    if any(map(has_terms, written.values())):
        check_terms(written)
