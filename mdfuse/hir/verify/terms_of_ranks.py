"""Follow the terms of sums through the programs of all ranks, where no rank stands for all.

Each program runs until it waits for what no other one has sent yet; then the next one goes on.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify import refusals
from mdfuse.hir.verify.events import Programs
from mdfuse.hir.verify.flow import Flow
from mdfuse.hir.verify.spaces import Space
from mdfuse.hir.verify.terms import Ledger, Sent
from mdfuse.layouts.layout import Layout, Partial

#: A buffer of a value that stays Partial, and how often something arrived there before.
_Move = tuple[str, int, str, tuple[int, ...]]


def check_terms(programs: Programs) -> None:
    """Raise ProgramError where a buffer lacks terms that its layout says, or has one twice.

    Args:
        programs: straight-line, of all ranks, whose sends and receives meet.
    """
    net = _Net(programs)
    members = [_Member(p, net) for p in programs.values()]
    while members:
        left = [m for m in members if not m.goes_on()]
        if len(left) == len(members) and not any(m.has_moved for m in members):
            return  # ranks wait for each other: that is refused by itself
        members = left
    net.check_moves()


@dataclass
class _Net:
    """What is on its way between ranks.

    Attributes:
        programs: of all ranks.
        sent: (from, to) -> what was sent.
        moves: terms that went from rank to rank while the value stayed Partial -> (to, from).
    """

    programs: Programs
    sent: dict[object, list[Sent]] = field(default_factory=lambda: defaultdict(list))
    moves: dict[_Move, list[tuple[int, int, Instruction, HostProgram]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def check_moves(self) -> None:
        """Raise ProgramError where a rank's term of a Partial value is there twice, or lost."""
        for moved in self.moves.values():
            to, come = sorted(m[0] for m in moved), sorted(m[1] for m in moved)
            if to != come:
                _, _, i, program = moved[0]
                raise refusals.not_moved(program, i.reads[0], i)


@dataclass
class _Ledger(Ledger):
    """The terms in one rank's buffers, by the places of the ranks that they come from."""

    net: _Net = field(kw_only=True)
    #: (buffer, axis) -> how often something arrived there
    arrivals: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    peer: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sent = self.net.sent

    def channel(self, i: Instruction) -> object:
        mine = self.rank
        return (mine, i.kwargs["to"]) if i.op == "send" else (i.kwargs["from"], mine)

    def usual_there(self, sent: Sent, channel: object) -> int:
        assert isinstance(channel, tuple)
        return self.spaces[sent.layout.mesh].usual(sent.layout, channel[0])

    def moved(self, space: Space, held: int, channel: object) -> int:
        assert isinstance(channel, tuple)
        self.peer = channel[0]
        return held

    def stands_still(self, i: Instruction, sent: Sent) -> bool:
        kind = self.program.types.get(sent.name)
        is_same = kind is not None and kind.layout is not None
        if not is_same or kind is None or kind.layout != sent.layout:
            return False
        (name,) = i.reads
        layout = self.layout(name)
        for axis in self.spaces[layout.mesh].axes:
            if isinstance(layout.placement(axis), Partial):
                self.move(i, name, layout, axis)
        return True

    def move(self, i: Instruction, name: str, layout: Layout, axis: str) -> None:
        here, there = (layout.mesh.coordinate(r) for r in (self.rank, self.peer))
        assert here is not None and there is not None
        at = layout.mesh.axis_index(axis)
        others = tuple(c for n, c in enumerate(here) if n != at)
        key = name, self.arrivals[name, axis], axis, others
        self.arrivals[name, axis] += 1
        self.net.moves[key].append((here[at], there[at], i, self.program))

    def shape(self, sent: Sent) -> tuple[int, ...]:
        return self.net.programs[self.peer].types[sent.name].shape


class _Member:
    """One rank, which goes through its program as far as what it waits for was sent."""

    def __init__(self, program: HostProgram, net: _Net) -> None:
        self.ledger = _Ledger(program, net=net)
        updated = program.written_inputs.intersection(program.inputs)
        self.flow = Flow(program, updated, terms=self.ledger)
        self.at = 0
        self.has_moved = False

    def goes_on(self) -> bool:
        """Go on; return whether the program is over."""
        start, code = self.at, self.flow.program.instructions
        while self.at < len(code) and self.may_go_on(code[self.at]):
            i = code[self.at]
            self.flow.steps.get(i.op, Flow.compute)(self.flow, i)
            self.at += 1
        self.has_moved = self.at > start
        return self.at == len(code)

    def may_go_on(self, i: Instruction) -> bool:
        posted = self.flow.posted.get(i.reads[0]) if i.op == "wait" else None
        return posted is None or posted.i.op != "recv" or self.ledger.is_there(posted.i)
