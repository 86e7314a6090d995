"""Streams by index: the same index is the same stream, within a run and across runs.

On CPU there is one queue, so switching and joining streams is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

#: Stands for the stream that is current when a run starts.
CALLER = -1

Slots = list[Any]
Thunk = Callable[[Slots], None]


@cache
def stream(device: torch.device, index: int) -> torch.cuda.Stream:
    """The stream of an index on a device."""
    return torch.cuda.Stream(device)


@cache
def _event(device: torch.device, index: int) -> torch.cuda.Event:
    """What marks how far a stream has come; recorded again at each sync, never made anew."""
    return torch.cuda.Event()


def switch(device: torch.device, to: int, caller: int) -> Thunk:
    """Make a stream the current one; `caller` is the slot of the caller's stream."""
    if to == CALLER:

        def back(s: Slots) -> None:
            torch.cuda.set_stream(s[caller])

        return back
    target = stream(device, to)

    def thunk(s: Slots) -> None:
        torch.cuda.set_stream(target)

    return thunk


def join(device: torch.device, current: int, other: int, caller: int) -> Thunk:
    """Let the current stream wait for what is queued on another one; the host goes on."""
    event = _event(device, other)

    def thunk(s: Slots) -> None:
        behind = s[caller] if other == CALLER else stream(device, other)
        ahead = s[caller] if current == CALLER else stream(device, current)
        event.record(behind)
        ahead.wait_event(event)

    return thunk


def keep(device: torch.device, on: int, slots: tuple[int, ...], caller: int) -> Thunk:
    """Tell the allocator that buffers made on another stream are in use on this one.

    Else it could hand their memory out again, as soon as the host forgets them.
    """

    def thunk(s: Slots) -> None:
        current = s[caller] if on == CALLER else stream(device, on)
        for slot in slots:
            buffer = s[slot]
            if isinstance(buffer, torch.Tensor):
                buffer.record_stream(current)

    return thunk
