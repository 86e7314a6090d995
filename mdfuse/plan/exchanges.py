"""Prepare sends and receives: those of one group are posted at once.

A rank copies its sends to itself. In a program on several streams, whose buffers are made in each
run, even the copy is saved: the received name becomes an alias of the sent buffer, where nothing
writes into either of them. So a ring's first turn begins at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mdfuse.backends.base import Poster, Work
from mdfuse.errors import ProgramError
from mdfuse.hir.analysis.clobbers import may_stand_for
from mdfuse.hir.program import Instruction
from mdfuse.hir.rank.localize import transfer_team
from mdfuse.ir.ops import itself
from mdfuse.layouts.call import Call
from mdfuse.names import base_name
from mdfuse.plan.context import Context, PlanStep, label
from mdfuse.plan.lines import Line, SlotRef, drop
from mdfuse.plan.pending import Pending, halves, landing, nothing_posted


@dataclass(frozen=True, slots=True)
class _End:
    """One rank's side of a transfer: the other rank, and the slots of its buffer and handle."""

    i: Instruction
    peer: int
    buffer: int
    handle: int


@dataclass
class Exchanges:
    """Prepares the sends and receives of one rank, in program order.

    Attributes:
        context: the rank's slots and bindings.
        group: the sends and receives since group_start; None outside of a group.
        to_itself: sends to this rank that are not received yet: the name, and the slot of a copy.
    """

    context: Context
    group: list[Instruction] | None = None
    to_itself: list[tuple[str, int]] = field(default_factory=list)

    def steps(self, i: Instruction) -> list[PlanStep]:
        """Return the steps of a send, a receive, or the start or end of a group.

        The members of a group are collected; its end has the steps of all.
        """
        if i.op == "group_start":
            self.group = []
            return []
        if i.op == "group_end":
            members, self.group = self.group or [], None
            return self.transfer(members)
        if self.group is None:
            return self.transfer([i])
        self.group.append(i)
        return []

    def finish(self) -> None:
        """Raise ProgramError where a send of this rank to itself has no receive."""
        if self.to_itself:
            raise ProgramError(
                f"rank {self.context.rank} sends to itself what it does not receive",
                because="each send has its recv",
                hint="write the recv, behind the send or in the same group",
            )

    def transfer(self, members: Sequence[Instruction]) -> list[PlanStep]:
        """Prepare sends and receives that are posted at once: one post per team and backend."""
        program, rank = self.context.program, self.context.rank
        by_team: dict[tuple[tuple[int, ...], str | None], list[Instruction]] = {}
        for i in members:
            key = transfer_team(program, i, rank), i.kwargs.get("backend")
            by_team.setdefault(key, []).append(i)
        return [step for (team, _), some in by_team.items() for step in self.exchange(team, some)]

    def exchange(self, team: tuple[int, ...], members: Sequence[Instruction]) -> list[PlanStep]:
        """Prepare the post of one team, and the copies of this rank's sends to itself."""
        slot = self.context.slot
        ends = [_End(i, self.peer(i, team), slot(i.reads[0]), slot(i.outputs[0])) for i in members]
        pairs, copied, dropped = self.to_oneself([e for e in ends if e.peer == self.context.rank])
        instruction_of = {e.buffer: e.i for e in ends}
        alike = [
            (a, b)
            for a, b in pairs
            if a in instruction_of and self.stands_for(instruction_of[a], instruction_of[b])
        ]
        pairs = [pair for pair in pairs if pair not in alike]
        away = [e for e in ends if e.peer != self.context.rank]
        sends, recvs = ([e for e in away if e.i.op == op] for op in ("send", "recv"))
        call = self.call(team, sends, recvs)
        poster = self.context.bind(call) if call is not None else None
        for i in members:
            self.context.bind_name(i.outputs[0])
        used = (*(x for pair in pairs for x in pair), *(e.buffer for e in (*sends, *recvs)))
        post = Line(
            run=_exchange(
                self.post(poster),
                len(pairs),
                len(sends),
                [e in recvs for e in ends],
                self.context.has_streams,
            ),
            args=tuple(map(SlotRef, used)),
            into=tuple(e.handle for e in ends),
            shares=used,
        )
        step = PlanStep(
            lines=(post,),
            label=" and ".join(map(label, members)),
            op="post",
            inputs=(*(e.buffer for e in ends), *(source for source, _ in pairs)),
            outputs=tuple(e.handle for e in ends),
            posters=(poster,) if poster is not None else (),
            calls=(call,) if call is not None else (),
        )
        return [*copied, *(_same(*pair) for pair in alike), step, *dropped]

    def stands_for(self, send: Instruction, recv: Instruction) -> bool:
        """Return whether the received name may be an alias of the buffer that this rank sent."""
        context, (source,), (into,) = self.context, send.reads, recv.reads
        sent, received = context.fact(source), context.fact(into)
        is_known = sent is not None and received is not None and into not in context.given
        if context.one_stream or not is_known or context.expanded.get(source):
            return False
        assert sent is not None and received is not None
        lie_alike = (sent.shape, sent.stride()) == (received.shape, received.stride())
        return lie_alike and may_stand_for(context.program, send, recv)

    def call(
        self, team: tuple[int, ...], sends: Sequence[_End], recvs: Sequence[_End]
    ) -> Call | None:
        if not sends and not recvs:
            return None
        return Call(
            kind="Exchange",
            team=team,
            rank=self.context.rank,
            sends=tuple(e.peer for e in sends),
            recvs=tuple(e.peer for e in recvs),
            backend=(*sends, *recvs)[0].i.kwargs.get("backend"),
        )

    def post(self, poster: Poster | None) -> _Post:
        """Return the post to other ranks, or its stand-in for copies to this rank alone."""
        if poster is None:
            alone = nothing_posted(self.context.has_streams)
            return lambda srcs, dsts: alone()
        return lambda srcs, dsts: (poster(srcs, dsts),)

    def peer(self, i: Instruction, team: tuple[int, ...]) -> int:
        side = "to" if i.op == "send" else "from"
        peer = i.kwargs[side]
        if isinstance(peer, int) and peer in team:
            return peer
        raise ProgramError(
            f"{i.op} %{base_name(i.reads[0])} {side} rank {peer} on rank {self.context.rank}",
            where=self.context.where(i),
            because=f"the buffer lives on the ranks {team}"
            + (f" along {i.kwargs['along']}" if "along" in i.kwargs else ""),
            hint="name one of them",
        )

    # -- to oneself ------------------------------------------------------------------------------

    def to_oneself(
        self, ends: Sequence[_End]
    ) -> tuple[list[tuple[int, int]], list[PlanStep], list[PlanStep]]:
        """Match this rank's sends to itself with its receives, first in, first out.

        Returns:
            (slot of the source, slot of the destination) of each copy made now; steps that copy
            sends which are received later, since their buffers may be written before that; and
            steps that drop such copies of sends which are received now.
        """
        before = self.to_itself
        sent = [(e.i.reads[0], e.buffer) for e in ends if e.i.op == "send"]
        received = [e for e in ends if e.i.op == "recv"]
        if len(received) > len(before) + len(sent):
            raise ProgramError(
                f"rank {self.context.rank} receives from itself what it has not sent",
                where=self.context.where(received[-1].i),
                hint="send before, or put both into one group",
            )
        pairs = []
        for (name, source), e in zip([*before, *sent], received, strict=False):
            self.check_alike(name, e.i)
            pairs.append((source, e.buffer))
        copied = [self.keep(*x) for x in sent[max(len(received) - len(before), 0) :]]
        self.to_itself = before[len(received) :] + [x for x, _ in copied]
        dropped = [
            PlanStep(lines=(drop(copy),), label="recv", op="free", inputs=(copy,))
            for _, copy in before[: len(received)]
        ]
        return pairs, [step for _, step in copied], dropped

    def keep(self, name: str, buffer: int) -> tuple[tuple[str, int], PlanStep]:
        """Prepare a copy of a buffer that is sent now and received later."""
        copy = self.context.new_slot()
        line = Line(run="clone", args=(SlotRef(buffer),), into=copy)
        what = f"send %{base_name(name)}"
        step = PlanStep(lines=(line,), label=what, op="send", inputs=(buffer,), outputs=(copy,))
        return (name, copy), step

    def check_alike(self, name: str, i: Instruction) -> None:
        context, into = self.context, i.reads[0]
        a, b = (context.type(n) for n in (name, into))
        if (a.dtype, math.prod(context.local(name))) != (b.dtype, math.prod(context.local(into))):
            rank = context.rank
            raise ProgramError(
                f"rank {rank} sends {a.text(rank)} to itself and receives {b.text(rank)}",
                where=context.where(i),
                because="a send and its receive have one size and one dtype",
            )


