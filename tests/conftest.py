"""What all tests share: the plugin that runs some of them on several ranks, and hypothesis."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from mdfuse import hir_lowering
from mdfuse.compiled import program_files
from mdfuse.config import Options
from mdfuse.extents.extent import example, is_symbolic, mapped
from mdfuse.frontend import ops
from mdfuse.frontend.cache import FusionCache
from mdfuse.frontend.importing.aten_table import TABLE as IMPORTED
from mdfuse.frontend.vjps import RULES
from mdfuse.hir import HostProgram
from mdfuse.hir.verify.check import verify_once
from mdfuse.ir.ops import TABLE

if TYPE_CHECKING:
    from helpers.golden import Golden

    from mdfuse.runtime.communicator import Communicator

pytest_plugins = ("multirank.plugin",)


#: Where a program keeps that it was verified.
VERDICT = f"{verify_once.__module__}.{verify_once.__qualname__}"


def _with_numbers(program: HostProgram) -> HostProgram:
    """The program with examples for symbols, which must not notice that it is verified."""
    has_symbols = any(is_symbolic(kind.shape) for kind in program.types.values())
    return mapped(program, example) if has_symbols else program


def _emitted(program: HostProgram, options: Options) -> HostProgram:
    verify_once(_with_numbers(program))
    return program


def _as_it_is(program: HostProgram, options: Options) -> HostProgram:
    return program


def _verified(run: hir_lowering.HostPass, is_ours: bool, is_last: bool) -> hir_lowering.HostPass:
    def verified(program: HostProgram, options: Options) -> HostProgram:
        made, is_known = run(program, options), VERDICT in vars(program)
        is_same = made is program or (
            (is_ours or is_known) and _with_numbers(made) == _with_numbers(program)
        )
        # What a pass left as it was is verified already; a copy would be again, when it runs.
        if is_same and is_known:
            vars(made)[VERDICT] = None
        elif is_last or (is_ours and not is_same):
            verify_once(_with_numbers(made))
        return made

    return verified


#: One process verifies after one pass of so many, and ranks of a world share all of them out.
SHARE_OF_PASSES = 3


@pytest.fixture(autouse=True, scope="session")
def verified_passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every host program that a test lowers is verified, and after passes on the way.

    Ranks of a world lower the same programs, so each verifies after passes of its own: rank 1 of 4
    after the first, the fifth, … A process alone is such a rank, which the seed draws, and verifies
    after the last pass besides; with --whole it verifies after every pass.
    """
    from helpers import sampling

    joint = request.config.pluginmanager.getplugin("multirank-joint")
    if joint is None:
        size = sampling.of(1, SHARE_OF_PASSES)
        rank = request.config.option.draw % size
    else:
        rank, size = joint.launch.rank, joint.launch.size
    passes = hir_lowering.HOST_PASSES
    verified = [
        (name, _verified(run, place % size == rank, joint is None and place == len(passes)))
        for place, (name, run) in enumerate(passes, 1)
    ]
    hir_lowering.HOST_PASSES = (("emit", _emitted if rank == 0 else _as_it_is), *verified)
    yield
    hir_lowering.HOST_PASSES = passes


@pytest.fixture(autouse=True, scope="session")
def lowered_here() -> None:
    """No test reads a program that an earlier one has lowered, unless it says so."""
    program_files.FEWEST = sys.maxsize


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    """What a test registers goes away with it."""
    tables: list[dict[str, Any]] = [TABLE, RULES, ops.BY_NAME, IMPORTED]
    before = [{*t} for t in tables]
    yield
    for table, names in zip(tables, before, strict=True):
        for name in table.keys() - names:
            del table[name]
            vars(ops).pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--launches",
        action="store_true",
        help='all programs with compile="always"; what is traced for the compiler runs as it is',
    )
    parser.addoption(
        "--default",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another default of Options, on all ranks: overlap=measure; may come several times",
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="whole sweeps, also of cases that repeat each other, of which a sample runs otherwise",
    )
    parser.addoption(
        "--draw",
        type=int,
        metavar="SEED",
        help="draw the samples of sweeps by this seed; by default by one of the commit",
    )
    parser.addoption(
        "--parts",
        type=int,
        default=1,
        metavar="N",
        help="one of N parts of the tests that would run otherwise, which --draw chooses, too",
    )
    parser.addoption(
        "--accept",
        action="store_true",
        help="after a wanted change of printed text: write it to the files of tests/golden",
    )


