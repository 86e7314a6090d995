"""Jobs whose ranks die while they train: each rank a fork, the store kept by their parent.

Reads a line of JSON for each job (`Job`), and prints one: for each rank its exit status, its losses
by version, what it printed, and for each of its rebuilds the times, who was lost, and the version.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import Tensor

import mdfuse as mf
from helpers import leftovers
from helpers.forked import Gate, end_store, keep_store

STEPS, ROWS, SEED = 8, 24, 7
#: kind -> the axes of its mesh, with the share of ranks of each but the first
KINDS: dict[str, dict[str, int]] = {
    "dp": {},
    "tp": {"tp": 2},
    "hsdp": {"fs": 2},
    "fsdp": {},
    "imported": {},
}
SPLIT = {
    "dp": ({}, {}),
    "tp": ({"tp": mf.Shard(1)}, {"tp": mf.Shard(0)}),
    "hsdp": ({"fs": mf.Shard(0)}, {"fs": mf.Shard(1)}),
    "fsdp": ({"dp": mf.Shard(0)}, {"dp": mf.Shard(0)}),
}


@dataclass
class Fault:
    """What befalls a rank.

    Attributes:
        rank: as it was started.
        version: of the state, at which it happens.
        moment: "between" two steps, "in" one, "rebuild", "save", "saved": just behind it.
        deed: "kill", "stop" until the others are done, or "slow": it comes late to the rebuild.
        delay_s: until it happens, from the begin of the moment on.
    """

    rank: int
    version: int
    moment: str = "between"
    deed: str = "kill"
    delay_s: float = 0.0


@dataclass
class Job:
    """A training with faults."""

    ranks: int
    faults: list[Fault] = field(default_factory=list)
    kind: str = "dp"
    backend: str = "gloo"
    double_buffer: bool = False
    save_at: int = -1
    save_waits: bool = True
    settle_s: float | None = None
    timeout_s: float = 5.0
    is_kept: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    join: bool = False

    def line(self) -> str:
        return json.dumps(asdict(self))


def mesh_of(kind: str, ranks: int) -> mf.DeviceMesh:
    others = KINDS[kind]
    return mf.DeviceMesh.arange(dp=ranks // (2 if others else 1), **others)


def momentum(w: Any, dw: Any, v: Any) -> Any:
    new = v * 0.9 + dw
    return w - new * 0.1, new


@dataclass
class Imported:
    """A step of training of an imported model."""

    step: mf.TrainingStep
    model: mf.ImportedModel


def imported(mesh: mf.DeviceMesh) -> Imported:
    """The same model as a module, in microbatches of the rows that each rank has."""
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 10, bias=False), torch.nn.Tanh(), torch.nn.Linear(10, 3, bias=False)
    )
    for x, name in zip(module.parameters(), "ab", strict=True):
        x.data.copy_(start()[name].T)
    rows = {"dp": mf.Shard(0)}
    model = mf.from_torch(module, (torch.ones(ROWS, 6),), mesh=mesh, layouts={"input:0": rows})
    step = model.training_step(
        lambda y, t: mf.ops.mse_loss(y, t),
        optimizer=momentum,
        extra={"t": mf.TensorSpec((ROWS, 3), layout=rows)},
        microbatches=2,
    )
    return Imported(step, model)


def build(mesh: mf.DeviceMesh, kind: str) -> Any:
    """Two layers, and SGD with momentum, on a batch that all axes of data split."""
    if kind == "imported":
        return imported(mesh)
    rows = {"dp": mf.Shard(0)} | ({"fs": mf.Shard(0)} if "fs" in mesh.axes else {})
    one, two = SPLIT[kind] if set(KINDS[kind]) <= {*mesh.axes} else ({}, {})
    with mf.FusionDefinition("train") as fd:
        x = fd.define_tensor([ROWS, 6], name="x", mesh=mesh, layout=rows)
        t = fd.define_tensor([ROWS, 3], name="t", mesh=mesh, layout=rows)
        state = []
        for name, shape, layout in (("a", [6, 10], one), ("b", [10, 3], two)):
            w = fd.define_tensor(shape, name=name, mesh=mesh, layout=layout)
            m = fd.define_tensor(shape, name=f"{name}_m", mesh=mesh, layout=layout)
            state.append((w, m))
        (a, _), (b, _) = state
        loss = fd.ops.mse_loss(fd.ops.tanh(x @ a) @ b, t)
        fd.add_output(loss)
        for (w, m), dw in zip(state, mf.grad(loss, [a, b]), strict=True):
            new = m * 0.9 + dw
            fd.add_output(w - new * 0.1, reuse=w)
            fd.add_output(new, reuse=m)
    return mf.compile(fd)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts(program: mf.Program, rank: int, values: dict[str, Tensor]) -> dict[str, Tensor | None]:
    layouts, device = {name: program.fusion.layout(name) for name in values}, mf.init().device
    return {
        n: mf.shard_tensor(x, layouts[n], rank=rank).clone().to(device)
        if rank in layouts[n].mesh
        else None
        for n, x in values.items()
    }


def start() -> dict[str, Tensor]:
    a, b = numbers(6, 10, seed=SEED), numbers(10, 3, seed=SEED + 1)
    return {"a": a, "a_m": torch.zeros_like(a), "b": b, "b_m": torch.zeros_like(b)}


def batch(version: int) -> dict[str, Tensor]:
    return {
        "x": numbers(ROWS, 6, seed=100 + version),
        "t": numbers(ROWS, 3, seed=200 + version),
    }


def begin(built: Any, rank: int, is_double: bool) -> Any:
    if isinstance(built, Imported):
        return built.step.start(built.model.load(), double_buffer=is_double)
    return mf.Step(built, parts(built, rank, start()), double_buffer=is_double)


def program_of(mesh: mf.DeviceMesh, kind: str) -> Any:
    built = build(mesh, kind)
    return built.step if isinstance(built, Imported) else built


def version_of(step: Any) -> int:
    return int(getattr(step, "step", step).version)


def batch_of(step: Any, rank: int, version: int) -> list[Any]:
    if hasattr(step, "shard"):
        return list(step.shard(*batch(version).values()))
    return [*parts(step.program, rank, batch(version)).values()]


def undisturbed() -> list[float]:
    """The losses of plain torch, in f64, on one device."""
    state = {n: x.double().requires_grad_(len(n) == 1) for n, x in start().items()}
    losses = []
    for version in range(STEPS):
        x, t = (y.double() for y in batch(version).values())
        a, b = state["a"], state["b"]
        loss = torch.nn.functional.mse_loss(torch.tanh(x @ a) @ b, t)
        losses.append(loss.item())
        for name, dw in zip("ab", torch.autograd.grad(loss, [a, b]), strict=True):
            state[f"{name}_m"] = state[f"{name}_m"] * 0.9 + dw
            new = state[name].detach() - state[f"{name}_m"] * 0.1
            state[name] = new.requires_grad_()
    return losses


class Rank:
    """One rank of a job."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.faults = [f for f in job.faults if f.rank == number]
        self.losses: dict[int, float] = {}
        self.rebuilds: list[dict[str, Any]] = []

    def meet(self, moment: str, version: int) -> None:
        """Let happen what befalls this rank at a moment."""
        for fault in [f for f in self.faults if (f.moment, f.version) == (moment, version)]:
            self.faults.remove(fault)
            number = signal.SIGKILL if fault.deed == "kill" else signal.SIGSTOP
            act = [time.sleep, (fault.delay_s,)]
            if fault.deed != "slow":
                act = [os.kill, (os.getpid(), number)]
            if fault.deed == "kill":
                held = {"time": time.monotonic() + fault.delay_s, **leftovers.held()}
                Path(f"dead{self.number}.json").write_text(json.dumps(held))
            if fault.delay_s and fault.deed != "slow":
                threading.Timer(fault.delay_s, act[0], act[1]).start()
            else:
                act[0](*act[1])

    def run(self, is_new: bool = False) -> None:
        kind, job = self.job.kind, self.job
        if is_new:
            comm = mf.rebuild(join=True, settle_s=job.settle_s)
            mesh = mesh_of(kind, job.ranks)
            step = mf.recover(None, program_of(mesh, kind))
        else:
            comm, mesh = mf.init(), mesh_of(kind, job.ranks)
            step = begin(build(mesh, kind), comm.rank, job.double_buffer)
        while version_of(step) < STEPS:
            version = version_of(step)
            try:
                if job.join and comm.size < job.ranks and version >= STEPS - 2:
                    comm, step = self.extended(comm, step)
                if version == job.save_at:
                    self.meet("save", version)
                    folder = f"saved{comm.membership.epoch}"
                    step.save(folder, portable=True, wait=job.save_waits)
                    self.meet("saved", version)
                self.meet("between", version)
                given = batch_of(step, comm.rank, version)
                self.meet("in", version)
                loss = step(*given)
                if loss is not None:  # else this rank is in no mesh, and idle
                    self.losses[version] = float(loss)
                if self.rebuilds:
                    self.rebuilds[-1].setdefault("next", time.monotonic())
            except mf.BackendError as error:
                comm, mesh, step = self.after(error, mesh, step, version)

    def after(self, error: Exception, mesh: Any, step: Any, version: int) -> Any:
        times = {"broke": time.monotonic(), "at": version}
        print(f"version {version}: {error}", flush=True)
        for moment in ("rebuild", "late"):
            self.meet(moment, version)
        for _ in range(3):
            try:
                comm = mf.rebuild(error, settle_s=self.job.settle_s)
                times["rebuilt"] = time.monotonic()
                mesh = mesh.without(comm, axis="dp")
                step = mf.recover(step, program_of(mesh, self.job.kind), or_from="saved0")
            except mf.BackendError as again:
                error = again
                continue
            self.rebuilds.append({**times, "lost": comm.lost, "version": version_of(step)})
            return comm, mesh, step
        raise error

    def extended(self, comm: Any, step: Any) -> Any:
        """Wait until the new processes are there, and go on with them."""
        Path("wanted").touch()
        while comm.size < self.job.ranks:
            time.sleep(0.05)
            comm = mf.rebuild(join=True, settle_s=self.job.settle_s)
        return comm, mf.recover(step, program_of(mesh_of(self.job.kind, comm.size), self.job.kind))


