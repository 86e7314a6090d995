"""Command lines: files that are wrong in many ways, meshes, ranks and stages that mean nothing.

Whatever is given, the command ends with status 0, 1 or 2, the one that is expected, and says why;
what the user's file raises is shown with the file's line, and no line of mdfuse.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from mdfuse.cli.main import app
from mdfuse.errors import PACKAGE
from mdfuse.frontend.cache import FusionCache

HEAD = "import mdfuse as mf, torch\n"
DEFINED = """
def defined(mesh):
    axis = mesh.axes[-1]
    with mf.FusionDefinition("small") as fd:
        x = fd.define_tensor([8, 6], mesh=mesh, layout={axis: mf.Shard(0)})
        fd.add_output(fd.ops.set(x.sum(0)).on(mesh, {}))
        fd.add_output(fd.ops.set(x).on(mesh, {axis: mf.Shard(1)}) * 2)
    return fd
"""
GOOD = "def build(mesh): return defined(mesh), [torch.ones(8, 6)]\n"


@dataclass(frozen=True)
class File:
    """What is in a file, and how a command ends that gets it.

    Attributes:
        text: behind `HEAD` and `DEFINED`; bytes stand alone.
        dump: the exit status of `dump`; -1: 0 or 1.
        run: of `run --sim`, likewise.
        line: a line of it that the message shows, or "".
    """

    text: str | bytes
    dump: int = 1
    run: int = 1
    line: str = ""


def _raising(what: str) -> list[File]:
    """In the file itself, in build, and below it."""
    below = f"def below():\n    {what}\ndef build(mesh):\n    return below()\n"
    return [
        File(f"{what}\n", line=what),
        File(f"def build(mesh):\n    {what}\n", line=what),
        File(below, line=what),
        File(GOOD + f"assert build\nif True:\n    {what}\n", line=what),
    ]


FILES = [
    *[File(GOOD, 0, 0)] * 12,
    File("print('[red]', '\\x1b[1m', 'é')\n" + GOOD, 0, 0),
    File(
        "class build:\n    def __new__(cls, mesh): return defined(mesh), (torch.ones(8, 6),)\n",
        0,
        0,
    ),
    File("build = lambda mesh: (defined(mesh), [torch.ones(8, 6)])\n", 0, 0),
    File("import warnings\nwarnings.warn('old')\n" + GOOD, 0, 0),
    # what build gives
    *[
        File(f"def build(mesh): return {what}\n")
        for what in ("None", "3", "[]", "()", "defined(mesh)", "(1, 2, 3)", "(1, [])", "'ab'")
    ],
    File("def build(mesh): return defined(mesh), 3\n"),
    File("def build(mesh): return defined(mesh), iter([])\n"),
    File("def build(mesh): yield 3\n"),
    File("def build(): return 3\n"),
    File("build = 3\n"),
    File("build = None\n"),
    File("def built(mesh): return 3\n"),
    File(b""),
    # inputs
    *[
        File(f"def build(mesh): return defined(mesh), {what}\n", 0)
        for what in (
            *("[]", "[1, 2]", "[None]", "'a'", "[torch.ones(8)]", "[torch.ones(8, 6).int()]"),
            *("[torch.ones(8, 6).to_sparse()]", "[object()]", "[[[1.0] * 6] * 8]", "['x']"),
            *("[torch.ones(8, 6, device='meta')]", "[1e400]", "[torch.ones(6, 8)]"),
        )
    ],
    # definitions
    File("def build(mesh): return mf.FusionDefinition('empty'), []\n", -1, -1),
    File(
        "def build(mesh):\n    with mf.FusionDefinition('e') as fd: pass\n    return fd, []\n",
        -1,
        -1,
    ),
    File("def build(mesh): return mf.FusionDefinition(3), []\n", -1, -1),
    File("def build(mesh): return defined(mf.DeviceMesh([0, 0])), []\n"),
    File("def build(mesh):\n    fd = defined(mesh)\n    fd.ops.exp(fd)\n    return fd, []\n"),
    # what it raises
    *_raising("1 / 0"),
    *_raising("raise ValueError('a\\nb [red]x[/red] \\udcff \\x00 \\x1b[31m')"),
    *_raising("raise BaseException"),
    *_raising("raise SystemExit('stop')"),
    *_raising("raise SystemExit(7)"),
    *_raising("raise SystemExit"),
    *_raising("raise GeneratorExit"),
    *_raising("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})()"),
    *_raising("raise ExceptionGroup('many', [ValueError(1), KeyError(2)])"),
    *_raising("raise ImportError"),
    *_raising("import no_such_module"),
    *_raising("torch.ones(2) @ torch.ones(3)"),
    *_raising("int('x', base=99)"),
    *_raising("(lambda f: f(f))(lambda f: f(f))"),
    *_raising("raise mf.MdfuseError('mine')"),
    *_raising("mf.DeviceMesh([])"),
    *_raising("raise ValueError('x' * 100_000)"),
    # what is no program
    File("def build(mesh:\n"),
    File("  x = 1\n y = 2\n"),
    File("x = " + "(" * 300 + ")" * 300 + "\n"),
    File("return 3\n", line="return 3"),
    File(b"x = '\xff'\n"),
    File(b"# coding: no-such-code\nx = 1\n"),
    File(b"x = 1\0\n"),
    File(b"\x00\xff" * 200),
    File(b"\xff\xfex\x00=\x001\x00"),
]

#: Name of the file -> whether Python imports files of such names.
NAMES = {
    **dict.fromkeys(("program.py", "p r.py", "é.py", "a\nb.py", "a\rb.py", "[red].py"), True),
    **dict.fromkeys(
        ("\udcff.py", ".py", "-m.py", "x.y.py", "for.py", "%s{0}.py", "a\x1b[31m.py"), True
    ),
    **dict.fromkeys(("program", "program.txt", "program.pyx", "program.PY"), False),
}
STAGES = ("fusion", "layouts", "segments", "host")


def fuzz(drawn: random.Random) -> None:
    """Draw a command line, run it, and look at how it ended."""
    with tempfile.TemporaryDirectory() as folder, _restored():
        if drawn.random() < 0.1:
            _check_ending(_usage(drawn, folder), {0, 2})
        elif drawn.random() < 0.05:
            _bench(drawn, Path(folder))
        else:
            _program(drawn, Path(folder))


@contextmanager
def _restored() -> Iterator[None]:
    """Nothing that a file did to this process stays."""
    path, modules, here, argv = [*sys.path], set(sys.modules), os.getcwd(), sys.argv
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            os.chdir(here)
            sys.argv, sys.path[:] = argv, path
            for name in set(sys.modules) - modules:
                if name.startswith("__mdfuse_"):
                    del sys.modules[name]
            FusionCache.reset()


def _run(arguments: list[str], variables: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1", **(variables or {})}
    )
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        raise error
    return result.exit_code, result.output


def _check_ending(arguments: list[str], statuses: set[int], **variables: str) -> str:
    status, said = _run(arguments, variables)
    assert status in statuses, (arguments, status, statuses, said)
    assert "Traceback" not in said and PACKAGE not in said, said
    assert status == 0 or len(said.split()) > 2, (arguments, said)
    assert len(said) < 20_000, len(said)
    return said


# -- usage -----------------------------------------------------------------------------------------


def _usage(drawn: random.Random, folder: str) -> list[str]:
    """What never gets as far as a file."""
    words = [
        "run",
        "dump",
        "doctor",
        "bench",
        "--help",
        "--version",
        "--sim",
        "-x",
        "",
        "\udcff",
        "é",
    ]
    words += ["tp=2", "--mesh", "no.py", folder, "--rank", "3", "--", "--stage", "host", "[red]"]
    chosen = [drawn.choice(words) for _ in range(drawn.randrange(4))]
    is_doctor = "doctor" in chosen[:1] and "--help" not in chosen
    return [*chosen, "--no-such-option"] if is_doctor or not chosen else chosen


#: What a benchmark does -> the exit status.
BENCHMARKS = {
    "": 0,
    "1 / 0": 1,
    "x = (": 1,
    "raise SystemExit('no more of it')": 1,
    "print('usage: tiny SIZE'); raise SystemExit(2)": 2,
}


def _bench(drawn: random.Random, folder: Path) -> None:
    (folder / "benchmarks").mkdir()
    text = drawn.choice([*BENCHMARKS])
    (folder / "benchmarks" / "tiny.py").write_text(text)
    os.chdir(folder)
    name = drawn.choice(("tiny", "tiny", "other", "", "../tiny", "[red]"))
    arguments = [drawn.choice(("--size", "3", "--help", "é")) for _ in range(drawn.randrange(2))]
    status = 0 if "--help" in arguments else BENCHMARKS[text] if name == "tiny" else 2
    said = _check_ending(["bench", name, *arguments], {status})
    assert (text, name, status) != ("1 / 0", "tiny", 1) or "tiny.py:1   1 / 0" in said


# -- programs --------------------------------------------------------------------------------------


def _program(drawn: random.Random, folder: Path) -> None:
    file, name = drawn.choice(FILES), drawn.choice([*NAMES]) if drawn.random() < 0.3 else "a.py"
    path = folder / name
    text = file.text
    path.write_bytes(
        text if isinstance(text, bytes) else (HEAD + DEFINED + text).encode(errors="surrogatepass")
    )
    if drawn.random() < 0.1:
        path, file = _no_file(drawn, folder), File("", 2, 2)
    elif not NAMES.get(name, True):
        file = File("", 1, 1)
    mesh, is_mesh = _mesh(drawn)
    if drawn.random() < 0.1:
        _alone(drawn, str(path), {2} if not is_mesh or file.run == 2 else {1})
        return
    if drawn.random() < 0.5:
        arguments, status = ["run", str(path), "--sim", mesh], file.run
        if drawn.random() < 0.05:
            arguments, is_mesh = [*arguments, "--mesh", mesh], False
    else:
        arguments, status, is_mesh = _dump(drawn, str(path), file, mesh, is_mesh)
    statuses = {2} if not is_mesh else {0, 1} if status == -1 else {status}
    variables, is_right = _variables(drawn)
    if not is_right and status == 0 and is_mesh:
        statuses = {0, 1}  # the first stages read no variable
    said = _check_ending(arguments, statuses, **variables)
    if file.line and is_mesh and "mf." not in file.line:
        assert re.search(rf":\d+   {re.escape(file.line)}", said), said


def _alone(drawn: random.Random, path: str, statuses: set[int]) -> None:
    """On one process a mesh of two ranks does not fit, and no launcher is what these say."""
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    name, text = drawn.choice((("RANK", "x"), ("RANK", "2"), ("WORLD_SIZE", ""), ("RANK", "-1")))
    given = drawn.choice(({}, launcher | {name: text}, {"PMIX_RANK": "0"}))
    mesh = drawn.choice(("tp=2", "a=3, b=1")) if 1 in statuses else "tp=0"
    _check_ending(["run", path, "--mesh", mesh], statuses, **given)


def _no_file(drawn: random.Random, folder: Path) -> Path:
    if drawn.random() < 0.5:
        (folder / "gone.py").symlink_to(folder / "nowhere")
        return folder / "gone.py"
    return drawn.choice((folder, folder / "none.py", folder / "a.py" / "b.py", Path("/dev")))


def _dump(
    drawn: random.Random, path: str, file: File, mesh: str, is_mesh: bool
) -> tuple[list[str], int, bool]:
    stage = drawn.choice((*STAGES, "host", "host"))
    arguments, status = ["dump", path, "--mesh", mesh], file.dump
    if drawn.random() < 0.6:
        arguments += ["--stage", stage]
    else:
        stage = "host"
    if drawn.random() < 0.1:
        return [*arguments, "--stage", drawn.choice(("HOST", "", "all", "0"))], status, False
    if drawn.random() < 0.3:
        rank = drawn.choice(("0", "0", "-1", "x", "1.5", "9" * 30, "9" * 5000, str(1 << 21)))
        is_usage = stage != "host" or rank in ("-1", "x", "1.5") or len(rank) > 4300
        status = status if rank == "0" or status else 1
        if file.run != file.dump and rank == "0":  # a rank's program is for given inputs
            return ["dump", path, "--mesh", mesh], file.dump, is_mesh
        return [*arguments, "--rank", rank], status, is_mesh and not is_usage
    return arguments, status, is_mesh


AXES = ("tp", "dp", "x", "cls", "self", "axes", "class", "", "a b", "1", "a-b", "é", "tp.x")
SIZES = (
    "1",
    "2",
    "3",
    "4",
    "0",
    "-1",
    "",
    "٣",
    "1_0",
    "+2",
    "1e3",
    "2.0",
    "9" * 5000,
    str(1 << 40),
    "²",
)


def _mesh(drawn: random.Random) -> tuple[str, bool]:
    """A mesh as text, and whether it is one."""
    if drawn.random() < 0.6:
        return drawn.choice(
            (("tp=2", True), ("dp=2,tp=2", True), ("tp=1", True), ("a=3, b=1", True))
        )
    if drawn.random() < 0.2:
        return drawn.choice(
            ("", ",", "=", "==", "tp", "tp=2,", "=3", "tp=2,tp=2", "tp:2", "\udcff=2")
        ), False
    parts = [(drawn.choice(AXES), drawn.choice(SIZES)) for _ in range(drawn.randrange(1, 3))]
    sizes = [size for _, size in parts]
    names = [axis.replace(" ", "") for axis, _ in parts]
    is_mesh = all(re.fullmatch("[1-4]", size) for size in sizes) and len(set(names)) == len(names)
    is_mesh = is_mesh and all(re.fullmatch(r"[a-zé]+", name) for name in names)
    return ",".join(f"{axis}={size}" for axis, size in parts), is_mesh


def _variables(drawn: random.Random) -> tuple[dict[str, str], bool]:
    """Variables of the environment, and whether all of them mean something."""
    if drawn.random() < 0.85:
        return {}, True
    wrong = {"MDFUSE_STREAMS": "0", "MDFUSE_VERIFY": "maybe", "MDFUSE_GRAPH": "é"}
    name = drawn.choice([*wrong])
    return {name: wrong[name]}, False
