"""Training steps on real ranks: split parameters, in place, on from a file."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers.drawn import drawn
from helpers.full_disk import failing, room, shared_folder
from helpers.shown_reports import not_said, shown
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.compiled.all_or_none import together

F = torch.nn.functional
MESH = DeviceMesh.arange(dp=2)
SPLIT = {"dp": Shard(0)}


def program(options: mf.Options | None = None) -> mf.Program:
    with mf.FusionDefinition("train") as fd:
        x = fd.define_tensor([6, 5], mesh=MESH, layout=SPLIT)
        t = fd.define_tensor([6, 3], mesh=MESH, layout=SPLIT)
        w = fd.define_tensor([5, 3], mesh=MESH, layout=SPLIT)  # 3 and 2 rows
        v = fd.define_tensor([5, 3], mesh=MESH, layout=SPLIT)
        with mf.recompute():
            whole = fd.ops.set(w).on(MESH, {})
        loss = fd.ops.mse_loss(fd.ops.tanh(x @ whole), t)
        (dw,) = mf.grad(loss, [w])
        new, velocity = mf.optim.sgd(w, dw, v, lr=0.1, momentum=0.9)
        assert velocity is not None
        fd.add_output(loss)
        fd.add_output(velocity, reuse=v)
        fd.add_output(new, reuse=w)
    return mf.compile(fd, options)


def part(x: Tensor, comm: mf.Communicator) -> Tensor:
    return mf.shard_tensor(x, MESH, SPLIT, rank=comm.rank).clone().to(comm.device)


@pytest.mark.world(2)
def test_training_goes_on_from_a_file(comm: mf.Communicator, tmp_path: Path) -> None:
    w = drawn(5, 3, seed=1).requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    step = mf.Step(
        program(), {n: part(x, comm) for n, x in {"w": w.detach(), "v": torch.zeros(5, 3)}.items()}
    )
    again = mf.Step(program(), {n: torch.zeros_like(x) for n, x in step.state.items()})
    for i in range(5):
        x, t = drawn(6, 5, seed=10 + i), drawn(6, 3, seed=20 + i)
        loss = F.mse_loss(torch.tanh(x @ w), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = step(part(x, comm), part(t, comm))
        torch.testing.assert_close(found.cpu(), loss.detach())
        if i >= 3:
            same = again(part(x, comm), part(t, comm))
            assert torch.equal(found, same)
        if i == 2:
            again.load(step.save(tmp_path).parent)
    torch.testing.assert_close(step.state["w"].cpu(), part(w.detach(), comm).cpu())
    assert torch.equal(step.state["w"], again.state["w"])


@pytest.mark.world(2)
def test_a_portable_state_is_read_in_another_layout(comm: mf.Communicator, tmp_path: Path) -> None:
    if comm.rank == 0:
        comm.store.set("step.saved", str(tmp_path / "saved"))
    shared = Path(comm.store.get("step.saved").decode())
    kept = {"w": drawn(5, 3, seed=1), "v": drawn(5, 3, seed=2)}
    step = mf.Step(program(), {n: part(x, comm) for n, x in kept.items()})
    assert step.save(shared, portable=True) == shared
    with mf.FusionDefinition("columns") as fd:
        for name in kept:
            x = fd.define_tensor([5, 3], mesh=MESH, layout={"dp": Shard(1)}, name=name)
            fd.add_output(x + 0, reuse=x)
    empty = {n: mf.shard_tensor(torch.zeros(5, 3), MESH, {"dp": Shard(1)}, rank=comm.rank)
             for n in kept}  # fmt: skip
    other = mf.Step(mf.compile(fd), {n: x.clone().to(comm.device) for n, x in empty.items()})
    other.load(shared)
    for name, x in kept.items():
        wanted = mf.shard_tensor(x, MESH, {"dp": Shard(1)}, rank=comm.rank)
        assert torch.equal(other.state[name].cpu(), wanted)
    with pytest.raises(mf.ProgramError, match="has a checkpoint"):
        step.save(shared, portable=True)


# -- bad days ------------------------------------------------------------------------------------


def running(comm: mf.Communicator) -> mf.Step:
    return mf.Step(program(), {n: part(drawn(5, 3, seed=1), comm) for n in ("w", "v")})


def train(step: mf.Step, comm: mf.Communicator, i: int = 0) -> None:
    step(part(drawn(6, 5, seed=10 + i), comm), part(drawn(6, 3, seed=20 + i), comm))


FAULTS = [
    ("write", "", 1), ("write", "", 0), ("fsync", "", 1), ("open", "", 1), ("open", "rank", 1),
    ("folder", "", 0), ("open", ".metadata", 0), ("rename", "", 0), ("rename", "", 1),
]  # fmt: skip


@pytest.mark.world(2)
@pytest.mark.parametrize("portable", [True, False])
def test_a_rank_that_cannot_save_is_an_error_of_all(
    portable: bool, comm: mf.Communicator, tmp_path: Path
) -> None:
    """With the path, at once; nothing is there to load, and training goes on."""
    shared = shared_folder(comm, tmp_path, f"step.full.{portable}")
    step = running(comm)
    for n, (moment, only, guilty) in enumerate(FAULTS):
        if (only == ".metadata" or (moment, guilty) == ("rename", 1)) and portable != bool(only):
            continue  # that rank does no such thing
        folder, began = shared / str(n), time.monotonic()
        fault = failing(moment, only) if comm.rank == guilty else nullcontext()
        with fault, pytest.raises(mf.ProgramError) as error:
            step.save(folder, portable=portable)
        assert time.monotonic() - began < 10, f"{moment} {only}"
        assert re.search(rf"{re.escape(str(folder))}.* cannot be written", str(error.value))
        if comm.rank != guilty:
            assert error.value.what == f"rank {guilty} could not save the state of @train"
        if (moment, guilty, portable) == ("write", 1, False) and comm.rank == 0:
            said = f"mdfuse.errors.ProgramError: {error.value}"
            assert not not_said(shown()["test_full_disk"], said), said
        train(step, comm)
        with pytest.raises(mf.ProgramError):
            step.load(folder)
        train(step, comm)
        comm.barrier()
        step.save(folder, portable=portable)  # once there is room again
        step.load(folder)


@pytest.mark.world(2)
def test_files_of_two_saves_are_no_state(comm: mf.Communicator, tmp_path: Path) -> None:
    """Where the second one ended between two ranks."""
    shared = shared_folder(comm, tmp_path, "step.two.saves")
    step = running(comm)
    step.save(shared)
    train(step, comm)
    fault = failing("rename") if comm.rank == 1 else nullcontext()
    with fault, pytest.raises(mf.ProgramError, match="cannot be written"):
        step.save(shared)
    kept = {n: x.clone() for n, x in step.state.items() if x is not None}
    train(step, comm, 1)
    last = {n: x.clone() for n, x in step.state.items() if x is not None}
    with pytest.raises(mf.ProgramError, match="has files of several saves"):
        step.load(shared)
    assert all(torch.equal(step.state[n], x) for n, x in last.items())
    assert not any(torch.equal(kept[n], x) for n, x in last.items())


@pytest.mark.world(2)
@pytest.mark.parametrize("portable", [True, False])
def test_a_rank_that_cannot_load_is_an_error_of_all(
    portable: bool, comm: mf.Communicator, tmp_path: Path
) -> None:
    shared = shared_folder(comm, tmp_path, f"step.torn.{portable}")
    step = running(comm)
    step.save(shared / "saved", portable=portable)
    train(step, comm)
    last = {n: x.clone() for n, x in step.state.items() if x is not None}
    elsewhere = shared / ("gone" if comm.rank == 1 else "saved")
    text = "cannot be read" if comm.rank == 1 else "rank 1 could not load the state of @train"
    with pytest.raises(mf.ProgramError, match=text):
        step.load(elsewhere)
    assert all(torch.equal(step.state[n], x) for n, x in last.items())
    train(step, comm)
    step.load(shared / "saved")


@pytest.mark.world(2)
@pytest.mark.parametrize("portable", [True, False])
def test_what_is_no_path_on_one_rank_is_an_error_of_all(
    portable: bool, comm: mf.Communicator, tmp_path: Path
) -> None:
    step, folder = running(comm), 5 if comm.rank else tmp_path / "state"
    for do in (lambda: step.save(folder, portable=portable), lambda: step.load(folder)):
        with pytest.raises(mf.ProgramError, match=r"the path 5|rank 1 could not"):
            do()
    train(step, comm)


@pytest.mark.world(2)
def test_whatever_one_rank_raises_the_others_hear(comm: mf.Communicator) -> None:
    """Also what is no error of mdfuse's: nobody waits for that rank."""

    def act() -> None:
        if comm.rank == 1:
            raise MemoryError("no room")

    kind = MemoryError if comm.rank == 1 else mf.ProgramError
    with pytest.raises(kind, match="no room" if comm.rank == 1 else "rank 1 could not do it"):
        together(comm, "do it", act)
    comm.barrier()


@pytest.mark.world(2)
def test_a_rank_whose_trace_is_full_trains_on(
    comm: mf.Communicator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = shared_folder(comm, tmp_path, "step.trace")
    how = {"overlap": "never", "compile": "never"}  # the same calls, traced or not: equal bits
    traced = mf.Options(trace=str(shared), **how)
    steps = [mf.Step(program(o), {n: part(drawn(5, 3, seed=1), comm) for n in ("w", "v")})
             for o in (traced, mf.Options(**how))]  # fmt: skip
    for step in steps:
        train(step, comm)
    size = (shared / f"rank{comm.rank}.jsonl").stat().st_size
    with room(size + 50) if comm.rank == 1 else nullcontext():
        for i in range(3):
            for step in steps:
                train(step, comm, i)
    for name, x in steps[0].state.items():
        assert torch.equal(x, steps[1].state[name])
    said = [r.getMessage() for r in caplog.records if r.name == "mdfuse.trace"]
    assert len(said) == (comm.rank == 1), said
