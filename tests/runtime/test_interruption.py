"""The error of a device that hangs is raised in the program; whole versions are known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fake_nccl import FakeTrack

from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.bootstrap import Launch
from mdfuse.compiled.versions import Versions
from mdfuse.errors import BackendError
from mdfuse.runtime import interruption
from mdfuse.runtime.interruption import DeviceRuns, Interruption

ERROR = BackendError("a post is not done", where="mlp.py:14", because="b", hint="h", follows=True)


class Gpu:
    """A device that has done what a test says."""

    def __init__(self) -> None:
        self.stream, self.tracks = 1, dict[int, FakeTrack]()

    def current_stream(self) -> int:
        return self.stream

    def track(self, stream: int) -> FakeTrack:
        return self.tracks.setdefault(stream, FakeTrack())


class Device:
    """A backend whose posts hang until they are released."""

    def __init__(self) -> None:
        self.is_free, self.releases = threading.Event(), 0
        self.knew: list[bool] = []

    def release(self, all_know: bool = True) -> None:
        self.releases += 1
        self.knew.append(all_know)
        self.is_free.set()


class Host:
    """A backend whose posts nobody can end."""


def ranks(
    *backends: Any,
    size: int = 2,
    name: str = "mdfuse launch",
    meet: Any = lambda: True,
    come: Any = lambda: True,
) -> Any:
    launch = Launch(name=name, rank=0, size=size, local_rank=0, why="")
    return SimpleNamespace(
        is_ready=True, is_sound=True, size=size, launch=launch, door=object(),
        carriers=lambda: backends, watch=SimpleNamespace(meet=meet, come=come),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = [*interruption._all_runs]
    interruption._all_runs.clear()
    yield
    interruption._all_runs.clear()
    interruption._all_runs.update(before)


class Program:
    """A program that runs in a thread of its own, and then reads a result."""

    def __init__(self, reads: Callable[[], object]) -> None:
        self.gpu: Any = Gpu()
        self.runs = DeviceRuns(self.gpu)
        self.errors: list[BaseException] = []
        self.lines: list[str] = []
        self.is_reading = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(reads,))
        self.thread.start()
        assert self.is_reading.wait(10)

    def run(self, reads: Callable[[], object]) -> None:
        try:
            self.runs.mark(1)
            self.is_reading.set()
            reads()
            self.lines.append("behind the read")
        except BackendError as error:
            self.errors.append(error)

    def end(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_an_error_is_raised_behind_a_read() -> None:
    device = Device()
    program = Program(lambda: device.is_free.wait(20))
    comm = ranks(device)
    of = Interruption(comm, program.thread)
    assert of.can_begin()
    assert of.begin(ERROR)
    program.end()
    (error,) = program.errors
    assert isinstance(error, BackendError)
    assert type(error).__name__ == "BackendError"
    assert str(error) == str(ERROR)
    assert (error.what, error.where, error.follows) == (ERROR.what, ERROR.where, True)
    assert not program.lines
    assert (comm.is_ready, comm.is_sound, device.releases) == (False, False, 1)
    assert of.begin(ERROR), "the program has an error already"
    of.cancel(lambda: None)
    assert device.releases == 1


@pytest.mark.parametrize("all_know", [True, False])
def test_results_are_noted_before_the_others_know(all_know: bool) -> None:
    """And nothing is ended before: another rank could take garbage from here for results."""
    device = Device()
    program = Program(lambda: device.is_free.wait(20))
    noted: list[Any] = []

    def meet() -> bool:
        noted.append((program.runs.last, device.releases))
        program.gpu.tracks[1].done = 1  # too late
        return all_know

    assert Interruption(ranks(device, meet=meet), program.thread).begin(ERROR)
    program.end()
    assert (noted, device.knew) == ([(0, 0)], [all_know])
    assert program.runs.last == 0


def test_a_program_that_stands_by_begins_no_run() -> None:
    device = Device()
    program = Program(lambda: device.is_free.wait(20))
    program.gpu.tracks[1].done = 1
    noted: list[Any] = []

    def come() -> bool:
        noted.append(program.runs.last)
        return True

    comm = ranks(device, come=come)
    of = Interruption(comm, program.thread)
    of.check_goes_on()
    of.stand_by()
    assert (comm.is_ready, comm.is_sound, of.is_over, device.releases) == (False, False, False, 0)
    assert (program.runs.last, noted) == (1, [])
    with pytest.raises(BackendError, match="posts of other ranks were ended"):
        of.check_goes_on()
    of.stand_by()
    assert noted == [1]
    device.release()
    program.end()


def test_a_thread_that_does_not_come_back_has_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "_TAKEN_S", 0.2)
    device, other = Device(), threading.Event()
    program = Program(lambda: other.wait(20))
    assert not Interruption(ranks(device), program.thread).begin(ERROR)
    assert not program.errors
    other.set()
    program.end()


def test_who_can_be_interrupted() -> None:
    device = Device()
    program = Program(lambda: device.is_free.wait(20))
    thread = program.thread
    able = {
        "a device": ranks(device),
        "its backend cannot": ranks(device, Host()),
        "the launcher ends all": ranks(device, name="mpirun"),
        "alone": ranks(device, size=1),
    }
    assert {n: Interruption(x, thread).can_begin() for n, x in able.items()} == {
        "a device": True,
        "its backend cannot": False,
        "the launcher ends all": False,
        "alone": False,
    }
    assert not Interruption(ranks(device)).can_begin(), "another thread runs programs"
    device.release()
    program.end()
    assert not Interruption(ranks(device), thread).can_begin(), "it has ended"
    interruption._all_runs.clear()
    assert not Interruption(ranks(device)).can_begin(), "there is no state to go on with"


@pytest.mark.parametrize("is_done", [True, False])
def test_posts_that_end_by_themselves_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    monkeypatch.setattr(interruption, "_PATIENCE_S", 0.2)
    device, came = Device(), list[bool]()
    comm = ranks(device, come=lambda: came.append(True) or True)
    seen: list[bool] = []

    def settled() -> None:
        seen.append(is_done or device.is_free.wait(20))

    Interruption(comm).cancel(settled)
    assert device.releases == (0 if is_done else 1)
    assert seen[-1], "and the device is done"
    assert came == [True], "others that end their posts wait for it"


@pytest.mark.parametrize("way", ["begin", "cancel", "stand_by"])
def test_a_rank_that_others_missed_knows_no_version(way: str) -> None:
    """It was stopped; meanwhile others ended their posts, and its device took garbage."""
    device = Device()
    program = Program(lambda: device.is_free.wait(20))
    program.gpu.tracks[1].done = 1
    of = Interruption(ranks(device, come=lambda: False), program.thread)
    {
        "begin": lambda: of.begin(ERROR),
        "cancel": lambda: of.cancel(lambda: None),
        "stand_by": lambda: (of.stand_by(), of.stand_by()),
    }[way]()
    knew = {"begin": [False], "cancel": [], "stand_by": []}
    assert device.knew == knew[way], "its posts would reach what the others use anew"
    device.release()
    program.end()
    assert program.runs.last == -1


@pytest.mark.parametrize("is_own", [True, False])
def test_a_program_that_handles_an_error_of_its_own_gets_no_other(is_own: bool) -> None:
    """It is in an `except`, on its way to a rebuild; one of an earlier communicator counts not."""
    device = Device()

    def reads() -> None:
        try:
            raise BackendError("a meeting broke", because="b", hint="h")
        except BackendError:
            try:
                raise KeyError
            except KeyError:
                device.is_free.wait(20)

    program = Program(reads)
    comm = ranks(device)
    comm.is_sound = not is_own
    while not interruption.handles(program.thread):
        time.sleep(0.01)
    assert Interruption(comm, program.thread).begin(ERROR)
    program.end()
    assert (len(program.errors), device.releases) == (not is_own, 1)


def test_a_program_that_handles_an_error_may_wait_for_posts_that_do_not_end() -> None:
    """In a read of a result: then its process has to end."""

    class Broken(Device):
        def release(self, all_know: bool = True) -> None:
            raise RuntimeError("no driver")

    over = threading.Event()

    def reads() -> None:
        try:
            raise BackendError("a meeting broke", because="b", hint="h")
        except BackendError:
            over.wait(20)

    program = Program(reads)
    comm = ranks(Broken())
    comm.is_sound = False
    while not interruption.handles(program.thread):
        time.sleep(0.01)
    assert not Interruption(comm, program.thread).begin(ERROR)
    over.set()
    program.end()


# -- versions --------------------------------------------------------------------------------------


def versions(is_double: bool) -> tuple[Versions, Gpu, torch.Tensor]:
    state, gpu = torch.zeros(3), Gpu()
    of = Versions({"w": state}, is_double)
    of._device, of._is_marked = torch.device("cuda"), True
    of._runs = DeviceRuns(gpu)  # type: ignore[arg-type]
    return of, gpu, state


def run(of: Versions, state: torch.Tensor, number: int) -> None:
    of.begin()
    state.fill_(number)
    of.end()


@pytest.mark.parametrize("is_double", [True, False])
@pytest.mark.parametrize("done", [0, 2, 3, 4])
def test_versions_behind_the_device_are_not_whole(is_double: bool, done: int) -> None:
    of, gpu, state = versions(is_double)
    for number in (1, 2, 3, 4):
        run(of, state, number)
    gpu.tracks[1].done = done
    of._runs.freeze()  # type: ignore[union-attr]
    gpu.tracks[1].done = 4  # the device goes on, with garbage
    of._runs.freeze()  # type: ignore[union-attr]
    copies = {n: n for n in (2, 3) if is_double and n <= done}
    whole = {4: 4} if done == 4 else {}
    held = {n: int(x["w"][0]) for n, x in of.states().items() if x["w"] is not None}
    assert held == copies | whole
    assert of.number == 4


def test_an_error_between_a_run_and_its_count_leaves_no_version() -> None:
    """The run has written the state, and the count says that it has not."""
    of, gpu, state = versions(True)
    run(of, state, 1)
    of.begin()
    state.fill_(2)
    gpu.tracks[1].done = 1
    of._runs.freeze()  # type: ignore[union-attr]
    held = of.states()
    assert [*held] == [0, 1] and held[1]["w"] is not state
    of.loaded()
    assert {n: x["w"] is state for n, x in of.states().items()} == {1: True}


def test_a_state_that_a_recovery_moves_has_a_mark() -> None:
    of, gpu, _ = versions(False)
    of.resume(5)
    of._runs.freeze()  # type: ignore[union-attr]
    assert (of.last, [*of.states()]) == (4, [])
    again, gpu, _ = versions(False)
    again.resume(5)
    gpu.tracks[1].done = 5
    again._runs.freeze()  # type: ignore[union-attr]
    assert (again.last, [*again.states()]) == (5, [5])


def test_a_host_far_ahead_knows_no_version() -> None:
    of, _, state = versions(True)
    for number in range(1, 12):
        run(of, state, number)
    of._runs.freeze()  # type: ignore[union-attr]
    assert (of.last, of.states()) == (-1, {})


def test_a_thread_that_goes_on_does_not_disturb() -> None:
    of, gpu, state = versions(True)
    run(of, state, 1)
    track = gpu.tracks[1]

    class Racing(FakeTrack):
        def is_done(self, number: int) -> bool:
            of._runs.mark(2)  # type: ignore[union-attr]
            return track.is_done(number)

    of._runs._queued[0] = (1, Racing())  # type: ignore[union-attr]
    of._runs.freeze()  # type: ignore[union-attr]
    assert of.last == 0


def test_a_backend_that_fails_does_not_hold_up_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Device):
        def release(self, all_know: bool = True) -> None:
            raise RuntimeError("no driver")

    device = Device()
    program = Program(lambda: device.is_free.wait(20))
    assert Interruption(ranks(Broken(), device), program.thread).begin(ERROR)
    program.end()
    assert (
        device.releases == 1
        and "posts that cannot be ended: RuntimeError: no driver" in caplog.text
    )


def test_runs_on_several_streams() -> None:
    of, gpu, state = versions(True)
    for number, stream in ((1, 1), (2, 1), (3, 2), (4, 1)):
        gpu.stream = stream
        run(of, state, number)
    gpu.tracks[1].done, gpu.tracks[2].done = 2, 0
    of._runs.freeze()  # type: ignore[union-attr]
    assert [*of.states()] == [2]


def test_a_state_that_no_run_wrote_is_whole() -> None:
    of, _, _ = versions(False)
    of._runs.freeze()  # type: ignore[union-attr]
    assert [*of.states()] == [0]


@pytest.mark.gpu
def test_marks_are_reached_in_the_order_of_a_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    runs = DeviceRuns(CudaDevice(device))
    runs.mark(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    runs.mark(2)
    runs.freeze()
    assert runs.last == 1
    torch.cuda.synchronize()
    again = DeviceRuns(CudaDevice(device))
    again.mark(7)
    torch.cuda.synchronize()
    again.freeze()
    assert again.last == 7