def _same(source: int, into: int) -> PlanStep:
    """Return the step that binds one slot to the value of another one."""
    line = Line(run=itself, args=(SlotRef(source),), into=into, shares=(source,), is_view=True)
    return PlanStep(lines=(line,), label="recv", op="same", inputs=(source,), outputs=(into,))


_Post = Callable[[list[Tensor], list[Tensor]], tuple[Work, ...]]


def _exchange(
    post: _Post, pairs: int, sends: int, receives: Sequence[bool], has_streams: bool
) -> Callable[..., tuple[Pending, ...]]:
    """Return the function that makes the copies and posts; each handle delivers into its place.

    Args:
        post: posts the transfers to and from other ranks.
        pairs: how many copies on this rank: the first arguments are their sources and places.
        sends: how many of the following arguments are sent; into the others is received.
        receives: for each handle, whether it is one of a receive from another rank.
        has_streams: whether handles may be waited for on different streams.
    """

    def exchange(*buffers: Tensor) -> tuple[Pending, ...]:
        local, away = buffers[: 2 * pairs], buffers[2 * pairs :]
        for source, destination in zip(local[::2], local[1::2], strict=True):
            destination.copy_(source.reshape(destination.shape))
        landed = [landing(place) for place in away[sends:]]
        works = post([x.contiguous() for x in away[:sends]], [d for d, _ in landed])
        sent, received = halves(works, has_streams)
        unpacks = (unpack for _, unpack in landed)
        return tuple(
            Pending(received, next(unpacks)) if is_one else Pending(sent) for is_one in receives
        )

    return exchange
