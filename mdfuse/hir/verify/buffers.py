"""Types of what instructions make that are no rows of the op table: parts, pads, packs, posts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mdfuse.hir.program import BufferType, Instruction
from mdfuse.hir.verify.layouts import (
    axes_of,
    chunk_of,
    is_alike,
    is_one_chunk,
    is_shown,
    plain,
    rows_text,
)
from mdfuse.hir.verify.posts import buffer_problem, transition_problem
from mdfuse.hir.verify.products import adds_to, own_problem, product_problem
from mdfuse.hir.verify.report import wrong
from mdfuse.ir.extremes import is_number_of
from mdfuse.ir.graph import dtype_name
from mdfuse.layouts.boxes import Rows
from mdfuse.layouts.layout import IDEMPOTENT, Layout, Partial, Placement, Replicate, Shard, Varies

if TYPE_CHECKING:
    from mdfuse.hir.verify.types import Types


def _layout(kind: BufferType) -> Layout:
    assert kind.layout is not None
    return kind.layout


def _declared(types: Types, i: Instruction, made: Layout, kind: BufferType) -> None:
    """Raise ProgramError where the result is declared with another layout than it has."""
    if not is_shown(made, _layout(kind), len(kind.shape)):
        raise types.mismatch(i, f"{i.op} of it makes {made}")


def _dense(types: Types, i: Instruction, *kinds: BufferType) -> None:
    if any(k.flat or k.padding is not None for k in kinds):
        raise types.mismatch(i, f"{i.op} is for buffers that are neither padded nor flat")


# -- parts ---------------------------------------------------------------------------------------


def _narrow(types: Types, i: Instruction) -> None:
    """Check that the part of the result that a rank holds lies in its part of the operand."""
    pair = types.same_shape(i)
    if pair is None:
        return
    before, after = pair
    _dense(types, i, after)
    if before.flat:
        raise types.mismatch(i, "the elements of a flat buffer have no dims")
    _check_chunk(types, i, after)
    problem = _placement_problem(_layout(before), _layout(after))
    problem = problem or _part_problem(before, after, types.program.rank)
    if problem is not None:
        raise types.mismatch(i, problem)
    types.slice(i)


def _check_chunk(types: Types, i: Instruction, kind: BufferType) -> None:
    stream = chunk_of(_layout(kind))
    at = stream.index if stream is not None else None
    if stream is not None and isinstance(at, int) and not 0 <= at < stream.count:
        of = f" of dim {stream.dim}" if stream.op is None else ""
        problem = f"there is no chunk {at}{of}: it has {stream.count}"
        raise types.mismatch(i, problem)


def _placement_problem(before: Layout, after: Layout) -> str | None:
    """Return why a placement cannot become another one on each rank by itself; None: it can."""
    if before.mesh != after.mesh:
        is_apart = before.varying_axes or not _have_same_terms(before, after)
        return f"only values themselves go to another mesh, not {before}" if is_apart else None
    for axis, p in before.by_axis().items():
        q = after.placement(axis)
        if before.mesh.axis_size(axis) > 1 and not _may_narrow(p, q):
            return f"along {axis} {p} does not become {q} without communication"
    return None


def _have_same_terms(before: Layout, after: Layout) -> bool:
    """Return whether each rank has the term of a Partial that it has on the other mesh."""
    ops = [{*x.reduce_ops.values()} for x in (before, after)]
    if not ops[0] and not ops[1]:
        return True
    if ops[0] != ops[1] or len(ops[0]) > 1 or {*before.mesh} != {*after.mesh}:
        return False
    pairs = {(_term_of(before, r), _term_of(after, r)) for r in before.mesh}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def _term_of(layout: Layout, rank: int) -> tuple[int, ...]:
    coordinate = layout.mesh.coordinate(rank) or ()
    places = zip(coordinate, layout.placements, strict=True)
    return tuple(i for i, p in places if isinstance(p, Partial))


def _may_narrow(p: Placement, q: Placement) -> bool:
    if p == q:
        return True
    if isinstance(p, Partial | Varies):
        return False
    if isinstance(q, Partial):
        return isinstance(p, Replicate) and q.op in IDEMPOTENT
    return isinstance(p, Replicate) or not isinstance(q, Varies)


def _part_problem(before: BufferType, after: BufferType, rank: int | None) -> str | None:
    """Return why some rank lacks the part that it is to hold; None where none does."""
    n = len(before.shape)
    p, q = plain(_layout(before), n), plain(_layout(after), n)
    if p.mesh == q.mesh and all(_is_nested(p, q, d) for d in range(n)):
        return None
    chunk = chunk_of(p)
    if chunk is not None and is_one_chunk(p, q) and not isinstance(chunk.index, int):
        p, q = p.with_stream(None), q.with_stream(None)  # the chunks of equal parts
    for layout in (p, q):
        chunk = chunk_of(layout)
        if layout is p and chunk is not None and not isinstance(chunk.index, int):
            return None  # checked once the index is a number
    for r in q.mesh.ranks if rank is None else (rank,):
        inner, outer = q.rows(after.shape, r), p.rows(before.shape, r)
        has_rows = all(any(x < y for x, y in rows) for rows in inner)
        if has_rows and not all(map(_is_one_run, inner, outer)):
            return f"rank {r} has {rows_text(outer)}, not {rows_text(inner)}"
    return None


def _is_one_run(rows: Rows, of: Rows) -> bool:
    """Return whether rows of a dim are one run of those that a rank has, in which a view shows."""
    if rows == of:
        return True
    (x, y), *more = [piece for piece in rows if piece[0] < piece[1]]
    return not more and any(a <= x and y <= b for a, b in of) and len(of) == len(rows) == 1


def _is_nested(p: Layout, q: Layout, dim: int) -> bool:
    """Return whether, whatever the extents, each rank's new part of a dim lies in its old part."""
    axes = p.split_axes(dim)
    if p.reach(dim) is not None or q.reach(dim) is not None:
        return False
    if dim in p.blocked or dim in q.blocked:
        return p.cuts.get(dim) == q.cuts.get(dim) and q.split_axes(dim) == axes
    here, there = (c if c is not None and c.dim == dim else None for c in map(chunk_of, (p, q)))
    if here is not None:
        return there is not None and is_one_chunk(p, q) and q.split_axes(dim) == axes
    return q.split_axes(dim)[: len(axes)] == axes


