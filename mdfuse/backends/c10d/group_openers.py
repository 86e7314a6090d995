"""The libraries inside torch.distributed: their properties, and the openers of their groups.

Groups are built directly from a library's own class. `torch.distributed.new_group` sorts the ranks
of a team and must be called by ranks outside it too; a group built here has the team's own order
and concerns its members alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdfuse.torch_private import (
    Group,
    Store,
    Work,
    all_gather_of,
    begin_group,
    end_group,
    fake_group,
    gloo_options,
    nccl_options,
    reduce_scatter_of,
)

#: Opens a group: (store of the team alone, index of this rank in the team, size of the team).
OpenGroup = Callable[[Store, int, int], Group]

#: One side of a point-to-point transfer: the other rank's index in the team, a flat buffer.
Transfer = tuple[int, Tensor]

#: Both ends match the i-th send to the i-th receive, so that one tag serves all.
_TAG = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The properties by which the libraries of torch.distributed differ.

    Attributes:
        name: the backend's name in `Options`.
        devices: device types whose tensors it carries, the preferred one first.
        why_not: returns a reason why this process cannot use it and a remedy, or None.
        opener: (device, timeout, network devices) -> a function that opens groups.
        transfer: posts a batch of receives and sends in a group.
        lacks: reduce ops that it cannot do.
        needs_flat: its collectives split along dim 0, not by element.
        on_current: a collective with `asyncOp=False` runs on the current stream, so that nothing is
            left to wait for.
        is_interruptible: a wait in it ends with an error where its connections are shut down.
        reduce_clobbers: its rooted reduce also writes into the buffers of ranks other than root.
        has_groups: it starts the posts of a group together.
    """

    name: str
    devices: tuple[str, ...]
    why_not: Callable[[], tuple[str, str] | None]
    opener: Callable[[torch.device, timedelta, Sequence[dict[str, str]]], OpenGroup]
    transfer: Callable[[Group, Iterable[Transfer], Iterable[Transfer]], list[Work]]
    lacks: frozenset[str] = frozenset()
    needs_flat: bool = True
    on_current: bool = False
    is_interruptible: bool = False
    reduce_clobbers: bool = True
    has_groups: bool = False


def default_group() -> tuple[int, int] | None:
    """Return (rank, size) of torch's default process group; None where there is no such group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def _is_always_there() -> None:
    return None


def _why_not_nccl() -> tuple[str, str] | None:
    remedy = 'install a CUDA build of torch on a machine with GPUs, or use backend="gloo"'
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL", remedy
    if not torch.cuda.is_available():
        return "torch sees no CUDA device", remedy
    return None


def _why_not_ucc() -> tuple[str, str] | None:
    if dist.is_ucc_available():
        return None
    return (
        f"torch {torch.__version__} was built without UCC",
        'use a torch built with USE_UCC=1 (the images of NVIDIA NGC are), or backend="nccl" or '
        '"gloo"',
    )


def _open_gloo(
    device: torch.device, timeout: timedelta, devices: Sequence[dict[str, str]]
) -> OpenGroup:
    """Open gloo's groups on shared network devices, since each device runs a thread."""
    gloo: Any = dist.ProcessGroupGloo
    shared = [gloo.create_device(**d) for d in devices] or [gloo.create_default_device()]

    def open_group(store: Store, index: int, size: int) -> Group:
        return gloo(store, index, size, gloo_options(shared, 2, timeout))

    return open_group


def _open_nccl(
    device: torch.device, timeout: timedelta, devices: Sequence[dict[str, str]]
) -> OpenGroup:
    """Open NCCL's groups and connect each at once: connected on first use, they could deadlock.

    NCCL would register the buffers of posts that are captured in CUDA graphs, which all ranks have
    to do together. Here each rank captures when it finds its arguments moved, so that registering
    is switched off.
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    nccl: Any = ProcessGroupNCCL

    def open_group(store: Store, index: int, size: int) -> Group:
        group = nccl(store, index, size, nccl_options(timeout))
        group.eager_connect_single_device(device)
        return group

    return open_group


def _open_ucc(
    device: torch.device, timeout: timedelta, devices: Sequence[dict[str, str]]
) -> OpenGroup:
    """Open UCC's groups, with a tiny collective on each: UCC connects at the first one."""
    from torch.distributed.distributed_c10d import ProcessGroupUCC

    ucc: Any = ProcessGroupUCC

    def open_group(store: Store, index: int, size: int) -> Group:
        group = ucc(store, index, size, timeout)
        group.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions()).wait()
        return group

    return open_group


