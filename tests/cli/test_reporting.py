"""`mdfuse report` writes a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.example_files import FOLDER, example
from typer.testing import CliRunner, Result

import mdfuse as mf
from mdfuse.cli.main import app

MLP, STAGES = (str(FOLDER / f"{name}.py") for name in ("tp_mlp", "pipeline"))


def report(*arguments: str) -> Result:
    env = {"COLUMNS": "300", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["report", *arguments], env=env)


def test_a_page_is_written(tmp_path: Path) -> None:
    out = tmp_path / "séance.html"
    result = report(MLP, "--mesh", "dp=2,tp=4", "-o", str(out), "--costs", "h100")
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    assert f"{out.name}: {len(text.encode()) / 1024:.3g} KiB" in result.output
    assert "<h1>@mlp</h1>" in text and "mesh(dp=2, tp=4)" in text
    assert "predicted: H100, 60 % of its data sheet" in text


@pytest.mark.usefixtures("unjoined")
def test_a_measured_run_is_shown_beside(tmp_path: Path) -> None:
    definition, inputs = example("tp_mlp").build(mf.DeviceMesh.arange(tp=1))
    program = mf.compile(definition, mf.Options(trace=str(tmp_path / "run")))
    program.run(*[x.clone() if isinstance(x, torch.Tensor) else x for x in inputs])
    out = tmp_path / "a.html"
    result = report(MLP, "--mesh", "tp=1", "-o", str(out), "--trace", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    assert "<figcaption>measured</figcaption>" in text
    assert text.count("%h = gelu, ") == 2, "simulated and measured"


def test_a_pipeline_is_shown_by_its_schedule(tmp_path: Path) -> None:
    """Its picture, by unit costs and predicted, with a box for each action."""
    out = tmp_path / "a.html"
    given = ["--mesh", "pp=2", "--microbatches", "2", "--batch", "tokens=0, targets=0"]
    result = report(STAGES, *given, "--schedule", "1f1b", "-o", str(out))
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    assert text.count("1F1: forward of stage 1 for microbatch 1") == 2
    assert "1f1b: 9 in all" in text and "<td>0 (m0)</td><td>0</td>" in text

    table = mf.Schedule.named("forward", stages=2, microbatches=2)
    (tmp_path / "t.csv").write_text(table.to_csv())
    result = report(STAGES, *given, "--schedule", str(tmp_path / "t.csv"))
    assert result.exit_code == 1 and "no 0B0" in result.output


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        ([MLP, "--microbatches", "2"], 2, "microbatches and a batch go together"),
        ([MLP, "--schedule", "1f1b"], 2, "microbatches and a batch go together"),
        ([MLP, "--microbatches", "2", "--batch", "x"], 1, "'x' names no batch"),
        ([MLP, "--mesh", "tp="], 2, "'tp=' is no mesh"),
        ([MLP, "-o", "/nowhere/at/all.html"], 1, "cannot be written"),
        ([MLP, "--trace", str(FOLDER)], 1, "it has no run of @mlp"),
        ([MLP, "--trace", "/nowhere"], 2, "does not exist"),
        ([MLP, "--costs", "abacus"], 1, "costs abacus"),
    ],
)
def test_wrong_arguments(arguments: list[str], status: int, what: str) -> None:
    result = report(*arguments)
    assert result.exit_code == status and what in result.output
