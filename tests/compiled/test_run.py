"""Trainings that resume and outlive ranks: losses are those of a run without a fault."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.drawn import drawn
from helpers.forked import Forked
from helpers.survivor_job import free_port
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import mdfuse as mf
from mdfuse import DeviceMesh, ProgramError, Replicate, Shard
from mdfuse.errors import MdfuseError

F = torch.nn.functional
ROWS, STEPS, RATE = 7, 12, 0.1
#: Layouts of the weight: each rank has it, or a part.
WHOLE, PARTS = {"dp": Replicate()}, {"dp": Shard(0)}


def batch(n: int) -> tuple[Tensor, Tensor] | None:
    return (drawn(ROWS, 5, seed=n), drawn(ROWS, 3, seed=100 + n)) if n <= STEPS else None


def build(
    mesh: DeviceMesh, layout: dict[str, Any] = WHOLE, options: mf.Options | None = None
) -> tuple[mf.Program, Callable[[mf.Communicator], dict[str, Tensor | None]]]:
    split = {"dp": Shard(0)}
    with mf.FusionDefinition("train") as fd:
        x = fd.define_tensor([ROWS, 5], mesh=mesh, layout=split)
        t = fd.define_tensor([ROWS, 3], mesh=mesh, layout=split)
        w = fd.define_tensor([5, 3], mesh=mesh, layout=layout, name="w")
        whole = fd.ops.set(w).on(mesh, {})
        loss = fd.ops.mse_loss(x @ whole, t)
        (dw,) = mf.grad(loss, [w])
        fd.add_output(fd.ops.set(loss).on(mesh, {}))
        fd.add_output(mf.optim.sgd(w, dw, lr=RATE)[0], reuse=w)

    def begin(comm: mf.Communicator) -> dict[str, Tensor | None]:
        if comm.rank not in mesh:
            return {"w": None}
        return {"w": mf.shard_tensor(drawn(5, 3), mesh, layout, rank=comm.rank).clone()}

    return mf.compile(fd, options), begin


def reference(steps: int = STEPS) -> list[float]:
    """The losses of torch on one device, in f64."""
    w, losses = drawn(5, 3).double().requires_grad_(), []
    for n in range(1, steps + 1):
        x, t = drawn(ROWS, 5, seed=n), drawn(ROWS, 3, seed=100 + n)
        loss = F.mse_loss(x.double() @ w, t.double())
        (dw,) = torch.autograd.grad(loss, [w])
        w = (w - RATE * dw).detach().requires_grad_()
        losses.append(loss.item())
    return losses


def one() -> DeviceMesh:
    return DeviceMesh.arange(dp=1)


def losses_of(run: mf.Run) -> dict[int, float]:
    return {n: float(loss) for n, loss in run}


def check(losses: dict[int, float], first: int = 1) -> None:
    wanted = dict(enumerate(reference(), 1))
    assert [*losses] == [*range(first, STEPS + 1)]
    for n, loss in losses.items():
        assert loss == pytest.approx(wanted[n], abs=1e-6), n


# -- one process ---------------------------------------------------------------------------------


def test_a_run_resumes_from_the_newest(tmp_path: Path) -> None:
    """On with the step behind it; at the end there is a checkpoint, and only so many are kept."""
    run = mf.Run(build, one(), batch, save_every=3, folder=tmp_path, keep=2)
    first = {n: float(loss) for n, loss in zip(range(1, 9), (x for _, x in run), strict=False)}
    run.running.saved()
    assert {x.name for x in tmp_path.iterdir()} == {"newest", "step-3", "step-6"}
    second = mf.Run(build, one(), batch, save_every=3, folder=tmp_path, keep=2)
    after = losses_of(second)
    check(after, 7)
    check({**first, **after})
    assert {x.name for x in tmp_path.iterdir()} == {"newest", "step-9", "step-12"}
    assert losses_of(mf.Run(build, one(), batch, folder=tmp_path)) == {}


def test_without_a_folder_and_to_an_end_that_the_data_says() -> None:
    check(losses_of(mf.Run(build, one(), batch)))
    assert losses_of(mf.Run(build, one(), lambda n: None)) == {}


def test_an_error_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    """Nobody may write into the folder: training is possible all the same."""
    (tmp_path / "file").write_text("")
    run = mf.Run(build, one(), batch, save_every=5, folder=tmp_path / "file")
    errors: list[str] = []
    for _ in range(STEPS):
        try:
            losses_of(run)
        except ProgramError as error:  # a save meets the error of the one before, and is left out
            errors.append(str(error))
    assert all("cannot be" in text for text in errors)
    assert 1 <= len(errors) <= STEPS // 5 + 1 and run.step == STEPS


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"build": 3}, "build"),
        ({"data": [1]}, "data"),
        ({"save_every": 0}, "save_every=0"),
        ({"keep": True}, "keep=True"),
        ({"folder": 7}, "the path 7"),
        ({"double_buffer": 1}, "double_buffer"),
    ],
)
def test_wrong_requests(given: dict[str, Any], said: str) -> None:
    arguments = {"build": build, "mesh": one(), "data": batch, **given}
    with pytest.raises(MdfuseError, match=said):
        mf.Run(**arguments)


def test_what_build_returns_is_checked() -> None:
    run = mf.Run(lambda mesh: build(mesh)[0], one(), batch)  # type: ignore[arg-type, return-value]
    with pytest.raises(ProgramError, match="build of a Run returned"):
        next(run)


# -- forks that die ------------------------------------------------------------------------------

RANKS = 3
SAME = mf.Options(same_bits=True)


@dataclass(frozen=True)
class Case:
    """A training of so many ranks; each has the whole weight, or a part and what was saved."""

    ranks: int = RANKS
    is_split: bool = False
    options: mf.Options | None = None

    def build(self, mesh: DeviceMesh) -> Any:
        return build(mesh, PARTS if self.is_split else WHOLE, self.options)

    def warm(self) -> None:
        """Compile once, so that forks need not import what that takes."""
        torch.set_num_threads(1)
        for count in (self.ranks, self.ranks - 1):
            program, _ = self.build(DeviceMesh.arange(dp=count))
            mf.simulate(program, [drawn(ROWS, 5), drawn(ROWS, 3), drawn(5, 3)])

    def wanted(self) -> dict[int, Any]:
        """The losses of torch, or with the same bits those of one process."""
        if self.options is None:
            return {n: pytest.approx(x, abs=1e-6) for n, x in enumerate(reference(), 1)}
        alone = losses_of(mf.Run(self.build, one(), batch))
        check(alone)
        return alone

    def train(
        self, folder: Path | None, die: dict[int, tuple[int, float]], waits: bool = False
    ) -> None:
        """What a rank does: it dies some seconds after it has begun a step.

        Args:
            folder: of checkpoints; None: survivors have it all.
            die: rank -> step, and seconds.
            waits: those that are left take longer, for somebody to join.
        """

        def data(n: int) -> Any:
            if not mine and (when := die.get(me)) is not None and when[0] == n:
                threading.Timer(when[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
            is_alone = waits and run.running is not None and run.comm.size < self.ranks
            time.sleep(0.5 if is_alone else 0.02)  # a step takes its time
            return batch(n)

        me, mine = int(os.environ["RANK"]), int(os.environ.get("MDFUSE_RESPAWNED", "0"))
        run = mf.Run(
            self.build, DeviceMesh.arange(dp=self.ranks), data,
            save_every=3, folder=folder, double_buffer=folder is None,
        )  # fmt: skip
        for n, loss in run:
            print(n, run.comm.size, float(loss))


def said_losses(text: str) -> tuple[dict[int, float], dict[int, int]]:
    """The last loss of each step, and how many ranks made it."""
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    return {int(n): float(x) for n, _, x in rows}, {int(n): int(size) for n, size, _ in rows}


CASES = {
    "from each other": Case(),
    "from files": Case(is_split=True),
    "same bits": Case(4, options=SAME),
    "same bits of 8": Case(8, options=SAME),
    "same bits from files": Case(4, True, SAME),
}
MOMENTS = sampling.of(20, 1)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("draw", range(MOMENTS))
def test_losses_are_those_without_a_death(draw: int, kind: str, tmp_path: Path) -> None:
    """Whenever a rank dies: the others take over its rows, and the batch stays what it was.

    With the same bits the losses are those of one process to the bit, which nobody disturbed.
    Behind the first step: while teams are made, a death ends all ranks.
    """
    draws, case = random.Random(f"{draw} {kind} {sampling.window(1000, 1000).start}"), CASES[kind]
    when = {draws.randrange(case.ranks): (draws.randrange(2, STEPS), draws.random() * 0.05)}
    files, wanted = (tmp_path / "saved" if case.is_split else None), case.wanted()
    case.warm()
    forked = Forked(case.ranks, lambda *_: case.train(files, when), tmp_path, MDFUSE_TIMEOUT_S="10")
    statuses = forked.wait(240)
    dead = {*when}
    said = "\n".join(f"rank {r}:\n{forked.said(r)}" for r in range(case.ranks))
    assert {r for r, x in statuses.items() if x} == dead, (when, said)
    of_any: dict[int, float] = {}
    for rank in {*range(case.ranks)} - dead:
        losses, sizes = said_losses(forked.said(rank))
        assert losses.items() <= wanted.items(), when
        assert len(losses) >= len(wanted) - 1, when  # a step that another rank ended for it
        assert sizes[STEPS] == case.ranks - 1
        of_any |= losses
    assert of_any == wanted, when


@pytest.mark.parametrize("lost", [(1,), (1, 2)])
def test_new_processes_join(lost: tuple[int, ...], tmp_path: Path) -> None:
    """Before the next step of the others, with the state that they have; also one by one."""
    case, train = Case(), Case.train
    case.warm()

    def act(rank: int, place: int) -> None:
        train(case, None, dict.fromkeys(lost, (3, 0.0)), waits=True)

    forked = Forked(RANKS, act, tmp_path, MDFUSE_TIMEOUT_S="30")
    assert forked.wait(60, *lost) == dict.fromkeys(lost, -signal.SIGKILL)
    until = time.monotonic() + 60
    for rank in lost:
        forked.begin_again(rank)
        said = tmp_path / f"{rank}.1"
        while rank != lost[-1] and not (said.exists() and said_losses(said.read_text())[0]):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert forked.wait(120) == dict.fromkeys(range(RANKS), 0), forked.said(lost[0], 1)
    losses, sizes = said_losses(forked.said(0))
    check(losses)
    for n, rank in enumerate(lost, 1):
        joined, of_joined = said_losses(forked.said(rank, 1))
        assert joined and joined.items() <= losses.items() and min(joined) >= 3
        assert of_joined[min(joined)] == RANKS - len(lost) + n
    assert sizes[STEPS] == RANKS


def test_one_agent_of_torchrun_for_each_rank(tmp_path: Path) -> None:
    """The agent of the rank that dies ends; the ranks of the others go on, with the store of one.

    Agents of ranks that are done wait five minutes for that one.
    """
    case, dead, endpoint = Case(options=SAME), 1, f"127.0.0.1:{free_port()}"
    wanted = case.wanted()
    case.warm()

    def rank() -> None:
        case.train(None, {dead: (5, 0.0)})
        mf.init().close()

    def agent(number: int, _: int) -> None:
        config = LaunchConfig(
            RANKS, RANKS, 1, run_id="agents", rdzv_backend="static", rdzv_endpoint=endpoint,
            rdzv_configs={"rank": number, "timeout": 60}, local_addr="127.0.0.1",
            start_method="fork", max_restarts=0, monitor_interval=0.05,
        )  # fmt: skip
        elastic_launch(config, rank)()

    forked = Forked(RANKS, agent, tmp_path, MDFUSE_TIMEOUT_S="10")
    ended, until = forked.wait(60, dead), time.monotonic() + 60
    others = {*range(RANKS)} - {dead}
    while time.monotonic() < until and any(
        STEPS not in said_losses(forked.said(r))[0] for r in others
    ):
        time.sleep(0.1)
    waiting = forked.wait(0.0, *others)
    assert ended == {dead: 1} and waiting == dict.fromkeys(others)
    for number in others:
        losses, sizes = said_losses(forked.said(number))
        assert losses == wanted, forked.said(number)
        assert sizes[4] == RANKS and sizes[STEPS] == RANKS - 1
