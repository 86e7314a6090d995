"""Check the form of a host program, which must be right whatever runs the program.

Each instruction has the operands and attributes of its row (`mdfuse.hir.instructions`), each type
is about dims that it has, names are names. The parser checks this line by line; programs that were
built by hand are checked before they are projected, written out, printed or verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mdfuse.errors import ProgramError, counted, near
from mdfuse.extents.expressions import DEEPEST, LARGEST, Calc, Index, Term, terms
from mdfuse.hir.instructions import BUFFER_OPS, INSTRUCTIONS, Row, op_of, row_of
from mdfuse.ir.attributes import Attr, is_permutation
from mdfuse.ir.dtype_limits import is_number_of
from mdfuse.ir.graph import attr_text, dtype_name
from mdfuse.ir.ops import TABLE
from mdfuse.names import RULE, base_name, is_name, is_value_name

if TYPE_CHECKING:
    from mdfuse.hir.program import BufferType, HostProgram, Instruction


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of form: what is wrong, the rule that it breaks, and what to do instead."""

    what: str
    because: str
    hint: str


def check_forms(program: HostProgram) -> None:
    """Raise ProgramError where something in a program has a wrong form."""
    check_nesting(program)
    for kind, name in {id(kind): (kind, name) for name, kind in program.types.items()}.values():
        fault = kind_problem(name, kind)
        if fault is not None:
            raise _refused(program, None, fault)
    fault = program_problem(program)
    if fault is not None:
        raise _refused(program, None, fault)
    for i in program.walk():
        fault = problem(i, program.types, program.rank)
        if fault is not None:
            raise _refused(program, i, fault)


def _refused(program: HostProgram, i: Instruction | None, fault: Problem) -> ProgramError:
    where = [f"host @{program.name}"]
    if i is not None:
        quote = [i.source.quote()] if i.source else []
        where = [_shown(i), *quote]
    what = f"@{program.name}: {fault.what}"
    return ProgramError(what, where=where, because=fault.because, hint=fault.hint)


def _shown(i: Instruction) -> str:
    """Return an instruction as text, even if its form is wrong."""
    results = ", ".join(f"%{n}" for n in i.outputs)
    read = ", ".join(f"%{x}" if isinstance(x, str) else str(x) for x in i.inputs)
    attrs = ", ".join(f"{k}={attr_text(v)}" for k, v in i.attrs)
    call = f"{i.fn or i.op}({', '.join(filter(None, (read, attrs)))})"
    return f"{results} = {call}" if results else call


def check_nesting(program: HostProgram) -> None:
    """Raise ProgramError where blocks are nested too deeply for recursion.

    This goes down level by level, so that it needs no recursion itself.
    """
    level: list[Instruction] = list(program.instructions)
    for _ in range(DEEPEST + 1):
        level = [inner for i in level for inner in (*i.body, *i.orelse)]
        if not level:
            return
    raise ProgramError(
        f"@{program.name}: blocks of instructions are nested more than {DEEPEST} deep",
        where=f"host @{program.name}",
        because=f"at most {DEEPEST} loops, branches and units are one inside the other",
        hint="one loop over i, with i // n and i mod n, does what two do",
    )


def refuse(fault: Problem | None) -> None:
    """Raise ProgramError for a problem."""
    if fault is not None:
        raise ProgramError(fault.what, because=fault.because, hint=fault.hint)


def program_problem(program: HostProgram) -> Problem | None:
    """Return what is wrong with the names, indices and aliases of a program; None: nothing."""
    if not is_name(program.name):
        return Problem(f"a program is named {program.name!r}", RULE, "name it otherwise")
    names = (*program.inputs, *program.outputs, *program.aliases, *program.types)
    for name in names:
        if not _is_of_value(name):
            return Problem(f"a value is named {name!r}", RULE, "name it otherwise")
    for kind in {id(kind): kind for kind in program.types.values()}.values():
        stream = kind.layout.stream if kind.layout is not None else None
        if stream is not None and stream.index is not None:
            fault = _of_index(stream.index, program.types)
            if fault is not None:
                return fault
    fault = _of_alias_orders(program)
    return fault or (_of_aliases(program) if program.rank is None else None)


