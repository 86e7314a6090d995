"""Terms of sums that ranks send each other: which ones each buffer holds.

    %p: … (tp=P(sum), chunk(0,4,…))         each rank's term of some rows
    send %p, recv %r: … (tp=S0)             %r: the term of the rank before, {3}
    %y = add(%y, %r)                        {1, 2} and {3}: {1, 2, 3}, each once
    return %y                               refused: the term of rank 0 is missing

A term has the number of the rank that computed it. If each rank sends as far along an axis as it
receives from, one rank is followed: it receives its own messages, that far away. Otherwise the
programs of all ranks are followed together, through one `Network` (`terms_of_ranks.py`). A buffer
that varies may hold any terms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from mdfuse.extents.expressions import resolve
from mdfuse.hir.instructions import TRANSFERS, received
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify import refusals
from mdfuse.hir.verify.accesses import Terms, View
from mdfuse.hir.verify.held_terms import HeldTerms, Unclear
from mdfuse.hir.verify.spaces import Space
from mdfuse.layouts.layout import IDEMPOTENT, Layout, Partial, Varies
from mdfuse.mesh import DeviceMesh


def has_terms(program: HostProgram) -> bool:
    """Return whether ranks may send each other terms of a Partial value."""
    names = {n for i in program.walk() if i.op in TRANSFERS for n in i.reads}
    if names and any(i.op == "own" for i in program.walk()):
        return True
    layouts = (program.types[program.root(n)].layout for n in names if n in program.types)
    return any(k is not None and k.partial_axes for k in layouts)


class Hop(NamedTuple):
    """The distance that a message goes, on each rank alike.

    Attributes:
        mesh, axis: the axis along which it goes; None where it stays on its rank.
        far: by how many places.
        step: by how many more in each next iteration that an instruction stands for.
        turns: how many iterations these are.
    """

    mesh: DeviceMesh
    axis: str | None
    far: int
    step: int
    turns: int


class Sent(NamedTuple):
    """A message under way.

    Attributes:
        name, layout, shape: of the buffer.
        rank: the sender.
        terms: those in it; None: as the layout says.
        by: the instruction.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    rank: int
    terms: Terms | None
    by: Instruction


#: Buffer, how many messages with terms came before, axis, coordinate along the other axes.
_Arrival = tuple[str, int, str, tuple[int, ...]]


