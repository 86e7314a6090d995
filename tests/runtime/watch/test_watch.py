"""The ring buffer of posts and its watchdog, on tracks that finish when the test says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_nccl import FakeTrack
from helpers.golden import Golden
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mdfuse.backends.post_notes import PostInfo
from mdfuse.interpreter import processes
from mdfuse.runtime.watch import position_store as bulletin_module
from mdfuse.runtime.watch import process
from mdfuse.runtime.watch import watch as watch_module
from mdfuse.runtime.watch.hang_report import bytes_text
from mdfuse.runtime.watch.positions import Position, Progress
from mdfuse.runtime.watch.process import EXIT_STATUS
from mdfuse.runtime.watch.watch import Ring, Watch
from mdfuse.torch_private import HashStore, PrefixStore, TCPStore

TEAM = (0, 1, 2)


def subject(kind: str = "Allreduce", where: str = "mlp.py:14", **more: Any) -> PostInfo:
    return PostInfo(**{"kind": kind, "team": TEAM, "bytes": 4096, "where": where, **more})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rank:
    """A rank's watch on a fake clock, and what became of it."""

    def __init__(self, rank: int = 0, store: Any = None, **more: Any) -> None:
        self.clock, self.track = Clock(), FakeTrack()
        self.texts: list[str] = []
        self.statuses: list[int] = []
        self.watch = Watch(
            rank=rank,
            timeout_s=5,
            store=store,
            clock=self.clock,
            write=self.texts.append,
            end=self.statuses.append,
            **more,
        )

    def post(self, times: int = 1, what: PostInfo | None = None) -> None:
        before, behind = self.watch.prepare(what or subject(), self.track)
        for _ in range(times):
            before()
            behind()

    def finish(self, number: int) -> None:
        self.track.done = number

    def look(self, after_s: float = 0.0) -> None:
        self.clock.now += after_s
        self.watch.tell()
        self.watch.look()


#: Before tests put a line of their own in its place.
HOST_LINE = process.host_line


def test_a_frame_that_just_begins_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    frame: Any = SimpleNamespace(f_code=SimpleNamespace(co_filename="a.py"), f_lineno=None)
    main = threading.main_thread().ident
    monkeypatch.setattr(process, "seen", lambda look: {main: [look(frame)]})
    assert HOST_LINE() == "a.py:0"


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "host_line", lambda: "a.py:4   work()")


# -- the ring --------------------------------------------------------------------------------------


def test_the_ring_wraps() -> None:
    clock = Clock()
    ring = Ring(8, clock)
    write, other = (ring.writer(subject(kind=k, family=k), lambda n: n <= 15) for k in "ab")
    for _ in range(19):
        write()
    assert other() == 1
    posts = ring.posts()
    assert [(p.place, p.subject.kind, p.sequence) for p in posts] == [
        *((n, "a", n + 1) for n in range(12, 19)),
        (19, "b", 1),
    ]
    assert [p.is_done() for p in posts] == [True] * 3 + [False] * 4 + [True]
    assert posts[0].posted_at == 100.0
    assert ring.tallies() == {("a", TEAM): 19, ("b", TEAM): 1}
    assert [p.place for p in ring.posts(after=17)] == [18, 19]


def test_many_threads_write() -> None:
    ring = Ring(1024, time.monotonic)
    writers = [ring.writer(subject(family=str(n)), lambda n: True) for n in range(4)]

    def run(write: Callable[[], int]) -> None:
        for _ in range(200):
            write()

    threads = [threading.Thread(target=run, args=(write,)) for write in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.place for p in ring.posts()] == list(range(800))


def test_captured_posts_are_not_noted() -> None:
    rank, is_capturing = Rank(), [True]
    rank.watch._is_capturing = lambda: is_capturing[0]
    rank.post(2)
    assert rank.watch.captured == [subject()] * 2
    assert rank.watch.ring.posts() == [] and rank.track.marked == 0
    is_capturing[0] = False
    rank.post()
    assert rank.track.marked == 1


# -- when it raises the alarm ----------------------------------------------------------------------


def test_in_time() -> None:
    rank = Rank()
    for number in range(1, 40):
        rank.post()
        rank.look(4)
        rank.finish(number)
    assert rank.texts == []


