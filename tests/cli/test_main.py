"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from helpers.example_files import FOLDER
from helpers.golden import Golden
from typer.testing import CliRunner, Result

import mdfuse as lib
from mdfuse import DeviceMesh
from mdfuse.cli.launched_runs import compare
from mdfuse.cli.main import app
from mdfuse.cli.program_file import call_build, load_build, parse_mesh
from mdfuse.cli.rich_tables import size_text

HELLO = str(FOLDER / "hello_mesh.py")
MLP = str(FOLDER / "tp_mlp.py")


def mdfuse(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


def shown(*arguments: str) -> str:
    """Output without source lines, which move when an example is edited."""
    result = mdfuse(*arguments)
    assert result.exit_code == 0, result.output
    return re.sub(r" +# .*", "", result.output).rstrip()


def file_with(folder: Path, text: str) -> str:
    (folder / "program.py").write_text(text)
    return str(folder / "program.py")


# -- dump ------------------------------------------------------------------------------------------


def test_dump_fusion(golden: Golden) -> None:
    golden(shown("dump", HELLO, "--stage", "fusion"))


def test_dump_layouts(golden: Golden) -> None:
    golden(shown("dump", HELLO, "--stage", "layouts", "--mesh", "tp=2"))


def test_dump_with_pictures(golden: Golden) -> None:
    text = shown("dump", HELLO, "--stage", "fusion", "--mesh", "tp=2", "--pictures")
    golden(text[text.index("%t: [6]") :])
    assert "%columns, %t_1: [8,6] (tp=S1)" in text and "│  0  │  1  │" in text


def test_dump_segments() -> None:
    text = shown("dump", MLP, "--stage", "segments")
    assert [line.split()[1] for line in text.splitlines() if line.startswith("fusion")] == [
        f"@seg{i}" for i in range(text.count("fusion @"))
    ]
    assert text.count(" = set(") >= 1


def test_dump_host(golden: Golden) -> None:
    golden(shown("dump", HELLO))


def test_dump_one_rank() -> None:
    text = shown("dump", HELLO, "--rank", "3")
    assert "host @hello_mesh on mesh(tp=4) rank 3 {" in text
    assert "team=(0 1 2 3)" in text


def test_dump_two_axes() -> None:
    assert "%x: f32[48,64] of [96,64] (dp=S0, tp=R)" in shown("dump", MLP, "--mesh", "dp=2,tp=4")


# -- run -------------------------------------------------------------------------------------------


def test_run_simulates() -> None:
    text = shown("run", MLP, "--sim", "dp=2,tp=4")
    for what in (
        r"program +@mlp: \d+ segments, \d+ instructions",
        r"mesh +mesh\(dp=2, tp=4\)",
        r"ranks +8, simulated in this process",
        r"Allreduce \(sum\) +tp +1 +18 KiB",
        r"within",
    ):
        assert re.search(what, text), what


def test_one_of_a_kind_is_counted_as_one(tmp_path: Path) -> None:
    """Inputs that are drawn are the same on every rank, each of which calls `build`."""
    text = """import torch, mdfuse as mf
def build(mesh):
    with mf.FusionDefinition("none") as fd:
        fd.add_output(fd.define_tensor([2], mesh=mesh))
    return fd, [torch.randn(2)]
"""
    assert "0 segments, 1 instruction " in shown("run", file_with(tmp_path, text), "--sim", "tp=2")
    build, mesh = load_build(Path(file_with(tmp_path, text))), DeviceMesh.arange(tp=2)
    one, other = (call_build(build, mesh)[1][0] for _ in range(2))
    assert torch.equal(one, other)


def test_run_alone_is_a_world_of_one() -> None:
    text = shown("run", MLP)
    assert re.search(r"ranks +1, no launcher set its variables", text)
    assert re.search(r"all +0 +0 B", text)


def test_run_says_how_to_start_more_ranks(golden: Golden) -> None:
    result = mdfuse("run", MLP, "--mesh", "tp=4")
    assert result.exit_code == 1
    golden(result.output.replace(MLP, "FILE").replace(", or ", ",\n  or ").rstrip())


def test_run_tells_when_an_output_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [torch.zeros(8, 6), torch.zeros(6)]
    monkeypatch.setattr(lib.debug, "reference", lambda fd, inputs: wrong[::-1])
    result = mdfuse("run", HELLO, "--sim", "tp=2")
    assert result.exit_code == 1
    assert result.output.count("DIFFERS") == 2
    assert "differs from one device: sums, t_1" in result.output


def test_differences_are_relative_to_the_largest_element() -> None:
    expected = torch.tensor([1000.0, torch.inf, torch.nan])
    near, far = expected.clone(), expected.clone()
    near[0] += 0.001
    far[2] = 0.0
    found = compare([near, far], [expected, expected])
    assert [d.is_allowed for d in found] == [True, False]
    assert not compare([torch.tensor([1])], [torch.tensor([2])])[0].is_allowed


def test_differences_of_large_numbers_and_of_complex_ones() -> None:
    large = torch.tensor([1 << 53])
    assert not compare([large + 1], [large])[0].is_allowed
    assert compare([large], [large.clone()])[0].largest == 0
    one, i = torch.tensor([1 + 1j, 2]), torch.tensor([0, 1j])
    assert not compare([one + i], [one])[0].is_allowed
    assert compare([one + 1e-6 * i], [one])[0].is_allowed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not define build"),
        ("def build(mesh): return 3", "build(mesh(tp=2)) returned int"),
        (
            "import mdfuse as mf\n"
            "def build(mesh):\n"
            "    with mf.FusionDefinition('empty') as fd:\n"
            "        fd.add_output(fd.define_tensor([2], mesh=mesh) + 1)\n"
            "    return fd, []",
            "0 arguments for 1 input",
        ),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, text: str, message: str) -> None:
    result = mdfuse("run", file_with(tmp_path, text), "--sim", "tp=2")
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


