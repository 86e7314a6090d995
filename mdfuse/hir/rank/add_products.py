"""Let products add to the sums of microbatches as they are computed, in what is written out.

    %p@1 = matmul(%a@1, %b@1)                       %y = addmm(%y, %a@1, %b@1)
    free %a@1, %b@1                                 free %a@1, %b@1
    %y = accumulate(%p@1)                   ->
    free %p@1

The part is then neither written nor read. The first product is what the buffer holds: it is written
there, `%y = addmm(%a@0, %b@0)`. A buffer of which one part is no such product stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mdfuse.hir.instructions import is_local
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.storage import storage
from mdfuse.hir.verify.products import adds_to


def run(program: HostProgram) -> HostProgram:
    """Return a projection that is written out, whose products add to sums over chunks."""
    if not any(i.op == "accumulate" for i in program.walk()):
        return program
    return _Walk(program).changed()


@dataclass(frozen=True, slots=True)
class _Pair:
    """A product that is added up, by the ids of both instructions.

    Attributes:
        product: makes the part.
        added: adds it.
        part: the part.
        into: what it is added to.
    """

    product: Instruction
    added: Instruction
    part: str
    into: str


@dataclass
class _Walk:
    """A projection that is written out: how often names are used, and what has a buffer."""

    program: HostProgram
    shared: dict[str, str] = field(init=False)
    #: name -> how often it is read, written or freed
    uses: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    #: names that are bound so far
    bound: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.shared = storage(self.program)
        for i in self.program.walk():
            for name in dict.fromkeys((*i.reads, *i.outputs)):
                self.uses[name] += i.op != "launch"

    def changed(self) -> HostProgram:
        """Return the program with all pairs of sums all of whose parts are products."""
        found, others = defaultdict[str, list[_Pair]](list), set[str]()
        for into, pair in self.pairs(self.program.instructions):
            if pair is None:
                others.add(into)
            else:
                found[into].append(pair)
        made: dict[int, Instruction | None] = {}
        for into in found.keys() - others:
            made |= dict(self.added(found[into]))
        gone = {pair.part for into in found.keys() - others for pair in found[into]}
        if not gone:
            return self.program
        return replace(self.program, instructions=_without(self.program.instructions, made, gone))

    def added(self, pairs: Sequence[_Pair]) -> Iterator[tuple[int, Instruction | None]]:
        """Yield what stands for each instruction of the parts of one sum, in order."""
        done: set[object] = set()
        for pair in pairs:
            layout = self.program.types[pair.part].layout
            assert layout is not None and layout.stream is not None
            factors, into = pair.product.inputs, (pair.into,)
            yield (
                id(pair.product),
                Instruction(
                    op="addmm",
                    inputs=(*into, *factors) if done else factors,
                    outputs=into,
                    source=pair.product.source,
                ),
            )
            yield id(pair.added), None
            done.add(layout.stream.index)
            if len(done) == layout.stream.count:
                done.clear()  # of a sum in an iteration of a loop around it

    def pairs(self, code: Sequence[Instruction]) -> Iterator[tuple[str, _Pair | None]]:
        """Yield each buffer that a part is added to, with the product that the part is, if any."""
        made: dict[str, int] = {}
        for n, i in enumerate(code):
            if i.op == "launch":
                yield from self.pairs(i.body)
            if i.op == "accumulate":
                (part,), (into,) = i.reads, i.outputs
                at = made.get(part, n)
                is_pair = at < n and into in self.bound and self.are_alike(part, into)
                is_pair = is_pair and self.is_free(code[at + 1 : n], into)
                yield into, _Pair(code[at], i, part, into) if is_pair else None
            elif i.outputs and self.is_product(i):
                made[i.outputs[0]] = n
            self.bound.update(i.outputs)

    def are_alike(self, part: str, into: str) -> bool:
        types = self.program.types
        return adds_to(types[into].dtype, types[part].dtype)

    def is_product(self, i: Instruction) -> bool:
        """Tell whether an instruction makes a product of matrices that is added up, and no more."""
        (part, *_), types = i.outputs, self.program.types
        layout = types[part].layout if i.op == "matmul" else None
        stream = layout.stream if layout is not None else None
        if stream is None or stream.op != "sum" or len(i.reads) != 2:
            return False
        is_plain = i.order is None or list(i.order) == list(range(len(i.order)))
        is_alone = part not in self.bound and self.uses[part] <= len(("made", "added", "freed"))
        return is_plain and is_alone and all(len(types[x].shape) == 2 for x in i.reads)

    def is_free(self, between: Sequence[Instruction], into: str) -> bool:
        """Tell whether what stands between a product and its sum has nothing to do with the sum."""
        memory = self.shared.get(into, into)
        for i in between:
            names = () if i.op == "free" else (*i.reads, *i.outputs)
            if any(self.shared.get(x, x) == memory for x in names):
                return False
            if not (i.op in ("free", "alloc") or is_local(i)):
                return False
        return True


def _without(
    code: Sequence[Instruction], made: dict[int, Instruction | None], gone: set[str]
) -> tuple[Instruction, ...]:
    """Return instructions with others in their places, without those of names that are gone."""
    found: list[Instruction] = []
    for i in code:
        if id(i) in made:
            new = made[id(i)]
            found += [new] if new is not None else []
        elif i.op == "launch":
            outputs = tuple(x for x in i.outputs if x not in gone)
            found.append(replace(i, outputs=outputs, body=_without(i.body, made, gone)))
        elif i.op == "free" and not gone.isdisjoint(i.reads):
            left = tuple(x for x in i.reads if x not in gone)
            found += [i.changed(inputs=left)] if left else []
        else:
            found.append(i)
    return tuple(found)
