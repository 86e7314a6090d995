"""Traces are read back by one clock, also those of ranks that died, and merged with others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

import mdfuse as mf
from mdfuse.cli.main import app
from mdfuse.seeing.merging import merge
from mdfuse.seeing.traces import read

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
        ("wait SendRecv (last noted)", 8, 8),
    ]  # fmt: skip
    record(
        tmp_path, 0, plan({"name": "a"}, None, WAIT),
        {"run": 0, "plan": 0, "first": 0, "ns": [6, 8, 9]}, tail=tail,
    )  # fmt: skip
    last = read(path)[-1]
    assert (last.name, last.start_ns, last.stop_ns) == ("wait SendRecv (last noted)", 9, 9)
    record(
        tmp_path, 0, plan({"name": "a"}, None, WAIT),
        {"run": 0, "plan": 0, "first": 0, "ns": [6]}, {"broken": 0, "plan": 0}, tail=tail,
    )  # fmt: skip
    (last,) = read(path)
    assert (last.name, last.start_ns, last.stop_ns) == ("a (did not end)", 6, 6)


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


#: Weeks before the runs: a number that torch rounds, and unix time in nanoseconds.
BASE, NOW = 1_790_857_026_000_000_000, 1_795_684_395_238_176_479


def kineto(path: Path, at_ns: int, pid: int = 1, name: str = "aten::mm") -> Path:
    """Write what torch's profiler writes of a process of host h, with a slice at unix time."""
    at = {"pid": pid, "tid": 0, "ts": (at_ns - BASE) / 1e3}
    rows = [
        {"ph": "M", "name": "process_name", **at, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", **at, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_sort_index", **at, "args": {"sort_index": pid}},
        {"ph": "X", "name": name, **at, "dur": 4.0},
    ]
    path.parent.mkdir(exist_ok=True)
    text = {"host_name": "h", "baseTimeNanoseconds": BASE, "traceEvents": rows}
    path.write_text(json.dumps(text))
    return path


def slices_of(out: Path) -> dict[str, Any]:
    rows = json.loads(out.read_text())["traceEvents"]
    return {r["name"]: r for r in rows if r["ph"] == "X"}


def process_names(out: Path) -> dict[int, str]:
    rows = json.loads(out.read_text())["traceEvents"]
    return {r["pid"]: r["args"]["name"] for r in rows if r["name"] == "process_name"}


def test_a_merged_trace_begins_with_its_first_event(tmp_path: Path) -> None:
    """Not at torch's base; and what follows each other to the nanosecond does so in the file."""
    times = [NOW, NOW + 101, NOW + 207, NOW + 1303]
    record(
        tmp_path / "run", 0, plan({"name": "a"}, {"name": "b"}, {"name": "c"}),
        {"run": 0, "plan": 0, "first": 0, "ns": times}, {"end": 0, "plan": 0},
    )  # fmt: skip
    alone = {"traceEvents": [{"ph": "X", "name": "s", "pid": 0, "tid": 0, "ts": 7, "dur": 1}]}
    (tmp_path / "simulated.json").write_text(json.dumps(alone))
    out = tmp_path / "out.json"
    other = kineto(tmp_path / "torch.json", NOW + 50_000)
    merge([tmp_path / "run", other, tmp_path / "simulated.json"], out)
    assert json.loads(out.read_text())["baseTimeNanoseconds"] == NOW
    found = slices_of(out)
    assert [found[n]["ts"] for n in "abc"] == [0, 0.101, 0.207]
    assert [found[n]["dur"] for n in "abc"] == [0.101, 0.106, 1.096]
    assert found["s"]["ts"] == 0, "a trace without a clock begins with the rest"
    assert found["aten::mm"]["ts"] == pytest.approx(50, abs=2e-3)


def test_what_torch_saw_of_a_rank_stands_beside_it(tmp_path: Path) -> None:
    for rank in (0, 1):
        head = {"rank": rank, "host": "h", "pid": 500 + rank}
        (tmp_path / f"rank{rank}.jsonl").write_text(json.dumps(head) + "\n")
    out = tmp_path / "out.json"
    others = [kineto(tmp_path / f"t{pid}.json", NOW, pid) for pid in (501, 500, 777)]
    merge([tmp_path, *others], out)
    assert [*process_names(out).values()] == [
        "python (rank 1, t501)", "python (rank 0, t500)", "python (t777)",
    ]  # fmt: skip
    rows = json.loads(out.read_text())["traceEvents"]
    sorts = [r["args"]["sort_index"] for r in rows if r["name"] == "process_sort_index"]
    assert sorts == [1, 0, 777]


def test_what_torch_saw_lies_inside_of_what_we_noted(tmp_path: Path) -> None:
    """A run with ranges, seen by both: each product is in its range, and that in its event."""
    with mf.FusionDefinition("seen") as fd:
        x = fd.define_tensor([64, 64], mesh=mf.DeviceMesh([0]))
        fd.add_output(x @ x)
    folder = str(tmp_path / "run")
    program = mf.compile(fd, mf.Options(trace=folder, ranges="torch", compile="never"))
    program.run(torch.rand(64, 64))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        program.run(torch.rand(64, 64))
    mf.init().close()
    found.export_chrome_trace(str(tmp_path / "torch.json"))
    out = tmp_path / "out.json"
    merge([folder, tmp_path / "torch.json"], out)
    rows = [r for r in json.loads(out.read_text())["traceEvents"] if r["ph"] == "X"]
    ours = [r for r in rows if r["name"] == "%t = matmul"][-1]
    (range_,) = (r for r in rows if r["name"].startswith("%t = matmul  "))
    (product,) = (r for r in rows if r["name"] == "aten::mm")
    assert "test_traces.py" in range_["name"] and "test_traces.py" in ours["args"]["source"]
    assert range_["ts"] <= product["ts"] <= range_["ts"] + range_["dur"]
    error_us = 1000  # of clocks, far below what a wrong base would give
    assert ours["ts"] - error_us <= product["ts"] <= ours["ts"] + ours["dur"] + error_us
    assert all(n.endswith("(rank 0, torch)") for n in process_names(out).values() if "(" in n)