def environment(job: Job, rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(job.is_kept),
        "MDFUSE_TIMEOUT_S": str(job.timeout_s),
        "MDFUSE_BACKEND": job.backend,
        **job.environment,
    }


def fork(job: Job, number: int, port: int, is_new: bool = False, gate: Gate | None = None) -> int:
    """Return the process of a rank; its account is in the file `rankN.json`."""
    process = os.fork()
    if process:
        return process
    if gate is not None:
        gate.wait()
    os.environ.update(environment(job, number, port))
    out = os.open(f"out.{number}{'.new' * is_new}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    rank, status = Rank(job, number), 1
    try:
        rank.run(is_new)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    said = {"losses": rank.losses, "rebuilds": rank.rebuilds, "left": left_of_dead(Path())}
    Path(f"rank{number}{'.new' * is_new}.json").write_text(json.dumps(said))
    if status == 0:
        mf.init().close()
    os._exit(status)  # threads and stores of the parent are not there to be joined


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Run a job in a folder, and return the accounts of its ranks."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    keeper, port = keep_store() if job.is_kept else (0, free_port())
    gate = Gate()
    left = {fork(job, number, port, gate=gate): number for number in range(job.ranks)}
    gate.open()
    stopped = {f.rank for f in job.faults if f.deed == "stop"}
    statuses: dict[str, int | None] = {}
    deadline = time.monotonic() + 90
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        if Path("wanted").exists():
            Path("wanted").unlink()
            for fault in job.faults:
                left[fork(job, fault.rank, port, is_new=True)] = -1 - fault.rank
        if set(left.values()) <= stopped:
            for process in left:
                os.kill(process, signal.SIGCONT)
        for process in [*left]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                number = left.pop(process)
                name = str(number) if number >= 0 else f"{-1 - number}.new"
                statuses[name] = os.waitstatus_to_exitcode(status)
    for process, number in left.items():
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        statuses[str(number)] = None
    if keeper:
        end_store(keeper, os.getpid())
    said = {
        p.stem.removeprefix("rank"): json.loads(p.read_text()) for p in folder.glob("rank*.json")
    }
    outputs = {p.name.removeprefix("out."): p.read_text() for p in folder.glob("out.*")}
    died = {rank: of["time"] for rank, of in dead_in(folder).items()}
    known = ("rank", "out.", "dead", "saved")
    files = [p.name for p in folder.iterdir() if not p.name.startswith(known)]
    return {
        "statuses": statuses, "said": said, "outputs": outputs, "died": died,
        "left": [*left_of_dead(folder), *files],
    }  # fmt: skip


def dead_in(folder: Path) -> dict[str, Any]:
    """Return for each rank that was killed the time, and what it held."""
    files = folder.glob("dead*.json")
    return {p.stem.removeprefix("dead"): json.loads(p.read_text()) for p in files}


def left_of_dead(folder: Path, seconds: float = 5.0) -> list[str]:
    """Return what is left of the ranks that died, some seconds later."""
    until = time.monotonic() + seconds
    while True:
        left = [x for of in dead_in(folder).values() for x in leftovers.left_of(of)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def main() -> None:
    folder = Path(sys.argv[1])
    for kind in KINDS:  # what is imported and compiled here, the ranks need not
        build(mesh_of(kind, 4), kind)
    for number, line in enumerate(sys.stdin):
        job = Job(**json.loads(line))
        job.faults = [Fault(**fault) for fault in job.faults]  # type: ignore[arg-type]
        print(json.dumps(run(job, folder / str(number))), flush=True)


if __name__ == "__main__":
    main()
