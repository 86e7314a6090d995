"""Counts of runs: of programs that are gone only what they posted is left."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

from mdfuse.backends.post_notes import PostInfo
from mdfuse.runtime.watch.plan_position import RunCount
from mdfuse.runtime.watch.tallies import Tallies
from mdfuse.runtime.watch.watch import Watch

TEAM = (0, 1)


class Owner:
    """Whoever runs a program."""


def tally(serial: int, runs: int, refused: int = 0) -> RunCount:
    posted = {("Allgather", TEAM): 2, ("Allreduce", TEAM): 1, ("Exchange", TEAM): 1}
    return RunCount(name="f", serial=serial, runs=runs, refused=refused, posted=posted)


def test_what_was_posted_stays_when_a_program_goes() -> None:
    gone: list[int] = []
    tallies, owner, other = Tallies(lambda x: gone.append(x.serial)), Owner(), Owner()
    tallies.add(tally(0, runs=5, refused=1), owner)
    now = tally(1, runs=3)
    tallies.add(now, other)
    before = Counter({("collectives", TEAM): 3 * (4 + 2), ("transfers", TEAM): 4 + 2})
    assert tallies.posted_before(now) == before
    del owner
    gc.collect()
    assert gone == [0] and tallies
    assert tallies.posted_before(now) == before
    now.runs += 10
    assert tallies.posted_before(None)["transfers", TEAM] == 4 + 13
    del other
    gc.collect()
    assert gone == [0, 1] and not tallies
    assert tallies.posted_before(None)["transfers", TEAM] == 4 + 13


def test_a_count_goes_with_its_owner() -> None:
    tallies, owners = Tallies(), [Owner() for _ in range(50)]
    counts = [tally(n, runs=1) for n in range(50)]
    for count, owner in zip(counts, owners, strict=True):
        tallies.add(count, owner)
    seen = [weakref.ref(count) for count in counts]
    del counts, count, owner
    assert all(x() is not None for x in seen)
    del owners[5:]
    gc.collect()
    assert [n for n, x in enumerate(seen) if x() is not None] == [0, 1, 2, 3, 4]
    assert tallies.posted_before(None)["collectives", TEAM] == 150


def test_an_owner_that_goes_while_someone_counts() -> None:
    """The collector may run at any line, also where the lock is held by the same thread."""
    tallies, owners = Tallies(), [Owner()]
    tallies.add(tally(0, runs=2), owners[0])
    with tallies._lock:
        owners.clear()
        gc.collect()
        assert tallies
    assert tallies.posted_before(None)["collectives", TEAM] == 6 and not tallies


def test_what_others_are_told_does_not_grow_with_programs_that_are_gone() -> None:
    watch, owner = Watch(rank=0, timeout_s=5), Owner()
    for serial in (1, 11):
        count = RunCount(name="f", serial=serial)
        watch.count(count, owner if serial == 1 else watch)
        family = f"replays of {count.title}, region 0"
        subject = PostInfo(kind="replay", team=TEAM, bytes=8, where="", family=family)
        watch.ring.writer(subject, lambda number: True)()
    families = [p.family for p in watch.position(is_hanging=False).progress]
    assert families == ["replays of @f (1), region 0", "replays of @f (11), region 0"]
    del owner
    gc.collect()
    families = [p.family for p in watch.position(is_hanging=False).progress]
    assert families == ["replays of @f (11), region 0"]
