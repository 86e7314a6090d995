"""Layouts before and after each kind of communication, and the buffers that it reads and writes.

    post allreduce[sum](%p) -> %y f32[4] (x=P(sum)) => (x=R) axis=x

The kind must be one that turns the layout before into the layout after, and the buffers must be of
these layouts, with the split dim outermost where the kind wants it so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mdfuse.communication import Communication
from mdfuse.errors import MdfuseError
from mdfuse.extents.expressions import Term, terms
from mdfuse.hir.program import BufferType, Padding
from mdfuse.hir.verify.op_types import is_said
from mdfuse.hir.verify.result_layouts import chunk_of, is_alike, is_one_chunk, plain
from mdfuse.layouts.exchange import kept_terms
from mdfuse.layouts.kinds import KINDS, REDUCING, SPLITTING, by_kind
from mdfuse.layouts.layout import Layout, Partial, Placement, Replicate, Shard
from mdfuse.layouts.streamed_sets import cuts_alike

#: What is wrong with a communication; None: nothing.
Problem = str | None


@lru_cache(maxsize=4096)
def transition_problem(comm: Communication) -> Problem:
    """Return why a communication does not turn its source into its destination; None: it does."""
    ndim = len(comm.shape)
    for layout in (comm.source, comm.destination):
        if any(not -ndim <= d < ndim for d, _ in layout.splits):
            return f"{layout} is about dims that {list(comm.shape)} does not have"
        is_term = layout.stream is not None and layout.stream.op is not None
        if is_term and (comm.kind != "Allgather" or comm.source.stream != comm.destination.stream):
            return f"{layout.stream} is only added to what there is, or gathered as it is"
    if comm.source.reaches or (comm.destination.reaches and comm.kind != "Exchange"):
        return (
            "rows that several ranks have are for the op that reads them; an Exchange brings them"
        )
    for dim in (comm.dim, comm.to_dim):
        if dim is not None and not 0 <= dim < ndim:
            return f"there is no dim {dim} of {list(comm.shape)}"
        if dim is not None and (dim in comm.source.blocked or dim in comm.destination.blocked):
            return f"dim {dim} is in blocks, of which only an Exchange or ReduceExchange has pieces"
    if comm.to_dim is not None and comm.kind != "AllToAll":
        return f"only AllToAll splits another dim: to_dim={comm.to_dim}"
    return _KINDS[comm.kind](comm) or _moving_chunk_problem(comm)


def _is_one(term: Term, comm: Communication, layout: Layout) -> bool:
    """Return whether a coordinate is the same for all members of a team."""
    if term.kind != "coord":
        return False
    if comm.axes and term.name not in comm.axes:
        return True
    return term.name in layout.mesh.axes and layout.mesh.axis_size(term.name) == 1


def _moving_chunk_problem(comm: Communication) -> Problem:
    """Return why the members of a team would be at different chunks; None where they are at one."""
    for layout in (comm.source, comm.destination):
        chunk = chunk_of(layout)
        for term in terms(chunk.index) if chunk is not None else ():
            if term.kind in ("rank", "coord") and not _is_one(term, comm, layout):
                return f"the ranks of a team are at different chunks: {layout}"
    return None


# -- along axes of one mesh ----------------------------------------------------------------------


def _axis_problem(comm: Communication) -> Problem:
    mesh = comm.source.mesh
    if not comm.is_along_axes:
        return f"{comm.kind} is along an axis of one mesh"
    unknown = [a for a in comm.axes if a not in mesh.axes]
    if unknown:
        return f"{mesh} has no axis {unknown[0]}"
    if len(comm.axes) > 1 and comm.dim is not None and not comm.is_even:
        extent = comm.shape[comm.dim]
        return (
            f"along {_named(comm.axes)} all parts are equally long, and {extent} rows do not divide"
        )
    return None


def _named(axes: tuple[str, ...]) -> str:
    return " and ".join(axes)


def _with(layout: Layout, axes: tuple[str, ...], placement: Placement) -> Layout:
    """Return a layout with some axes changed, one after the other."""
    for axis in axes:
        layout = layout.with_placement(axis, placement)
    return layout


def _result_problem(comm: Communication, result: Layout) -> Problem:
    """Return why the destination is not the layout that the kind makes; None where it is."""
    if is_alike(result, comm.destination, len(comm.shape)):
        return None
    return f"it makes {result} of {comm.source}, not {comm.destination}"


def _chunked_dim_problem(comm: Communication) -> Problem:
    """Return why a dim that is exchanged may not be in chunks; None where it is not."""
    chunk = chunk_of(comm.source)
    if chunk is not None and chunk.dim % len(comm.shape) in (comm.dim, comm.to_dim):
        return f"chunks of the parts of dim {chunk.dim} are no chunk of the whole"
    return None


def _split_problem(layout: Layout, split: tuple[str, ...], dim: int | None) -> Problem:
    """Return why some axes are not the innermost ones that split a dim; None where they are."""
    axes = layout.split_axes(dim) if dim is not None else ()
    if split and axes[-len(split) :] == split:
        return None
    if len(split) > 1:
        return f"{_named(split)} are not the innermost axes that split dim {dim} in {layout}"
    (axis,) = split or (None,)
    return f"{axis} is not the innermost axis that splits dim {dim} in {layout}"


def _partial_problem(comm: Communication) -> Problem:
    for axis in comm.axes:
        now = comm.source.placement(axis)
        if now != Partial(comm.reduce_op or ""):
            return f"{comm.source} is {now} along {axis}, not P({comm.reduce_op})"
    return None


def _along_axes_problem(comm: Communication) -> Problem:
    """Return what is wrong with an all-gather, all-to-all, all-reduce or reduce-scatter."""
    problem = _axis_problem(comm)
    if comm.kind in REDUCING:
        problem = problem or _partial_problem(comm)
    else:
        problem = problem or _split_problem(comm.source, comm.axes, comm.dim)
    if problem is not None:
        return problem
    to = {"AllToAll": comm.to_dim, "ReduceScatter": comm.dim}.get(comm.kind)
    if comm.kind == "AllToAll" and to in (None, comm.dim):
        return "it has no dim that is split afterwards: to_dim="
    after = _with(comm.source, comm.axes, Replicate())
    if to is not None:
        after = _with(after, comm.axes, Shard(to))
    return _chunked_dim_problem(comm) or _result_problem(comm, after)


def _part_problem(comm: Communication, whole: Layout, split: Layout) -> Problem:
    """Return why the chunk is not the part of one rank along the axis; None where it is."""
    assert comm.axis is not None
    chunk, n = chunk_of(whole), comm.source.mesh.axis_size(comm.axis)
    if chunk is None or chunk.chunks != n:
        return f"{comm.kind} along {comm.axis} moves one of {n} chunks, the part of one rank"
    return _split_problem(split, comm.axes, chunk.dim % len(comm.shape))


# -- between meshes, or of a whole mesh ----------------------------------------------------------


def _is_replicated(layout: Layout, comm: Communication) -> bool:
    return plain(layout, len(comm.shape)).is_replicated


def _other_chunk_problem(comm: Communication) -> Problem:
    if is_one_chunk(comm.source, comm.destination):
        return _chunked_dim_problem(comm)
    return "the chunk is another one afterwards"


def _broadcast_problem(comm: Communication) -> Problem:
    """Return what is wrong with a broadcast; None: nothing.

    A broadcast goes along an axis, from the rank whose part the chunk is, or to another mesh.
    """
    if comm.is_along_axes:
        problem = _axis_problem(comm)
        problem = problem or _part_problem(comm, comm.destination, comm.source)
        if problem is not None or comm.axis is None:
            return problem
        if chunk_of(comm.source) is not None:
            return "its source is a chunk already"
        gathered = comm.source.with_placement(comm.axis, Replicate())
        return _result_problem(comm, gathered.with_stream(comm.destination.stream))
    if comm.source.mesh == comm.destination.mesh and comm.source.mesh.size > 1:
        return "there is no axis along which it goes, and no other mesh"
    for layout in (comm.source, comm.destination):
        if not _is_replicated(layout, comm):
            return f"what is broadcast is whole on every rank, not {layout}"
    return _other_chunk_problem(comm)


def _reduce_problem(comm: Communication) -> Problem:
    """Return what is wrong with a reduce; None: nothing.

    A reduce goes along an axis, to the rank whose part the chunk is, or to a mesh of one rank.
    """
    if comm.is_along_axes and chunk_of(comm.source) is not None:
        problem = _axis_problem(comm) or _partial_problem(comm)
        problem = problem or _part_problem(comm, comm.source, comm.destination)
        if problem is not None or comm.axis is None:
            return problem
        reduced = comm.destination.with_placement(comm.axis, comm.source.placement(comm.axis))
        is_whole = chunk_of(comm.destination) is None
        alike = is_alike(reduced, comm.source.with_stream(None), len(comm.shape))
        return None if alike and is_whole else _result_problem(comm, reduced)
    if comm.destination.mesh.size != 1:
        return f"only one rank gets the result: it makes nothing of {comm.destination} elsewhere"
    if comm.destination.mesh.first not in comm.source.mesh:
        return f"rank {comm.destination.mesh.first} gets the result, and has no part of it"
    before = plain(comm.source, len(comm.shape))
    sizes = zip(before.placements, before.mesh.shape, strict=True)
    if not all(n == 1 or p == Partial(comm.reduce_op or "") for p, n in sizes):
        return f"{comm.source} is not P({comm.reduce_op}) along every axis"
    return _other_chunk_problem(comm)


def _only_split_problem(
    layout: Layout, axis: str | None, dim: int | None, comm: Communication
) -> Problem:
    """Return why a dim is not split by just one axis that has all ranks; None where it is."""
    bare = plain(layout, len(comm.shape))
    if axis is not None and dim is not None and axis in bare.mesh.axes:
        whole_mesh = bare.mesh.axis_size(axis) == bare.mesh.size
        if whole_mesh and bare.mesh.size == 1:
            return None if bare.is_replicated else f"{layout} is not one part"
        if whole_mesh and bare.splits == ((dim, (axis,)),) and not bare.partial_axes:
            return None
    return f"{axis} does not split dim {dim} over all ranks in {layout}"


def _gather_problem(comm: Communication) -> Problem:
    problem = _only_split_problem(comm.source, comm.axis, comm.dim, comm)
    if problem is not None:
        return problem
    if comm.destination.mesh.size != 1 or not _is_replicated(comm.destination, comm):
        return f"only one rank gets the whole, not {comm.destination}"
    return _other_chunk_problem(comm)


def _scatter_problem(comm: Communication) -> Problem:
    if not _is_replicated(comm.source, comm):
        return f"what is scattered is whole on its rank, not {comm.source}"
    return _only_split_problem(comm.destination, comm.axis, comm.dim, comm) or _other_chunk_problem(
        comm
    )


def _send_recv_problem(comm: Communication) -> Problem:
    """Return what is wrong with a SendRecv; None: nothing.

    The i-th rank of one mesh sends what the i-th rank of the other gets.
    """
    if comm.axes:
        return "it is along no axis"
    shown = [_by_position(layout, len(comm.shape)) for layout in (comm.source, comm.destination)]
    if shown[0] != shown[1]:
        return f"{comm.source} and {comm.destination} do not split alike"
    return None if is_one_chunk(comm.source, comm.destination) else _other_chunk_problem(comm)


def _by_position(layout: Layout, ndim: int) -> tuple[object, ...]:
    """Return sizes and placements of the axes with several ranks, without the names of the axes."""
    bare = plain(layout, ndim)
    sizes = zip(bare.mesh.axes, bare.mesh.shape, strict=True)
    large = [a for a, n in sizes if n > 1]
    splits = [(d, [large.index(a) for a in axes]) for d, axes in bare.splits]
    return [(bare.mesh.axis_size(a), bare.placement(a)) for a in large], splits


def _exchange_problem(comm: Communication) -> Problem:
    """Return what is wrong with an Exchange, or a ReduceExchange; None: nothing.

    Each rank receives what it lacks from ranks that have it; along axes that stay Partial, from
    those that have a part of the same value. In a ReduceExchange it receives a box of every term,
    and reduces them.
    """
    if comm.axes:
        return "it is along no axis"
    source, destination = comm.source, comm.destination
    if source.varying_axes or destination.varying_axes:
        return f"no rank has a part of the value itself in {source} or {destination}"
    staying, chunk = kept_terms(source, destination), chunk_of(source)
    if comm.kind == "ReduceExchange":
        if chunk is not None or chunk_of(destination) is not None:
            return "chunks of the parts are no chunk of the whole"
        if len(staying) < len(destination.reduce_ops):
            return f"{source} and {destination} do not have the same terms"
        ops = {op for a, op in source.reduce_ops.items() if a not in dict(staying)}
        is_right = ops == {comm.reduce_op}
        return None if is_right else f"{source} is not to be reduced by {comm.reduce_op}"
    if not len(staying) == len(source.reduce_ops) == len(destination.reduce_ops):
        return f"{source} and {destination} are not to be reduced alike"
    if chunk is None:
        return None
    if cuts_alike(source, destination, chunk.dim % len(comm.shape)):
        return _other_chunk_problem(comm)
    return "chunks of the parts are no chunk of the whole"


def _barrier_problem(comm: Communication) -> Problem:
    return "it moves nothing; `barrier` is an instruction of its own"


#: kind -> the function that returns why a communication does not do what its layouts say.
_KINDS: dict[str, Callable[[Communication], Problem]] = by_kind(
    {
        **dict.fromkeys(
            ("Allgather", "AllToAll", "Allreduce", "ReduceScatter"), _along_axes_problem
        ),
        "Broadcast": _broadcast_problem,
        "Reduce": _reduce_problem,
        "Gather": _gather_problem,
        "Scatter": _scatter_problem,
        "SendRecv": _send_recv_problem,
        "Exchange": _exchange_problem,
        "ReduceExchange": _exchange_problem,
        "Barrier": _barrier_problem,
    },
    tuple(KINDS),
)


# -- buffers -------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def buffer_type(comm: Communication, side: int) -> BufferType:
    """Return the type of the buffer that a communication reads (0) or writes (1), without padding.

    Where it splits a dim, this is outermost; the source of an AllToAll is packed.
    """
    layout, n = (comm.source, comm.destination)[side], len(comm.shape)
    front = tuple(range(n))
    if comm.kind == "AllToAll" and comm.dim is not None and side == 1:
        front = (comm.dim, *(d for d in range(n) if d != comm.dim))
    elif comm.kind in SPLITTING and comm.kind != "AllToAll":
        front = comm.front()
    assert comm.dtype is not None
    return BufferType(
        dtype=comm.dtype,
        shape=tuple(comm.shape[d] for d in front),
        layout=layout.permuted(front) if front != tuple(range(n)) else layout,
        flat=comm.kind == "AllToAll" and side == 0,
    )


def padding_of(comm: Communication, side: int) -> Padding | None:
    """Return how a buffer is padded where parts differ in size; None for kinds that never pad."""
    if comm.kind not in SPLITTING or comm.kind == "AllToAll" or comm.dim is None:
        return None
    layout = (comm.source, comm.destination)[side]
    is_whole = comm.whole() == layout
    if len(comm.axes) > 1:  # blocks along several axes are equal
        return None
    axis = comm.axis if comm.axis in layout.split_axes(comm.dim) else None
    dim = comm.front().index(comm.dim)
    return Padding(side="team" if is_whole else "block", dim=dim, parts=comm.size, axis=axis)


@lru_cache(maxsize=4096)
def buffer_problem(comm: Communication, side: int, kind: BufferType, rank: int | None) -> Problem:
    """Return why a buffer is not what a communication reads or writes; None where it is."""
    try:
        want, padding = buffer_type(comm, side), padding_of(comm, side)
    except (MdfuseError, AssertionError, ValueError, StopIteration) as error:
        return str(error) or "its layouts mean nothing"
    if kind.flat != want.flat:
        return "it is flat" if kind.flat else "it is to be packed"
    if kind.padding is not None and kind.padding != padding:
        return f"it is padded as {kind.padding}, not as {padding}"
    ndim = len(want.shape)
    if kind.shape == want.shape and is_alike(kind.placed, want.placed, ndim):
        return None
    is_free = kind.padding is None and not kind.flat and kind.placed.varying_axes
    if is_free and is_said(kind, want, rank):
        return None
    return f"it is to be {list(want.shape)} {want.placed}"
