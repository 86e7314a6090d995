"""Small sums on GPUs with a norm of the rows behind them, all in one kernel.

A block sums a row: it puts this rank's term into the inboxes of the others, sets a flag in each,
and adds all terms in team order once the flags in its own inbox have come; it adds the residual,
and divides by the root of the mean square. So each rank computes all rows.

The inbox is another one than that of `cuda_sums`, with the same layout. Its posts count together,
since rows of posts differ in size: an odd post uses one half of each member's places, an even one
the other. That is enough. A rank begins a post when its kernel of the last one has ended, which has
awaited a flag of each other rank; these set it in their kernels of that last post, and so behind
the end of their kernels of the one before, the last readers of this half.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.symmetric.cuda_sums import Inbox
from mdfuse.backends.teams import not_connected
from mdfuse.backends.work import first_line
from mdfuse.hir.row_norms import CHUNK, RowNorm
from mdfuse.layouts.call import Call
from mdfuse.torch_private import PrefixStore

_log = logging.getLogger("mdfuse.comm")

#: Bytes of a row for each warp of a block, and the fewest and the most warps.
_PER_WARP, _WARPS = 1024, (4, 32)

#: The most registers of a thread, and the fewest multiprocessors, so that blocks leave room.
_REGISTERS, _PROCESSORS = 64, 100


@dataclass(eq=False, kw_only=True)
class Norms:
    """The inboxes of a team for sums with norms, as the GPU of one member sees them.

    Attributes:
        team: the ranks.
        index: of this rank in the team.
        addresses: of all inboxes, in team order.
        device: of this rank.
        store: of the team; nobody else uses its keys.
        timeout_s: seconds that another rank may take to compile the kernel.
    """

    team: tuple[int, ...]
    index: int
    addresses: Sequence[int]
    device: torch.device
    store: PrefixStore
    timeout_s: float
    _agreed: dict[str, bool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.inbox = Inbox(len(self.addresses))
        self._table = torch.tensor(self.addresses, dtype=torch.int64).to(self.device)

    def kernel(self, call: Call, norm: RowNorm, rows: int) -> Callable[..., None] | None:
        """Return the function that queues the kernel; None, alike on all members: there is none.

        It takes the elements of the buffers that there are, in the order of `Joining`.

        Raises:
            BackendError: another member does not say whether it has compiled the kernel.
        """
        is_sum = call.kind == "Allreduce" and call.reduce_op == "sum"
        if not is_sum or not norm.fits(rows, len(self.team)) or not self._is_there(norm):
            return None
        return partial(self.queue, norm, rows)

    def queue(self, norm: RowNorm, rows: int, *given: Tensor) -> None:
        """Queue the kernel on the current stream, for dense buffers."""
        launch(_kernels().add_and_norm, norm, rows, given, self._table, self.index, self.inbox)

    def _is_there(self, norm: RowNorm) -> bool:
        """Return whether all members have compiled the kernel; each says so once."""
        key = str(norm)
        if key not in self._agreed:
            problems = self._exchange(key, self._problem(norm))
            if problems and self.index == 0:
                rank, why = next(iter(problems.items()))
                said = "ranks %s: a sum and the norm behind it are computed apart: rank %s: %s"
                _log.warning(said, self.team, rank, why)
            self._agreed[key] = not problems
        return self._agreed[key]

    def _problem(self, norm: RowNorm) -> str:
        """Compile the kernel, and load it; return why that cannot be, or nothing."""
        count = torch.cuda.get_device_properties(self.device).multi_processor_count
        if count < _PROCESSORS:
            return f"a GPU of {count} multiprocessors would be full of blocks that wait"
        width, dtypes = norm.width, (norm.dtype, norm.weight_dtype)
        try:
            x, w = (torch.zeros(width, dtype=t or norm.dtype, device=self.device) for t in dtypes)
            given = [x, *[x] * norm.has_residual, *[w] * (norm.weight_dtype is not None)]
            given += [torch.empty_like(x) for _ in range(1 + norm.has_total)]
            self.queue(norm, 0, *given)
        except Exception as error:  # of any type: the others are told, and none uses the kernel
            return first_line(error) or type(error).__name__
        return ""

    def _exchange(self, key: str, problem: str) -> dict[int, str]:
        """Return rank -> why it cannot, for the members that cannot: the same on all of them."""
        keys = [f"{key}/{n}" for n in range(len(self.team))]
        try:
            self.store.set(keys[self.index], problem)
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
            texts = [text.decode() for text in self.store.multi_get(keys)]
        except RuntimeError as error:
            rank = self.team[self.index]
            raise not_connected("symmetric", rank, self.team, error) from error
        return {rank: text for rank, text in zip(self.team, texts, strict=True) if text}


def launch(
    kernel: Any,
    norm: RowNorm,
    rows: int,
    given: Sequence[Tensor],
    table: Tensor,
    index: int,
    inbox: Inbox,
) -> None:
    """Queue the kernel for some rows; of none it is compiled and loaded alone.

    Args:
        kernel: `cuda_norms_kernels.add_and_norm`.
        norm: what it computes.
        rows: how many.
        given: the buffers that there are, in the order of `Joining`.
        table: the addresses of the inboxes of all members.
        index: of this rank.
        inbox: their layout.
    """
    buffers = iter(given)
    src = next(buffers)
    # what there is not is another buffer, which the kernel does not touch
    residual = next(buffers) if norm.has_residual else src
    weight = next(buffers) if norm.weight_dtype is not None else src
    total = next(buffers) if norm.has_total else src
    result = next(buffers)
    few, many = _WARPS
    warps = min(max(norm.block * norm.dtype.itemsize // _PER_WARP, few), many)
    with torch.cuda.device(src.device) if src.is_cuda else nullcontext():
        kernel[rows,](
            src, residual, weight, total, result, table, inbox.flags, inbox.turns, norm.eps,
            INDEX=index, MEMBERS=inbox.members, WIDTH=norm.width, STRIDE=norm.stride,
            ROOM=inbox.chunks * CHUNK, BLOCK=norm.block, HAS_RESIDUAL=norm.has_residual,
            HAS_WEIGHT=norm.weight_dtype is not None, HAS_TOTAL=norm.has_total,
            IS_ROUNDED=norm.is_rounded, num_warps=warps, maxnreg=_REGISTERS,
        )  # fmt: skip


@cache
def _kernels() -> Any:
    from mdfuse.backends.symmetric import cuda_norms_kernels  # Triton is not everywhere

    return cuda_norms_kernels
