"""What handles of posts wait for, on which streams."""

from __future__ import annotations

import pytest
from helpers.events import Event, WaitsOnce

from mdfuse.plan.pending import Pending, halves


def test_handles_of_one_work_are_waited_for_on_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = Event.install(monkeypatch)
    work = WaitsOnce()
    sent, received = (Pending(works) for works in halves((work,), has_streams=True))
    for stream, handle in (("left", sent), ("right", received)):
        Event.current = stream
        handle.wait()
    assert work.joined == ["left"]
    assert notes == [("record", "left"), ("wait", "right")]


def test_halves_of_a_work_are_waited_for_one_by_one() -> None:
    class Two:
        sent, received = WaitsOnce(), WaitsOnce()

    (sent,), (received,) = halves((Two(),), has_streams=True)  # type: ignore[arg-type]
    assert (sent, received) == (Two.sent, Two.received)
    work = WaitsOnce()
    assert halves((work,), has_streams=False) == ((work,), (work,))
