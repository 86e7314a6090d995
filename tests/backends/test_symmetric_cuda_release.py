"""Waits of a GPU are ended by writes of the words, on a device that a test drives."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mdfuse.backends.symmetric import cuda_release, providers
from mdfuse.backends.symmetric.cuda_release import end_waits
from mdfuse.backends.symmetric.cuda_sums import Inbox
from mdfuse.errors import BackendError
from mdfuse.hir.row_norms import RowNorm
from mdfuse.layouts.call import Call


class Gpu:
    """A device whose queues wait for words; each write lets them go on as far as they can."""

    def __init__(self, queues: list[list[Any]]) -> None:
        self.queues = [deque(queue) for queue in queues]
        self.words: dict[int, int] = {}
        self.is_done = threading.Event()

    def go_on(self) -> None:
        for queue in self.queues:
            while queue and self.passes(*queue[0]):
                queue.popleft()
        if not any(self.queues):
            self.is_done.set()

    def passes(self, deed: str, word: int, value: int) -> bool:
        if deed == "write":
            self.words[word] = value
        elif deed == "wait":
            return self.words.get(word) == value
        elif deed == "flag":  # a kernel compares modulo 2^32
            return (self.words.get(word, 0) - value) & 0xFFFF_FFFF < 1 << 31
        return True

    def enter(self) -> None:
        pass

    def settle(self) -> None:
        assert self.is_done.wait(20)


class Lane:
    """A stream, and whether it shares a queue with one that waits."""

    def __init__(self, gpu: Gpu, *, is_stuck: bool = False) -> None:
        self.gpu, self.is_stuck = gpu, is_stuck
        self.awaited: set[tuple[int, int]] = set()

    def make(self, work: Any) -> Any:
        return SimpleNamespace(query=lambda: not self.is_stuck)

    def write(self, word: int, value: int) -> None:
        assert not self.is_stuck
        self.gpu.words[word] = value
        self.gpu.go_on()

    def fill(self, word: int, value: int, count: int) -> None:
        self.gpu.words.update(dict.fromkeys(range(word, word + 4 * count, 4), value))
        self.gpu.go_on()


def queue(*values: int, word: int = 8) -> list[Any]:
    """Waits for a word in turn, which the stream itself changes behind each."""
    return [x for n in values for x in (("wait", word, n), ("write", word, 7))]


@pytest.mark.parametrize("turn", [1, 5, (1 << 30) + 1, (1 << 31) - 1, (1 << 31) + 3, (1 << 32) - 1])
def test_all_waits_end(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_release, "_LATE_S", 0.0)
    flags = [("flag", word, turn) for word in (100, 104, 108)]
    gpu = Gpu([queue(0, 3, 0, 0, 3), queue(5, word=16), flags, queue(3, 0, word=16)])
    lanes = [Lane(gpu), Lane(gpu)]
    lanes[0].awaited = {(8, 0), (8, 3)}
    lanes[1].awaited = {(16, 5), (16, 3), (16, 0)}
    new = iter([Lane(gpu, is_stuck=True), Lane(gpu)])
    device: Any = gpu
    end_waits(device, lanes, [(100, 3)], lambda: next(new))  # type: ignore[arg-type, return-value]
    assert gpu.is_done.is_set() and not any(gpu.queues)


def test_it_gives_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cuda_release, "_MOST_S", 0.1)
    gpu = Gpu([[("wait", 8, 1)]])
    device: Any = gpu
    end_waits(device, [], [], lambda: Lane(gpu))  # type: ignore[arg-type, return-value]
    assert "posts by 'symmetric' do not end" in caplog.text
    gpu.is_done.set()


def team(given_back: list[Any]) -> providers.CudaOutboxes:
    outboxes = object.__new__(providers.CudaOutboxes)
    heap = SimpleNamespace(
        number=0, give=given_back.append, give_lanes=given_back.append,
        memory=SimpleNamespace(unregister=given_back.append),
    )  # fmt: skip
    stream = SimpleNamespace(query=lambda: True)
    fields: dict[str, Any] = {
        "device": None, "heap": heap, "is_released": False, "noter": None,
        "lanes": [SimpleNamespace(stream=stream, awaited=set())] * 4, "own_words": [0],
        "outbox": "outbox", "words": [64],
        "sums": SimpleNamespace(inbox=Inbox(2), addresses=[1 << 20, 1 << 30], index=1),
        "norms": SimpleNamespace(
            inbox=Inbox(2), addresses=[1 << 21, 1 << 31], index=1, kernel=lambda *_: print
        ),
    }  # fmt: skip
    for name, value in fields.items():
        setattr(outboxes, name, value)
    return outboxes


def test_a_team_whose_posts_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It posts no more; its memory is left, since others may still write there."""
    began: list[Any] = []
    monkeypatch.setattr(providers, "end_waits", lambda *given: began.append(given))
    monkeypatch.setattr(providers.threads, "start", lambda work, name: work())
    back: list[Any] = []
    ended = team(back)
    with pytest.raises(BackendError, match="cannot be ended"):
        ended.release(all_know=False)
    assert not began and not ended.is_released
    ended.release(all_know=True)
    ended.release(all_know=True)
    ((_, lanes, flags, _),) = began
    inbox = Inbox(2)
    assert len(lanes) == 4 and flags == [
        (first + inbox.flags, inbox.chunks * 2) for first in (1 << 30, 1 << 31)
    ]
    call = Call(kind="Allreduce", team=(0, 1), rank=1, reduce_op="sum")
    post = ended.poster(call, 8, None)
    with pytest.raises(BackendError, match="cannot post Allreduce on team"):
        post((), [torch.ones(2)], [torch.ones(2)], 0)
    norm = RowNorm(
        width=2, eps=1e-5, dtype=torch.float32, weight_dtype=None, has_residual=False,
        has_total=True, is_rounded=False,
    )  # fmt: skip
    joined = ended.joined(call, norm, 1)
    assert joined is not None
    with pytest.raises(BackendError, match="cannot post Allreduce on team"):
        joined(torch.ones(2), None, None, torch.ones(2), torch.ones(2))
    ended.close()
    assert back == []
    whole = team(back)
    whole.close()
    assert len(back) == 3
