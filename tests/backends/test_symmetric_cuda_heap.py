"""Memory of GPUs that others open, without one: the driver is a stand-in."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mdfuse.backends.symmetric import cuda_heap, cuda_memory
from mdfuse.backends.symmetric.cuda_heap import CudaHeap
from mdfuse.errors import BackendError

MIB = 1 << 20


class FakeMemory:
    """A driver whose memory is nowhere, one run behind the other."""

    def __init__(self) -> None:
        self.end = 4096
        self.opened: list[str] = []

    def allocate(self, size: int) -> int:
        self.end += size
        return self.end - size

    def handle(self, address: int) -> str:
        return f"of {address}"

    def open(self, handle: str) -> int:
        self.opened.append(handle)
        return 512 * len(self.opened)


@pytest.fixture
def heap() -> CudaHeap:
    memory: Any = FakeMemory()
    return CudaHeap(memory, torch.device("cuda", 3))


def test_what_is_given_back_is_taken_again(heap: CudaHeap) -> None:
    small, large = heap.take(5 * MIB), heap.take(40 * MIB)
    assert (small.size, large.size) == (6 * MIB, 40 * MIB)
    heap.give(small)
    heap.give(large)
    assert heap.take(25 * MIB) is large
    assert heap.take(30 * MIB).address not in (small.address, large.address)
    assert heap.take(1 * MIB).size == 2 * MIB  # most of the small one would be waste
    assert heap.take(4 * MIB) is small


def test_streams_of_a_closed_team_are_used_again(
    heap: CudaHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their waits are forgotten: the words may be another team's by then."""
    made: list[Any] = []

    def lane() -> Any:
        return SimpleNamespace(awaited={(4096, 1)})

    monkeypatch.setattr(cuda_heap, "CudaLane", lambda *_: made.append(lane()) or made[-1])
    device: Any = None
    first, second = heap.take_lanes(device), heap.take_lanes(device)
    assert [*first, *second] == made and len(made) == 8
    heap.give_lanes(first)
    assert [len(x.awaited) for x in made] == [0] * 4 + [1] * 4
    assert heap.take_lanes(device) is first and len(made) == 8


def test_where_addresses_lie(heap: CudaHeap) -> None:
    a, b = heap.take(2 * MIB), heap.take(4 * MIB)
    assert heap.find(b.address + 5) == (b.handle, 5)
    assert heap.find(a.address) == (a.handle, 0)
    assert heap.find(b.address + b.size) is None and heap.find(a.address - 1) is None


def test_each_handle_is_opened_once(heap: CudaHeap) -> None:
    own = heap.take(1)
    assert heap.open(own.handle) == own.address
    assert heap.open("of another") == heap.open("of another") == 512
    assert heap.memory.opened == ["of another"]  # type: ignore[attr-defined]


def test_an_arena_is_given_back_with_its_last_view(
    heap: CudaHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, of whose memory numpy takes arrays in the same way."""
    kept = torch.zeros(2 * MIB, dtype=torch.uint8)

    class Bytes:
        def __init__(self, address: int, size: int) -> None:
            self.__array_interface__ = {
                "shape": (size,),
                "typestr": "|u1",
                "data": (kept.data_ptr(), False),
                "version": 3,
            }

    def taken(owner: Bytes, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.asarray(owner))  # which keeps its owner

    monkeypatch.setattr(cuda_heap, "_Bytes", Bytes)
    monkeypatch.setattr(torch, "as_tensor", taken)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    heap.device = torch.device("cpu")
    view = heap.arena(1000)[512:600]
    gc.collect()
    assert view.numel() == 88 and not heap._idle
    del view
    gc.collect()
    assert [run.size for run in heap._idle] == [2 * MIB]


def test_what_torch_keeps_is_freed_where_there_is_no_room(
    heap: CudaHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    allocate = heap.memory.allocate

    def full(size: int) -> int:
        if not emptied:
            raise BackendError("the CUDA driver refuses cuMemAlloc_v2: error 2")
        return allocate(size)

    monkeypatch.setattr(heap.memory, "allocate", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    assert heap.take(1).size == 2 * MIB and emptied == [True]


def test_a_collection_gives_back_while_memory_is_taken(heap: CudaHeap) -> None:
    """What ends a tensor may run in any line of its thread, within `take`, too."""
    given, allocate = heap.take(1), heap.memory.allocate

    def collecting(size: int) -> int:
        heap.give(given)
        return allocate(size)

    heap.memory.allocate = collecting  # type: ignore[method-assign]
    assert heap.take(1) is not given
    assert heap.take(1) is given


@pytest.mark.parametrize(
    ("said", "left", "refused"),
    [(None, "32", False), ("16", "16", False), ("1", "1", True), ("many", "many", False)],
)
def test_queues(
    said: str | None, left: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(variable, said or "")
    if said is None:
        monkeypatch.delenv(variable)
    cuda_memory.ask_for_queues()
    assert cuda_memory.os.environ[variable] == left
    found = cuda_memory.too_few_queues()
    assert (found is not None) == refused
    if found is not None:
        assert found == (
            "CUDA_DEVICE_MAX_CONNECTIONS=1: a stream that waits for another rank would hold up the "
            "others",
            "leave it unset, or set it to 32",
        )
