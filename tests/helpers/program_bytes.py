"""What the programs of the tests receive on the worst rank. `golden_bytes.json`: what they did.

`PYTHONPATH=.:tests python tests/helpers/program_bytes.py` writes the table anew; do so only where a
program must receive more, and say why in the commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import test_reshard
from frontend import test_ops

import mdfuse as mf
from helpers import sampling, stream_cases, two_stage  # noqa: F401  (the first registers its cases)
from helpers.example_files import SMALL
from helpers.stream_case import CASES as STREAMED
from mdfuse import DeviceMesh

GOLDEN = Path(__file__).with_name("golden_bytes.json")
Table = Iterator[tuple[str, list[int]]]


def received(program: mf.Program) -> int:
    """Bytes that arrive at the rank that receives most."""
    return max(map(program.bytes_received, range(program.host.last_rank + 1)))


def _changes() -> Table:
    yield "transitions", [received(r.compile()) for r in test_reshard.ROWS]
    yield "two stages", [received(c.program()) for c in two_stage.CASES if c.units == "ops"]


def _streamed() -> Table:
    for name, case in STREAMED.items():
        yield f"streamed {name}", [received(case.compile())]


def _examples() -> Table:
    for name, (build, _) in SMALL.items():
        yield f"example {name}", [received(mf.compile(build(DeviceMesh.arange(tp=4))[0]))]


def _swept(*groups: Callable[[], Iterator[test_ops.Case]]) -> Table:
    """Every third of the layouts that each operation is tried with; a third of the operations."""
    cases = [*chain.from_iterable(rows() for rows in groups)]
    for case in (cases[n] for n in sampling.window(len(cases), 3)):
        result = case.plain(*case.tensors())
        for name in ("four", "grid"):
            choices = test_ops.sweep(case, test_ops.MESHES[name], result)[::3]
            programs = (mf.compile(test_ops.define(case, x, law)) for *x, law in choices)
            yield f"{case.name} on {name}", list(map(received, programs))


#: subject -> (name of some programs, what each of them receives)
TABLES: dict[str, Callable[[], Table]] = {
    "changes of layout": _changes,
    "streams": _streamed,
    "examples": _examples,
    "views": lambda: _swept(test_ops.view_rows),
    "reductions": lambda: _swept(test_ops.reduction_rows),
    "contractions": lambda: _swept(test_ops.contraction_rows, test_ops.composite_rows),
}


if __name__ == "__main__":
    sampling.configure(True, 0)
    rows = [f"{json.dumps(n)}: {found}" for table in TABLES.values() for n, found in table()]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