def pytest_configure(config: pytest.Config) -> None:
    from helpers import sampling

    if config.option.draw is None:  # processes of pytest -n get it from this one
        config.option.draw = sampling.seed_of_commit()
    sampling.configure(config.getoption("whole"), config.option.draw)


def pytest_report_header(config: pytest.Config) -> str:
    if _takes_all(config):
        return "swept tests: all cases"
    return f"swept tests: a sample of their cases, --draw {config.option.draw}; --whole runs all"


def _takes_all(config: pytest.Config) -> bool:
    """Whether all cases run: they are asked for, or some tests are named."""
    named = bool(config.option.keyword) or any("::" in x for x in config.args)
    return bool(config.getoption("whole")) or named


@pytest.fixture(autouse=True, scope="session")
def default_options(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --default, what no test asks for is as it says."""
    from helpers import default_options

    with default_options.defaults(default_options.parsed(request.config.getoption("default"))):
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of swept tests; with --launches tests of a program's form.

    These compare printed text or count instructions, in which launches show, or are about passes
    before the one that makes launches.
    """
    from helpers import golden, sampling

    if not any("::" in x for x in config.args) and (files := golden.unread(items)):
        if not config.option.accept:
            raise pytest.UsageError(f"no test reads {', '.join(map(str, files))}: --accept")
        for file in files:
            file.unlink()
    ids = [x.nodeid for x in items]
    gone = sampling.beside_part(ids, config.option.parts, config.option.draw)
    if not _takes_all(config):
        gone |= sampling.left_out(ids, sampling.times(), config.option.draw)
    has_launches = config.getoption("launches")
    dropped = [x for x in items if x.nodeid in gone or (has_launches and _is_about_form(x))]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        without = {*map(id, dropped)}
        items[:] = [x for x in items if id(x) not in without]


#: Where the tests of passes over host programs lie.
_HOST_PASSES = Path(__file__).parent / "hir" / "passes"


#: Tests that look for instructions, or count them, where launches hold several in one.
_COUNTING = (
    "test_check.py::test_every_instruction_is_needed[matmul]",
    "test_check.py::test_every_instruction_is_needed[unary]",
    "test_check_mutants.py::test_enough_mutants",
    "test_layers.py::test_faults_in_layers[sums]",
)


def _is_about_form(item: pytest.Item) -> bool:
    if item.nodeid.rpartition("/")[2] in _COUNTING:
        return True
    return item.path.parent == _HOST_PASSES or "golden" in getattr(item, "fixturenames", ())


def pytest_collection_finish() -> None:
    """Tests and what they import stay, so no collection looks through them: up to 1 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --launches, every program has launches."""
    if not request.config.getoption("launches"):
        yield
        return
    from helpers import compiled_suite

    with compiled_suite.launches():
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest -n tells what it counted to the one that prints it."""
    if found := getattr(node, "workeroutput", {}).get("launches"):
        from helpers import compiled_suite

        compiled_suite.add(found)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None and session.config.getoption("launches"):
        from helpers import compiled_suite

        output["launches"] = compiled_suite.counted()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("launches"):
        from helpers import compiled_suite

        terminalreporter.section("launches")
        for line in compiled_suite.told():
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def undefined() -> None:
    """No definition of an earlier test is found again."""
    FusionCache.reset()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a text with the one in the test's own file."""
    from helpers import golden

    return partial(
        golden.same, file=golden.path(request.node), is_accepted=request.config.option.accept
    )


@pytest.fixture
def unjoined() -> Iterator[None]:
    """No communicator before and after; one that an earlier test left is closed."""
    from mdfuse.runtime import communicator

    def leave() -> None:
        if communicator._live is not None:
            communicator._live.close()

    leave()
    yield
    leave()


@pytest.fixture
def alone(unjoined: None) -> Communicator:
    """The one rank there is."""
    from mdfuse.runtime.communicator import init

    return init()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Times are not asserted; and ranks must draw the same examples as each other."""
    settings.register_profile("one process", deadline=None)
    settings.register_profile("ranks", deadline=None, derandomize=True, database=None)
    is_rank = session.config.pluginmanager.has_plugin("multirank-joint")
    settings.load_profile("ranks" if is_rank else "one process")
