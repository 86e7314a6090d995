"""Run the leaves of a rank: all of them do one step of their plans before any does the next one.

What lies alike on several leaves is there once, and steps that compute such values alone run once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import PostSite
from mdfuse.errors import CommunicationError, ProgramError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import as_run
from mdfuse.layouts.call import Call
from mdfuse.layouts.layout import Replicate
from mdfuse.leaves.carrier import Carrier
from mdfuse.leaves.deal import Deal
from mdfuse.leaves.meeting import LeafMeeting, LeafPost
from mdfuse.plan.build import Plan, build
from mdfuse.plan.index_checks import IndexChecks
from mdfuse.plan.lines import Slots


@dataclass(slots=True)
class LeafWork:
    """The work of a leaf's post; it is done before the leaf's next step."""

    is_done: bool = False

    def wait(self) -> None:
        """Return at once; CommunicationError where the leaves of the team have not met."""
        if not self.is_done:
            raise CommunicationError(
                "a leaf waits for a post that its team has not made",
                because="all leaves post at the same step",
            )


@dataclass(slots=True)
class _Mailbox:
    """The posts of the leaves of a rank since they were last taken."""

    posts: list[tuple[LeafPost, LeafWork]] = field(default_factory=list)

    def bind(self, call: Call) -> _LeafPoster:
        return _LeafPoster(self, call)

    def take(self) -> list[tuple[LeafPost, LeafWork]]:
        posts, self.posts = self.posts, []
        return posts


@dataclass(slots=True)
class _LeafPoster:
    """A call of one leaf."""

    mailbox: _Mailbox
    call: Call

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> LeafWork:
        work = LeafWork()
        self.mailbox.posts.append((LeafPost(self.call, srcs, dsts), work))
        return work

    def prepare(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite) -> None:
        """Do nothing: there is no library to be told of buffers."""


@dataclass
class RankLeaves:
    """The plans of the leaves of one rank.

    Attributes:
        rank: the rank.
        leaves: its leaves.
        programs: their projections.
        plans: their plans.
        runs: for each step, for each leaf (by place) the place of the leaf that runs it for it.
        taken: likewise the slots that it fills, with those of the other leaf's plan.
    """

    rank: int
    leaves: tuple[int, ...]
    programs: Sequence[HostProgram]
    plans: Sequence[Plan]
    mailbox: _Mailbox
    runs: Sequence[Sequence[int]]
    taken: Sequence[Sequence[Sequence[tuple[int, int]]]]

    @property
    def steps(self) -> int:
        """The number of steps, the same for each leaf; 0 where there are no leaves."""
        return len(self.plans[0].steps) if self.plans else 0

    def step(self, number: int, slots: Sequence[Slots]) -> list[tuple[LeafPost, LeafWork]]:
        """Run one step of all leaves on their slots, and return what they posted."""
        for place, by in enumerate(self.runs[number]):
            if by == place:
                self.plans[place].steps[number].run(slots[place])
                continue
            for slot, other in self.taken[number][place]:
                slots[place][slot] = slots[by][other]
        return self.mailbox.take()


def rank_leaves(
    deal: Deal,
    rank: int,
    programs: Mapping[int, HostProgram],
    arguments: Mapping[int, Sequence[Any]],
    device: torch.device,
    poison: bool,
    checks: IndexChecks | None,
) -> RankLeaves:
    """Return the plans of a rank's leaves.

    Args:
        deal: who computes which leaves.
        rank: the rank.
        programs: leaf -> its projection.
        arguments: leaf -> its arguments.
        device: where leaves compute.
        poison: see `Options.poison`.
        checks: of indices, or none.
    """
    leaves, mailbox = deal.leaves_of(rank), _Mailbox()
    plans = [
        build(
            programs[leaf],
            mailbox.bind,
            device,
            poison,
            arguments[leaf],
            is_simulated=True,
            checks=checks,
        )
        for leaf in leaves
    ]
    of_rank = [programs[leaf] for leaf in leaves]
    runs = _shared(deal, leaves, of_rank, plans)
    taken = [
        [_taken(plans[place], plans[by], number) for place, by in enumerate(by_place)]
        for number, by_place in enumerate(runs)
    ]
    return RankLeaves(rank, leaves, of_rank, plans, mailbox, runs, taken)


def run(
    ranks: Sequence[RankLeaves],
    slots: Sequence[Sequence[Slots]],
    deal: Deal,
    carrier: Carrier,
    compiles: bool,
) -> Iterator[int]:
    """Run all steps of the leaves of some ranks; yield the number of each before it is run.

    Args:
        ranks: those of this process.
        slots: for each of them, those of its leaves, with the arguments in place.
        deal: who computes which leaves.
        carrier: what takes parcels to the other ranks.
        compiles: see `LeafMeeting`.
    """
    for number in range(max((r.steps for r in ranks), default=0)):
        yield number
        posted = [
            (r.rank, r.step(number, s)) for r, s in zip(ranks, slots, strict=True) if r.leaves
        ]
        for meetings in _meetings(posted, deal, compiles):
            carrier.carry([(m.rank, m.rounds()) for m in meetings])
        for _, posts in posted:
            for _, work in posts:
                work.is_done = True


def _meetings(
    posted: Sequence[tuple[int, Sequence[tuple[LeafPost, LeafWork]]]], deal: Deal, compiles: bool
) -> Iterator[list[LeafMeeting]]:
    """Yield the meetings of one step, in an order that all ranks share.

    These are the first posts of all leaves by team, then their second ones, and so on.
    """
    by_team: dict[tuple[int, tuple[int, ...]], dict[int, dict[int, LeafPost]]] = {}
    for rank, posts in posted:
        counts: dict[int, int] = {}
        for post, _ in posts:
            leaf = post.call.rank
            number = counts[leaf] = counts.get(leaf, -1) + 1
            of_rank = by_team.setdefault((number, post.call.team), {}).setdefault(rank, {})
            of_rank[leaf] = post
    for key in sorted(by_team):
        yield [LeafMeeting(rank, posts, deal, compiles) for rank, posts in by_team[key].items()]


# -- what leaves share ---------------------------------------------------------------------------


def check_alike(programs: Sequence[HostProgram]) -> None:
    """Raise ProgramError unless all leaves run the same instructions, each on its part."""
    first = programs[0]
    for program in programs[1:]:
        pairs = zip_longest(first.walk(), program.walk())
        other = next((j or i for i, j in pairs if _kind(i) != _kind(j)), None)
        if other is not None:
            raise ProgramError(
                f"@{first.name} with same_bits: leaves run different instructions",
                where=[str(other.source or other)],
                because="the leaves of a rank go on step by step, and all of them meet at a post",
                hint="leave out streams whose iterations ranks begin at different chunks",
            )


def _kind(i: Instruction | None) -> object:
    return None if i is None else (i.op, i.fn, i.outputs)


def _shared(
    deal: Deal, leaves: Sequence[int], programs: Sequence[HostProgram], plans: Sequence[Plan]
) -> list[list[int]]:
    """Return for each step, for each leaf, the place of the leaf that runs it; see `RankLeaves`."""
    mesh, shared = deal.leaf_mesh, list[list[int]]()
    written = as_run(programs[0]) if programs else None
    at = [mesh.unravel(leaf) for leaf in leaves]
    for number in range(len(plans[0].steps) if plans else 0):
        i = _instruction(plans[0], number)
        alike = _axes_alike(i, written) if i is not None and written is not None else ()
        first: dict[tuple[int, ...], int] = {}
        runs = []
        for place, coordinate in enumerate(at):
            apart = tuple(c for c, a in zip(coordinate, mesh.axes, strict=True) if a not in alike)
            by = first.setdefault(apart, place)
            # else leaves that share a buffer would write different numbers into it; NaN equals NaN
            same = {repr(_instruction(plans[n], number)) for n in (by, place)}
            assert len(same) == 1, f"leaves compute {i} differently"
            runs.append(by)
        shared.append(runs)
    return shared


def _taken(plan: Plan, other: Plan, number: int) -> list[tuple[int, int]]:
    """Return the slots of names that a step fills, each with that of the name in another plan.

    Leaves without rows have slots of their own, so the numbers differ.
    """
    if plan is other:
        return []
    theirs = {other.names[n]: n for n in _filled(other, number) if n in other.names}
    return [(n, theirs[plan.names[n]]) for n in _filled(plan, number) if n in plan.names]


def _filled(plan: Plan, number: int) -> Iterator[int]:
    return (slot for line in plan.steps[number].lines for slot in line.targets)


def _instruction(plan: Plan, number: int) -> Instruction | None:
    at = plan.steps[number].instruction
    return plan.program.instructions[at] if at >= 0 else None


def _axes_alike(i: Instruction, program: HostProgram) -> tuple[str, ...]:
    """Return the axes along which an instruction does the same on all leaves: its values are whole.

    What is posted or awaited is each leaf's own.
    """
    if any(j.comm is not None or j.op in ("wait", "send", "recv") for j in i.walk()):
        return ()
    names = {n for j in i.walk() for n in (*j.reads, *j.outputs) if n in program.types}
    layouts = [program.types[n].layout for n in {*names, *map(program.root, names)}]
    axes = next((x.mesh.axes for x in layouts if x is not None), ())
    return tuple(
        axis for axis in axes if all(x is None or x.placement(axis) == Replicate() for x in layouts)
    )
