"""Helper processes: what they compile, and what the rank does where they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.stand_in_compiler import UNITS, StandIn, arguments, expected, stack, until
from torch import Tensor

import mdfuse as mf
from mdfuse import Options
from mdfuse.frontend.cache import FusionCache
from mdfuse.interpreter import threads
from mdfuse.plan import compilation, helper_pool, helper_process, inductor
from mdfuse.plan.artefacts import Artefacts
from mdfuse.plan.packed_graphs import assume_packed, packed, packed_settings, unpacked
from mdfuse.plan.tensor_meta import Form

TESTS = Path(__file__).parent.parent

#: A helper that imports nothing slow; each text that follows is what it does from then on.
FAKE = """
import os, pickle, signal, sys, time
from multiprocessing.connection import Connection
rank = Connection(int(sys.argv[1].split(",")[0]))
"""
IS_READY = """
rank.send((os.getpid(), None))
rank.recv_bytes()
"""
DIES = IS_READY + "rank.recv_bytes(); os.kill(os.getpid(), signal.SIGKILL)"
REFUSES = f"""{IS_READY}
while True:
    rank.recv_bytes()
    rank.send((False, "TypeError: no such operation"))
"""
LIES = REFUSES.replace('False, "TypeError: no such operation"', "True, None")
HANGS = IS_READY + "rank.recv_bytes(); time.sleep(1000)"
CANNOT_START = 'rank.send((os.getpid(), "ImportError: no torch")); time.sleep(1000)'

#: Helpers with `StandIn` for Inductor, in a folder; so many processes begin before any goes on.
STANDS_IN = """
sys.path.insert(0, {tests!r})
import pytest
from helpers import stand_in_compiler
from mdfuse.plan import inductor
from mdfuse.plan.helper_process import main
from pathlib import Path
stand_in_compiler.StandIn(Path({folder!r}), {processes}).install(pytest.MonkeyPatch())
inductor.get_ready_to_compile = lambda: None
inductor.compile_example = lambda device: None
{others}
main(sys.argv[1], int(sys.argv[2]))
"""

#: The first helper that compiles is killed; no process is forked any more.
KILLED = """
stand_in = inductor.compiled
def compiled(traced):
    try:
        (Path({folder!r}) / "killed").mkdir()
    except FileExistsError:
        return stand_in(traced)
    os.kill(os.getpid(), signal.SIGKILL)
inductor.compiled = compiled
"""
LOST = """
with (Path({folder!r}) / "begun").open("a") as begun:
    begun.write(str(len(sys.argv[1].split(","))))
