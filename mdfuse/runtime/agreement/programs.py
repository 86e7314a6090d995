"""Let all ranks agree, before a program's first run, that they can run and run the same."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch

from mdfuse.config import VERSION, Options, backend_choice
from mdfuse.errors import IndexRangeError, ProgramError, message_of, printable
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.bindings import check_bindings
from mdfuse.hir.verify.check import verify_once
from mdfuse.interpreter.garbage import no_collection
from mdfuse.runtime.agreement.concurrent_runs import BECAUSE, HINT, crowd
from mdfuse.runtime.agreement.rendezvous import raise_alike
from mdfuse.runtime.watch.hang_report import ranks_text
from mdfuse.seeing.named_tables import told_apart

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator

#: First words of the report of a rank with a problem: with its arguments, or with an index.
_REFUSED, _OUT_OF_RANGE = "refused: ", "index: "

#: Options that ranks must share: they decide the posts, their form, and their deadlines.
_SHARED = (
    "streams",
    "stream_policy",
    "graph",
    "compile",
    "fast_lane",
    "timeout_s",
    "check_indices",
    "trace",
)


def first_run(
    program: HostProgram,
    options: Options,
    problem: BaseException | None,
    communicator: Communicator,
) -> HostProgram:
    """Let all ranks agree before a program's first run; return this rank's projection.

    Raises:
        ProgramError: the program means nothing, ranks run different ones, or one has a problem; on
            every rank alike.
    """
    local = None
    if problem is None:
        try:
            local = _checked(program, options, communicator.rank)
        except BaseException as error:  # of any type: the others are told before it is raised
            problem = error
    what = fingerprint(program, options) if communicator.size > 1 else None
    costs = partial(_costs, options)
    agree(program.name, problem, communicator, what, costs)
    assert local is not None
    return local


@no_collection()
def _checked(program: HostProgram, options: Options, rank: int) -> HostProgram:
    """Return the projection of a program onto a rank, verified as the options say."""
    if options.verify:
        verify_once(program)
    local = project(program, rank)
    if not options.verify:
        check_bindings(local)
    return local


def _costs(options: Options) -> str:
    """Return the name of the table of costs that a program was compiled with; "" for none."""
    if options.overlap == "never":
        return ""
    return told_apart(options.costs, backend_choice(options.backend).usual)


def agree(
    name: str,
    problem: BaseException | None,
    communicator: Communicator,
    what: str | None = None,
    costs: Callable[[], str] = str,
) -> None:
    """Raise on every rank, unless all ranks are without a problem and run the same.

    Ranks compare digests. Only where these differ do they exchange their programs, one rank for all
    that run the same. Nothing is posted.

    Args:
        name: of the program, for messages.
        problem: this rank's own, or None.
        communicator: of all ranks.
        what: the program of this rank, line by line; all ranks run the same.
        costs: returns the name of its table of costs; ranks may have several, as long as the
            choices made by them are the same.

    Raises:
        BaseException: `problem`, where there is one.
        ProgramError: another rank has one, or runs something else. An IndexRangeError for an
            IndexRangeError.
    """
    digest = None if what is None else hashlib.sha256(what.encode()).hexdigest()
    kind = _OUT_OF_RANGE if isinstance(problem, IndexRangeError) else _REFUSED
    reports = communicator.all_ok(digest if problem is None else f"{kind}{message_of(problem)}")
    problems = [r if r and r.startswith((_REFUSED, _OUT_OF_RANGE)) else None for r in reports]
    raise_alike(problem, problems, partial(_elsewhere, name))
    if any(report != reports[0] for report in reports):
        threads = communicator.crowd = crowd(communicator.rank) or communicator.crowd
        speaks = reports.index(digest) == communicator.rank or threads
        told_here = "\n".join((threads, printable(costs()), what or "")) if speaks else None
        texts = communicator.all_ok(told_here)
        error = _other_programs(reports, [_Said(*(x or "\n\n").split("\n", 2)) for x in texts])
        error.follows = digest == Counter(reports).most_common(1)[0][0]
        raise error


def _elsewhere(name: str, rank: int, report: str) -> ProgramError:
    """Return the error for another rank's problem."""
    if report.startswith(_REFUSED):
        return ProgramError(
            f"rank {rank} refused to run @{name}",
            where=report.removeprefix(_REFUSED).splitlines(),
            because="all ranks run, or none does",
        )
    return IndexRangeError(
        f"rank {rank} met an index out of range in @{name}",
        where=report.removeprefix(_OUT_OF_RANGE).splitlines(),
        because="an error of one rank is one of all",
    )


def fingerprint(program: HostProgram, options: Options) -> str:
    """Return the text that all ranks must share, line by line: versions, options, the program.

    A projection is there by name only, since each rank has another one.
    """
    lines = [
        f"mdfuse {VERSION}",
        f"torch {torch.__version__}",
        "options " + ", ".join(f"{name}={getattr(options, name)!r}" for name in _SHARED),
        f"program @{program.name}",
    ]
    if program.rank is None:
        lines += [f"input %{n}: {program.types[n].shape}" for n in program.inputs]
        # without the users' lines: a program that moved by a line is the same
        lines += re.sub(" *  # .*", "", str(program)).splitlines()
    return "\n".join(map(printable, lines))


class _Said(NamedTuple):
    """A rank's account where ranks differ: its threads, its table of costs, its program."""

    crowd: str
    costs: str
    what: str


def _other_programs(reports: Sequence[str | None], said: Sequence[_Said]) -> ProgramError:
    """Return the error for ranks with different programs: the ranks, and the differing lines."""
    usual = Counter(reports).most_common(1)[0][0]
    there = reports.index(usual)
    others = [rank for rank, report in enumerate(reports) if report != usual]
    where, tables = list[str](), list[str]()
    for report in dict.fromkeys(reports[rank] for rank in others):
        other = reports.index(report)
        where += _difference(there, said[there].what, other, said[other].what)
        if said[there].costs != said[other].costs:
            tables += [f"rank {r}, costs: {said[r].costs or 'none'}" for r in (there, other)]
    crowds = [x.crowd for x in said if x.crowd]
    if crowds:
        return ProgramError(crowds[0], where=[*crowds[1:], *where], because=BECAUSE, hint=HINT)
    what = f"{ranks_text(others)} run{'s' * (len(others) == 1)} another program than rank {there}"
    if tables:
        return ProgramError(
            f"{what}, and ha{'s' if len(others) == 1 else 've'} another table of costs",
            where=[*dict.fromkeys(tables), *where],
            because="a table of costs chooses what is overlapped, another one another program",
            hint="pass a file that mdfuse calibrate wrote as Options(costs=...) on all ranks, the "
            'same one, or Options(overlap="never")',
        )
    return ProgramError(
        what,
        where=where,
        because="all ranks run one program, with the same extents, options and versions",
        hint="compare print(program) on these ranks; "
        "pass the same extents= and Options(costs=...) on all of them",
    )


def _difference(there: int, usual: str, rank: int, other: str) -> list[str]:
    """Return the first line in which two texts differ, as either side has it."""
    pairs = zip_longest(usual.split("\n"), other.split("\n"), fillvalue="(nothing)")
    number, (a, b) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return [
        f"rank {there}, line {number}: {a.strip()}",
        f"rank {rank}, line {number}: {b.strip()}",
    ]
