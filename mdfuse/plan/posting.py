"""Prepare posts and waits: one rank's part of a communication, on its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import Buffer, Grouping, Poster, Posting, PostSite, Prepared, Work
from mdfuse.communication import Communication
from mdfuse.errors import CommunicationError
from mdfuse.hir.instructions import TRANSFERS, counts_of
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.localize import transfer_team
from mdfuse.layouts.boxes import index_of, nth_chunk
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import POINT_TO_POINT, blocks_of
from mdfuse.layouts.rank_part import RankPart
from mdfuse.plan import counted_steps
from mdfuse.plan.context import Context, PlanStep, label
from mdfuse.plan.exchanges import Exchanges
from mdfuse.plan.joined_norms import JoinedNorms
from mdfuse.plan.lines import Line, SlotRef, drop, is_dense
from mdfuse.plan.pending import Pending, landing, nothing_posted


class Posts:
    """Prepares the communications of one rank, in program order."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.exchanges = Exchanges(context)
        #: the norms that are computed with the sums before them
        self.norms = JoinedNorms(context)
        #: handle -> the calls that wait for its post, where they are the library's own
        self.waits: dict[str, tuple[Line, ...]] = {}
        #: the posts since the start of a group
        self.members: list[Instruction] = []

    @property
    def is_grouped(self) -> bool:
        """True from the start of a group to its end."""
        return self.exchanges.group is not None

    def steps(self, i: Instruction, following: Instruction | None = None) -> list[PlanStep]:
        """Return the steps of one communication instruction.

        Args:
            i: a post, wait, barrier, send, receive, or the start or end of a group.
            following: for a post, the next instruction that puts work on the device.
        """
        match i.op:
            case "post" if self.is_grouped and counts_of(i) is None:
                self.members.append(i)
                return []
            case "group_end" if self.members:
                members, self.members = self.members, []
                return [*self.exchanges.steps(i), *self.together(members)]
            case "post" if counts_of(i) is not None:
                return [counted_steps.post(i, self.context)]
            case "post":
                waits = following if following is not None and following.op == "wait" else None
                post = self.post(i, waits is not None and waits.reads == i.outputs)
                ahead, self.norms.ahead = self.norms.ahead, []
                return [*ahead, post]
            case "wait":
                return [self.wait(i)]
            case "barrier":
                return self.barrier(i)
        return self.exchanges.steps(i)

    def post(
        self, i: Instruction, at_once: bool, bound: tuple[Poster, ...] | None = None
    ) -> PlanStep:
        """Prepare a post; `at_once` says that its wait follows directly, on the same stream."""
        context, comm = self.context, i.comm
        assert comm is not None
        part, pieces = comm.part(context.rank), i.kwargs.get("pieces", 1)
        context.bind_name(i.outputs[0])
        call = part.call
        posters = bound or ()
        if bound is None and call is not None:
            posters = tuple(context.bind(call) for _ in range(pieces))
        lines = self.norms.lines(i, posters)
        if lines is None and pieces == 1 and posters:
            lines = self.prepared(i, part, posters, at_once)
        return PlanStep(
            lines=lines or (self.general(i, part, posters),),
            label=label(i),
            op="post",
            inputs=tuple(map(context.slot, i.reads)),
            outputs=(context.slot(i.outputs[0]),),
            posters=posters,
            calls=(call,) * pieces if call is not None else (),
        )

    def together(self, members: Sequence[Instruction]) -> list[PlanStep]:
        """Prepare the posts of a group: as one where the library starts them at once."""
        context = self.context
        parts = [i.comm.part(context.rank) for i in members if i.comm is not None]
        calls = [p.call for p in parts if p.call is not None and not p.copies]
        is_one = len({(c.team, c.backend) for c in calls}) == 1
        if not is_one or len(calls) < len(members) or any(i.kwargs.get("pieces") for i in members):
            return [self.post(i, False) for i in members]
        posters = [context.bind(call) for call in calls]
        one = self.one_post(members, calls, posters[0])
        if one is not None:
            return [replace(one, posters=tuple(posters))]
        return [self.post(i, False, (x,)) for i, x in zip(members, posters, strict=True)]

    def one_post(
        self, members: Sequence[Instruction], calls: Sequence[Call], poster: Poster
    ) -> PlanStep | None:
        """Return the posts of a group as one; None where they are made one by one."""
        context = self.context
        ends = [i.reads for i in members]
        srcs, dsts = [x for x, *_ in ends], [x for *_, x in ends]
        facts = {n: context.fact(n) for n in (*srcs, *dsts)}
        if not all(map(is_dense, facts.values())):
            return None
        sent, received = ([x for n in side if (x := facts[n]) is not None] for side in (srcs, dsts))
        place = PostSite(where=label(members[0]), stream=context.stream)
        posting = None
        if isinstance(poster, Grouping):
            posting = poster.together(calls, sent, received, place)
        return None if posting is None else self.in_one(members, calls, posting, (srcs, dsts))

    def in_one(
        self,
        members: Sequence[Instruction],
        calls: Sequence[Call],
        posting: Posting,
        sides: tuple[list[str], list[str]],
    ) -> PlanStep:
        """Return the step of a prepared group, whose handles all wait for all of it."""
        slot = self.context.slot
        for i in members:
            self.context.bind_name(i.outputs[0])
        handles, used = [slot(i.outputs[0]) for i in members], [slot(n) for s in sides for n in s]
        lines = [self.line(p, *sides) for p in posting.post]
        lines[-1] = replace(lines[-1], into=handles[0], shares=tuple(used))
        every = partial(_repeated, len(handles))
        given = SlotRef(handles[0])
        lines.append(Line(run=every, args=(given,), into=tuple(handles), shares=tuple(used)))
        explain = posting.explain
        for i, handle in zip(members, handles, strict=True):
            wait: tuple[Line, ...] = (_waited(handle),)
            if posting.wait is not None:
                wait = tuple(self.line(p, *sides) for p in posting.wait)
            self.waits[i.outputs[0]] = tuple(
                replace(w, ends=(handle,), explain=explain) for w in wait
            )
        return PlanStep(
            lines=tuple(replace(x, explain=explain) for x in lines),
            label=" and ".join(map(label, members)),
            op="post",
            inputs=tuple(slot(x) for i in members for x in i.reads),
            outputs=tuple(handles),
            calls=tuple(calls),
        )

    def general(self, i: Instruction, part: RankPart, posters: tuple[Poster, ...]) -> Line:
        """Prepare a post that checks and cuts its buffers in each run."""
        context, comm = self.context, i.comm
        assert comm is not None
        ends = _Ends(part, posters, nothing_posted(context.has_streams))
        pairs = comm.kind in POINT_TO_POINT
        args = tuple(context.ref(x) if isinstance(x, str) else None for x in i.inputs)
        return Line(
            run=_posted_pieces(comm, ends) if pairs else _post_collective(i, ends),
            args=args,
            into=context.slot(i.outputs[0]),
            shares=tuple(x.slot for x in args if x is not None),
        )

    def prepared(
        self, i: Instruction, part: RankPart, posters: tuple[Poster, ...], at_once: bool
    ) -> tuple[Line, ...] | None:
        """Return a post as the library's own calls, or None where it needs the general form.

        The buffers must be known to be dense, and the backend must have such calls. The calls that
        wait for the post are kept for its `wait`.
        """
        assert i.comm is not None
        if part.copies or i.comm.kind in POINT_TO_POINT:
            return None
        roles = zip(i.inputs, _roles(part), strict=True)
        srcs, dsts = ([x] if takes and isinstance(x, str) else [] for x, takes in roles)
        facts = {n: self.context.fact(n) for n in (*srcs, *dsts)}
        if not all(map(is_dense, facts.values())):
            return None
        sent, received = ([x for n in side if (x := facts[n]) is not None] for side in (srcs, dsts))
        place = PostSite(where=label(i), stream=self.context.stream, at_once=at_once)
        posting = posters[0].prepare(sent, received, place)
        if posting is None:
            return None
        lines = [self.line(p, srcs, dsts) for p in posting.post]
        handle = self.context.slot(i.outputs[0])
        used = {slot for line in lines if line.run != "copy_" for slot in line.refs}
        is_done = posting.wait == ()  # later work on the stream finds the buffers free
        lines[-1] = replace(lines[-1], into=handle, shares=() if is_done else tuple(sorted(used)))
        explain = posting.explain
        wait: tuple[Line, ...] = (_waited(handle),)
        if posting.wait is not None:
            wait = tuple(self.line(p, srcs, dsts) for p in posting.wait)
        self.waits[i.outputs[0]] = tuple(replace(w, ends=(handle,), explain=explain) for w in wait)
        return tuple(replace(x, explain=explain) for x in lines)

    def line(self, call: Prepared, srcs: list[str], dsts: list[str]) -> Line:
        """Turn a prepared call of a backend into a line, whose arguments are slots."""

        def arg(x: Any) -> Any:
            if isinstance(x, Buffer):
                name = (srcs if x.side == "src" else dsts)[x.index]
                return SlotRef(self.context.slot(name), x.form)
            return [arg(y) for y in x] if isinstance(x, list) else x

        return Line(run=call.run, args=tuple(map(arg, call.args)), in_place=call.in_place)

    def wait(self, i: Instruction) -> PlanStep:
        (name,) = i.reads
        handle, piece = self.context.slot(name), i.kwargs.get("piece")
        if piece is not None:
            piece_of = Line(run="wait", args=(SlotRef(handle), piece))
            return PlanStep(lines=(piece_of,), label=label(i), op="wait", waits=(handle, piece))
        usual = (_waited(handle),)
        lines = (*self.waits.pop(name, usual), drop(handle))  # it holds on to buffers
        self.context.release(name)  # a second wait would find nothing
        return PlanStep(lines=lines, label=label(i), op="wait", waits=(handle, piece))

    def barrier(self, i: Instruction) -> list[PlanStep]:
        """Prepare an all-reduce of one number, and its wait; nothing for a rank alone."""
        context, comm = self.context, i.comm
        assert comm is not None
        team = comm.team(context.rank)
        if len(team) < 2:
            return []
        call = Call(
            kind="Allreduce", team=team, rank=context.rank, reduce_op="sum", backend=comm.backend
        )
        poster, ones = context.bind(call), torch.ones(1, device=context.device)
        handle = context.new_slot()

        def post_barrier() -> Pending:
            return Pending((poster((ones,), (ones.clone(),)),))

        where = label(i)
        posted = Line(run=post_barrier, into=handle)
        waited = _waited(handle)
        return [
            PlanStep(
                lines=(posted,),
                label=where,
                op="post",
                outputs=(handle,),
                posters=(poster,),
                calls=(call,),
            ),
            PlanStep(lines=(waited, drop(handle)), label=where, op="wait", waits=(handle, None)),
        ]


