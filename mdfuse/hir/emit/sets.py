"""Emit sets: as nothing, local slices, or communications with the buffers that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from mdfuse.communication import Communication
from mdfuse.errors import LayoutError, Source
from mdfuse.extents.extent import is_symbolic
from mdfuse.hir.emit.expanded_dims import Squeezed, without_expanded
from mdfuse.hir.instructions import CUTS
from mdfuse.hir.program import BufferType, Instruction, Padding, brings_together
from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.ir.ops import TABLE
from mdfuse.ir.writes import has_orders
from mdfuse.layouts.kinds import SPLITTING
from mdfuse.layouts.layout import Layout
from mdfuse.reshard import Carriers, Local, Step, extra, in_fewer_posts, received, steps, with_type

#: Name -> the memory order to state; None: none is stated.
Orders = Mapping[str, tuple[int, ...] | None]
#: The layouts before and after, the global shape, and the bytes of an element.
_Change = tuple[Layout, Layout, tuple[int, ...], int]
_T = TypeVar("_T")


@dataclass
class Emitter:
    """The host program under construction, within one call of `emit`."""

    fusion: Fusion
    types: dict[str, BufferType] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    #: buffers that are dense in their own dim order
    dense: set[str] = field(default_factory=set)
    #: values that are views of a received buffer: a permutation, or a part, of it
    arrived: set[str] = field(default_factory=set)
    #: value -> the memory order that its instruction states, whatever the value requires
    stated: Orders = field(default_factory=dict)
    #: buffers of any memory order, since one set alone reads them
    movable: set[str] = field(default_factory=set)
    carriers: Carriers = ()
    #: where ranks know how many rows go to experts
    counts: Literal["host", "device"] = "host"
    #: the code in front of the return
    last: list[Instruction] = field(default_factory=list)
    posts: int = 0
    #: change of layout -> the result of `_received`
    sizes: dict[_Change, tuple[int, list[int]]] = field(default_factory=dict)
    #: change of layout -> its steps
    paths: dict[_Change, tuple[Step, ...]] = field(default_factory=dict)

    @cached_property
    def spare(self) -> int:
        """The bytes times `UNIT` by which each set may exceed the least, for fewer posts.

        All sets together may receive 1/64 more than the least; sets of few bytes come first. A
        larger set may receive 1/128 more than its least.
        """
        sets = [e for e in self.fusion.exprs if e.op == "set"]
        each = [_received(self, e) for e in sets]
        left, share = sum(least for least, _ in each) // 64, 0
        for excess in sorted(n for _, ways in each for n in ways):
            left -= excess
            if left < 0:
                break
            share = excess
        return share

    def handle(self) -> str:
        """Return a new name for a post."""
        while True:
            name, self.posts = f"c{self.posts}", self.posts + 1
            if name not in self.fusion.values:
                return name

    def post(self, comm: Communication, *buffers: str, source: Source | None) -> None:
        """Append a post and its wait; behind its buffers may come the counts of their rows."""
        handle = self.handle()
        post = Instruction(op="post", inputs=buffers, outputs=(handle,), comm=comm, source=source)
        self.code += [post, Instruction(op="wait", inputs=(handle,), source=source)]

    def new(self, base: str, kind: BufferType) -> str:
        name = base if base not in self.types else fresh_name(self.types, base)
        self.types[name] = kind
        return name

    def op(
        self,
        op: str,
        output: str,
        kind: BufferType,
        inputs: tuple[Any, ...] = (),
        source: Source | None = None,
        **attrs: Any,
    ) -> str:
        """Append an instruction with one result; return the name of the result.

        Rows of several runs are brought side by side, so that part of a buffer is dense.
        """
        name = self.new(output, kind)
        is_cut = op in CUTS and brings_together(self.types[inputs[0]], kind)
        if is_cut:
            self.dense.add(name)
        self.code.append(
            Instruction(
                op=op,
                fn=op if op in TABLE else "",
                inputs=inputs,
                outputs=(name,),
                order=tuple(range(len(kind.shape))) if is_cut else None,
                attrs=tuple(attrs.items()),
                source=source,
            )
        )
        return name


def value_type(value: Value) -> BufferType:
    """Return the type of the buffer that holds a fusion value."""
    kind = BufferType(dtype=value.dtype, shape=value.shape, layout=value.layout)
    if not value.is_counted:
        return kind
    return replace(kind, counts=f"{value.rows}.counted", each=value.each)


def local(expr: Expr) -> Instruction:
    """Return the instruction for an expression."""
    row = TABLE[expr.op]
    return Instruction(
        op=row.host,
        fn=row.name,
        inputs=expr.inputs,
        outputs=expr.outputs,
        attrs=expr.attrs,
        source=expr.source,
    )


def copy_into(
    source: str, target: str, line: Source | None, order: tuple[int, ...] | None = None
) -> Instruction:
    """Return the instruction that copies a buffer into another one, or into a new result."""
    return Instruction(
        op="set", fn="set", inputs=(source,), outputs=(target,), order=order, source=line
    )


def emit_set(out: Emitter, expr: Expr) -> None:
    """Append a set: nothing, local slices, or communications with their buffers.

    Args:
        out: the program under construction.
        expr: the set.

    Raises:
        LayoutError: no communication turns the one layout into the other.
    """
    (operand,) = expr.reads
    source, target = out.fusion.values[operand], out.fusion.values[expr.output]
    squeezed = without_expanded(out.fusion, expr)
    if squeezed is not None:
        _emit_expanded(out, expr, operand, squeezed)
        return
    start = len(out.code)
    emit_steps(out, expr, operand, source.placed, target.placed, source.shape, expr.output)
    required = out.stated.get(expr.output, target.order if target.is_order_required else None)
    if required not in (None, tuple(range(len(target.shape)))) and out.code[start:]:
        _copy_delivered(out, expr, start)


def _copy_delivered(out: Emitter, expr: Expr, start: int) -> None:
    """Receive into a buffer of its own, and copy it into the result, which requires an order."""
    name = expr.output
    if not any(i.op == "alloc" and name in i.outputs for i in out.code[start:]):
        return
    landed = out.new(f"{name}.recv", out.types[name])
    out.code[start:] = [i.renamed({name: landed}) for i in out.code[start:]]
    out.dense.discard(name)
    out.code.append(copy_into(landed, name, expr.source))


def emit_steps(
    out: Emitter,
    expr: Expr,
    current: str,
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    result: str,
) -> str:
    """Append the steps of one reshard; return the name of the last buffer.

    Args:
        out: the program under construction.
        expr: the set, for names and errors.
        current: the name of the buffer to reshard.
        source: its layout.
        target: the layout of the result.
        shape: the global shape.
        result: the name of the last buffer, unless the program has it already.
    """
    dtype = out.types[current].dtype
    change = source, target, shape, dtype.itemsize

    def find() -> tuple[Step, ...]:
        path = _path(out, expr, *change)

        def spare() -> int:
            return max(out.spare // dtype.itemsize, received(path, shape) // 128)

        return in_fewer_posts(path, shape, out.carriers, spare)

    path = _once(out.paths, change, find)
    if not path:
        kind = BufferType(dtype=dtype, shape=shape, layout=target)
        return out.op("set", result, kind, (current,), expr.source)
    (first,) = expr.reads
    if _is_read_once(out, first):
        out.movable.add(current)
    for i, step in enumerate(path):
        name = result if i == len(path) - 1 else fresh_name(out.types, f"{result}.{i}")
        current = _emit_step(out, with_type(step, shape, dtype), current, shape, name, expr.source)
    return current


def _is_read_once(out: Emitter, value: str) -> bool:
    """Return whether only one expression reads a value, so that its memory order is free."""
    if value not in out.fusion.producers:
        return False
    is_free = value not in out.fusion.outputs and len(out.fusion.consumers[value]) == 1
    return is_free and not out.fusion.values[value].is_order_required


def _received(out: Emitter, expr: Expr) -> tuple[int, list[int]]:
    """Return the bytes times `UNIT` that a rank receives in a set, at least.

    Beside them stand the bytes that each way in fewer posts takes beyond.
    """
    values = out.fusion.values
    before, after = values[expr.reads[0]], values[expr.output]
    if before.layout is None or after.layout is None:
        return 0, []
    shape, (source, target) = before.travels(before.layout, after.layout)
    itemsize = before.dtype.itemsize
    change = source, target, shape, itemsize

    def find() -> tuple[int, list[int]]:
        path = _path(out, expr, *change)
        ways = [n * itemsize for n in extra(path, shape, out.carriers)]
        return received(path, shape) * itemsize, ways

    return _once(out.sizes, change, find)


def _once(known: dict[_Change, _T], change: _Change, find: Callable[[], _T]) -> _T:
    """Return what is known of a change of layout; those of symbolic extents leave guards."""
    if is_symbolic(change[2]):
        return find()
    if change not in known:
        known[change] = find()
    return known[change]


def _path(
    out: Emitter,
    expr: Expr,
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: int,
) -> tuple[Step, ...]:
    """Return the `steps` of a reshard, with the user's line in its errors."""
    try:
        return steps(source, target, shape, itemsize, out.carriers)
    except LayoutError as error:
        what = f"%{expr.output} = set(%{expr.reads[0]}) from {source} to {target}: {error.what}"
        where = out.fusion.where(*expr.reads, expr.output)
        raise LayoutError(what, where=where, because=error.because, hint=error.hint) from None


