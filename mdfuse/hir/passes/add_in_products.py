"""Let a rank's own product add to what arrived as it writes, in what is written out.

    wait %c1@0                                      wait %c1@0
    %p = alloc                                      set_stream 0
    %p = matmul(%x, %w)                             sync 1
    set_stream 1                                    %y = addmm(%y, %x, %w)
    sync 0                                 ->       set_stream 1
    %got = alloc                                    sync 0
    %c0 = send(%p, to=me)
    %c1 = recv(%got, from=me)
    wait %c1
    %y = add(%y, %got)
    free %got
    wait %c0
    free %p

So the sum costs no kernel, and is rounded once. Only where the product stands behind all that was
added before: it would wait for what arrives, and hide nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mdfuse.hir.instructions import POSTS
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.storage import storage
from mdfuse.layouts.boxes import intersect

#: Products that can add to a buffer as they write.
_PRODUCTS = ("matmul", "linear")


@dataclass(frozen=True, slots=True)
class _Sum:
    """Where the instructions stand of a product that a rank sends to itself and adds.

    Attributes:
        product, add: where they stand.
        gone: where all instructions stand that go.
        part, got: what is computed, and what arrives of it.
        view: where the sum's buffer is bound, if that is a view behind the product.
    """

    product: int
    add: int
    gone: tuple[int, ...]
    part: str
    got: str
    view: int | None


def run(program: HostProgram) -> HostProgram:
    """Return a projection that is written out, whose own products add as they write."""
    code = program.instructions
    if not any(i.op == "send" and i.kwargs["to"] == program.rank for i in code):
        return program
    walk = _Walk(program)
    found = [*walk.sums()]
    if not found:
        return program
    types = dict(program.types)
    rows: dict[int, list[Instruction]] = {}
    gone: set[str] = set()
    for x in found:
        rows.update((n, []) for n in x.gone)
        gone |= {x.part, x.got}
        made = walk.added(x, types)
        view = [code[x.view]] if x.view is not None else []
        if x.view is not None:
            rows[x.view] = []
        here, there = walk.streams[x.product], walk.streams[x.add]
        rows[x.product] = [*view, *_synced(here, there), *made]
        rows[x.add] = [*_synced(there, here)]
    kept: list[Instruction] = []
    for n, i in enumerate(code):
        kept += rows[n] if n in rows else _without(i, gone)
    return replace(program, instructions=tuple(kept), types=types)


def _synced(stream: Instruction | None, other: Instruction | None) -> list[Instruction]:
    """Return what makes a stream, the current one, wait for another."""
    if stream is other or (stream is not None and other is not None and _is_same(stream, other)):
        return []
    assert other is not None
    return [replace(other, op="sync")]


def _is_same(a: Instruction, b: Instruction) -> bool:
    return (a.inputs, a.attrs) == (b.inputs, b.attrs)


def _without(i: Instruction, gone: set[str]) -> list[Instruction]:
    if i.op != "free" or gone.isdisjoint(i.reads):
        return [i]
    left = tuple(x for x in i.reads if x not in gone)
    return [i.changed(inputs=left)] if left else []


class _Walk:
    """A projection that is written out: where names are used, and on which streams."""

    def __init__(self, program: HostProgram) -> None:
        self.program, self.shared = program, storage(program)
        self.uses: defaultdict[str, list[int]] = defaultdict(list)
        self.of_memory: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        #: the instruction that switched to the stream of each one
        self.streams: list[Instruction | None] = []
        current: Instruction | None = None
        for n, i in enumerate(program.instructions):
            current = i if i.op == "set_stream" else current
            self.streams.append(current)
            for name in dict.fromkeys((*i.reads, *i.outputs)):
                self.uses[name].append(n)
                self.of_memory[self.shared.get(name, name)].append((n, name))

    def sums(self) -> Iterator[_Sum]:
        for n, i in enumerate(self.program.instructions):
            if i.op == "send" and i.kwargs["to"] == self.program.rank:
                found = self.sum(n)
                if found is not None:
                    yield found

    def sum(self, send: int) -> _Sum | None:
        """Return what a rank sends to itself, if it is a product that is only added."""
        code = self.program.instructions
        group = code[send - 1 : send + 3]
        if [i.op for i in group] != ["group_start", "send", "recv", "group_end"]:
            return None
        (part,), (got,) = group[1].reads, group[2].reads
        if group[2].kwargs["from"] != self.program.rank or self.program.root(part) != part:
            return None
        of_part, of_got = self.uses[part], self.uses[got]
        product, add = of_part[-3], of_got[-2]
        ops = [code[n].op for n in of_part], [code[n].op for n in of_got]
        if ops[0][-2:] != ["send", "free"] or ops[0][:-3] not in ([], ["alloc"]):
            return None
        if ops[1] != ["alloc", "recv", "binary", "free"] or not self.is_added(got, code[add]):
            return None
        i, (into,) = code[product], code[add].outputs
        is_plain = i.fn in _PRODUCTS and i.op == i.fn and len(i.inputs) == 2 and not i.attrs
        if not is_plain or not self.are_matrices(i, part, into):
            return None
        made = self.uses[into][0]
        view = made if made > product else None
        if view is not None and not self.may_be_bound(view, product):
            return None
        if not self.is_there(into, product, add):
            return None
        waits = [n for x in (group[1], group[2]) for n in self.uses[x.outputs[0]][1:]]
        allocs = [n for n in (*of_part, *of_got) if code[n].op == "alloc"]
        gone = (*range(send - 1, send + 3), *waits, *allocs)
        return _Sum(product, add, gone, part, got, view)

    def is_added(self, got: str, i: Instruction) -> bool:
        return i.fn == "add" and i.inputs == (*i.outputs, got) and i.order is None

    def are_matrices(self, i: Instruction, part: str, into: str) -> bool:
        """Tell whether a product is one of matrices that has the type of the sum."""
        types, rank = self.program.types, self.program.rank
        assert rank is not None
        ranks = [len(types[x].shape) for x in i.reads]
        plain = i.order is None or list(i.order) == list(range(len(i.order)))
        is_one = types[part].dtype == types[into].dtype == types[i.reads[0]].dtype
        alike = types[part].local_shape(rank) == types[into].local_shape(rank)
        return plain and is_one and alike and min(ranks) >= 2

    def may_be_bound(self, view: int, before: int) -> bool:
        """Tell whether a view may be bound before an instruction."""
        i = self.program.instructions[view]
        return i.op == "chunk" and self.uses[i.reads[0]][0] < before

    def is_there(self, into: str, product: int, add: int) -> bool:
        """Tell whether a buffer has all that is added before when the product is computed."""
        code, root = self.program.instructions, self.shared.get(into, into)
        touched = False
        for n, name in self.of_memory[root]:
            i = code[n]
            if n == add or i.op in ("alloc", "chunk") or not self.meet(into, name):
                continue
            ends = [*self.uses[i.outputs[0]][1:]] if i.op in POSTS else [n]
            if n < add and (not ends or max(ends) > product):
                return False
            touched = touched or n < product
        return touched

    def meet(self, a: str, b: str) -> bool:
        rank, types = self.program.rank, self.program.types
        assert rank is not None
        return intersect(types[a].box(rank), types[b].box(rank)) is not None

    def added(self, x: _Sum, types: dict[str, BufferType]) -> list[Instruction]:
        """Return the product that adds, behind a view of its weight where that is transposed."""
        i, (into,) = self.program.instructions[x.product], self.program.instructions[x.add].outputs
        a, b = i.reads
        made = Instruction(op="addmm", inputs=(into, a, b), outputs=(into,), source=i.source)
        if i.fn == "matmul":
            return [made]
        name, view = _turned(b, x.part, types, i)
        free = [Instruction(op="free", inputs=(name,))] if self.program.has_frees else []
        return [view, replace(made, inputs=(into, a, name)), *free]


def _turned(
    weight: str, part: str, types: dict[str, BufferType], i: Instruction
) -> tuple[str, Instruction]:
    """Return the name of a transposed weight, and the view."""
    kind, name = types[weight], f"{part}.weight"
    assert kind.layout is not None
    types[name] = replace(kind, shape=kind.shape[::-1], layout=kind.layout.permuted((1, 0)))
    attrs = (("dims", (1, 0)),)
    view = replace(i, op="permute", fn="permute", inputs=(weight,), outputs=(name,), attrs=attrs)
    return name, view.changed(order=None)
