"""All figures of several GPUs of one host in one go, and one table of them at its end.

python benchmarks/many_gpus.py                              # all GPUs that there are
python benchmarks/many_gpus.py --only tests,experts         # some steps
python benchmarks/many_gpus.py --ranks 2 --device cpu --small --only experts,context

Correctness first: the tests on ranks, with default options, by the process group and by the
symmetric backend. Then whole models, experts, split positions, products beside communications, and
layers. Each step is a command of its own with a time limit; a step that fails does not hide the
later ones. Results of the benchmarks, and `many_gpus.json` with how each step ended, are in
`--folder`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from mdfuse.cli import screen

_ROOT = Path(__file__).resolve().parent.parent
_BENCHMARKS = _ROOT / "benchmarks"

#: Seconds between the end of a step's time and SIGKILL.
_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, and where its results are.

    Attributes:
        name: of the step; steps of one kind begin alike.
        command: what is run.
        limit_s: how long it may take.
        results: the JSON file that it writes; None for tests.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int
    results: Path | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a step: its status, its seconds, and the last line that it printed."""

    name: str
    command: str
    status: int
    took_s: float
    last: str


def _tests() -> Iterator[Step]:
    command = (
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--launcher", "torchrun",
        "tests/multidevice",
    )  # fmt: skip
    for name, before, options in (
        ("fast lane", (), ()),
        ("process group", (), ("--default", "fast_lane=never")),
        ("symmetric", ("env", "MDFUSE_BACKEND=symmetric"), ()),
    ):
        yield Step(name=f"tests, {name}", command=(*before, *command, *options), limit_s=900)


def steps(ranks: int, few: Sequence[str], folder: Path) -> Iterator[Step]:
    """Return all steps.

    Args:
        ranks: as many as GPUs.
        few: arguments of each benchmark that make it small.
        folder: of the results.
    """
    yield from _tests()
    once = ("--no-warm", "--losses", "0")
    whole = ("--model", "llama3-8b", "--recompute", "yes", *once)
    tp = ("--tp", str(max(ranks // 2, 1)))
    positions = ("--tokens", "262144", "--alone", "131072") if not few else ("--tokens", "64")
    for name, script, arguments, limit_s in (
        ("whole model, fsdp", "whole_models.py", (*whole, "--rows", "fsdp"), 900),
        ("whole model, fsdp x tp", "whole_models.py", (*whole, *tp, "--rows", "fsdp_tp"), 900),
        ("whole model, cp", "whole_models.py", (*once, "--rows", "cp"), 900),
        ("experts", "experts.py", ("--layer", "64"), 300),
        ("experts, qwen3-30b-a3b", "experts.py", ("--layer", "qwen3-30b-a3b"), 300),
        ("experts, uneven", "experts.py", ("--layer", "64", "--skew", "1"), 300),
        ("experts, symmetric", "experts.py", ("--layer", "64", "--carrier", "symmetric"), 300),
        ("context", "context.py", (*positions, "--forms", "auto,gather,heads,ring"), 600),
        ("context, decode", "context.py", ("--what", "decode"), 300),
        ("serving", "serving.py", ("--rows", "decode,sums"), 600),
        ("overlap", "overlap.py", (), 600),
        ("overlap, symmetric", "overlap.py", ("--backend", "symmetric"), 600),
        ("layers", "layers.py", ("--sequence", "--model", "llama3-8b"), 600),
    ):
        results = folder / f"{name.replace(',', '').replace(' ', '-')}-{ranks}.json"
        launch = str(_ROOT / "launch" / "torchrun"), str(ranks), str(_BENCHMARKS / script)
        output = "--output", str(results)
        yield Step(
            name=name, command=(*launch, *arguments, *few, *output), limit_s=limit_s,
            results=results,
        )  # fmt: skip


def _end(step: Step) -> End:
    """Run a step to its end, or to that of its time; what it prints is shown as it comes."""
    begin, last = time.monotonic(), ""
    process = subprocess.Popen(
        step.command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGTERM))
    signal.alarm(step.limit_s)
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    signal.alarm(0)
    try:
        status = process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    return End(
        name=step.name, command=" ".join(step.command), status=status,
        took_s=round(time.monotonic() - begin, 1), last=last,
    )  # fmt: skip


def _table(asked: Sequence[Step], ends: Sequence[End]) -> Table:
    """Return one line for each figure, and one for each step that has none."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("step", "what", "beside", "figure", "limit", "holds"):
        table.add_column(name)
    verdicts = {None: "", True: "yes", False: "NO"}
    for step, end in zip(asked, ends, strict=True):
        for row in _stored(step):
            figure, limit = row["figure"]["median"], row["limit"]
            shown = "" if limit is None else f"{limit:g}"
            what = row["name"], row["alternative"], f"{figure:.3f}", shown, verdicts[row["holds"]]
            table.add_row(step.name, *what)
        if end.status or step.results is None:
            how = "passed" if not end.status else f"status {end.status}"
            table.add_row(step.name, end.last, "", how, "", "NO" if end.status else "yes")
    return table


def _stored(step: Step) -> list[dict[str, Any]]:
    if step.results is None or not step.results.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(step.results.read_text(encoding="utf-8"))["rows"]
    return rows


def main() -> None:
    """Run all steps, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="by default as many as GPUs")
    parser.add_argument("--only", help="steps whose names begin with one of these words")
    parser.add_argument("--folder", type=Path, default=_BENCHMARKS / "results")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--small", action="store_true", help="to see that it runs")
    arguments = parser.parse_args()
    import torch

    ranks = arguments.ranks or torch.cuda.device_count()
    if ranks < 2:
        screen.fail(f"{ranks} GPUs: this is for several; --ranks 2 --device cpu --small for CPUs")
    few: list[str] = ["--device", arguments.device] if arguments.device else []
    few += ["--small", "--compiler", "aot_eager", "--rounds", "2"] if arguments.small else []
    folder: Path = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    asked = [*steps(ranks, few, folder)]
    if arguments.only is not None:
        words = tuple(arguments.only.split(","))
        asked = [step for step in asked if step.name.startswith(words)]
    for step in asked:
        if step.results is not None:
            step.results.unlink(missing_ok=True)
    ends = []
    for step in asked:
        screen.output().print(f"== {step.name}: {' '.join(step.command)}", soft_wrap=True)
        ends.append(_end(step))
        text = json.dumps([asdict(end) for end in ends], indent=1)
        (folder / "many_gpus.json").write_text(text + "\n", encoding="utf-8")
    screen.output().print(_table(asked, ends))
    sys.exit(any(end.status for end in ends))


if __name__ == "__main__":
    main()