def test_overdue(golden: Golden) -> None:
    rank = Rank()
    rank.post(3)
    rank.finish(1)
    rank.look()
    rank.look(4.9)
    assert rank.statuses == []
    rank.look(0.2)
    assert rank.statuses == [EXIT_STATUS]
    golden(rank.texts[0])


class Program:
    """A program that takes an error, or does not."""

    def __init__(self, *, can: bool, takes: bool) -> None:
        self.can, self.takes, self.errors = can, takes, list[Any]()
        self.is_over, self.standing_by = False, 0
        self.watch: Watch | None = None

    def can_begin(self) -> bool:
        return self.can

    def begin(self, error: Any) -> bool:
        self.errors.append(error)
        return self.takes

    def stand_by(self) -> None:
        self.standing_by += 1
        if self.standing_by > 1:
            assert self.watch is not None and self.watch.come()


@pytest.mark.parametrize(("can", "takes"), [(True, True), (True, False), (False, True)])
def test_a_program_that_takes_the_error_goes_on(can: bool, takes: bool) -> None:
    rank, program = Rank(), Program(can=can, takes=takes)
    rank.watch.interruption = program
    rank.post(3)
    rank.finish(1)
    rank.look()
    rank.look(5.1)
    assert len(program.errors) == can
    for error in program.errors:
        assert "Allreduce #2 on team (0, 1, 2) is not done on rank 0" in str(error)
        assert "results that its device had not computed by then are worthless" in error.because
        assert error.hint.startswith("mdfuse.rebuild(error) goes on with the ranks that are left")
    goes_on = can and takes
    assert rank.statuses == ([] if goes_on else [EXIT_STATUS])
    assert [*map(len, rank.texts)] == ([] if goes_on else [len(rank.texts[0])])
    assert goes_on or "this process ends now" in rank.texts[0]
    rank.look(60)
    assert len(program.errors) == (can if goes_on else len(program.errors)), "it is raised once"


def test_all_ranks_come_before_posts_are_ended() -> None:
    """A rank that works has an error, an idle one begins no run, and a dead one is not awaited."""
    store = HashStore()
    caller, busy, idle, dead = (Rank(n, store, ranks=4) for n in range(4))
    programs = [Program(can=True, takes=True) for _ in range(3)]
    for rank, program in zip((caller, busy, idle), programs, strict=True):
        rank.watch.interruption = program
    programs[2].watch = idle.watch
    busy.post()
    for rank in (caller, busy, idle, dead):
        rank.look()
    assert [len(x.errors) + x.standing_by for x in programs] == [0, 0, 0]
    came: list[bool] = []
    meeting = threading.Thread(target=lambda: came.append(caller.watch.meet()))
    meeting.start()
    until = time.monotonic() + 20
    while not programs[1].errors or programs[2].standing_by < 2:
        assert time.monotonic() < until and not came
        caller.watch.tell()
        for rank in (busy, idle):
            rank.look()
        time.sleep(0.01)
    (error,) = programs[1].errors
    assert "rank 1 ends its posts, as others do" in str(error)
    assert busy.watch.meet() and not came[1:]
    meeting.join(20)
    assert came == [True]
    assert idle.watch._bulletin is not None and programs[2].errors == []
    assert [rank.statuses for rank in (caller, busy, idle)] == [[], [], []]


