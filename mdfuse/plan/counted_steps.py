"""Prepare rows that a run counts: the fetch of the counts, exact buffers, posts by the counts.

A fetched value is a table of sums on the host: of all parts and experts in front of each place.
So the rows of a box of parts and experts follow from four numbers of it.
Buffers of counted rows are as long as their rows: their bound counts for estimates alone.
Where nothing fetches the counts, buffers are as long as their bound, and rows are taken by the
counts on the device: see `mdfuse.ir.packed_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import Poster
from mdfuse.backends.staging import Staged
from mdfuse.errors import CommunicationError, CountsError, ProgramError
from mdfuse.hir.counted_rows import Cell, blocks_of, cell_of, cells_of, moves, row_size
from mdfuse.hir.program import Instruction
from mdfuse.ir import packed_rows
from mdfuse.ir.dtype_limits import poison
from mdfuse.ir.ops import itself
from mdfuse.layouts.call import Call
from mdfuse.names import base_name
from mdfuse.plan.allocation import allocate, empty
from mdfuse.plan.context import Context, PlanStep, label
from mdfuse.plan.lines import Line
from mdfuse.plan.pending import Pending

#: A fetched value: the sums of all parts and experts in front of each place, row by row.
Fetched = list[int]
#: The rows of some cells, by a fetched value.
_Rows = Callable[[Fetched], list[int]]


def rows_of(cells: Sequence[Cell], experts: int, first: int = 0) -> _Rows:
    """Return the function that looks the rows of cells up in a fetched value.

    Args:
        cells: the parts and experts of each.
        experts: how many there are.
        first: the part with which the fetched value begins.

    Numbers of Python take 3 us for four ranks, calls of torch on small tensors 50 (2 busy cores).
    """
    n = experts + 1
    at = [_corners(p - first, q - first, x, n) if p < q else (0,) * 4 for (p, q), x in cells]

    def look_up(sums: Fetched) -> list[int]:
        return [sums[d] - sums[b] - sums[c] + sums[a] for a, b, c, d in at]

    return look_up


def _corners(start: int, stop: int, experts: tuple[int, int], n: int) -> tuple[int, ...]:
    """Return the places of four sums, of n in a row, that make those of parts and experts."""
    return tuple(p * n + e for p in (start, stop) for e in experts)


def _rows_by(counts: str, cells: Sequence[Cell], context: Context) -> _Rows:
    """Return `rows_of` for cells whose rows some counts count, of parts that this rank knows."""
    return rows_of(cells, context.type(counts).shape[1], context.box(counts)[0][0])


def _blocks(plain: str, rows: str, counts: str, context: Context) -> packed_rows.RowBlocks:
    """Return how the cells of a rank's plain buffer lie among the counts that it knows."""
    first = context.box(counts)[0][0]
    return blocks_of(context.type(plain), context.type(rows), context.rank, first)


def sums_of(table: Sequence[Sequence[int]], experts: int) -> Fetched:
    """Return the fetched value of counts.

    >>> sums_of([[1, 2], [3, 4]], 2)
    [0, 0, 0, 0, 1, 3, 0, 4, 10]
    """
    above = [0] * (experts + 1)
    sums = [*above]
    for row in table:
        above = [x + y for x, y in zip(above, accumulate(row, initial=0), strict=True)]
        sums += above
    return sums


def fetch(i: Instruction, context: Context) -> list[Line]:
    """Bring counts to the host; ranks that all know all of them refuse wrong ones together."""
    (output,), (counts,) = i.outputs, i.reads
    read = _reader(counts, i.kwargs["most"], i, context)
    experts = context.type(output).shape[1]

    def fetched(table: Tensor) -> Fetched:
        return sums_of(read(table), experts)

    return [Line(run=fetched, args=(context.ref(counts),), into=context.slot(output))]


def _reader(
    counts: str, most: int, i: Instruction, context: Context
) -> Callable[[Tensor], list[list[int]]]:
    """Return the function that reads counts on the host, and refuses too many rows of a part."""
    what, where = f"@{context.program.name}: %{base_name(counts)}", context.where(i)
    is_all = _is_everywhere(counts, context)
    kind, because = (CountsError, _ALL_KNOW) if is_all else (ProgramError, _SOME_KNOW)
    each, first = i.kwargs.get("each"), context.box(counts)[0][0]
    hint = _BOUND if each is None else _CAPACITY

    def read(counted: Tensor) -> list[list[int]]:
        table: list[list[int]] = counted.tolist()
        problem = _problem(table, most, each, first)
        if problem is not None:
            raise kind(f"{what} counts {problem}", where=where, because=because, hint=hint)
        return table

    return read


