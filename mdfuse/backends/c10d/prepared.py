"""Posts that are one call of a process group's own method, with its arguments made beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mdfuse.backends.base import Buffer, Place, Posting, Prepared, root_index
from mdfuse.backends.c10d.groups import AllgatherOptions
from mdfuse.backends.c10d.posts import (
    NATIVE,
    Team,
    is_reducible,
    reduce_op,
)
from mdfuse.backends.work import explained
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import REDUCING
from mdfuse.layouts.reduction import check_reduction
from mdfuse.torch_private import all_gather_of, reduce_scatter_of


def prepared(
    team: Team, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: Place
) -> Posting | None:
    """A post of dense buffers like these; None where it is more than one call."""
    buffers = (*srcs, *dsts)
    if team.group is None or call.kind not in _PREPARED or not all(x.numel() for x in buffers):
        return None
    dtype = buffers[0].dtype
    if call.kind in REDUCING:
        check_reduction(call.reduce_op, dtype)
        if not is_reducible(team.library, call, dtype):
            return None
    if dtype not in NATIVE:
        return None
    at_once = place.at_once and team.library.on_current
    post = _PREPARED[call.kind](team, call, dtype, at_once)
    if call.kind == "Allreduce":  # in place in the library
        form: Literal["flat", "tensor"] = "tensor" if srcs[0].shape == dsts[0].shape else "flat"
        copy = Prepared("copy_", (Buffer("dst", form=form), Buffer("src", form=form)), True)
        post = (copy, *post)
    wait: tuple[Prepared, ...] | None = () if at_once else None
    return Posting(post=post, wait=wait, explain=partial(explained, call))


def _forms(team: Team) -> tuple[Buffer, Buffer]:
    """How the library takes what is sent and received."""
    form: Literal["flat", "tensor"] = "flat" if team.library.needs_flat else "tensor"
    return Buffer("src", form=form), Buffer("dst", form=form)


def _prepared_allgather(
    team: Team, call: Call, dtype: torch.dtype, at_once: bool
) -> tuple[Prepared, ...]:
    src, dst = _forms(team)
    options = AllgatherOptions()
    options.asyncOp = not at_once
    return (Prepared(all_gather_of(team.group), (dst, src, options)),)


def _prepared_reduce_scatter(
    team: Team, call: Call, dtype: torch.dtype, at_once: bool
) -> tuple[Prepared, ...]:
    src, dst = _forms(team)
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = reduce_op(call, dtype), not at_once
    return (Prepared(reduce_scatter_of(team.group), (dst, src, options)),)


def _prepared_allreduce(
    team: Team, call: Call, dtype: torch.dtype, at_once: bool
) -> tuple[Prepared, ...]:
    _, dst = _forms(team)
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = reduce_op(call, dtype), not at_once
    return (Prepared(team.group.allreduce, ([dst], options)),)


def _prepared_broadcast(
    team: Team, call: Call, dtype: torch.dtype, at_once: bool
) -> tuple[Prepared, ...]:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root_index(call), 0, not at_once
    src, dst = _forms(team)
    buffer = src if call.rank == call.root else dst
    return (Prepared(team.group.broadcast, ([buffer], options)),)


def _splits(counts: Sequence[int]) -> list[int]:
    """As the library is told: nothing of blocks that are equal, which it then need not look at."""
    return list(counts) if len(set(counts)) > 1 else []


def _prepared_alltoall(
    team: Team, call: Call, dtype: torch.dtype, at_once: bool
) -> tuple[Prepared, ...]:
    src, dst = Buffer("src", form="flat"), Buffer("dst", form="flat")
    counts = _splits(call.recv_counts), _splits(call.send_counts)
    options = dist.AllToAllOptions()
    options.asyncOp = not at_once
    args = (dst, src, *counts, options)
    return (Prepared(team.group.alltoall_base, args),)


#: Kinds that are one call of the group's own, whatever is in the buffers.
_PREPARED: dict[str, Callable[[Team, Call, torch.dtype, bool], tuple[Prepared, ...]]] = {
    "Allgather": _prepared_allgather,
    "ReduceScatter": _prepared_reduce_scatter,
    "Allreduce": _prepared_allreduce,
    "Broadcast": _prepared_broadcast,
    "AllToAll": _prepared_alltoall,
}