def _repeated(times: int, x: object) -> tuple[object, ...]:
    return (x,) * times


def _waited(handle: int) -> Line:
    return Line(run="wait", args=(SlotRef(handle),))


def groups(program: HostProgram, rank: int, backend: str | None = None) -> list[tuple[int, ...]]:
    """Return the groups of ranks of a projection's communications, in program order.

    Communications by `backend` count; None: those that name no backend.
    """
    teams: dict[tuple[int, ...], None] = {}
    for i in program.walk():
        if i.comm is not None and i.comm.backend == backend:
            teams[i.comm.group(rank)] = None
        elif i.op in TRANSFERS and i.kwargs.get("backend") == backend:
            teams[transfer_team(program, i, rank)] = None
    return [team for team in teams if len(team) > 1]


# -- collectives ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ends:
    """One rank's part of a communication, its posters, and the works where nothing is posted."""

    part: RankPart
    posters: tuple[Poster, ...]
    alone: Callable[[], tuple[Work, ...]]


_Post = Callable[[Tensor | None, Tensor | None], Pending]


def _post_collective(i: Instruction, ends: _Ends) -> _Post:
    """Return the function that posts a collective on whole buffers, or in pieces of rows.

    That function raises CommunicationError for a buffer that is not dense.
    """
    takes, gives = _roles(ends.part)
    described = f"{i.comm} ({i.source or i.comm.kind})"  # type: ignore[union-attr]
    run = _post_rows if len(ends.posters) > 1 else _post_whole

    def post(source: Tensor | None, destination: Tensor | None) -> Pending:
        _copy_pieces(ends.part, source, destination)
        if not ends.posters:
            return Pending(ends.alone())
        srcs = (source,) if takes and source is not None else ()
        dsts = (destination,) if gives and destination is not None else ()
        for buffer in (*srcs, *dsts):
            if not buffer.is_contiguous():
                raise _not_dense(described, buffer)
        return run(ends.posters, srcs, dsts)

    return post


