"""Tables of costs by their names, of this machine, and from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mdfuse as mf
from mdfuse.seeing import H100, UNIT, Costs, CostTable, Link, LinkKey
from mdfuse.seeing.cost_tables import machine_of
from mdfuse.seeing.named_tables import named, table_here


def test_names() -> None:
    assert named("h100") == (H100, 0.0)
    assert named("unit") == (UNIT, 0.0)


def test_a_file_of_fields(tmp_path: Path) -> None:
    """It has the name of the file, unless it says another."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"launch_s": 2.0, "links": {"tp": {"bandwidth": 8.0}}}))
    costs, error = named(str(path))
    assert (costs.name, costs.launch_s, error) == ("mine", 2.0, 0.0)
    assert costs.link("Allreduce", "tp") == Link(bandwidth=8.0)
    path.write_text(json.dumps({"name": "other"}))
    assert named(str(path))[0].name == "other"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "mapping"),
        ('{"speed": 3}', "speed"),
        ('{"flops": -1}', "it is a speed"),
        ('{"format": "another"}', "it does not say"),
        ('{"links": {"tp": 3}}', "not int"),
    ],
)
def test_files_that_are_no_tables(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(mf.ProgramError, match=why) as caught:
        named(str(path))
    assert str(path) in str(caught.value) and "mdfuse calibrate wrote" in str(caught.value)


def test_no_such_file() -> None:
    with pytest.raises(mf.ProgramError, match="No such file") as caught:
        named("h200")
    assert "one of h100, unit, here" in str(caught.value)


def test_a_machine_without_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdfuse.seeing.cost_tables.folder", lambda: tmp_path)
    table, told = table_here()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    assert table is None and len(told) == 1
    assert told[0].startswith("nothing was measured on ") and backend in told[0]


def test_a_table_of_one_rank_says_that_communications_take_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mdfuse.seeing.cost_tables.folder", lambda: tmp_path)
    is_gpu = torch.cuda.is_available()
    machine = machine_of(torch.device("cuda" if is_gpu else "cpu"), "nccl" if is_gpu else "gloo")
    one = CostTable(
        costs=Costs(), machine=machine, ranks=1, date="2026-11-24", mean_error=0.0, p95_error=0.0
    )
    (tmp_path / "one.json").write_text(one.as_json())
    table, told = table_here()
    assert table is not None and len(told) == 1
    assert "they are taken to take no time; mdfuse calibrate on several ranks" in told[0]
    costs = Costs(links={LinkKey(): Link(1e-6), LinkKey(backend="symmetric"): Link(2e-6)})
    (tmp_path / "two.json").write_text(replace(one, ranks=2, costs=costs).as_json())
    for backend, latency, count in (("auto", 1e-6, 0), ("symmetric", 2e-6, 0), ("mpi", 1e-6, 1)):
        table, told = table_here(backend)
        assert table is not None and table.costs.link("Send", "tp").latency_s == latency
        assert len(told) == count
    path = str(tmp_path / "two.json")
    assert named(path, "symmetric")[0].link("Send", "tp").latency_s == 2e-6
    assert named(path)[0].link("Send", "tp").latency_s == 1e-6


DEEP = ("[" * 100_000, '{"a":' * 70 + "1" + "}" * 70, '{"launch_s": [[[1]]]}')


@pytest.mark.parametrize("text", DEEP)
def test_brackets_in_brackets(text: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(mf.ProgramError, match=r"costs\.json"):
        named(str(file))
