"""Plans of traced runs: the same calls, with stamps between; what is not traced has none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard, Stream
from mdfuse.backends.base import Posting, Prepared
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.plan.build import build
from mdfuse.plan.device_clock import DeviceClock
from mdfuse.plan.traced import TracedPlan, described, traced
from mdfuse.seeing import UNIT
from mdfuse.seeing.events import lanes
from mdfuse.seeing.trace_files import TraceFile
from mdfuse.seeing.traces import read

pytestmark = pytest.mark.usefixtures("unjoined")

NAMES = ["%t = relu", "%y = mul", "%t_1 = sum", "%t_2 = set"]
ONE = DeviceMesh([0], axes=("tp",))


def defined(mesh: DeviceMesh) -> mf.FusionDefinition:
    with mf.FusionDefinition("traced") as fd:
        x = fd.define_tensor([4, 4], mesh=mesh, layout={"tp": Shard(0)}, name="x")
        y = fd.ops.relu(x) * 2
        fd.add_output(fd.ops.set(fd.ops.sum(y, dim=0)).on(mesh, {}))
    return fd


def on_null(options: Options) -> tuple[HostIrEvaluator, mf.Communicator]:
    comm = mf.init(backend="null", rank=0, size=2)
    program = mf.compile(defined(DeviceMesh.arange(tp=2)))
    evaluator = HostIrEvaluator(program.host, comm, options)
    evaluator.run({"x": torch.ones(2, 4)})
    return evaluator, comm


def lines_of(evaluator: HostIrEvaluator) -> list[str]:
    plan = evaluator.plans.recent
    return [re.sub(r" +# .*", "", line) for line in str(plan).splitlines()]


def test_the_calls_are_the_same_with_stamps_behind(tmp_path: Path) -> None:
    plain, _ = on_null(Options())
    traced, _ = on_null(Options(trace=str(tmp_path)))
    before, after = lines_of(plain), lines_of(traced)
    assert len(before) == len(after)
    assert not [line for line in before if "stamp" in line or ";" in line]
    stamped = [re.sub(r"; stamp\(\)$", "", line) for line in after]
    assert [re.sub(r"^    flush\(\); ", "    ", line) for line in stamped] == before
    waits = [line for line in after if ".wait()" in line]
    assert waits and all(line.startswith("    flush(); ") for line in waits)
    made = [line for line in after[1:-1] if not line.endswith("= None")]
    assert sum("stamp()" in line for line in after) <= len(made)


class AtOnce:
    """A poster behind whose posts the stream goes on, so that nothing is left to wait for."""

    def __call__(self, *given: object) -> Any:
        raise AssertionError("not posted in a test")

    def prepare(self, *given: object) -> Posting:
        return Posting(post=(Prepared(run=print, args=()),), wait=())


def test_a_wait_for_nothing_is_noted() -> None:
    local = mf.compile(defined(DeviceMesh.arange(tp=2))).for_rank(0)
    plan = build(local, lambda call: AtOnce(), torch.device("cpu"), False, [torch.ones(2, 4)])
    names = [entry.name for *_, entry in described(plan, 0)]
    assert [n for n in names if n.startswith(("post", "wait"))] == [
        "post Allreduce[sum]",
        "wait Allreduce[sum]",
    ]


def test_a_run_is_in_the_file(tmp_path: Path) -> None:
    program = mf.compile(defined(ONE), Options(trace=str(tmp_path)))
    x = torch.randn(4, 4)
    for _ in range(3):
        (y,) = program.run(x)
        torch.testing.assert_close(y, (x.relu() * 2).sum(0))
    found = read(tmp_path)
    assert [e.name for e in found] == NAMES * 3
    flat = written_out(program.for_rank(0)).instructions
    assert [flat[e.instruction].fn for e in found[:3]] == ["relu", "mul", "sum"]
    assert all(re.fullmatch(r"test_traced\.py:\d+", e.source) for e in found)
    assert [e.detail for e in found[::4]] == ["run 0", "run 1", "run 2"]
    for row in lanes(found).values():
        for a, b in pairwise(row):
            assert a.start_ns <= a.stop_ns <= b.start_ns
    assert abs(found[0].start_ns / 1e9 - tmp_path.stat().st_mtime) < 3600, "unix time"


def test_iterations_have_their_numbers(tmp_path: Path) -> None:
    with mf.FusionDefinition("chunks") as fd:
        x = fd.define_tensor([4, 2], mesh=ONE)
        fd.add_output((fd.ops.exp(x) * 2).on(ONE, {}, stream=Stream(0, 2)))
    program = mf.compile(fd, Options(trace=str(tmp_path)))
    program.run(torch.ones(4, 2))
    names = [e.name for e in read(tmp_path) if e.name.endswith("= mul")]
    assert len({*names}) == len(names) == 2
    predicted = [e.name for e in program.timeline(UNIT).events if e.name.endswith("= mul")]
    assert names == predicted


def test_what_ran_before_an_error_is_in_the_file(tmp_path: Path) -> None:
    program = mf.compile(defined(ONE), Options(trace=str(tmp_path)))
    program.run(torch.ones(4, 4))
    plan = program.plans.recent
    assert isinstance(plan, TracedPlan)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    scope = plan.function.call.__globals__
    name = next(n for n, f in scope.items() if getattr(f, "__name__", "") == "mul")
    scope[name] = broken
    with pytest.raises(RuntimeError, match="on purpose"):
        program.run(torch.ones(4, 4))
    assert [e.name for e in read(tmp_path)][4:] == ["%t = relu", "%y = mul (did not end)"]


def test_clocks_are_aligned_before_the_first_run_and_at_the_end(tmp_path: Path) -> None:
    mf.compile(defined(ONE), Options(trace=str(tmp_path))).run(torch.ones(4, 4))
    mf.init().close()
    lines = [json.loads(x) for x in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    kinds = [next(k for k in ("clock", "plan", "rank") if k in line) for line in lines]
    assert kinds[:2] == ["rank", "clock"] and kinds[-1] == "clock" and kinds.count("clock") == 2
    first, last = (line for line in lines if "clock" in line)
    assert first["at"] < last["at"] and abs(first["clock"] - last["clock"]) < 10**9


def test_two_programs_share_a_file(tmp_path: Path) -> None:
    options = Options(trace=str(tmp_path))
    for n in (2.0, 3.0):
        with mf.FusionDefinition(f"by{n}") as fd:
            fd.add_output(fd.define_tensor([2], mesh=ONE) * n)
        mf.compile(fd, options).run(torch.ones(2))
    assert len(read(tmp_path)) == 2


def test_indices_are_checked_in_traced_runs_too(tmp_path: Path) -> None:
    with mf.FusionDefinition("lookup") as fd:
        rows = fd.define_tensor([2], torch.int64, ONE)
        fd.add_output(fd.ops.embedding(rows, fd.define_tensor([5, 3], mesh=ONE)))
    program = mf.compile(fd, Options(trace=str(tmp_path), check_indices=True))
    program.run(torch.tensor([4, 0]), torch.ones(5, 3))
    assert "%t = embedding" in {e.name for e in read(tmp_path)}
    with pytest.raises(mf.IndexRangeError):
        program.run(torch.tensor([4, 7]), torch.ones(5, 3))


def test_the_environment_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDFUSE_TRACE", str(tmp_path / "there"))
    mf.compile(defined(ONE)).run(torch.ones(4, 4))
    assert [e.name for e in read(tmp_path / "there")] == NAMES


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    program = mf.compile(defined(ONE), Options(trace=str(tmp_path / "file")))
    with pytest.raises(mf.ProgramError, match="rank 0 cannot write a trace into"):
        program.run(torch.ones(4, 4))


def test_graphs_hold_no_times() -> None:
    with pytest.raises(mf.ProgramError, match=r'trace=.* with graph="always"'):
        Options(trace="there", graph="always")
    with pytest.raises(mf.ProgramError, match="trace=3"):
        Options(trace=3)  # type: ignore[arg-type]


class FakeEvent:
    """A CUDA event of a device that needs 7 ms for everything between two of them."""

    now = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        FakeEvent.now += 7
        self.at = FakeEvent.now

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.at >= 0 and other.at >= 0, "both were recorded"
        return other.at - self.at


def test_a_device_clock_times_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    clock, notes = DeviceClock(torch.device("cuda", 0), [0, 2]), list[str]()
    for _ in range(2):
        clock.begin()
        for n in (0, 2):
            clock.before(n)()
            clock.behind(n, lambda: notes.append("stamp"))()
        found = clock.times()
        ms = 10**6
        assert found == [(0, 7 * ms, 14 * ms), (2, 21 * ms, 28 * ms)]
    assert len(waits) == 4 and len(notes) == 4


def test_work_on_a_device_is_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a CPU with the clock of a GPU: both lanes are there, for work alone."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    program = mf.compile(defined(ONE))
    plan = build(
        program.for_rank(0), lambda _: None, torch.device("cpu"), False,  # type: ignore[arg-type, return-value]
        [torch.ones(4, 4)],
    )  # fmt: skip
    plan = replace(plan, device=torch.device("cuda"))
    vars(plan)["owned"] = replace(plan, device=torch.device("cpu")).owned
    run = traced(plan, TraceFile(tmp_path / "rank0.jsonl", 0))
    (y,) = run.run([torch.ones(4, 4)])
    assert y.tolist() == [8.0] * 4
    found = read(tmp_path)
    by_lane = {lane: [e.name for e in row] for (_, lane), row in lanes(found).items()}
    assert by_lane == {"host": NAMES, "device": NAMES}
    device = [e for e in found if e.lane == "device"]
    start = min(e.start_ns for e in found if e.lane == "host")
    ms = 10**6
    assert [e.start_ns - start for e in device] == [(7 + 14 * n) * ms for n in range(4)]
    assert {e.stop_ns - e.start_ns for e in device} == {7 * ms}


#: A rank that dies in the wait of its second run.
DIES = """
import os, sys, torch, mdfuse as mf
from mdfuse import DeviceMesh, Shard
mf.init(backend="null", rank=0, size=2)
with mf.FusionDefinition("dies") as fd:
    x = fd.define_tensor([4], mesh=DeviceMesh.arange(tp=2), layout={"tp": Shard(0)})
    fd.add_output(fd.ops.set(fd.ops.relu(x)).on(DeviceMesh.arange(tp=2), {}))
program = mf.compile(fd, mf.Options(trace=sys.argv[1]))
program.run(torch.ones(2))
plan = program.plans.recent
scope = plan.function.call.__globals__
flush = next(name for name in scope if name.startswith("flush"))
wrapped = scope[flush]
scope[flush] = lambda: (wrapped(), os.kill(os.getpid(), 9))
program.run(torch.ones(2))
"""


def test_a_rank_that_is_killed_leaves_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    names = [e.name for e in read(tmp_path) if "alloc" not in e.name]
    run = ["%t = relu", "post Allgather"]
    assert names == [*run, "wait Allgather", *run, "wait Allgather (last noted)"]
