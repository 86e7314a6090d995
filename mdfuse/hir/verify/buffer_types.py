"""Types of what instructions make that are no rows of the op table: parts, pads, packs, posts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mdfuse.hir.index_terms import axes_of
from mdfuse.hir.instructions import BUFFER_OPS, INSTRUCTIONS, counts_of
from mdfuse.hir.program import BufferType, Instruction, brings_together
from mdfuse.hir.verify.added_products import adds_to, own_problem, product_problem
from mdfuse.hir.verify.counts import check_made, posted_problem
from mdfuse.hir.verify.error_report import ErrorText
from mdfuse.hir.verify.kind_layouts import buffer_problem, transition_problem
from mdfuse.hir.verify.result_layouts import (
    chunk_of,
    is_alike,
    is_one_chunk,
    is_shown,
    plain,
    rows_text,
)
from mdfuse.ir.graph import dtype_name
from mdfuse.layouts.layout import IDEMPOTENT, Layout, Partial, Placement, Replicate, Shard, Varies
from mdfuse.layouts.narrowing import is_view_of
from mdfuse.names import base_name

if TYPE_CHECKING:
    from mdfuse.hir.verify.result_types import Types

OUT_OF_RANGE = ErrorText(
    "select(%{i.reads[0]}, dim={i.kwargs[dim]}, index={i.kwargs[index]}): "
    "index {i.kwargs[index]} is out of range for dim {dim}",
    "%{i.reads[0]} has {extent} of it on rank {rank}",
    "{there}",
)
OTHER_DTYPE = ErrorText(
    "{i.op} {i.comm} of {dtype} with %{name}, which is {text}",
    "a communication moves buffers of one dtype",
    "cast the value before",
)
NO_TRANSITION = ErrorText(
    "{i.op} {i.comm}: {problem}",
    "it is posted for {shape} from {i.comm.source} to {i.comm.destination}",
    "post the kind that changes one layout into the other",
)
OTHER_BUFFER = ErrorText(
    "{i.op} {i.comm} {way} %{name}, but {problem}",
    "it goes from {i.comm.source} to {i.comm.destination}; %{name}: {text}",
    "post buffers of these layouts, the split dim outermost",
)


def _declared_problem(i: Instruction, layout: Layout, kind: BufferType) -> str | None:
    """Return why the result is declared with another layout than it has; None where it is not."""
    is_right = is_shown(layout, kind.placed, len(kind.shape))
    return None if is_right else f"{i.op} of it makes {layout}"


def _of_one(types: Types, i: Instruction) -> None:
    """Check a buffer that is made of one operand, by the rule of its instruction.

    Rules may count on buffers of one dtype and, but for a few, of one global shape.
    """
    pair = types.pair(i) if i.op in _OTHER_SHAPE else types.same_shape(i)
    if pair is None:
        return
    (before, after), problem = pair, None
    if any(k.flat or k.padding is not None for k in _DENSE.get(i.op, lambda *kinds: kinds)(*pair)):
        problem = f"{i.op} is for buffers that are neither padded nor flat"
    problem = problem or _OF_ONE.get(i.op, _element_by_element)(types, i, before, after)
    if problem is not None:
        raise types.mismatch(i, problem)
    if INSTRUCTIONS[i.op].is_slice:
        types.slice(i)


# -- parts ---------------------------------------------------------------------------------------


def _narrow(types: Types, i: Instruction, before: BufferType, after: BufferType) -> str | None:
    """Check that the part of the result that a rank holds lies in its part of the operand."""
    if before.flat:
        return "the elements of a flat buffer have no dims"
    problem = _chunk_problem(after) or _placement_problem(before.placed, after.placed)
    problem = problem or _part_problem(before, after, types.program.rank)
    if problem is None and brings_together(before, after) and i.order is None:
        return "several runs of rows are copied side by side, and it states no `contiguous`"
    return problem


def _chunk_problem(kind: BufferType) -> str | None:
    stream = chunk_of(kind.placed)
    at = stream.index if stream is not None else None
    if stream is None or not isinstance(at, int) or 0 <= at < stream.count:
        return None
    of = f" of dim {stream.dim}" if stream.op is None else ""
    return f"there is no chunk {at}{of}: it has {stream.count}"


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
    p, q = plain(before.placed, n), plain(after.placed, n)
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
        if not is_view_of(p, q, before.shape, r):
            parts = (rows_text(x.rows(before.shape, r)) for x in (p, q))
            return f"rank {r} has {', not '.join(parts)}"
    return None


def _is_nested(p: Layout, q: Layout, dim: int) -> bool:
    """Return whether, whatever the extents, each rank's new part of a dim lies in its old part."""
    axes = p.split_axes(dim)
    if p.reach(dim) is not None or q.reach(dim) is not None:
        return False
    if dim in p.blocked or dim in q.blocked:
        return p.cuts.get(dim) == q.cuts.get(dim) and q.split_axes(dim) == axes
    chunk, narrowed = (c if c is not None and c.dim == dim else None for c in map(chunk_of, (p, q)))
    if chunk is not None:
        return narrowed is not None and is_one_chunk(p, q) and q.split_axes(dim) == axes
    return q.split_axes(dim)[: len(axes)] == axes