def _problem(table: list[list[int]], most: int, each: int | None, first: int) -> str | None:
    """Return what is wrong with counts of parts, from one on, and experts; None: nothing."""
    cells = [(n, p, e) for p, row in enumerate(table, first) for e, n in enumerate(row)]
    least, n = (of(cells, key=itemgetter(0), default=(0, 0, 0)) for of in (min, max))
    if least[0] < 0:
        return f"{least[0]} rows"
    if each is not None and n[0] > each:
        return f"{n[0]} rows of part {n[1]} for expert {n[2]}, of which there may be {each}"
    rows = [*map(sum, table)]
    total = max(rows, default=0)
    if total <= most:
        return None
    return f"{total} rows of part {first + rows.index(total)}, of which there may be {most}"


def _is_everywhere(name: str, context: Context) -> bool:
    """Tell whether all ranks of the program fetch all of a value, and so refuse it together."""
    layout = context.type(name).layout
    if layout is None or any(layout.mesh.axis_size(a) > 1 for a in layout.split_axes(0)):
        return False
    return all(r in layout.mesh for m in context.program.meshes for r in m)


_ALL_KNOW = "all ranks know all counts, so that all of them refuse the run together"
_SOME_KNOW = "the ranks that exchange these rows know their counts, and end the run on all ranks"
_CAPACITY = "state a higher capacity=, or drop rows behind it: group_rows(..., drop=True)"
_BOUND = "let the bound be what a part may have at most, or drop rows before they are counted"


def _is_exact(i: Instruction, context: Context) -> bool:
    """Tell whether buffers are as long as their rows: the host knows how many there are.

    Where it does not, they are as long as there may be rows, and zeros stand behind those there.
    """
    return i.reads[-1] in context.fetched


def _numbers(i: Instruction, context: Context, most: int) -> Callable[[Any], Fetched]:
    """Return the function that makes a fetched value of what an instruction counts by."""
    counts = i.reads[-1]
    if counts in context.fetched:
        return itself
    read, experts = _reader(counts, most, i, context), context.type(counts).shape[1]
    return lambda table: sums_of(read(table), experts)


def alloc(i: Instruction, context: Context) -> list[Line]:
    """Make a buffer of as many rows as are counted, where there is none."""
    (output,), (counts,) = i.outputs, i.reads
    if not _is_exact(i, context):
        return allocate(i, context)
    if context.has_buffer(output):
        return []
    kind = context.type(output)
    _, *inner = context.local(output)
    rows = _rows_by(counts, [cell_of(kind, context.rank)], context)
    how: dict[str, Any] = {"dtype": kind.dtype, "device": context.device}

    def make(fetched: Fetched) -> Tensor:
        return torch.empty((*rows(fetched), *inner), **how)

    fill = i.kwargs.get("fill", poison(kind.dtype) if context.poison else None)
    into, args, nbytes = context.slot(output), (context.ref(counts),), _bound(i, context)
    lines = [Line(run=make, args=args, into=into, makes=nbytes)]
    if fill is not None:
        lines.append(Line(run="fill_", args=(context.ref(output), fill)))
    return lines


def _bound(i: Instruction, context: Context) -> int:
    """Return the bytes of the rows that there may be."""
    (output,) = i.outputs
    return math.prod(context.local(output)) * context.type(output).dtype.itemsize


def pack(i: Instruction, context: Context) -> list[Line]:
    """Take the rows that are there, of parts whose rows stand at their beginnings."""
    (output,), (operand, counts) = i.outputs, i.reads
    kind, source = context.type(output), context.ref(operand)
    args, target = (source, context.ref(counts)), context.ref(output)
    if not _is_exact(i, context):
        blocks = _blocks(operand, output, counts, context)
        before, after = context.local(operand), context.local(output)
        is_block = blocks.number == 1 and math.prod(before) == math.prod(after)
        if is_block and not context.has_buffer(output):
            shares = (source.slot,)
            return [Line(run="reshape", args=(source, after), into=target.slot, shares=shares)]
        run = partial(packed_rows.pack, blocks=blocks)
        return [*empty(output, None, context), Line(run=run, args=(target, *args))]
    rows = _rows_by(counts, cells_of(context.type(operand), kind, context.rank), context)
    dims = len(context.local(operand)) - len(context.local(output))

    def take(x: Tensor, sums: Fetched) -> Tensor:
        parts = x.flatten(0, dims - 1)
        taken = [part[:n] for part, n in zip(parts, rows(sums), strict=True)]
        if not taken:
            return x.reshape(0, *parts.shape[2:])
        packed: Tensor = taken[0].contiguous() if len(taken) == 1 else torch.cat(taken)
        return packed

    def copy(out: Tensor, x: Tensor, sums: Fetched) -> None:
        out.copy_(take(x, sums))

    if context.has_buffer(output):
        return [Line(run=copy, args=(target, *args))]
    shares, nbytes = (source.slot,), _bound(i, context)
    return [Line(run=take, args=args, into=target.slot, shares=shares, makes=nbytes)]


