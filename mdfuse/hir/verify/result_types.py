"""Check types: the result of each instruction has the declared type of its name."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from mdfuse.errors import ProgramError
from mdfuse.extents.expressions import UNKNOWN, Calc, Index, Term, terms
from mdfuse.hir.analysis.normal_form import NormalForm, Numbers
from mdfuse.hir.index_terms import axes_of
from mdfuse.hir.instructions import BUFFER_OPS, NAMED, received
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.verify.buffer_types import RULES
from mdfuse.hir.verify.equal_elements import Expanded
from mdfuse.hir.verify.error_report import ErrorText
from mdfuse.hir.verify.op_types import lacks, row_problem
from mdfuse.hir.verify.result_layouts import chunk_of, is_one_chunk
from mdfuse.ir.graph import Operand, dtype_name
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Replicate
from mdfuse.mesh import DeviceMesh


def check_types(program: HostProgram) -> None:
    """Raise ProgramError where a result has another type than the declared one.

    Rows with an operand without a type are left out: the flow refuses them, since nothing computes
    the operand.
    """
    Types(program).block(program.instructions)


NO_TYPE = ErrorText(
    "%{name} has no type",
    "each buffer and number has one, which says what it stands for",
    "add it to the types of the program",
)
MISMATCH = ErrorText(
    "{i} is declared {stated}, but {problem}",
    "with {given}",
    "declare what the op makes of its operands, with the layout they have",
)
PARTIAL = ErrorText(
    "{i} writes %{name}, which {what}, into %{of}: {text}",
    "afterwards the ranks would not hold of %{of} what its type says",
    "{hint}",
)


@dataclass(slots=True)
class Types:
    """A walk over the instructions in order that knows the types of what they read and write."""

    program: HostProgram
    #: name -> a number that stands for its type
    codes: dict[str, int] = field(default_factory=dict)
    kinds: dict[BufferType | None, int] = field(default_factory=lambda: {None: 0})
    #: id of a type -> its number
    by_id: dict[int, int] = field(default_factory=dict)
    #: rows with operands that were checked
    seen: set[object] = field(default_factory=set)
    #: the same without the ranks of a mesh, or without the numbers of chunks: equal stages and
    #: iterations are checked once
    seen_elsewhere: set[object] = field(default_factory=set)
    #: number -> the index expressions that it was computed from
    computed_from: dict[str, tuple[Index, ...]] = field(default_factory=dict)
    #: part of a buffer -> the buffer, which a write into the part changes
    slices: dict[str, str] = field(default_factory=dict)
    #: buffer -> (dim, to_dim, axis) of what was packed into it
    packed: dict[str, tuple[object, ...]] = field(default_factory=dict)
    #: the loops around the instruction
    loops: list[Instruction] = field(default_factory=list)
    #: buffer -> what is added up in it
    accumulated: dict[str, str] = field(default_factory=dict)
    #: names with a buffer of their own
    allocated: set[str] = field(default_factory=set)
    #: which dims of buffers `expand` made
    expanded: Expanded = field(init=False)

    def __post_init__(self) -> None:
        self.expanded = Expanded(self.program)

    def block(self, block: Iterable[Instruction]) -> None:
        rules = RULES
        for i in block:
            rule = rules.get(i.op)
            if self.slices:
                self.check_slices(i)
            if rule is not None:
                rule(self, i)
            elif i.fn and i.op not in NAMED:
                self.row(i)
            if i.body:
                self.loops += [i] if i.op == "for" else []
                self.block(i.body)
                self.block(i.orelse)
                self.loops = [loop for loop in self.loops if loop is not i]

    def code(self, x: Operand) -> object:
        """Return a key of the type of an operand, for `seen`."""
        if type(x) is str:
            code = self.codes.get(x)
            return self.intern(x) if code is None else code
        return type(x)

    def intern(self, name: str) -> int:
        kind = self.program.types.get(name)
        code = self.by_id.get(id(kind))
        if code is None:
            code = self.by_id[id(kind)] = self.kinds.setdefault(kind, len(self.kinds))
        self.codes[name] = code
        return code

    def result_type(self, i: Instruction) -> BufferType:
        """Return the declared type of an instruction's result, or raise ProgramError."""
        (name,) = i.outputs
        return self.declared(i, name)

    def declared(self, i: Instruction, name: str) -> BufferType:
        """Return the declared type of one of an instruction's results, or raise ProgramError."""
        self.intern(name)
        kind = self.program.types.get(name)
        if kind is None:
            raise NO_TYPE(self.program, i, name=name)
        return kind

    # -- rows of the op table --------------------------------------------------------------------

    def row(self, i: Instruction) -> None:
        code = self.code
        results = tuple([code(x) for x in i.outputs])
        numbers = self.numbers(i) if self.computed_from or i.indices else ()
        key = (i.fn, i.attrs, i.order, results, tuple([code(x) for x in i.inputs]), numbers)
        if key not in self.seen:
            self.check_row(i, frozenset(numbers))
            self.seen.add(key)

    def check_row(self, i: Instruction, numbers: frozenset[str]) -> None:
        types, results = self.program.types, tuple(self.declared(i, n) for n in i.outputs)
        operands = [types.get(x) if isinstance(x, str) else type(x) for x in i.inputs]
        known = tuple(k for k in operands if k is not None)
        if len(known) < len(operands):
            return
        key = self.key_elsewhere(i, (*results, *known))
        question = i.fn, i.attrs, numbers, len(results), key
        if key is not None and question in self.seen_elsewhere:
            return
        problem = row_problem(i.fn, i.attrs, known, results, self.program.rank, numbers)
        if problem is not None:
            raise self.mismatch(i, problem)
        if key is not None:
            self.seen_elsewhere.add(question)

    def key_elsewhere(self, i: Instruction, kinds: tuple[BufferType | type, ...]) -> Hashable:
        """Return a key of types, equal for rows that yield the same elsewhere; None: none does."""
        rank, row = self.program.rank, TABLE.get(i.fn)
        if rank is None and any(type(v) in UNKNOWN for _, v in i.attrs):
            return None
        if rank is None:
            return _but_for_ranks(self.program, kinds)
        if row is None or row.localize is not None or row.globalize is not None:
            return None  # its attributes depend on where a part lies
        return _but_for_numbers(kinds, rank)

    def numbers(self, i: Instruction) -> tuple[str, ...]:
        """Return the axes along which ranks may read different numbers in this row."""
        indices: list[Index] = []
        for x in i.inputs:
            if isinstance(x, str):
                indices += self.computed_from.get(x, ())
        indices += i.indices
        kind = self.program.types.get(i.outputs[0])
        if kind is None or kind.layout is None:
            self.computed_from[i.outputs[0]] = tuple(indices)
            return ()
        return tuple(sorted({a for x in indices for a in self.axes_of(x, kind.layout.mesh)}))

    def axes_of(self, index: Index, mesh: DeviceMesh) -> frozenset[str]:
        """Return the axes of a mesh along which ranks may compute other numbers from an index."""
        axes = axes_of(index, mesh)
        every = axes_of(Term("rank"), mesh)
        for term in terms(index):
            if term.kind == "extent":
                kind = self.program.types.get(term.name)
                layout = kind.layout if kind is not None else None
                if layout is not None and layout.split_axes(term.dim):
                    split = every.intersection(layout.split_axes(term.dim))
                    axes |= split if layout.mesh == mesh else every
            elif term.kind == "coord":
                having = [m for m in self.program.meshes if term.name in m.axes]
                axes |= every if having != [mesh] else frozenset()
        return axes

    def mismatch(self, i: Instruction, problem: str) -> ProgramError:
        operands = [x for x in dict.fromkeys(i.reads) if x in self.program.types]
        texts = [f"%{x}: {self.text(x)}" for x in (*i.outputs, *operands)]
        stated, given = self.text(i.outputs[0]), ", ".join(texts)
        return MISMATCH(self.program, i, stated=stated, problem=problem, given=given)

    def text(self, name: str) -> str:
        kind = self.program.types[name]
        if kind.layout is None:
            return f"{dtype_name(kind.dtype)} scalar"
        shape = ",".join(map(str, kind.shape))
        flags = " flat" * kind.flat + f" padded to {kind.local_shape(self.program.rank)}" * (
            kind.padding is not None
        )
        return f"{dtype_name(kind.dtype)}[{shape}] {kind.layout}{flags}"

    # -- buffers ---------------------------------------------------------------------------------

    def rank_of(self, kind: BufferType) -> int:
        """Return the rank whose part is compared: the program's, else the first of the mesh."""
        return kind.placed.mesh.first if self.program.rank is None else self.program.rank

    def pair(self, i: Instruction) -> tuple[BufferType, BufferType] | None:
        """Return the types of operand and result, which must be buffers of one dtype.

        None where the type of the operand is not known.
        """
        after, source = self.result_type(i), i.inputs[0] if i.inputs else None
        before = self.program.types.get(source) if isinstance(source, str) else None
        if before is None or not isinstance(source, str):
            return None
        self.intern(source)
        if before.layout is None or after.layout is None:
            raise self.mismatch(i, f"{i.op} is for buffers, not for numbers")
        parts = [x for x in map(chunk_of, (before.layout, after.layout)) if x and x.op]
        is_moved = i.op in ("narrow", "fetch") and is_one_chunk(before.layout, after.layout)
        if parts and i.op != "accumulate" and not is_moved:
            raise self.mismatch(i, f"{parts[0]} is only added to what there is")
        if before.dtype != after.dtype and i.op != "accumulate":
            raise self.mismatch(i, f"{i.op} keeps the dtype {dtype_name(before.dtype)}")
        if lack := lacks(before.layout, after.layout, self.program.rank):
            raise self.mismatch(i, lack)
        return before, after

    def same_shape(self, i: Instruction) -> tuple[BufferType, BufferType] | None:
        pair = self.pair(i)
        if pair is not None and pair[0].shape != pair[1].shape:
            raise self.mismatch(i, f"{i.op} keeps the global shape {list(pair[0].shape)}")
        return pair

    def slice(self, i: Instruction) -> None:
        """Note that the result is part of the operand's memory, unless it was allocated."""
        (name,), root = i.outputs, self.program.root
        if root(name) not in self.allocated and isinstance(i.inputs[0], str):
            self.slices[root(name)] = root(i.inputs[0])

    def check_slices(self, i: Instruction) -> None:
        """Raise ProgramError where a write into a part of a buffer breaks the buffer's type."""
        root, slices = self.program.root, self.slices.keys()
        if not self.program.aliases and slices.isdisjoint(i.outputs) and slices.isdisjoint(i.reads):
            return
        if i.op == "free":
            for name in i.reads:
                self.slices.pop(root(name), None)
            return
        written = i.outputs if i.fn or i.op in BUFFER_OPS else received(i)
        if i.op not in ("recv", "post") and not (i.fn or i.op in BUFFER_OPS):
            return
        for name in map(root, written):
            seen = {name}
            while (of := self.slices.get(name)) is not None and of not in seen:
                self.check_slice(i, name, of)
                seen.add(name := of)

    def check_slice(self, i: Instruction, name: str, of: str) -> None:
        part, whole = self.program.types.get(name), self.program.types.get(of)
        if part is None or whole is None or part.layout is None or whole.layout is None:
            return
        if part.layout.mesh != whole.layout.mesh:
            raise self.partial_write(i, name, of, "lives on another mesh")
        chunk = chunk_of(part.layout)
        if chunk is not None and chunk.runs is not None and chunk_of(whole.layout) is None:
            hint = f"write a chunk of one run: chunk({chunk.dim},{2 * chunk.count},i), then another"
            raise self.partial_write(i, name, of, "is a copy of two runs of rows", hint)
        for axis in part.layout.mesh.axes:
            held, wanted = part.layout.placement(axis), whole.layout.placement(axis)
            is_wrong = isinstance(wanted, Replicate) and not isinstance(held, Replicate)
            if is_wrong and part.layout.mesh.axis_size(axis) > 1:
                raise self.partial_write(i, name, of, f"is {held} along {axis}")
            if isinstance(wanted, Replicate) and self.skips_chunks(part.layout, axis):
                what = f"is another chunk along {axis}, and not every one in turn"
                raise self.partial_write(i, name, of, what)

    def skips_chunks(self, layout: Layout, axis: str) -> bool:
        """Return whether ranks along an axis are at different chunks and do not come to all."""
        chunk = chunk_of(layout)
        index = chunk.index if chunk is not None else None
        if chunk is None or index is None or axis not in axes_of(index, layout.mesh):
            return False
        if not isinstance(index, Calc) or index.op != "mod" or index.right != chunk.count:
            return True
        turn = index.left  # the loop's index and something of the rank, added or subtracted
        if not isinstance(turn, Calc) or turn.op not in ("+", "-") or not self.loops:
            return True
        attrs = self.loops[-1].kwargs
        is_whole = (attrs["start"], attrs["stop"], attrs["step"]) == (0, chunk.count, 1)
        turning = Term("index", self.loops[-1].outputs[0])
        others = [x for x in (turn.left, turn.right) if x != turning]
        return not (is_whole and len(others) == 1 and turning not in terms(others[0]))

    def partial_write(
        self, i: Instruction, name: str, of: str, what: str, hint: str = ""
    ) -> ProgramError:
        hint = hint or f"let %{of} vary along the axis, and set it to its layout when it is done"
        text = self.text(of)
        return PARTIAL(self.program, i, name=name, what=what, of=of, text=text, hint=hint)