def _post_whole(
    posters: tuple[Poster, ...], srcs: tuple[Tensor, ...], dsts: tuple[Tensor, ...]
) -> Pending:
    return Pending((posters[0](srcs, dsts),))


def _post_rows(
    posters: tuple[Poster, ...], srcs: tuple[Tensor, ...], dsts: tuple[Tensor, ...]
) -> Pending:
    """Post the chunks of the outermost dim one after the other, each as a piece."""
    parts = len(posters)

    def rows(buffers: tuple[Tensor, ...], n: int) -> list[Tensor]:
        return [x[slice(*nth_chunk((0, x.shape[0]), parts, n))] for x in buffers]

    return Pending(tuple(p(rows(srcs, n), rows(dsts, n)) for n, p in enumerate(posters)))


def _roles(part: RankPart) -> tuple[bool, bool]:
    """Tell whether the library reads this rank's source, and whether it writes the destination."""
    call = part.call
    if call is None:
        return False, False
    source, destination = blocks_of(call)
    return source is not None, destination is not None


def _not_dense(described: str, buffer: Tensor) -> CommunicationError:
    return CommunicationError(
        f"{described}: a buffer of shape {tuple(buffer.shape)} has strides {buffer.stride()}",
        because="a communication sees a pointer and a count, so its buffers are dense",
        hint="make it contiguous before the post",
    )


