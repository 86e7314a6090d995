"""Benchmarks run and store what they measured; how long things take is not tested."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.bare import bare_environment

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


def test_lowering_stores_each_stage(tmp_path: Path) -> None:
    """Each stage takes time although the same stack was lowered before: nothing is found again."""
    script = str(ROOT / "benchmarks" / "lowering.py")
    done = run(tmp_path, script, "--layers", "1,1", "--rounds", "2", "--output", "result.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    times = {row["name"].split(",")[0]: row["rounds"]["ours"] for row in rows}
    assert {"define", "compile", "verify", "first run"} <= times.keys()
    assert min(times["define"] + times["compile"]) > 1e6  # ns; a program found again takes 0.02 ms


@pytest.mark.parametrize("rows", ["graph", "instructions,luck"])
def test_rows_that_are_not_there(rows: str, tmp_path: Path) -> None:
    done = run(tmp_path, str(ROOT / "benchmarks" / "host_latency.py"), "--rows", rows)
    assert done.returncode == 1
    assert "there are instructions, reshard, lowering, memory" in done.stderr


def test_it_explains_itself(tmp_path: Path) -> None:
    done = run(tmp_path, str(ROOT / "benchmarks" / "host_latency.py"), "--help")
    assert done.returncode == 0, done.stderr
    assert "docs/measured.md" in done.stdout and "--rows" in done.stdout


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


def stored(name: str) -> dict[str, dict[str, Any]]:
    """The rows of a result that the repository keeps, by name."""
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    return {row["name"]: row for row in json.loads(file.read_text())["rows"]}


def shown(*heading: str) -> list[list[str]]:
    """The rows of the table of docs/measured.md whose heading has these words."""
    page = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    tables = re.findall(r"^(\|.*\|)\n\|[-|]+\|\n((?:\|.*\|\n)+)", page, re.MULTILINE)
    (rows,) = (rows for first, rows in tables if all(word in first for word in heading))
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows.splitlines()]


def time_of(text: str) -> float:
    """Nanoseconds."""
    number, unit = text.split()
    return float(number) * {"µs": 1e3, "ms": 1e6}[unit]


def test_host_times_that_the_page_shows() -> None:
    loop = "8 x (all-gather, matmul, reduce-scatter)"
    names = {"replayed": f"replayed, {{}}: {loop}", "run": loop}
    rows = shown("host_latency", "by hand")
    assert len(rows) == 6
    for name, what, ours, against, ratio in rows:
        kind, _, measure = what.partition(", ")
        row = stored(f"host_latency-{name}")[names[kind].format(measure)]
        assert time_of(ours) == pytest.approx(row["ours"]["median"], rel=0.005)
        assert time_of(against) == pytest.approx(row["against"]["median"], rel=0.005)
        figures = [row["figure"][quartile] for quartile in ("median", "low", "high")]
        assert [float(x) for x in re.findall(r"[\d.]+", ratio)] == pytest.approx(figures, abs=0.006)


def test_posts_that_the_page_shows() -> None:
    names = ("dist.", "process group", "lane, forked", "lane, at once")
    rows = shown("way to post")
    for name, (_, median) in zip(names, rows, strict=True):
        row = stored("posting_lanes-nccl-2")[f"all-gather: {name}"]
        assert time_of(median) == pytest.approx(row["ours"]["median"], rel=0.005)


def test_definitions_that_the_page_shows() -> None:
    rows = shown("definitions.json")
    for place, name in enumerate(("definitions", "definitions-xeon"), 1):
        file = ROOT / "benchmarks" / "results" / f"{name}.json"
        for row, cells in zip(json.loads(file.read_text())["rows"], rows, strict=False):
            figure = row["figure"]["median"]
            assert time_of(cells[place]) == pytest.approx(figure * 1e3, abs=51)


def test_ucx_and_nccl_that_the_page_shows() -> None:
    file = ROOT / "benchmarks" / "results" / "backends-nccl-ucx-2-cuda.json"
    found = {(r["name"], r["sizes"]): r for r in json.loads(file.read_text())["rows"]}
    for kind, *cells in shown("4 B", "256 MiB"):
        for size, cell in zip(("4 B", "1 MiB", "16 MiB", "256 MiB"), cells, strict=True):
            row = found[f"{kind}: ucx", f"{size} each, 2 ranks"]
            ours, against, ratio = (float(x) for x in re.findall(r"[\d.]+", cell))
            assert ours * 1e3 == pytest.approx(row["ours"]["median"], abs=501)
            assert against * 1e3 == pytest.approx(row["against"]["median"], abs=501)
            assert ratio == pytest.approx(row["figure"]["median"], abs=0.051)
