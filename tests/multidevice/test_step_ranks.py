"""Training steps on real ranks: split parameters, in place, on from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.drawn import drawn
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

F = torch.nn.functional
MESH = DeviceMesh.arange(dp=2)
SPLIT = {"dp": Shard(0)}


def program() -> mf.Program:
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
    return mf.compile(fd)


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
