"""The fields of a row of the op table; the rows themselves are in `mdfuse/ir/rows/`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mdfuse.ir import dims, shapes
from mdfuse.ir import local_attributes as of_part
from mdfuse.ir.attributes import Attr
from mdfuse.ir.local_attributes import ExprPart, Localize
from mdfuse.ir.out_forms import ANYHOW, Writes
from mdfuse.layouts.blocks import Blocks

#: The host instructions of elementwise ops: their result may be written into the buffer of an
#: operand that has the result's shape and memory order.
ELEMENTWISE = ("unary", "binary", "ternary", "where")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A row of the op table: the torch call that runs an op, and the properties that passes read.

    Attributes:
        name: as in `fd.ops.<name>`.
        call: `call(*operands, **attrs)` on whole tensors or on a rank's parts.
        rule: gives the labels of the dims of operands and result.
        shape: gives the shape of the result; None: torch is asked, which takes longer, and
            symbolic extents are pinned to their examples.
        writes: how the result comes into a buffer.
        host: the host instruction that runs it.
        localize: turns the attributes of the whole op into those for one rank's part.
        globalize: turns the attributes of one rank's part into those of the whole; None: those
            that only a part has are left out.
        partial: which operands may stay Partial. "view": any; "all": all of them, by one reduce op;
            "sum": all of them, by sum; "scale": the first alone, by sum, as nothing is rounded;
            "factor": either alone, but each term would be rounded, or overflow, so only where that
            moves fewer bytes; "quotient": as a scale, but what divides may be 0, so only where the
            result is to be Partial; "reduce": the first, by the op's own reduce op. Where the first
            operand has indices, the second counts as the first.
        is_view: the result may share storage with the first operand.
        is_plain: the results are said to lie in the order of their dims, whatever order the kernels
            of a device give.
        is_single: runs as a single host op; others are merged into segments by default.
        indexed: the position of the operand (a table) whose rows the first operand indexes, or the
            first ones where dims are named; "result": it indexes those of the result, which is made
            in the shape of the attributes.
        keeps: the position, -1 for the last, of an operand whose elements the result has but for
            those that the op writes: in the operand's own buffer it writes these alone. Read
            nowhere else.
        stays: the position of a matrix operand that keeps its split of the result's dims; the
            other operand moves (weights stay where they are).
        attrs: all attributes that it may have.
        operands: the least and the greatest number of operands; None: no limit.
        may_copy: a view that becomes a copy where the strides of its operand allow no view.
        is_library: a library's kernels run it, which a compiler calls as well.
        is_in_order: torch adds up in one order, on GPUs too, where a compiler would not.
        few: called in the place of `call` where each dim has two elements, to see the dtype of the
            result; None: `call` itself.
        meta: called in the place of `call` on the meta device; what it says counts, and no few
            elements are tried: the row is a user's, whose kernels may take large parts alone.
        results: how many results it has; where there are several, `call` returns a tuple of new
            tensors, and they live on one mesh.
    """

    name: str
    call: Callable[..., Any]
    rule: dims.Rule
    shape: shapes.ShapeRule | None
    writes: Writes
    host: str
    localize: Localize | None = None
    globalize: Localize | None = None
    partial: Literal["", "view", "all", "sum", "scale", "factor", "quotient", "reduce"] = ""
    is_view: bool = False
    is_plain: bool = False
    is_single: bool = True
    indexed: int | Literal["result"] | None = None
    keeps: int | None = None
    stays: int | None = None
    attrs: tuple[Attr, ...] = ()
    operands: tuple[int, int | None] = (1, 1)
    may_copy: bool = False
    is_library: bool = False
    is_in_order: bool = False
    few: Callable[..., Any] | None = None
    meta: Callable[..., Any] | None = None
    results: int = 1

    @property
    def term(self) -> int:
        """The position of the operand that may be Partial alone: the first but for indices."""
        return 0 if self.indexed is None else 1

    @property
    def is_creation(self) -> bool:
        """True if the op makes a tensor without reading one."""
        return self.rule is dims.creation

    @property
    def is_told_by_few(self) -> bool:
        """True if a run on few elements tells all about the results but their extents."""
        has_places = any(a.is_place for a in self.attrs if not a.is_local)
        return not (self.is_view or self.few or self.meta or has_places)

    def takes_blocks(self, labels: dims.DimMap, label: int, blocks: Blocks) -> bool:
        """Return whether dims with a label may be in blocks: nothing asks where a part lies.

        Rows that move are those of other blocks; in zigzag order they are of the same dim.
        """
        if label in labels.reaching and blocks != "zigzag":
            return False
        if labels.plain is not None:
            return label not in labels.plain
        return self.localize in _WHEREVER and labels.fits is dims.always

    def updates(self, operands: Sequence[object], names: Collection[object]) -> bool:
        """True if the result may be written over operands with some names: they are read once.

        Each element of them is read before it is written, or never.
        """
        if self.is_elementwise:
            return True
        read_at = [at for at, x in enumerate(operands) if x in names]
        return self.keeps is not None and read_at == [self.keeps % len(operands)]

    @property
    def is_elementwise(self) -> bool:
        """True if each element of the result is computed from one element of each operand."""
        return self.host in ELEMENTWISE


