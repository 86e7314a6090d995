"""What each kind of communication posts to a library of torch.distributed.

The builder of a kind yields, for one dtype, a function that only posts. What a library cannot carry
travels as bytes; what it cannot reduce is gathered and reduced locally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdfuse.backends.base import Work, root_index
from mdfuse.backends.c10d.groups import AllgatherOptions, Group, Library, Transfer
from mdfuse.backends.work import DONE, Posted
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import BY_ALL, REDUCING, source_blocks
from mdfuse.layouts.reduction import BOOL_OPS, check_reduction, combine
from mdfuse.torch_private import all_gather_of, reduce_scatter_of

Post = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]
_View = Callable[[Tensor], Tensor]

#: Dtypes that every library here carries and reduces; the others travel as bytes.
NATIVE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)

_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A group and whose it is; a team of one has no group."""

    library: Library
    ranks: tuple[int, ...]
    group: Group

    def transfer(self, call: Call, recvs: Sequence[Transfer], sends: Sequence[Transfer]) -> Work:
        """Post transfers with the members at the given indices; empty ones are left out."""
        recvs = [t for t in recvs if t[1].numel()]
        sends = [t for t in sends if t[1].numel()]
        if not recvs and not sends:
            return DONE
        works = self.library.transfer(self.group, recvs, sends)
        return Posted(call, works, (recvs, sends))


def build_post(team: Team, call: Call, dtype: torch.dtype) -> Post:
    """The posting function of a call on one dtype."""
    kind = call.kind
    if kind in REDUCING:
        check_reduction(call.reduce_op, dtype)
    if len(call.team) == 1 and kind in BY_ALL:  # the others have no pair then
        return _copy
    if kind in REDUCING and not is_reducible(team.library, call, dtype):
        return _GATHERED[kind](team, call, dtype)
    return KINDS[kind](team, call, dtype)


def is_reducible(library: Library, call: Call, dtype: torch.dtype) -> bool:
    """Whether the library itself reduces this; bool does as uint8."""
    if dtype is torch.bool:
        return BOOL_OPS[call.reduce_op or ""] not in library.lacks
    return dtype in NATIVE and call.reduce_op not in library.lacks


