"""Memory over time: which buffers a rank holds at each instruction of its program.

The count follows the program: inputs from the start, each value from its binding to its free, views
with their base. It knows neither values of a plan that share memory, nor memory of libraries.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from mdfuse.hir.analysis.clobbers import updated_names
from mdfuse.hir.analysis.dataflow import shared_operand
from mdfuse.hir.orders import Dims, seen_through
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import as_run
from mdfuse.names import base_name
from mdfuse.seeing.amounts import buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A buffer's time on a rank.

    Attributes:
        name: the value that it was made for.
        nbytes: how large it is.
        first: the number of the instruction that makes it; -1 for an input.
        last: that of the one that frees it; their count where none does.
        is_input: whether the caller passed it.
    """

    name: str
    nbytes: int
    first: int
    last: int
    is_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The bytes that a rank holds over time.

    Attributes:
        rank: which rank.
        lives: its buffers, in the order in which they are made.
        bytes: held in front of the first instruction, then behind each.
        peak: the most bytes that it holds at once.
        peak_at: the number of the instruction behind which that is; -1: from the start.
    """

    rank: int
    lives: tuple[Life, ...]
    bytes: tuple[int, ...]
    peak: int
    peak_at: int

    @property
    def staging(self) -> int:
        """The most bytes held at once that are neither passed by the caller nor returned."""
        count = len(self.bytes) - 1
        freed = tuple(x for x in self.lives if not x.is_input and x.last < count)
        return max(_held(freed, count))


def memory_of(local: HostProgram) -> Memory:
    """Return what a rank holds over time.

    Args:
        local: the projection onto the rank.

    Raises:
        ProgramError: its loops cannot be written out.
    """
    assert local.rank is not None
    flat = as_run(local)
    live = _Live(flat)
    for name in flat.inputs:
        live.bind(name, -1)
    for n, i in enumerate(flat.instructions):
        live.run(n, i)
    lives = tuple(sorted(live.finish(len(flat.instructions)), key=lambda x: x.first))
    held = _held(lives, len(flat.instructions))
    peak = max([*held, *live.inside.values()])
    behind = {n: max(size, held[n + 1]) for n, size in live.inside.items()}
    at = next(n for n in range(-1, len(held) - 1) if behind.get(n, held[n + 1]) == peak)
    return Memory(rank=local.rank, lives=lives, bytes=held, peak=peak, peak_at=at)


def _held(lives: tuple[Life, ...], count: int) -> tuple[int, ...]:
    changes = [0] * (count + 2)
    for life in lives:
        changes[life.first + 1] += life.nbytes
        changes[life.last + 1] -= life.nbytes
    return tuple(accumulate(changes[: count + 1]))


@dataclass
class _Live:
    """The users of each memory, while one goes through a straight program."""

    program: HostProgram
    #: name -> the memory that it stands for: the name that it was made for
    memory: dict[str, str] = field(default_factory=dict)
    #: name -> from outermost to innermost dim, where its elements lie without gaps
    dense: dict[str, Dims | None] = field(default_factory=dict)
    #: memory -> the names in use that stand for it
    users: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    born: dict[str, tuple[int, bool]] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    #: instruction -> most bytes inside it
    inside: dict[int, int] = field(default_factory=dict)
    now: int = 0

    @cached_property
    def updated(self) -> frozenset[str]:
        """Names that would share memory that is written again: copied where an order is asked."""
        return updated_names(self.program)

    def bytes(self, name: str) -> int:
        return buffer_bytes(self.program, name)

    def bind(self, name: str, n: int, i: Instruction | None = None) -> None:
        """Note that a name stands for memory from an instruction on; without one, for an input."""
        if name in self.memory or not self.bytes(name):
            return  # what has a buffer is written there
        operand = shared_operand(i) if i is not None else None
        rows = tuple(range(len(self.program.types[name].local_shape())))
        self.dense[name] = rows if i is None or i.order is None else i.order
        of = name
        if i is not None and operand in self.memory:
            lies = _seen(i, self.dense.get(operand), self.program)
            is_same = i.op != "pad" or self.bytes(name) == self.bytes(operand)
            needs = rows if i.op in ("pad", "reshape") else i.order
            is_kept = i.order is None or name not in self.updated
            if is_same and is_kept and needs in (None, lies):
                of, self.dense[name] = self.memory[operand], lies
        self.memory[name] = of
        if not self.users[of]:
            self.born[of] = n, i is None
            self.now += self.bytes(of)
        self.users[of].add(name)

    def drop(self, name: str, n: int) -> None:
        """Note that nothing uses a name any more."""
        of = self.memory.pop(name, None)
        if of is None:
            return
        self.users[of].discard(name)
        if not self.users[of]:
            self.now -= self.bytes(of)
            self.end(of, n)

    def end(self, of: str, n: int) -> None:
        first, is_input = self.born.pop(of)
        name, size = base_name(of), self.bytes(of)
        self.lives.append(Life(name=name, nbytes=size, first=first, last=n, is_input=is_input))

    def run(self, n: int, i: Instruction) -> None:
        if i.op == "free":
            for name in i.reads:
                self.drop(name, n)
        elif i.op == "launch":
            self.unit(n, i)
        else:
            for name in i.outputs:
                self.bind(name, n, i)

    def unit(self, n: int, i: Instruction) -> None:
        """Go through a host unit; what only it reads is dropped behind its last use.

        Products that add to a sum come behind all else, and so hold what they read till then.
        """
        late = {x for j in i.body if j.op == "addmm" for x in j.reads}.difference(
            i.outputs, i.reads
        )
        outer = {*i.outputs, *i.reads, *late}
        last = {name: at for at, j in enumerate(i.body) for name in (*j.reads, *j.outputs)}
        most = self.now
        for at, j in enumerate(i.body):
            for name in j.outputs:
                self.bind(name, n, j)
            most = max(most, self.now)
            for name in [x for x, end in last.items() if end == at and x not in outer]:
                self.drop(name, n)
        for name in sorted(late):
            self.drop(name, n)
        self.inside[n] = most

    def finish(self, count: int) -> list[Life]:
        """End what is held behind the last instruction."""
        for of in [*self.born]:
            self.end(of, count)
        return self.lives


def _seen(i: Instruction, lies: Dims | None, program: HostProgram) -> Dims | None:
    """Return the memory order of a view of a value in some order; None where it has gaps."""
    if lies is None:
        return None
    if i.op == "permute":
        return seen_through(i, lies)
    if i.op in ("set", "own", "pad", "unexpand") or (
        i.op == "expand" and len(program.types[i.outputs[0]].local_shape(program.rank)) == len(lies)
    ):
        return lies
    shapes = [program.types[x].local_shape(program.rank) for x in (i.reads[0], i.outputs[0])]
    rows = tuple(range(len(shapes[0])))
    if i.op in ("chunk", "narrow", "select", "slice", "expand"):
        inner = [d for d, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b]
        is_run = len(shapes[0]) == len(shapes[1]) and inner in ([], [*lies[:1]])
        return lies if is_run else None
    return tuple(range(len(shapes[1]))) if lies == rows else None