def test_packed_traces_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        path = kineto(tmp_path / folder / "trace.json", NOW)
        packed = path.with_suffix(".json.gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        paths.append(packed)
    merge(paths, tmp_path / "out.json")
    names = process_names(tmp_path / "out.json")
    assert [*names.values()] == ["python (a/trace)", "python (b/trace)"]


def test_folders_of_several_hosts_are_one_job(tmp_path: Path) -> None:
    """Arrows lead from one to the other; a rank that comes again is another run."""
    two_ranks(tmp_path / "whole")
    for rank in (0, 1):
        folder = tmp_path / f"host{rank}"
        folder.mkdir()
        name = f"rank{rank}.jsonl"
        (folder / name).write_text((tmp_path / "whole" / name).read_text())
    whole, apart, both = (tmp_path / f"{n}.json" for n in ("w", "a", "b"))
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    merge([tmp_path / "whole"], whole)
    merge(hosts, apart)
    assert json.loads(apart.read_text()) == json.loads(whole.read_text())
    merge([tmp_path / "whole", *hosts], both)
    assert [*process_names(both).values()] == [
        "rank 0 (whole)", "rank 1 (whole)", "rank 0 (host0)", "rank 1 (host0)",
    ]  # fmt: skip
    rows = json.loads(both.read_text())["traceEvents"]
    once = [r["id"] for r in json.loads(whole.read_text())["traceEvents"] if "id" in r]
    assert len({r["id"] for r in rows if "id" in r}) == 2 * len({*once})


def test_a_trace_is_not_written_over(tmp_path: Path) -> None:
    path = kineto(tmp_path / "trace.json", NOW)
    before = path.read_text()
    with pytest.raises(mf.ProgramError, match=r"trace\.json is to be read and to be written"):
        merge([path], path)
    assert path.read_text() == before


def test_traces_are_merged_by_unix_time(tmp_path: Path) -> None:
    """torch's profiler counts microseconds from baseTimeNanoseconds."""
    two_ranks(tmp_path / "run")
    torchs = {
        "baseTimeNanoseconds": 900,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "aten::mm", "pid": 0, "tid": 7, "ts": 0.1, "dur": 0.004},
        ],
    }
    other = {"traceEvents": [{"ph": "X", "name": "s", "pid": 0, "tid": 0, "ts": 0, "dur": 1}]}
    (tmp_path / "kineto.json").write_text(json.dumps(torchs))
    (tmp_path / "simulated.json").write_text(json.dumps(other))
    out = tmp_path / "all.json"
    paths = [tmp_path / "run", tmp_path / "kineto.json", tmp_path / "simulated.json"]
    count = merge(paths, out)
    found = json.loads(out.read_text())
    assert len(found["traceEvents"]) == count and found["baseTimeNanoseconds"] == 1000
    slices = {r["name"]: r for r in found["traceEvents"] if r["ph"] == "X"}
    assert slices["%y = exp"]["ts"] == 0
    assert slices["aten::mm"]["ts"] == pytest.approx(0), "at the same time"
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
    [
        ("x.json", "[1]", 1),
        ("x.json", "{}", 1),
        ("x.json", "oops", 1),
        ("x.jsonl", "oops\n", 1),
        ("x.json", '[{"ph": "X", "ts": "now"}]', 1),
        ("x.json.gz", "\x1f", 1),
        ("x.json", '{"baseTimeNanoseconds": 5, "traceEvents": [{"ts": Infinity}]}', 1),
        ("x.json", '{"baseTimeNanoseconds": 5, "traceEvents": [{"ts": NaN}]}', 1),
        ("x.json", f'[{{"ts": 1{"0" * 400}}}]', 1),
        ("x.json", f'{{"baseTimeNanoseconds": 1{"0" * 400}, "traceEvents": []}}', 1),
    ],
)
def test_the_command_refuses_what_is_none(
    tmp_path: Path, name: str, text: str, status: int
) -> None:
    (tmp_path / name).write_text(text)
    command = ["trace", "merge", str(tmp_path / name), "-o", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == status and "is no trace" in result.output
    assert not (tmp_path / "out.json").exists()


def test_a_packed_trace_that_is_damaged(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(json.dumps([{"ts": n} for n in range(500)]).encode()))
    packed[30:60] = b"\xff" * 30
    (tmp_path / "x.json.gz").write_bytes(packed)
    with pytest.raises(mf.ProgramError, match="is no trace"):
        merge([tmp_path / "x.json.gz"], tmp_path / "out.json")


def test_the_command_says_where_it_cannot_write(tmp_path: Path) -> None:
    two_ranks(tmp_path / "run")
    out = tmp_path / "nowhere" / "a.json"
    result = CliRunner().invoke(app, ["trace", "merge", str(tmp_path / "run"), "-o", str(out)])
    assert result.exit_code == 1 and "cannot be written" in result.output