def test_a_rank_that_lives_and_does_not_come_holds_the_meeting_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It works, and cannot have an error: it would take garbage for results."""
    monkeypatch.setattr(watch_module, "_SLACK_S", -4.0)  # of a timeout of 5 s
    store = HashStore()
    caller, other = (Rank(n, store, ranks=2) for n in range(2))
    other.watch.interruption = Program(can=False, takes=False)
    other.post()
    for rank in (caller, other):
        rank.look()
    came: list[bool] = []
    meeting = threading.Thread(target=lambda: came.append(caller.watch.meet()))
    meeting.start()
    while meeting.is_alive():
        other.look()
        time.sleep(0.05)
    assert came == [False]
    assert not Rank().watch.meet(), "without a store nobody can say that it knows"


@pytest.mark.parametrize("way", ["dies meanwhile", "is gone"])
def test_a_rank_that_is_not_awaited_hears_so(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped: what it notes later may be garbage of ranks that ended their posts."""
    monkeypatch.setattr(bulletin_module, "patience_of", lambda beat_s: 1.0)
    store = HashStore()
    caller, late, quick = (Rank(n, store, ranks=3) for n in range(3))
    for rank in (caller, late, quick):
        rank.look()
    assert quick.watch.come()
    bulletin = caller.watch._bulletin
    assert bulletin is not None
    if way == "is gone":
        bulletin.gone = {1}
    begin = time.monotonic()
    assert caller.watch.meet() and caller.watch.come()
    assert (time.monotonic() - begin > 0.9) == (way == "dies meanwhile")
    assert not late.watch.come() and quick.watch.come()
    assert not late.watch.come(), "also when it asks again"


def test_a_rank_that_cannot_ask_whether_it_was_missed_was() -> None:
    server, rank = a_server(), Rank(0, ranks=2)
    assert rank.watch.come(), "nobody waits without a store"
    rank = Rank(0, server, ranks=2)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    rank.watch._bulletin.store = Gone()  # type: ignore[union-attr]
    assert not rank.watch.come() and not rank.watch.meet()


def test_two_ranks_call_at_once() -> None:
    store = HashStore()
    ranks = [Rank(n, store, ranks=3) for n in range(3)]
    for rank in ranks:
        rank.look()
    ranks[2].watch._ended = "closed its communicator"
    ranks[2].watch.tell()
    came: list[bool] = []
    threads = [
        threading.Thread(target=lambda rank=rank: came.append(rank.watch.meet()))
        for rank in ranks[:2]
    ]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert came == [True, True] and time.monotonic() - begin < 1.5
    assert all(rank.watch.come() for rank in ranks[:2]), "nobody was missed"


class Another:
    """A process of this host that does nothing, and tells where a rank is."""

    def __init__(self, store: Any, rank: int) -> None:
        self.process = subprocess.Popen(["sleep", "60"])
        here = processes.this_process()
        status = processes._status(self.process.pid)
        assert status is not None
        other = replace(here, pid=self.process.pid, began=status[processes._BEGAN])
        self.bulletin = bulletin_module.Bulletin(store, rank, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bulletin_module, "this_process", lambda: other)
            self.bulletin.tell(self.at(rank))

    @staticmethod
    def at(rank: int, ended: str = "") -> Position:
        return Position(rank, False, (), "", "", ended)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("last", ["", "closed its communicator"])
def test_a_process_that_ends_without_a_word_is_seen_at_once(last: str) -> None:
    """Long before a post is overdue; one that said that it leaves is left to the deadline."""
    store = HashStore()
    rank = Rank(0, store, ranks=3)
    other = Another(store, 2)
    rank.post()
    for _ in range(3):
        rank.look(1.1)
    assert not rank.statuses, "the process lives"
    if last:
        other.bulletin.tell(other.at(2, last))
    other.end()
    begin = time.monotonic()
    rank.look(0.1)
    if last:
        assert not rank.statuses
        return
    assert rank.statuses == [EXIT_STATUS]
    assert time.monotonic() - begin < 2.5, "nobody waits for a new word of it"
    assert "is not done on rank 0: rank 2 ended without a word" in rank.texts[0]
    assert "rank 2 no sign of life" in rank.texts[0]


def test_a_process_that_cannot_be_seen_is_left_to_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """/proc shows less in some containers; positions are told all the same."""
    store = HashStore()
    rank = Rank(0, store, ranks=3)
    other = Another(store, 2)

    def hidden(pid: int) -> None:
        raise PermissionError(pid)

    monkeypatch.setattr(processes, "_status", hidden)
    rank.post()
    rank.look()
    assert rank.watch._bulletin is not None and rank.watch._bulletin._read(0) is not None
    assert store.add("told", 0) == 2 and rank.watch._bulletin._near == {}
    other.end()
    rank.look(3)
    assert not rank.statuses and not rank.watch._bulletin.gone
    monkeypatch.undo()
    monkeypatch.setattr(os, "readlink", lambda path: "7")
    with pytest.raises(OSError, match="another namespace"):
        processes.this_process()


