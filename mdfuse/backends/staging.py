"""Buffers on a GPU, for libraries that know nothing of streams, or of device memory.

What is queued on the current stream is done before a post.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mdfuse.backends.base import PostSite, Work, flat
from mdfuse.backends.transfers import Post
from mdfuse.backends.work import Posted
from mdfuse.layouts.call import Call


def after_the_stream(post: Post, device: torch.device) -> Post:
    """Post what is in device memory, once it is there."""

    def post_later(srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        torch.cuda.current_stream(device).synchronize()
        return post(srcs, dsts)

    return post_later


class Staged:
    """Posts copies in pinned host memory; the wait queues the copies back on its own stream."""

    __slots__ = ("_call", "_device", "_post")

    def __init__(self, post: Post, call: Call, device: torch.device) -> None:
        self._post = post
        self._call = call
        self._device = device

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        there = [_pinned(x) for x in srcs]
        for host, src in zip(there, srcs, strict=True):
            host.copy_(flat(src), non_blocking=True)
        back = [_pinned(x) for x in dsts]
        torch.cuda.current_stream(self._device).synchronize()

        def unstage() -> None:
            for dst, host in zip(dsts, back, strict=True):
                flat(dst).copy_(host, non_blocking=True)

        return Posted(self._call, (self._post(there, back),), None, unstage)

    def prepare(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite) -> None:
        """No post is one call of the library's own."""


def _pinned(tensor: Tensor) -> Tensor:
    """Room for the elements of a tensor; torch keeps such memory until queued copies are done."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