def _open_null(
    device: torch.device, timeout: timedelta, devices: Sequence[dict[str, str]]
) -> OpenGroup:
    """Open groups in which this process is alone: no member is contacted and nothing is sent."""

    def open_group(store: Store, index: int, size: int) -> Group:
        return _NullGroup(index, size)

    return open_group


class _NullGroup:
    """torch's fake process group, whose collectives stay in this process, behind NCCL's interface.

    Some collectives fill the result with copies of this rank's own buffers, about 1 us per member.
    This group counts elements, as NCCL does: torch's fake group splits along dim 0, and torch 2.13
    ends the process where that does not divide. An all-to-all does nothing here: torch 2.13 fills
    one block after the other, 50 us for 8 members, and refuses where this rank sends nothing.
    """

    def __init__(self, index: int, size: int) -> None:
        self._fake, self._nothing = fake_group(index, size), dist.AllreduceOptions()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fake, name)

    def _allgather_base(self, dst: Tensor, src: Tensor, options: Any) -> Work:
        work: Work = all_gather_of(self._fake)(dst.reshape(-1), src.reshape(-1), options)
        return work

    def _reduce_scatter_base(self, dst: Tensor, src: Tensor, options: Any) -> Work:
        work: Work = reduce_scatter_of(self._fake)(dst.reshape(-1), src.reshape(-1), options)
        return work

    def alltoall_base(self, dst: Tensor, *src_counts_options: Any) -> Work:
        work: Work = self._fake.allreduce([dst], self._nothing)
        return work

    def shutdown(self) -> None:
        """Do nothing: the group holds no connections."""


def _transfer_each(
    group: Group, recvs: Iterable[Transfer], sends: Iterable[Transfer]
) -> list[Work]:
    works = [group.recv([buffer], peer, _TAG) for peer, buffer in recvs]
    works += [group.send([buffer], peer, _TAG) for peer, buffer in sends]
    return works


def _transfer_grouped(
    group: Group, recvs: Iterable[Transfer], sends: Iterable[Transfer]
) -> list[Work]:
    """Post all transfers in one group call: one after the other, NCCL could deadlock."""
    begin_group(group)
    for peer, buffer in recvs:
        group.recv([buffer], peer, _TAG)
    for peer, buffer in sends:
        group.send([buffer], peer, _TAG)
    return [end_group(group)]


LIBRARIES: dict[str, Library] = {
    row.name: row
    for row in (
        Library(
            name="gloo",
            devices=("cpu",),
            why_not=_is_always_there,
            opener=_open_gloo,
            transfer=_transfer_each,
            is_interruptible=True,
        ),
        Library(
            name="nccl",
            devices=("cuda",),
            why_not=_why_not_nccl,
            opener=_open_nccl,
            transfer=_transfer_grouped,
            lacks=frozenset({"band", "bor", "bxor"}),
            needs_flat=False,
            on_current=True,
            reduce_clobbers=False,
            has_groups=True,
        ),
        Library(
            name="ucc",
            devices=("cuda", "cpu"),
            why_not=_why_not_ucc,
            opener=_open_ucc,
            transfer=_transfer_each,
        ),
        # its row is like NCCL's, so that the host does the same work
        Library(
            name="null",
            devices=("cpu", "cuda"),
            why_not=_is_always_there,
            opener=_open_null,
            transfer=_transfer_each,
            needs_flat=False,
            reduce_clobbers=False,
        ),
    )
}
