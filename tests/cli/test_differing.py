"""`mdfuse diff`: two programs beside each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.example_files import FOLDER
from helpers.golden import Golden
from typer.testing import CliRunner, Result

from mdfuse import Partial, Shard
from mdfuse.cli.main import app
from mdfuse.cli.stated_layouts import parse_layouts

HELLO = str(FOLDER / "hello_mesh.py")
MLP = str(FOLDER / "tp_mlp.py")


def diff(*arguments: str) -> Result:
    env = {"COLUMNS": "120", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["diff", *arguments], env=env)


def shown(*arguments: str) -> str:
    result = diff(*arguments)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.splitlines())


def test_one_file_on_two_meshes(golden: Golden) -> None:
    """24 KiB: 2 * (n - 1) / n of 96 x 64 f32 for n = 2; 18 KiB of half of the rows for n = 4."""
    golden(shown(MLP, "--mesh", "tp=2", "--mesh", "dp=2,tp=4"))


def test_two_files_on_one_mesh() -> None:
    text = shown(MLP, HELLO, "--mesh", "tp=2")
    assert text.splitlines()[1].split() == ["tp_mlp.py", "hello_mesh.py"]
    assert "-host @mlp on mesh(tp=2) {" in text and "+host @hello_mesh on mesh(tp=2) {" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("  AllToAll"))
    assert row == ["AllToAll", "tp", "-", "-", "1", "48", "B"]


def test_one_file_with_two_layouts() -> None:
    """What is split along the wrong dim is brought there first: 3 of 4 quarters of a quarter."""
    text = shown(MLP, "--layout", "w1=(tp=S1)")
    assert text.splitlines()[1].split() == ["as", "written", "w1=(tp=S1)"]
    assert "-  input %w1: (tp=S0)\n+  input %w1: (tp=S1)" in text
    assert row(text, "AllToAll") == ["tp", "-", "-", "1", "12", "KiB"]
    both = shown(MLP, "--mesh", "tp=2", "--layout", "w*=(tp=R)", "--layout", "w1 = ( tp=S-1 )")
    assert both.splitlines()[1].split() == ["w*=(tp=R)", "w1", "=", "(", "tp=S-1", ")"]
    assert "-  input %w2: (tp=R)\n+  input %w2: (tp=S1)" in both


def test_layouts_of_the_command_line() -> None:
    """As programs print them."""
    found = parse_layouts("q=(dp=P(sum), tp=S0/[4,2,2]);k.*=(); x = tp=S1/3")
    assert found == {
        "q": {"dp": Partial("sum"), "tp": Shard(0, blocks=(4, 2, 2))},
        "k.*": {},
        "x": {"tp": Shard(1, blocks=3)},
    }


def test_what_is_the_same_is_said_to_be() -> None:
    text = shown(MLP, MLP, "--mesh", "tp=2")
    assert "the instructions are the same" in text and "@@" not in text


def test_in_full_the_types_are_compared() -> None:
    text = shown(MLP, "--mesh", "tp=2", "--mesh", "tp=4", "--full")
    assert "-  %t: f32[96,128] of [96,256] (tp=S1) = linear(%x, %w1, %b1)" in text
    assert "+  %t: f32[96,64] of [96,256] (tp=S1) = linear(%x, %w1, %b1)" in text


def row(text: str, name: str) -> list[str]:
    (found,) = (line for line in text.splitlines() if line.strip().startswith(name))
    return found.replace(name, "").split()


def test_times_follow_from_a_table_of_costs(tmp_path: Path) -> None:
    """linear, gelu, linear, reduction, add, add; on one rank the second linear adds the bias."""
    text = shown(MLP, "--mesh", "tp=2", "--mesh", "tp=4", "--costs", "unit")
    assert row(text, "predicted time") == ["6.00", "s", "6.00", "s"]
    table = {"launch_s": 0.001, "links": {"tp": {"latency_s": 0.5}}}
    (tmp_path / "here.json").write_text(json.dumps(table))
    text = shown(MLP, "--mesh", "tp=2", "--mesh", "tp=1", "--costs", str(tmp_path / "here.json"))
    assert row(text, "predicted time") == ["505.0", "ms", "4.0", "ms"]


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        ([MLP], 2, "one file needs it twice"),
        ([MLP, "--mesh", "tp=2"], 2, "one file needs it twice"),
        ([MLP, HELLO, *["--mesh", "tp=2"] * 3], 2, "there are two programs"),
        ([MLP, "--mesh", "tp=2", "--mesh", "tp="], 2, "'tp=' is no mesh"),
        ([MLP, "nowhere.py", "--mesh", "tp=2"], 2, "does not exist"),
        ([MLP, *["--layout", "w1=(tp=R)"] * 3], 2, "there are two programs"),
        ([MLP, "--layout", "w1=S0"], 1, "'w1=S0' is no layout of inputs"),
        ([MLP, "--layout", "w1=(tp=S0)x"], 1, "is no layout of inputs"),
        ([MLP, "--layout", "w1=(tp=S0); w1=(tp=R)"], 1, "is no layout of inputs"),
        ([MLP, "--layout", "w9=(tp=S0)"], 1, "@mlp has no tensor of that name among its inputs"),
        ([MLP, "--layout", "w1=(dp=S0)"], 1, "layout of w1: mesh(tp=4) has no axis 'dp'"),
        ([MLP, "--layout", "b1=(tp=S1)"], 1, "dim 1 is out of range"),
        ([MLP, HELLO, "--costs", "a100"], 1, "ProgramError: costs a100"),
        ([MLP, HELLO, "--costs", MLP], 1, "ProgramError: costs"),
    ],
)
def test_wrong_arguments(arguments: list[str], status: int, what: str) -> None:
    result = diff(*arguments)
    assert result.exit_code == status
    assert what in result.output


@pytest.mark.parametrize("text", ['{"speed": 3}', "[1]", '{"links": {"tp": 3}}', '{"flops": 0}'])
def test_tables_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    result = diff(MLP, HELLO, "--costs", str(tmp_path / "costs.json"))
    assert result.exit_code == 1
    assert "ProgramError" in result.output


def test_what_the_page_shows_is_what_is_printed() -> None:
    page = (FOLDER.parent / "docs" / "seeing.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\n\$ mdfuse diff (.*?)```", page, re.DOTALL)
    command, *lines = block.splitlines()
    assert lines[-1] == "…"
    file, *rest = command.split()
    assert shown(str(FOLDER.parent / file), *rest).splitlines()[: len(lines) - 1] == lines[:-1]