#: What makes attributes local by the extents of a part, or by the blocks that it has pieces of.
_WHEREVER = (
    None,
    of_part.local_runs,
    of_part.local_shape,
    of_part.local_ends,
    of_part.local_squeeze,
    of_part.global_count,
    of_part.with_identity,
    of_part.local_positions,
)

#: The rules that let one operand alone stay Partial, by sum: a factor either, else the first.
OF_FIRST = ("scale", "factor", "quotient")

#: field of a row -> what must hold of it.
_MUST: dict[str, Callable[[Op], bool]] = {
    "call": lambda op: callable(op.call),
    "few": lambda op: op.few is None or callable(op.few),
    "rule": lambda op: callable(op.rule),
    "shape": lambda op: op.shape is None or callable(op.shape),
    "writes": lambda op: type(op.writes) is Writes and (op.writes is ANYHOW or not op.is_view),
    "localize": lambda op: op.localize is None or callable(op.localize),
    "globalize": lambda op: (
        op.globalize is None or (callable(op.globalize) and op.localize is not None)
    ),
    "partial": lambda op: op.partial in ("", "view", "all", "sum", *OF_FIRST, "reduce"),
    "attrs": lambda op: len({a.name for a in op.attrs}) == len(op.attrs),
    "may_copy": lambda op: op.is_view or not op.may_copy,
    "results": lambda op: (
        op.results == 1
        or (op.results > 1 and not (op.writes.form or op.is_view or op.partial or op.is_creation))
    ),
    "name": lambda op: op.name not in TABLE,
}

TABLE: dict[str, Op] = {}


def checked(
    name: str,
    call: Callable[..., Any],
    rule: dims.Rule,
    shape: shapes.ShapeRule | None,
    writes: Writes,
    **fields: Any,
) -> Op:
    """Return a row after a check; by default its host instruction is named after the op."""
    op = Op(name=name, call=call, rule=rule, shape=shape, writes=writes, **{"host": name, **fields})
    for field, holds in _MUST.items():
        if not holds(op):
            raise TypeError(f"the row of {name!r} has the {field} {getattr(op, field)!r}")
    return op


def row(name: str, *args: Any, **fields: Any) -> None:
    """Add a row to `TABLE`; the arguments are those of `checked`."""
    TABLE[name] = checked(name, *args, **fields)


def local_attrs(op: Op, attrs: Mapping[str, Any], part: ExprPart) -> dict[str, Any]:
    """Return the attributes of an op for one rank's part of it."""
    attrs = dict(attrs)
    return op.localize(attrs, part) if op.localize else attrs