def test_processes_of_a_host_find_each_other_and_ask_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In whatever order ranks have hosts, without a word from their launcher."""
    asked: list[str] = []

    class Counted(HashStore):
        def add(self, key: str, count: int) -> int:
            asked.append(key)
            return super().add(key, count)

    store, here = Counted(), processes.this_process()
    hosts = ["one", "two", "one", "two", "one"]
    ranks = [Rank(n, store, ranks=5) for n in range(5)]
    for rank, host in zip(ranks, hosts, strict=True):
        other = replace(here, host=host)
        monkeypatch.setattr(bulletin_module, "this_process", lambda other=other: other)
        rank.watch.tell()
    for rank in ranks:
        rank.watch.tell()
    asked.clear()
    for rank, host in zip(ranks, hosts, strict=True):
        rank.watch.tell()
        assert rank.watch._bulletin is not None
        near = {n for n, other in enumerate(hosts) if other == host}
        assert {*rank.watch._bulletin._near} == near
    assert asked == []


def test_a_rank_of_another_team_is_not_missed() -> None:
    store = HashStore()
    rank = Rank(0, store, ranks=4)
    other = Another(store, 3)
    rank.post()  # with ranks 0, 1, 2
    other.end()
    for _ in range(3):
        rank.look(1.1)
    assert not rank.statuses
    rank.finish(1)
    rank.look(9)
    assert not rank.statuses


def test_a_queue_that_moves_is_not_overdue() -> None:
    """Posted long ago, behind others that take their time."""
    rank = Rank()
    rank.post(10)
    rank.look()
    for number in range(1, 10):
        rank.finish(number)
        rank.look(4)
    assert rank.texts == []
    rank.look(6)
    assert "Allreduce #10" in rank.texts[0]


def test_a_post_that_blocks_its_own_host_is_seen() -> None:
    rank = Rank()
    before, _ = rank.watch.prepare(subject(), rank.track)
    before()
    rank.look()
    rank.look(6)
    assert rank.statuses == [EXIT_STATUS]


def test_the_oldest_is_known_after_the_ring_came_round() -> None:
    rank = Rank(size=8)
    rank.post(1, subject("Broadcast", "mlp.py:3"))
    rank.look()
    rank.post(30)
    rank.look(1)
    rank.look(6)
    assert "Broadcast #1 on team" in rank.texts[0]
    assert "posted Allreduce #31" in rank.texts[0]
    assert rank.watch.position(is_hanging=True).progress[0].done == 0


def test_a_communicator_that_failed() -> None:
    rank, said = Rank(), [None, "remote process exited"]
    ask = lambda: said[0]  # noqa: E731
    rank.watch.on_error((0, 1), ask)
    rank.look()
    said.reverse()
    rank.look()
    assert rank.statuses == [EXIT_STATUS]
    text = rank.texts[0]
    assert text.startswith("mdfuse.BackendError: a communicator failed on rank 0: remote process")
    rank.watch.forget(ask)
    rank.look()
    assert len(rank.texts) == 1


# -- several ranks ---------------------------------------------------------------------------------


@contextmanager
def looking(*ranks: Rank) -> Iterator[None]:
    """These ranks' watchdogs look now and then, each in a thread, on clocks that run."""
    stop = threading.Event()

    def run(rank: Rank) -> None:
        while not stop.wait(0.02):
            if not rank.statuses:
                rank.look(0.5)
                rank.clock.now -= 0.4

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


def a_server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=20), wait_for_workers=False)


@pytest.fixture(params=[HashStore, a_server], ids=["HashStore", "TCPStore"])
def store(request: pytest.FixtureRequest) -> Any:
    return PrefixStore("watch", request.param())