def _of_alias_orders(program: HostProgram) -> Problem | None:
    """Return what is wrong with a memory order that an alias asks for; None: nothing."""
    for name, order in program.alias_orders.items():
        what = f"alias %{name} with order={attr_text(order)}"
        kind = program.types.get(name)
        if kind is None and program.rank is not None:
            continue  # another rank's
        if kind is None or program.aliases.get(name) is None or not _is_of_input(program, name):
            because = "it asks for the memory order of what a caller passes"
            return Problem(what, because, f"leave it out, or make %{name} an alias of an input")
        n = 1 if kind.flat else len(kind.shape)
        if not is_permutation(order, n):
            because = f"it names the {n} dims from outermost to innermost"
            return Problem(what, because, f"for example order={list(range(n))}")
    return None


def _is_of_input(program: HostProgram, name: str) -> bool:
    return program.root(name) in program.inputs


def _of_aliases(program: HostProgram) -> Problem | None:
    """Return what is wrong with an alias of a buffer that nothing makes; None where there is none.

    Only global programs are asked: a projection keeps the aliases of buffers that other ranks make.
    """
    bound = {*program.inputs, *(n for i in program.walk() for n in i.outputs)}
    if not program.aliases.keys() - bound:
        return None
    bound = set(map(program.root, bound))
    for name, of in program.aliases.items():
        if program.root(of) not in bound:
            return Problem(
                f"alias %{name} = %{of}, but nothing makes %{program.root(of)}",
                "an alias acts on the buffer of an input, or of what an instruction makes",
                "leave the alias out, or name what it stands for",
            )
    return None


# -- types ---------------------------------------------------------------------------------------


def kind_problem(name: str, kind: BufferType) -> Problem | None:
    """Return what is wrong with a type by itself; None: nothing."""
    if kind.layout is None:
        return None
    n, stream, padding = len(kind.shape), kind.layout.stream, kind.padding
    dims = [d for d, _ in kind.layout.splits]
    dims += [stream.dim] if stream is not None and stream.op is None else []
    dims += [padding.dim] if padding is not None else []
    for d in dims:
        if not -n <= d < n:
            return Problem(
                f"%{name} has {counted(n, 'dim')}, but its type is about dim {d}",
                "splits, chunks and padding are along dims of the tensor",
                f"dims go from 0 to {n - 1}" if n else "a scalar cannot be split",
            )
    if kind.dtype.itemsize * math.prod(max(e, 1) for e in kind.shape) > LARGEST:
        return Problem(
            f"%{name} has {list(kind.shape)} elements",
            "the bytes of a tensor are counted in 64 bits",
            "split the work into smaller tensors",
        )
    return None


# -- instructions --------------------------------------------------------------------------------


def problem(
    i: Instruction, types: Mapping[str, BufferType], rank: int | None = None
) -> Problem | None:
    """Return what is wrong with the form of an instruction; None where it is as its row says.

    Args:
        i: the instruction; what is inside it is not looked at.
        types: of the names that it may read and bind.
        rank: whose program it is; None for the global one.
    """
    row = row_of(i)
    if row is None:
        return _unknown(i)
    fault = _of_parts(i, row) or _of_operands(i, row) or _of_counts(i, types)
    if fault is None and (i.attrs or row.attrs or row.sets):
        fault = _of_attributes(i, row, types, rank) or _of_fill(i, types)
    if fault is None and i.order is not None:
        fault = _of_order(i, row, types)
    for index in i.indices if fault is None else ():
        fault = fault or _of_index(index, types)
    return fault


def _unknown(i: Instruction) -> Problem:
    op = op_of(i)
    if op is not None:
        what = f"{op.name} as {i.op!r}"
        return Problem(what, f"{op.name} is run by {op.host!r}", f"op={op.host!r}, fn={op.name!r}")
    known = near(i.op, dict.fromkeys((*(row.host for row in TABLE.values()), *INSTRUCTIONS)))
    what = f"there is no instruction {i.op!r}" + (f" with {i.fn!r}" if i.fn else "")
    return Problem(what, "a program is made of those that there are", f"near it are {known}")


