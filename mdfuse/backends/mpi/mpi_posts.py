"""The calls by which each kind of communication is posted to MPI.

The builder of a kind returns, for one dtype, a function that only posts. Buffers are dense, so that
MPI needs only an address and a number of bytes, in any kind of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import Work, flat, root_index
from mdfuse.backends.mpi.pending_requests import Requests, State, Waiting
from mdfuse.backends.ordered import in_order, is_ordered
from mdfuse.backends.transfers import Post, Transfer, transferred
from mdfuse.backends.work import DONE, Posted
from mdfuse.errors import CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import KINDS, REDUCING, by_kind, source_blocks
from mdfuse.layouts.reduction import BOOL_OPS, check_reduction, working_dtype

#: Both ends match the i-th send to the i-th receive, so that one tag serves all.
_TAG = 0

#: A count is an int of C. MPI 4 has wider ones, which Open MPI 5.0 lacks.
MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiTeam:
    """The ranks of a team and their MPI communicators, one for each kind.

    In one communicator, posts of different kinds by mistake would match: MPI delivers a shorter
    message in place of a longer one without an error, and Open MPI, given a longer one in place of
    a shorter one, writes to memory that it has freed.

    Attributes:
        mpi: mpi4py's module.
        ranks: the members; a member's rank in the communicators is its index here.
        comms: one communicator for each kind.
        waiting: the deadline of waits.
        state: whether a post of the team has failed.
    """

    mpi: Any
    ranks: tuple[int, ...]
    comms: Mapping[str, Any]
    waiting: Waiting
    state: State = field(default_factory=State)

    def posted(self, call: Call, requests: Sequence[Any], buffers: object) -> Posted:
        """Return the work of a call's requests, which use some buffers."""
        return Posted(call, (self.work(requests, buffers),), None)

    def work(self, requests: Sequence[Any], buffers: object) -> Requests:
        """Return requests that use some buffers as one object to wait for."""
        return Requests(requests, buffers, self.waiting, self.state)

    def comm(self, call: Call) -> Any:
        """Return the communicator for the kind of a call."""
        return self.comms[call.kind]

    def memory(self, tensor: Tensor) -> Any:
        """Return a dense tensor's memory as a buffer of mpi4py."""
        return self.mpi.buffer.fromaddress(
            tensor.data_ptr(), tensor.numel() * tensor.element_size()
        )


def build_post(team: MpiTeam, call: Call, dtype: torch.dtype) -> Post:
    """Return a function that posts a call on buffers of one dtype.

    Raises:
        CommunicationError: a reduce op that the dtype does not have, or a root outside the team.
    """
    if call.kind not in REDUCING:
        return _CALLS[call.kind](team, call, dtype)
    check_reduction(call.reduce_op, dtype)
    if is_ordered(call, dtype):
        return in_order(partial(build_post, team, call), call, dtype)
    if not is_reducible(dtype):
        wide = working_dtype(dtype)
        return _widened(_CALLS[call.kind](team, call, wide), call, wide)
    post = _CALLS[call.kind](team, call, dtype)
    return _divided(post, call) if call.reduce_op == "avg" else post


def check_sizes(call: Call, buffers: Sequence[Tensor]) -> None:
    """Refuse buffers with more elements than an int of C counts; MPI's own error is unclear.

    Raises:
        CommunicationError: a buffer has more elements.
    """
    most = max((x.numel() for x in buffers), default=0)
    if most > MOST_ELEMENTS:
        raise CommunicationError(
            f"{call.kind} on team {call.team}: a buffer of {most} elements",
            because=f"MPI counts up to {MOST_ELEMENTS}",
            hint='split the tensor over more ranks, or use backend="gloo" or "nccl"',
        )


# -- collectives ---------------------------------------------------------------------------------


#: Kind -> the method that begins it.
_METHODS = {
    "Allgather": "Iallgather",
    "ReduceScatter": "Ireduce_scatter_block",
    "Allreduce": "Iallreduce",
    "Broadcast": "Ibcast",
    "Reduce": "Ireduce",
}


def _collective(team: MpiTeam, call: Call, dtype: torch.dtype) -> Post:
    """Return a post that makes one request; without elements, which no rank has then, none."""
    start, memory = getattr(team.comm(call), _METHODS[call.kind]), team.memory
    reduces, is_broadcast = call.kind in REDUCING, call.kind == "Broadcast"
    kind = (reducing_type if reduces else carrying_type)(team.mpi, dtype)
    how: list[Any] = [reduce_op(team.mpi, call.reduce_op, dtype)] if reduces else []
    how += [root_index(call)] if KINDS[call.kind].has_root else []

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        if not (srcs or dsts)[0].numel():
            return DONE
        src, dst = ([memory(x[0]), kind] if x else None for x in (srcs, dsts))
        if call.kind == "Allreduce" and srcs[0].data_ptr() == dsts[0].data_ptr():
            src = team.mpi.IN_PLACE
        sides = (src or dst,) if is_broadcast else (src, dst)
        return team.posted(call, (start(*sides, *how),), (*srcs, *dsts))

    return post


def _alltoall(team: MpiTeam, call: Call, dtype: torch.dtype) -> Post:
    """Post even where this rank has no elements at all: others may have some."""
    kind, start, memory = carrying_type(team.mpi, dtype), team.comm(call).Ialltoallv, team.memory
    sends = call.send_counts, _starts(call.send_counts)
    recvs = call.recv_counts, _starts(call.recv_counts)

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        src, dst = srcs[0], dsts[0]
        request = start([memory(src), sends, kind], [memory(dst), recvs, kind])
        return team.posted(call, (request,), (src, dst))

    return post


