"""Buffers that other ranks read where they lie: in one process, on two ranks."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mdfuse.backends.symmetric import heap as heaps
from mdfuse.backends.symmetric import host_team
from mdfuse.backends.symmetric.heap import Heap, symmetric_empty
from mdfuse.backends.symmetric.symmetric_backend import SymmetricBackend
from mdfuse.errors import BackendError
from mdfuse.interpreter.processes import this_process
from mdfuse.layouts.call import Call

from .test_symmetric import drawn, gather, joined, two_ranks

#: As many elements as are read where they lie: more than all slots have room for.
MANY = 600_001

Pair = tuple[SymmetricBackend, SymmetricBackend]


pair = pytest.fixture(name="pair")(two_ranks)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the readers to whom each piece was shown, not put."""
    found: list[int] = []
    show = host_team.HostTeam.show

    def noted(self: Any, move: Any, place: int) -> None:
        found.append(len(move.readers))
        show(self, move, place)

    monkeypatch.setattr(host_team.HostTeam, "show", noted)
    return found


def in_heap(values: Tensor) -> Tensor:
    return symmetric_empty(tuple(values.shape), values.stride(), values.dtype).copy_(values)


def test_pieces_are_read_where_they_lie(pair: Pair, shown: list[int]) -> None:
    """One rank's lies in the heap, the other's does not; again and again, in the same memory."""
    for turn in range(5):
        sources = [drawn(10 * turn + r, MANY) for r in (0, 1)]
        got = [torch.zeros(2 * MANY) for _ in (0, 1)]
        given = [in_heap(sources[0]), sources[1]]

        def run(rank: int, given: Any = given, got: Any = got) -> None:
            gather(pair[rank], given[rank], got[rank]).wait()

        assert joined(partial(run, 0), partial(run, 1)) == [None, None]
        for rank in (0, 1):
            assert torch.equal(got[rank], torch.cat(sources))
    assert shown == [1] * 5


def test_parts_of_a_buffer_to_several_places(pair: Pair, shown: list[int]) -> None:
    """Two pieces of one buffer one way, one back, in posts that follow each other."""
    whole, back = in_heap(drawn(1, 2 * MANY)), drawn(2, MANY)
    got, there = [torch.zeros(MANY) for _ in range(2)], torch.zeros(MANY)
    calls = [
        Call(kind="Exchange", team=(0, 1), rank=0, sends=(1, 1), recvs=(1,)),
        Call(kind="Exchange", team=(0, 1), rank=1, sends=(0,), recvs=(0, 0)),
    ]

    def first() -> None:
        pair[0].bind(calls[0])([whole[MANY:], whole[:MANY]], [there]).wait()

    def second() -> None:
        pair[1].bind(calls[1])([back], got).wait()

    for _ in range(2):
        assert joined(first, second) == [None, None]
        assert torch.equal(got[0], whole[MANY:]) and torch.equal(got[1], whole[:MANY])
        assert torch.equal(there, back)
    assert shown == [1] * 4


def test_small_pieces_are_copied(pair: Pair, shown: list[int]) -> None:
    given, got = [in_heap(torch.full((4,), float(r))) for r in (0, 1)], torch.zeros(8)
    gather(pair[1], given[1], torch.zeros(8))
    gather(pair[0], given[0], got).wait()
    assert got.tolist() == [0] * 4 + [1] * 4 and shown == []


def test_what_the_post_itself_writes_is_copied(pair: Pair, shown: list[int]) -> None:
    """An all-reduce in place: a rank may be through while the other still reads."""
    parts = [drawn(r, MANY) for r in (0, 1)]
    given = [in_heap(x) for x in parts]

    def run(rank: int) -> None:
        call = Call(kind="Allreduce", team=(0, 1), rank=rank, reduce_op="sum")
        pair[rank].bind(call)([given[rank]], [given[rank]]).wait()

    assert joined(partial(run, 0), partial(run, 1)) == [None, None]
    assert all(torch.equal(x, parts[0] + parts[1]) for x in given) and shown == []


def test_a_reader_that_does_not_come_is_named(pair: Pair) -> None:
    """The sender's memory is its own again; the reader is told, and gets nothing else."""
    given, got = [in_heap(drawn(r, MANY)) for r in (0, 1)], torch.zeros(2 * MANY)
    work = gather(pair[0], given[0], torch.zeros(2 * MANY))
    with pytest.raises(BackendError, match="nothing came from, or was taken by, rank 1"):
        work.wait()
    given[0].fill_(7)
    with pytest.raises(BackendError, match="nothing came from, or was taken by, rank 0"):
        gather(pair[1], given[1], got).wait()
    assert not got[:MANY].any()


def test_what_is_withdrawn_while_it_is_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    given, team = [in_heap(drawn(r, MANY)) for r in (0, 1)], pair[1]._teams[0, 1]
    gather(pair[0], given[0], torch.zeros(2 * MANY))
    read = host_team.ctypes.memmove

    def late(*args: Any) -> None:
        read(*args)
        pair[0]._teams[0, 1].close()

    monkeypatch.setattr(host_team.ctypes, "memmove", late)
    work = gather(pair[1], given[1], torch.zeros(2 * MANY))
    with pytest.raises(BackendError, match="rank 0 has given up"):
        work.wait()
    assert team.is_broken  # type: ignore[attr-defined]


def test_memory_is_used_again_when_it_is_gone() -> None:
    heap = Heap(1 << 20)
    first = heap.empty((3, 5), (1, 3), torch.int32)
    assert first is not None and first.stride() == (1, 3)
    place = heap.place(first.data_ptr())
    assert place == 0 and not first.any()
    second = heap.empty((15,), (1,), torch.int32)
    assert second is not None and heap.place(second.data_ptr()) == 64
    view = first[1:]
    del first
    gc.collect()
    third = heap.empty((15,), (1,), torch.int32)
    assert third is not None and heap.place(third.data_ptr()) == 128
    del view
    gc.collect()
    again = heap.empty((15,), (1,), torch.float32)
    assert again is not None and heap.place(again.data_ptr()) == 0


def test_what_has_no_place() -> None:
    heap = Heap(1 << 16)
    assert heap.empty((1 << 16,), (1,), torch.int32) is None
    assert heap.empty((0, 3), (3, 1), torch.int32) is None
    assert heap.place(torch.ones(3).data_ptr()) is None
    assert heap.empty((8,), (1,), torch.int32) is not None


def test_without_a_heap_buffers_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no rank uses the backend, in a fork, and where there are no addresses left."""
    gc.collect()
    assert heaps.the_heap() is None
    assert symmetric_empty((2, 3), (3, 1), torch.float32).shape == (2, 3)
    kept = heaps.open_heap()
    assert kept is not None and heaps.open_heap() is kept
    monkeypatch.setattr(kept, "_process", os.getpid() + 1)
    assert kept.place(symmetric_empty((2,), (1,), torch.float32).data_ptr()) is None
    assert heaps.open_heap() is not kept
    del kept
    gc.collect()

    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert heaps.open_heap() is None


def test_a_reader_whose_process_ended_is_named_at_once(pair: Pair) -> None:
    team: Any = pair[0]._teams[0, 1]
    gone = replace(this_process(), began="1")
    team.timeout_s, team.processes = 60, (this_process(), gone)
    given = [in_heap(drawn(r, MANY)) for r in (0, 1)]
    call = Call(kind="Exchange", team=(0, 1), rank=0, sends=(1,))
    work = pair[0].bind(call)([given[0]], [])
    with pytest.raises(BackendError, match="rank 1 is gone"):
        work.wait()
