"""Memory for captures; graphs themselves are tested on GPUs."""

from __future__ import annotations

import pytest
import torch

from mdfuse.plan.captures import CudaRecorder

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "empties"),
    [(9, 100, 40, 1), (60, 100, 41, 0), (0, 50, 50, 0), (0, 51, 50, 1), (100, 0, 0, 0)],
)
def test_the_cache_is_emptied_where_it_has_more_than_the_device(
    free: int, reserved: int, allocated: int, empties: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    recorder = CudaRecorder(torch.device("cuda", 0), None)  # type: ignore[arg-type]
    recorder._make_room()
    assert len(calls) == empties
