"""Let a rank compute its own part of a sum where the sum is, in what is written out.

What comes first is computed in the sum's buffer:

    %p = alloc                                      %p = own(%y)
    %p = matmul(%x, %w)                             %p = matmul(%x, %w)
    set_stream 1                                    set_stream 1
    sync 0                                  ->      sync 0
    %c0 = send(%p, to=me)                           free %p
    %c1 = recv(%y, from=me)
    wait %c0
    wait %c1
    free %p

What comes last adds to what is there as it is computed, so that the sum costs no kernel and is
rounded once:

    wait %c1@0                                      set_stream 0
    set_stream 0                                    wait %c1@0
    %p = alloc                                      %y = addmm(%y, %x, %w)
    %p = matmul(%x, %w)                             set_stream 1
    set_stream 1                                    sync 0
    sync 0
    %got = alloc                            ->
    %c0 = send(%p, to=me)
    %c1 = recv(%got, from=me)
    wait %c1
    %y = add(%y, %got)
    free %got
    wait %c0
    free %p

Only a product that stands behind all that was added before: another one would wait for what
arrives, and hide nothing. Where other parts were added before, it waits for the stream of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mdfuse.hir.instructions import POSTS
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.regions import VIEWS, Regions
from mdfuse.hir.verify.products import own_problem

#: Products that can add to a buffer as they write.
_PRODUCTS = ("matmul", "linear")


@dataclass(frozen=True, slots=True)
class _Own:
    """What a rank sends to itself: where its instructions stand.

    Attributes:
        part, got: what is sent, and the name that it is received as.
        alloc: where what is sent gets a buffer; None: where it is computed.
        made: where it is computed.
        group: where the group of both transfers begins.
        waits: where they are waited for.
    """

    part: str
    got: str
    alloc: int | None
    made: int
    group: int
    waits: tuple[int, ...]

    @property
    def transfers(self) -> tuple[int, ...]:
        """Where all stands that goes with the transfers."""
        return (*range(self.group, self.group + 4), *self.waits)


@dataclass(slots=True)
class _Changes:
    """What stands in the place of instructions, names that nothing frees any more, new types."""

    rows: dict[int, list[Instruction]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    types: dict[str, BufferType] = field(default_factory=dict)


def run(program: HostProgram) -> HostProgram:
    """Return a projection that is written out, whose own parts are computed where sums are."""
    sends = [n for n, i in enumerate(program.instructions) if _is_own(i, "to", program.rank)]
    if not sends:
        return program
    walk, found = _Walk(program), _Changes()
    for n in sends:
        own = walk.own(n)
        if own is not None and not walk.land(own, found):
            walk.add(own, found)
    kept: list[Instruction] = []
    for n, i in enumerate(program.instructions):
        kept += found.rows.get(n, _without(i, found.gone))
    types = {**program.types, **found.types}
    return replace(program, instructions=tuple(kept), types=types) if found.rows else program


def _is_own(i: Instruction, side: str, rank: int | None) -> bool:
    return i.op in ("send", "recv") and i.kwargs.get(side) == rank


def _without(i: Instruction, gone: set[str]) -> list[Instruction]:
    if i.op != "free" or gone.isdisjoint(i.reads):
        return [i]
    left = tuple(x for x in i.reads if x not in gone)
    return [i.changed(inputs=left)] if left else []


class _Walk(Regions):
    """A projection that is written out: where names are used, and on which streams."""

    def __init__(self, program: HostProgram) -> None:
        super().__init__(program)
        #: the instruction that switched to the stream of each one
        self.streams: list[Instruction | None] = []
        current: Instruction | None = None
        for i in self.code:
            current = i if i.op == "set_stream" else current
            self.streams.append(current)

    def ops(self, name: str) -> list[str]:
        return [self.code[n].op for n in self.uses[name]]

    def own(self, send: int) -> _Own | None:
        """Return what a rank sends to itself, if that is for nothing else."""
        group = self.code[send - 1 : send + 3]
        if [i.op for i in group] != ["group_start", "send", "recv", "group_end"]:
            return None
        (part,), (got,) = group[1].reads, group[2].reads
        if not _is_own(group[2], "from", self.rank) or self.program.root(part) != part:
            return None
        uses, ops = self.uses[part], self.ops(part)
        is_made = len(ops) in (3, 4) and ops[-2:] == ["send", "free"]
        if not is_made or (len(ops) == 4 and ops[0] != "alloc") or not self.are_alike(part, got):
            return None
        made = self.code[uses[-3]]
        if made.op in (*POSTS, *VIEWS, "narrow", "alloc") or part not in made.outputs:
            return None
        waits = [n for i in group[1:3] for n in self.uses[i.outputs[0]][1:]]
        alloc = uses[0] if len(ops) == 4 else None
        return _Own(part, got, alloc, uses[-3], send - 1, tuple(waits))

    def are_alike(self, a: str, b: str) -> bool:
        x, y = self.program.types[a], self.program.types[b]
        return x.dtype == y.dtype and x.local_shape(self.rank) == y.local_shape(self.rank)

    def touched(self, into: str) -> Iterator[int]:
        """Yield where the memory of a name is read or written, until that is surely over."""
        for n, name in self.of_memory[self.memory(into)]:
            i = self.code[n]
            if (i.op in ("alloc", *VIEWS) and "fill" not in i.kwargs) or not self.meet(into, name):
                continue
            yield n
            if i.op in POSTS:
                yield from self.uses[i.outputs[0]][1:] or [len(self.code)]

    def bound(self, into: str, before: int) -> tuple[int, ...] | None:
        """Return where views are bound that may be bound before a place, so that a name is there.

        None: it cannot be there. What is bound before that anyway is left out.
        """
        found: list[int] = []
        while True:
            made = [self.code[n] for n in self.uses[into] if into in self.code[n].outputs]
            first = self.uses[into][0]
            if sum(i.op in ("alloc", *VIEWS) for i in made) > 1:
                return None
            if first < before:
                return tuple(reversed(found))
            if made[0].op not in VIEWS:
                return None
            found.append(first)
            into = self.code[first].reads[0]

    def synced(self, at: int, other: int) -> list[Instruction]:
        """Return what makes the stream of one instruction wait for that of another."""
        here, there = self.streams[at], self.streams[other]
        if here is there or there is None or (here is not None and _is_same(here, there)):
            return []
        return [replace(there, op="sync")]

    # -- what comes first ------------------------------------------------------------------------

    def land(self, own: _Own, found: _Changes) -> bool:
        """Let what a rank computes be computed where it is received, and tell whether it may."""
        into, types = own.got, self.program.types
        begin = own.made if own.alloc is None else own.alloc
        if own_problem(types[into], types[own.part], self.rank) is not None:
            return False
        bound = self.bound(into, begin)
        ends = (own.group, own.group + 4)
        mine = {*range(*ends), *own.waits}
        touched = (n for n in self.touched(into) if n not in mine and self.code[n].op != "free")
        is_new = all(n > own.group for n in touched)
        is_given = self.memory(into) in self.program.inputs
        if bound is None or not is_new or is_given or not self.is_ready(into, own.made):
            return False
        view = Instruction(
            op="own", inputs=(into,), outputs=(own.part,), source=self.code[begin].source
        )
        first = [*(self.code[n] for n in bound), view]
        found.rows.update((n, []) for n in bound)
        found.rows.update((n, []) for n in own.transfers)
        last, synced = self.code[own.group - 1], self.synced(own.group, own.made)
        is_synced = [(i.op, i.inputs, i.attrs) for i in synced] == [
            (last.op, last.inputs, last.attrs)
        ]
        found.rows[own.group] = [] if is_synced else synced
        found.rows[begin] = first if own.alloc is not None else [*first, self.code[begin]]
        return True

    def is_ready(self, into: str, made: int) -> bool:
        """Tell whether an instruction's stream has waited for what the memory was made on."""
        alloc = self.uses[self.memory(into)][0]
        syncs = (n for n in range(alloc, made) if self.code[n].op == "sync")
        return not self.synced(made, alloc) or any(not self.synced(made, n) for n in syncs)

    # -- what comes last -------------------------------------------------------------------------

    def add(self, own: _Own, found: _Changes) -> None:
        """Let a product add to what is there, if all that is added before is there."""
        if self.ops(own.got) != ["alloc", "recv", "binary", "free"]:
            return
        alloc, _, at, _ = self.uses[own.got]
        product, sum_ = self.code[own.made], self.code[at]
        (into,) = sum_.outputs
        if sum_.fn != "add" or sum_.inputs != (into, own.got) or sum_.order is not None:
            return
        bound = self.bound(into, own.made)
        if not self.is_product(product, into) or bound is None or not self.is_there(into, own, at):
            return
        if self.streams[own.made] is None is not self.streams[at]:
            return
        gone = [*own.transfers, alloc, *([own.alloc] if own.alloc is not None else [])]
        found.rows.update((n, []) for n in gone)
        found.gone |= {own.part, own.got}
        views = [self.code[n] for n in bound]
        found.rows.update((n, []) for n in bound)
        added = self.added(product, own.part, into, found.types)
        found.rows[own.made] = [*views, *self.arrived(into, own.made, at, found), *added]
        found.rows[at] = self.synced(at, own.made)

    def arrived(self, into: str, made: int, add: int, found: _Changes) -> list[Instruction]:
        """Return what a product does first: it waits for what arrives in the buffer, if that is all
        that is there, and else for the stream on which sums are added."""
        touched = [n for n in dict.fromkeys(self.touched(into)) if self.code[n].op != "free"]
        before = [n for n in touched if n < made]
        if [self.code[n].op for n in before] != ["recv", "wait"]:
            return self.synced(made, add)
        recv, wait = before
        (name,) = self.code[recv].reads
        frees = [n for n in self.uses[name] if wait < n < made]
        if any(self.code[n].op != "free" for n in frees):
            return self.synced(made, add)
        found.rows[wait] = []
        for n in frees:
            found.rows[n] = [
                j for i in found.rows.get(n, [self.code[n]]) for j in _without(i, {name})
            ]
        return [self.code[wait], *(Instruction(op="free", inputs=(name,)) for _ in frees)]

    def is_product(self, i: Instruction, into: str) -> bool:
        """Tell whether an instruction is a product of matrices that has the type of a sum."""
        if i.op not in _PRODUCTS or len(i.inputs) != 2 or i.attrs:
            return False
        types = self.program.types
        is_plain = i.order is None or list(i.order) == list(range(len(i.order)))
        kinds = [types[x] for x in (*i.reads, into)]
        return (
            is_plain and len({k.dtype for k in kinds}) == 1 and min(len(k.shape) for k in kinds) > 1
        )

    def is_there(self, into: str, own: _Own, add: int) -> bool:
        """Tell whether a buffer has all that is added before when the product is computed."""
        before = [n for n in self.touched(into) if n < add]
        return bool(before) and max(before) < own.made

    def added(
        self, i: Instruction, part: str, into: str, types: dict[str, BufferType]
    ) -> list[Instruction]:
        """Return the product that adds, behind a view of its weight where that is transposed."""
        a, b = i.reads
        made = Instruction(op="addmm", inputs=(into, a, b), outputs=(into,), source=i.source)
        if i.fn == "matmul":
            return [made]
        kind, name = self.program.types[b], f"{part}.weight"
        assert kind.layout is not None
        layout = kind.layout.permuted((1, 0))
        types[name] = replace(kind, shape=kind.shape[::-1], layout=layout)
        attrs = (("dims", (1, 0)),)
        view = Instruction(
            op="permute", fn="permute", inputs=(b,), outputs=(name,), attrs=attrs, source=i.source
        )
        free = [Instruction(op="free", inputs=(name,))] if self.program.has_frees else []
        return [view, replace(made, inputs=(into, a, name)), *free]


def _is_same(a: Instruction, b: Instruction) -> bool:
    """Return whether two instructions switch to one stream."""
    return (a.inputs, a.attrs) == (b.inputs, b.attrs)
