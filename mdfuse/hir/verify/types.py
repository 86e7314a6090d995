"""Types of a host program: what each instruction makes is what its name is declared to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mdfuse.errors import MdfuseError
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.verify.report import wrong
from mdfuse.hir.verify.rows import lacks, row_problem
from mdfuse.ir.extremes import is_number_of
from mdfuse.ir.graph import Operand, dtype_name
from mdfuse.layout import Box

MEMORY = ("device", "host", "pinned", "symmetric")


def check_types(program: HostProgram) -> None:
    """Raise ProgramError where an instruction makes something else than is declared.

    Operands without a type are left out: who reads them reads what nothing computed.
    """
    _Types(program).block(program.instructions)


@dataclass(slots=True)
class _Types:
    program: HostProgram
    #: name -> a number that stands for its type
    codes: dict[str, int] = field(default_factory=dict)
    kinds: dict[BufferType | None, int] = field(default_factory=lambda: {None: 0})
    #: rows with operands that were checked
    seen: set[object] = field(default_factory=set)

    def block(self, block: Iterable[Instruction]) -> None:
        rules = _RULES
        for i in block:
            rule = rules.get(i.op)
            if rule is not None:
                rule(self, i)
            elif i.fn:
                self.row(i)
            if i.body:
                self.block(i.body)
                self.block(i.orelse)

    def code(self, x: Operand) -> object:
        """What stands for the type of an operand."""
        if type(x) is str:
            code = self.codes.get(x)
            return self.intern(x) if code is None else code
        return type(x)

    def intern(self, name: str) -> int:
        kind = self.program.types.get(name)
        code = self.kinds.get(kind)
        if code is None:
            assert kind is not None
            self.check_kind(name, kind)
            code = self.kinds[kind] = len(self.kinds)
        self.codes[name] = code
        return code

    def made(self, i: Instruction) -> BufferType:
        """The declared type of what an instruction makes."""
        (name,) = i.outputs
        self.intern(name)
        kind = self.program.types.get(name)
        if kind is None:
            raise wrong(
                self.program,
                i,
                f"%{name} has no type",
                because="each buffer and number has one, which says what it stands for",
                hint="add it to the types of the program",
            )
        return kind

    def check_kind(self, name: str, kind: BufferType) -> None:
        """The layout is about dims that there are."""
        if kind.layout is None:
            return
        n, stream = len(kind.shape), kind.layout.stream
        dims = [d for d, _ in kind.layout.splits]
        dims += [stream.dim] if stream is not None else []
        dims += [kind.padding.dim] if kind.padding is not None else []
        for d in dims:
            if not -n <= d < n:
                raise wrong(
                    self.program,
                    self.first(name),
                    f"%{name} has {n} dims, but its type is about dim {d}",
                    hint=f"dims go from 0 to {n - 1}" if n else "a scalar cannot be split",
                )

    def first(self, name: str) -> Instruction | None:
        """The first instruction that makes a name."""
        return next((i for i in self.program.walk() if name in i.outputs), None)

    # -- rows of the op table --------------------------------------------------------------------

    def row(self, i: Instruction) -> None:
        code = self.code
        result = code(i.outputs[0])
        key = (i.fn, i.attrs, i.order, result, tuple([code(x) for x in i.inputs]))
        if key not in self.seen:
            self.check_row(i)
            self.seen.add(key)

    def check_row(self, i: Instruction) -> None:
        types, result = self.program.types, self.made(i)
        operands = [types.get(x) if isinstance(x, str) else type(x) for x in i.inputs]
        known = tuple(k for k in operands if k is not None)
        if len(known) < len(operands):
            return
        self.check_order(i, result)
        if i.fn == "permute":
            self.check_permutation(i, "dims", i.kwargs["dims"], len(result.shape))
        problem = row_problem(i.fn, i.attrs, known, result, self.program.rank)
        if problem is not None:
            raise self.mismatch(i, problem)

    def mismatch(self, i: Instruction, problem: str) -> MdfuseError:
        operands = [x for x in dict.fromkeys(i.reads) if x in self.program.types]
        texts = [f"%{x}: {self.text(x)}" for x in (*i.outputs, *operands)]
        return wrong(
            self.program,
            i,
            f"{i} is declared {self.text(i.outputs[0])}, but {problem}",
            because="with " + ", ".join(texts),
            hint="declare what the op makes of its operands, with the layout they have",
        )

    def text(self, name: str) -> str:
        kind = self.program.types[name]
        if kind.layout is None:
            return f"{dtype_name(kind.dtype)} scalar"
        shape = ",".join(map(str, kind.shape))
        flags = " flat" * kind.flat + f" padded to {kind.local_shape(self.program.rank)}" * (
            kind.padding is not None
        )
        return f"{dtype_name(kind.dtype)}[{shape}] {kind.layout}{flags}"

    def check_order(self, i: Instruction, kind: BufferType) -> None:
        if i.order is not None and kind.layout is not None:
            n = len(kind.local_shape(self.rank_of(kind)))
            self.check_permutation(i, "order", i.order, n)

    def check_permutation(self, i: Instruction, what: str, dims: tuple[int, ...], n: int) -> None:
        if sorted(d + n if d < 0 else d for d in dims) != list(range(n)):
            raise wrong(
                self.program,
                i,
                f"{i}: {what}={list(dims)} is no permutation",
                because=f"%{i.outputs[0]} has {n} dims, and each is named once",
                hint=f"for example {what}={list(range(n))}",
            )

    # -- buffer ops ------------------------------------------------------------------------------

    def rank_of(self, kind: BufferType) -> int:
        """The rank whose part of a buffer is looked at."""
        assert kind.layout is not None
        return kind.layout.mesh.first if self.program.rank is None else self.program.rank

    def pair(self, i: Instruction) -> tuple[BufferType, BufferType] | None:
        """The types of the operand and the result, both buffers with elements of one dtype."""
        after, source = self.made(i), i.inputs[0] if i.inputs else None
        before = self.program.types.get(source) if isinstance(source, str) else None
        if before is None or not isinstance(source, str):
            return None
        self.intern(source)
        if before.layout is None or after.layout is None:
            raise self.mismatch(i, f"{i.op} is for buffers, not for numbers")
        if before.dtype != after.dtype:
            raise self.mismatch(i, f"{i.op} keeps the dtype {dtype_name(before.dtype)}")
        if lack := lacks(before.layout, after.layout, self.program.rank):
            raise self.mismatch(i, lack)
        self.check_order(i, after)
        return before, after

    def same_shape(self, i: Instruction) -> tuple[BufferType, BufferType] | None:
        pair = self.pair(i)
        if pair is not None and pair[0].shape != pair[1].shape:
            raise self.mismatch(i, f"{i.op} keeps the global shape {list(pair[0].shape)}")
        return pair

    def narrow(self, i: Instruction) -> None:
        """What a rank holds of the result lies in what it holds of the operand."""
        pair = self.same_shape(i)
        if pair is None:
            return
        before, after = pair
        self.check_chunk(i, after)
        rank = self.rank_of(after)
        inner, outer = after.box(rank), before.box(rank)
        is_part = all(a <= p and q <= b for (p, q), (a, b) in zip(inner, outer, strict=True))
        if not is_part and all(p < q for p, q in inner):
            raise self.mismatch(i, f"rank {rank} has {_box_text(outer)}, not {_box_text(inner)}")

    def check_chunk(self, i: Instruction, kind: BufferType) -> None:
        stream = kind.layout.stream if kind.layout is not None else None
        at = stream.index if stream is not None else None
        if stream is not None and isinstance(at, int) and not 0 <= at < stream.count:
            problem = f"there is no chunk {at} of dim {stream.dim}: it has {stream.count}"
            raise self.mismatch(i, problem)

    def chunk(self, i: Instruction) -> None:
        kind = self.made(i)
        stream = kind.layout.stream if kind.layout is not None else None
        if stream is None or stream.index is None:
            raise self.mismatch(i, "a chunk has chunk(dim,count,index) in its layout")
        self.narrow(i)

    def select(self, i: Instruction) -> None:
        """One dim goes; the index is one that there is, or the dim has extent 1."""
        pair = self.pair(i)
        if pair is None:
            return
        dim, index = i.kwargs["dim"], i.kwargs["index"]
        before, after = pair
        n = len(before.shape)
        name = f"select(%{i.reads[0]}, dim={dim}, index={index})"
        if not -n <= dim < n:
            raise wrong(
                self.program,
                i,
                f"{name}: there is no dim {dim}",
                because=f"%{i.reads[0]} has shape {before.shape}",
                hint=f"dims go from {-n} to {n - 1}",
            )
        dim %= n
        if after.shape != (*before.shape[:dim], *before.shape[dim + 1 :]):
            raise self.mismatch(i, f"select drops dim {dim} of {list(before.shape)}")
        extent = before.local_shape(self.rank_of(after))[dim]
        if isinstance(index, int) and extent != 1 and not -extent <= index < extent:
            raise wrong(
                self.program,
                i,
                f"{name}: index {index} is out of range for dim {dim}",
                because=f"%{i.reads[0]} has {extent} of it on rank {self.rank_of(after)}",
                hint=f"indices go from 0 to {extent - 1}" if extent else "it has no elements",
            )

    def unexpand(self, i: Instruction) -> None:
        pair = self.pair(i)
        dims = i.kwargs["dims"]
        if pair is None:
            return
        want = tuple(1 if d in dims else n for d, n in enumerate(pair[0].shape))
        if want != pair[1].shape:
            raise self.mismatch(i, f"unexpand makes {list(want)}")

    def pad(self, i: Instruction) -> None:
        pair = self.same_shape(i)
        if pair is not None and pair[1].padding is None:
            raise self.mismatch(i, "what pad makes is padded")

    def pack(self, i: Instruction) -> None:
        pair = self.same_shape(i)
        if pair is not None and not pair[1].flat:
            raise self.mismatch(i, "what pack makes is flat")

    def zeros(self, i: Instruction) -> None:
        self.same_shape(i)

    def alloc(self, i: Instruction) -> None:
        kind, memory = self.made(i), i.kwargs.get("memory", "device")
        if memory not in MEMORY:
            raise wrong(
                self.program, i, f"alloc(memory={memory})", hint="one of " + ", ".join(MEMORY)
            )
        if kind.layout is None:
            raise self.mismatch(i, "a number needs no buffer")
        fill = i.kwargs.get("fill")
        if fill is not None and not is_number_of(fill, kind.dtype):
            raise wrong(
                self.program,
                i,
                f"alloc(fill={fill}) of {dtype_name(kind.dtype)}",
                because="the buffer is filled with a number of its dtype",
                hint="leave fill= out, or alloc(fill=0)",
            )
        self.check_order(i, kind)

    def post(self, i: Instruction) -> None:
        """The buffers have the dtype of the communication."""
        assert i.comm is not None
        for name in i.reads:
            kind = self.program.types.get(name)
            self.intern(name)
            if kind is None or (kind.layout is not None and kind.dtype == i.comm.dtype):
                continue
            dtype = dtype_name(i.comm.dtype) if i.comm.dtype is not None else "nothing"
            raise wrong(
                self.program,
                i,
                f"{i.op} {i.comm} of {dtype} with %{name}, which is {self.text(name)}",
                because="a communication moves buffers of one dtype",
                hint="cast the value before",
            )


def _nothing(types: _Types, i: Instruction) -> None:
    """It makes no buffer."""


#: op -> what is checked; the others are rows of the op table.
_RULES: dict[str, Callable[[_Types, Instruction], None]] = {
    "alloc": _Types.alloc,
    "narrow": _Types.narrow,
    "chunk": _Types.chunk,
    "select": _Types.select,
    "unexpand": _Types.unexpand,
    "pad": _Types.pad,
    "pack": _Types.pack,
    "zeros": _Types.zeros,
    "post": _Types.post,
    "launch": _nothing,
}


def _box_text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