@dataclass(slots=True)
class _Elsewhere(NormalForm):
    """Types without the ranks of their mesh, and with the indices of loops as numbers."""

    letters: Numbers[str] = field(default_factory=Numbers)

    def mesh(self, mesh: DeviceMesh) -> Hashable:
        return mesh.axes, mesh.shape

    def term(self, term: Term) -> Hashable:
        return ("index", self.letters[term.name]) if term.kind == "index" else term


def _but_for_ranks(
    program: HostProgram, kinds: Sequence[BufferType | type]
) -> tuple[object, ...] | None:
    """Return a key of types without the ranks of their mesh; None where they have several meshes.

    The result of a row on all ranks of one mesh does not depend on the numbers of these ranks; nor
    on the names of the loop indices that number its chunks.
    """
    layouts = [k.layout for k in kinds if isinstance(k, BufferType) and k.layout is not None]
    meshes = {id(k.mesh): k.mesh for k in layouts}.values()
    if len(meshes) != 1 and len({*meshes}) != 1:
        return None
    form = _Elsewhere(program)
    return tuple([form.kind(k) if isinstance(k, BufferType) else k for k in kinds])


def _but_for_numbers(kinds: Iterable[BufferType | type], rank: int) -> tuple[object, ...]:
    """Return a key of types on a rank without the numbers of their chunks.

    The result of a row of chunks depends on their sizes, and on which of them are one chunk.
    """
    keys: list[object] = []
    numbers = Numbers[object]()
    for k in kinds:
        if not isinstance(k, BufferType) or k.layout is None or k.layout.stream is None:
            keys.append(k)
            continue
        layout, chunk = k.layout, k.layout.stream
        part = chunk.dim, chunk.chunks, chunk.rotate, chunk.op, numbers[chunk.index]
        parts = layout.mesh, layout.placements, layout.splits, layout.reaches, *part
        keys.append(
            (k.dtype, k.shape, k.padding, k.flat, k.counts, k.each, *parts, k.local_shape(rank))
        )
    return tuple(keys)
