"""Traces are read back by one clock, also those of ranks that died, and merged with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mdfuse as mf
from mdfuse.cli.main import app
from mdfuse.seeing.traces import merge, read

SEND = {"name": "post SendRecv", "part": "post", "handles": [4, 5], "team": [0, 1]}
WAIT = {"name": "wait SendRecv", "part": "wait", "lane": "wait", "handle": 5}


def record(folder: Path, rank: int, *rows: Any, tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"rank{rank}.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in ({"rank": rank}, *rows))
    path.write_text(text + tail)
    return path


def plan(*entries: Any) -> dict[str, Any]:
    return {"plan": 0, "program": "p", "entries": [*entries]}


def two_ranks(folder: Path) -> None:
    """Rank 1's clock is 1000 behind: its 10 is 1010."""
    work = {"name": "%y = exp", "instruction": 2, "source": "a.py:1"}
    record(
        folder, 0, {"clock": 0, "error": 1}, plan(work, {**SEND, "to": 1}, None, WAIT),
        {"run": 0, "plan": 0, "first": 0, "ns": [1000, 1005, 1006]},
        {"run": 0, "plan": 0, "first": 3, "ns": [1007, 1009]}, {"end": 0, "plan": 0},
    )  # fmt: skip
    record(
        folder, 1, {"clock": 1000, "error": 1}, plan({**SEND, "of": 0}, None, WAIT),
        {"run": 0, "plan": 0, "first": 0, "ns": [1, 2, 3, 8]}, {"end": 0, "plan": 0},
    )  # fmt: skip


def test_ranks_by_one_clock(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    found = read(tmp_path)
    assert [(e.rank, e.lane, e.name, e.start_ns, e.stop_ns) for e in found] == [
        (0, "host", "%y = exp", 1000, 1005),
        (1, "host", "post SendRecv", 1001, 1002),
        (1, "wait", "wait SendRecv", 1003, 1008),
        (0, "host", "post SendRecv", 1005, 1006),
        (0, "wait", "wait SendRecv", 1007, 1009),
    ]
    assert {e.flow for e in found} == {None, found[1].flow}, "both sides have one flow"
    assert (found[0].instruction, found[0].source) == (2, "a.py:1")


def test_clocks_drift_from_alignment_to_alignment(tmp_path: Path) -> None:
    """Aligned at 100 and at 1100, when the clock had lost 10: 600 is 5 late."""
    work = {"name": "%y = exp"}
    record(
        tmp_path, 1, {"clock": 1000, "error": 1, "at": 100}, plan(work, work, work),
        {"run": 0, "plan": 0, "first": 0, "ns": [50, 100, 600, 2000]}, {"end": 0, "plan": 0},
        {"clock": 1010, "error": 1, "at": 1100},
    )  # fmt: skip
    found = read(tmp_path)
    assert [e.start_ns for e in found] == [1050, 1100, 1605]
    assert found[-1].stop_ns == 3010


def test_the_nth_post_of_a_team_is_one_communication(tmp_path: Path) -> None:
    post = {**SEND, "name": "post Allreduce[sum]"}
    for rank in (0, 1):
        runs = [
            row
            for n in range(3)
            for row in ({"run": n, "plan": 0, "first": 0, "ns": [n, n + 1]}, {"end": n, "plan": 0})
        ]
        record(tmp_path, rank, plan(post), *runs)
    found = read(tmp_path)
    by_run = [{e.flow for e in found if e.start_ns == n} for n in range(3)]
    assert [len(x) for x in by_run] == [1, 1, 1] and len(set.union(*by_run)) == 3


@pytest.mark.parametrize("tail", ["", '{"run": 0, "pl', '{"end"'])
def test_what_a_rank_wrote_before_it_died_is_read(tmp_path: Path, tail: str) -> None:
    path = record(
        tmp_path, 0, plan({"name": "a"}, None, WAIT, {"name": "b"}),
        {"run": 0, "plan": 0, "first": 0, "ns": [1, 2, 3, 4, 5]}, {"end": 0, "plan": 0},
        {"run": 1, "plan": 0, "first": 0, "ns": [6, 8]}, tail=tail,
    )  # fmt: skip
    names = [(e.name, e.start_ns, e.stop_ns) for e in read(path)]
    assert names == [
        ("a", 1, 2), ("wait SendRecv", 3, 4), ("b", 4, 5), ("a", 6, 8),
        ("wait SendRecv (did not end)", 8, 8),
    ]  # fmt: skip
    record(
        tmp_path, 0, plan({"name": "a"}, None, WAIT),
        {"run": 0, "plan": 0, "first": 0, "ns": [6, 8, 9]}, tail=tail,
    )  # fmt: skip
    last = read(path)[-1]
    assert (last.name, last.start_ns, last.stop_ns) == ("wait SendRecv (did not end)", 9, 9)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", None),
        ("no trace\n", "line 1 is no JSON"),
        ("{}\n", "its first line does not name a rank"),
        ('{"rank": 0}\n{oops}\n{"end": 0}\n', "line 2 is no JSON"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, why: str | None) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(text)
    if why is None:
        assert read(path) == []
        return
    with pytest.raises(mf.ProgramError, match=why):
        read(path)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mf.ProgramError, match=r"has no files rank0\.jsonl"):
        read(tmp_path)
    with pytest.raises(mf.ProgramError, match="No such file"):
        read(tmp_path / "rank0.jsonl")


