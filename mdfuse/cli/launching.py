"""Start ranks on this host, keep their store, and leave those alone that outlive others."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import NoReturn

import typer

from mdfuse.bootstrap import RESPAWNED
from mdfuse.errors import ProgramError, counted
from mdfuse.torch_private import Store, TCPStore

#: How long ranks have to end once they are asked to, seconds.
GRACE_S = 10.0

#: The most processes that are started in the place of one rank.
MOST = 3

#: Statuses of processes that others may go on without, and their meaning.
_LOST = {70: "its watchdog ended it", 71: "the others went on without it"}

#: Where those that go on after a loss leave word.
_REBUILT = "mdfuse/rebuilt"

#: The request of prctl(2) for a signal to this process once its parent ends.
_PDEATHSIG = 1


class _Asked(Exception):
    """A signal that asks the launcher to end."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(slots=True)
class _Process:
    """A rank's process.

    Attributes:
        rank: the rank.
        place: how many were before it in this place.
        since: when it was started, seconds.
    """

    rank: int
    popen: subprocess.Popen[bytes]
    place: int = 0
    since: float = field(default_factory=time.monotonic)


def command_of(arguments: Sequence[str]) -> list[str]:
    """Return the command of a program: a file of Python, `-m module`, or another executable.

    Raises:
        ProgramError: there is none.
    """
    first = arguments[0] if arguments else ""
    if first.endswith(".py") or (first == "-m" and len(arguments) > 1):
        return [sys.executable, *arguments]
    if not first or first.startswith("-") or shutil.which(first) is None:
        raise ProgramError(
            f"launch of {first or 'nothing'}",
            because="a program is a file FILE.py, -m MODULE, or an executable",
            hint="mdfuse launch -n 4 train.py --lr 0.1",
        )
    return [*arguments]


def launch(count: int, arguments: Sequence[str], is_respawning: bool) -> int:
    """Run a program on some ranks until all have ended; return the exit status.

    Raises:
        ProgramError: no such program.
    """
    command = command_of(arguments)
    store = _store()
    run = _Ranks(count, command, variables(count, store.port, os.environ), is_respawning)
    with _signals():
        try:
            run.start()
            run.until_all_ended()
        except _Asked as asked:
            _say(f"{signal.Signals(asked.number).name}: all ranks end")
            run.end(asked.number)
            return 128 + asked.number
        finally:
            run.end(signal.SIGTERM)
    return run.status(_went_on(store))


def variables(count: int, port: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of all ranks, as torchrun sets them, but for the rank."""
    many = {"OMP_NUM_THREADS": "1"} if count > 1 else {}
    return {
        **many,
        **environment,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _store() -> TCPStore:
    """Return a store on a free port of loopback, which lasts as long as this process."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = int(listener.getsockname()[1])
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _went_on(store: Store) -> bool:
    """Return whether ranks went on without others."""
    return bool(store.check([_REBUILT]))


@contextmanager
def _signals() -> Iterator[None]:
    """Raise `_Asked` in this context for a signal that asks to end."""

    def ask(number: int, _: object) -> NoReturn:
        raise _Asked(number)

    before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ranks:
    """The processes of a launch."""

    def __init__(
        self, count: int, command: Sequence[str], environment: Mapping[str, str], respawns: bool
    ) -> None:
        self._count, self._command, self._environment = count, command, environment
        self._respawns = respawns
        #: by descriptors, which can be read from once the process has ended
        self._live: dict[int, _Process] = {}
        #: rank -> how its last process ended, as `Popen.returncode`, in the order of their ends
        self._ends: dict[int, int] = {}
        #: rank -> the place of that process
        self._places: dict[int, int] = {}
        self._bound = _bound()

    def start(self) -> None:
        for rank in range(self._count):
            self._begin(rank, 0)

    def _begin(self, rank: int, place: int) -> None:
        """Start a process, which is a session of its own: Ctrl-C reaches the launcher alone."""
        named = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
        again = {RESPAWNED: str(place)} if place else {}
        popen = subprocess.Popen(
            self._command,
            env={**self._environment, **named, **again},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=self._bound,
        )
        self._live[os.pidfd_open(popen.pid)] = _Process(rank, popen, place)
        self._ends.pop(rank, None)

    def until_all_ended(self) -> None:
        while self._live:
            is_late = 0 in self._ends.values() and all(x.place for x in self._live.values())
            ended = self._ended(GRACE_S if is_late else None)
            for process in ended:
                self._tell(process)
            if not ended:
                _say("the others have ended: processes that did not join end")
                self.end(signal.SIGTERM)

    def _ended(self, seconds: float | None) -> list[_Process]:
        """Wait for processes that end, and reap them with those that they left behind."""
        ended = []
        for descriptor in {*self._live} & {*wait([*self._live], seconds)}:
            process = self._live.pop(descriptor)
            _kill_group(process, signal.SIGKILL)  # while its number is still its own
            process.popen.wait()
            os.close(descriptor)
            ended.append(process)
        return ended

    def _tell(self, process: _Process) -> None:
        """Say how a process ended, and start another one in its place."""
        rank, code = process.rank, process.popen.returncode
        self._ends[rank], self._places[rank] = code, process.place
        if code:
            _say(
                f"rank {rank} (process {process.popen.pid}) {_how(code)} after "
                f"{time.monotonic() - process.since:.1f} s; {counted(len(self._live), 'rank')} left"
            )
        if self._is_replaced(code, process.place):
            _say(f"rank {rank}: process {process.place + 1} in its place")
            self._begin(rank, process.place + 1)

    def _is_replaced(self, code: int, place: int) -> bool:
        """Return whether a new process takes the place: it was lost, and others are at work."""
        return (
            self._respawns
            and _is_lost(code)
            and place < MOST
            and bool(self._live)
            and 0 not in self._ends.values()
        )

    def end(self, number: int) -> None:
        """End all ranks by a signal; by SIGKILL after a grace, or when asked again."""
        until = time.monotonic() + GRACE_S
        with suppress(_Asked):
            self._kill(number)
            while self._live and time.monotonic() < until:
                self._ended(until - time.monotonic())
        self._kill(signal.SIGKILL)
        while self._live:
            self._ended(None)

    def _kill(self, number: int) -> None:
        for process in self._live.values():
            _kill_group(process, number)

    def status(self, went_on: bool) -> int:
        """Return the exit status: that of the first rank that failed, and was not replaced.

        Lost ranks, and new processes in their places, do not count where the others went on, and
        one came to its end.
        """
        ends = [*self._ends.items()]
        if went_on and 0 in self._ends.values():
            ends = [(rank, x) for rank, x in ends if not (_is_lost(x) or self._places[rank])]
        failed = next((code for _, code in ends if code), 0)
        return failed if failed >= 0 else 128 - failed


def _is_lost(code: int) -> bool:
    return code < 0 or code in _LOST


def _how(code: int) -> str:
    """Return in words how a process ended."""
    if code < 0:
        names = {s.value: f"{s.name}, signal {s.value}" for s in signal.Signals}
        return f"died of {names.get(-code, f'signal {-code}')}"
    why = f" ({_LOST[code]})" if code in _LOST else ""
    return f"ended with status {code}{why}"


def _kill_group(process: _Process, number: int) -> None:
    """Send a signal to a process that is not reaped yet, and to those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.popen.pid, number)


def _bound() -> Callable[[], None]:
    """Return what a child calls so that it dies with this process, however that ends."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)

    return bind


def _say(text: str) -> None:
    typer.echo(f"mdfuse launch: {text}", err=True)