def _chunk(types: Types, i: Instruction) -> None:
    kind = types.made(i)
    if kind.layout is None or chunk_of(kind.layout) is None:
        raise types.mismatch(i, "a chunk has chunk(dim,count,index) in its layout")
    _narrow(types, i)


def _select(types: Types, i: Instruction) -> None:
    """Check a select: the dim goes, and the index is in range unless the dim has extent 1."""
    pair = types.pair(i)
    if pair is None:
        return
    dim, index = i.kwargs["dim"], i.kwargs["index"]
    before, after = pair
    _dense(types, i, before, after)
    n = len(before.shape)
    name = f"select(%{i.reads[0]}, dim={dim}, index={index})"
    dim %= n
    if after.shape != (*before.shape[:dim], *before.shape[dim + 1 :]):
        raise types.mismatch(i, f"select drops dim {dim} of {list(before.shape)}")
    extent = before.local_shape(types.rank_of(after))[dim]
    if isinstance(index, int) and extent != 1 and not -extent <= index < extent:
        raise wrong(
            types.program,
            i,
            f"{name}: index {index} is out of range for dim {dim}",
            because=f"%{i.reads[0]} has {extent} of it on rank {types.rank_of(after)}",
            hint=f"indices go from 0 to {extent - 1}" if extent else "it has no elements",
        )
    _declared(types, i, _selected(types, before, dim, index), after)
    types.slice(i)


def _selected(types: Types, before: BufferType, dim: int, index: object) -> Layout:
    """Return the layout without a dim; axes that split it make each rank's row its own."""
    layout = plain(_layout(before), len(before.shape))
    kept = {d: d - (d > dim) for d in range(len(before.shape)) if d != dim}
    made = layout.with_dims(kept)
    moving = {*layout.split_axes(dim)}
    chunk = chunk_of(layout)
    if chunk is not None and chunk.dim == dim:
        moving |= axes_of(chunk.index or 0, layout.mesh)
    if before.shape[dim] != 1 and not isinstance(index, int):
        moving |= types.axes_of(index, layout.mesh)  # type: ignore[arg-type]
    for axis in moving:
        if not isinstance(made.placement(axis), Shard):
            made = made.with_placement(axis, Varies())
    return made


def _unexpand(types: Types, i: Instruction) -> None:
    """Check that only dims are cut to extent 1 whose elements an expand made."""
    pair = types.pair(i)
    dims = i.kwargs["dims"]
    if pair is None:
        return
    before, after = pair
    _dense(types, i, before, after)
    want = tuple(1 if d in dims else n for d, n in enumerate(before.shape))
    if want != after.shape:
        raise types.mismatch(i, f"unexpand makes {list(want)}")
    alike = types.expanded.dims(i.reads[0], i)
    single = [d for d in dims if d not in alike and before.shape[d] != 1]
    if single:
        raise types.mismatch(i, f"no expand made dim {single[0]} of %{i.reads[0]}")
    kept = {d: d for d in range(len(want)) if d not in dims}
    _declared(types, i, plain(_layout(before), len(want)).with_dims(kept), after)


