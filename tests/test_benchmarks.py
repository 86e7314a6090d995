"""Benchmarks run and store what they measured; how long things take is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_communicator import bare_environment

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start Python in another folder, without what a launcher sets."""
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**bare_environment(), "PYTHONPATH": path, "NO_COLOR": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_host_latency_stores_every_row(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        *("-m", "mdfuse", "bench", "host_latency"),
        *("--quick", "--output", "found/result.json"),
    )
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "found" / "result.json").read_text())
    names = [row["name"] for row in stored["rows"]]
    for words in ("all-gather, matmul, reduce-scatter", "added", "reshard", "lower", "peak"):
        assert [name for name in names if words in name], words
    assert stored["world"] == {"backend": "null", "ranks": 8, "device": "cpu", "fast_lane": False}
    assert stored["machine"]["processor"] and stored["versions"]["torch"] and stored["date"]
    for row in stored["rows"]:
        rounds = row["rounds"]
        assert len(rounds["ours"]) == len(rounds["against"]) > 0
        assert min(rounds["ours"]) > 0 and min(rounds["against"]) > 0
        assert row["figure"]["least"] <= row["figure"]["median"] <= row["figure"]["most"]


@pytest.mark.parametrize("rows", ["graph", "instructions,luck"])
def test_rows_that_are_not_there(rows: str, tmp_path: Path) -> None:
    done = run(tmp_path, str(ROOT / "benchmarks" / "host_latency.py"), "--rows", rows)
    assert done.returncode == 1
    assert "there are instructions, reshard, lowering, memory" in done.stderr


def test_it_explains_itself(tmp_path: Path) -> None:
    done = run(tmp_path, str(ROOT / "benchmarks" / "host_latency.py"), "--help")
    assert done.returncode == 0, done.stderr
    assert "docs/host_time.md" in done.stdout and "--rows" in done.stdout


BACKENDS = str(ROOT / "benchmarks" / "backends.py")


def test_backends_are_compared(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    arguments = ("gloo", "ucx", "--bytes", "64", "400", "--rounds", "3", "--output", "a.json")
    done = run(tmp_path, *torchrun, "--nproc-per-node", "2", BACKENDS, *arguments)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["name"] for row in rows[::2]] == [
        f"{kind}: ucx" for kind in ("Allreduce", "Allgather", "AllToAll", "Exchange")
    ]
    assert all(row["alternative"] == "gloo" for row in rows)


def test_one_rank_has_nobody_to_communicate_with(tmp_path: Path) -> None:
    done = run(tmp_path, BACKENDS, "gloo", "ucx")
    assert done.returncode == 1 and "one rank has nobody" in done.stderr


def test_one_backend_alone_is_no_comparison(tmp_path: Path) -> None:
    done = run(tmp_path, BACKENDS, "gloo")
    assert done.returncode == 2 and "name two backends, or more" in done.stderr
