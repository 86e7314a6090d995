"""The calls by which each kind of communication is posted to a library of torch.distributed.

The builder of a kind returns, for one dtype, the one call of the process group that does it. A post
makes that call on its buffers; a plan gets the call with placeholders for buffers. Dtypes that a
library does not carry travel as bytes; a kind that takes more than one call is posted as transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mdfuse.backends.base import (
    SIDES,
    Buffer,
    Posting,
    PostSite,
    Prepared,
    Work,
    flat,
    root_index,
)
from mdfuse.backends.c10d.group_openers import Library
from mdfuse.backends.ordered import in_order, is_ordered
from mdfuse.backends.transfers import Post, Transfer, in_a_row, transferred
from mdfuse.backends.work import DONE, Posted, explained
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import KINDS, REDUCING, by_kind
from mdfuse.layouts.reduction import BOOL_OPS, check_reduction, combine_into
from mdfuse.torch_private import (
    AllgatherOptions,
    Group,
    all_gather_of,
    begin_group,
    end_group,
    reduce_scatter_of,
)

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
    """The ranks of a team and their group, which is None for a team of one."""

    library: Library
    ranks: tuple[int, ...]
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class _PostTraits:
    """The properties of a post apart from its buffers; `at_once`: it is waited for at once."""

    team: Team
    call: Call
    dtype: torch.dtype
    at_once: bool = False

    def options(self, opts: Any, **settings: Any) -> Any:
        """Fill in the options of a call of the library."""
        opts.asyncOp = not self.at_once
        if self.call.kind in REDUCING:
            op = self.call.reduce_op or ""
            opts.reduceOp = _REDUCE_OPS[BOOL_OPS[op] if self.dtype is torch.bool else op]
        for name, value in settings.items():
            setattr(opts, name, value)
        return opts


def build_post(team: Team, call: Call, dtype: torch.dtype) -> Post:
    """Return a function that posts a call on buffers of one dtype."""
    if is_ordered(call, dtype):
        return in_order(partial(build_post, team, call), call, dtype)
    one_call = _one_call(_PostTraits(team=team, call=call, dtype=dtype))
    if one_call is None:
        return _gathered(team, call, dtype) if call.kind in _BRINGS else _transferred(team, call)
    row = in_a_row if dtype in NATIVE else _bytes
    view = row if _is_flat(call, team) or dtype not in NATIVE else _as_is
    fills = _is_in_place(call)
    may_be_empty = KINDS[call.kind].blocks is None  # other members may have elements nevertheless

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        src, dst = view(srcs[0]) if srcs else None, view(dsts[0]) if dsts else None
        any_of_them = src if dst is None else dst
        if any_of_them is None or not (may_be_empty or any_of_them.numel()):
            return DONE
        if fills and src is not None and dst is not None:
            _fill(dst, src)
        run, arguments = one_call(src, dst)
        return Posted(call, (run(*arguments),), (src, dst))

    return post


def prepared(
    team: Team, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite
) -> Posting | None:
    """Return a post of dense buffers like these as a prepared call of the library.

    Returns:
        None where a buffer is empty, or the post takes more than one call of the library.
    """
    buffers = (*srcs, *dsts)
    if not buffers or not all(x.numel() for x in buffers):
        return None
    dtype, at_once = buffers[0].dtype, place.at_once and team.library.on_current
    one_call = _one_call(_PostTraits(team=team, call=call, dtype=dtype, at_once=at_once))
    if one_call is None or dtype not in NATIVE:
        return None
    form: Literal["flat", "tensor"] = "flat" if _is_flat(call, team) else "tensor"
    post = [Prepared(*one_call(Buffer("src", form=form), Buffer("dst", form=form)))]
    if srcs and dsts and _is_in_place(call):
        form = "tensor" if srcs[0].shape == dsts[0].shape else "flat"
        copied = Buffer("dst", form=form), Buffer("src", form=form)
        post.insert(0, Prepared("copy_", copied, in_place=True))
    return Posting(post=tuple(post), wait=() if at_once else None, explain=partial(explained, call))


def prepared_together(
    team: Team, calls: Sequence[Call], srcs: Sequence[Tensor], dsts: Sequence[Tensor]
) -> Posting | None:
    """Return posts of one source and destination each as one call, which begins and ends a group.

    Returns:
        None where the library has no groups, or one of the posts is none of its own calls.
    """
    if not team.library.has_groups:
        return None
    posts = []
    for call, src, dst in zip(calls, srcs, dsts, strict=True):
        one_call = _one_call(_PostTraits(team=team, call=call, dtype=src.dtype))
        if one_call is None or src.dtype not in NATIVE or not (src.numel() and dst.numel()):
            return None
        posts.append(one_call)
    group, begin, end = team.group, begin_group, end_group

    def post(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> Any:
        begin(group)
        try:
            for one_call, src, dst in zip(posts, sources, destinations, strict=True):
                run, arguments = one_call(src, dst)
                run(*arguments)
        finally:  # an open group would take in later posts
            work = end(group)
        return work

    sides = ([Buffer(side, n) for n in range(len(posts))] for side in SIDES)
    return Posting(post=(Prepared(post, (*sides,)),), explain=partial(explained, calls[0]))


def _is_reducible(library: Library, call: Call, dtype: torch.dtype) -> bool:
    """Return whether the library itself reduces this dtype with this op; bool as uint8."""
    if dtype is torch.bool:
        return BOOL_OPS[call.reduce_op or ""] not in library.lacks
    if is_ordered(call, dtype):
        return False
    return dtype in NATIVE and call.reduce_op not in library.lacks


# -- views ---------------------------------------------------------------------------------------


def _is_flat(call: Call, team: Team) -> bool:
    """Return whether buffers are passed with one dim; else the view, 0.7 us, is saved."""
    return team.library.needs_flat or KINDS[call.kind].blocks is None


def _bytes(tensor: Tensor) -> Tensor:
    return flat(tensor).view(torch.uint8)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else in_a_row(tensor)


def _fill(dst: Tensor, src: Tensor) -> None:
    if dst.data_ptr() != src.data_ptr():
        in_a_row(dst).copy_(in_a_row(src))


# -- one call each ---------------------------------------------------------------------------------

#: (source, destination), as tensors or placeholders -> the function to call, and its arguments.
_OneCall = Callable[[Any, Any], tuple[Callable[..., Any], tuple[Any, ...]]]


def _one_call(bound: _PostTraits) -> _OneCall | None:
    """Return the one call of the library that does the communication; None if there is none."""
    call = bound.call
    if call.kind in REDUCING:
        check_reduction(call.reduce_op, bound.dtype)
        if not _is_reducible(bound.team.library, call, bound.dtype):
            return None
    return None if len(call.team) == 1 else _CALLS[call.kind](bound)


def _is_in_place(call: Call) -> bool:
    """Return whether the operand must be copied to the destination first, to be reduced there."""
    return call.kind in ("Allreduce", "Reduce")


def _base(group_call: Callable[[Group], Any], options: type, bound: _PostTraits) -> _OneCall:
    """Return a call that takes the destination first, both as one tensor."""
    run, opts = group_call(bound.team.group), bound.options(options())
    return lambda src, dst: (run, (dst, src, opts))


def _allreduce(bound: _PostTraits) -> _OneCall:
    run, options = bound.team.group.allreduce, bound.options(dist.AllreduceOptions())
    return lambda src, dst: (run, ([dst], options))


def _broadcast(bound: _PostTraits) -> _OneCall:
    run, root = bound.team.group.broadcast, root_index(bound.call)
    options = bound.options(dist.BroadcastOptions(), rootRank=root, rootTensor=0)
    has_it = bound.call.rank == bound.call.root
    return lambda src, dst: (run, ([src if has_it else dst], options))


def _reduce(bound: _PostTraits) -> _OneCall:
    run, root = bound.team.group.reduce, root_index(bound.call)
    options = bound.options(dist.ReduceOptions(), rootRank=root)
    if bound.call.rank == bound.call.root:
        return lambda src, dst: (run, ([dst], options))
    if not bound.team.library.reduce_clobbers:
        return lambda src, dst: (run, ([src], options))

    def reduce_copy(src: Tensor) -> Any:
        return run([src.clone()], options)

    return lambda src, dst: (reduce_copy, (src,))


def _alltoall(bound: _PostTraits) -> _OneCall:
    run, options = bound.team.group.alltoall_base, bound.options(dist.AllToAllOptions())
    scale = 1 if bound.dtype in NATIVE else bound.dtype.itemsize
    sides = (bound.call.recv_counts, bound.call.send_counts)
    whole = bound.call.is_counted  # then others may have unequal ones, and take another way
    recvs, sends = ([n * scale for n in (c if whole else _splits(c))] for c in sides)
    return lambda src, dst: (run, (dst, src, recvs, sends, options))


def _splits(counts: Sequence[int]) -> Sequence[int]:
    """Return the counts for the library; () for equal blocks, which it then need not read."""
    return counts if len(set(counts)) > 1 or 0 in counts else ()


_Builder = Callable[[_PostTraits], _OneCall | None]

_CALLS: dict[str, _Builder] = by_kind(
    {
        "Allgather": partial(_base, all_gather_of, AllgatherOptions),
        "ReduceScatter": partial(_base, reduce_scatter_of, dist.ReduceScatterOptions),
        "Allreduce": _allreduce,
        "AllToAll": _alltoall,
        "Broadcast": _broadcast,
        "Reduce": _reduce,
    },
    default=lambda bound: None,  # the kind is posted as transfers
)


# -- transfers between pairs -----------------------------------------------------------------------


def _transferred(team: Team, call: Call) -> Post:
    """Post as transfers between pairs, as libraries do it themselves for these kinds.

    So a root need not be one of the parts.
    """
    begin, group = team.library.transfer, team.group

    def transfer(recvs: list[Transfer], sends: list[Transfer]) -> Sequence[Any]:
        return begin(group, recvs and carried(recvs), sends and carried(sends))

    def carried(transfers: list[Transfer]) -> list[Transfer]:
        """Give other dtypes the form of bytes; transfers of one group may differ in dtype."""
        return [(peer, x if x.dtype in NATIVE else _bytes(x)) for peer, x in transfers]

    return transferred(call, transfer)


# -- reductions that the library lacks: gather the operands, reduce here ---------------------------

#: The kind that brings the operands of a reduction, or this rank's block of each.
_BRINGS = {"Allreduce": "Allgather", "ReduceScatter": "AllToAll", "Reduce": "Gather"}


def _gathered(team: Team, call: Call, dtype: torch.dtype) -> Post:
    op, n = call.reduce_op or "", len(call.team)
    bring = build_post(team, replace(call, kind=_BRINGS[call.kind], parts=call.team), dtype)

    def post(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        if not dsts or not srcs[0].numel():
            return bring(srcs, ()) if srcs[0].numel() else DONE
        (dst,), rows = dsts, srcs[0].new_empty((n, dsts[0].numel()))
        work = bring(srcs, (rows,))
        return Posted(call, (work,), srcs, lambda: combine_into(op, rows, in_a_row(dst)))

    return post
