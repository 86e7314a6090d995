"""Which terms of a sum each buffer holds, where ranks send such terms to each other.

    %p: … (tp=P(sum), chunk(0,4,…))         each rank's term of some rows
    send %p, recv %r: … (tp=S0)             %r: the term of the rank before, {3}
    %y = add(%y, %r)                        {1, 2} and {3}: {1, 2, 3}, each once
    return %y                               refused: the term of rank 0 is missing

Terms are named by the ranks that they come from. Where each rank sends as far along an axis as it
receives from, what one rank sends stands for what it receives, that far away; else the programs of
all ranks are gone through together (`terms_of_ranks.py`). A buffer that varies holds anything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from mdfuse.extents.expressions import resolve
from mdfuse.hir.instructions import TRANSFERS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify import refusals
from mdfuse.hir.verify.held_terms import Held, Unclear
from mdfuse.hir.verify.memory import Terms, View
from mdfuse.hir.verify.spaces import Space
from mdfuse.layouts.layout import IDEMPOTENT, Layout, Partial, Varies


def has_terms(program: HostProgram) -> bool:
    """Return whether ranks may send each other terms of a Partial value."""
    names = {n for i in program.walk() if i.op in TRANSFERS for n in i.reads}
    if names and any(i.op == "own" for i in program.walk()):
        return True
    layouts = (program.types[program.root(n)].layout for n in names if n in program.types)
    return any(k is not None and k.partial_axes for k in layouts)


class Sent(NamedTuple):
    """What is on its way: the name of the buffer, its layout, and the terms; None: the usual."""

    name: str
    layout: Layout
    terms: Terms | None
    by: Instruction


@dataclass
class Ledger(Held):
    """Follows the terms in one rank's buffers, for a rank that stands for all.

    Attributes:
        sent: channel -> what was sent, in order.
        taken: channel -> how many receives there were.
        tickets: handle of a receive -> its channel, and its number there.
    """

    sent: dict[object, list[Sent]] = field(default_factory=lambda: defaultdict(list))
    taken: dict[object, int] = field(default_factory=lambda: defaultdict(int))
    tickets: dict[str, tuple[object, int]] = field(default_factory=dict)

    def begin(self, i: Instruction, read: list[tuple[str, View]]) -> None:
        """Note that a communication begins, and what it reads."""
        for name, view in read:
            if i.op == "send":
                self.send(i, view)
            else:
                self.claim(name, view, i)
        if i.op == "recv":
            self.recv(i)

    def finish(self, i: Instruction, view: View) -> None:
        """Note what a communication wrote, now that it is waited for."""
        if i.op == "recv":
            self.arrived(i, view)
        else:
            self.note(i.reads[-1], view, None)

    def send(self, i: Instruction, view: View) -> None:
        (name,) = i.reads
        layout, terms = self.layout(name), self.held(name, view, i)
        terms = None if self.is_usual(layout, terms) else terms
        self.sent[self.channel(i)].append(Sent(name, layout, terms, i))

    def recv(self, i: Instruction) -> None:
        channel = self.channel(i)
        self.tickets[i.outputs[0]] = channel, self.taken[channel]
        self.taken[channel] += 1

    def channel(self, i: Instruction) -> object:
        """Return what a send and the receive that it meets have in common.

        That is how far it goes: (mesh, axis, distance, how much farther in each next iteration that
        an instruction stands for, how many).
        """
        layout = self.layout(i.reads[0])
        axis, far = self.distance(i, layout)
        step, count = self.turns(i)
        if i.op == "recv":
            far, step = -far, -step
        n = layout.mesh.axis_size(axis) if axis is not None else 1
        if far % n == 0 and count == 1:
            return "own"
        return layout.mesh, axis, far % n, step % n, count

    def turns(self, i: Instruction) -> tuple[int, int]:
        found = i.kwargs.get("turns", (0, 1))
        if found is None:
            raise Unclear(f"{i} goes to ranks that are not counted")
        step, count = found
        return step, count

    def distance(self, i: Instruction, layout: Layout) -> tuple[str | None, int]:
        """Return the axis along which a transfer goes, and how far its peer is away."""
        mesh, attrs = layout.mesh, i.kwargs
        here = mesh.coordinate(self.rank)
        peer = attrs["to" if i.op == "send" else "from"]
        assert here is not None
        if "axis" in attrs:
            at = mesh.axis_index(attrs["axis"])
            position = resolve(peer, self.program.knows(self.rank, mesh))
            assert isinstance(position, int)
            return attrs["axis"], position - here[at]
        there = mesh.coordinate(peer)
        assert there is not None
        other = [at for at, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]
        return (mesh.axes[other[0]], there[other[0]] - here[other[0]]) if other else (None, 0)

    def is_there(self, i: Instruction) -> bool:
        """Return whether what a receive waits for was sent."""
        channel, number = self.tickets[i.outputs[0]]
        return number < len(self.sent[channel])

    def arrived(self, i: Instruction, view: View) -> None:
        """Note what a receive brought, now that it is waited for."""
        channel, number = self.tickets[i.outputs[0]]
        found = self.sent[channel]
        if number >= len(found):
            if id(i) in self.repeated or self.repeated:
                raise Unclear(f"{i} meets another send")
            return  # nothing answers, or ranks wait for each other: that is refused by itself
        (name,) = i.reads
        terms = self.received(i, channel, found[number], self.layout(name))
        self.check_layers(found[number], i, terms)
        self.note(name, view, terms)

    def check_layers(self, sent: Sent, i: Instruction, terms: Terms | None) -> None:
        pair = {self.layers.get(n.split("@")[0]) for n in (*sent.by.outputs, *i.outputs)}
        if len(pair - {None}) > 1:
            raise Unclear(f"{i} receives what another layer sent")

    def received(self, i: Instruction, channel: object, sent: Sent, layout: Layout) -> Terms | None:
        """Return the terms that arrive in a buffer of a layout; None: those that it says."""
        space = self.spaces.get(sent.layout.mesh)
        if space is None:
            return None
        if layout.mesh != sent.layout.mesh:
            if sent.layout.partial_axes and not (layout.partial_axes or layout.varying_axes):
                raise refusals.other_mesh(self.program, i, str(sent.layout), str(layout))
            return None
        held = sent.terms.held if sent.terms is not None else self.usual_there(sent, channel)
        is_spread = isinstance(channel, tuple) and len(channel) == 5 and channel[4] > 1
        if is_spread and sent.terms is not None:
            raise Unclear(f"{i} receives terms of several iterations")
        held = self.moved(space, held, channel)
        return self.fitted(i, space, sent, layout, held, is_spread)

    def usual_there(self, sent: Sent, channel: object) -> int:
        """Return the terms of a buffer of the sender's layout, by its own place."""
        return self.usual(sent.layout)

    def moved(self, space: Space, held: int, channel: object) -> int:
        """Return what another rank holds, by this rank's place, of all that it sends at once."""
        if not isinstance(channel, tuple):
            return held
        _, axis, far, step, count = channel
        if axis not in space.axes:
            return held
        n = space.size(axis)
        if count > 1 and count > n // math.gcd(step, n):
            raise Unclear("a term comes twice")
        return space.swept(held, axis, -far, -step, count)

    def fitted(
        self,
        i: Instruction,
        space: Space,
        sent: Sent,
        layout: Layout,
        held: int,
        is_spread: bool,
    ) -> Terms | None:
        """Return what arrives, given the layouts of both buffers, axis by axis."""
        ops: set[str] = set()
        for axis in space.axes:
            p, q = sent.layout.placement(axis), layout.placement(axis)
            if isinstance(p, Varies) or isinstance(q, Varies):
                held = space.filled(held, axis)
            elif isinstance(q, Partial) and isinstance(p, Partial):
                if p.op != q.op:
                    raise refusals.other_terms(self.program, i, str(p), str(q))
                if sent.terms is None and self.stands_still(i, sent):
                    held = space.put(held, axis, self.rank)
                ops.add(q.op)
            elif isinstance(q, Partial):
                is_same = self.program.types[i.reads[0]].shape == self.shape(sent)
                if q.op in IDEMPOTENT or not is_same:
                    held = space.put(held, axis, self.rank)
                ops.add(q.op)
            elif isinstance(p, Partial):
                ops.add(p.op)
        ops |= {sent.terms.op} if sent.terms is not None else set()
        if held == self.usual(layout) and not is_spread:
            return None
        if not ops:
            return None
        if len(ops) > 1:
            raise refusals.other_terms(self.program, i, *(f"P({op})" for op in sorted(ops)[:2]))
        is_spread = is_spread and held != self.usual(sent.layout)
        return Terms(ops.pop(), held, is_spread)

    def shape(self, sent: Sent) -> tuple[int, ...]:
        return self.program.types[sent.name].shape

    def stands_still(self, i: Instruction, sent: Sent) -> bool:
        """Return whether all ranks send the same part: then each has a term of it afterwards."""
        return sent.layout.stream == self.layout(i.reads[0]).stream