def unpack(i: Instruction, context: Context) -> list[Line]:
    """Put rows at the beginnings of their parts; zeros follow them."""
    (output,), (operand, counts) = i.outputs, i.reads
    kind, shape = context.type(operand), context.local(output)
    args = (context.ref(operand), context.ref(counts))
    if not _is_exact(i, context):
        run = partial(packed_rows.unpack, blocks=_blocks(output, operand, counts, context))
        return [*empty(output, None, context), Line(run=run, args=(context.ref(output), *args))]
    rows = _rows_by(counts, cells_of(context.type(output), kind, context.rank), context)
    dims = len(shape) - len(context.local(operand))

    def put(x: Tensor, sums: Fetched, out: Tensor | None = None) -> Tensor:
        lengths = rows(sums)
        if out is None and len(lengths) == 1 and lengths[0] == shape[dims]:
            return x.view(shape)
        out = x.new_empty(shape) if out is None else out
        for part, taken in zip(out.flatten(0, dims - 1), x.split(lengths), strict=True):
            part[: len(taken)] = taken
            part[len(taken) :] = 0
        return out

    if context.has_buffer(output):
        return [Line(run=put, args=(*args, context.ref(output)))]
    into, shares = context.slot(output), (args[0].slot,)
    return [Line(run=put, args=args, into=into, shares=shares, makes=_bound(i, context))]


def _check_readable(i: Instruction, context: Context) -> None:
    """Raise ProgramError where a post is by counts in the memory of a GPU, which none reads."""
    counts = i.reads[-1]
    if counts in context.fetched or context.device.type == "cpu":
        return
    raise ProgramError(
        f"@{context.program.name}: {i.op} by %{base_name(counts)}, which is in device memory",
        where=context.where(i),
        because="on GPUs the host must know how many rows go where before it posts them",
        hint="name a fetched value, %c = fetch(%n, most=...), or post blocks of unpack_rows",
    )


def post(i: Instruction, context: Context) -> PlanStep:
    """Prepare a post that moves as many rows as are counted."""
    comm, rank = i.comm, context.rank
    assert comm is not None
    _check_readable(i, context)
    context.bind_name(i.outputs[0])
    sent, received = moves(comm, rank)
    rows, size, n = (
        _rows_by(i.reads[-1], (*sent, *received), context),
        row_size(comm, rank),
        len(sent),
    )
    numbers, is_exact = _numbers(i, context, comm.shape[2]), _is_exact(i, context)
    call = comm.part(rank).call
    assert call is not None
    call = replace(call, send_counts=(0,) * n, recv_counts=(0,) * n, is_counted=True)
    poster = context.bind(call)

    def post_rows(source: Tensor, destination: Tensor, given: Any) -> Pending:
        there = rows(numbers(given))
        if not is_exact:
            left = destination[sum(there[n:]) :]
            left.zero_()
            source, destination = source[: sum(there[:n])], destination[: sum(there[n:])]
        counts = [size * k for k in there]
        now = replace(call, send_counts=tuple(counts[:n]), recv_counts=tuple(counts[n:]))
        for x, side in ((source, now.send_counts), (destination, now.recv_counts)):
            if x.numel() != sum(side) or not x.is_contiguous():
                raise _other_rows(i, rank, x, sum(side) // max(size, 1))
        return Pending((counted(poster, now)((source,), (destination,)),))

    args = tuple(map(context.ref, i.reads))
    handle, used = context.slot(i.outputs[0]), tuple(x.slot for x in args)
    return PlanStep(
        lines=(Line(run=post_rows, args=args, into=handle, shares=used[:2]),),
        label=label(i),
        op="post",
        inputs=used,
        outputs=(handle,),
        posters=(poster,),
        calls=(call,),
    )


def _other_rows(i: Instruction, rank: int, x: Tensor, rows: int) -> CommunicationError:
    return CommunicationError(
        f"rank {rank} posts {i.comm} of a buffer {list(x.shape)} with strides {list(x.stride())}, "
        f"where {rows} rows are counted",
        where=[i.source.quote()] if i.source else [],
        because="rows that are moved lie one after the other, and are as many as are counted",
        hint="make it from the rows that the counts are of",
    )


#: op -> the function that prepares its lines.
PREPARED: dict[str, Callable[[Instruction, Context], list[Line]]] = {
    "fetch": fetch,
    "pack_rows": pack,
    "unpack_rows": unpack,
}


def counted(poster: Any, call: Call) -> Poster:
    """Return a poster with the counts of a run in place of those with which it was bound.

    All posters are data classes of a call and a team; what they keep for one call is left behind.

    Args:
        poster: as a backend bound it.
        call: the same call, with other counts.
    """
    if isinstance(poster, Staged) and hasattr(poster.post, "call"):
        return replace(poster, call=call, post=counted(poster.post, call))
    bound: Poster = replace(poster, call=call)
    return bound
