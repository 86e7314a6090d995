"""Trials of two forms: turns, the vote of all ranks, and what is run from then on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mdfuse import Options
from mdfuse.compiled import autotune
from mdfuse.compiled.autotune import Trial


class Clock:
    """A clock that only evaluators move."""

    now = 0.0


class Fake:
    """What stands for an evaluator: its runs take the seconds that it was given, in turn."""

    options = Options()

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        self.clock, self.seconds, self.runs = clock, seconds, 0
        self.has_plans = True

    def forget(self) -> None:
        self.has_plans = False

    def call(self, arguments: Any, out: Any = None) -> list[Any]:
        self.clock.now += self.seconds[self.runs % len(self.seconds)]
        self.runs += 1
        return [self, arguments, out]


class Others:
    """What stands for a communicator: other ranks have these times."""

    def __init__(self, *times: tuple[float, float]) -> None:
        self.times, self.heard = times, list[str]()

    def all_ok(self, text: str) -> list[str]:
        self.heard.append(text)
        return [text, *map(json.dumps, self.times)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(autotune, "_now", lambda: found.now)
    return found


def tried(
    plain: Fake, chunks: Fake, others: Others, monkeypatch: pytest.MonkeyPatch
) -> tuple[Trial, list[Trial]]:
    """A trial after its last run, and those that it told of its decision."""
    monkeypatch.setattr(autotune, "init", lambda _: others)
    kept: list[Trial] = []
    found = Trial(plain, chunks, kept.append)  # type: ignore[arg-type]
    for turn in range(12):
        assert not kept and found.best is plain
        assert found.call([turn], ["out"]) == [(plain, chunks)[turn % 2], [turn], ["out"]]
    return found, kept


@pytest.mark.parametrize(
    ("others", "seconds", "is_chunked"),
    [
        ([], (4.0, 3.0), True),
        ([(3.0, 2.0), (1.0, 3.5)], (4.0, 3.5), True),
        ([(1.0, 5.0)], (4.0, 5.0), False),
        ([(1.0, 4.0)], (4.0, 4.0), False),  # a draw
    ],
    ids=["alone", "slowest", "one_rank_is_slower", "draw"],
)
def test_the_slowest_rank_counts(
    others: list[tuple[float, float]],
    seconds: tuple[float, float],
    is_chunked: bool,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This rank takes 4 and 3 seconds."""
    plain, chunks, peers = Fake(clock, [4.0]), Fake(clock, [3.0]), Others(*others)
    found, kept = tried(plain, chunks, peers, monkeypatch)
    assert kept == [found] and found.seconds == seconds
    assert found.best is (chunks if is_chunked else plain)
    assert (plain.runs, chunks.runs) == (6, 6)
    assert (plain.has_plans, chunks.has_plans) == (not is_chunked, is_chunked)
    assert peers.heard == ["[4.0, 3.0]"]
    how = "overlapped" if is_chunked else "one after the other"
    assert found.decision.endswith(f"all ranks run it {how}")
    assert f"{seconds[1] * 1e3:.3g} ms overlapped, {seconds[0] * 1e3:.3g} ms one" in found.decision


def test_first_runs_and_outliers_do_not_count(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs make plans and graphs; of the others the median counts."""
    plain = Fake(clock, [1.0, 1.0, 1.0, 5.0, 4.0, 90.0])
    chunks = Fake(clock, [70.0, 80.0, 90.0, 3.0, 60.0, 2.0])
    found, _ = tried(plain, chunks, Others(), monkeypatch)
    assert found.seconds == (5.0, 3.0) and found.best is chunks


@pytest.mark.parametrize(("failing", "is_chunked"), [("plain", True), ("chunks", False)])
def test_a_form_whose_runs_fail_is_not_kept(
    failing: str, is_chunked: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks run either form equally often, whatever becomes of it."""
    plain, chunks = Fake(clock, [2.0]), Fake(clock, [2.0])

    def fail(arguments: Any, out: Any = None) -> list[Any]:
        raise ValueError("as it is asked to")

    monkeypatch.setattr({"plain": plain, "chunks": chunks}[failing], "call", fail)
    monkeypatch.setattr(autotune, "init", lambda _: Others())
    kept: list[Trial] = []
    found = Trial(plain, chunks, kept.append)  # type: ignore[arg-type]
    for turn in range(12 if failing == "plain" else 13):
        assert not kept
        if (turn % 2 == 0) == (failing == "plain"):
            with pytest.raises(ValueError, match="as it is asked to"):
                found.call([turn])
        else:
            found.call([turn])
    assert kept == [found] and found.best is (chunks if is_chunked else plain)