def _chunk(types: Types, i: Instruction, before: BufferType, after: BufferType) -> str | None:
    if chunk_of(after.placed) is None:
        return "a chunk has chunk(dim,count,index) in its layout"
    return _narrow(types, i, before, after)


def _select(types: Types, i: Instruction, before: BufferType, after: BufferType) -> str | None:
    """Check a select: the dim goes, and the index is in range unless the dim has extent 1."""
    dim, index = i.kwargs["dim"], i.kwargs["index"]
    dim %= len(before.shape)
    if after.shape != (*before.shape[:dim], *before.shape[dim + 1 :]):
        return f"select drops dim {dim} of {list(before.shape)}"
    extent = before.local_shape(types.rank_of(after))[dim]
    if isinstance(index, int) and extent != 1 and not -extent <= index < extent:
        there = f"indices go from 0 to {extent - 1}" if extent else "it has no elements"
        rank = types.rank_of(after)
        raise OUT_OF_RANGE(types.program, i, dim=dim, extent=extent, rank=rank, there=there)
    return _declared_problem(i, _selected(types, before, dim, index), after)


def _selected(types: Types, before: BufferType, dim: int, index: object) -> Layout:
    """Return the layout without a dim; axes that split it make each rank's row its own."""
    layout = plain(before.placed, len(before.shape))
    left = {d: d - (d > dim) for d in range(len(before.shape)) if d != dim}
    result = layout.with_dims(left)
    moving = {*layout.split_axes(dim)}
    chunk = chunk_of(layout)
    if chunk is not None and chunk.dim == dim:
        moving |= axes_of(chunk.index or 0, layout.mesh)
    if before.shape[dim] != 1 and not isinstance(index, int):
        moving |= types.axes_of(index, layout.mesh)  # type: ignore[arg-type]
    for axis in moving:
        if not isinstance(result.placement(axis), Shard):
            result = result.with_placement(axis, Varies())
    return result


def _unexpand(types: Types, i: Instruction, before: BufferType, after: BufferType) -> str | None:
    """Check that only dims are cut to extent 1 whose elements an expand made."""
    dims = i.kwargs["dims"]
    want = tuple(1 if d in dims else n for d, n in enumerate(before.shape))
    if want != after.shape:
        return f"unexpand makes {list(want)}"
    alike = types.expanded.dims(i.reads[0], i)
    single = [d for d in dims if d not in alike and before.shape[d] != 1]
    if single:
        return f"no expand made dim {single[0]} of %{i.reads[0]}"
    left = {d: d for d in range(len(want)) if d not in dims}
    return _declared_problem(i, plain(before.placed, len(want)).with_dims(left), after)


