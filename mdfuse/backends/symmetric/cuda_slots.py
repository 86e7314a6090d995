"""Who makes the memory of outboxes on GPUs, which all members of a team then have addresses of.

===========  =====================================================================================
IpcSlots     CUDA's IPC handles: ranks may share a GPU, or each have one that reaches the others'
TorchSlots   torch's symmetric memory, where every member has a GPU of its own: torch refuses others
===========  =====================================================================================

NVLink multicast stays off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mdfuse.backends.symmetric.cuda_memory import CudaMemory
from mdfuse.torch_private import Store, symmetric_memory

#: Torch reads it when it first makes such memory.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


#: What stands for a handle where torch makes the memory.
TORCH = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A team whose members open each other's memory.

    Attributes:
        name: of the team, in this process alone.
        own: this rank's index.
        handles: by what each member opens another's memory.
        store: of the team; nobody else uses its keys.
        timeout_s: how long a member may take.
    """

    name: str
    own: int
    handles: Sequence[str]
    store: Store
    timeout_s: float


class Slots(Protocol):
    """A maker of memory that other processes have addresses of."""

    def offer(self, size: int) -> str:
        """Make this rank's memory, so many bytes; return by what the others open it."""

    def open(self, meeting: Meeting) -> tuple[list[int], Callable[[], None]]:
        """Return the address of each member's memory, and what gives all of it up.

        Raises:
            OSError: it cannot be opened.
        """


@dataclass(eq=False)
class IpcSlots:
    """Memory that others open by CUDA's IPC handles."""

    memory: CudaMemory
    _allocated: dict[str, int] = field(default_factory=dict)  # handle -> address

    def offer(self, size: int) -> str:
        address = self.memory.allocate(size)
        handle = self.memory.handle(address)
        self._allocated[handle] = address
        return handle

    def open(self, meeting: Meeting) -> tuple[list[int], Callable[[], None]]:
        found = [self._allocated.get(h) or self.memory.open(h) for h in meeting.handles]

        def release() -> None:
            for i, address in enumerate(found):
                (self.memory.free if i == meeting.own else self.memory.close)(address)

        return found, release


@dataclass(eq=False)
class TorchSlots:
    """Torch's symmetric memory: all members make and open it together.

    Attributes:
        device: this rank's GPU.
        made: how often this process has done so. Torch numbers that by process, not by team.
    """

    device: torch.device
    made: int = 0
    _size: int = 0

    def offer(self, size: int) -> str:
        self._size = size
        return TORCH

    def open(self, meeting: Meeting) -> tuple[list[int], Callable[[], None]]:
        os.environ.setdefault(_NO_MULTICAST, "1")
        self.made += 1
        try:
            kept, found = symmetric_memory(
                f"mdfuse/{self.made}/{meeting.name}",
                (meeting.own, len(meeting.handles)),
                meeting.store,
                meeting.timeout_s,
                self._size,
                self.device,
            )
        except RuntimeError as error:
            raise OSError(f"torch's symmetric memory cannot be opened: {error}") from error
        return found, kept.clear


def seat(gpu: str, made: int, environment: Mapping[str, str]) -> str:
    """Return what a member says of itself before memory is made; `has_torch_slots` reads it.

    One that lets torch use NVLink multicast takes no part in torch's memory.
    """
    return f"{gpu} {made} {environment.get(_NO_MULTICAST, '1')}"


def has_torch_slots(seats: Sequence[str]) -> bool:
    """Return whether a team uses torch's symmetric memory; all members get one answer.

    Each has a GPU of its own, and all have used it as often, which torch counts on.

    >>> has_torch_slots(["GPU-a 0 1", "GPU-b 0 1"]), has_torch_slots(["GPU-a 0 1", "GPU-a 0 1"])
    (True, False)
    """
    gpus, *others = zip(*(text.split() for text in seats), strict=True)
    return (
        len({*gpus}) == len(seats) > 1
        and all(len({*x}) == 1 for x in others)
        and (others[1][0] == "1")
    )
