"""Who goes on: processes that have come, and those that live, as threads with one store."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from torch.distributed import HashStore

from mdfuse.runtime.agreement import epochs
from mdfuse.runtime.agreement.epochs import Electorate, Excluded
from mdfuse.runtime.membership import Member
from mdfuse.runtime.watch import pulse as pulses
from mdfuse.runtime.watch.positions import Position
from mdfuse.runtime.watch.pulse import Pulse

FIRST, LATE, DEAD = MEMBERS = ((0, 0), (1, 0), (2, 0))
SETTLE_S, PATIENCE_S = 0.4, 0.2


def position(beat: int) -> Position:
    return Position(0, False, (), "train.py:12", beat=beat)


def heard_of(member: Member) -> Position:
    """The last one told nothing since; the others tell a position each hundredth of a second."""
    return position(7 if member == DEAD else int(time.monotonic() * 100))


def agreed(longest_s: float | None, late_s: float) -> dict[Member, tuple[Member, ...] | str]:
    """What the first one and a late one agree on; the third never comes.

    Args:
        longest_s: how long those that live are waited for; None: nobody knows who lives.
        late_s: how much later the second one comes.
    """
    store, results = HashStore(), dict[Member, tuple[Member, ...] | str]()

    def act(me: Member, wait_s: float) -> None:
        time.sleep(wait_s)
        pulse = None if longest_s is None else Pulse(heard_of, PATIENCE_S, longest_s)
        electorate = Electorate(store=store, me=me, before=MEMBERS, settle_s=SETTLE_S, pulse=pulse)
        try:
            results[me] = electorate.agree(1).members
        except Excluded as excluded:
            results[me] = f"excluded by {excluded.members}"

    jobs = [threading.Thread(target=act, args=x) for x in ((FIRST, 0.0), (LATE, late_s))]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    return results


def test_who_is_late_and_alive_is_waited_for() -> None:
    both = (FIRST, LATE)
    assert agreed(longest_s=30.0, late_s=3 * SETTLE_S) == {FIRST: both, LATE: both}


def test_who_has_come_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the others are waited for: each rank looks fifty times a second."""
    looks: list[str] = []

    class Counted(HashStore):
        def check(self, keys: list[str]) -> bool:
            looks.extend(key for key in keys if "/here/" in key)
            return super().check(keys)

    monkeypatch.setattr(sys.modules[__name__], "HashStore", Counted)
    agreed(longest_s=1.0, late_s=0.0)
    counts = {member: looks.count(f"1/here/{member[0]}.0") for member in (FIRST, LATE)}
    assert all(1 <= count <= 4 for count in counts.values()), counts


def test_the_lowest_says_who_is_waited_for_and_where_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again: it may be in a loop of the user's that never ends."""
    monkeypatch.setattr(epochs, "_SAYS_S", 0.2)
    agreed(longest_s=30.0, late_s=4 * SETTLE_S)
    said = "rank 0 waits in rebuild for rank 1, which lives but does not come: it is at train.py:12"
    assert len(caplog.messages) >= 2 and all(x.startswith(said) for x in caplog.messages)


@pytest.mark.parametrize("longest_s", [None, 0.2])
def test_who_does_not_come_is_excluded(longest_s: float | None) -> None:
    """Where nobody knows that it lives, or it has lived for too long without coming."""
    results = agreed(longest_s, late_s=6 * SETTLE_S)
    assert results == {FIRST: (FIRST,), LATE: f"excluded by {(FIRST,)}"}


def test_a_process_lives_while_it_tells_new_positions() -> None:
    now = [5]
    pulse = Pulse[Member](lambda _: position(now[0]), 0.1)
    assert pulse.is_alive(LATE)  # nobody has listened for long yet
    time.sleep(0.12)
    assert not pulse.is_alive(LATE)
    now[0] = 6
    time.sleep(0.02)
    assert pulse.is_alive(LATE)


@pytest.mark.parametrize("is_new", [False, True], ids=["before", "after"])
def test_a_process_lives_where_the_store_answers_late(
    is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process, or the store, was stopped before or after the answer was made."""
    clock, told = [0.0], [5]
    monkeypatch.setattr(pulses.time, "monotonic", lambda: clock[0])

    def answer(_: Member) -> Position:
        at = position(told[0])
        if clock[0] == 0.5:
            clock[0], told[0] = 10.0, 6
            at = position(6) if is_new else at
        return at

    pulse = Pulse[Member](answer, 1.0)
    for now in (0.0, 0.5, 10.01, 10.3):
        clock[0] = max(now, clock[0])
        assert pulse.is_alive(LATE)
    clock[0] = 11.5
    assert not pulse.is_alive(LATE)