inductor.is_lost_to_gpus = lambda: True
"""
NOT_FORKED = """
def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = fork
"""


def form(*shape: int) -> Form:
    strides = torch.empty(shape, device="meta").stride()
    return shape, strides, torch.float32, torch.device("cpu")


def products(x: Tensor, w: Tensor) -> list[Tensor]:
    """What Inductor compiles without a compiler of C++."""
    return [x @ w, x @ w @ w]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    found = StandIn(tmp_path / "kept")
    found.install(monkeypatch)
    monkeypatch.setenv("MDFUSE_HELPERS", "1")
    compilation._MADE.empty()
    yield found
    compilation._MADE.empty()
    ended()


def ended() -> None:
    """End all helpers of this process, and see that nothing of them is left."""
    pools = [*helper_pool._POOLS]
    helper_pool.end()
    for pool in pools:
        for thread in pool.threads:
            assert thread.join(60)
        assert not pool.helpers and not pool.jobs


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return b") Z " not in Path(f"/proc/{process}/stat").read_bytes()


@contextmanager
def helped_by(script: str, patch: pytest.MonkeyPatch) -> Iterator[dict[int, None]]:
    """In this context helpers run a script; all have a job before the rank takes any back."""
    patch.setattr(helper_pool, "_command", lambda: [sys.executable, "-c", FAKE + script])
    processes, servers = dict[int, None](), list[int]()
    answer, settled = helper_pool._Helper.answer, helper_pool._Pool.settled

    def noted(self: helper_pool._Helper) -> Any:
        if self.server.pid not in servers:
            servers.append(self.server.pid)
        answered = answer(self)
        if self.pid is None:
            processes[answered[0]] = None
        return answered

    def patient(self: helper_pool._Pool, jobs: Any, timeout_s: float) -> Any:
        until(lambda: not self.helpers or any(x.is_begun or x.is_over for x in jobs))
        return settled(self, jobs, timeout_s)

    patch.setattr(helper_pool._Helper, "answer", noted)
    patch.setattr(helper_pool._Pool, "settled", patient)
    yield processes
    ended()
    assert not any(map(is_there, [*processes, *servers]))


def said(timeout_s: float = 600.0) -> str:
    """Run `stack` in this process, compare, and return what `explain` says."""
    compilation._MADE.empty()
    FusionCache.reset()
    program = mf.compile(stack(), Options(compile="always", timeout_s=timeout_s))
    (got,) = program.run(*arguments())
    torch.testing.assert_close(got, expected(*arguments()[:2]))
    return program.explain() + "\n"


# -- a rank and its helpers ------------------------------------------------------------------------


def stands_in(compiler: StandIn, others: str = "") -> str:
    """A script of helpers that compile as the rank does."""
    folder = str(compiler.folder)
    return STANDS_IN.format(
        tests=str(TESTS), folder=folder, processes=compiler.processes,
        others=others.format(folder=folder),
    )  # fmt: skip


@pytest.mark.parametrize("helpers", [1, 2])
def test_helpers_share_the_work(
    helpers: int, compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on before all have begun a function; one process forks several helpers."""
    monkeypatch.setenv("MDFUSE_HELPERS", str(helpers))
    compiler.processes = 1 + helpers
    with helped_by(stands_in(compiler), monkeypatch) as processes:
        told = said()
    assert {*compiler.began} == {*map(str, [os.getpid(), *processes])}
    assert len(processes) == helpers
    assert len(compiler.began) == UNITS
    helped = sum(compiler.began.count(str(x)) for x in processes)
    assert f"{UNITS - helped} compiled, {helped} compiled in helper processes\n" in told
    assert "left to this process" not in told
    assert not [*(compiler.folder / "mdfuse").glob(".*")]