def _emit_step(
    out: Emitter,
    step: Step,
    current: str,
    shape: tuple[int, ...],
    result: str,
    source: Source | None,
) -> str:
    dtype = out.types[current].dtype
    kind = BufferType(dtype=dtype, shape=shape, layout=step.destination)
    if isinstance(step, Local):
        if step.kind == "empty":
            return out.op("alloc", result, kind, (), source)
        op = "narrow" if step.kind == "slice" else step.kind
        return out.op(op, result, kind, (current,), source)
    if step.kind == "AllToAll":
        return _emit_all_to_all(out, step, current, result, source)
    if step.kind in SPLITTING:
        return _emit_split_outermost(out, step, current, result, source)
    if step.kind not in ("Exchange", "ReduceExchange"):
        current = dense(out, current, source)
    return emit_post(out, step, current, kind, result, source)


def emit_post(
    out: Emitter,
    comm: Communication,
    current: str,
    kind: BufferType,
    result: str,
    source: Source | None,
) -> str:
    """Append an alloc, a post that delivers into that buffer, and its wait; return its name."""
    name = out.op("alloc", result, kind, (), source)
    out.dense.add(name)
    out.post(comm, current, name, source=source)
    return name


def _emit_split_outermost(
    out: Emitter, comm: Communication, current: str, result: str, source: Source | None
) -> str:
    """Bring the split dim to the front, pad it to equal blocks, post, and undo both."""
    split, front, plain = comm.dim, comm.front(), tuple(range(len(comm.shape)))
    assert split is not None
    dtype, dim = out.types[current].dtype, front.index(split)
    is_moved, padded = front != plain, not comm.is_even
    # the sharded side is padded to one block, the whole side to the blocks of the team
    sides = ("block", "team") if comm.whole() == comm.destination else ("team", "block")

    def kind(layout: Layout, side: Any) -> BufferType:
        axis = comm.axis if comm.axis in layout.split_axes(split) else None
        padding = Padding(side=side, dim=dim, parts=comm.size, axis=axis) if padded else None
        return BufferType(
            dtype=dtype,
            shape=tuple(comm.shape[d] for d in front),
            layout=layout.permuted(front),
            padding=padding,
        )

    before, after = kind(comm.source, sides[0]), kind(comm.destination, sides[1])
    if is_moved:
        view = replace(before, padding=None)
        is_written_so = not padded and _moves_producer(out, current, front)
        current = out.op("permute", f"{result}.send", view, (current,), source, dims=front)
        if not padded and not is_written_so:
            out.code[-1] = replace(out.code[-1], order=plain)
    elif not padded:
        current = dense(out, current, source)
    if padded:
        current = out.op("pad", f"{result}.pad", before, (current,), source, dim=dim)
    name = f"{result}.recv" if is_moved or padded else result
    current = emit_post(out, comm, current, after, name, source)
    if padded:
        name = f"{result}.rows" if is_moved else result
        current = out.op("narrow", name, replace(after, padding=None), (current,), source)
        out.arrived.add(current)
    return _put_back(out, comm, front, current, result, source) if is_moved else current


