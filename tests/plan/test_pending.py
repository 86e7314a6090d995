"""What handles of posts wait for, on which streams."""

from __future__ import annotations

import pytest
import torch

from mdfuse.plan.pending import Pending, halves


class _Event:
    """Stands for an event of CUDA: notes which stream records it, and which ones wait for it."""

    current = ""
    notes: list[tuple[str, str]] = []  # noqa: RUF012

    def record(self) -> None:
        self.notes.append(("record", self.current))

    def wait(self) -> None:
        self.notes.append(("wait", self.current))


class _WaitsOnce:
    """A work whose second wait does nothing, as that of several libraries."""

    def __init__(self) -> None:
        self.joined: list[str] = []

    def wait(self) -> None:
        if not self.joined:
            self.joined.append(_Event.current)


def test_handles_of_one_work_are_waited_for_on_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "notes", [])
    work = _WaitsOnce()
    sent, received = (Pending(works) for works in halves((work,), has_streams=True))
    for stream, handle in (("left", sent), ("right", received)):
        monkeypatch.setattr(_Event, "current", stream)
        handle.wait()
    assert work.joined == ["left"]
    assert _Event.notes == [("record", "left"), ("wait", "right")]


def test_halves_of_a_work_are_waited_for_one_by_one() -> None:
    class Two:
        sent, received = _WaitsOnce(), _WaitsOnce()

    (sent,), (received,) = halves((Two(),), has_streams=True)  # type: ignore[arg-type]
    assert (sent, received) == (Two.sent, Two.received)
    work = _WaitsOnce()
    assert halves((work,), has_streams=False) == ((work,), (work,))
