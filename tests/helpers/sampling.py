"""How much of a sweep runs whose cases repeat each other: a sample of them, with --whole all.

`times.json` says how long a case of each swept test takes, as it was once measured. A swept test
runs as many of its cases as take `BUDGET` seconds by that file, drawn by a seed that is printed:
`--draw SEED` draws the same ones again. The tests of a file in `TOGETHER` whose times are known,
swept or not, share a budget of its own. No clock is asked, so a run on a slow machine has as many
cases as one on a quick machine.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import seed, settings

Test = TypeVar("Test", bound=Callable[..., Any])

#: Seconds that the cases of one swept test take, about.
BUDGET = 0.35

#: File -> seconds that all its swept tests take: each case imports a model, times a whole program,
#: or runs a benchmark, ranks, a compiler; or is another operation, so that many should run.
TOGETHER = {
    "tests/backends/test_ucx.py": 4,
    "tests/cli/calibration/test_command.py": 8,
    "tests/cli/doctor/test_findings.py": 3,
    "tests/cli/test_main.py": 4,
    "tests/compiled/test_leaf_program.py": 5,
    "tests/compiled/test_overlap.py": 4,
    "tests/compiled/test_pipeline.py": 4,
    "tests/compiled/test_pipeline_turns.py": 3,
    "tests/compiled/test_run.py": 3,
    "tests/frontend/importing/test_activations.py": 4,
    "tests/frontend/importing/test_record_graph_dynamic.py": 4,
    "tests/frontend/importing/test_record_graph_models.py": 3,
    "tests/frontend/importing/test_dispatch.py": 6,
    "tests/frontend/importing/test_gathers_beside.py": 6,
    "tests/frontend/importing/test_gathers_positions.py": 2.0,
    "tests/frontend/importing/test_module_stages.py": 3,
    "tests/frontend/importing/test_plans.py": 3,
    "tests/frontend/importing/test_reached.py": 4,
    "tests/frontend/importing/test_recomputed.py": 4,
    "tests/frontend/importing/test_save_experts.py": 4,
    "tests/frontend/importing/test_train.py": 3,
    "tests/frontend/test_torch_functions_spellings.py": 4,
    "tests/frontend/test_vjps.py": 2.0,
    "tests/frontend/test_vjps_second.py": 3,
    "tests/frontend/test_vjps_special.py": 2.0,
    "tests/hir/emit/test_loops_drawn.py": 4,
    "tests/multidevice/test_backend_c10d.py": 3,
    "tests/multidevice/test_compiling_ranks.py": 2.0,
    "tests/multidevice/test_dtensor_ranks.py": 2.0,
    "tests/multidevice/test_examples_ranks.py": 8,
    "tests/multidevice/test_host_instructions_ranks.py": 2.0,
    "tests/multidevice/test_importing_ranks.py": 4,
    "tests/multidevice/test_overlap_ranks.py": 8,
    "tests/multidevice/test_pipeline_ranks.py": 4,
    "tests/multidevice/test_reshards_ranks.py": 3,
    "tests/multidevice/test_ring_attention_ranks.py": 8,
    "tests/multidevice/test_serving_ranks.py": 19,
    "tests/multidevice/test_symmetric_ranks.py": 14,
    "tests/multidevice/test_training_ranks.py": 2.0,
    "tests/multidevice/test_ucx_ranks.py": 14,
    "tests/passes/sharded/test_attention_masks.py": 4,
    "tests/passes/test_axis_strategy.py": 11,
    "tests/passes/test_choose_orders.py": 4,
    "tests/passes/test_chunk_losses.py": 3,
    "tests/passes/test_count_rows_capacity.py": 4,
    "tests/passes/test_count_rows_microbatches.py": 4,
    "tests/passes/test_microbatches.py": 5,
    "tests/passes/test_collective_matmul.py": 3,
    "tests/plan/test_compilation.py": 5,
    "tests/plan/test_dynamic_shapes.py": 4,
    "tests/plan/test_graphs.py": 4,
    "tests/plan/test_inductor.py": 6,
    "tests/runtime/test_rebuilding.py": 10,
    "tests/runtime/watch/test_reports.py": 3,
    "tests/serving/test_decoder.py": 3,
    "tests/serving/test_engine.py": 3,
    "tests/serving/test_turns.py": 6,
    "tests/test_benchmarks.py": 12,
}

#: Seeds among which drawn examples and inputs are shared out: a run has those of one.
SHARES = 6

#: Tests of which every case runs: each is another input format, or they are counted together.
EVERY = ("tests/test_fuzz.py", "tests/hir/verify/test_check_mutants.py")

_TIMES = Path(__file__).with_name("times.json")

_is_whole, _seed = False, 0


def configure(is_whole: bool, seed: int) -> None:
    """Say, before tests are collected, whether sweeps are run as a whole, or what draws a part."""
    global _is_whole, _seed
    _is_whole, _seed = is_whole, seed


def is_whole() -> bool:
    return _is_whole


def of(whole: int, sample: int) -> int:
    """How many cases are run: all, or a sample."""
    return whole if _is_whole else sample


def window(whole: int, parts: int) -> range:
    """The numbers below `whole`: all, or those of one of equal parts, which the seed chooses.

    >>> len(window(240, 3)), window(240, 3).start in (0, 80, 160)
    (80, True)
    """
    part = _seed % parts
    return range(whole) if _is_whole else range(whole * part // parts, whole * (part + 1) // parts)


def examples(whole: int, parts: int = SHARES) -> Callable[[Test], Test]:
    """Return what makes hypothesis draw `whole` examples, or those of one of `parts` seeds.

    They are the same in every run with the same `--draw`.
    """
    always = settings(max_examples=whole, derandomize=True, deadline=None, database=None)
    if _is_whole:
        return always
    fewer = settings(always, max_examples=math.ceil(whole / parts))
    return lambda test: fewer(seed(_seed % parts)(test))


def times() -> dict[str, float]:
    """Swept test -> seconds of one of its cases."""
    found: dict[str, float] = json.loads(_TIMES.read_text(encoding="utf-8"))
    return found


def seed_of_commit() -> int:
    """The seed of a run that names none: another one for each commit; 0 outside of a clone."""
    shown = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return int(shown.stdout, 16) if shown.returncode == 0 else 0


def beside_part(cases: Sequence[str], parts: int, draw: int) -> set[str]:
    """The cases outside of one of so many parts, which are about as long as each other.

    >>> cases = [f"test_a.py::test_{n}" for n in range(1000)]
    >>> sum(len(beside_part(cases, 4, n)) for n in range(4)), beside_part(cases, 1, 7)
    (3000, set())
    """
    return {x for x in cases if (zlib.crc32(x.encode()) - draw) % parts}


def left_out(cases: Sequence[str], seconds: Mapping[str, float], draw: int) -> set[str]:
    """The cases that a run leaves out.

    Args:
        cases: the ids of tests: `tests/test_a.py::test_b[case]`.
        seconds: swept test, without the brackets -> seconds of a case.
        draw: seeds what draws them.

    >>> cases = [f"test_a.py::test_b[{n}]" for n in range(10)] + ["test_a.py::test_c"]
    >>> gone = left_out(cases, {"test_a.py::test_b": 2.0}, 7)
    >>> len(gone), gone == left_out(cases, {"test_a.py::test_b": 2.0}, 7)
    (8, True)
    """
    swept: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        test, file = case.partition("[")[0], case.partition("::")[0]
        if test in seconds and not test.startswith(EVERY):
            swept[file if file in TOGETHER else test].append(case)
    gone: set[str] = set()
    for name, every in swept.items():
        taken, budget = 0.0, TOGETHER.get(name, BUDGET)
        for case in random.Random(f"{draw} {name}").sample(every, len(every)):
            if taken < budget:
                taken += seconds[case.partition("[")[0]]
            else:
                gone.add(case)
    return gone
