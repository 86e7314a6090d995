"""Survivors: how soon they go on, the cost of watchdogs, the cost of a save beside steps.

python benchmarks/survivors.py                                # two GPUs by NCCL, or ranks on CPUs
python benchmarks/survivors.py --ranks 4 --backend gloo
python benchmarks/survivors.py --rows kill --backend ucx      # GPUs, whose waits are the host's
python benchmarks/survivors.py --rows kill --moments 2        # some rows
python benchmarks/survivors.py --backend gloo --small         # only to see that it runs

kill      a rank of a training is killed at drawn moments: time until another one has an error, from
          there to the new communicator, and to the end of the next step; steps that are made again,
          and how far losses are from those of plain torch in float64 on one device. Files, ports
          and shared memory of the dead that are left are counted
idle      runs of a program of one all-reduce under the watchdog, and without one
save      a checkpoint that is written beside steps, and the same steps alone

Each row starts ranks by `mdfuse launch`; this process has none. A moment behind which no rank went
on counts with the seconds that a job may take, and is told.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _measure import Report, Row, show

from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"
_ROOT = Path(__file__).resolve().parent.parent

#: Versions of the state at which a rank may be killed, and the most that it takes to come, seconds.
_FIRST, _LAST, _DELAY_S = 1, 6, 0.004

#: The longest that a job may take, seconds.
_JOB_S = 90.0

#: What it may take until all others have an error, seconds: two looks, and the report.
_FOUND_S = 5.0

#: Backends that no death ends a wait of: the deadline does, and then there is the report.
_BLIND = ("ucx",)

#: What agreeing may take beyond the time that others are waited for, seconds.
_REBUILD_S = 3.0

#: What the next step may take from there on.
_NEXT_S = 5.0

#: How far losses may be from those of plain torch.
_LOSS_ERROR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The way in which rows are measured.

    Attributes:
        ranks: how many.
        backend: mdfuse's.
        timeout_s: deadline of a communication in jobs whose ranks are killed.
        moments: how many.
        rounds: of the other rows.
        is_small: to see that it runs.
        folder: where ranks write; files of checkpoints, too.
        world: told beside the rows, filled while measuring.
    """

    ranks: int
    backend: str
    timeout_s: float
    moments: int
    rounds: int
    is_small: bool
    folder: Path
    world: dict[str, Any]

    @property
    def on_gpus(self) -> bool:
        return self.backend != "gloo" and torch.cuda.device_count() >= self.ranks

    def launched(self, part: str, name: str, given: dict[str, Any], **variables: str) -> Path:
        """Run a part on ranks, and return its folder; what it printed lies there, too."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        script = str(_ROOT / "benchmarks" / "_survivors_costs.py")
        launch = sys.executable, "-m", "mdfuse", "launch", "-n", str(self.ranks)
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        variables = {"MDFUSE_BACKEND": self.backend, "PYTHONPATH": path, **variables}
        with (folder / "out.txt").open("w") as out:
            process = subprocess.Popen(
                [*launch, script, part, str(folder), json.dumps(given)],
                stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **variables}, cwd=folder,
            )  # fmt: skip
            try:
                status = process.wait(_JOB_S if part == "kill" else None)
            except subprocess.TimeoutExpired:
                process.terminate()
                status = process.wait()
        if status and part != "kill":
            screen.fail(f"{name}: status {status}\n{(folder / 'out.txt').read_text()}")
        return folder

    def row(self, name: str, sizes: str, times: dict[str, Any], against: str, limit: Any) -> Row:
        return Row(
            name=name, sizes=f"{self.ranks} ranks, {self.backend}: {sizes}", unit="ms",
            ours=times["ours"], against=times["against"], alternative=against,
            limit=None if self.is_small else limit,
        )  # fmt: skip


# -- a rank is killed ------------------------------------------------------------------------------


def _kill(plan: Plan) -> Iterator[Row]:
    moments = [_after(plan, n) for n in range(plan.moments)]
    plan.world["kill"] = moments
    went_on = [x for x in moments if x["went on"]]
    sizes = f"{len(went_on)} of {len(moments)} moments"
    limits = {
        "detection": _FOUND_S + (plan.timeout_s if plan.backend in _BLIND else 0.0),
        "rebuild": 2 * max((x["gone_s"] for x in went_on), default=0.0) + _REBUILD_S,
        "next step": _NEXT_S,
    }
    for name, limit in limits.items():
        times = {"ours": [x.get(name, _JOB_S) * 1e9 for x in moments]}
        times["against"] = [limit * 1e9] * len(moments)
        yield plan.row(f"kill: {name}", sizes, times, f"{limit:g} s", 1.0)
    errors = [x["error"] for x in went_on] or [1.0]
    yield Row(
        name="kill: losses", sizes=f"{sizes}, steps lost: {[x['lost'] for x in went_on]}",
        unit="of 1", ours=errors, against=[_LOSS_ERROR] * len(errors),
        alternative="plain torch, float64", limit=1.0,
    )  # fmt: skip


def _after(plan: Plan, number: int) -> dict[str, Any]:
    """Kill a rank at a drawn moment; return what the others said, times in seconds."""
    draw = random.Random(number)
    fault = {
        "rank": draw.randrange(plan.ranks), "version": draw.randint(_FIRST, _LAST),
        "moment": draw.choice(["between", "in"]), "delay_s": draw.uniform(0, _DELAY_S),
    }  # fmt: skip
    job = {
        "ranks": plan.ranks, "faults": [fault], "backend": plan.backend,
        "double_buffer": True, "timeout_s": plan.timeout_s,
        "settle_s": 1.0 if plan.is_small else None,
    }  # fmt: skip
    # what a compiler takes is not the time until ranks go on, and it may pass the deadline
    options = {"MDFUSE_TIMEOUT_S": str(plan.timeout_s), "MDFUSE_COMPILE": "never"}
    begin = time.monotonic()
    folder = plan.launched("kill", f"kill-{number}", job, **options)
    took = time.monotonic() - begin
    said = [json.loads(x.read_text()) for x in folder.glob("rank*.json")]
    dead = [json.loads(x.read_text()) for x in folder.glob("dead*.json")]
    out = (folder / "out.txt").read_text().strip()
    account = {"fault": fault, "job took": took, "went on": len(said) == plan.ranks - 1}
    if not account["went on"] or not dead:
        screen.output().print(f"kill {number}: {fault}: not all went on\n{out}", markup=False)
        return {**account, "went on": False, "said": out[-2000:]}
    return {**account, **_times(said, dead[0]["time"], fault["version"])}


def _times(said: list[dict[str, Any]], died: float, version: int) -> dict[str, Any]:
    """Return the longest times of all ranks, the error of losses, what is left of the dead."""
    right = _losses()
    rebuilds = [x["rebuilds"][0] for x in said]
    return {
        "detection": max(x["broke"] for x in rebuilds) - died,
        "rebuild": max(x["rebuilt"] - x["broke"] for x in rebuilds),
        "next step": max(x["next"] - x["rebuilt"] for x in rebuilds),
        "lost": max(0, *(version - x["version"] for x in rebuilds)),
        "error": max(abs(loss - right[int(n)]) for x in said for n, loss in x["losses"].items()),
        "left": sorted({y for x in said for y in x["left"]}),
        "gone_s": max(x["gone_s"] for x in said),
        "device": said[0]["device"],
    }


def _losses() -> list[float]:
    sys.path.insert(0, str(_ROOT / "tests"))
    from helpers.survivor_job import undisturbed

    return undisturbed()


# -- costs without a fault -------------------------------------------------------------------------


def _idle(plan: Plan) -> Iterator[Row]:
    runs = 20 if plan.is_small else 20_000 if plan.on_gpus else 1_000
    given = {"width": 1024, "rounds": plan.rounds, "runs": runs}
    times = _read(plan, "idle", given)
    limit = 1.01 if plan.on_gpus else None
    yield plan.row("idle: a run", f"{runs} in a turn", times, "no watchdog", limit)


def _save(plan: Plan) -> Iterator[Row]:
    rows, width, steps = (8192, 4096, 100) if plan.on_gpus else (256, 256, 50)
    if plan.is_small:
        rows, width, steps = 16, 16, 3
    given = {"rows": rows, "width": width, "steps": steps, "rounds": plan.rounds}
    times = _read(plan, "save", given)
    sizes = f"{steps} steps, {times['said']['bytes of a rank'] / 2**20:.0f} MiB of each rank"
    limit = 1.02 if plan.on_gpus else None
    yield plan.row("save: steps beside it", sizes, times, "steps alone", limit)


def _read(plan: Plan, part: str, given: dict[str, Any]) -> dict[str, Any]:
    folder = plan.launched(part, part, given)
    times: dict[str, Any] = json.loads((folder / "times.json").read_text())
    plan.world[part] = times["said"] | {"device": times["device"]}
    return times


# -- the run ---------------------------------------------------------------------------------------

_ROWS: dict[str, Callable[[Plan], Iterator[Row]]] = {"kill": _kill, "idle": _idle, "save": _save}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(_ROWS), help="some of %(default)s")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", help="by default nccl where there are as many GPUs, else gloo")
    parser.add_argument("--moments", type=int, default=8, help="at which a rank is killed")
    parser.add_argument("--rounds", type=int, default=11, help="of the other rows")
    parser.add_argument("--timeout", type=float, default=10.0, help="Options.timeout_s of `kill`")
    parser.add_argument("--folder", type=Path, help="of checkpoints, by default a temporary one")
    parser.add_argument("--small", action="store_true", help="to see that it runs")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    chosen = arguments.rows.split(",")
    if wrong := [name for name in chosen if name not in _ROWS]:
        screen.fail(f"rows {', '.join(wrong)}: there are {', '.join(_ROWS)}")
    has_gpus = torch.cuda.device_count() >= arguments.ranks
    backend = arguments.backend or ("nccl" if has_gpus else "gloo")
    path: Path = arguments.output or _RESULTS / f"survivors-{backend}-{arguments.ranks}.json"
    world: dict[str, Any] = {"backend": backend, "ranks": arguments.ranks}
    given = {k: v if v is None else str(v) for k, v in vars(arguments).items() if k != "output"}
    all_rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        plan = Plan(
            ranks=arguments.ranks, backend=backend, timeout_s=arguments.timeout,
            moments=arguments.moments, rounds=arguments.rounds, is_small=arguments.small,
            folder=Path(folder), world=world,
        )  # fmt: skip
        for name in chosen:
            all_rows += _ROWS[name](plan)
            Report(benchmark="survivors", arguments=given, rows=all_rows, where=world).write(path)
    show(screen.output(), f"survivors ({backend}, {arguments.ranks} ranks)", all_rows)
    for one in world.get("kill", []):
        if one.get("left"):
            screen.output().print(f"left of the dead: {one['left']}", markup=False)
    screen.output().print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
