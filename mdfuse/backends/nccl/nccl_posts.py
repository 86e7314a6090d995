"""The calls by which each kind of communication is posted to NCCL, and checks of its buffers.

Names and arguments of the functions are those of `nccl.bindings.nccl`; addresses, counts, dtypes
and streams are integers there. Transfers between pairs go out as one group: NCCL would run them one
after the other otherwise, and could deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.algorithms import Piece
from mdfuse.backends.base import SIDES, Buffer, Prepared, check_dtypes, root_index
from mdfuse.backends.ordered import is_ordered
from mdfuse.backends.post_notes import PostInfo
from mdfuse.backends.transfers import composer, in_one_step
from mdfuse.errors import CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import CARRIED, KINDS, REDUCING, blocks_of, by_kind
from mdfuse.layouts.reduction import check_reduction

#: ncclDataType_t (nccl.h). Other dtypes travel as bytes.
_CODES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_BYTE = _CODES[torch.uint8]

#: ncclRedOp_t (nccl.h)
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}

#: Dtypes that are reduced on a lane: those that torch's process group hands to NCCL as well, so
#: that results are the same. The rest (bool, narrow floats, wide unsigned integers) is gathered
#: through the process group, and reduced locally.
_REDUCED = frozenset(_CODES) - {torch.uint32, torch.uint64}

_SRC = Buffer("src", 0, "pointer")
_DST = Buffer("dst", 0, "pointer")

#: One transfer: which buffer, offset in bytes, count, dtype code, the other's index in the team.
_Transfer = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """NCCL's functions, and the communicator and stream (a handle) that posts go to."""

    binding: Any
    comm: Any
    stream: int


def is_carried(call: Call, buffers: Sequence[Tensor]) -> bool:
    """Return whether NCCL itself carries a call; the same on all ranks of the team.

    It does not take extremes of floats as torch does: `mdfuse.backends.ordered`.
    """
    if call.kind not in CARRIED:
        return False
    if call.kind not in REDUCING:
        return True
    has_call = _CALLS[call.kind] is not _transferred and call.reduce_op in _OPS
    dtypes = {x.dtype for x in buffers}
    return has_call and dtypes <= {*_REDUCED} and not any(is_ordered(call, x) for x in dtypes)


def prepare(
    port: Port, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]
) -> tuple[Prepared, ...]:
    """Check a post, and return its calls; none where this rank moves nothing.

    Raises:
        CommunicationError: the buffers, the reduce op or the root do not fit the call.
    """
    _check(call, srcs, dsts)
    if not any(x.numel() for x in (*srcs, *dsts)):
        return ()
    prepared = _CALLS[call.kind](port, call, srcs, dsts)
    return () if prepared is None else (prepared,)


def prepare_together(
    port: Port, calls: Sequence[Call], srcs: Sequence[Tensor], dsts: Sequence[Tensor]
) -> tuple[Prepared, ...]:
    """Check posts of one source and one destination each, and return the group that makes them.

    Returns:
        One call; none where one of the posts is no call of NCCL's, or moves nothing.

    Raises:
        CommunicationError: as `prepare`.
    """
    posts = list[tuple[Any, tuple[Any, ...]]]()
    for call, src, dst in zip(calls, srcs, dsts, strict=True):
        if call.kind not in _IN_GROUPS or not is_carried(call, (src, dst)):
            return ()
        for one in prepare(port, call, [src], [dst]):
            posts.append((one.run, one.args[2:]))
    if len(posts) < len(calls):
        return ()
    start, end = port.binding.group_start, port.binding.group_end

    def post(sources: Sequence[int], destinations: Sequence[int]) -> None:
        start()
        try:
            for (run, others), src, dst in zip(posts, sources, destinations, strict=True):
                run(src, dst, *others)
        finally:
            end()

    sides = ([Buffer(side, n, "pointer") for n in range(len(posts))] for side in SIDES)
    return (Prepared(post, (*sides,)),)


def subject(call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor], where: str) -> PostInfo:
    """Return the description of a post for the watch.

    The families of lanes have names of their own: plans count the posts of all backends.
    """
    is_shared = KINDS[call.kind].by_all
    sizes = (sum(x.numel() * x.itemsize for x in side) for side in (srcs, dsts))
    return PostInfo(
        kind=call.kind,
        team=call.team,
        bytes=max(sizes),
        where=where,
        family="lane collectives" if is_shared else "lane transfers",
        is_shared=is_shared,
    )


# -- buffer sizes of each kind ---------------------------------------------------------------------

#: The numbers of elements that the buffers of each side should have: sources, destinations.
_Sizes = tuple[list[int], list[int]]