def _gather(team: MpiTeam, call: Call, dtype: torch.dtype) -> Post:
    """Post on every member, also on those that give nothing; blocks arrive in order of `parts`."""
    kind, start, memory = carrying_type(team.mpi, dtype), team.comm(call).Igatherv, team.memory
    root, is_root = root_index(call), call.rank == call.root
    places = [call.parts.index(r) if r in call.parts else None for r in call.team]

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        given = [memory(srcs[0]), kind] if srcs else [None, 0, kind]
        into = None
        if is_root:
            size = dsts[0].numel() // max(1, len(call.parts))
            into = [memory(dsts[0]), _blocks(places, size), kind]
        return team.posted(call, (start(given, into, root),), (srcs, dsts))

    return post


def _scatter(team: MpiTeam, call: Call, dtype: torch.dtype) -> Post:
    """Post on every member, also on those that get nothing.

    MPI reads no block twice, so that the root copies blocks that go to several members.
    """
    kind, start, memory = carrying_type(team.mpi, dtype), team.comm(call).Iscatterv, team.memory
    root, is_root = root_index(call), call.rank == call.root
    count = source_blocks(call)
    is_distinct = len(set(call.blocks)) == len(call.blocks)
    order = dict(zip(call.parts, call.blocks if is_distinct else range(count), strict=False))
    places = [order.get(r) for r in call.team]

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        given, source = None, None
        if is_root:
            source = srcs[0]
            size = source.numel() // max(1, count)
            if not is_distinct:
                source = flat(source).view(count, -1)[list(call.blocks)]
            given = [memory(source), _blocks(places, size), kind]
        into = [memory(dsts[0]), kind] if dsts else [None, 0, kind]
        return team.posted(call, (start(given, into, root),), (source, dsts))

    return post


def _transferred(team: MpiTeam, call: Call, dtype: torch.dtype) -> Post:
    """Post transfers between pairs, each in its own dtype."""
    send, receive = team.comm(call).Isend, team.comm(call).Irecv

    def message(tensor: Tensor) -> list[Any]:
        return [team.memory(tensor), carrying_type(team.mpi, tensor.dtype)]

    def transfer(recvs: list[Transfer], sends: list[Transfer]) -> Sequence[Requests]:
        requests = [receive(message(x), peer, _TAG) for peer, x in recvs]
        requests += [send(message(x), peer, _TAG) for peer, x in sends]
        return [team.work(requests, (recvs, sends))]

    return transferred(call, transfer)


def _starts(counts: Sequence[int]) -> list[int]:
    """Return the offset of each of some adjacent blocks, in elements."""
    return [sum(counts[:i]) for i in range(len(counts))]


def _blocks(places: Sequence[int | None], size: int) -> tuple[list[int], list[int]]:
    """Return each member's number of elements at the root, and their offsets there.

    Args:
        places: each member's block at the root; None: it has none.
        size: elements of a block.
    """
    return [0 if p is None else size for p in places], [(p or 0) * size for p in places]


# -- reductions that MPI lacks ---------------------------------------------------------------------


def _widened(post: Post, call: Call, wide: torch.dtype) -> Post:
    """Reduce narrow numbers in a wider dtype and round once, at the end."""
    divided = _divided(post, call) if call.reduce_op == "avg" else post

    def post_wide(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        into = [torch.empty(x.numel(), dtype=wide, device=x.device) for x in dsts]
        work = divided([flat(x).to(wide) for x in srcs], into)

        def narrow() -> None:
            for dst, wide_dst in zip(dsts, into, strict=True):
                flat(dst).copy_(wide_dst)

        return Posted(call, (work,), None, narrow)

    return post_wide


def _divided(post: Post, call: Call) -> Post:
    """Average: divide the sum that `post` computes by the number of members."""

    def post_sum(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        def divide() -> None:
            for dst in dsts:
                dst.div_(len(call.team))

        return Posted(call, (post(srcs, dsts),), None, divide)

    return post_sum


_Builder = Callable[[MpiTeam, Call, torch.dtype], Post]

_CALLS: dict[str, _Builder] = by_kind(
    {
        **dict.fromkeys(_METHODS, _collective),
        "AllToAll": _alltoall,
        "Gather": _gather,
        "Scatter": _scatter,
    },
    default=_transferred,
)


# -- MPI's names for torch's dtypes and reduce ops -------------------------------------------------
# Every type is passed explicitly: MPI takes a wrong guess for narrow floats without an error.


#: Types in which MPI itself reduces; bool does as bytes that hold 0 or 1.
_REDUCIBLE = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "UINT8_T",
}

#: Types for data that is only carried, by bytes per element: MPI counts up to 2^31 elements.
_CARRIED = {1: "BYTE", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}

#: MPI has no average: the sum is divided afterwards.
_OPS = {
    "sum": "SUM",
    "prod": "PROD",
    "min": "MIN",
    "max": "MAX",
    "avg": "SUM",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


def is_reducible(dtype: torch.dtype) -> bool:
    """Return whether MPI reduces this dtype; the others are reduced in their working dtype."""
    return dtype in _REDUCIBLE


def reducing_type(mpi: Any, dtype: torch.dtype) -> Any:
    """Return MPI's type for the elements of a reduction."""
    return getattr(mpi, _REDUCIBLE[dtype])


def carrying_type(mpi: Any, dtype: torch.dtype) -> Any:
    """Return a type of MPI with as many bytes as the dtype, for data that is only carried."""
    return getattr(mpi, _CARRIED[dtype.itemsize])


def reduce_op(mpi: Any, op: str | None, dtype: torch.dtype) -> Any:
    """Return MPI's op for a reduce op; the sum for "avg"."""
    name = op or ""
    return getattr(mpi, _OPS[BOOL_OPS[name] if dtype is torch.bool else name])
