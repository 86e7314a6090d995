"""Post buffers on a GPU through libraries that know no streams, or no device memory.

Each post first waits on the host for the work that is queued on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mdfuse.backends.base import PostSite, Work, flat
from mdfuse.backends.transfers import Post
from mdfuse.backends.work import Posted
from mdfuse.layouts.call import Call


def after_the_stream(post: Post, device: torch.device) -> Post:
    """Return `post`, preceded by a wait of the host for the current stream."""

    def post_later(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        torch.cuda.current_stream(device).synchronize()
        return post(srcs, dsts)

    return post_later


@dataclass(slots=True, eq=False)
class Staged:
    """A post of copies in pinned host memory.

    The wait queues the copies back to the device, on the stream that is current then.
    """

    post: Post
    call: Call
    device: torch.device

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        there = [_pinned(x) for x in srcs]
        for host, src in zip(there, srcs, strict=True):
            host.copy_(flat(src), non_blocking=True)
        back = [_pinned(x) for x in dsts]
        torch.cuda.current_stream(self.device).synchronize()

        def unstage() -> None:
            for dst, host in zip(dsts, back, strict=True):
                flat(dst).copy_(host, non_blocking=True)

        return Posted(self.call, (self.post(there, back),), None, unstage)

    def prepare(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite) -> None:
        """Return None: no such post is one call of the library's own functions."""


def _pinned(tensor: Tensor) -> Tensor:
    """Return pinned memory for the elements of a tensor, uninitialised.

    torch does not hand such memory out again before the copies that are queued on it are done.
    """
    return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
