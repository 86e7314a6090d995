"""Tables of costs by their names, of this machine, and from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import mdfuse as mf
from mdfuse.seeing import H100, UNIT, Link
from mdfuse.seeing.cost_tables import Machine
from mdfuse.seeing.named_tables import here, named


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
    table, told = here()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    assert table is None and len(told) == 1
    assert told[0].startswith("nothing was measured on ") and backend in told[0]


def test_gpus_whose_links_nobody_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of one of them counts where that is asked for."""
    machine = Machine(device="NVIDIA H200", link="peer", backend="nccl")
    monkeypatch.setattr("mdfuse.seeing.cost_tables.folder", lambda: tmp_path)
    monkeypatch.setattr("mdfuse.seeing.named_tables.machine_of", lambda *_: machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert here()[0] is None
    table, told = here(may_be_alone=True)
    assert table is not None and table.is_default
    assert (table.machine.device, table.machine.link) == ("NVIDIA H200", "alone")
    assert not table.costs.links and told == [f"nothing was measured on {machine.text}"]
