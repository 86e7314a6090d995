"""Host programs whose types, communications or attributes are changed, for all ranks alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from helpers.mutants import Block, edited, places, with_attrs
from mdfuse import DeviceMesh, MdfuseError
from mdfuse.communication import KINDS, Communication
from mdfuse.extents.expressions import UNKNOWN, Calc, Term
from mdfuse.hir import BufferType, HostProgram, Instruction
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, Shard, Varies

#: (what was changed, the program)
Change = tuple[str, HostProgram]

#: What a change is about: it says so first.
TYPE, POST, OP = "type", "post", "op"

PLACEMENTS: tuple[Placement, ...] = (
    Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("max"), Varies(),
)  # fmt: skip
#: Rows whose operands and attributes are alike.
_FAMILIES = (
    ("sum", "prod", "max", "min", "mean"),
    ("add", "sub", "mul", "maximum"),
    ("neg", "exp", "abs", "relu", "square"),
    ("softmax", "log_softmax"),
)


def type_mutants(program: HostProgram) -> Iterator[Change]:
    """Every one of them."""
    loops = {n for i in program.walk() if i.op == "for" for n in i.outputs}
    for name, kind in program.types.items():
        if name not in loops and kind.layout is not None:
            for what, other in other_kinds(kind):
                types = {**program.types, name: other}
                yield f"{TYPE} of %{name}: {what}", replace(program, types=types)
    for block, at in _everywhere(program.instructions):
        for what, other_one in _others(program, block[at]):
            new = (*block[:at], other_one, *block[at + 1 :])
            about = POST if block[at].op == "post" else OP
            yield f"{about} {block[at]}: {what}", _rebuilt(program, block, new)


def _everywhere(block: Block) -> Iterator[tuple[Block, int]]:
    """As `places`, and the instructions of host units."""
    for place in places(block):
        yield place
        inner = place[0][place[1]]
        if inner.op == "launch":
            yield from ((inner.body, at) for at in range(len(inner.body)))


def _rebuilt(program: HostProgram, old: Block, new: Block) -> HostProgram:
    for i in program.walk():
        if i.op == "launch" and i.body is old:
            block = next(b for b, at in places(program.instructions) if b[at] is i)
            changed = tuple(replace(j, body=new) if j is i else j for j in block)
            return edited(program, block, changed)
    return edited(program, old, new)


# -- types ---------------------------------------------------------------------------------------


def other_kinds(kind: BufferType) -> Iterator[tuple[str, BufferType]]:
    """Another layout, with the global shape kept and with the local one kept."""
    assert kind.layout is not None
    for what, layout in other_layouts(kind.layout, len(kind.shape)):
        other = replace(kind, layout=layout)
        yield what, other
        shape = _for_local_shape(other, kind.local_shape())
        if shape != kind.shape:
            yield f"{what} of {list(shape)}", replace(other, shape=shape)
    if kind.padding is not None:
        yield "no padding", replace(kind, padding=None)
        parts = replace(kind.padding, parts=kind.padding.parts + 1)
        yield "padded to more parts", replace(kind, padding=parts)
    if len(kind.shape) > 1 and kind.shape[0] != kind.shape[1]:
        yield "turned", replace(kind, shape=(*kind.shape[::-1],))


def _for_local_shape(kind: BufferType, local: tuple[int, ...]) -> tuple[int, ...]:
    """The global shape with which a layout's first part has a shape."""
    layout = kind.layout
    assert layout is not None
    shape = list(local) if len(local) == len(kind.shape) else list(kind.shape)
    for dim, axes in layout.splits:
        for axis in axes:
            shape[dim] *= layout.mesh.axis_size(axis)
    chunk = layout.stream
    is_cut = chunk is not None and chunk.index is not None and chunk.op is None
    if chunk is not None and is_cut and isinstance(chunk.chunks, int):
        shape[chunk.dim] *= chunk.chunks
    return tuple(shape)


def other_layouts(layout: Layout, ndim: int) -> Iterator[tuple[str, Layout]]:
    """Another placement along an axis, another chunk, another order of the mesh's ranks."""
    for axis in layout.mesh.axes:
        for placement in PLACEMENTS:
            fits = not isinstance(placement, Shard) or placement.dim < ndim
            fits = fits and not _mixes(layout, axis, placement)
            if fits and placement != layout.placement(axis):
                yield f"{axis}={placement}", layout.with_placement(axis, placement)
    chunk = layout.stream
    if chunk is not None and chunk.index is not None:
        yield "the next chunk", layout.with_stream(chunk.at(_next(chunk.index, chunk.count)))
        yield "no chunk", layout.with_stream(None)
        if chunk.op is not None:
            yield "joined otherwise", layout.with_stream(replace(chunk, op="prod"))
        elif ndim > 1:
            other = replace(chunk, dim=(chunk.dim + 1) % ndim)
            yield "chunks of another dim", layout.with_stream(other)
    if layout.mesh.size > 1:
        yield "turned mesh", _on(layout, _turned(layout.mesh))
    for dim, split in layout.splits:
        if len(split) > 1:
            order = {**layout.order, dim: split[::-1]}
            yield "another order", Layout(layout.mesh, layout.by_axis(), order, layout.stream)


