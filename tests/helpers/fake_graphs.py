"""Graphs without a GPU: a replay makes the recorded calls again, on the addresses they had."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse.plan.signature import signature_of


class Repeat:
    """A recording: calls made again, on the same buffers."""

    def __init__(self, run: Callable[[], list[Any]], results: list[Any]) -> None:
        self.run, self.results, self.count, self.is_reset = run, results, 0, False

    def replay(self) -> None:
        assert not self.is_reset
        self.count += 1
        for old, new in zip(self.results, self.run(), strict=True):
            old.copy_(new)

    def reset(self) -> None:
        self.is_reset = True


class FakeRecorder:
    stream = None

    def __init__(self) -> None:
        self.made: list[Repeat] = []

    def record(self, run: Callable[[], list[Any]], place: int) -> tuple[list[Any], Repeat]:
        results = run()
        self.made.append(Repeat(run, results))
        return results, self.made[-1]


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[FakeRecorder]:
    """Let an evaluator on CPU capture; returns the recorders that it makes, one for each plan."""
    made: list[FakeRecorder] = []

    def recorder(device: torch.device, stream: Any) -> FakeRecorder:
        made.append(FakeRecorder())
        return made[-1]

    class Stream:
        cuda_stream = 0

    evaluator = "mdfuse.evaluator"
    monkeypatch.setattr(f"{evaluator}.HostIrEvaluator._may_capture", lambda *_: True)
    monkeypatch.setattr(f"{evaluator}.check_graph", lambda *_: None)
    monkeypatch.setattr(f"{evaluator}.signature_of", lambda *xs: signature_of(*xs[:4], True))
    monkeypatch.setattr("mdfuse.plan.capture_plans.capture_stream", lambda _: Stream())
    monkeypatch.setattr("mdfuse.plan.capture_plans.CudaRecorder", recorder)
    mf.init(backend="gloo")
    # Each capture collects what is garbage, and need not look through what was imported by now.
    gc.collect()
    gc.freeze()
    return made