def _put_back(
    out: Emitter,
    comm: Communication,
    front: tuple[int, ...],
    current: str,
    result: str,
    source: Source | None,
) -> str:
    """Append a view of a received buffer with its dims back in their own order; return its name."""
    back = tuple(front.index(d) for d in range(len(front)))
    whole = BufferType(dtype=out.types[current].dtype, shape=comm.shape, layout=comm.destination)
    result = out.op("permute", result, whole, (current,), source, dims=back)
    out.arrived.add(result)
    return result


def _emit_all_to_all(
    out: Emitter, comm: Communication, current: str, result: str, source: Source | None
) -> str:
    """Pack one block per member, post, and view the result with the joined dim in front."""
    assert comm.dim is not None
    dtype, shape = out.types[current].dtype, comm.shape
    ndim = len(shape)
    packed = BufferType(dtype=dtype, shape=shape, layout=comm.source, flat=True)
    attrs = {"dim": comm.dim, "to_dim": comm.to_dim, "axis": comm.axis}
    current = out.op("pack", f"{result}.send", packed, (current,), source, **attrs)
    front = (comm.dim, *(d for d in range(ndim) if d != comm.dim))
    kind = BufferType(
        dtype=dtype,
        shape=tuple(shape[d] for d in front),
        layout=comm.destination.permuted(front),
    )
    if front == tuple(range(ndim)):
        return emit_post(out, comm, current, kind, result, source)
    current = emit_post(out, comm, current, kind, f"{result}.recv", source)
    return _put_back(out, comm, front, current, result, source)


