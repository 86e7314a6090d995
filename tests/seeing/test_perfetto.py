"""Traces are Chrome trace JSON: slices per lane, arrows from posts to waits, sends to receives."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from helpers.golden import Golden
from helpers.programs import program_text

from mdfuse import hir
from mdfuse.seeing import UNIT
from mdfuse.seeing.timeline import timeline

PAIR = program_text("perfetto/pair")


def traced(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "spür.json"
    timeline(hir.parse(PAIR), UNIT).to_perfetto(str(path))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["displayTimeUnit"] == "ns"
    rows: list[dict[str, Any]] = found["traceEvents"]
    return rows


def test_slices_and_names(tmp_path: Path, golden: Golden) -> None:
    rows = traced(tmp_path)
    lanes = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert len(lanes) == len({*lanes.items()})
    shown = [
        f"{r['pid']} {lanes[r['pid'], r['tid']]}: {r['name']} {r['ts']:.0f}+{r['dur']:.0f} "
        f"instruction {r['args']['instruction']} {r['args'].get('bytes', '')}".rstrip()
        for r in rows
        if r["ph"] == "X"
    ]
    golden("\n".join(shown))
    processes = {r["pid"]: r["args"]["name"] for r in rows if r["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}


def test_arrows_begin_and_end_in_slices(tmp_path: Path) -> None:
    rows = traced(tmp_path)
    slices = {(r["pid"], r["tid"], r["ts"]) for r in rows if r["ph"] == "X"}
    chains: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in rows:
        if r["ph"] in "stf":
            assert (r["pid"], r["tid"], r["ts"]) in slices
            chains[r["id"]].append(r)
    phases = {name: "".join(r["ph"] for r in found) for name, found in chains.items()}
    assert sorted(phases.values()) == ["sf", "stf", "stf"]
    (across,) = (chains[name] for name, p in phases.items() if p == "sf")
    assert [r["pid"] for r in across] == [0, 1], "from the send to its receive"


def test_ranks_that_run_alike_are_named_together(tmp_path: Path) -> None:
    program = hir.parse("""
host @alike on mesh(x=4) {
  input %x: f32[2] (x=R)
  %y: f32[2] (x=R) = exp(%x)
  return %y
}""")
    timeline(program, UNIT).to_perfetto(str(tmp_path / "a.json"))
    rows = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    (name,) = (r["args"]["name"] for r in rows if r["name"] == "process_name")
    assert name == "rank 0 and 3 like it"


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        timeline(hir.parse(PAIR), UNIT).to_perfetto(str(tmp_path / "nowhere" / "a.json"))
