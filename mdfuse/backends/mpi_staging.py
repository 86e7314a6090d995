"""Buffers on a GPU, which MPI is given as they are or through pinned host memory.

MPI knows nothing of streams: what is queued on the current one is done before a post.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mdfuse.backends.base import Call, Work
from mdfuse.backends.mpi_posts import Post, flat
from mdfuse.backends.work import Posted


def after_the_stream(post: Post, device: torch.device) -> Post:
    """Post what is in device memory, once it is there."""

    def post_later(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        torch.cuda.current_stream(device).synchronize()
        return post(srcs, dsts)

    return post_later


def staged(post: Post, call: Call, device: torch.device) -> Post:
    """Post copies in pinned host memory; the wait queues the copies back on its own stream."""

    def post_staged(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        there = [_pinned(x) for x in srcs]
        for host, src in zip(there, srcs, strict=True):
            host.copy_(flat(src), non_blocking=True)
        back = [_pinned(x) for x in dsts]
        torch.cuda.current_stream(device).synchronize()

        def unstage() -> None:
            for dst, host in zip(dsts, back, strict=True):
                flat(dst).copy_(host, non_blocking=True)

        return Posted(call, (post(there, back),), None, unstage)

    return post_staged


def _pinned(tensor: Tensor) -> Tensor:
    """Room for the elements of a tensor; torch keeps such memory until queued copies are done."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