# -- what is sent --------------------------------------------------------------------------------


def _element_by_element(
    types: Types, i: Instruction, before: BufferType, after: BufferType
) -> str | None:
    """Check what is computed of each element: of values themselves, which lie as they did."""
    if before.layout is not None and before.layout.partial_axes:
        return f"{i.op} is of values, and %{i.reads[0]} is a term of a sum"
    return _declared_problem(i, before.placed, after)


def _pad(types: Types, i: Instruction, before: BufferType, after: BufferType) -> str | None:
    problem = _declared_problem(i, before.placed, after)
    padding, dim, n = after.padding, i.kwargs["dim"], len(after.shape)
    if problem is not None or padding is None or after.flat:
        return problem or "what pad makes is padded"
    is_right = padding.dim % n == dim % n
    return None if is_right else f"dim {padding.dim} is padded, not dim {dim}"


def _pack(types: Types, i: Instruction, before: BufferType, after: BufferType) -> str | None:
    """Check a pack, which makes a flat buffer of blocks, one per member of the team."""
    layout = before.placed
    problem = _declared_problem(i, layout, after)
    if problem is not None or not after.flat or after.padding is not None:
        return problem or "what pack makes is flat"
    name, dims = types.program.root(i.outputs[0]), range(len(before.shape))
    dim, to_dim, axis = packing = tuple(i.kwargs.get(k) for k in ("dim", "to_dim", "axis"))
    if dim not in dims or to_dim not in dims or dim == to_dim:
        return f"dims {dim} and {to_dim} are not two of its {len(dims)}"
    if axis not in layout.mesh.axes:
        return f"{layout.mesh} has no axis {axis}"
    if types.packed.setdefault(name, packing) != packing:
        return "the same buffer is packed otherwise elsewhere"
    return None


def _term(types: Types, i: Instruction, before: BufferType, after: BufferType) -> str | None:
    """Check that a value becomes Partial along axes where one rank gives it, the others nothing."""
    n = len(after.shape)
    p, q = plain(before.placed, n), plain(after.placed, n)
    changed = [a for a in p.mesh.axes if p.mesh == q.mesh and p.placement(a) != q.placement(a)]
    whole, ops = p, {q.placement(axis) for axis in changed}
    if not changed:
        return "it makes a Partial along some axis of its mesh"
    for axis in changed:
        new = q.placement(axis)
        if not isinstance(new, Partial) or new.op == "avg" or len(ops) > 1:
            return f"it makes one Partial, by an op with a neutral element: {new}"
        if isinstance(p.placement(axis), Partial | Varies):
            return f"along {axis} {p.placement(axis)} becomes no {new}"
        whole = whole.with_placement(axis, new)
    chunk = chunk_of(p)
    if chunk is not None and p.split_axes(chunk.dim) != whole.split_axes(chunk.dim):
        return "a chunk of the parts is no chunk of the whole"
    return None if is_alike(whole, after.placed, n) else f"term makes {whole} of it"


def _accumulate(types: Types, i: Instruction, before: BufferType, after: BufferType) -> str | None:
    """Check that the parts of chunks are added up in a buffer of the whole, and of one value."""
    part, total = chunk_of(before.placed), before.placed.with_stream(None)
    problem = _chunk_problem(before)
    if problem is not None or part is None or part.op is None:
        return problem or "a part has chunk(P(op),count,index) in its layout"
    if not is_alike(total, after.placed, len(after.shape)):
        return f"the parts add up to {total}"
    dtypes = before.dtype, after.dtype
    if before.dtype != after.dtype and not (
        before.dtype.is_floating_point and after.dtype == torch.promote_types(*dtypes)
    ):
        return "parts are added up in their dtype, or in a wider one"
    buffer, value = (base_name(types.program.root(x)) for x in (*i.outputs, *i.reads))
    if types.accumulated.setdefault(buffer, value) != value:
        return f"%{types.accumulated[buffer]} is added up in that buffer"
    return None