# -- merging ---------------------------------------------------------------------------------------


def test_traces_are_merged_by_unix_time(tmp_path: Path) -> None:
    """torch's profiler counts microseconds from baseTimeNanoseconds."""
    two_ranks(tmp_path / "run")
    kineto = {
        "baseTimeNanoseconds": 900,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "aten::mm", "pid": 0, "tid": 7, "ts": 0.1, "dur": 0.004},
        ],
    }
    other = {"traceEvents": [{"ph": "X", "name": "s", "pid": 0, "tid": 0, "ts": 0, "dur": 1}]}
    (tmp_path / "kineto.json").write_text(json.dumps(kineto))
    (tmp_path / "simulated.json").write_text(json.dumps(other))
    out = tmp_path / "all.json"
    paths = [tmp_path / "run", tmp_path / "kineto.json", tmp_path / "simulated.json"]
    count = merge(paths, out)
    found = json.loads(out.read_text())
    assert len(found["traceEvents"]) == count and found["baseTimeNanoseconds"] == 900
    slices = {r["name"]: r for r in found["traceEvents"] if r["ph"] == "X"}
    assert slices["%y = exp"]["ts"] == pytest.approx(0.1)
    assert slices["aten::mm"]["ts"] == pytest.approx(0.1), "at the same time"
    assert slices["s"]["ts"] == 0
    assert len({slices[n]["pid"] for n in ("%y = exp", "aten::mm", "s")}) == 3
    names = [r["args"]["name"] for r in found["traceEvents"] if r["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "python (kineto)"]


def test_arrows_of_a_run_lead_from_who_sends_to_who_waits(tmp_path: Path) -> None:
    two_ranks(tmp_path / "run")
    merge([tmp_path / "run"], tmp_path / "a.json")
    rows = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    chains: dict[str, list[Any]] = {}
    for r in rows:
        if r["ph"] in "stf":
            chains.setdefault(r["id"], []).append((r["ph"], r["pid"], r["ts"]))
    assert sorted(chains.values()) == [
        [("s", 0, pytest.approx(5e-3)), ("f", 0, pytest.approx(7e-3))],
        [("s", 0, pytest.approx(5e-3)), ("f", 1, pytest.approx(3e-3))],
        [("s", 1, pytest.approx(1e-3)), ("f", 1, pytest.approx(3e-3))],
    ]


def test_the_command(tmp_path: Path) -> None:
    two_ranks(tmp_path / "run")
    out = tmp_path / "merged.json"
    command = ["trace", "merge", str(tmp_path / "run"), "-o", str(out)]
    result = CliRunner().invoke(app, command, env={"NO_COLOR": "1", "COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    count = len(json.loads(out.read_text())["traceEvents"])
    assert f"merged.json: {count} records" in result.output


@pytest.mark.parametrize(
    ("name", "text", "status"),
    [("x.json", "[1]", 1), ("x.json", "{}", 1), ("x.json", "oops", 1), ("x.jsonl", "oops\n", 1)],
)
def test_the_command_refuses_what_is_none(
    tmp_path: Path, name: str, text: str, status: int
) -> None:
    (tmp_path / name).write_text(text)
    command = ["trace", "merge", str(tmp_path / name), "-o", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == status and "is no trace" in result.output
    assert not (tmp_path / "out.json").exists()


def test_the_command_says_where_it_cannot_write(tmp_path: Path) -> None:
    two_ranks(tmp_path / "run")
    out = tmp_path / "nowhere" / "a.json"
    result = CliRunner().invoke(app, ["trace", "merge", str(tmp_path / "run"), "-o", str(out)])
    assert result.exit_code == 1 and "cannot be written" in result.output