def test_a_helper_that_is_killed_leaves_the_others(
    compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They and the rank begin a function behind its end, of which it tells."""
    monkeypatch.setenv("MDFUSE_HELPERS", "2")
    with helped_by(stands_in(compiler, KILLED), monkeypatch) as processes:
        compiler.processes = 2
        told = said()
    assert len(processes) == 2 and len({*compiler.began}) == 2
    assert len(compiler.began) == UNITS
    assert "    1 left to this process by a helper process: it ended with signal 9\n" in told


def test_helpers_that_were_forked_too_late_for_gpus_begin_anew(
    compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are processes of the same numbers, below the one that forked them."""
    monkeypatch.setenv("MDFUSE_HELPERS", "2")
    compiler.processes = 3
    compiler.folder.mkdir()
    with helped_by(stands_in(compiler, LOST), monkeypatch) as processes:
        told = said()
    assert {*compiler.began} == {*map(str, [os.getpid(), *processes])} and len(processes) == 2
    assert (compiler.folder / "begun").read_text() == "2" + "1" * 2
    assert "left to this process" not in told


def test_helpers_that_are_not_forked(compiler: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDFUSE_HELPERS", "2")
    with helped_by(stands_in(compiler, NOT_FORKED), monkeypatch) as processes:
        told = said()
    assert not processes and compiler.began == [str(os.getpid())] * UNITS
    assert f"{UNITS} left to this process by a helper process: it ended with code 11\n" in told


@pytest.mark.parametrize(
    ("script", "timeout_s", "count", "why"),
    [
        (DIES, 600.0, None, "it ended with signal 9"),
        (REFUSES, 600.0, None, "TypeError: no such operation"),
        (LIES, 600.0, None, "its files are gone"),
        (HANGS, 0.2, 1, "it took longer than timeout_s=0.2"),
        (CANNOT_START, 600.0, None, "ImportError: no torch"),
    ],
)
def test_what_a_helper_does_not_compile_its_rank_does(
    script: str, timeout_s: float, count: int | None, why: str,
    compiler: StandIn, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with helped_by(script, monkeypatch) as processes:
        told = said(timeout_s)
        assert len(processes) == 1
    assert f"{UNITS} compiled\n" in told
    assert f" left to this process by a helper process: {why}\n" in told
    assert count is None or f"    {count} left" in told
    assert compiler.began == [str(os.getpid())] * UNITS


def test_helpers_that_are_there_get_functions_as_they_are_traced(
    compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is traced when they have been offered all others."""
    traced, begun = inductor.traced, list[int]()

    def noted(*given: Any) -> Any:
        begun.append(sum(len(pool.jobs) for pool in helper_pool._POOLS))
        return traced(*given)

    monkeypatch.setattr(inductor, "traced", noted)
    with helped_by(HANGS, monkeypatch):
        helper_pool._start(1, 1)
        told = said(0.2)
    assert begun == [*range(UNITS)]
    assert f"{UNITS} compiled\n" in told
    assert "1 left to this process by a helper process: it took longer" in told


def test_what_cannot_leave_the_rank_is_compiled_there(
    compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(traced: inductor.TracedGraph) -> bytes:
        raise TypeError("a_call cannot leave this process")

    monkeypatch.setattr(helper_pool, "packed", refused)
    with helped_by(HANGS, monkeypatch):
        told = said()
    why = "TypeError: a_call cannot leave this process"
    assert f"{UNITS} left to this process by a helper process: {why}\n" in told


def test_no_helpers(compiler: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setenv("MDFUSE_HELPERS", "0")
    assert f"{UNITS} compiled\n" in said()
    monkeypatch.delenv("MDFUSE_HELPERS")
    monkeypatch.setattr(helper_pool, "_cores", lambda: 3)
    assert f"{UNITS} found in files\n" in said()
    monkeypatch.setenv("MDFUSE_HELPERS", "1")
    monkeypatch.setattr(inductor, "folder", lambda: None)  # as where torch's caches are off
    assert f"{UNITS} compiled\n" in said()


def test_there_are_no_helpers_where_python_starts_no_thread(
    compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a limit of processes is reached; no process is left that nobody serves."""

    def started(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process was started")

    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setenv("MDFUSE_HELPERS", "2")
    monkeypatch.setattr(threads, "_idle", deque())
    monkeypatch.setattr(threading.Thread, "start", full)
    assert f"{UNITS} compiled\n" in said()


@pytest.mark.parametrize("text", ["-1", "257", "two", "1.0"])
def test_a_number_of_helpers_that_cannot_be_read(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDFUSE_HELPERS", text)
    with pytest.raises(mf.ProgramError, match=f"MDFUSE_HELPERS='{text}'") as found:
        helper_pool.start_for(0)
    assert "from 0 (none) to 256" in str(found.value)


def test_helpers_end_with_a_rank_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real helper, while it imports; what its rank has forked does not keep it."""
    monkeypatch.setattr(inductor, "folder", lambda: tmp_path)
    here, there = os.pipe()
    rank = os.fork()
    if not rank:
        helper_pool._start(1, 1)
        kept = os.fork()
        if not kept:
            time.sleep(600)
        told = f"{helper_pool._POOLS[0].helpers[0].server.pid} {kept}\n"
        os.write(there, told.encode())
        time.sleep(600)
    helper, kept = map(int, os.read(here, 100).split())
    assert is_there(helper)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    until(lambda: not is_there(helper))
    os.kill(kept, signal.SIGKILL)


def test_a_process_that_is_forked_has_no_helpers_to_wait_for(
    compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the jobs of the process before at once, and has helpers of its own."""
    with helped_by(HANGS, monkeypatch) as processes:
        helper_pool._start(1, 1)
        job = helper_pool.hand_over("one", inductor.traced(products, [form(3, 5), form(5, 5)]))
        assert job is not None
        until(lambda: job.is_begun)
        child = os.fork()
        if not child:
            is_over = helper_pool.settled([job], 600.0) is job and job.why is None
            with helper_pool._STARTING:
                os._exit(0 if is_over and helper_pool._running() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not job.is_over and len(processes) == 1 and is_there(*processes)


def test_jobs_of_helpers_that_another_thread_ended_are_over(
    compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with helped_by(HANGS, monkeypatch):
        helper_pool._start(1, 1)
        job = helper_pool.hand_over("one", inductor.traced(products, [form(3, 5), form(5, 5)]))
        assert job is not None
        until(lambda: job.is_begun)
        helper_pool.end("another thread has waited for too long")
        assert helper_pool.settled([job], 600.0) is job
    assert job.why == "another thread has waited for too long"


def test_helpers_have_the_mdfuse_of_their_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was imported from a folder that the process has left."""
    (tmp_path / "mdfuse").mkdir()
    (tmp_path / "mdfuse" / "__init__.py").write_text("raise ImportError('another mdfuse')")
    monkeypatch.setattr(sys, "path", ["", *(x for x in sys.path if x != str(TESTS.parent))])
    monkeypatch.chdir(tmp_path)
    *before, code = helper_pool._command()
    code = f"{code.rpartition(';')[0]}; print(mdfuse.__file__, sys.path)"
    told = subprocess.run([*before, code], capture_output=True, text=True, check=True).stdout
    assert told == f"{mf.__file__} {sys.path}\n"
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not helper_pool._has_python()


# -- one helper ------------------------------------------------------------------------------------


def test_a_helper_process_compiles_with_inductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    traced = inductor.traced(products, [form(3, 5), form(5, 5)])
    helper_pool._start(1, 1)
    job = helper_pool.hand_over("products", traced)
    assert job is not None
    until(lambda: job.is_over)
    ended()
    assert job.is_made and job.why is None
    stored = Artefacts(tmp_path / "mdfuse").load("products")
    assert stored is not None
    assert helper_process._answer(str(tmp_path / "mdfuse"), "products", b"") == (False, None)
    function, results = stored
    assert results == traced.results == [form(3, 5), form(3, 5)]
    x, w = torch.randn(3, 5), torch.randn(5, 5)
    for got, want in zip(function(x, w), products(x.double(), w.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_helper_leaves_alone_what_others_compile(tmp_path: Path) -> None:
    artefacts = Artefacts(tmp_path / "kept")
    with artefacts.lock("one", 0.0) as is_mine:
        assert is_mine
        assert helper_process._answer(str(artefacts.folder), "one", b"") == (False, None)
    is_made, why = helper_process._answer(str(artefacts.folder), "one", b"damaged")
    assert not is_made and why is not None and why.startswith("UnpicklingError: ")
    assert not [*artefacts.folder.glob("*.bin")]


def test_what_a_helper_had_written_goes_with_it(tmp_path: Path) -> None:
    for name in (".one.5", ".one.55", ".two.5", "one.bin"):
        (tmp_path / name).touch()
    Artefacts(tmp_path).remove_parts(5)
    assert sorted(x.name for x in tmp_path.iterdir()) == [".one.55", "one.bin"]


def test_a_graph_and_its_settings_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    for name in ("torch", "float32", "contiguous_format"):  # a script's, which helpers lack
        monkeypatch.setattr(f"__main__.{name}", getattr(torch, name, torch), raising=False)

    def function(x: Tensor, i: Tensor, w: Tensor) -> list[Tensor]:
        w.add_(1.0)
        left, right = x.chunk(2, -1)
        table = torch.tensor([1.0, float("inf"), -0.0]) * 2
        dense = (x + 1).clone(memory_format=torch.contiguous_format)
        return [left.sigmoid() * right @ w, x.to(torch.bfloat16), i + torch.arange(3), table, dense]

    counted = (3,), (1,), torch.int64, torch.device("cpu")
    traced = inductor.traced(function, [form(2, 8), counted, form(4, 4)])
    with config.patch(max_autotune=True, epilogue_fusion=False):
        data = packed(traced)
    assert b"__main__" not in data
    threads = torch.get_num_threads()
    with config.patch(max_autotune=False, epilogue_fusion=True, compile_threads=77):
        found = unpacked(data)
        assert (config.max_autotune, config.epilogue_fusion) == (True, False)
        assert config.compile_threads == 77
    assert torch.get_num_threads() == threads
    assert str(found.graph.graph) == str(traced.graph.graph)
    assert found.results == traced.results
    assert [x.shape for x in found.arguments] == [(2, 8), (3,), (4, 4)]
    x, w, i = torch.randn(2, 8), torch.randn(4, 4), torch.arange(3)
    got = found.graph(x, i, w.clone())
    torch.testing.assert_close(got, function(x, i, w.clone()))


def test_settings_travel_before_any_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that compile a helper's kernels stay its own."""
    from torch._inductor import config

    with config.patch(max_autotune=True, worker_start_method="spawn"):
        data = packed_settings(torch.device("cpu"))
    with config.patch(max_autotune=False, worker_start_method="fork"):
        assert assume_packed(data) == torch.device("cpu")
        assert (config.max_autotune, config.worker_start_method) == (True, "fork")
    monkeypatch.setattr(inductor, "settings_of", lambda _: object.__new__(type("Own", (), {})))
    assert helper_pool._settings() == b""


def test_settings_that_cannot_be_read_keep_no_helper_from_its_work() -> None:
    helper_process._warm_up(b"")


def test_an_example_is_compiled_without_a_compiler_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/none")
    inductor.compile_example(torch.device("cpu"))


def test_settings_of_another_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed(inductor.traced(products, [form(3, 5), form(5, 5)]))
    monkeypatch.setattr(inductor, "fingerprint", lambda device: "another machine")
    with pytest.raises(RuntimeError, match="it has another machine, and not "):
        unpacked(data)


def test_a_graph_of_what_is_no_operation_stays() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), x * 2]

    traced = inductor.traced(function, [form(3)])
    with pytest.raises(TypeError, match="cannot leave this process"):
        packed(traced)


# -- how many, and where ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "environment", "quota", "want"),
    [
        (32, {}, (), 32),
        (32, {"LOCAL_WORLD_SIZE": "2"}, (), 16),
        (32, {"LOCAL_WORLD_SIZE": "2"}, (8,), 4),
        (2, {"LOCAL_WORLD_SIZE": "4"}, (), 0),
    ],
)
def test_cores_of_a_rank(
    cores: int, environment: dict[str, str], quota: tuple[int, ...], want: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cores)})
    monkeypatch.setattr(os, "environ", {**rank, **environment} if environment else {})
    monkeypatch.setattr(helper_pool, "_quota", lambda: iter(quota))
    assert helper_pool._cores() == want
    assert helper_pool._paying() == min(8, want // 4)


@pytest.mark.parametrize(
    ("expressions", "on_gpu", "free", "variable", "want"),
    [
        (5000, True, 100 << 30, "", [4]),
        (5000, True, 9 << 30, "", [2]),
        (5000, True, 3 << 30, "", []),
        (5000, True, 3 << 30, "6", [6]),
        (5000, True, 100 << 30, "0", []),
        (5000, False, 0, "6", []),
        (100, True, 100 << 30, "6", []),
    ],
)
def test_long_programs_on_gpus_start_helpers_early(
    expressions: int, on_gpu: bool, free: int, variable: str, want: list[int],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    started = list[int]()
    monkeypatch.setattr(inductor, "folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 140 << 30))
    monkeypatch.setattr(helper_pool, "_cores", lambda: 16)
    monkeypatch.setattr(helper_pool._Pool, "start", lambda self, count: started.append(count))
    monkeypatch.setenv("MDFUSE_HELPERS", variable)
    assert helper_pool.start_for(expressions) is False  # none lives
    assert started == want


@pytest.mark.parametrize(
    ("layers", "variable", "want"),
    [(32, "auto", [4]), (31, "auto", []), (32, "never", [])],
)
def test_modules_of_many_parameters_start_helpers_before_their_import(
    layers: int, variable: str, want: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started, seen = list[int](), list[list[int]]()

    class Layers(torch.nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            seen.append([*started])
            return super().forward(x)

    monkeypatch.setattr(inductor, "folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 30, 140 << 30))
    monkeypatch.setattr(helper_pool, "_settings", lambda: b"")
    monkeypatch.setattr(helper_pool, "_cores", lambda: 16)
    monkeypatch.setattr(helper_pool._Pool, "start", lambda self, count: started.append(count))
    monkeypatch.delenv("MDFUSE_HELPERS", raising=False)
    monkeypatch.setenv("MDFUSE_COMPILE", variable)
    module = Layers(*[torch.nn.Linear(2, 2) for _ in range(layers)])
    mf.from_torch(module, (torch.ones(1, 2),), mesh=mf.DeviceMesh([0]))
    assert seen[0] == started == want


@pytest.mark.parametrize("limit", [1, 10**6])
def test_helpers_that_a_long_program_does_not_need_end(
    limit: int, compiler: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions are in files; a short one leaves them to a program that is lowered."""
    monkeypatch.setenv("MDFUSE_HELPERS", "0")
    said()
    monkeypatch.setenv("MDFUSE_HELPERS", "1")
    monkeypatch.setattr(helper_pool, "_LONG", limit)
    with helped_by(HANGS, monkeypatch):
        helper_pool._start(1, 1)
        assert f"{UNITS} found in files\n" in said()
        assert (helper_pool._running() is None) is (limit == 1)


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        (Options(compile="always", graph="never"), True),
        (Options(), True),
        (Options(graph="never"), False),  # nothing is compiled outside of graphs
        (Options(compile="never"), False),
    ],
)
def test_a_program_that_compiles_offers_its_length(
    options: Options, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = list[int]()
    monkeypatch.setattr(helper_pool, "start_for", lambda n: bool(offers.append(n)))
    FusionCache.reset()
    program = mf.compile(stack(), options)
    assert offers == ([len(stack().fusion.exprs)] if offered else []), program


def test_helpers_join_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "1", "OMPI_COMM_WORLD_RANK": "1",
              "PMIX_RANK": "1", "SLURM_PROCID": "1", "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
    kept = {"CUDA_VISIBLE_DEVICES": "3", "TRITON_CACHE_DIR": "/there", "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(os, "environ", {**theirs, **kept, "MDFUSE_HELPERS": "5"})
    variables = helper_pool._environment(4)
    given = {"MDFUSE_HELPERS": "0", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    assert variables == {**kept, **given, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_COMPILE_THREADS", "9")
    assert helper_pool._environment(4)["TORCHINDUCTOR_COMPILE_THREADS"] == "9"


def test_one_process_times_kernels_of_a_gpu_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock
    from torch._inductor.runtime.benchmarking import Benchmarker, benchmarker

    folder, seen = tmp_path / "mdfuse", list[Any]()
    folder.mkdir(mode=0o700)

    def milliseconds(*given: Any) -> float:
        lock = FileLock(folder / "gpu-7.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            seen.append((*given, "alone"))
        else:
            lock.release()
            seen.append((*given, "not alone"))
        return 1.5

    monkeypatch.setattr(inductor, "milliseconds", milliseconds)
    monkeypatch.setattr(inductor, "folder", lambda: tmp_path)
    properties = SimpleNamespace(uuid="gpu-7", L2_cache_size=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(Benchmarker, "benchmark_gpu", lambda *_, **__: 2.5)
    monkeypatch.setattr(type(benchmarker), "benchmark_gpu", lambda *_, **__: 2.5)
    launch = object()
    call: Callable[..., float] = lambda: benchmarker.benchmark_gpu(launch, rep=2)  # noqa: E731
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda:1"))
    with inductor._timed_alone([on_gpu]):
        assert call() == 1.5
        folder.chmod(0o777)  # others may write there: nothing is locked, and kernels are timed
        assert call() == 1.5
    assert call() == 2.5
    with inductor._timed_alone([torch.ones(1)]):
        assert call() == 2.5
    assert seen == [(launch, 9, "alone"), (launch, 9, "not alone")]
