"""Drawn whole programs beside all options: what runs with the default ones runs with any.

A drawn program (`fuzz.whole`) is compiled and simulated with default options, and compared with
plain torch; then with drawn options, several times. Each pair gives the same outputs, in the same
places, in lockstep and in a random order of streams and transfers; its text reads back; a program
of one rank is run, too. An option may refuse a program by a rule of its own, which stands in
`RULES`; a program that the default options refuse is discarded, and counted.

A finding is made smaller before it is told: pieces of the program, and options, are left out as
long as the same happens.
"""

from __future__ import annotations

import json
import random
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiled_suite import compiled
from helpers.oracle import given_to_each, local_part
from torch import Tensor

import mdfuse as mf
from fuzz.definitions import BY_VALUES, Known, compare
from fuzz.whole import Whole
from mdfuse import FusionCache, MdfuseError, Options, Partial, Program
from mdfuse.errors import PACKAGE
from mdfuse.plan import inductor
from mdfuse.runs.extents import global_extents
from mdfuse.seeing.named_tables import named

#: Sets of options for each program.
SETS = 4

#: What happened so far: programs, pairs, discarded programs, refusals by rule.
TALLY: Counter[str] = Counter()
#: Why programs were discarded.
DISCARDED: Counter[str] = Counter()

SIZES = (0, 1, 7, 64, 1 << 10, 1 << 25, (1 << 62) - 1)
BACKENDS = ("auto", "gloo", "nccl", "mpi", "ucx", "ucc", "symmetric", "null", "nccl, a=mpi",
            "symmetric, b=nccl", "nccl, a=symmetric, meshes=ucc")  # fmt: skip

#: Tables of costs: what pays for overlap, what never does, ends of each number.
TABLES: tuple[dict[str, Any], ...] = (
    {"flops": 1e5, "links": {"*": {"latency_s": 0.0, "bandwidth": 4e4}}},
    {"flops": 1e5, "launch_s": 1e-9, "links": {"*": {"latency_s": 1e-7, "bandwidth": 1e5}}},
    {"flops": 1e3, "bandwidth": 1e3, "links": {"*": {"latency_s": 1e-9, "bandwidth": 1e3}}},
    {"flops": 1e-9, "bandwidth": 1e-9, "launch_s": 1e9, "links": {"*": {"bandwidth": 1e-9}}},
    {"links": {"Allgather": {"latency_s": 1e9}, "*": {"latency_s": 0.0, "slows": 0.95}}},
    {"launch_s": 0.0, "links": {}},
)  # fmt: skip


@cache
def folder() -> Path:
    """Where tables of costs, traces and reports of this process go."""
    found = Path(tempfile.mkdtemp(prefix="mdfuse-options-"))
    for n, table in enumerate(TABLES):
        (found / f"costs{n}.json").write_text(json.dumps(table))
    return found


def drawers() -> dict[str, Callable[[random.Random], Any]]:
    """Option -> draws one of its values."""
    tables = [
        "h100",
        "h100",
        "unit",
        *(str(folder() / f"costs{n}.json") for n in range(len(TABLES))),
    ]
    of: Callable[[Sequence[Any]], Callable[[random.Random], Any]]
    of = lambda values: lambda draw: draw.choice(values)  # noqa: E731
    words = {
        name: of(values)
        for name, values in {
            "stream_policy": ("round_robin", "copy_compute"),
            "graph": ("always", "never"),
            "compile": ("always", "always", "never"),
            "fast_lane": ("never", "always"),
            "overlap": ("auto", "measure", "measure", "never"),
            "context": ("gather", "heads", "ring"),
            "counts": ("host", "device"),
            "sums": ("auto", "apart"),
            "ranges": ("torch", "nvtx"),
        }.items()
    }
    return {
        "backend": of(BACKENDS),
        "streams": of((1, 2, 3, 7, 1024)),
        **words,
        "verify": of((False,)),
        "timeout_s": of((1e-3, 1, 1e9)),
        "poison": of((True,)),
        "check_indices": of((True,)),
        "reduce_dtype": of((torch.float32, torch.float64)),
        "bucket_bytes": of(SIZES),
        "prefetch_bytes": of(SIZES),
        "logits_bytes": of(SIZES),
        # outputs may lie otherwise with it: tests/compiled/test_leaf_program_drawn.py draws it
        "same_bits": of((False,)),
        "costs": of(tables),
        "plans": of((1, 2, 1 << 31)),
        "sizes": of((None, {})),
        "reports": of((str(folder()),)),
        "trace": of((str(folder() / "trace"),)),
    }


#: What decides which program is made: drawn more often.
OFTEN = ("overlap", "costs", "bucket_bytes", "prefetch_bytes", "reduce_dtype", "compile", "backend")