@dataclass
class Network:
    """The messages between all ranks.

    Attributes:
        sent: what a message and its receiver agree on -> the messages, in order.
        moves: terms that ranks send on while the value stays Partial -> (to, from), one per rank.
    """

    sent: dict[object, list[Sent]] = field(default_factory=lambda: defaultdict(list))
    moves: dict[_Arrival, list[tuple[int, int, Instruction, HostProgram]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def check_moves(self) -> None:
        """Raise ProgramError where two ranks have one term of a Partial value, or none has it."""
        for moves in self.moves.values():
            receivers, senders = sorted(m[0] for m in moves), sorted(m[1] for m in moves)
            if receivers != senders:
                _, _, i, program = moves[0]
                raise refusals.NOT_MOVED(program, i, name=i.reads[0])


@dataclass
class Ledger(HeldTerms):
    """Follows the terms in the buffers of one rank.

    Attributes:
        network: the messages of all ranks; None: this rank stands for all, and receives its own.
        sent: the messages, by `channel`.
        taken: channel -> how many receives there were.
        tickets: handle of a receive -> its channel, and its number there.
        arrivals: (buffer, axis) -> how many terms of a value that stays Partial arrived there.
    """

    network: Network | None = None
    taken: dict[object, int] = field(default_factory=lambda: defaultdict(int))
    tickets: dict[str, tuple[object, int]] = field(default_factory=dict)
    arrivals: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sent = (self.network or Network()).sent

    def begin(self, i: Instruction, read: list[tuple[str, View]]) -> None:
        """Note the start of a communication, and what it reads."""
        for name, view in read:
            if i.op == "send":
                self.send(i, view)
            else:
                self.claim(name, view, i)
        if i.op == "recv":
            self.recv(i)

    def finish(self, i: Instruction, view: View) -> None:
        """Note what a communication wrote, after the wait for it."""
        if i.op == "recv":
            self.arrived(i, view)
        else:
            self.note(received(i)[0], view, None)

    def send(self, i: Instruction, view: View) -> None:
        (name,) = i.reads
        layout, terms = self.layout(name), self.held(name, view, i)
        terms = None if self.is_usual(layout, terms) else terms
        shape = self.program.types[name].shape
        self.sent[self.channel(i)].append(Sent(name, layout, shape, self.rank, terms, i))

    def recv(self, i: Instruction) -> None:
        channel = self.channel(i)
        self.tickets[i.outputs[0]] = channel, self.taken[channel]
        self.taken[channel] += 1

    def channel(self, i: Instruction) -> object:
        """Return a key that a send and the receive that it meets have in common.

        With a network: (sender, receiver). Otherwise: the hop, or "own" for a message to itself.
        """
        if self.network is not None:
            rank = self.rank
            return (rank, i.kwargs["to"]) if i.op == "send" else (i.kwargs["from"], rank)
        layout = self.layout(i.reads[0])
        axis, far = self.distance(i, layout)
        turns = i.kwargs.get("turns", (0, 1))
        if turns is None:
            raise Unclear(f"{i} goes to ranks that are not counted")
        step, count = turns
        if i.op == "recv":
            far, step = -far, -step
        n = layout.mesh.axis_size(axis) if axis is not None else 1
        if far % n == 0 and count == 1:
            return "own"
        return Hop(layout.mesh, axis, far % n, step % n, count)

    def distance(self, i: Instruction, layout: Layout) -> tuple[str | None, int]:
        """Return the axis along which a transfer goes, and how many places the peer is away."""
        mesh, attrs = layout.mesh, i.kwargs
        mine = mesh.coordinate(self.rank)
        peer = attrs["to" if i.op == "send" else "from"]
        assert mine is not None
        if "axis" in attrs:
            at = mesh.axis_index(attrs["axis"])
            position = resolve(peer, self.program.knows(self.rank, mesh))
            assert isinstance(position, int)
            return attrs["axis"], position - mine[at]
        its = mesh.coordinate(peer)
        assert its is not None
        apart = [at for at, (a, b) in enumerate(zip(mine, its, strict=True)) if a != b]
        return (mesh.axes[apart[0]], its[apart[0]] - mine[apart[0]]) if apart else (None, 0)

    def is_there(self, i: Instruction) -> bool:
        """Return whether the message of a receive was sent."""
        channel, number = self.tickets[i.outputs[0]]
        return number < len(self.sent[channel])

    def arrived(self, i: Instruction, view: View) -> None:
        """Note the terms that a receive brought, after the wait for it."""
        if not self.is_there(i):
            if self.repeated:
                raise Unclear(f"{i} meets another send")
            return  # nothing answers, or ranks wait for each other: other checks refuse it
        (name,) = i.reads
        channel, number = self.tickets[i.outputs[0]]
        sent = self.sent[channel][number]
        terms = self.received(i, channel, sent, self.layout(name))
        self.note(name, view, terms)

    def received(self, i: Instruction, channel: object, sent: Sent, layout: Layout) -> Terms | None:
        """Return the terms that arrive in a buffer of a layout; None: those that it says."""
        space = self.spaces.get(sent.layout.mesh)
        if space is None:
            return None
        if layout.mesh != sent.layout.mesh:
            if sent.layout.partial_axes and not (layout.partial_axes or layout.varying_axes):
                raise refusals.OTHER_MESH(self.program, i, sent=sent.layout, received=layout)
            return None
        held = sent.terms.held if sent.terms else space.usual(sent.layout, sent.rank)
        is_spread = isinstance(channel, Hop) and channel.turns > 1
        if is_spread and sent.terms is not None:
            raise Unclear(f"{i} receives terms of several iterations")
        if isinstance(channel, Hop) and channel.axis in space.axes:
            held = _moved(space, held, channel)
        return self.fitted(i, space, sent, layout, held, is_spread)

    def fitted(
        self,
        i: Instruction,
        space: Space,
        sent: Sent,
        layout: Layout,
        held: int,
        is_spread: bool,
    ) -> Terms | None:
        """Return the terms that arrive, given the layouts of both buffers, axis by axis."""
        ops: set[str] = set()
        for axis in space.axes:
            p, q = sent.layout.placement(axis), layout.placement(axis)
            if isinstance(p, Varies) or isinstance(q, Varies):
                held = space.filled(held, axis)
            elif isinstance(q, Partial) and isinstance(p, Partial):
                if p.op != q.op:
                    raise refusals.OTHER_TERMS(self.program, i, sent=p, received=q)
                if sent.terms is None and self.stays_partial(i, sent):
                    held = space.put(held, axis, self.rank)
                ops.add(q.op)
            elif isinstance(q, Partial):
                is_same = self.program.types[i.reads[0]].shape == sent.shape
                if q.op in IDEMPOTENT or not is_same:
                    held = space.put(held, axis, self.rank)
                ops.add(q.op)
            elif isinstance(p, Partial):
                ops.add(p.op)
        ops |= {sent.terms.op} if sent.terms is not None else set()
        if not ops or (held == self.usual(layout) and not is_spread):
            return None
        if len(ops) > 1:
            one, other, *_ = (f"P({op})" for op in sorted(ops))
            raise refusals.OTHER_TERMS(self.program, i, sent=one, received=other)
        is_spread = is_spread and held != self.usual(sent.layout)
        return Terms(ops.pop(), held, is_spread)

    def stays_partial(self, i: Instruction, sent: Sent) -> bool:
        """Return whether each rank has one term of the sent value after a transfer.

        All ranks send the same part. A network checks later that no term comes twice.
        """
        (name,) = i.reads
        layout = self.layout(name)
        if self.network is None:
            return sent.layout.stream == layout.stream
        kind = self.program.types.get(sent.name)
        if kind is None or kind.layout is None or kind.layout != sent.layout:
            return False
        mine, its = (layout.mesh.coordinate(r) for r in (self.rank, sent.rank))
        assert mine is not None and its is not None
        for axis in self.spaces[layout.mesh].axes:
            if isinstance(layout.placement(axis), Partial):
                at = layout.mesh.axis_index(axis)
                key = name, self.arrivals[name, axis], axis, (*mine[:at], *mine[at + 1 :])
                self.arrivals[name, axis] += 1
                self.network.moves[key].append((mine[at], its[at], i, self.program))
        return True


def _moved(space: Space, held: int, hop: Hop) -> int:
    """Return the places of terms after a hop, all of those that arrive at once."""
    n = space.size(str(hop.axis))
    if hop.turns > 1 and hop.turns > n // math.gcd(hop.step, n):
        raise Unclear("a term comes twice")
    return space.swept(held, str(hop.axis), -hop.far, -hop.step, hop.turns)
