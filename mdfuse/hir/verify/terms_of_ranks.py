"""Follow the terms of sums through the programs of all ranks, where no rank stands for all.

Each program runs until it waits for a message that no other one has sent yet; then the next one
goes on.
"""

from __future__ import annotations

from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify.flow import Flow
from mdfuse.hir.verify.post_events import Programs
from mdfuse.hir.verify.terms import Ledger, Network


def check_terms(programs: Programs) -> None:
    """Raise ProgramError where a buffer lacks terms that its layout says, or has one twice.

    Args:
        programs: straight-line, of all ranks, whose sends and receives meet.
    """
    network = Network()
    members = [_Member(p, network) for p in programs.values()]
    while members:
        unfinished = [m for m in members if not m.goes_on()]
        if len(unfinished) == len(members) and not any(m.has_moved for m in members):
            return  # ranks wait for each other: another check refuses that
        members = unfinished
    network.check_moves()


class _Member:
    """One rank, which goes through its program as far as messages that it waits for were sent."""

    def __init__(self, program: HostProgram, network: Network) -> None:
        self.ledger = Ledger(program, network=network)
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
        post = self.flow.posted.get(i.reads[0]) if i.op == "wait" else None
        return post is None or post.i.op != "recv" or self.ledger.is_there(post.i)