RAISES = """
def below():
    return [1 / 0]

def build(mesh):
    return below()
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            RAISES,
            "UserCodeError: program.py raised ZeroDivisionError: division by zero\n"
            "  program.py:3   return [1 / 0]\n"
            "  program.py:6   return below()\n"
            "  because     build(mesh(tp=2)) did not end well\n",
        ),
        (
            "x = 1\nimport no_such_module",
            "UserCodeError: program.py raised ModuleNotFoundError: No module named "
            "'no_such_module'\n  program.py:2   import no_such_module\n",
        ),
        (
            "x = (\n",
            "UserCodeError: program.py raised SyntaxError: '(' was never closed\n  program.py:1",
        ),
        ("raise SystemExit('no')", "program.py raised SystemExit: no\n  program.py:1   raise"),
        (
            "import torch\ndef build(mesh):\n    return torch.ones(2) @ torch.ones(3)",
            "program.py:3   return torch.ones(2) @ torch.ones(3)\n  because",
        ),
    ],
    ids=["build", "import", "syntax", "exit", "torch"],
)
def test_what_a_file_raises_is_shown_with_its_lines(tmp_path: Path, text: str, says: str) -> None:
    for arguments in (("run", "--sim", "tp=2"), ("dump", "--mesh", "tp=2")):
        result = mdfuse(*arguments, file_with(tmp_path, text))
        assert result.exit_code == 1
        assert says in result.output
        assert not {"Traceback", "running.py", "program_file.py"} & set(
            re.split(r'[\s"/]', result.output)
        )


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"x = '\xff'\n", "SyntaxError"), (b"x = 1\0", "null bytes"), (b"# coding: none\n", "none")],
    ids=["utf-8", "nul", "coding"],
)
def test_what_is_no_text_is_the_files_error(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "program.py").write_bytes(content)
    result = mdfuse("dump", str(tmp_path / "program.py"))
    assert result.exit_code == 1 and result.output.startswith("UserCodeError: program.py raised ")
    assert says in result.output and "Traceback" not in result.output


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """To open it would wait for whoever writes."""
    os.mkfifo(tmp_path / "program.py")
    result = mdfuse("dump", str(tmp_path / "program.py"))
    assert result.exit_code == 1 and "program.py is no Python file" in result.output


def test_inputs_without_values(tmp_path: Path) -> None:
    text = (
        "import mdfuse as mf, torch\n"
        "def build(mesh):\n"
        "    with mf.FusionDefinition('one') as fd:\n"
        "        fd.add_output(fd.define_tensor([2], mesh=mesh) + 1)\n"
        "    return fd, [torch.ones(2, device='meta')]"
    )
    result = mdfuse("run", file_with(tmp_path, text), "--sim", "tp=2")
    assert result.exit_code == 1 and "input 0 of build has no values" in result.output
    assert mdfuse("dump", file_with(tmp_path, text)).exit_code == 0


def test_output_that_an_encoding_lacks(tmp_path: Path) -> None:
    file = file_with(tmp_path, "print('é')\nraise ValueError('ü')")
    command = [sys.executable, "-m", "mdfuse", "dump", file]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "NO_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 1 and done.stdout == b"\\xe9\n"
    assert b"program.py raised ValueError: \\xfc\n" in done.stderr


# -- usage, bench ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "no_such_file.py"),
        ("run", HELLO, "--sim", "tp=0"),
        ("run", HELLO, "--sim", "tp"),
        ("run", HELLO, "--sim", "tp=2,tp=2"),
        ("run", HELLO, "--sim", "=3"),
        ("run", HELLO, "--sim", "tp=٣"),
        ("run", HELLO, "--sim", "tp=" + "9" * 5000),
        ("dump", HELLO, "--mesh", "tp=1048577"),
        ("dump", HELLO, "--mesh", "dp=4096,tp=4096"),
        ("dump", HELLO, "--mesh", "stream=2"),
        ("dump", str(FOLDER)),
        ("run", HELLO, "--sim", "tp=2", "--mesh", "tp=2"),
        ("dump", HELLO, "--stage", "nonsense"),
        ("dump", HELLO, "--stage", "fusion", "--rank", "0"),
        ("bench", "no_such_benchmark"),
        ("nonsense",),
    ],
)
def test_usage_errors_exit_2(arguments: tuple[str, ...]) -> None:
    assert mdfuse(*arguments).exit_code == 2


def test_dump_of_a_rank_that_is_not_there() -> None:
    result = mdfuse("dump", HELLO, "--rank", "4")
    assert result.exit_code == 1
    assert "rank 4 of a program for ranks 0 to 3" in result.output


def test_a_benchmark_ends_as_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for text, status, says in (
        ("raise SystemExit(2)", 2, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('too small')", 1, "too small\n"),
        ("1 / 0", 1, "tiny.py raised ZeroDivisionError: division by zero\n  tiny.py:1   1 / 0"),
    ):
        (tmp_path / "benchmarks" / "tiny.py").write_text(text)
        result = mdfuse("bench", "tiny")
        assert result.exit_code == status and says in result.output, result.output


def test_version() -> None:
    assert shown("--version") == f"mdfuse {lib.__version__}"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mdfuse.config.VERSION"}
    assert "version" in project["project"]["dynamic"]


def test_bench_runs_a_file_and_lists_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "tiny.py").write_text(
        "import sys\nif __name__ == '__main__':\n    print('ran', sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert shown("bench", "tiny", "--size", "3") == "ran ['--size', '3']"
    assert "There are: tiny" in mdfuse("bench", "other").output


def test_module_without_color() -> None:
    """As a process: it starts fast enough for --help, and NO_COLOR leaves no escape sequence."""
    environment = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": "1"}
    command = [sys.executable, "-m", "mdfuse", "dump", HELLO]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "post allreduce" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")],
)
def test_size_text(n: int, text: str) -> None:
    assert size_text(n) == text


def test_parse_mesh() -> None:
    assert repr(parse_mesh("cls=2,self=1")) == "mesh(cls=2, self=1)"
    assert parse_mesh("tp=1048576").size == 1 << 20
    assert repr(parse_mesh("dp=2, tp=4")) == "mesh(dp=2, tp=4)"
