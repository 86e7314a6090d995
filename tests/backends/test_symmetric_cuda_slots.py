"""Who makes the memory of outboxes on GPUs, without one: the driver and torch are stand-ins."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from mdfuse.backends.symmetric import cuda_slots
from mdfuse.backends.symmetric.cuda_slots import (
    IpcSlots,
    Meeting,
    TorchSlots,
    has_torch_slots,
    seat,
)
from mdfuse.torch_private import HashStore

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("gpus", "counts", "off", "expected"),
    [
        ("ab", (0, 0), (None, None), True),
        ("abcd", (3, 3, 3, 3), ("1", None, "1", None), True),
        ("aa", (0, 0), (None, None), False),
        ("aba", (0, 0, 0), (None,) * 3, False),
        ("ab", (0, 1), (None, None), False),
        ("ab", (0, 0), ("0", "0"), False),
        ("ab", (0, 0), ("1", "0"), False),
        ("a", (0,), (None,), False),
    ],
)
def test_who_makes_it(gpus: str, counts: Any, off: Any, expected: bool) -> None:
    """Torch, where each has a GPU of its own, has counted as far, and multicast is off."""
    variable = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    said = [{} if x is None else {variable: x} for x in off]
    seats = [seat(f"GPU-{g}", n, e) for g, n, e in zip(gpus, counts, said, strict=True)]
    assert has_torch_slots(seats) is expected
    assert has_torch_slots(seats[::-1]) is expected


def meeting(*handles: str) -> Meeting:
    return Meeting(name="0-1", own=1, handles=handles, store=HashStore(), timeout_s=2.0)


def test_torch_makes_it_with_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def made(*args: Any) -> tuple[list[object], list[int]]:
        asked.append(args)
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        return [len(asked)], [4096, 8192]

    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setattr(cuda_slots, "symmetric_memory", made)
    slots, team = TorchSlots(GPU), meeting("torch", "torch")
    assert slots.offer(1 << 20) == "torch"
    found, release = slots.open(team)
    slots.open(team)
    assert found == [4096, 8192] and slots.made == 2
    names = [args[0] for args in asked]
    assert len({*names}) == 2  # torch takes no name twice
    assert asked[0][1:] == ((1, 2), team.store, 2.0, 1 << 20, GPU)
    release()


def test_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("overlapping devices")

    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setattr(cuda_slots, "symmetric_memory", refuse)
    with pytest.raises(OSError, match="symmetric memory cannot be opened: overlapping devices"):
        TorchSlots(GPU).open(meeting("torch", "torch"))


class FakeMemory:
    """A driver that notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    def allocate(self, size: int) -> int:
        self.asked.append(("allocate", size))
        return 512

    def handle(self, address: int) -> str:
        return f"of {address}"

    def open(self, handle: str) -> int:
        self.asked.append(("open", handle))
        return 1024

    def close(self, address: int) -> None:
        self.asked.append(("close", address))

    def free(self, address: int) -> None:
        self.asked.append(("free", address))


def test_handles_of_cuda() -> None:
    memory: Any = FakeMemory()
    slots = IpcSlots(memory)
    own = slots.offer(64)
    found, release = slots.open(meeting("of another", own))
    assert found == [1024, 512]
    release()
    expected = [("allocate", 64), ("open", "of another"), ("close", 1024), ("free", 512)]
    assert memory.asked == expected