# -- point-to-point ------------------------------------------------------------------------------


def _copy_pieces(part: RankPart, source: Tensor | None, destination: Tensor | None) -> None:
    """Copy the boxes that stay on this rank from the source to the destination."""
    for before, after in part.copies:
        assert source is not None and destination is not None
        destination[index_of(after)] = source[index_of(before)]


def _posted_pieces(comm: Communication, ends: _Ends) -> _Post:
    if comm.reduce_op is None:
        return _post_pieces(ends)
    return _post_terms(ends, comm.reduce_op)


def _post_terms(ends: _Ends, op: str) -> _Post:
    """Return the function that sends boxes of the source, and reduces those that arrive.

    The terms of a box lie in rows, so that they are reduced once, all together, in order.
    """
    part = ends.part
    copied = [box for box, _ in part.copies]
    outgoing, local = (tuple(map(index_of, x)) for x in (part.sends, copied))
    boxes = [part.recvs[i] if i >= 0 else part.copies[-1 - i][1] for i, *_ in part.terms]
    into = [index_of(box) for box in boxes]

    def post(source: Tensor | None, destination: Tensor | None) -> Pending:
        srcs = [source[index].contiguous() for index in outgoing]  # type: ignore[index]
        targets = [destination[index] for index in into]  # type: ignore[index]
        rows = [x.new_empty((len(t), *x.shape)) for x, t in zip(targets, part.terms, strict=True)]
        numbered = zip(part.terms, rows, strict=True)
        places = {n: row for terms, x in numbered for n, row in zip(terms, x, strict=True)}
        for n, index in enumerate(local):
            places[-1 - n].copy_(source[index])  # type: ignore[index]
        if not ends.posters:
            works = ends.alone()
        else:
            works = (ends.posters[0](srcs, [places[n] for n in range(len(part.recvs))]),)
        return Pending(works, tuple(zip(targets, rows, strict=True)), op)

    return post


def _post_pieces(ends: _Ends) -> _Post:
    """Return the function that sends boxes of the source and receives boxes of the destination."""
    outgoing = tuple(map(index_of, ends.part.sends))
    incoming = tuple(map(index_of, ends.part.recvs))

    def post(source: Tensor | None, destination: Tensor | None) -> Pending:
        _copy_pieces(ends.part, source, destination)
        if not ends.posters:
            return Pending(ends.alone())
        srcs = [source[index].contiguous() for index in outgoing]  # type: ignore[index]
        landed = [landing(destination[index]) for index in incoming]  # type: ignore[index]
        work = ends.posters[0](srcs, [dst for dst, _ in landed])
        return Pending((work,), tuple(c for _, copies in landed for c in copies))

    return post
