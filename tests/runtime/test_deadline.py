"""Where a rank is, what ranks tell each other, and what ends a wait that ends by itself never."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse.backends.base import PostSite
from mdfuse.backends.c10d.c10d_backend import C10dBackend
from mdfuse.backends.c10d.sockets import opened, shut_down
from mdfuse.errors import BackendError, ProgramError
from mdfuse.hir.rank.pipelines import project
from mdfuse.interpreter.threads import within
from mdfuse.layouts.call import Call
from mdfuse.plan.build import Plan, build
from mdfuse.runtime.agreement.concurrent_runs import crowd
from mdfuse.runtime.agreement.programs import agree, fingerprint
from mdfuse.runtime.agreement.rendezvous import Meetings
from mdfuse.runtime.deadline import Deadline
from mdfuse.runtime.watch import plan_position
from mdfuse.runtime.watch.hang_report import Alarm, Table, blame, explained, report
from mdfuse.runtime.watch.plan_position import RunCount
from mdfuse.runtime.watch.position_store import Bulletin
from mdfuse.runtime.watch.positions import OwnPosition, Position, Progress, standing
from mdfuse.runtime.watch.process import EXIT_STATUS
from mdfuse.runtime.watch.tallies import Tallies
from mdfuse.runtime.watch.watch import Watch
from mdfuse.torch_private import HashStore, PrefixStore

CPU, MESH = torch.device("cpu"), mf.DeviceMesh([0, 1])


def definition(name: str = "two", *, extent: int = 4) -> mf.FusionDefinition:
    """Two all-gathers, of which the second reads what the first brought."""
    with mf.FusionDefinition(name) as fd:
        x = fd.define_tensor([extent], mesh=MESH, layout={"x": mf.Shard(0)})
        y = fd.ops.set(x).on(MESH, {})
        z = fd.ops.set(y * 2.0).on(MESH, {"x": mf.Shard(0)})
        fd.add_output(fd.ops.set(z + 1.0).on(MESH, {}))
    return fd


# -- where a plan is -------------------------------------------------------------------------------


@dataclass
class Spy:
    """A backend whose posts and waits look where the process is; the last wait may fail."""

    tally: RunCount
    fails: bool = False
    seen: list[OwnPosition] = field(default_factory=list)
    tallies: Tallies = field(default_factory=Tallies)

    def __post_init__(self) -> None:
        self.tallies.add(self.tally, owner=self.tally)

    def bind(self, call: Call) -> Spy:
        return self

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Spy:
        self.look()
        return self

    def prepare(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite) -> None:
        """There is no library under it."""

    def wait(self) -> None:
        self.look()
        if self.fails and len(self.seen) % 4 == 0:
            raise BackendError("Allgather failed on rank 0")

    def look(self) -> None:
        self.seen.append(standing(self.tallies, plan_position.running()))

    def plan(self) -> Plan:
        local = project(mf.compile(definition()).host, 0)
        return build(local, self.bind, CPU, False, [torch.ones(2)], tally=self.tally)


def test_where_a_plan_is() -> None:
    spy = Spy(RunCount(name="two", serial=7))
    plan = spy.plan()
    for _ in range(2):
        spy.tally.runs += 1
        plan.run([torch.ones(2)])
    names = [now.name for now in spy.seen]
    assert names == [f"Allgather #{n}" for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert [now.occasion for now in spy.seen] == ["7/1"] * 4 + ["7/2"] * 4
    assert all(now.is_waiting and now.team == (0, 1) for now in spy.seen)
    counts = [(p.posted, p.done) for now in spy.seen for p in now.progress]
    assert counts == [(n, n - 1) for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert len({now.key for now in spy.seen}) == 8
    assert re.match(r"in run 2 of @two, at Allgather #4 \(test_deadline", spy.seen[-1].doing)
    after = standing(spy.tallies, plan_position.running())
    assert after.progress == (Progress("collectives", (0, 1), 4, 4, ""),)
    assert not after.is_waiting and after.doing == ""


def test_runs_that_were_refused_posted_nothing() -> None:
    spy = Spy(RunCount(name="two", serial=0, runs=2, refused=1))
    spy.plan().run([torch.ones(2)])
    assert spy.seen[0].name == "Allgather #1"


def test_where_an_error_comes_from() -> None:
    spy = Spy(RunCount(name="two", serial=0, runs=1), fails=True)
    plan = spy.plan()
    with pytest.raises(BackendError) as caught:
        plan.run([torch.ones(2)])
    place = plan_position.raised(caught.value)
    assert standing(spy.tallies, place) == spy.seen[-1]
    assert plan_position.raised(ValueError()) is None


# -- what ranks tell each other --------------------------------------------------------------------


def position(rank: int, **more: Any) -> Position:
    return Position(rank, False, (), "", **more)


@pytest.fixture
def bulletins() -> list[Bulletin]:
    store = HashStore()
    return [Bulletin(store, rank, beat_s=0.05) for rank in range(3)]


def test_who_tells_no_more_is_silent(bulletins: list[Bulletin]) -> None:
    bulletins[1].tell(position(1, doing="in run 3"))
    bulletins[2].tell(position(2))
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(0.01):
            bulletins[2].tell(position(2))

    thread = threading.Thread(target=live)
    thread.start()
    answers = bulletins[0].gather(range(3))
    stop.set()
    thread.join()
    assert answers.is_complete and sorted(answers.positions) == [1, 2]
    assert answers.positions[1].silent_s > 0 and answers.positions[1].doing == "in run 3"
    assert answers.positions[2].silent_s == 0


def test_without_time_for_a_new_word_the_age_of_the_last_one_decides() -> None:
    """As in worlds of thousands of ranks, which write seldom."""
    store, beat_s = HashStore(), 20.0
    here, lives, is_dead = (Bulletin(store, rank, beat_s) for rank in range(3))
    lives.tell(position(1))
    is_dead.tell(position(2))
    old = replace(position(2), beat=1, time=time.time() - 3 * beat_s)
    store.set("at/2", old.encode())
    before = time.monotonic()
    answers = here.gather(range(3), Deadline.after(0.8))
    assert time.monotonic() - before < 0.8 + 10
    assert answers.positions[1].silent_s == 0 and answers.positions[2].silent_s > 2 * beat_s


def test_who_left_need_not_answer(bulletins: list[Bulletin]) -> None:
    bulletins[1].tell(position(1, ended="closed its communicator"))
    bulletins[2].tell(replace(position(2), is_hanging=True))
    answers = bulletins[0].gather(range(3))
    assert [at.silent_s for at in answers.positions.values()] == [0, 0]


def test_the_first_alarm_is_heard(bulletins: list[Bulletin]) -> None:
    bulletins[1].alarm("rank 1 said: it hangs")
    bulletins[0].hear()
    bulletins[0].alarm("rank 0 said: it hangs, too")
    bulletins[2].hear()
    assert bulletins[2].heard == "rank 1 said: it hangs"


def test_what_never_answers_is_left() -> None:
    asked = threading.Event()
    assert within(5, lambda: None)
    assert not within(0.05, lambda: asked.wait(20))
    asked.set()

    def fails() -> None:
        raise RuntimeError("Connection reset by peer")

    assert not within(5, fails)


# -- what ends a wait ------------------------------------------------------------------------------


class Watched:
    """A watch on a fake clock, of rank 0 of 2, and what became of it."""

    def __init__(self, **more: Any) -> None:
        self.now = 100.0
        self.texts: list[str] = []
        self.statuses: list[int] = []
        self.watch = Watch(
            rank=0,
            timeout_s=0.5,
            clock=lambda: self.now,
            write=self.texts.append,
            end=self.statuses.append,
            ranks=2,
            **more,
        )

    def look(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.watch.look()


def test_a_meeting_that_never_ends() -> None:
    rank = Watched()
    with rank.watch.waiting("meeting 3 of all ranks"):
        rank.look(2.4)
        assert not rank.statuses
        rank.look(0.2)
    assert rank.statuses == [EXIT_STATUS]
    assert (
        "meeting 3 of all ranks is not done on rank 0 after 2.6 s (timeout_s=0.5)"
        in (rank.texts[0])
    )
    assert "rank 0: in meeting 3 of all ranks" in rank.texts[0]
    rank.look(50)
    assert len(rank.texts) == 1


def test_a_wait_in_a_plan_that_never_ends() -> None:
    rank, tally = Watched(), RunCount(name="two", serial=0, runs=1)
    rank.watch.count(tally, owner=rank)
    spy = Spy(tally)
    plan, look = spy.plan(), spy.look

    def look_twice() -> None:
        look()
        if len(spy.seen) == 4:
            rank.look()
            rank.look(2.6)

    spy.look = look_twice  # type: ignore[method-assign]
    plan.run([torch.ones(2)])
    assert rank.statuses == [EXIT_STATUS]
    assert rank.texts[0].startswith(
        "mdfuse.BackendError: Allgather #2 is not done on rank 0 after 2.6 s (timeout_s=0.5)"
    )
    assert re.search(r"\n  test_deadline.py:\d+\n", rank.texts[0])
    assert "posted 2 collectives on team (0, 1), the last one Allgather #2" in rank.texts[0]


@pytest.mark.parametrize("can_abort", [True, False])
def test_a_refusal_ends_the_wait(can_abort: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store, aborted = HashStore(), list[str]()
    rank = Watched(store=store)
    store.set("refused/4/2", "another rank refused it\nrank 1: %x has shape (5,)")

    def abort() -> bool:
        aborted.append("waits")
        return can_abort

    rank.watch.abort = abort
    now = OwnPosition(is_waiting=True, occasion="4/1", doing="in run 1 of @two")
    monkeypatch.setattr(rank.watch, "_standing", lambda: now)
    rank.watch.tell()
    rank.look()
    assert not aborted and not rank.statuses  # it was another run
    now = replace(now, occasion="4/2")
    rank.watch.tell()
    rank.look()
    assert aborted == ["waits"]
    assert rank.statuses == ([] if can_abort else [EXIT_STATUS])
    if not can_abort:
        assert "another rank refused it\n  rank 1: %x has shape (5,)" in rank.texts[0]


def test_a_rank_says_how_it_left() -> None:
    store = HashStore()
    watch = Watch(rank=1, timeout_s=1, store=store)
    watch.start()
    watch.leaves = "ended with ValueError: no"
    watch.close()
    watch.close()
    assert Position.decode(store.get("at/1")).ended == "ended with ValueError: no"


def told(rank: int, last: str, *, posted: int = 5, **more: Any) -> Position:
    progress = (Progress("collectives", (0, 1, 2), posted, posted - 1, last),)
    return replace(position(rank, **more), progress=progress)


ALARM = Alarm(
    team=(0, 1, 2), what="it broke", name="Allgather #5 (a.py:1)", family="collectives", sequence=5
)


@pytest.mark.parametrize(
    ("others", "guilty"),
    [
        ((told(1, "Allgather #5 (a.py:1)"), told(2, "", posted=4)), "rank 2: did not post it"),
        ((told(1, "Allgather #5 (a.py:1)"), told(2, "Reduce #5 (b.py:1)")), "rank 2: posted"),
        ((told(1, "Reduce #5 (b.py:1)"), told(2, "Reduce #5 (b.py:1)")), "rank 0: posted"),
        ((told(1, "", posted=4), told(2, "", silent_s=2.0)), "rank 2: no sign of life"),
        ((told(1, "", posted=4), told(2, "", ended="ended with ValueError: no")), "rank 2: left"),
        # a victim left because of what another one did
        ((told(1, "", posted=4), told(2, "", ended="ended with BackendError: it")), "rank 1: did"),
        ((told(1, "Allgather #5 (a.py:1)"), told(2, "Allgather #5 (a.py:1)")), "nobody knows why"),
    ],
)
def test_who_is_to_blame(others: tuple[Position, ...], guilty: str) -> None:
    own = told(0, "Allgather #5 (a.py:1)", doing="in run 3 of @gather")
    table = Table(position=own, others={at.rank: at for at in others}, ranks=range(3))
    assert blame(ALARM, table).startswith(guilty)
    text = str(report(ALARM, table))
    assert guilty.split(":")[0] in text.splitlines()[-1] or guilty.startswith("nobody")


def test_the_store_took_everybody_with_it() -> None:
    table = Table(
        position=told(2, ""), others={}, ranks=range(3), store="the store is gone", lost=0
    )
    assert blame(ALARM, table) == "rank 0: took the store with it"
    assert "no answer" not in str(report(ALARM, table))


def test_the_first_to_report_is_quoted() -> None:
    table = Table(position=told(2, ""), others={}, ranks=(2,), heard="rank 0 said: rank 1: left")
    error = explained(BackendError("it broke", where="team (0, 1, 2)"), ALARM, table)
    assert "\n  before, rank 0 said: rank 1: left\n" in f"{error}\n"
    assert error.where[0] == "team (0, 1, 2)"


# -- connections -----------------------------------------------------------------------------------


def test_connections_are_found_and_shut_down() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    connection, sockets = opened(lambda: socket.create_connection(server.getsockname()))
    assert list(sockets) == [connection.fileno()]
    assert shut_down(sockets)
    assert connection.recv(1) == b""
    connection.close()
    assert not shut_down(sockets)  # whatever has that number now
    server.close()


@pytest.fixture
def gloo() -> Iterator[list[C10dBackend]]:
    """Two ranks in one process."""
    store = HashStore()
    backends = [
        C10dBackend(
            "gloo", rank=rank, device=CPU, store=store, timeout_s=60,
            network=({"hostname": "127.0.0.1"},),
        )
        for rank in range(2)
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda backend: backend.prepare([(0, 1)]), backends))
    yield backends
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("kind", ["Allreduce", "Exchange"])
def test_a_wait_in_gloo_is_broken_off(kind: str, gloo: list[C10dBackend]) -> None:
    more: dict[str, Any] = {"recvs": (1,)} if kind == "Exchange" else {"reduce_op": "sum"}
    post = gloo[0].bind(Call(kind=kind, team=(0, 1), rank=0, **more))
    x = torch.ones(3)
    work = post([] if kind == "Exchange" else [x], [x])
    timer = threading.Timer(0.1, gloo[0].abort)
    timer.start()
    with pytest.raises(BackendError, match=f"{kind} failed on rank 0"):
        work.wait()
    timer.join()


# -- the same program everywhere -------------------------------------------------------------------


class Together:
    """What `agree` needs of a communicator; threads stand for ranks."""

    def __init__(self, store: HashStore, rank: int, size: int, crowd: str = "") -> None:
        self.rank, self.crowd = rank, crowd
        self.all_ok = Meetings(PrefixStore("all", store), rank, size, 20).exchange


def agreed(
    whats: Sequence[str],
    crowds: Mapping[int, str] = MappingProxyType({}),
    costs: Mapping[int, str] = MappingProxyType({}),
) -> list[str]:
    store = HashStore()

    def one(rank: int) -> str:
        joined: Any = Together(store, rank, len(whats), crowds.get(rank, ""))
        try:
            agree("p", None, joined, whats[rank], lambda: costs.get(rank, "h100"))
        except ProgramError as error:
            return str(error)
        return "fine"

    with ThreadPoolExecutor(len(whats)) as pool:
        return list(pool.map(one, range(len(whats))))


def test_the_first_line_that_differs() -> None:
    one, other = (fingerprint(mf.compile(definition(extent=n)).host, mf.Options()) for n in (4, 6))
    assert agreed([one, one]) == ["fine"] * 2
    number = next(
        n for n, (a, b) in enumerate(zip(one.split("\n"), other.split("\n"), strict=True), 1)
        if a != b
    )  # fmt: skip
    for said in agreed([one, other, one, one]):
        assert said.startswith("rank 1 runs another program than rank 0\n")
        assert f"rank 0, line {number}: input %x: (4,)" in said
        assert f"rank 1, line {number}: input %x: (6,)" in said


def test_most_ranks_are_right() -> None:
    assert agreed(["b", "a", "a\nc", "a"])[0].splitlines()[:5] == [
        "ranks 0, 2 run another program than rank 1",
        "  rank 1, line 1: a",
        "  rank 0, line 1: b",
        "  rank 1, line 2: (nothing)",
        "  rank 2, line 2: c",
    ]


def test_ranks_with_other_tables_of_costs_are_told_so() -> None:
    """Only where what these choose is not the same."""
    assert agreed(["a", "a"], costs={1: "unit"}) == ["fine"] * 2
    for said in agreed(["a", "b", "a"], costs={1: "mine (1f)"}):
        assert said.splitlines()[:5] == [
            "rank 1 runs another program than rank 0, and has another table of costs",
            "  rank 0, costs: h100",
            "  rank 1, costs: mine (1f)",
            "  rank 0, line 1: a",
            "  rank 1, line 1: b",
        ]
        assert "because     a table of costs chooses what is overlapped" in said
        assert "Options(costs=...) on all ranks, the same one" in said
    (said, *_) = agreed(["a", "b", "c", "a"], costs={1: "", 2: "mine"})
    assert said.startswith("ranks 1, 2 run another program than rank 0, and have another table")
    assert "rank 1, costs: none" in said and "rank 2, costs: mine" in said


def test_threads_that_run_at_once_are_the_reason_on_all_ranks() -> None:
    word = "threads 'a' and 'b' of rank 2 run programs that communicate at once"
    for said in agreed(["one", "other", "one"], {2: word}):
        assert said.startswith(f"{word}\n")
        assert "rank 0, line 1: one" in said and "rank 1, line 1: other" in said
        assert "try         run programs that communicate on one thread of each rank" in said


class HostIrEvaluator:
    """A run, as its stack shows it."""

    def __init__(self, communicates: bool) -> None:
        self.communicates = communicates
        self.begun, self.over = threading.Event(), threading.Event()

    def call(self) -> None:
        self.begun.set()
        self.over.wait(20)


@pytest.mark.parametrize("communicates", [True, False])
def test_other_threads_in_runs_are_seen(communicates: bool) -> None:
    run = HostIrEvaluator(communicates)
    thread = threading.Thread(target=run.call, name="the other")
    thread.start()
    assert run.begun.wait(20)
    found = crowd(3)
    run.over.set()
    thread.join()
    me = threading.current_thread().name
    said = f"threads {me!r}, 'the other' of rank 3 run programs that communicate at once"
    assert found == (said if communicates else "")
    assert crowd(3) == ""


@pytest.mark.parametrize("change", [{"streams": 2}, {"timeout_s": 5.0}, {"graph": "never"}])
def test_options_and_versions_count(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = mf.compile(definition()).host
    texts = [fingerprint(host, mf.Options(**options)) for options in ({}, change)]
    said = agreed(texts)
    (name,) = change
    assert all("rank 1, line 3: options" in s and f"{name}={change[name]!r}" in s for s in said)
    monkeypatch.setattr(torch, "__version__", "1.0")
    said = agreed([texts[0], fingerprint(host, mf.Options())])
    assert all("rank 1, line 2: torch 1.0" in s for s in said)


def test_where_a_line_stands_does_not_count() -> None:
    hosts = [mf.compile(define("two")).host for define in (definition, moved)]
    assert len({fingerprint(host, mf.Options()) for host in hosts}) == 1


def moved(name: str) -> mf.FusionDefinition:
    with mf.FusionDefinition(name) as fd:
        x = fd.define_tensor([4], mesh=MESH, layout={"x": mf.Shard(0)})
        y = fd.ops.set(x).on(MESH, {})
        z = fd.ops.set(y * 2.0).on(MESH, {"x": mf.Shard(0)})
        fd.add_output(fd.ops.set(z + 1.0).on(MESH, {}))
    return fd