def dense(out: Emitter, name: str, source: Source | None) -> str:
    """Return the name of a buffer with the same contents that is dense in its own dim order.

    The op that writes the buffer gets that order, if it can write it; otherwise a set copies.
    """
    if name in out.dense:
        return name
    out.dense.add(name)
    order = tuple(range(len(out.types[name].shape)))
    if not _requires_other_order(out, name, order) and _ask_producer(out, out.code, name, order):
        return name
    copy = out.op("set", f"{name}.dense", out.types[name], (name,), source)
    out.code[-1] = replace(out.code[-1], order=order)
    out.dense.discard(name)
    out.dense.add(copy)
    return copy


def _requires_other_order(out: Emitter, name: str, order: tuple[int, ...]) -> bool:
    """Return whether a buffer must be written in another order than `order`.

    An output that reuses an input has the memory order of the caller's tensor.
    """
    value = out.fusion.values.get(name)
    if value is None or value.order == order:
        return name in out.fusion.reuse
    return name in out.fusion.outputs or value.is_order_required


def _moves_producer(out: Emitter, name: str, order: tuple[int, ...]) -> bool:
    """Let the op that writes a buffer write it in the posted order; return whether it can."""
    return name in out.movable and _ask_producer(out, out.code, name, order)


def _ask_producer(out: Emitter, code: list[Instruction], name: str, order: tuple[int, ...]) -> bool:
    """Require a memory order of the local op that writes a buffer; return whether that is possible.

    Permutations and sets are views: they pass the order on to their operand. An order other than
    the plain one is only required of an op that writes it without a copy.
    """
    if name in out.fusion.inputs:
        return False
    for at in reversed(range(len(code))):  # the op is among the last few instructions
        i = code[at]
        if name not in i.outputs:
            continue
        if i.op == "launch":
            body = list(i.body)
            is_asked = _ask_producer(out, body, name, order)
            code[at] = replace(i, body=tuple(body))
            return is_asked
        if i.fn in ("permute", "set") and i.order is None:
            (operand,), dims = i.reads, i.kwargs.get("dims", range(len(order)))
            of_operand = tuple(dims[d] % len(dims) for d in order)
            return _is_read_once(out, operand) and _ask_producer(out, code, operand, of_operand)
        if not _may_ask(out, i, order):
            return False
        code[at] = replace(i, order=order)
        return True
    return False


def _may_ask(out: Emitter, i: Instruction, order: tuple[int, ...]) -> bool:
    row = TABLE.get(i.fn)
    if row is None or row.is_view or row.results > 1:
        return False
    ndims = [len(out.types[x].shape) for x in i.reads]
    return order == tuple(range(len(order))) or has_orders(row, order, ndims)


def _emit_expanded(out: Emitter, expr: Expr, operand: str, squeezed: Squeezed) -> None:
    """Take one element of the expanded dims, reshard it, and expand it again."""
    target = out.fusion.values[expr.output]
    dtype = target.dtype
    narrow = BufferType(dtype=dtype, shape=squeezed.shape, layout=squeezed.source)
    taken = out.op(
        "unexpand", f"{expr.output}.one", narrow, (operand,), expr.source, dims=squeezed.dims
    )
    moved = emit_steps(
        out,
        expr,
        taken,
        squeezed.source,
        squeezed.target,
        squeezed.shape,
        fresh_name(out.types, f"{expr.output}.moved"),
    )
    kind = value_type(target)
    out.op("expand", expr.output, kind, (moved,), expr.source, shape=kind.shape)
