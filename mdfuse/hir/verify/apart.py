"""Tell loops whose iterations touch nothing in common, so that one of them stands for all.

    for %i in 0..8 {                                  %x.i     a chunk of its own
      %x.i: … chunk(0,8,%i) = chunk(%x)               %t.i     a buffer of its own
      set_stream 0                             ->     %w       only read
      %t.i = matmul(%x.i, %w)                         %g       added up on one stream
      %g = accumulate(%t.i)
      free %x.i, %t.i                                 nothing is left for the next iteration
    }

What two iterations do to a buffer is then in order whatever stands between them: they touch other
parts of it, or only read it, or all that touch it do so on one stream and in one part of the loop.
An iteration finds what was there before the loop, and nothing of the one before it; what comes
behind the loop finds the same of each. So the iterations can be written as one, with the chunks of
all of them.

Where `next` divides the loop, the iterations that are written take turns as all of them do. What
orders accesses (streams, syncs, posts and waits) is the same in each iteration, since branches
hold none of it: so whatever these few put in order, any iterations as far from each other do, too.
Where branches differ, iterations are written as one for each run of them that is alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mdfuse.extents.expressions import Term, terms
from mdfuse.hir.instructions import BLOCKS, POSTS, is_local, received, row_of
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.storage import shared_operand, storage
from mdfuse.hir.verify.layouts import chunk_of

#: Instructions that touch no buffer.
_IDLE = ("sync", "barrier", "group_start", "group_end")

#: Those that are not looked at: what they do depends on more than the iteration.
_NEVER = (*BLOCKS, "call", "launch", "get_stream", "return")


class _Use(NamedTuple):
    """What an instruction does to memory from outside of the loop.

    Attributes:
        name: by which name.
        i: the instruction.
        how: "bind" a part of it to a name, "read", "write", "add" a part of a sum; "sent" or
            "received" by a communication, which is on no stream.
        stream: what switched to the current stream.
        part: of the loop, which `next` divides.
    """

    name: str
    i: Instruction
    how: str
    stream: Hashable
    part: int


@dataclass
class Memory:
    """Which names of a program stand for the same memory, found when it is asked for.

    Attributes:
        program: whose instructions and aliases are looked at.
    """

    program: HostProgram

    @cached_property
    def shared(self) -> dict[str, str]:
        """Name -> the name whose memory it may share."""
        return storage(self.program)

    @cached_property
    def ambiguous(self) -> frozenset[str]:
        """Names that may stand for other memory than `shared` says."""
        return _ambiguous(self.program, self.shared)


def are_apart(
    program: HostProgram, loop: Instruction, own: Collection[str], shared: Mapping[str, str]
) -> bool:
    """Return whether iterations of a loop are sure to have nothing to do with each other.

    Args:
        program: a projection.
        loop: one whose parts set their stream before they do any work, and depend on the index by
            branches and by chunks alone, which are one chunk and another one in each iteration.
        own: the names that belong to an iteration.
        shared: name -> the name whose memory it may share.
    """
    if program.aliases or not {*own}.isdisjoint((*program.inputs, *program.outputs)):
        return False
    body = _Body(program, Term("index", loop.outputs[0]), {*own}, shared)
    return all(map(body.is_followed, loop.body)) and not body.left and body.is_ordered()


def _ambiguous(program: HostProgram, shared: Mapping[str, str]) -> frozenset[str]:
    """Return the names that may stand for other memory than they are said to share.

    An instruction may bind them to that; or they are views of such.
    """
    views = [*_views(program)]
    found = {n for n, of in views if shared.get(n, n) != shared.get(of, of)}
    more = found
    while more:
        more = {n for n, of in views if of in more} - found
        found |= more
    return frozenset(found)


def _views(program: HostProgram) -> Iterator[tuple[str, str]]:
    """Yield (name, operand) where a name may be bound to an operand's memory.

    Not where it surely has a buffer, since outside of all blocks it was bound: that is written.
    What stands in a named block runs where it is called.
    """
    root, inside = program.root, (j for i in program.instructions for j in (*i.body, *i.orelse))
    freed = {root(n) for top in inside for i in top.walk() if i.op == "free" for n in i.reads}
    bound = {*map(root, program.inputs)}
    for top in program.instructions:
        for i in top.walk():
            operand = shared_operand(i)
            if operand is not None:
                is_here, made = top.op != "block", map(root, i.outputs)
                yield from ((n, root(operand)) for n in made if not (is_here and n in bound))
        if top.op == "free":
            bound.difference_update(map(root, top.reads))
        elif not top.body:
            bound.update(n for n in map(root, top.outputs) if n not in freed)


@dataclass(slots=True)
class _Body:
    """A walk over the body of a loop, in order.

    Attributes:
        program: a projection.
        index: of the loop.
        own: the names that belong to an iteration.
        shared: name -> the name whose memory it may share.
        stream: what switched to the current stream.
        part: of the loop, which `next` divides.
        made: own names that were made.
        left: those of them that have a buffer, and handles that are not waited for.
        ended: those that were freed or waited for.
        uses: memory from outside of the loop -> what is done to it.
    """

    program: HostProgram
    index: Term
    own: set[str]
    shared: Mapping[str, str]
    stream: Hashable = None
    part: int = 0
    made: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    uses: dict[str, list[_Use]] = field(default_factory=lambda: defaultdict(list))

    def is_followed(self, i: Instruction) -> bool:
        """Note what an instruction does; return whether it is one of which that is known."""
        if i.op == "if":
            return all(map(self.is_followed_inside, (*i.body, *i.orelse)))
        if i.op in _NEVER or not self.ended.isdisjoint(i.outputs):
            return False
        if i.op == "next":
            self.part += 1
        elif i.op == "set_stream":
            self.stream = i.attrs, i.inputs
        elif i.op in ("free", "wait"):
            if i.attrs or not self.left.issuperset(i.inputs):
                return False  # it ends what is of no iteration, or a piece
            self.left.difference_update(i.reads)
            self.ended.update(i.reads)
        elif i.op == "alloc":
            if not self.own.issuperset(i.outputs):
                return False
            self.make(i)
        elif i.op in POSTS:
            into = received(i)
            for name in i.reads:
                self.use(name, i, "received" if name in into else "sent")
            self.left.update(i.outputs)
        elif i.op not in _IDLE:
            self.compute(i)
        return True

    def is_followed_inside(self, i: Instruction) -> bool:
        """Note what an instruction of a branch does, which orders nothing and binds no name."""
        is_plain = is_local(i) and i.op not in ("accumulate", *_NEVER)
        if not is_plain or not self.ended.isdisjoint(i.outputs):
            return False
        if not self.made.issuperset(self.own.intersection(i.outputs)):
            return False
        self.compute(i)
        return True

    def compute(self, i: Instruction) -> None:
        """Note what a local op does; a view whose result has no buffer yet is bound."""
        row = row_of(i)
        is_new = self.own.issuperset(i.outputs) and self.made.isdisjoint(i.outputs)
        binds = row is not None and row.is_view and is_new
        for name in i.reads:
            self.use(name, i, "bind" if binds and name not in self.own else "read")
        for name in () if binds else i.outputs:
            self.use(name, i, "add" if i.op == "accumulate" else "write")
        self.make(i)

    def make(self, i: Instruction) -> None:
        self.made.update(i.outputs)
        for name in self.own.intersection(i.outputs):
            kind = self.program.types.get(name)
            if kind is not None and kind.layout is not None:
                self.left.add(name)

    def use(self, name: str, i: Instruction, how: str) -> None:
        memory = self.shared.get(name, name)
        if memory not in self.own:
            self.uses[memory].append(_Use(name, i, how, self.stream, self.part))

    def is_ordered(self) -> bool:
        """Return whether any two iterations are in order wherever both touch the same memory."""
        return all(map(self.is_safe, self.uses.values()))

    def is_safe(self, uses: list[_Use]) -> bool:
        """Return whether all iterations may do this to some memory."""
        hows = {use.how for use in uses}
        if hows <= {"bind", "read", "sent"}:
            return True
        bound = [use for use in uses if use.how == "bind"]
        if bound:  # by one chunk, through which all else touches it
            is_through = all(use.how == "bind" or use.name in self.own for use in uses)
            return is_through and len(bound) == 1 and self.is_chunk(bound[0].i)
        if "add" in hows:
            return len(uses) == 1  # it is not complete before the last iteration
        is_posted = not hows <= {"read", "write"}
        return not is_posted and len({(use.stream, use.part) for use in uses}) == 1

    def is_chunk(self, i: Instruction) -> bool:
        """Return whether an instruction takes another chunk of a whole buffer in each iteration."""
        types = self.program.types
        after, before = (types[n].layout for n in (i.outputs[0], i.reads[0]))
        if i.op != "chunk" or after is None or before is None or chunk_of(before) is not None:
            return False
        chunk = chunk_of(after)
        return chunk is not None and chunk.op is None and self.index in terms(chunk.index)
