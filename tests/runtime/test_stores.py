"""How ranks find each other: where the store listens, and what happens where nobody answers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from helpers.listening import listening
from torch.distributed import TCPStore

from mdfuse.bootstrap import Launch
from mdfuse.config import Options
from mdfuse.errors import BackendError
from mdfuse.runtime import stores
from mdfuse.runtime.deadline import NEVER, Deadline
from mdfuse.runtime.first_meeting import watch_for
from mdfuse.runtime.stores import another_connection, open_store
from mdfuse.runtime.watch.neighbours import Neighbours
from mdfuse.runtime.watch.process import EXIT_STATUS

ALONE = Launch(name="torchrun", rank=0, size=2, local_rank=0, why="told so", local_size=2)
APART = replace(ALONE, local_size=1)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_HOSTED", {})


@pytest.fixture
def bare() -> dict[str, str]:
    """The variables of ranks that were started by hand."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_a_deadline() -> None:
    assert NEVER.left(3.0) == 3.0
    assert 4.0 < Deadline.after(5.0).left() <= 5.0 and Deadline.after(5.0).left(2.0) == 2.0
    assert Deadline.after(-1.0).left() == 0.0
    assert Deadline.after(-1.0).left_for_store() > timedelta(0)


def test_the_store_of_bare_ranks_listens_on_their_address_alone(bare: dict[str, str]) -> None:
    """And torch's own rendezvous, in the same process at the same port, finds it."""
    before = listening()
    launches = [ALONE, replace(ALONE, rank=1, local_rank=1)]
    with ThreadPoolExecutor(2) as pool:
        opened = list(pool.map(lambda launch: open_store(launch, 20, bare), launches))
    port = int(bare["MASTER_PORT"])
    assert listening() - before == {("127.0.0.1", port)}
    (store, is_host), (other, is_other_host) = opened
    assert (is_host, is_other_host) == (True, False)
    store.set("key", "value")
    assert other.get("key") == b"value"
    another = another_connection(other, 20)
    assert isinstance(another, TCPStore) and another is not other, "torch's clones keep the lock"
    assert another.get("key") == b"value"
    torchs = TCPStore("127.0.0.1", port, 2, True, multi_tenant=True, wait_for_workers=False)
    assert torchs.get("key") == b"value"
    assert open_store(ALONE, 20, bare)[0] is store, "until this process ends"


def test_a_host_that_comes_late_is_waited_for_without_growing_pauses(
    bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            open_store(ALONE, 20, bare)

    monkeypatch.setattr(stores.time, "sleep", pause)
    store, is_host = open_store(replace(ALONE, rank=1, local_rank=1), 20, bare)
    assert pauses == [stores._PAUSE_S] * 3 and not is_host
    assert store.add("key", 2) == 2


def test_a_host_that_never_comes(bare: dict[str, str]) -> None:
    with pytest.raises(BackendError, match=f"nobody listens at 127.0.0.1:{bare['MASTER_PORT']}"):
        open_store(replace(ALONE, rank=1, local_rank=1), 0.2, bare)


def test_torch_may_keep_a_store_there_already(bare: dict[str, str]) -> None:
    port = int(bare["MASTER_PORT"])
    torchs = TCPStore("127.0.0.1", port, 2, True, multi_tenant=True, wait_for_workers=False)
    store, _ = open_store(ALONE, 20, bare)
    torchs.set("key", "value")
    assert store.get("key") == b"value"


def test_a_port_that_another_process_has(bare: dict[str, str]) -> None:
    with (
        socket.create_server(("127.0.0.1", int(bare["MASTER_PORT"]))),
        pytest.raises(BackendError, match="rank 0 cannot reach the other rank") as told,
    ):
        open_store(ALONE, 20, bare)
    assert bare["MASTER_PORT"] in str(told.value.because)


@pytest.mark.parametrize(
    ("host", "launch", "listens"),
    [
        ("127.0.0.1", APART, True),  # the user says so
        ("localhost", APART, True),
        ("host0", ALONE, True),
        ("host0", APART, False),  # Debian's /etc/hosts: others know it by another address
        ("203.0.113.9", APART, False),  # translated: no interface here has it
    ],
)
def test_where_a_store_listens(
    monkeypatch: pytest.MonkeyPatch, host: str, launch: Launch, listens: bool
) -> None:
    real = socket.getaddrinfo

    def resolve(name: str, *rest: object, **more: object) -> object:
        return real("127.0.1.1" if name == "host0" else name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listener = stores._listener(launch, host, 0)
    assert (listener is not None) == listens
    if listener is not None:
        with listener:
            assert listener.getsockname()[0].startswith(("127.", "::1"))


# -- nobody answers --------------------------------------------------------------------------------


@pytest.fixture
def mute() -> Iterator[dict[str, str]]:
    """A host of the store that takes connections, as the kernel does, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}


def test_a_store_that_never_answers_ends_the_process(mute: dict[str, str], tmp_path: Path) -> None:
    launch = replace(ALONE, rank=1, local_rank=1)
    options = Options(timeout_s=0.2, reports=str(tmp_path))
    watch, ended, said = watch_for(launch, options, mute), threading.Event(), list[str]()
    watch._write = said.append

    def end(status: int) -> None:
        assert status == EXIT_STATUS
        ended.set()

    watch._end = end
    watch.start()
    threading.Thread(target=join_in_vain, args=(launch, mute, watch), daemon=True).start()
    assert ended.wait(20)
    (report,) = said
    assert f"the store that rank 0 keeps at 127.0.0.1:{mute['MASTER_PORT']}" in report
    assert "rank 0 did not come to the store: busy elsewhere, or gone" in report
    assert "see the log of rank 0" in report


def join_in_vain(launch: Launch, environment: dict[str, str], watch: stores.Watch) -> None:
    """Until the connection is closed, at the end of the test."""
    with pytest.raises(BackendError):
        open_store(launch, 0.2, environment, watch)


# -- ranks of one host -----------------------------------------------------------------------------


FOUR = replace(ALONE, size=4, local_size=4)


def neighbours(rank: int, launch: Launch = FOUR) -> Neighbours:
    return Neighbours(replace(launch, rank=rank), {"MASTER_PORT": "1", "USER": str(rank)})


def test_who_has_not_come_is_seen_and_who_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [neighbours(rank) for rank in range(4)]
    assert ranks[0].missing("a place") == {}, "nothing is known before one has come"
    ranks[0].come_to("a place")
    ranks[1].come_to("a place")
    ranks[3].come_to("another place")
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: child.pid)
            ranks[2].come_to("a place")
        away = "did not come to a place: busy elsewhere, or gone"
        assert ranks[0].missing("a place") == {3: away}
        child.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 20
        while 2 not in ranks[0].missing("a place") and time.monotonic() < until:
            time.sleep(0.01)
        stopped = "stopped, by a signal or a debugger"
        assert ranks[1].missing("a place") == {2: stopped, 3: away}
    finally:
        child.kill()
        child.wait()


def test_ranks_of_other_hosts_are_not_seen_nor_blamed() -> None:
    two_hosts = replace(ALONE, size=4, local_size=2)
    rank = neighbours(0, two_hosts)
    rank.come_to("a place")
    assert rank.missing("a place") == {}


def test_jobs_do_not_see_each_other() -> None:
    launch = replace(ALONE, size=2)
    here, there = (Neighbours(launch, {"MASTER_PORT": port}) for port in ("1", "2"))
    here.come_to("a place")
    assert list(here.missing("a place")) == [1]
    assert re.fullmatch("mdfuse/[0-9a-f]{16}", here._prefix) and here._prefix != there._prefix