def _of_parts(i: Instruction, row: Row) -> Problem | None:
    """Return why an instruction has a communication, body or outputs other than its row says."""
    if (i.comm is not None) != bool(row.sets):
        what = f"{row.name} {'with' if i.comm is not None else 'without'} a communication"
        return Problem(what, "posts and barriers have one", "pass comm=Communication(...) to these")
    if i.comm is not None and i.op == "post" and i.comm.dtype is None:
        return Problem("a post of no dtype", "what it moves has one", "give the communication one")
    is_open = row.is_block or row.name == "launch"
    if (i.body and not is_open) or (i.orelse and row.name != "if"):
        what = f"{row.name} with instructions inside it"
        return Problem(what, "loops, branches and units hold instructions", "put them behind it")
    makes, results = len(i.outputs), row.results if row.makes is not None else 0
    if row.makes != "values" and makes != results:
        what = f"{row.name} defines {makes} names"
        return Problem(what, f"it defines {results}", "name what it makes")
    if makes > 1 and len({*i.outputs}) < makes:
        what = f"{row.name} defines %{i.outputs[0]} twice"
        return Problem(what, "each result has a name of its own", "name them differently")
    for n in (*i.outputs, *i.inputs):
        if isinstance(n, str) and not _is_of_value(n):
            return Problem(f"a value is named {n!r}", RULE, "name it otherwise")
    return None


@lru_cache(1 << 15)
def _is_of_value(name: str) -> bool:
    """Return whether a value may have a name; the number of an iteration follows an @."""
    return is_value_name(base_name(name))


# -- operands ------------------------------------------------------------------------------------


def _of_operands(i: Instruction, row: Row) -> Problem | None:
    (least, most), count = row.operands, len(i.inputs)
    if count < least or (most is not None and count > most):
        return Problem(
            f"{row.name} of {_count(len(i.inputs))}",
            f"it takes {_operands_text(row)}",
            f"write {row.name} with {_operands_text(row)}",
        )
    for x in i.inputs:
        if type(x) is not str and not _is_operand(x, row):
            return Problem(
                f"{row.name} of {x}",
                "it takes names" if row.takes == "names" else "numbers have 64 bits",
                f"write {row.name} with {_operands_text(row)}",
            )
    if row.name in ("set_stream", "sync") and bool(i.attrs) == bool(i.inputs):
        what = f"{row.name} of {len(i.inputs) + len(i.attrs)} streams"
        return Problem(what, "it takes one: an index, or what get_stream gave", f"{row.name} 0")
    return None


def _of_counts(i: Instruction, types: Mapping[str, BufferType]) -> Problem | None:
    """Return why rows are counted otherwise than an instruction says; None where they are not."""
    if i.op not in ("alloc", "post"):
        return None
    rows, given = (i.outputs, i.inputs) if i.op == "alloc" else (i.inputs[:2], i.inputs[2:])
    kinds = [types[x] for x in rows if isinstance(x, str) and x in types]
    by = {k.counts for k in kinds}
    if not kinds or by == ({*given} or {None}):
        return None
    wanted = [f"%{x}" for x in by if x is not None]
    what = f"{i.op} of {_count(len(i.inputs))}" + "".join(f" by %{x}" for x in given)
    because = (
        f"its rows are counted by {', '.join(wanted)}" if wanted else "no rows of it are counted"
    )
    hint = (
        f"name {', '.join(wanted)} in it" if wanted else f"write {i.op} with no operands of counts"
    )
    return Problem(what, because, hint)


def _is_operand(x: Any, row: Row) -> bool:
    if isinstance(x, str):
        return True
    if row.takes == "names":
        return x is None and row.name not in BUFFER_OPS and row.name not in ("send", "recv", "wait")
    if type(x) is int:
        return -LARGEST - 1 <= x <= LARGEST
    return x is None or isinstance(x, (bool, float, Term, Calc))


def _count(n: int) -> str:
    return counted(n or "no", "operand")


def _operands_text(row: Row) -> str:
    least, most = row.operands
    if most is None:
        return f"at least {_count(least)}" if least else "any operands"
    return _count(most) if least == most else f"{least} to {most} operands"


# -- attributes ----------------------------------------------------------------------------------


def _of_attributes(
    i: Instruction, row: Row, types: Mapping[str, BufferType], rank: int | None
) -> Problem | None:
    comm, dims = i.comm, _Dims(i, types)
    if i.attrs or row.attrs:
        fault = attributes_problem(row.name, row.attrs, i.attrs, rank, dims)
        if fault is not None:
            return fault
    if comm is None:
        return None
    settings = [(a.name, getattr(comm, a.name)) for a in row.sets]
    return attributes_problem(row.name, row.sets, settings, rank, dims)


@dataclass(slots=True)
class _Dims:
    """The numbers of dims that attributes of an instruction are about."""

    i: Instruction
    types: Mapping[str, BufferType]

    def of(self, a: Attr) -> int | None:
        if self.i.comm is not None:
            return len(self.i.comm.shape)
        names = self.i.outputs[:1] if a.of == "result" else self.i.reads[:1]
        kind = self.types.get(names[0]) if names else None
        return None if kind is None or kind.layout is None else len(kind.shape)

    def text(self, a: Attr) -> str:
        n = self.of(a)
        if n is None or "dim" not in a.kind:
            return ""
        return f"; dims go from {-n} to {n - 1}" if n else "; there is no dim"


