"""Small sums on GPUs by one kernel: which posts it makes, and where it puts what; without a GPU.

The kernel itself runs in Triton's interpreter, where Triton is, on ranks that are forks, with
inboxes in memory that they share.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mdfuse.backends.symmetric import cuda_sums, providers
from mdfuse.backends.symmetric.cuda_sums import CHUNK, INBOX_BYTES, Inbox, Sums
from mdfuse.backends.symmetric.outbox_moves import Shape
from mdfuse.layouts.call import Call
from mdfuse.torch_private import HashStore


@pytest.mark.parametrize("members", range(2, 9))
def test_an_inbox_has_a_place_for_each(members: int) -> None:
    """Two places of each chunk and member, flags and turns lie beside each other, in one inbox."""
    inbox, words = Inbox(members), set[int]()
    places = range(0, inbox.chunks * 2 * members * CHUNK, CHUNK)
    words |= {inbox.flags + 4 * n for n in range(inbox.chunks * members)}
    words |= {inbox.turns + 4 * n for n in range(inbox.chunks)}
    assert places[-1] + CHUNK <= min(words) and len(words) == inbox.chunks * (members + 1)
    assert max(words) + 4 == inbox.bytes <= INBOX_BYTES
    assert (members - 1) * inbox.chunks * CHUNK <= 240 * CHUNK
    shape = Shape(members=members, slot=1 << 20)
    at = providers._inbox_at(shape)
    assert at % 256 == 0 and at >= shape.bytes + 4 * shape.signals


FITS: dict[str, tuple[dict[str, Any], bool]] = {
    "usual": ({}, True),
    "f32": ({"dtype": torch.float32}, True),
    "f64": ({"dtype": torch.float64}, False),
    "whole numbers": ({"dtype": torch.int32}, False),
    "as many as there are": ({"count": 240 * CHUNK // 2}, True),
    "one more": ({"count": 240 * CHUNK // 2 + 1}, False),
    "none": ({"count": 0}, False),
    "the largest one": ({"reduce_op": "max"}, False),
    "parts": ({"kind": "ReduceScatter"}, False),
    "several": ({"buffers": 2}, False),
    "eight ranks": ({"team": range(8), "count": 34 * CHUNK // 2}, True),
    "eight ranks, one more": ({"team": range(8), "count": 34 * CHUNK // 2 + 1}, False),
}


@pytest.mark.parametrize("name", FITS)
def test_posts_that_are_one_kernel(name: str) -> None:
    changes, fits = FITS[name]
    case = {
        "dtype": torch.bfloat16, "count": 36_864, "reduce_op": "sum", "kind": "Allreduce",
        "buffers": 1, "team": range(2), **changes,
    }  # fmt: skip
    team = tuple(case["team"])
    call = Call(kind=case["kind"], team=team, rank=0, reduce_op=case["reduce_op"])
    buffers = [torch.empty(case["count"], dtype=case["dtype"])] * case["buffers"]
    sums = Sums(index=0, addresses=[0] * len(team), device=torch.device("cpu"))
    move = sums.post(call, buffers, buffers)
    assert (move is not None) == fits
    if move is not None:
        assert [x.side for x in move.pieces] == ["src", "dst"]
        assert [x.size for x in move.pieces] == [case["count"]] * 2


def test_gpus_that_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="u1"))
    for is_there, name in ((True, "u1"), (False, "")):
        monkeypatch.setattr(cuda_sums, "find_spec", lambda _, x=is_there: x or None)
        assert cuda_sums.name_of(torch.device("cuda", 0)) == name


class FakeHeap:
    """Memory at one address for all handles."""

    def __init__(self) -> None:
        self.memory = SimpleNamespace(register=lambda at, size: at, clear=self.clear)
        self.sizes: list[int] = []
        self.cleared: list[tuple[int, int]] = []

    def clear(self, address: int, size: int) -> None:
        self.cleared.append((address, size))

    def take(self, size: int) -> Any:
        self.sizes.append(size)
        return SimpleNamespace(address=1 << 20, handle=f"run {len(self.sizes)}")

    def open(self, handle: str) -> int:
        return int(handle.split()[1]) << 40

    def take_lanes(self, device: Any) -> list[Any]:
        return [SimpleNamespace(stream=SimpleNamespace(cuda_stream=0))] * 4


@pytest.mark.parametrize("gpus", [("a", "b"), ("a", "a"), ("a", "")])
def test_a_team_adds_where_each_has_a_gpu(
    gpus: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inbox lies behind signals, and begins without flags or turns."""
    provider, heap = object.__new__(providers.CudaProvider), FakeHeap()
    device = torch.device("cpu")
    args = providers.ProviderArgs(rank=0, device=device, timeout_s=1.0, noter=None)
    parts = {
        "_place": args, "_heap": heap, "_turns": None, "_outboxes": {},
        "_device": SimpleNamespace(track=lambda _: None),
    }  # fmt: skip
    for name, value in parts.items():
        setattr(provider, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    names = iter(gpus)
    monkeypatch.setattr(providers, "name_of", lambda _: next(names))
    shape = Shape(members=2, slot=provider.slot)
    members = [provider.offer(shape) for _ in gpus]
    at = providers._inbox_at(shape)
    assert heap.sizes == [at + 2 * INBOX_BYTES] * 2
    ((begin, size),) = {*heap.cleared}
    assert begin == (1 << 20) + shape.bytes and begin + size == (1 << 20) + at + 2 * INBOX_BYTES
    team = provider.team((0, 1), 1, shape, members, HashStore())
    assert (team.sums is not None) == (team.norms is not None) == (gpus == ("a", "b"))
    if team.sums is not None and team.norms is not None:
        ends = [x + INBOX_BYTES for x in team.sums.addresses]
        assert [*team.norms.addresses] == ends and team.norms.index == 1
        assert team.sums.index == 1
        assert [*team.sums.addresses] == [(1 << 40) + at, (2 << 40) + at]
    for memory, _ in members:
        memory.close()


def kernel_of_ranks(members: int, calls: list[Tensor], add_up: Any) -> list[int]:
    """The exit statuses of ranks, each of which adds its rows, and compares."""
    chunk, blocks = 256, 8
    flags = blocks * 2 * members * chunk
    turns = flags + blocks * members * 4
    memory = [mmap.mmap(-1, turns + blocks * 4) for _ in range(members)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in memory]

    def rank(index: int) -> None:
        for x in calls:
            count, y = chunk // x.itemsize, torch.full_like(x[0], torch.nan)
            add_up[-(-y.numel() // count),](
                x[index].clone(), y, y.numel(), torch.tensor(addresses), flags, turns,
                INDEX=index, MEMBERS=members, CHUNK=count, CHUNK_BYTES=chunk,
            )  # fmt: skip
            right = x[0].float()
            for term in x[1:]:
                right = right + term.float()
            assert torch.equal(y, right.to(x.dtype))

    return [os.waitstatus_to_exitcode(os.waitpid(x, 0)[1]) for x in forks(members, rank)]


def forks(count: int, act: Callable[[int], None]) -> list[int]:
    processes = []
    for n in range(count):
        process = os.fork()
        if not process:
            try:
                act(n)
            except BaseException:
                os._exit(1)
            os._exit(0)
        processes.append(process)
    return processes


@pytest.mark.triton
@pytest.mark.parametrize("members", [2, 3])
def test_ranks_add_in_team_order(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Posts of any size and dtype follow each other, and no rank waits for good."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from mdfuse.backends.symmetric.cuda_sums_kernels import add_up

    draw = random.Random(members)
    sizes = [draw.choice([5, 64, 200, 256, 300, 512]) for _ in range(12)]
    calls = [
        torch.randn(members, n).to((torch.float32, torch.float16)[k % 2])
        for k, n in enumerate(sizes)
    ]
    assert kernel_of_ranks(members, calls, add_up) == [0] * members