def _addmm(types: Types, i: Instruction) -> None:
    """Check that a product of a rank's own parts is added where each rank has a part of its own.

    With two operands it is what the buffer then holds.
    """
    types.result_type(i)
    names = (*i.outputs, *i.inputs[-2:])
    named = (types.program.types.get(x) if isinstance(x, str) else None for x in names)
    kinds = [k for k in named if k is not None and k.layout is not None]
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


def _term_in_sum(types: Types, i: Instruction, before: BufferType, after: BufferType) -> str | None:
    """Check that a rank's term of a sum may lie where its part of the sum is."""
    return own_problem(before, after, types.program.rank)


def _alloc(types: Types, i: Instruction) -> None:
    kind = types.result_type(i)
    if kind.layout is None:
        raise types.mismatch(i, "a number needs no buffer")
    problem = _chunk_problem(kind)
    if problem is not None:
        raise types.mismatch(i, problem)
    types.allocated.add(types.program.root(i.outputs[0]))


def _post(types: Types, i: Instruction) -> None:
    """Check that a communication does what its layouts say, with the buffers that it names."""
    comm = i.comm
    assert comm is not None
    for name in i.reads[:2] if counts_of(i) is not None else i.reads:
        kind = types.program.types.get(name)
        types.intern(name)
        if kind is None or (kind.layout is not None and kind.dtype == comm.dtype):
            continue
        dtype = dtype_name(comm.dtype) if comm.dtype is not None else "nothing"
        raise OTHER_DTYPE(types.program, i, dtype=dtype, name=name, text=types.text(name))
    problem = transition_problem(comm)
    if problem is not None:
        raise NO_TRANSITION(types.program, i, problem=problem, shape=list(comm.shape))
    for side, x in enumerate(i.inputs[:2]):
        if isinstance(x, str):
            _check_posted(types, i, side, x)


def _check_posted(types: Types, i: Instruction, side: int, name: str) -> None:
    comm, kind = i.comm, types.program.types.get(name)
    if comm is None or kind is None:
        return
    if counts_of(i) is not None:
        problem = posted_problem(comm, side, kind)
    else:
        problem = buffer_problem(comm, side, kind, types.program.rank)
    how = types.packed.get(types.program.root(name))
    if problem is None and kind.flat and how not in (None, (comm.dim, comm.to_dim, comm.axis)):
        problem = "it is packed with dim={}, to_dim={}, axis={}".format(*how or ())
    if problem is None and kind.flat and how is None:
        problem = "nothing has packed it"
    if problem is not None:
        way, text = "into" if side else "of", types.text(name)
        raise OTHER_BUFFER(types.program, i, way=way, name=name, problem=problem, text=text)


#: op -> what is wrong with the result of one operand; None: nothing. All others compute element by
#: element.
_OF_ONE: dict[str, Callable[[Types, Instruction, BufferType, BufferType], str | None]] = {
    "narrow": _narrow,
    "chunk": _chunk,
    "select": _select,
    "unexpand": _unexpand,
    "own": _term_in_sum,
    "pad": _pad,
    "pack": _pack,
    "term": _term,
    "accumulate": _accumulate,
}

#: Those whose result has another global shape than the operand.
_OTHER_SHAPE = ("select", "unexpand")

#: op -> which of operand and result are neither padded nor flat; for all others both are.
_DENSE: dict[str, Callable[[BufferType, BufferType], Sequence[BufferType]]] = {
    **dict.fromkeys(("narrow", "chunk"), lambda _, after: (after,)),
    **dict.fromkeys(("pad", "pack"), lambda before, _: (before,)),
}

#: op -> the check of its types; other ops are rows of the op table, or make no buffer.
RULES: dict[str, Callable[[Types, Instruction], None]] = {
    **dict.fromkeys(BUFFER_OPS, _of_one),
    **dict.fromkeys(("fetch", "pack_rows", "unpack_rows"), check_made),
    "alloc": _alloc,
    "addmm": _addmm,
    "post": _post,
}
