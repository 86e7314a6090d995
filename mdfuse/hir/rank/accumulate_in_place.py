"""Make terms of a sum where the sum is, in what is written out.

What arrives only to be copied on is received where it belongs, if nothing used that part of the
memory before (`receive`):

    %got = alloc                                    %y = chunk(%whole)
    %c = recv(%got, from=1)                         %c = recv(%y, from=1)
    %y = chunk(%whole)                     ->       wait %c
    wait %c
    %y = set(%got)
    free %got

A rank's own term that comes first is computed there:

    %p = alloc                                      %p = own(%y)
    %p = matmul(%x, %w)                             %p = matmul(%x, %w)
    set_stream 1                                    set_stream 1
    sync 0                                  ->      sync 0
    %c0 = send(%p, to=me)                           free %p
    %c1 = recv(%y, from=me)
    wait %c0
    wait %c1
    free %p

One that comes last adds to what is there as it is computed, so that the sum costs no kernel and is
rounded once. Any other product would wait for what arrives, and hide nothing. Where other terms
were added before, it waits for the stream of these:

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

So do the terms of microbatches, the first of which is written. A sum of which one term is no such
product stays as it is:

    %p@1 = matmul(%a@1, %b@1)                       %y = addmm(%y, %a@1, %b@1)
    free %a@1, %b@1                                 free %a@1, %b@1
    %y = accumulate(%p@1)                   ->
    free %p@1
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mdfuse.hir.analysis.dataflow import VIEWS, Dataflow, dataflow
from mdfuse.hir.edits import Edits, Position
from mdfuse.hir.instructions import POSTS, is_local
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.verify.added_products import adds_to, own_problem

#: Products that can add to a buffer as they write.
_PRODUCTS = ("matmul", "linear")

#: Uses of a chunk that is only added up: it is computed, added and freed.
_USES = 3


def receive(program: HostProgram) -> HostProgram:
    """Return a projection that is written out, without copies of what arrives."""
    receives = [n for n, i in enumerate(program.instructions) if i.op == "recv"]
    if not receives:
        return program
    flow, edits = dataflow(program), Edits(program.instructions)
    for n in receives:
        _receive(flow, n, edits)
    return replace(program, instructions=edits.result()) if edits.instead else program


def run(program: HostProgram) -> HostProgram:
    """Return a projection that is written out, whose own terms are computed where sums are."""
    return _add_chunks(_compute_own(program))


# -- what is common ------------------------------------------------------------------------------


def _are_alike(flow: Dataflow, a: str, b: str) -> bool:
    """Return whether two buffers have one dtype and shape on the rank."""
    x, y = flow.types[a], flow.types[b]
    return x.dtype == y.dtype and x.local_shape(flow.rank) == y.local_shape(flow.rank)


def _binds_to_move(flow: Dataflow, into: str, before: int) -> tuple[int, ...] | None:
    """Return where views are bound that have to move up, so that a name is bound before a position.

    None: it cannot be.
    """
    positions: list[int] = []
    while True:
        first = flow.uses[into][0]
        binds = [flow.code[n] for n in flow.results(into)]
        if sum(i.op in ("alloc", *VIEWS) for i in binds) > 1:
            return None
        if first < before:
            return tuple(reversed(positions))
        if binds[0].op not in VIEWS:
            return None
        positions.append(first)
        (into,) = flow.code[first].reads


def _is_plain(i: Instruction) -> bool:
    """Return whether the result of an instruction lies row by row."""
    return i.order is None or list(i.order) == list(range(len(i.order)))


# -- what arrives --------------------------------------------------------------------------------


def _receive(flow: Dataflow, recv: int, edits: Edits) -> None:
    """Receive a buffer where it is copied to, if that is all that is done with it."""
    (got,) = flow.code[recv].reads
    if flow.ops(got) != ["alloc", "recv", "set", "free"]:
        return
    alloc, _, copy, _ = flow.uses[got]
    if flow.code[alloc].attrs or any(flow.code[n].order is not None for n in (alloc, copy)):
        return
    (into,) = flow.code[copy].outputs
    moved = _binds_to_move(flow, into, alloc) if _are_alike(flow, got, into) else None
    if moved is None or flow.is_given(into) or any(n < copy for n in flow.accesses(into)):
        return
    edits.drop(*moved, copy)
    edits.instead[alloc] = [flow.code[n] for n in moved]
    edits.instead[recv] = [replace(flow.code[recv], inputs=(into,))]
    edits.gone.add(got)


# -- what a rank sends to itself -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Term:
    """The numbers of the instructions by which a rank sends a term to itself.

    Attributes:
        part, got: what is sent, and the name that it is received as.
        alloc: where what is sent gets a buffer; None: where it is computed.
        product: where it is computed.
        group: where the group of both transfers begins.
        waits: where they are waited for.
    """

    part: str
    got: str
    alloc: int | None
    product: int
    group: int
    waits: tuple[int, ...]

    @property
    def transfers(self) -> tuple[int, ...]:
        """The numbers of all instructions that go with the transfers."""
        return (*range(self.group, self.group + 4), *self.waits)


def _compute_own(program: HostProgram) -> HostProgram:
    """Return the program whose rank sends no terms of sums to itself, as far as that may be."""
    sends = [n for n, i in enumerate(program.instructions) if _is_own(i, "to", program.rank)]
    if not sends:
        return program
    flow, edits = dataflow(program), Edits(program.instructions)
    types = dict(program.types)
    for n in sends:
        term = _term(flow, n)
        if term is not None and not _computed_in_place(flow, term, edits):
            types.update(_added_in_place(flow, term, edits, program.has_frees))
    if not edits.instead:
        return program
    return replace(program, instructions=edits.result(), types=types)


def _is_own(i: Instruction, side: str, rank: int | None) -> bool:
    return i.op in ("send", "recv") and i.kwargs.get(side) == rank


def _term(flow: Dataflow, send: int) -> _Term | None:
    """Return what a rank sends to itself, if that is for nothing else."""
    group = flow.code[send - 1 : send + 3]
    if [i.op for i in group] != ["group_start", "send", "recv", "group_end"]:
        return None
    (part,), (got,) = group[1].reads, group[2].reads
    if not _is_own(group[2], "from", flow.rank) or not _are_alike(flow, part, got):
        return None
    uses, ops = flow.uses[part], flow.ops(part)
    if ops[-2:] != ["send", "free"] or len(ops) not in (3, 4):
        return None
    alloc = uses[0] if len(ops) == 4 else None
    product = flow.code[uses[-3]]
    if product.op in (*POSTS, *VIEWS, "narrow", "alloc") or part not in product.outputs:
        return None
    if alloc is not None and flow.code[alloc].op != "alloc":
        return None
    waits = [n for i in group[1:3] for n in flow.uses[i.outputs[0]][1:]]
    return _Term(part, got, alloc, uses[-3], send - 1, tuple(waits))


def _synced(flow: Dataflow, at: int, other: int) -> list[Instruction]:
    """Return what makes the stream of one instruction wait for that of another."""
    stream, there = flow.streams[at], flow.streams[other]
    if there is None or (stream is not None and _is_same(stream, there)):
        return []
    return [replace(there, op="sync")]


def _is_same(a: Instruction, b: Instruction) -> bool:
    """Return whether two instructions switch to one stream, or wait for one."""
    return (a.inputs, a.attrs) == (b.inputs, b.attrs)


def _computed_in_place(flow: Dataflow, term: _Term, edits: Edits) -> bool:
    """Let what a rank computes be computed where it is received, and return whether it may."""
    into, types = term.got, flow.types
    begin = term.product if term.alloc is None else term.alloc
    if own_problem(types[into], types[term.part], flow.rank) is not None:
        return False
    moved = _binds_to_move(flow, into, begin)
    others = set(flow.accesses(into)).difference(term.transfers)
    if moved is None or flow.is_given(into) or any(n < term.group for n in others):
        return False
    if not _is_allocated_for(flow, into, term.product):
        return False
    first, synced = flow.code[begin], _synced(flow, term.group, term.product)
    view = Instruction(op="own", inputs=(into,), outputs=(term.part,), source=first.source)
    edits.drop(*moved, *term.transfers)
    before = flow.code[term.group - 1]
    is_synced = before.op == "sync" and all(_is_same(before, i) for i in synced)
    edits.instead[term.group] = [] if is_synced else synced
    views = [*(flow.code[n] for n in moved), view]
    edits.instead[begin] = views if term.alloc is not None else [*views, first]
    return True


def _is_allocated_for(flow: Dataflow, into: str, product: int) -> bool:
    """Return whether an instruction's stream has waited for that of the memory's `alloc`."""
    alloc = flow.uses[flow.memory(into)][0]
    syncs = (n for n in range(alloc, product) if flow.code[n].op == "sync")
    return not _synced(flow, product, alloc) or any(not _synced(flow, product, n) for n in syncs)


def _added_in_place(
    flow: Dataflow, term: _Term, edits: Edits, has_frees: bool
) -> dict[str, BufferType]:
    """Let a product add to what is there, if all that is added before is there.

    Returns:
        The types of new names.
    """
    if flow.ops(term.got) != ["alloc", "recv", "binary", "free"]:
        return {}
    alloc, _, at, _ = flow.uses[term.got]
    product, sum_ = flow.code[term.product], flow.code[at]
    (into,) = sum_.outputs
    if sum_.fn != "add" or sum_.inputs != (into, term.got) or sum_.order is not None:
        return {}
    moved = _binds_to_move(flow, into, term.product)
    before = [n for n in flow.accesses(into) if n < at]
    is_last = bool(before) and max(before) < term.product
    if moved is None or not is_last or not _is_product(flow, product, into):
        return {}
    if flow.streams[term.product] is None is not flow.streams[at]:
        return {}
    edits.drop(*term.transfers, *moved, alloc, *([] if term.alloc is None else [term.alloc]))
    edits.gone |= {term.part, term.got}
    views = [flow.code[n] for n in moved]
    first = _arrived(flow, before, term.product, edits) or _synced(flow, term.product, at)
    added, types = _addmm(flow, product, term.part, into, has_frees)
    edits.instead[term.product] = [*views, *first, *added]
    edits.instead[at] = _synced(flow, at, term.product)
    return types


def _arrived(
    flow: Dataflow, before: Sequence[int], product: int, edits: Edits
) -> list[Instruction]:
    """Return the wait, and frees behind it, for what arrives, if nothing else was there before.

    They then stand before the product, and no longer where they stood.
    """
    places = [*dict.fromkeys(before)]
    if [flow.code[n].op for n in places] != ["recv", "wait"]:
        return []
    recv, wait = places
    (name,) = flow.code[recv].reads
    frees = [n for n in flow.uses[name] if wait < n < product]
    if any(flow.code[n].op != "free" for n in frees):
        return []
    edits.drop(wait)
    for n in frees:
        edits.unfree(n, (name,))
    return [flow.code[wait], *(Instruction(op="free", inputs=(name,)) for _ in frees)]


def _is_product(flow: Dataflow, i: Instruction, into: str) -> bool:
    """Return whether an instruction is a product of matrices that has the type of a sum."""
    if i.op not in _PRODUCTS or len(i.inputs) != 2 or i.attrs or not _is_plain(i):
        return False
    kinds = [flow.types[x] for x in (*i.reads, into)]
    return len({k.dtype for k in kinds}) == 1 and min(len(k.shape) for k in kinds) > 1


def _addmm(
    flow: Dataflow, i: Instruction, part: str, into: str, has_frees: bool
) -> tuple[list[Instruction], dict[str, BufferType]]:
    """Return the product that adds, behind a view of its weight where that is transposed.

    Also the types of new names.
    """
    a, b = i.reads
    product = Instruction(op="addmm", inputs=(into, a, b), outputs=(into,), source=i.source)
    if i.fn == "matmul":
        return [product], {}
    kind, name = flow.types[b], f"{part}.weight"
    layout = kind.placed.permuted((1, 0))
    attrs = (("dims", (1, 0)),)
    view = Instruction(
        op="permute", fn="permute", inputs=(b,), outputs=(name,), attrs=attrs, source=i.source
    )
    frees = [Instruction(op="free", inputs=(name,))] if has_frees else []
    types = {name: replace(kind, shape=kind.shape[::-1], layout=layout)}
    return [view, replace(product, inputs=(into, a, name)), *frees], types


# -- sums over chunks ----------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """An instruction of a program or of a host unit, with its position.

    Attributes:
        unit: the host unit; None outside of all.
    """

    position: Position
    i: Instruction
    unit: Instruction | None = None


#: A product and what adds it up; None for what is added and is no such product.
_Pair = tuple[_Leaf, _Leaf] | None


def _add_chunks(program: HostProgram) -> HostProgram:
    """Return the program with products that add to sums over chunks, where all terms are such."""
    if not any(i.op == "accumulate" for i in program.walk()):
        return program
    flow, edits = dataflow(program), Edits(program.instructions)
    pairs = defaultdict[str, list[_Pair]](list)
    for into, pair in _pairs(flow):
        pairs[into].append(pair)
    for into, terms in pairs.items():
        if None not in terms:
            _add_up(flow, into, [pair for pair in terms if pair is not None], edits)
    return replace(program, instructions=edits.result()) if edits.instead else program


def _leaves(code: Sequence[Instruction]) -> Iterator[_Leaf]:
    """Yield the instructions of a code, and behind each host unit those inside it."""
    for n, i in enumerate(code):
        yield _Leaf(n, i)
        if i.op == "launch":
            yield from (_Leaf((n, m), j, i) for m, j in enumerate(i.body))


def _pairs(flow: Dataflow) -> Iterator[tuple[str, _Pair]]:
    """Yield each buffer that a chunk is added to, with the product that the chunk is, if any."""
    leaves = [*_leaves(flow.code)]
    flat = [leaf.i for leaf in leaves if leaf.i.op != "launch"]
    parts = {i.reads[0] for i in flat if i.op == "accumulate"}
    uses = Counter(x for i in flat for x in (*i.reads, *i.outputs) if x in parts)
    products: dict[str, int] = {}
    for n, leaf in enumerate(leaves):
        i = leaf.i
        if i.op == "accumulate":
            (part,), (into,) = i.reads, i.outputs
            at = products.get(part, n)
            product, between = leaves[at], [x.i for x in leaves[at + 1 : n]]
            is_pair = at < n and product.unit is leaf.unit and not flow.is_bound_by(into, i)
            is_pair = is_pair and adds_to(flow.types[into].dtype, flow.types[part].dtype)
            is_pair = is_pair and uses[part] <= _USES and _is_untouched(flow, between, into)
            yield into, (product, leaf) if is_pair else None
        elif i.op == "matmul" and i.outputs[0] in parts and _is_chunk(flow, i):
            products[i.outputs[0]] = n


def _is_chunk(flow: Dataflow, i: Instruction) -> bool:
    """Return whether a product is one of matrices that is a chunk of a sum."""
    part = i.outputs[0]
    layout = flow.types[part].layout
    stream = layout.stream if layout is not None else None
    if stream is None or stream.op != "sum" or len(i.reads) != 2 or not _is_plain(i):
        return False
    return flow.is_bound_by(part, i) and all(len(flow.types[x].shape) == 2 for x in i.reads)


def _is_untouched(flow: Dataflow, between: Sequence[Instruction], into: str) -> bool:
    """Return whether what stands between a product and its sum has nothing to do with the sum."""
    memory = flow.memory(into)
    for i in between:
        names = () if i.op == "free" else (*i.reads, *i.outputs)
        if any(flow.memory(x) == memory for x in names):
            return False
        if not (i.op in ("free", "alloc") or is_local(i)):
            return False
    return True


def _add_up(flow: Dataflow, into: str, terms: Sequence[tuple[_Leaf, _Leaf]], edits: Edits) -> None:
    """Let the products of a sum add to it, in order; the first of them is what the buffer holds."""
    added: set[object] = set()
    for product, addition in terms:
        (part,), factors = addition.i.reads, product.i.inputs
        layout = flow.types[part].placed
        assert layout.stream is not None
        inputs = (into, *factors) if added else factors
        source = product.i.source
        edits.instead[product.position] = [
            Instruction(op="addmm", inputs=inputs, outputs=(into,), source=source)
        ]
        edits.drop(addition.position)
        edits.gone.add(part)
        added.add(layout.stream.index)
        if len(added) == layout.stream.count:
            added.clear()  # of a sum in an iteration of a loop around it
