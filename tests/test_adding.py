"""The page that says which files an addition touches is right about their number and names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mdfuse.errors import CommunicationError
from mdfuse.layouts.kinds import by_kind

ROOT = Path(__file__).resolve().parent.parent


def test_the_files_that_are_named_are_there() -> None:
    text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:mdfuse|tests|docs)/[\w/.]+|pyproject.toml)`", text)
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


#: How many files each addition touches at most, tests and documentation included.
MOST = {"A host instruction": 2, "A kind of communication": 6}


def test_an_addition_touches_few_files() -> None:
    text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    sections = {s.split("\n", 1)[0]: s for s in text.split("\n## ")[1:]}
    for name, most in MOST.items():
        listed = re.findall(r"^\d\. `([\w/.]+)`", sections[name], re.MULTILINE)
        assert len(set(listed)) == len(listed) == most, name


#: A row that the library does not have, and a program of it on two ranks.
CLAMP = """
    Row(
        name="clamp_", operands=_ONE, attrs=(attr("min", "number"), attr("max", "number")),
        makes="value", write=torch.clamp,
    ),
"""
CLAMPED = """
host @clamped on mesh(x=2) {
  input %x: f32[4,3] of [8,3] (x=S0)
  %y: f32[4,3] of [8,3] (x=S0) = clamp_(%x, min=-1.0, max=2.0)
  for %i in 0..2 {
    %y.i: f32[2,3] of [8,3] (x=S0, chunk(0,2,%i)) = chunk(%y)
    %y.i = clamp_(%y.i, min=0.0)
    free %y.i
  }
  %h: f32[4,3] of [8,3] (x=S0) = clamp_(%y, max=1.0) order=[1,0]
  free %y
  return %h
}"""
#: Parses, prints, verifies, simulates, plans, prices and refuses programs of it.
DRIVE = """
import sys, torch, mdfuse as mf
from mdfuse import hir
from mdfuse.hir.verify import verify
from mdfuse.seeing.costs import UNIT
from mdfuse.seeing.timeline import timeline
WRONG = "host @wrong on mesh(x=2) {{ input %x: {} %y: {} = clamp_(%x) return %y }}"
text = sys.argv[1]
program = hir.parse(text)
assert hir.parse(str(program)) == program
verify(program)
x = torch.randn(8, 3)
parts = [{"x": part} for part in x.chunk(2)]
for schedule in (None, 0, 1):
    found = mf.simulate(program, per_rank=parts, schedule=schedule, options=mf.Options(poison=True))
    assert torch.equal(torch.cat([y for y, in found.per_rank]), x.clamp(0, 1))
assert timeline(program, UNIT).seconds == 4
for old, new in (("x=2", "x=1"), ("f32[4,3] of", "f32[8,3] of"), ("f32[2,3]", "f32[4,3]")):
    text = text.replace(old, new)
alone = hir.parse(text)
comm = mf.init(backend="null", rank=0, size=1)
ran = mf.debug.HostIrEvaluator(alone, comm)
assert torch.equal(ran.run({"x": x})[0], x.clamp(0, 1))
assert str(ran.plans.recent).count("clamp(") == 4
for layouts, why in ((("P(sum)", "P(sum)"), "is a term of a sum"), (("R", "S0"), "of it makes")):
    parts = [f"f32[{2 if x == 'S0' else 4}] of [4] (x={x})" for x in layouts]
    try:
        verify(hir.parse(WRONG.format(*parts)))
    except mf.ProgramError as error:
        assert why in error.what
        continue
    raise AssertionError(why)
"""


def test_a_host_instruction_is_one_row(tmp_path: Path) -> None:
    """A copy of the library in which only the table has another row knows the instruction."""
    shutil.copytree(ROOT / "mdfuse", tmp_path / "mdfuse")
    table = tmp_path / "mdfuse" / "hir" / "instructions.py"
    text = table.read_text(encoding="utf-8").replace("_ROWS = (\n", f"_ROWS = ({CLAMP}", 1)
    table.write_text(text.replace("\nfrom mdfuse", "\nimport torch\nfrom mdfuse", 1))
    run = [sys.executable, "-c", DRIVE, CLAMPED]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(run, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("rows", [{"Reduce": 1}, {"Reduce": 1, "Allreduce": 2, "Shout": 3}])
def test_a_table_by_kind_has_the_rows_that_there_are_kinds(rows: dict[str, int]) -> None:
    with pytest.raises(CommunicationError, match=r"no row of Allreduce|a row of Shout"):
        by_kind(rows, ("Reduce", "Allreduce"))