# -- what is sent --------------------------------------------------------------------------------


def _alike(types: Types, i: Instruction) -> tuple[BufferType, BufferType] | None:
    pair = types.same_shape(i)
    if pair is not None:
        before, after = pair
        _dense(types, i, before)
        _declared(types, i, _layout(before), after)
    return pair


def _pad(types: Types, i: Instruction) -> None:
    pair = _alike(types, i)
    if pair is None:
        return
    padding, dim = pair[1].padding, i.kwargs["dim"]
    if padding is None or pair[1].flat:
        raise types.mismatch(i, "what pad makes is padded")
    if padding.dim % len(pair[1].shape) != dim % len(pair[1].shape):
        raise types.mismatch(i, f"dim {padding.dim} is padded, not dim {dim}")


def _pack(types: Types, i: Instruction) -> None:
    """Check a pack, which makes a flat buffer of blocks, one per member of the team."""
    pair = _alike(types, i)
    if pair is None:
        return
    if not pair[1].flat or pair[1].padding is not None:
        raise types.mismatch(i, "what pack makes is flat")
    name, how = types.program.root(i.outputs[0]), _packing(i)
    dim, to_dim, axis = how
    dims, layout = range(len(pair[0].shape)), _layout(pair[0])
    if dim not in dims or to_dim not in dims or dim == to_dim:
        raise types.mismatch(i, f"dims {dim} and {to_dim} are not two of its {len(dims)}")
    if axis not in layout.mesh.axes:
        raise types.mismatch(i, f"{layout.mesh} has no axis {axis}")
    if types.packed.setdefault(name, how) != how:
        raise types.mismatch(i, "the same buffer is packed otherwise elsewhere")


def _packing(i: Instruction) -> tuple[object, ...]:
    return tuple(i.kwargs.get(k) for k in ("dim", "to_dim", "axis"))


def _term(types: Types, i: Instruction) -> None:
    """Check that a value becomes Partial along axes where one rank gives it, the others nothing."""
    pair = types.same_shape(i)
    if pair is None:
        return
    before, after = pair
    _dense(types, i, before, after)
    p, q = plain(_layout(before), len(after.shape)), plain(_layout(after), len(after.shape))
    changed = [a for a in p.mesh.axes if p.mesh == q.mesh and p.placement(a) != q.placement(a)]
    made, ops = p, {q.placement(axis) for axis in changed}
    if not changed:
        raise types.mismatch(i, "it makes a Partial along some axis of its mesh")
    for axis in changed:
        new = q.placement(axis)
        if not isinstance(new, Partial) or new.op == "avg" or len(ops) > 1:
            raise types.mismatch(i, f"it makes one Partial, by an op with a neutral element: {new}")
        if isinstance(p.placement(axis), Partial | Varies):
            raise types.mismatch(i, f"along {axis} {p.placement(axis)} becomes no {new}")
        made = made.with_placement(axis, new)
    chunk = chunk_of(p)
    if chunk is not None and p.split_axes(chunk.dim) != made.split_axes(chunk.dim):
        raise types.mismatch(i, "a chunk of the parts is no chunk of the whole")
    if not is_alike(made, _layout(after), len(after.shape)):
        raise types.mismatch(i, f"term makes {made} of it")


def _accumulate(types: Types, i: Instruction) -> None:
    """Check that the parts of chunks are added up in a buffer of the whole, and of one value."""
    pair = types.same_shape(i)
    if pair is None:
        return
    before, after = pair
    _dense(types, i, before, after)
    _check_chunk(types, i, before)
    part = chunk_of(_layout(before))
    if part is None or part.op is None:
        raise types.mismatch(i, "a part has chunk(P(op),count,index) in its layout")
    made = _layout(before).with_stream(None)
    if not is_alike(made, _layout(after), len(after.shape)):
        raise types.mismatch(i, f"the parts add up to {made}")
    if before.dtype != after.dtype and not (
        before.dtype.is_floating_point and after.dtype == torch.promote_types(*_dtypes(pair))
    ):
        raise types.mismatch(i, "parts are added up in their dtype, or in a wider one")
    buffer, value = (types.program.root(x).partition("@")[0] for x in (*i.outputs, *i.reads))
    if types.accumulated.setdefault(buffer, value) != value:
        raise types.mismatch(i, f"%{types.accumulated[buffer]} is added up in that buffer")


def _dtypes(kinds: Sequence[BufferType]) -> list[torch.dtype]:
    return [k.dtype for k in kinds]


