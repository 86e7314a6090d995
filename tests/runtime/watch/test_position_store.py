"""Ranks meet before posts are ended: pretended ranks, which are threads with one store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from mdfuse.runtime.deadline import Deadline
from mdfuse.runtime.watch import position_store
from mdfuse.runtime.watch.position_store import Bulletin
from mdfuse.runtime.watch.positions import Position
from mdfuse.torch_private import HashStore

BEAT_S = 0.1


class Connection:
    """A rank's connection to a store, which counts questions.

    Args:
        store: shared by all ranks.
        most: how many questions are answered; the rank dies before the next one.
        die: what happens then.
    """

    def __init__(self, store: Any, most: float = inf, die: Callable[[], None] | None = None):
        self.store, self.most, self.die = store, most, die
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            if len(self.asked) >= self.most:
                assert self.die is not None
                self.die()
                raise RuntimeError("it is dead")
            keys = args[0] if isinstance(args[0], list) else [args[0]]
            self.asked.append(f"{name} {keys[0] if len(keys) == 1 else 'all'}")
            return getattr(self.store, name)(*args)

        return ask


class World:
    """Ranks that meet; some are dead from the start, as others of their host see."""

    def __init__(self, size: int, dead: frozenset[int] = frozenset()) -> None:
        self.store, self.size, self.dead = HashStore(), size, dead
        self.ranks = [Bulletin(self.store, n, BEAT_S, size) for n in range(size)]
        for n, rank in enumerate(self.ranks):
            rank.tell(Position(n, False, (), ""))
            rank.gone = {*dead}
            rank.store = Connection(self.store)  # type: ignore[assignment]
        self.results: dict[int, bool] = {}

    def connection(self, rank: int) -> Connection:
        connection: Any = self.ranks[rank].store
        return connection

    def kill(self, rank: int) -> None:
        for other in self.ranks:
            other.gone.add(rank)

    def begin(self, rank: int, limit_s: float = 60.0) -> threading.Thread:
        def meet() -> None:
            limit = Deadline.after(limit_s)
            self.results[rank] = self.ranks[rank].meet(range(self.size), limit)

        thread = threading.Thread(target=meet)
        thread.start()
        return thread

    def words(self) -> dict[int, str]:
        keys = {n: f"word/{n}" for n in range(self.size)}
        return {n: self.store.get(k).decode() for n, k in keys.items() if self.store.check([k])}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank seems dead where the machine is busy."""
    monkeypatch.setattr(position_store, "patience_of", lambda beat_s: 60.0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between two looks of a rank, of all ranks."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr(position_store, "time", clock)
    return pauses


@pytest.mark.parametrize("size", [16, 64])
def test_a_meeting_asks_a_few_questions_of_each_rank(size: int, looks: list[float]) -> None:
    """Each look of a rank asks four; those of one rank ask for all ranks, seldom."""
    dead = frozenset({3, size - 1})
    world = World(size, dead)
    living = [n for n in range(size) if n not in dead]
    threads = [world.begin(n) for n in living[:-1]]
    while len(looks) < 3 * size:  # they wait for the last one
        time.sleep(BEAT_S / 10)
    assert world.results == {}
    threads.append(world.begin(living[-1]))
    for thread in threads:
        thread.join(60)
    assert world.results == dict.fromkeys(living, True)
    assert world.words() == {n: "missed" if n in dead else "noted" for n in range(size)}
    counts = sorted(len(world.connection(n).asked) for n in living)
    assert sum(counts) <= 4 * len(looks) + 16 * size, counts
    assert sum(counts[:-1]) <= 4 * len(looks) + 8 * size, "one rank alone asks for all"


@pytest.mark.parametrize("absent", [(), (5,), (1, 62)])
def test_a_report_asks_for_all_ranks_at_once(absent: tuple[int, ...]) -> None:
    """All ranks may report at the same time, each with a row for every other one."""
    world = World(64)
    others = [n for n in range(1, 64) if n not in absent]
    for n in absent:
        world.store.delete_key(f"at/{n}")  # it never told any
    for n in others:
        world.ranks[n].tell(Position(n, True, (), f"line {n}"))
    asked = world.connection(0).asked
    answers = world.ranks[0].gather(range(64), Deadline.after(5 * BEAT_S + 0.5))
    assert answers.is_complete
    assert {n: at.host for n, at in answers.positions.items()} == {n: f"line {n}" for n in others}
    by_itself = Counter(x for x in asked if not x.endswith(" all"))
    assert asked[:1] == ["check all"] and set(by_itself) == {
        f"check at/{n}" for n in range(1, 64) if absent
    }
    assert all(by_itself[f"check at/{n}"] == 1 for n in others if absent), "once for each"


def steps_of_the_convener() -> list[str]:
    """The questions of the first of four ranks that come, the last of which is dead."""
    world = World(4, frozenset({3}))
    for rank in (1, 2):
        world.ranks[rank].come()
    world.begin(0).join(60)
    assert world.results == {0: True}
    return world.connection(0).asked


STEPS = 20


def test_the_steps_of_a_convener_are_those_that_are_tested() -> None:
    """It asks who lives, and notes who is missed, before it says that all have met."""
    asked = steps_of_the_convener()
    assert len(asked) < STEPS
    assert asked[:5] == [
        "compare_set broken", "compare_set word/0", "check meeting", "compare_set convener/0",
        "check all",
    ]  # fmt: skip
    assert asked[-3:] == ["compare_set word/3", "check all", "compare_set meeting"]


@pytest.mark.parametrize("step", range(STEPS))
def test_another_one_convenes_where_the_convener_dies(step: int) -> None:
    """Before each question that it asks; who lives meets, and nobody who came is missed."""
    world = World(4, frozenset({3}))
    dying = Connection(world.store, step, lambda: world.kill(0))
    world.ranks[0].store = dying  # type: ignore[assignment]
    world.ranks[1].come()  # it stands by
    first = world.begin(0)
    while first.is_alive() and not world.store.check(["convener/0"]):
        time.sleep(0.001)
    threads = [world.begin(n) for n in (2, 1)]
    for thread in (first, *threads):
        thread.join(60)
    assert world.results == {0: 0 not in world.ranks[1].gone, 1: True, 2: True}
    came = step >= 2  # else it died before it said so
    assert world.words() == {0: "noted" if came else "missed", 1: "noted", 2: "noted", 3: "missed"}


def test_a_meeting_that_takes_too_long_is_over_for_all() -> None:
    """Rank 2 lives and works: what its device gets from now on, it would take for results."""
    world = World(3)
    first = world.begin(0, limit_s=0.3)
    while not world.store.check(["convener/0"]):
        time.sleep(0.001)
    for thread in (first, world.begin(1)):
        thread.join(30)
    assert world.results == {0: False, 1: False}
    assert not world.ranks[2].meet(range(3), Deadline.after(60.0)), "it comes too late"


def test_a_convener_that_falls_silent_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another host no process is seen, and positions tell who lives."""
    monkeypatch.setattr(position_store, "patience_of", lambda beat_s: 2.0)
    world = World(3)
    world.store.set("convener/0", "0")
    world.store.set("word/0", "noted")
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(BEAT_S):
            for n in (1, 2):
                Bulletin(world.store, n, BEAT_S, _beat=int(time.monotonic() * 100)).tell(
                    Position(n, False, (), "")
                )

    alive = threading.Thread(target=live)
    alive.start()
    for thread in [world.begin(n) for n in (1, 2)]:
        thread.join(60)
    stop.set()
    alive.join()
    assert world.results == {1: True, 2: True}
    assert world.store.get("convener/1").decode() in ("1", "2")
    assert world.words() == dict.fromkeys(range(3), "noted")