def test_one_rank_is_behind(store: Any, golden: Golden) -> None:
    """Rank 1 finished another team's post and is busy; rank 2 posted this one, too."""
    first, behind, waiting = (Rank(rank, store) for rank in range(3))
    for rank in (first, behind, waiting):
        rank.post(16)
        rank.finish(16)
    first.post(1, subject("ReduceScatter", "mlp.py:20", bytes=3 << 20))
    waiting.post(1, subject("ReduceScatter", "mlp.py:20"))
    first.look()
    with looking(behind, waiting):
        first.look(6)
    assert behind.texts == [] and first.statuses == [EXIT_STATUS]
    lines = first.texts[0].splitlines()
    golden("\n".join(lines[:5]))
    assert lines[-1] == (
        "  try         see what rank 1 did instead; where it is only slow, raise timeout_s"
    )


def test_a_rank_that_is_done_and_one_that_never_posted(store: Any) -> None:
    ranks = [Rank(rank, store) for rank in range(3)]
    for rank in ranks[:2]:
        rank.post()
    ranks[1].finish(1)
    ranks[0].look()
    with looking(*ranks[1:]):
        ranks[0].look(6)
    assert "rank 1 is done with it;" in ranks[0].texts[0]
    assert "rank 2 has not posted it: it is at nothing there;" in ranks[0].texts[0]


def test_transfers_are_counted_only(store: Any) -> None:
    """Not every member posts each of them, so numbers do not say who is behind."""
    ranks = [Rank(rank, store) for rank in range(3)]
    exchange = subject("Exchange", family="transfers", is_shared=False)
    ranks[0].post(3, exchange)
    ranks[1].post(1, exchange)
    ranks[1].finish(1)
    ranks[0].look()
    with looking(*ranks[1:]):
        ranks[0].look(6)
    text = ranks[0].texts[0]
    assert "rank 1 posted 1 transfers, 1 of them done, last Exchange #1 (mlp.py:14);" in text
    assert "rank 2 posted 0 transfers, 0 of them done, last none;" in text
    assert "see the log of each rank" in text