def _addmm(types: Types, i: Instruction) -> None:
    """Check that a product of a rank's own parts is added where each rank has a part of its own.

    With two operands it is what the buffer then holds.
    """
    types.made(i)
    names = (*i.outputs, *i.inputs[-2:])
    found = (types.program.types.get(x) if isinstance(x, str) else None for x in names)
    kinds = [k for k in found if k is not None and k.layout is not None]
    if len(kinds) < 3:
        raise types.mismatch(i, "addmm is for three buffers")
    into, a, b = kinds
    if len(i.inputs) == 3 and i.inputs[0] != i.outputs[0]:
        raise types.mismatch(i, f"it adds to the buffer that it reads, %{i.inputs[0]}")
    if any(k.padding is not None or k.flat for k in kinds) or a.dtype != b.dtype:
        raise types.mismatch(i, "it takes plain buffers of one dtype")
    if not adds_to(into.dtype, a.dtype):
        raise types.mismatch(i, "it takes plain buffers of one dtype, or adds 16 bits to f32")
    problem = product_problem(into, a, b, types.program.rank)
    if problem is not None:
        raise types.mismatch(i, problem)


def _own(types: Types, i: Instruction) -> None:
    """Check that a rank's term of a sum may lie where its part of the sum is."""
    pair = types.same_shape(i)
    if pair is None:
        return
    _dense(types, i, *pair)
    problem = own_problem(*pair, types.program.rank)
    if problem is not None:
        raise types.mismatch(i, problem)
    types.slice(i)


def _alloc(types: Types, i: Instruction) -> None:
    kind = types.made(i)
    if kind.layout is None:
        raise types.mismatch(i, "a number needs no buffer")
    fill = i.kwargs.get("fill")
    if fill is not None and not is_number_of(fill, kind.dtype):
        raise wrong(
            types.program,
            i,
            f"alloc(fill={fill}) of {dtype_name(kind.dtype)}",
            because="the buffer is filled with a number of its dtype",
            hint="leave fill= out, or alloc(fill=0)",
        )
    _check_chunk(types, i, kind)
    types.allocated.add(types.program.root(i.outputs[0]))


def _post(types: Types, i: Instruction) -> None:
    """Check that a communication does what its layouts say, with the buffers that it names."""
    comm = i.comm
    assert comm is not None
    for name in i.reads:
        kind = types.program.types.get(name)
        types.intern(name)
        if kind is None or (kind.layout is not None and kind.dtype == comm.dtype):
            continue
        dtype = dtype_name(comm.dtype) if comm.dtype is not None else "nothing"
        raise wrong(
            types.program,
            i,
            f"{i.op} {comm} of {dtype} with %{name}, which is {types.text(name)}",
            because="a communication moves buffers of one dtype",
            hint="cast the value before",
        )
    problem = transition_problem(comm)
    if problem is not None:
        raise wrong(
            types.program,
            i,
            f"{i.op} {comm}: {problem}",
            because=f"it is posted for {list(comm.shape)} from {comm.source} to {comm.destination}",
            hint="post the kind that changes one layout into the other",
        )
    for side, x in enumerate(i.inputs):
        if isinstance(x, str):
            _check_posted(types, i, side, x)


def _check_posted(types: Types, i: Instruction, side: int, name: str) -> None:
    comm, kind = i.comm, types.program.types.get(name)
    if comm is None or kind is None:
        return
    problem = buffer_problem(comm, side, kind, types.program.rank)
    how = types.packed.get(types.program.root(name))
    if problem is None and kind.flat and how not in (None, (comm.dim, comm.to_dim, comm.axis)):
        problem = "it is packed with dim={}, to_dim={}, axis={}".format(*how or ())
    if problem is None and kind.flat and how is None:
        problem = "nothing has packed it"
    if problem is not None:
        raise wrong(
            types.program,
            i,
            f"{i.op} {comm} {'into' if side else 'of'} %{name}, but {problem}",
            because=f"it goes from {comm.source} to {comm.destination}; "
            f"%{name}: {types.text(name)}",
            hint="post buffers of these layouts, the split dim outermost",
        )


#: op -> the check of its types; other ops are rows of the op table, or make no buffer.
RULES: dict[str, Callable[[Types, Instruction], None]] = {
    "alloc": _alloc,
    "narrow": _narrow,
    "chunk": _chunk,
    "select": _select,
    "unexpand": _unexpand,
    "own": _own,
    "pad": _pad,
    "pack": _pack,
    "term": _term,
    "accumulate": _accumulate,
    "addmm": _addmm,
    "post": _post,
}