def drawn_options(draw: random.Random) -> dict[str, Any]:
    """Options that are not the default ones: two of them, some, or all."""
    values = drawers()
    assert set(values) == {f.name for f in fields(Options)}, "each option is drawn"
    how = draw.random()
    if how < 0.25:
        names = draw.sample([*values], 2)
    elif how < 0.35:
        names = [*values]
    else:
        names = [x for x in values if draw.random() < (0.5 if x in OFTEN else 0.1)]
        names += ["costs"] * ("overlap" in names and "costs" not in names)
    return {name: values[name](draw) for name in names}


# -- rules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """An option that says no: how its errors begin, and of which options.

    Attributes:
        says: is in the first line of the error.
        where: whether these options may do so.
    """

    says: str
    where: Callable[[dict[str, Any]], bool]


def _is(name: str, *values: Any) -> Callable[[dict[str, Any]], bool]:
    return lambda options: options.get(name) in values


RULES: tuple[Rule, ...] = (
    # A CUDA graph holds nothing that the host does by itself: docs of `Options`.
    Rule('with graph="always"', _is("graph", "always")),
    # It is an error where some work cannot be compiled: docs of `Options`.
    Rule("cannot be compiled", _is("compile", "always")),
    # It comes with CUDA.
    Rule('ranges="nvtx"', _is("ranges", "nvtx")),
    # There may be no heads, or fewer than ranks: docs of `Options`.
    Rule('context="heads" for', _is("context", "heads")),
    # Several axes may split the positions, or a run choose them: docs of long contexts.
    Rule('context="ring" for', _is("context", "ring")),
)


def is_ruled(error: MdfuseError, options: dict[str, Any]) -> bool:
    """Whether an option refuses a program by its rule."""
    return any(rule.says in error.what and rule.where(options) for rule in RULES)


# -- one program -------------------------------------------------------------------------------


class Discarded(Exception):
    """The default options refuse a program, or nothing is left of it."""


@dataclass
class Case:
    """A program that runs with default options."""

    whole: Whole
    inputs: list[Tensor]
    #: what default options make
    usual: list[Tensor]
    layouts: list[Any]
    host: Any


def made(whole: Whole, options: Options | None) -> Program:
    """The program, with numbers everywhere."""
    FusionCache.reset()
    fd = whole.fd
    if whole.kind != "pipeline":
        program = mf.compile(fd, options)
    else:
        batch = {fd.fusion.inputs[n]: 0 for n in whole.batch}
        program = mf.pipeline(
            fd, microbatches=whole.count, batch=batch, schedule=whole.schedule, options=options
        )
    if program.symbolic is not None:
        program = program.with_extents(
            global_extents(program.symbolic.fusion, detached(whole.inputs), None)
        )
    return program


def detached(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in inputs]


def case_of(seed: int, without: frozenset[str] = frozenset()) -> Case:
    """A program beside torch, with default options; Discarded where they refuse it."""
    whole = Whole(seed, without)
    try:
        whole.define()
    except MdfuseError as error:
        raise Discarded(f"definition: {type(error).__name__} {error.what}") from error
    if not whole.outputs:
        raise Discarded("no output")
    try:
        program = made(whole, None)
    except MdfuseError as error:
        raise Discarded(f"{type(error).__name__} {error.what} {error.because}") from error
    inputs = detached(whole.inputs)
    assert len(inputs) == len(whole.fd.inputs)
    layouts = [program.fusion.values[n].layout for n in program.fusion.outputs]
    try:
        usual = simulated(program, inputs, layouts, None)
    except (RuntimeError, IndexError) as error:
        if any(said in str(error) for said in BY_VALUES):
            raise Discarded("values") from error
        raise
    for output, result in zip(whole.outputs, usual, strict=True):
        compare(output.known, result, lambda: str(program))
    return Case(whole, inputs, usual, layouts, program.host)


def simulated(
    program: Program,
    inputs: list[Tensor],
    layouts: list[Any],
    options: Options | None,
    schedule: int | None = None,
    host: Any = None,
) -> list[Tensor]:
    """The outputs of a simulated run; every rank holds its part of them, as the layouts say."""
    options = options or Options(poison=True)
    given = given_to_each(program, inputs)
    found = mf.simulate(host or program, per_rank=given, options=options, schedule=schedule)
    for at, (whole, layout) in enumerate(zip(found.outputs, layouts, strict=True)):
        is_partial = any(isinstance(p, Partial) for p in layout.placements)
        for rank, outputs in enumerate(found.per_rank):
            if rank not in layout.mesh.ranks:
                assert outputs[at] is None, f"rank {rank} is outside of {layout.mesh}"
                continue
            part = local_part(whole, layout, rank)
            assert outputs[at].shape == part.shape, (at, rank, outputs[at].shape, part.shape)
            if not is_partial:
                torch.testing.assert_close(outputs[at], part, rtol=1e-6, atol=1e-6, equal_nan=True)
    return found.outputs


def check_pair(case: Case, said: dict[str, Any], draw: random.Random) -> None:
    """A program with options beside the same with default ones."""
    options = Options(**said)
    program = made(case.whole, options)
    now = [program.fusion.values[n].layout for n in program.fusion.outputs]
    assert now == case.layouts, f"outputs lie otherwise: {now}, by default {case.layouts}"
    for run in runs(program, options, draw, is_new=program.host != case.host):
        results = run(case)
        for output, usual, result in zip(case.whole.outputs, case.usual, results, strict=True):
            compare(output.known, result, lambda: str(program))
            beside = Known(output.known.handle, usual, error=output.known.error)
            compare(beside, result, lambda: str(program))
    if program.host != case.host and draw.random() < 0.5:
        again = mf.hir.parse(str(program.host))
        assert again == program.host or "nan" in str(program.host), "its text reads back otherwise"
    if draw.random() < 0.2:
        assert program.explain()
        program.timeline(named(options.costs if options.costs != "here" else "h100")[0])


def runs(
    program: Program, options: Options, draw: random.Random, is_new: bool
) -> Iterator[Callable[[Case], list[Tensor]]]:
    """Each way to run a program; one that is the same as by default has run so already."""
    seed = draw.randrange(10**6)
    careful = replace(options, verify=True, poison=True)
    if is_new or options.check_indices or not options.verify:
        yield lambda c: simulated(program, c.inputs, c.layouts, options)
    if is_new or draw.random() < 0.2:
        yield lambda c: simulated(program, c.inputs, c.layouts, careful, schedule=seed)
    if program.overlap is not None and program.overlap.is_measured:
        plain = program.overlap.plain
        yield lambda c: simulated(program, c.inputs, c.layouts, careful, host=plain)
    if program.host.last_rank == 0:
        yield lambda c: run_alone(c, options)


def run_alone(case: Case, options: Options) -> list[Tensor]:
    """Run a program of one rank, as that rank; three times, so that forms take turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "compiled", compiled)
        patch.setattr(inductor, "folder", lambda: None)
        program = made(case.whole, replace(options, backend="auto"))
        found: list[Tensor] = []
        for _ in range(3):
            found = program.run(*detached(case.inputs))
        return found


