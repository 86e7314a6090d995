"""Streams by index: the same index is the same stream, within a run and across runs.

On CPU there is one queue, so switching and joining streams is nothing to do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

#: Stands for the stream that is current when a run starts.
CALLER = -1


@cache
def stream(device: torch.device, index: int) -> torch.cuda.Stream:
    """The stream of an index on a device."""
    return torch.cuda.Stream(device)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where CUDA graphs are captured: the default stream cannot be."""
    return torch.cuda.Stream(device)


def raw(device: torch.device, index: int, caller: int) -> int:
    """The handle of a stream; `caller` is that of the caller's."""
    return caller if index == CALLER else int(stream(device, index).cuda_stream)


@cache
def event(device: torch.device, index: int) -> torch.cuda.Event:
    """What marks how far a stream has come; recorded again at each sync, never made anew."""
    return torch.cuda.Event()


def join(event: torch.cuda.Event, behind: torch.cuda.Stream, ahead: torch.cuda.Stream) -> None:
    """Let a stream wait for what is queued on another one; the host goes on."""
    event.record(behind)
    ahead.wait_event(event)


def keep(stream: torch.cuda.Stream, *buffers: Any) -> None:
    """Tell the allocator that buffers made on another stream are in use on this one.

    Else it could hand their memory out again, as soon as the host forgets them.
    """
    for buffer in buffers:
        if isinstance(buffer, torch.Tensor):
            buffer.record_stream(stream)
