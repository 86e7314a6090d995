"""Plans of traced runs: the same calls, with stamps between; what is not traced has none."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.plan.traced import TracedPlan
from mdfuse.seeing.events import lanes
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


def test_a_run_is_in_the_file(tmp_path: Path) -> None:
    program = mf.compile(defined(ONE), Options(trace=str(tmp_path)))
    x = torch.randn(4, 4)
    for _ in range(3):
        (y,) = program.run(x)
        torch.testing.assert_close(y, (x.relu() * 2).sum(0))
    found = read(tmp_path)
    assert [e.name for e in found] == NAMES * 3
    flat = program.for_rank(0).written_out.instructions
    assert [flat[e.instruction].fn for e in found[:3]] == ["relu", "mul", "sum"]
    assert all(re.fullmatch(r"test_traced\.py:\d+", e.source) for e in found)
    assert [e.detail for e in found[::4]] == ["run 0", "run 1", "run 2"]
    for row in lanes(found).values():
        for a, b in pairwise(row):
            assert a.start_ns <= a.stop_ns <= b.start_ns
    assert abs(found[0].start_ns / 1e9 - tmp_path.stat().st_mtime) < 3600, "unix time"


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
    assert names == [*run, "wait Allgather", *run, "wait Allgather (did not end)"]