def test_all_that_hang_report(store: Any) -> None:
    """The first to end waits until the others have read what it said."""
    ranks = [Rank(rank, store) for rank in range(3)]
    for rank in ranks[:2]:
        rank.post()
        rank.look()
    with looking(ranks[2]):
        threads = [threading.Thread(target=rank.look, args=(6,)) for rank in ranks[:2]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rank, other in (ranks[:2], ranks[1::-1]):
        number = other.watch._rank
        assert f"rank {number} has posted it, and waits too" in rank.texts[0]
        assert "rank 2 has not posted it" in rank.texts[0]


def test_the_store_is_gone() -> None:
    server = a_server()
    rank = Rank(0, server)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    rank.watch._bulletin.store = Gone()  # type: ignore[union-attr]
    rank.post()
    rank.look()
    rank.look(6)
    assert rank.statuses == [EXIT_STATUS]
    assert "the store does not answer: nothing is known of other ranks" in rank.texts[0]


def test_a_store_that_has_not_answered_for_long_is_asked_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, is_asked, may_answer = list[str](), threading.Event(), threading.Event()

    class Stopped:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            is_asked.set()
            may_answer.wait()
            raise RuntimeError("Connection reset by peer")

    rank = Rank(0, a_server())
    rank.watch._bulletin.store = Stopped()  # type: ignore[union-attr]
    told = threading.Thread(target=rank.watch.tell, daemon=True)
    told.start()
    is_asked.wait()
    late = time.monotonic() + 60
    monkeypatch.setattr(
        bulletin_module, "time", SimpleNamespace(monotonic=lambda: late, time=time.time)
    )
    rank.post()
    rank.watch.look()
    rank.clock.now += 6
    rank.watch.look()
    assert rank.statuses == [EXIT_STATUS]
    assert "the store does not answer: nothing is known of other ranks" in rank.texts[0]
    assert asked == ["add"]
    may_answer.set()
    told.join()


def test_a_position_travels() -> None:
    at = Position(3, True, (Progress("collectives", (0, 3), 7, 6, "Reduce #7 (a.py:1)"),), "b.py:2")
    assert Position.decode(at.encode()) == at
    assert at.of("collectives", (0, 3)).posted == 7
    assert at.of("collectives", (1, 3)) == Progress("collectives", (1, 3), 0, 0, "")


def test_sizes() -> None:
    assert [bytes_text(n) for n in (0, 1000, 1024, 3 << 19, 5 << 40)] == [
        "0 bytes",
        "1000 bytes",
        "1 KiB",
        "1.5 MiB",
        "5120 GiB",
    ]


# -- where reports go ------------------------------------------------------------------------------


def overdue(reports: Path) -> str:
    rank = Rank(reports=reports)
    rank.post()
    rank.look()
    rank.look(6)
    assert rank.statuses == [EXIT_STATUS]
    return rank.texts[0]


def test_a_report_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    text = overdue(tmp_path / "a" / "b")
    (file,) = (tmp_path / "a" / "b").iterdir()
    assert re.fullmatch(rf"rank0-pid{os.getpid()}-\w+\.txt", file.name)
    assert f"\n  this report is in {file}\n  because " in text
    assert file.read_text() == f"{text}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert overdue(tmp_path / "a" / "b") != text
    assert len([*(tmp_path / "a" / "b").iterdir()]) == 2


def test_a_report_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert "\n  no file has this report: [Errno " in overdue(tmp_path / "a")


def test_a_report_is_what_torchrun_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    text = overdue(tmp_path)
    failure = ProcessFailure(0, 1, EXIT_STATUS, str(tmp_path / "error.json"))
    said = failure.message["extraInfo"]["py_callstack"]  # type: ignore[index]
    assert said.endswith(text.replace("mdfuse.BackendError", "mdfuse.errors.BackendError") + "\n")
    assert abs(failure.timestamp - time.time()) < 60
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    overdue(tmp_path)  # it ends all the same


# -- a process -------------------------------------------------------------------------------------

_PROGRAM = """
import time
from mdfuse.backends.post_notes import PostInfo
from mdfuse.runtime.watch.watch import Watch


class Stuck:
    def mark(self, number): pass
    def is_done(self, number): return False


watch = Watch(rank=0, timeout_s=0.5)
watch.start()
what = PostInfo(kind="Allgather", team=(0, 1), bytes=8, where="here.py:1")
before, behind = watch.prepare(what, Stuck())
print("posting")
before()
behind()
time.sleep(30)
"""


def test_the_process_ends(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )
    assert done.returncode == EXIT_STATUS, done.stderr
    assert done.stdout == "posting\n" and time.monotonic() - begun < 25
    assert "Allgather #1 on team (0, 1) is not done on rank 0" in done.stderr
    assert re.search(r"rank 0: its host is at program.py:\d+   time.sleep\(30\)", done.stderr)


def test_close_ends_the_thread() -> None:
    watch = Watch(rank=0, timeout_s=0.5)
    watch.start()
    jobs = list(watch._threads)
    watch.start()
    assert watch._threads == jobs and len(jobs) == 2
    watch.close()
    assert all(job.join(60) for job in jobs)


_TWO_RANKS = """
import sys, time
from datetime import timedelta
from helpers.fake_nccl import FakeTrack
from mdfuse.torch_private import TCPStore
from mdfuse.backends.post_notes import PostInfo
from mdfuse.runtime.stores import another_connection
from mdfuse.runtime.watch.watch import Watch

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
watch, track = Watch(rank=rank, timeout_s=1, store=another_connection(store, 60)), FakeTrack()
watch.start()
what = PostInfo(kind="Allreduce", team=(0, 1), bytes=8, where="mlp.py:14")
before, behind = watch.prepare(what, track)
for number in range(1, 5 - rank):
    before()
    behind()
track.done = 3
store.get("never")  # a host that waits on its own connection to the store
"""


def test_a_process_that_does_not_post(tmp_path: Path) -> None:
    """Its watchdog answers while its host is stuck; the other one ends."""
    script, server = tmp_path / "train.py", a_server()
    script.write_text(_TWO_RANKS)
    tests = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(server.port)],
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{tests.parent}:{tests}"},
        )
        for rank in range(2)
    ]
    try:
        _, text = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == EXIT_STATUS, text
        assert text.startswith("mdfuse.BackendError: Allreduce #4 on team (0, 1) is not done on")
        assert "rank 1 has not posted it: it is at Allreduce #3 (mlp.py:14); its host is" in text
        assert "train.py:" in text and 'store.get("never")' in text
        assert ranks[1].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