def attributes_problem(
    name: str,
    attrs: tuple[Attr, ...],
    given: Iterable[tuple[str, Any]],
    rank: int | None = None,
    dims: _Dims | None = None,
) -> Problem | None:
    """Return what is wrong with attributes; None: nothing.

    Args:
        name: of the instruction.
        attrs: those that it has.
        given: those that are given; None and False are what is not given.
        rank: whose program it is; None for the global one.
        dims: of the tensors that they are about.
    """
    seen = set[str]()
    for key, value in given:
        a = _named(attrs, key, rank)
        if a is None or key in seen:
            what = (
                f"{name} with {key}= twice" if key in seen else f"{name} has no attribute {key!r}"
            )
            return Problem(what, _known_text(name, attrs), f"leave {key}= out")
        seen.add(key)
        if value is None or (value is False and not a.required):
            if a.required:
                seen.discard(key)
            continue
        if not a.holds(value, dims.of(a) if dims is not None else None):
            what = f"{name} with {key}={attr_text(value)}"
            range_text = dims.text(a) if dims is not None else ""
            return Problem(what, f"{key} is {a.kind}{range_text}", _known_text(name, attrs))
    for a in attrs:
        if a.required and a.name not in seen and (rank is not None or not a.is_local):
            known = _known_text(name, attrs)
            return Problem(f"{name} without {a.name}=", known, f"add {a.name}=, {a.kind}")
    return None


def _named(attrs: tuple[Attr, ...], key: str, rank: int | None) -> Attr | None:
    """Return the attribute of a name that programs of a rank, or of all, may have."""
    for a in attrs:
        if a.name == key and (rank is not None or not a.is_local):
            return a
    return None


def _known_text(name: str, attrs: tuple[Attr, ...]) -> str:
    named = [f"{a.name} ({a.kind})" for a in attrs if not a.is_local]
    return f"{name} has the attributes {', '.join(named)}" if named else f"{name} has no attributes"


def _of_fill(i: Instruction, types: Mapping[str, BufferType]) -> Problem | None:
    """Return why a buffer cannot hold the number that it is filled with; None where it can."""
    kind, fill = types.get(i.outputs[0]) if i.op == "alloc" else None, i.kwargs.get("fill")
    if kind is None or fill is None or is_number_of(fill, kind.dtype):
        return None
    what = f"alloc(fill={fill}) of {dtype_name(kind.dtype)}"
    hint = "leave fill= out, or alloc(fill=0)"
    return Problem(what, "the buffer is filled with a number of its dtype", hint)


def _of_order(i: Instruction, row: Row, types: Mapping[str, BufferType]) -> Problem | None:
    """Return why a memory order is no permutation of the result's dims; None where it is one."""
    if i.order is None:
        return None
    if row.makes != "value" or row.results > 1:
        what = f"{row.name} with a memory order"
        because = "buffers have one" if row.makes != "value" else "its results come as they do"
        return Problem(what, because, "leave `contiguous` or `order=` out")
    kind = types.get(i.outputs[0])
    n = None if kind is None or kind.layout is None else 1 if kind.flat else len(kind.shape)
    if is_permutation(i.order, n):
        return None
    dims = f"%{i.outputs[0]} has {counted(n, 'dim')}, and each is named once"
    return Problem(
        f"{i}: order={attr_text(i.order)} is no permutation",
        dims,
        f"for example order={list(range(n or 0))}",
    )


# -- index expressions ---------------------------------------------------------------------------


def _of_index(index: Index, types: Mapping[str, BufferType]) -> Problem | None:
    """Return why an index expression names an extent that is not there; None where it does not."""
    for term in terms(index):
        if term.kind != "extent":
            continue
        kind = types.get(term.name)
        if kind is None or kind.layout is None:
            what = f"{term}, but %{term.name} is no buffer"
            return Problem(what, "buffers have extents", "name a buffer")
        n = 1 if kind.flat else len(kind.shape)
        if not 0 <= term.dim < n:
            what = f"{term}, but %{term.name} has {counted(n, 'dim')}"
            return Problem(what, "dims count from 0", "name one of its dims")
    return None
