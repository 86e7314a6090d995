"""One rank of `survivors.py`: it is killed while it trains, or costs are measured on it.

Started by `mdfuse launch`, with a part and its settings as JSON. Part `kill` is a job of
`tests/helpers/survivor_job.py`; each rank writes its account into the folder. The others measure,
and rank 0 writes both sides, nanoseconds in each round.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measure import Contender, host_time, interleave
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

_TESTS = Path(__file__).resolve().parent.parent / "tests"


def kill(folder: Path, job: dict[str, Any]) -> None:
    """Train with faults, and write what came of it."""
    sys.path.insert(0, str(_TESTS))
    from helpers.survivor_job import Fault, Job, Rank, left_of_dead

    faults = [Fault(**x) for x in job.pop("faults")]
    os.chdir(folder)
    if torch.cuda.device_count() < job["ranks"]:  # NCCL takes ranks of one GPU for hosts
        os.environ.setdefault("NCCL_HOSTID", f"rank {os.environ['RANK']}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    rank = Rank(Job(faults=faults, **job), int(os.environ["RANK"]))
    rank.run()
    account = {
        "losses": rank.losses, "rebuilds": rank.rebuilds, "left": left_of_dead(folder),
        "gone_s": mf.init().watch.patience_s, "device": str(mf.init().device),
    }  # fmt: skip
    (folder / f"rank{rank.number}.json").write_text(json.dumps(account))
    mf.init().close()


def idle(folder: Path, given: dict[str, Any]) -> None:
    """Measure runs of a small program, under a watchdog and without one.

    Without it its threads are ended, and the graph is captured without notes of its replays.
    """
    comm = mf.init()
    watched, alone = (_runs(comm, given["width"], flag) for flag in (True, False))
    times = interleave(
        {
            "ours": Contender(call=watched, fresh=partial(_awake, comm.watch)),
            "against": Contender(call=alone, fresh=partial(_asleep, comm.watch)),
        },
        rounds=given["rounds"], batch=given["runs"], settle=partial(_settle, comm),
        stopwatch=partial(_until_done, comm),
    )  # fmt: skip
    _awake(comm.watch)
    _write(folder, comm, times, {})


def _runs(comm: mf.Communicator, width: int, is_watched: bool) -> Callable[[object], object]:
    mesh = DeviceMesh.arange(dp=comm.size)
    with mf.FusionDefinition("watched" if is_watched else "alone") as fd:
        x = fd.define_tensor([comm.size, width], mesh=mesh, layout={"dp": Shard(0)})
        fd.add_output(fd.ops.sum(x * 2.0, 0))
    program = mf.compile(fd)
    part = torch.ones(1, width, device=comm.device)
    notes = comm.replays
    try:
        if not is_watched:
            comm.replays = lambda *_: None  # type: ignore[method-assign]
        for _ in range(8):  # eager, captured, replayed
            (total,) = program.run(part)
    finally:
        comm.replays = notes  # type: ignore[method-assign]
    torch.testing.assert_close(total.cpu(), torch.full((width,), 2.0 * comm.size))
    return lambda _: program.run(part)


def _asleep(watch: Any) -> None:
    """End the threads of a watchdog."""
    watch._stop.set()
    while watch._threads:
        watch._threads.pop().join(5.0)


def _awake(watch: Any) -> None:
    watch._stop.clear()
    watch.start()


def save(folder: Path, given: dict[str, Any]) -> None:
    """Measure steps beside which a checkpoint is written, and steps alone."""
    comm, count = mf.init(), given["steps"]
    step, batch = _training(comm, given)
    held: list[float] = []

    def steps() -> None:
        for _ in range(count):
            step(*batch)

    def saved() -> None:
        name = folder / "saves" / f"step-{len(held)}"
        held.append(host_time(lambda: step.save(name, portable=True, wait=False, keep=2)))
        steps()

    def settle() -> None:
        step.saved()
        _settle(comm)

    times = interleave(
        {"ours": Contender(call=saved), "against": Contender(call=steps)},
        rounds=given["rounds"], batch=1, settle=settle, warm=1,
        stopwatch=partial(_until_done, comm),
    )  # fmt: skip
    waited = _until_done(comm, lambda: step.save(folder / "waited", portable=True))
    said = {
        "bytes of a rank": sum(x.nbytes for x in step.state.values() if isinstance(x, Tensor)),
        "a save returns after, ns": held,
        "a save that is waited for, ns": waited,
    }
    _write(folder, comm, times, said)


def _training(comm: mf.Communicator, given: dict[str, Any]) -> tuple[mf.Step, list[Tensor]]:
    """Two matrices with momentum, on rows that ranks split; ranks split the matrices, too."""
    rows, width = given["rows"] * comm.size, given["width"]
    dtype = torch.bfloat16 if comm.device.type == "cuda" else torch.float32
    mesh, split = DeviceMesh.arange(dp=comm.size), {"dp": Shard(0)}
    shapes = {"a": (width, 4 * width), "b": (4 * width, width)}
    with mf.FusionDefinition("train") as fd:
        x = fd.define_tensor([rows, width], dtype, mesh, split, name="x")
        state = {}
        for name, shape in shapes.items():
            for n in (name, f"{name}_m"):
                state[n] = fd.define_tensor([*shape], dtype, mesh, split, name=n)
        loss = ((fd.ops.tanh(x @ state["a"]) @ state["b"] - x) ** 2).mean()
        fd.add_output(loss)
        slopes = mf.grad(loss, [state[n] for n in shapes])
        for name, slope in zip(shapes, slopes, strict=True):
            momentum = state[f"{name}_m"] * 0.9 + slope
            fd.add_output(state[name] - momentum * 0.01, reuse=state[name])
            fd.add_output(momentum, reuse=state[f"{name}_m"])
    drawn = torch.Generator().manual_seed(comm.rank)

    def drawn_part(*shape: int, scale: float = 1.0) -> Tensor:
        part = torch.randn(shape[0] // comm.size, *shape[1:], generator=drawn) * scale
        return part.to(dtype).to(comm.device)

    values = {n: drawn_part(*shape, scale=shape[0] ** -0.5) for n, shape in shapes.items()}
    values |= {f"{n}_m": torch.zeros_like(x) for n, x in values.items()}
    return mf.Step(mf.compile(fd), values), [drawn_part(rows, width)]


def _settle(comm: mf.Communicator) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    comm.barrier()


def _until_done(comm: mf.Communicator, calls: Callable[[], Any]) -> float:
    def waited() -> None:
        calls()
        if comm.device.type == "cuda":
            torch.cuda.synchronize()

    return host_time(waited)


def _write(
    folder: Path, comm: mf.Communicator, times: dict[str, list[float]], said: dict[str, Any]
) -> None:
    if comm.rank == 0:
        said = {**times, "said": said, "device": str(comm.device), "backend": comm.backend}
        (folder / "times.json").write_text(json.dumps(said))
    comm.close()


_PARTS = {"kill": kill, "idle": idle, "save": save}


def main() -> None:
    """Run a part in a folder."""
    part, folder, given = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    _PARTS[part](Path(folder), json.loads(given))


if __name__ == "__main__":
    main()