# -- findings ----------------------------------------------------------------------------------


def failure(seed: int, without: frozenset[str], said: dict[str, Any] | None) -> Exception | None:
    """What goes wrong with a program and options; None: those of default."""
    try:
        case = case_of(seed, without)
    except Discarded:
        return None
    except Exception as error:
        return error
    return None if said is None else failure_beside(case, said, seed)


def failure_beside(case: Case, said: dict[str, Any], seed: int) -> Exception | None:
    try:
        check_pair(case, said, random.Random(f"{seed} runs"))
    except MdfuseError as error:
        return None if is_ruled(error, said) else error
    except Exception as error:
        return error
    return None


def place(error: Exception) -> str:
    """What tells findings apart: the type, and the last line of mdfuse, or how an error begins."""
    if isinstance(error, MdfuseError):
        return f"{type(error).__name__} {error.because}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(PACKAGE)] or frames
    return f"{type(error).__name__} {own[-1].filename}:{own[-1].lineno}"


def smallest(
    seed: int, said: dict[str, Any] | None, error: Exception
) -> tuple[frozenset[str], dict[str, Any] | None, Exception]:
    """Fewer pieces and options with which the same goes wrong."""
    where, without = place(error), frozenset[str]()
    for name in [*(said or {})]:
        assert said is not None
        fewer = {k: v for k, v in said.items() if k != name}
        found = failure(seed, without, fewer)
        if found is not None and place(found) == where:
            said, error = fewer, found
    for name in reversed(Whole(seed).define().pieces):
        found = failure(seed, without | {name}, said)
        if found is not None and place(found) == where:
            without, error = without | {name}, found
    return without, said, error


class Wrong(Exception):
    """A finding, made small."""


def tell(seed: int, said: dict[str, Any] | None, error: Exception) -> Wrong:
    """A finding with the smallest program that shows it."""
    without, said, error = smallest(seed, said, error)
    whole = Whole(seed, without).define()
    trace = "".join(traceback.format_exception(error)[-8:])
    how = "" if whole.kind != "pipeline" else f" {whole.count} microbatches, {whole.schedule}"
    return Wrong(
        f"program {seed} ({whole.kind}{how}) without {sorted(without)}\n"
        f"options {'by default' if said is None else said}\n{whole.fd}\n{trace}"
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Torch's warnings say nothing about mdfuse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fuzz(draw: random.Random) -> None:
    """One program, and `SETS` sets of options beside it."""
    seed = draw.randrange(10**12)
    with quietly():
        TALLY["programs"] += 1
        try:
            case = case_of(seed)
        except Discarded as why:
            TALLY["discarded"] += 1
            DISCARDED[str(why)] += 1
            return
        except Exception as error:
            raise tell(seed, None, error) from None
        TALLY[case.whole.kind] += 1
        for _ in range(SETS):
            said = drawn_options(draw)
            TALLY["pairs"] += 1
            error = failure_beside(case, said, seed)
            if error is not None:
                raise tell(seed, said, error) from None


def told() -> Iterator[str]:
    """Yield lines on what was drawn."""
    yield ", ".join(f"{n} {name}" for name, n in TALLY.items())
