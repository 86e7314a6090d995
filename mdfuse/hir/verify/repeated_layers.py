"""Leave out layers that do what the layers before them do, so that they are verified once.

    %h_1 = matmul(%x, %w)                 layer 0        %h_1 = matmul(%x, %w)
    %x_1 = relu(%h_1)                                    %x_1 = relu(%h_1)
    %h_2 = matmul(%x_1, %w_1)             layer 1        %h_2 = matmul(%x_1, %w_1)
    %x_2 = relu(%h_2)                                    %x_2 = relu(%h_2)
    %h_3 = matmul(%x_2, %w_2)             layer 2   ->
    %x_3 = relu(%h_3)
    return %x_3                                          return %x_2

Layers are equal runs of instructions, apart from names. A layer uses names that it binds itself,
names of the layer before, inputs that it alone reads, and names that all layers read and none
writes. So any two layers in a row are like the first two: the same accesses are ordered, the same
buffers written and freed, the same communications posted. Layers use the same streams: an access to
a name that all layers read is ordered behind those of the first layer, and before those behind the
last one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mdfuse.extents.expressions import Term
from mdfuse.hir.analysis.normal_form import NormalForm, Stretch, stretches
from mdfuse.hir.forms import check_nesting
from mdfuse.hir.instructions import TRANSFERS, received, row_of
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.names import is_value_name

#: The fewest layers that are shortened: two remain.
_FEWEST = 3

#: How many lengths of a layer are tried.
_TRIED = 4

#: How many instructions in a row must be equal for their distance to be tried.
_WINDOW = 4

#: Instructions that no two layers share: each belongs to one place, or acts on the whole program.
_NEVER = ("block", "call", "get_stream", "accumulate", "return", "barrier")


#: Instructions that write operands.
_WRITING = ("post", "recv")


@dataclass(frozen=True, kw_only=True)
class Shortened(HostProgram):
    """A program in which two layers stand for all that are like them.

    Attributes:
        layer_of: name -> the layer that binds it, 0 or 1.
    """

    layer_of: Mapping[str, int]


class _Unlike(Exception):
    """Two layers differ in more than names."""


def without_repeated(program: HostProgram) -> Shortened | None:
    """Return a program with two of all layers that are alike; None where there are none.

    It is right if the program is, and wrong if the program is.

    Args:
        program: for all ranks.
    """
    if len(program.meshes) > 1:  # stages have meshes of their own, and so are not alike
        return None
    check_nesting(program)
    layers = _longest([_sketch(i) for i in program.instructions])
    if layers is None:
        return None
    try:
        return _shortened(program, layers)
    except (_Unlike, TypeError, ValueError, AttributeError, KeyError):
        return None  # what has a wrong form is refused elsewhere


def _shortened(program: HostProgram, likely: Stretch) -> Shortened:
    """Return a program with two of some layers; raise _Unlike where they are not alike."""
    uses, (start, period, length) = _uses_of(program), likely
    _Layers(program, (), uses, start, period, length // period).check_behind()
    forms = [_form(program, i) for i in program.instructions[start : start + length]]
    alike = _longest([form.key for form in forms])
    if alike is None:
        raise _Unlike
    skipped, period, length = alike
    for first in (skipped, skipped + period):  # the first layer may read other names than the rest
        count = (skipped + length - first) // period
        layers = _Layers(program, forms[first:], uses, start + first, period, count)
        try:
            layers.check()
        except _Unlike:
            continue
        return layers.shortened()
    raise _Unlike


# -- instructions without names ------------------------------------------------------------------


def _sketch(i: Instruction) -> Hashable:
    """Return a key that is equal for instructions that are alike, and perhaps for others."""
    if i.op in _NEVER:
        return id(i)
    return i.op, i.fn if i.op != "launch" else "", len(i.inputs), len(i.outputs), len(i.body)


def _form(program: HostProgram, i: Instruction) -> _Form:
    form = _Form(program)
    form.key = form.instruction(i)
    return form


@dataclass(slots=True)
class _Form(NormalForm):
    """The normal form of an instruction, and the names in it, in order.

    Attributes:
        key: equal for instructions that are alike but for names.
        names: all names but indices of loops.
        written: the names that it binds or writes.
        loops: index of a loop around -> how deep it is.
        views: (result, operand) of what may share memory.
        sends: the number of its sends, less that of its receives.
    """

    key: Hashable = None
    names: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    loops: dict[str, int] = field(default_factory=dict)
    views: list[tuple[str, str]] = field(default_factory=list)
    sends: int = 0

    def instruction(self, i: Instruction) -> Hashable:
        if i.op in _NEVER:
            return i.op, id(i)
        if i.op == "for":
            return self.loop(i)
        key = NormalForm.instruction(self, i)
        if i.op in _WRITING:
            self.written += received(i)
        row = row_of(i) if i.outputs and i.inputs else None
        if row is not None and row.is_view:
            self.views += [(x, y) for x in i.outputs for y in i.reads]
        if i.op in TRANSFERS:
            self.sends += 1 if i.op == "send" else -1
        return key

    def loop(self, i: Instruction) -> Hashable:
        (index,) = i.outputs
        attrs = tuple([(k, self.value(v)) for k, v in i.attrs])
        outer, self.loops = self.loops, {**self.loops, index: len(self.loops)}
        body = tuple(map(self.instruction, i.body))
        self.loops = outer
        return i.op, attrs, body

    def operand(self, name: str) -> int | None:
        depth = self.loops.get(name)
        if depth is None:
            self.names.append(name)
        return depth

    def result(self, name: str) -> Hashable:
        if name in self.loops:
            raise _Unlike
        self.names.append(name)
        self.written.append(name)
        return self.type_of(name)

    def term(self, term: Term) -> Hashable:
        """Return a term with the depth of a loop in the place of its index."""
        if term.kind == "extent":
            raise _Unlike
        return ("index", self.loops[term.name]) if term.kind == "index" else term


# -- which layers there are ----------------------------------------------------------------------


def _longest(codes: Sequence[Hashable]) -> Stretch | None:
    """Return the layers whose repetitions have the most instructions; None where there are none.

    >>> _longest("xabcdabcdabcdy")
    Stretch(start=1, period=4, length=12)
    """
    repeated = stretches(codes, tried=_TRIED, window=_WINDOW)
    several = (s for s in repeated if s.length // s.period >= _FEWEST)
    return max(several, key=lambda s: (s.length // s.period - 2) * s.period, default=None)


@dataclass(slots=True)
class _Uses:
    """The positions at which names other than loop indices are used.

    Attributes:
        bound: name -> the position at which it is bound or written first.
        first: name -> the position of its first use.
        last: name -> the position of its last use; behind the end for outputs.
    """

    bound: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    def note(self, i: Instruction, at: int) -> None:
        first, last = self.first, self.last
        for name in (*i.outputs, *received(i)) if i.op in _WRITING else i.outputs:
            self.bound.setdefault(name, at)
        for name in i.outputs:
            first.setdefault(name, at)
            last[name] = at
        for x in i.inputs:
            if isinstance(x, str):
                first.setdefault(x, at)
                last[x] = at
        if not i.body and not i.orelse and i.op != "for":
            return
        for inner in (*i.body, *i.orelse):
            self.note(inner, at)
        if i.op == "for":
            for name in i.outputs:
                for positions in (self.bound, first, last):
                    positions.pop(name, None)


def _uses_of(program: HostProgram) -> _Uses:
    uses = _Uses()
    for at, i in enumerate(program.instructions):
        uses.note(i, at)
    uses.last.update(dict.fromkeys(program.outputs, len(program.instructions)))
    return uses


@dataclass(slots=True)
class _Layers:
    """Layers in a row: `count` times `period` instructions from `start` on."""

    program: HostProgram
    forms: Sequence[_Form]
    uses: _Uses
    start: int
    period: int
    count: int
    #: for each layer but the first: name of the layer before -> what it is called here
    renamed: list[dict[str, str]] = field(default_factory=list)

    def layer(self, at: int) -> int:
        """Return which layer an instruction is in; -1: before, `count`: behind."""
        return min(max((at - self.start) // self.period, -1), self.count)

    def owner(self, name: str) -> int:
        """Return the layer that computes or writes a name first; -1: that is before all layers."""
        at = self.uses.bound.get(name)
        return self.layer(at) if at is not None else -1

    def reader(self, name: str) -> int | None:
        """Return the only layer that reads an input; None: several do, or it is no input."""
        if name in self.uses.bound or name not in self.uses.first:
            return None
        first, last = (self.layer(at[name]) for at in (self.uses.first, self.uses.last))
        return first if first == last else None

    def check(self) -> None:
        """Pair the names of each layer with those of the next one.

        Raises:
            _Unlike: a layer is not like the one before.
        """
        self.check_behind()
        self.check_once()
        for n in range(1, self.count):
            self.renamed.append(self.compare(n - 1, n))

    def check_behind(self) -> None:
        """Check that instructions behind the layers read names of the last layer alone."""
        end = self.start + self.count * self.period
        earlier = range(self.start, end - self.period)
        last = self.uses.last
        if any(at in earlier and last.get(name, -1) >= end for name, at in self.uses.bound.items()):
            raise _Unlike
        if any(name in self.uses.bound for name in self.program.inputs):
            raise _Unlike

    def names(self, layer: int) -> list[str]:
        forms = self.forms[layer * self.period : (layer + 1) * self.period]
        return [n for form in forms for n in form.names]

    def check_once(self) -> None:
        """Check the second layer for properties that all layers share, since they are alike."""
        second = self.forms[self.period : 2 * self.period]
        if sum(form.sends for form in second):
            raise _Unlike
        if any(self.owner(n) < 0 for form in second for n in form.written):
            raise _Unlike  # each layer writes there
        aliases = self.program.aliases
        shared = {*aliases, *aliases.values()}
        if shared and any(n in shared for layer in range(self.count) for n in self.names(layer)):
            raise _Unlike
        moved = {n for n in self.names(1) if self.owner(n) == 0}
        for form in second:
            moved.update(x for x, y in form.views if y in moved)
        if any(self.owner(n) == 1 and n in moved for n in self.names(2)):
            raise _Unlike  # memory goes from layer to layer, under other names

    def compare(self, one: int, other: int) -> dict[str, str]:
        """Return name of one layer -> name in the next one; raise _Unlike where no such map is."""
        earlier = self.renamed[-1] if self.renamed else {}
        pairs = dict.fromkeys(zip(self.names(one), self.names(other), strict=True))
        renamed = dict([*pairs])
        if len(renamed) < len(pairs) or len({*renamed.values()}) < len(pairs):
            raise _Unlike
        for x, y in pairs:
            if not self.is_same(x, y, one, other, earlier):
                raise _Unlike
        return renamed

    def is_same(self, x: str, y: str, one: int, other: int, earlier: dict[str, str]) -> bool:
        """Return whether name x has the role in layer `one` that y has in layer `other`.

        Roles: the same name, bound before all layers; a name of the layer; a name of the layer
        before, in whose place the first layer reads a name from before all layers; an input that
        the layer alone reads.
        """
        owners = self.owner(x), self.owner(y)
        if x == y:
            return owners[0] < 0
        if owners == (one, other):
            return is_value_name(y)
        if owners[1] == one:
            return owners[0] < 0 if one == 0 else earlier.get(x) == y
        types = self.program.types
        return (self.reader(x), self.reader(y)) == (one, other) and types[x] == types[y]

    def shortened(self) -> Shortened:
        """Return the program with the first two layers, the second one as the last."""
        program, new, left_out = self.program, self.last_as_second(), range(2, self.count)
        of = {n: self.owner(n) for n in program.types}
        dropped = {n for n, layer in of.items() if layer in left_out}
        dropped.update(n for n in program.inputs if self.reader(n) in left_out)
        end = self.start + self.count * self.period
        code = list(program.instructions[: self.start + 2 * self.period])
        code += [i.renamed(new) for i in program.instructions[end:]]
        return Shortened(
            name=program.name,
            types={n: kind for n, kind in program.types.items() if n not in dropped},
            inputs=tuple(n for n in program.inputs if n not in dropped),
            outputs=tuple(new.get(n, n) for n in program.outputs),
            instructions=tuple(code),
            aliases=program.aliases,
            layer_of={n: layer for n in self.uses.bound if (layer := self.owner(n)) in (0, 1)},
        )

    def last_as_second(self) -> dict[str, str]:
        """Return name of the last layer -> its name in the second one."""
        names = {n: n for n in self.names(1) if self.owner(n) == 1}
        for step in self.renamed[1:]:
            names = {x: step[y] for x, y in names.items()}
        return {y: x for x, y in names.items()}
