"""The fusion IR: an immutable graph of expressions over named values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, Literal

import torch

from mdfuse.caching import Forgetful
from mdfuse.errors import MdfuseError, Source
from mdfuse.extents.expressions import Index
from mdfuse.layouts.layout import Layout, Placement
from mdfuse.layouts.stream import Stream
from mdfuse.names import is_name

#: What an expression reads: the name of a value, or a number, or nothing (an absent bias). In host
#: programs a number may be an index expression.
Operand = Index | str | bool | float | None

#: torch dtype -> its short name in printed programs.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


#: Words of the printed language; a string attribute that equals one of them is quoted.
_RESERVED = ("rank", "coord", "extent", "mod", "True", "False", "None")


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as programs print it: `torch.float32` -> "f32"."""
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Like:
    """A law by reference: a value lies as another one does, Replicate where that is Partial.

    Attributes:
        of: the name of the other value.
        past: the name of a value that a set made of it, where this one is what comes back through
            that set: then only the axes count that the set gathered or reduced, or all if it leads
            to another mesh. What the set only cut may stay cut.
        but: axis -> the placement that the user stated along it instead.
    """

    of: str
    past: str | None = None
    but: tuple[tuple[str, Placement], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor (or a host scalar) of a fusion, in global view.

    Attributes:
        name: unique in its fusion.
        shape: global extents; () for scalars.
        dtype: the element type.
        kind: "tensor", or "scalar" for a number that the host holds.
        order: the memory order on one device: the dims from outermost to innermost.
        order_from: who chose that order: the op that computes the value, the compiler (a hint,
            which may be dropped), or the user (a requirement, which is kept).
        expanded: dims that `expand` made: all elements along such a dim are one in memory.
        layout: where the value lives; None until it is inferred.
        copies: the other layouts in which expressions read the value, each with the first output
            of the expression, and whether it reads not the value, but what that is a view of.
        is_law: whether the user stated the layout.
        like: the value as which it lies; `propagate_layouts` makes a layout of it.
        stream: the host loop over chunks that computes the value, once `passes/streams.py` has
            taken it out of the layout; None for no loop.
        rows: the counts, [parts,experts], of rows of dim 2 that are there; the others are zero.
            None: all are there.
        is_counted: whether these rows alone are stored; `mdfuse.passes.count_rows` decides it.
        each: the most of them at a place, where buffers have room for no more; None: any.
        source: the user's line.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Literal["tensor", "scalar"] = "tensor"
    order: tuple[int, ...] = ()
    order_from: Literal["op", "hint", "user"] = "op"
    expanded: frozenset[int] = frozenset()
    layout: Layout | None = None
    copies: tuple[tuple[str, Layout, bool], ...] = ()
    is_law: bool = False
    like: Like | None = None
    stream: Stream | None = None
    rows: str | None = None
    is_counted: bool = False
    each: int | None = None
    source: Source | None = None

    @property
    def is_tensor(self) -> bool:
        """True if this is a tensor, not a host scalar."""
        return self.kind == "tensor"

    @property
    def is_order_required(self) -> bool:
        """True if the user requires the memory order."""
        return self.order_from == "user"

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The number of bytes of the whole value, expanded dims counted as one element."""
        n = self.dtype.itemsize
        for dim, extent in enumerate(self.shape):
            n *= 1 if dim in self.expanded else extent
        return n

    @property
    def placed(self) -> Layout:
        """The layout of a value that has one."""
        assert self.layout is not None
        return self.layout

    def copies_beside(self, expr: Expr) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """Return the layouts of copies that others need, and of views of what they need."""
        others: tuple[dict[Layout, None], ...] = {}, {}
        for reader, layout, is_viewed in self.copies:
            if reader != expr.outputs[0]:
                others[is_viewed][layout] = None
        return tuple(others[0]), tuple(others[1])

    def having(self, **changed: Any) -> Value:
        """Return the value with other fields, as `dataclasses.replace` does, in half of its time.

        Passes over layouts do little else.
        """
        new = object.__new__(Value)
        for put, x in zip(_PUT.values(), _FIELDS(self), strict=True):
            put(new, x)
        for name, x in changed.items():
            _PUT[name](new, x)
        return new

    def travels(self, *layouts: Layout) -> tuple[tuple[int, ...], list[Layout]]:
        """Return shape and layouts of the data sent: one element of an expanded dim, unsplit."""
        if not self.expanded:
            return self.shape, [*layouts]
        shape = tuple(1 if d in self.expanded else n for d, n in enumerate(self.shape))
        kept_dims = {d: d for d in range(len(shape)) if d not in self.expanded}
        return shape, [layout.with_dims(kept_dims) for layout in layouts]

    def type_text(self) -> str:
        """The type as programs print it: `f32[8,16]`."""
        extents = [*map(str, self.shape)]
        if self.rows is not None:
            extents[2] = f"<={extents[2]}:%{self.rows}"
        return f"{dtype_name(self.dtype)}[{','.join(extents)}]"


#: Name of a field of a value -> the function that sets it; all fields at once.
_PUT: dict[str, Callable[[Value, Any], None]] = {
    f.name: vars(Value)[f.name].__set__ for f in fields(Value)
}
_FIELDS = attrgetter(*_PUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expr:
    """One operation: a row of the op table, what it reads, what it defines.

    Attributes:
        op: a name of `mdfuse.ir.ops.TABLE`.
        inputs: value names, numbers, or None.
        outputs: the names of the values that it defines: one, or as many as its row has results.
        attrs: keyword arguments of the op, hashable.
        source: the user's line.
        reads: the names of the values that the expression reads.
        answer: the last strategies of the expression, with questions; see `passes/strategy.py`.
    """

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[str, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    source: Source | None = None
    reads: tuple[str, ...] = field(init=False, compare=False, repr=False)
    answer: Any = field(init=False, compare=False, repr=False, default=None)

    def __post_init__(self) -> None:
        reads = tuple([x for x in self.inputs if isinstance(x, str)])
        object.__setattr__(self, "reads", reads)

    @property
    def output(self) -> str:
        """The name of the only value that it defines; ValueError where it defines several."""
        (output,) = self.outputs
        return output

    @property
    def kwargs(self) -> dict[str, Any]:
        """The attributes as keyword arguments."""
        return dict(self.attrs)

    @property
    def note(self) -> str:
        """The note of the user's line: that gradients or recomputation made it; else ""."""
        return self.source.note if self.source is not None else ""

    def reading(self, names: Mapping[str, str]) -> Expr:
        """Return the expression with other operands: those of these names, by their new ones."""
        inputs = tuple([names.get(x, x) if isinstance(x, str) else x for x in self.inputs])
        return self if inputs == self.inputs else replace(self, inputs=inputs)

    def attrs_text(self) -> str:
        """The attributes as programs print them."""
        return attrs_text(self.attrs)


@dataclass(frozen=True, kw_only=True)
class Fusion(Forgetful):
    """A tensor program in global view: expressions in the order of their definition."""

    name: str
    values: Mapping[str, Value]
    exprs: tuple[Expr, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    #: outputs that are written into an input: output name -> input name.
    reuse: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    #: what passes chose, and why: a line each
    notes: tuple[str, ...] = ()
    #: what an import defined otherwise for other numbers of ranks; "": nothing
    by_ranks: str = ""
    #: value name -> its id in the definition; what passes added gets the following ones.
    ids: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def producers(self) -> dict[str, Expr]:
        """Name of a value -> the expression that defines it."""
        return {name: e for e in self.exprs for name in e.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[Expr, ...]]:
        """Name of a value -> the expressions that read it."""
        readers: dict[str, list[Expr]] = {name: [] for name in self.values}
        for expr in self.exprs:
            for name in dict.fromkeys(expr.reads):
                readers[name].append(expr)
        return {name: tuple(exprs) for name, exprs in readers.items()}

    @cached_property
    def returned(self) -> frozenset[str]:
        """The outputs, of which a training step has hundreds."""
        return frozenset(self.outputs)

    @cached_property
    def rows_by_counts(self) -> dict[str, Value]:
        """Counts -> the first value whose rows they alone count."""
        counted = [v for v in self.values.values() if v.is_counted and v.rows is not None]
        return {str(v.rows): v for v in reversed(counted)}

    @cached_property
    def capacities(self) -> dict[str, Expr]:
        """Counts, after `count_rows` -> what groups by them and states the lowest capacity."""
        stated = [e for e in self.exprs if e.op == "group_rows" and "capacity" in e.kwargs]
        stated.sort(key=lambda e: -int(e.kwargs["capacity"]))
        return {str(self.values[e.output].rows): e for e in stated}

    def layout(self, name: str) -> Layout:
        """Return the layout of a value that has one."""
        layout = self.values[name].layout
        assert layout is not None, f"{name} has no layout yet"
        return layout

    def noting(self, notes: Iterable[str], by_ranks: Iterable[str] = ()) -> Fusion:
        """Return this fusion with further notes, and with what it owes to the number of ranks."""
        return replace(
            self, notes=(*self.notes, *notes), by_ranks="".join(by_ranks) or self.by_ranks
        )

    def with_layouts(self, layouts: Mapping[str, Layout]) -> Fusion:
        """Return this fusion with the layouts of some values set."""
        values = dict(self.values)
        for name, layout in layouts.items():
            values[name] = values[name].having(layout=layout)
        return replace(self, values=values)

    def with_exprs(
        self, exprs: Iterable[Expr], values: Mapping[str, Value] | None = None
    ) -> Fusion:
        """Return this fusion with other expressions, and without values that these do not name."""
        exprs = tuple(exprs)
        named = {*self.inputs, *(x for e in exprs for x in e.outputs)}
        of = self.values if values is None else values
        return replace(self, values={n: v for n, v in of.items() if n in named}, exprs=exprs)

    def where(self, *names: str) -> list[str]:
        """Return the source lines of some values, for error messages."""
        sources = (self.values[n].source for n in names)
        return list(dict.fromkeys(s.quote() for s in sources if s))

    def __str__(self) -> str:
        return fusion_text(self)


def fresh_name(taken: Iterable[str] | Mapping[str, Any], base: str) -> str:
    """Return `base`, or the first of `base_1`, `base_2`, … that is not taken."""
    name, n = base, 0
    while name in taken:
        n += 1
        name = f"{base}_{n}"
    return name


class Names:
    """Find fresh names fast: a search starts where the last one for the same base ended.

    The names are those that `fresh_name` finds, which counts from the start. `free` must be called
    for a name that is no longer taken.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        #: base -> a number below which all are taken
        self._counts: dict[str, int] = {}

    def fresh(self, taken: Container[str], base: str) -> str:
        """Return `base`, or the first of `base_1`, `base_2`, … that is not taken."""
        n = self._counts.get(base, 0)
        while (name := f"{base}_{n}" if n else base) in taken:
            n += 1
        self._counts[base] = n
        return name

    def free(self, name: str) -> None:
        """Note that a name is no longer taken."""
        base, _, number = name.rpartition("_")
        self._counts.pop(name, None)
        if number.isdecimal() and base in self._counts:
            self._counts[base] = min(self._counts[base], int(number))


def attr_text(value: Any) -> str:
    """Return the value of an attribute as programs print it."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, tuple):
        return f"[{','.join(map(attr_text, value))}]"
    if isinstance(value, str):  # quoted where it would read as something other than a word
        is_word = is_name(value) and not hasattr(torch, value) and value not in _RESERVED
        return value if is_word else json.dumps(value, ensure_ascii=False)
    return str(value)


def attrs_text(attrs: Iterable[tuple[str, Any]]) -> str:
    """Return attributes as printed: `dims=[3], keepdim=True`; None and False are left out."""
    shown = ((k, v) for k, v in attrs if v is not None and v is not False)
    return ", ".join(f"{k}={attr_text(v)}" for k, v in shown)


def operand_text(operand: Operand) -> str:
    """Return an operand as programs print it."""
    return f"%{operand}" if isinstance(operand, str) else str(operand)


def value_text(value: Value) -> str:
    """Return a value with its type and layout as printed: `%x: f32[8,16] (tp=S0)`.

    A memory order that is not the op's own is shown, marked ! where the user requires it.
    """
    where = value.layout
    if where is not None and value.stream is not None:
        where = where.with_stream(value.stream)
    layout = f" {where}" if where is not None else ""
    if where is None and value.like is not None:
        layout = f" as %{value.like.of}" + "".join(f" {a}={p}" for a, p in value.like.but)
    law = "!" if value.is_law or (where is None and value.like is not None) else ""
    return f"%{value.name}: {value.type_text()}{layout}{law}{_order_text(value)}"


def _order_text(value: Value) -> str:
    if value.order_from == "op":
        return ""
    return f" order={attr_text(value.order)}" + "!" * value.is_order_required


def fusion_text(fusion: Fusion) -> str:
    """Return the text of a fusion; a layout marked ! is the user's, the others are inferred."""
    rows: list[tuple[str, Source | None]] = []
    for name in fusion.inputs:
        value = fusion.values[name]
        rows.append((f"{value_text(value)} = input", value.source))
    for e in fusion.exprs:
        arguments = ", ".join(filter(None, (*map(operand_text, e.inputs), e.attrs_text())))
        outputs = ", ".join(value_text(fusion.values[name]) for name in e.outputs)
        rows.append((f"{outputs} = {e.op}({arguments})", e.source))
    returned = ", ".join(
        f"%{n}" + (f" (into %{fusion.reuse[n]})" if n in fusion.reuse else "")
        for n in fusion.outputs
    )
    rows.append((f"return {returned}".rstrip(), None))
    width = min(max((len(t) for t, _ in rows), default=0), 88)
    lines = [f"  {t:<{width}}  # {s}" if s else f"  {t}" for t, s in rows]
    meshes = dict.fromkeys(v.layout.mesh for v in fusion.values.values() if v.layout is not None)
    on = f" on {', '.join(map(repr, meshes))}" if meshes else ""
    return "\n".join((f"fusion @{fusion.name}{on} {{", *lines, "}"))


def has_same_code(before: Fusion, after: Fusion) -> bool:
    """Return whether a fusion has the very expressions, and the inputs and outputs, of another."""
    if (before.name, before.inputs, before.outputs) != (after.name, after.inputs, after.outputs):
        return False
    return len(before.exprs) == len(after.exprs) and all(map(is_, before.exprs, after.exprs))


def leading_to(
    exprs: Sequence[Expr], names: Iterable[str], also: Callable[[Expr], bool] | None = None
) -> tuple[Expr, ...]:
    """Return the expressions, in their order, that lead to some values, or to others as well.

    Args:
        exprs: the expressions.
        names: the values.
        also: whether an expression is needed, too, whoever reads it.
    """
    needed, leading = {*names}, list[Expr]()
    for expr in reversed(exprs):
        if not needed.isdisjoint(expr.outputs) or (also is not None and also(expr)):
            needed.update(expr.reads)
            leading.append(expr)
    return tuple(reversed(leading))


def following(
    exprs: Iterable[Expr], names: Iterable[str], also: Callable[[Expr], bool] | None = None
) -> set[str]:
    """Return some values, and those that follow from them, or from results of others as well."""
    after = {*names}
    for expr in exprs:
        if not after.isdisjoint(expr.reads) or (also is not None and also(expr)):
            after.update(expr.outputs)
    return after


def check_fusion(fusion: Fusion) -> None:
    """Raise MdfuseError unless every value is defined once, before its first use."""
    defined = set(fusion.inputs)
    for expr in fusion.exprs:
        missing = [x for x in expr.reads if x not in defined]
        if missing or not defined.isdisjoint(expr.outputs):
            raise MdfuseError(
                f"@{fusion.name}: {expr.op} -> %{', %'.join(expr.outputs)} "
                + (f"reads undefined {missing}" if missing else "defines a value twice"),
                because="a fusion defines every value once, before its first use",
            )
        defined.update(expr.outputs)
    for name in fusion.outputs:
        if name not in defined:
            raise MdfuseError(f"@{fusion.name}: output %{name} is not defined")
