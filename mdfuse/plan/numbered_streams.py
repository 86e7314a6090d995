"""Streams by index: the same index is the same stream, within a run and across runs.

On CPU there is one queue, so there is nothing to switch or to join.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

#: Stands for the stream that is current when a run starts.
CALLER = -1


@cache
def stream(device: torch.device, index: int) -> torch.cuda.Stream:
    """Return the CUDA stream that an index stands for on a device."""
    return torch.cuda.Stream(device)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which CUDA graphs are captured, as the default stream cannot be."""
    return torch.cuda.Stream(device)


def raw(device: torch.device, index: int, caller: int) -> int:
    """Return the handle of a stream; for `CALLER` that is `caller`."""
    return caller if index == CALLER else int(stream(device, index).cuda_stream)


@cache
def event(device: torch.device, index: int) -> torch.cuda.Event:
    """Return the event that marks a stream's progress; each sync records it again."""
    return torch.cuda.Event()


def join(event: torch.cuda.Event, behind: torch.cuda.Stream, ahead: torch.cuda.Stream) -> None:
    """Let a stream wait for the work queued on another one; the host goes on."""
    event.record(behind)
    ahead.wait_event(event)


def keep(stream: torch.cuda.Stream, *buffers: Any) -> None:
    """Tell the allocator that buffers made on another stream are in use on this one.

    Otherwise it could reuse their memory as soon as the host drops them.
    """
    for buffer in buffers:
        if isinstance(buffer, torch.Tensor):
            buffer.record_stream(stream)