def _mixes(layout: Layout, axis: str, placement: Placement) -> bool:
    """No layout: Partial in ways whose order counts."""
    ops = {layout.placement(a).op for a in layout.partial_axes if a != axis}  # type: ignore[attr-defined]
    return isinstance(placement, Partial) and bool(ops) and "max" in ops ^ {placement.op}


def _turned(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks in another order."""
    flat = [*mesh.ranks[1:], mesh.ranks[0]]
    rows = iter(flat)
    if mesh.ndim == 1:
        return DeviceMesh(flat, axes=mesh.axes)
    nested = [[next(rows) for _ in range(mesh.shape[1])] for _ in range(mesh.shape[0])]
    return DeviceMesh(nested, axes=mesh.axes)


def _on(layout: Layout, mesh: DeviceMesh) -> Layout:
    return Layout(mesh, layout.by_axis(), layout.order, layout.stream)


def _next(index: Any, count: int) -> Any:
    if isinstance(index, int):
        return (index + 1) % count
    return Calc("mod", Calc("+", index, 1), count)


# -- instructions --------------------------------------------------------------------------------


def _others(program: HostProgram, i: Instruction) -> Iterator[tuple[str, Instruction]]:
    if i.op in ("for", "if", "launch", "wait", "set_stream", "sync", "send", "recv"):
        return
    if i.comm is not None and i.op == "post":
        for what, comm in other_posts(i.comm):
            yield what, replace(i, comm=comm)
        if all(isinstance(x, str) for x in i.inputs) and i.inputs[0] != i.inputs[1]:
            yield "into its source", replace(i, inputs=(i.inputs[0], i.inputs[0]))
    for key, value in i.attrs:
        for other in _values(value, key == "index"):
            yield f"{key}={other}", with_attrs(i, **{key: other})
    for family in _FAMILIES:
        for fn in family if i.fn in family else ():
            if fn != i.fn:
                yield fn, replace(i, fn=fn, op=TABLE[fn].host)
    for at, x in enumerate(i.inputs):
        layout = program.types[i.outputs[0]].layout if i.op == "binary" else None
        if isinstance(x, float | int) and layout is not None and not layout.splits:
            inputs = (*i.inputs[:at], Term("rank"), *i.inputs[at + 1 :])
            yield "a number of the rank", replace(i, inputs=inputs)
    if len(i.inputs) > 1 and i.op != "post":
        yield "operands turned", replace(i, inputs=i.inputs[::-1])


def _values(value: Any, is_index: bool) -> Iterator[Any]:
    """Other values of an attribute; one that may be an index expression may depend on the rank."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, *([Term("rank")] if is_index else []))
    elif isinstance(value, UNKNOWN):
        yield Calc("+", value, 1)
        yield Term("rank")
        yield 0
    elif isinstance(value, tuple) and value and all(isinstance(n, int) for n in value):
        yield value[::-1]
        yield (*value[:-1], value[-1] + 1)
        yield (value[0] - 1, *value[1:])
    elif isinstance(value, str):
        yield from (axis for axis in ("x", "dp", "tp") if axis != value)


def other_posts(comm: Communication) -> Iterator[tuple[str, Communication]]:
    """Another kind, reduce op, axis, dim, layout, shape, or order of a mesh's ranks."""
    for what, changes in _post_changes(comm):
        try:
            other = replace(comm, **changes)
        except (MdfuseError, IndexError):
            continue  # there is no such communication to post
        if other != comm:
            yield what, other


def _post_changes(comm: Communication) -> Iterator[tuple[str, dict[str, Any]]]:
    n = len(comm.shape)
    for kind, row in KINDS.items():
        op = (comm.reduce_op or "sum") if row.reduces else None
        for dim in (None, *range(n)):
            yield f"{kind} dim={dim}", {"kind": kind, "reduce_op": op, "dim": dim}
    for op in ("sum", "max", "min", "prod", "avg"):
        yield f"[{op}]", {"reduce_op": op}
    axes = sorted({*comm.source.mesh.axes, *comm.destination.mesh.axes})
    for some in ((), *((axis,) for axis in axes), tuple(axes)):
        yield f"axes={some}", {"axes": some}
    for dim in range(n):
        yield f"dim={dim}", {"dim": dim}
        yield f"to_dim={dim}", {"to_dim": dim}
    for side in ("source", "destination"):
        for what, layout in other_layouts(getattr(comm, side), n):
            yield f"{side} {what}", {side: layout}
    yield "turned shape", {"shape": comm.shape[::-1]}