def _check(call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> None:
    buffers = (*srcs, *dsts)
    if call.root is not None:
        root_index(call)  # checks it
    if call.kind in REDUCING and buffers:
        check_reduction(call.reduce_op, buffers[0].dtype)
    for buffer in buffers:
        if not _is_dense(buffer):
            raise CommunicationError(
                f"{call.kind}: a buffer of shape {tuple(buffer.shape)} has strides "
                f"{buffer.stride()}",
                because="a communication sees an address and a count, so its buffers are dense",
                hint="make it contiguous before the post",
            )
    check_dtypes(call, buffers)
    _check_sizes(call, srcs, dsts)


def _check_sizes(call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> None:
    given = [x.numel() for x in srcs], [x.numel() for x in dsts]
    try:
        expected = _COUNTED.get(call.kind, _block_sizes)(call, *given)
    except (IndexError, ValueError):  # too few buffers, or counts of another number of ranks
        expected = None
    if given != expected:
        raise CommunicationError(
            f"{call.kind} on team {call.team}, rank {call.rank}: sources of {given[0]} elements, "
            f"destinations of {given[1]}",
            because="that is not what the kind takes there"
            if expected is None
            else f"its part is sources of {expected[0]} elements, destinations of {expected[1]}",
            hint="see the table at mdfuse.layouts.call.Call",
        )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one run of memory, in any order of the dims."""
    expected = 1
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    for stride, size in dims:
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _block_sizes(call: Call, srcs: list[int], dsts: list[int]) -> _Sizes:
    """Return the sizes of buffers that are whole numbers of equal blocks.

    The size of a block follows from the buffer with the fewest blocks.
    """
    sides = [(given, n) for given, n in zip((srcs, dsts), blocks_of(call), strict=True)]
    if all(n is None for _, n in sides):
        return [], []
    known = [(n, given[0]) for given, n in sides if n and given] or [(1, (*srcs, *dsts)[0])]
    blocks, elements = min(known)
    k = elements // blocks
    source, destination = ([] if n is None else [n * k] for _, n in sides)
    return source, destination


def _alltoall_sizes(call: Call, srcs: list[int], dsts: list[int]) -> _Sizes:
    """Return the sizes of an all-to-all: the sums of its counts; without counts, equal blocks."""
    n, counts = len(call.team), (call.send_counts, call.recv_counts)
    if not any(counts):
        whole = [srcs[0] // n * n]
        return whole, whole
    if any(len(x) != n for x in counts):
        raise ValueError
    return [sum(call.send_counts)], [sum(call.recv_counts)]


def _exchange_sizes(call: Call, srcs: list[int], dsts: list[int]) -> _Sizes:
    if (len(srcs), len(dsts)) != (len(call.sends), len(call.recvs)):
        raise ValueError
    return srcs, dsts


_COUNTED: dict[str, Callable[[Call, list[int], list[int]], _Sizes]] = {
    "AllToAll": _alltoall_sizes,
    "SendRecv": _exchange_sizes,
    "Exchange": _exchange_sizes,
}


# -- collectives -----------------------------------------------------------------------------------


def _carried(tensor: Tensor, count: int) -> tuple[int, int]:
    """Return the count and the dtype code by which NCCL carries `count` elements."""
    code = _CODES.get(tensor.dtype)
    return (count * tensor.itemsize, _BYTE) if code is None else (count, code)


#: Kind -> the function of NCCL.
_NAMES = {
    "Allgather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Allreduce": "all_reduce",
    "Broadcast": "bcast",
    "Reduce": "reduce",
}


def _collective(port: Port, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Prepared:
    """Return the one call of a collective, whose count is that of its smaller buffer."""
    smaller = min((*srcs, *dsts), key=Tensor.numel)
    sides: tuple[Buffer | int, ...] = (_SRC, _DST if dsts else 0)  # a reduce fills the root's alone
    if call.kind == "Broadcast":
        sides = (_SRC if srcs else _DST,)
    arguments = [*sides, *_carried(smaller, smaller.numel())]
    if call.kind in REDUCING:
        arguments.append(_OPS[call.reduce_op or ""])
    if KINDS[call.kind].has_root:
        arguments.append(root_index(call))
    run = getattr(port.binding, _NAMES[call.kind])
    is_in_place = call.kind == "Allreduce"
    return Prepared(run, (*arguments, port.comm, port.stream), in_place=is_in_place)


# -- transfers between pairs -----------------------------------------------------------------------


def _transferred(
    port: Port, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]
) -> Prepared | None:
    """Post all transfers in one group; a rank's copies to itself are among them."""
    b, comm, stream = port.binding, port.comm, port.stream
    start, end, send, recv = b.group_start, b.group_end, b.send, b.recv
    sends, recvs = _transfers(call, srcs, dsts)

    def transfer(sources: Sequence[int], destinations: Sequence[int]) -> None:
        start()
        try:
            for i, offset, count, code, peer in recvs:
                recv(destinations[i] + offset, count, code, peer, comm, stream)
            for i, offset, count, code, peer in sends:
                send(sources[i] + offset, count, code, peer, comm, stream)
        finally:
            end()

    sources = [Buffer("src", i, "pointer") for i in range(len(srcs))]
    destinations = [Buffer("dst", i, "pointer") for i in range(len(dsts))]
    return Prepared(transfer, (sources, destinations)) if sends or recvs else None


def _transfers(
    call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]
) -> tuple[list[_Transfer], list[_Transfer]]:
    """Return the transfers that a call sends, and those that it receives."""
    composed = composer(call, lambda composition, _: in_one_step(call, composition))
    step = composed(srcs, dsts)
    assert not step.after  # no reductions come here: see is_carried

    def transfer(piece: Piece, rank: int) -> _Transfer:
        x = (srcs if piece.side == "src" else dsts)[piece.index]
        start, peer = piece.start * x.itemsize, call.team.index(rank)
        return (piece.index, start, *_carried(x, piece.size), peer)

    sends = [transfer(copy.source, call.rank) for copy in step.copies]
    recvs = [transfer(copy.target, call.rank) for copy in step.copies]
    sends += [transfer(t.piece, t.peer) for t in step.sends]
    recvs += [transfer(t.piece, t.peer) for t in step.recvs]
    return sends, recvs


_Builder = Callable[[Port, Call, Sequence[Tensor], Sequence[Tensor]], Prepared | None]

_CALLS: dict[str, _Builder] = by_kind(
    dict.fromkeys(_NAMES, _collective),
    default=_transferred,
)

#: The calls whose first arguments are one source and one destination.
_IN_GROUPS = ("Allgather", "ReduceScatter", "Allreduce")