# -- views ---------------------------------------------------------------------------------------


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order."""
    if tensor.dim() == 1:
        return tensor
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _flat_bytes(tensor: Tensor) -> Tensor:
    return _flat(tensor).view(torch.uint8)


def _as_is(tensor: Tensor) -> Tensor:
    """A contiguous tensor serves a library that counts elements; saves 0.7 us per view."""
    return tensor if tensor.is_contiguous() else _flat(tensor)


def _flat_view(dtype: torch.dtype) -> _View:
    return _flat if dtype in NATIVE else _flat_bytes


def _any_view(library: Library, dtype: torch.dtype) -> _View:
    return _flat_view(dtype) if library.needs_flat or dtype not in NATIVE else _as_is


def _carried(tensor: Tensor) -> Tensor:
    """What a transfer carries: the dtypes of one group may differ, and nobody looks at shapes."""
    return _as_is(tensor) if tensor.dtype in NATIVE else _flat_bytes(tensor)


def reduce_op(call: Call, dtype: torch.dtype) -> Any:
    op = call.reduce_op or ""
    return _REDUCE_OPS[BOOL_OPS[op] if dtype is torch.bool else op]


def _fill(dst: Tensor, src: Tensor) -> None:
    if dst.data_ptr() != src.data_ptr():
        _flat(dst).copy_(_flat(src))


# -- collectives ---------------------------------------------------------------------------------


def _copy(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
    """A team of one: what it would get is what it has."""
    if srcs and dsts:
        _fill(dsts[0], srcs[0])
    return DONE


def _allgather(team: Team, call: Call, dtype: torch.dtype) -> Post:
    view = _any_view(team.library, dtype)
    gather, options = all_gather_of(team.group), AllgatherOptions()

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        src, dst = view(srcs[0]), view(dsts[0])
        if not dst.numel():
            return DONE
        return Posted(call, (gather(dst, src, options),), (src, dst))

    return post


def _reduce_scatter(team: Team, call: Call, dtype: torch.dtype) -> Post:
    view = _any_view(team.library, dtype)
    reduce_scatter, options = reduce_scatter_of(team.group), dist.ReduceScatterOptions()
    options.reduceOp = reduce_op(call, dtype)

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        src, dst = view(srcs[0]), view(dsts[0])
        if not src.numel():
            return DONE
        return Posted(call, (reduce_scatter(dst, src, options),), (src, dst))

    return post


def _allreduce(team: Team, call: Call, dtype: torch.dtype) -> Post:
    view = _any_view(team.library, dtype)
    allreduce, options = team.group.allreduce, dist.AllreduceOptions()
    options.reduceOp = reduce_op(call, dtype)

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        dst = view(dsts[0])
        if not dst.numel():
            return DONE
        _fill(dsts[0], srcs[0])
        return Posted(call, (allreduce([dst], options),), dst)

    return post


def _broadcast(team: Team, call: Call, dtype: torch.dtype) -> Post:
    view = _any_view(team.library, dtype)
    broadcast, options = team.group.broadcast, dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root_index(call), 0

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        buffer = view((srcs or dsts)[0])
        if not buffer.numel():
            return DONE
        return Posted(call, (broadcast([buffer], options),), buffer)

    return post


def _reduce(team: Team, call: Call, dtype: torch.dtype) -> Post:
    view = _any_view(team.library, dtype)
    reduce_to, options = team.group.reduce, dist.ReduceOptions()
    options.reduceOp, options.rootRank = reduce_op(call, dtype), root_index(call)
    is_root, clobbers = call.rank == call.root, team.library.reduce_clobbers

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        buffer = view(srcs[0])
        if not buffer.numel():
            return DONE
        if is_root:
            _fill(dsts[0], srcs[0])
            buffer = view(dsts[0])
        elif clobbers:
            buffer = buffer.clone()
        return Posted(call, (reduce_to([buffer], options),), buffer)

    return post


def _alltoall(team: Team, call: Call, dtype: torch.dtype) -> Post:
    """Posted even where this rank has no elements at all: others may have some."""
    view = _flat_view(dtype)
    scale = 1 if dtype in NATIVE else dtype.itemsize
    sends = [count * scale for count in call.send_counts]
    recvs = [count * scale for count in call.recv_counts]
    alltoall, options = team.group.alltoall_base, dist.AllToAllOptions()

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        src, dst = view(srcs[0]), view(dsts[0])
        return Posted(call, (alltoall(dst, src, recvs, sends, options),), (src, dst))

    return post


# -- transfers between pairs -----------------------------------------------------------------------


def _gather(team: Team, call: Call, dtype: torch.dtype) -> Post:
    """Point-to-point, as libraries do it too, so that the root need not be one of the parts."""
    view, root = _flat_view(dtype), root_index(call)
    is_root, is_part = call.rank == call.root, call.rank in call.parts
    count, own = len(call.parts), call.parts.index(call.rank) if is_part else -1
    senders = [(i, call.team.index(r)) for i, r in enumerate(call.parts) if r != call.rank]

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        if not is_root:
            return team.transfer(call, (), [(root, view(srcs[0]))] if is_part else ())
        if not count:
            return DONE
        blocks = view(dsts[0]).chunk(count)
        if not blocks[0].numel():
            return DONE
        if is_part:
            blocks[own].copy_(view(srcs[0]))
        return team.transfer(call, [(peer, blocks[i]) for i, peer in senders], ())

    return post


def _scatter(team: Team, call: Call, dtype: torch.dtype) -> Post:
    view, root = _flat_view(dtype), root_index(call)
    is_root = call.rank == call.root
    count = source_blocks(call)
    pairs = list(zip(call.parts, call.blocks, strict=True))
    own = next((block for part, block in pairs if part == call.rank), None)
    receivers = [(call.team.index(part), block) for part, block in pairs if part != call.rank]

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        if not is_root:
            return team.transfer(call, [(root, view(dst)) for dst in dsts], ())
        src = view(srcs[0])
        if not src.numel() or not count:
            return DONE
        blocks = src.view(count, -1)
        if own is not None:
            view(dsts[0]).copy_(blocks[own])
        return team.transfer(call, (), [(peer, blocks[block]) for peer, block in receivers])

    return post


def _exchange(team: Team, call: Call, dtype: torch.dtype) -> Post:
    receivers = [call.team.index(rank) for rank in call.sends]
    senders = [call.team.index(rank) for rank in call.recvs]

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        recvs = [(p, _carried(dst)) for p, dst in zip(senders, dsts, strict=True)]
        sends = [(p, _carried(src)) for p, src in zip(receivers, srcs, strict=True)]
        return team.transfer(call, recvs, sends)

    return post


# -- reductions that the library lacks: gather the operands, reduce here ---------------------------


def _reduce_rows(call: Call, work: Work, rows: Tensor, dst: Tensor, kept: object) -> Work:
    """The work that fills `dst` [k] from `rows` [n, k] once `work` has brought them."""
    op = call.reduce_op or ""
    return Posted(call, (work,), kept, lambda: _flat(dst).copy_(combine(op, rows)))


def _gathered_allreduce(team: Team, call: Call, dtype: torch.dtype) -> Post:
    gather = _allgather(team, call, dtype)

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        rows = srcs[0].new_empty((len(call.team), srcs[0].numel()))
        return _reduce_rows(call, gather(srcs, (rows,)), rows, dsts[0], srcs)

    return post


def _gathered_reduce_scatter(team: Team, call: Call, dtype: torch.dtype) -> Post:
    exchange = _alltoall(team, call, dtype)  # without counts: equal blocks

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        if not srcs[0].numel():
            return DONE
        rows = srcs[0].new_empty((len(call.team), dsts[0].numel()))
        return _reduce_rows(call, exchange(srcs, (rows,)), rows, dsts[0], srcs)

    return post


def _gathered_reduce(team: Team, call: Call, dtype: torch.dtype) -> Post:
    gather = _gather(team, replace(call, parts=call.team), dtype)

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        if call.rank != call.root:
            return gather(srcs, ())
        rows = srcs[0].new_empty((len(call.team), srcs[0].numel()))
        return _reduce_rows(call, gather(srcs, (rows,)), rows, dsts[0], srcs)

    return post


_Builder = Callable[[Team, Call, torch.dtype], Post]

KINDS: dict[str, _Builder] = {
    "Allgather": _allgather,
    "ReduceScatter": _reduce_scatter,
    "Allreduce": _allreduce,
    "AllToAll": _alltoall,
    "Broadcast": _broadcast,
    "Reduce": _reduce,
    "Gather": _gather,
    "Scatter": _scatter,
    "SendRecv": _exchange,
    "Exchange": _exchange,
}

_GATHERED: dict[str, _Builder] = {
    "Allreduce": _gathered_allreduce,
    "ReduceScatter": _gathered_reduce_scatter,
    "Reduce": _gathered_reduce,
}
