"""Times of kernels on a GPU that is simulated."""

from __future__ import annotations

import pytest
import torch

from mdfuse.plan import kernel_times


@pytest.mark.parametrize(("each_ms", "launches"), [(0.03, 44), (2.0, 4)])
def test_a_kernel_is_timed_once_all_launches_are_queued(
    each_ms: float, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is simulated: what is recorded before it woke takes no time of the host's."""
    done = list[str]()
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            assert done[-1] == "waited"
            return end.at - self.at

    def launch() -> None:
        done.append("launched")
        clock[0] += each_ms * (2 if done.count("launched") % 5 else 1)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(kernel_times, "keep_busy", lambda cycles: done.append(f"asleep {cycles}"))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **{**k, "device": "cpu"}))
    ms = kernel_times.milliseconds(launch, 16)
    assert done.count("launched") == launches
    assert ms == pytest.approx(each_ms if launches > 5 else 2 * each_ms)
    first, *phases = " ".join(done).split("waited asleep ")
    assert first == "launched "
    for phase in phases:
        cycles, *others = phase.split()
        count = others.count("launched")
        assert int(cycles) == count * kernel_times._QUEUED_CYCLES
        assert others[: count + 1] == ["launched"] * count + ["waited"]
