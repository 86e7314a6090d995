"""Imported modules on real ranks: loaded box by box, run, trained; a failure is one of all."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, ProgramError, Shard
from mdfuse.compiled.imported import ImportedModel

MESH = DeviceMesh.arange(dp=2, tp=2)
BATCH = {"dp": Shard(0)}
LAYOUTS = {
    "*.in_proj_*": {"tp": Shard(0)},
    "*.out_proj.weight": {"tp": Shard(1)},
    "*.linear1.*": {"tp": Shard(0)},
    "*.linear2.weight": {"tp": Shard(1)},
    "input:src": BATCH,
    "output:0": BATCH,
}


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def x() -> Tensor:
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1))


def imported() -> ImportedModel:
    with torch.device("meta"):
        module = encoder()
    return mf.from_torch(module, (x(),), mesh=MESH, layouts=LAYOUTS, blocks={"*.in_proj_*": 3})


def checkpoint(folder: Path, rank: int) -> Path:
    """A file of this rank's own, as all of them have the same."""
    path = folder / f"weights{rank}.safetensors"
    save_file({name: w.detach() for name, w in encoder().named_parameters()}, path)
    return path


@pytest.mark.world(4)
def test_a_forward_of_what_was_loaded(comm: mf.Communicator, tmp_path: Path) -> None:
    model = imported()
    weights = model.load(checkpoint(tmp_path, comm.rank), comm=comm)
    local = mf.shard_tensor(x(), MESH, BATCH, rank=comm.rank).to(comm.device)
    found = model.outputs(model.compile().run(*weights, local))
    with torch.no_grad():
        wanted = mf.shard_tensor(encoder()(x()), MESH, BATCH, rank=comm.rank)
    torch.testing.assert_close(found.cpu(), wanted)


@pytest.mark.world(4)
def test_steps_of_training(comm: mf.Communicator, tmp_path: Path) -> None:
    model = imported()
    step = model.training_step(
        lambda y: (y * y * y).mean(), optimizer=partial(mf.optim.adamw, weight_decay=0.1)
    )
    options = mf.Options(overlap="never")  # runs in turns would round in turns
    running = step.start(model.load(checkpoint(tmp_path, comm.rank), comm=comm), options=options)
    alone = encoder()
    adamw = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1)
    local = mf.shard_tensor(x(), MESH, BATCH, rank=comm.rank).to(comm.device)
    rate = torch.tensor(0.01, device=comm.device)
    for n in range(3):
        loss = running(local, rate)
        if n == 1:
            running.save(tmp_path)
        adamw.zero_grad()
        wanted = alone(x()).pow(3).mean()
        wanted.backward()
        adamw.step()
        torch.testing.assert_close(loss.cpu(), wanted.detach(), rtol=1e-4, atol=1e-6)
    last = {name: part.clone() for name, part in running.state.items() if part is not None}
    running.load(tmp_path)
    running(local, rate)
    for name, part in last.items():
        assert torch.equal(part, running.state[name])  # on to the bit


@pytest.mark.world(4)
def test_steps_with_split_positions(comm: mf.Communicator, tmp_path: Path) -> None:
    """Losses of steps are those of torch; a batch that other axes split stays split."""
    module, drawn = encoder(), torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))
    layouts = {**LAYOUTS, "activation:layers.*": {"tp": Shard(1)}}
    model = mf.from_torch(module, (drawn,), mesh=MESH, layouts=layouts, blocks={"*.in_proj_*": 3})
    step = model.training_step(
        lambda y: (y * y * y).mean(), optimizer=partial(mf.optim.sgd, lr=0.1)
    )
    running = step.start(model.load(checkpoint(tmp_path, comm.rank), comm=comm))
    local = mf.shard_tensor(drawn, MESH, BATCH, rank=comm.rank).to(comm.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        wanted = module(drawn).pow(3).mean()
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(running(local).cpu(), wanted.detach(), rtol=1e-4, atol=1e-6)
    kinds = {c.kind for c in step.compile(mf.Options(overlap="never")).communications}
    assert {"Allgather", "ReduceScatter"} <= kinds


@pytest.mark.world(4)
def test_what_ranks_save_is_read_in_another_layout(comm: mf.Communicator, tmp_path: Path) -> None:
    """Split by tp in blocks, trained; read by fsdp, and by torch."""
    if comm.rank == 0:
        comm.store.set("importing.saved", str(tmp_path / "saved"))
    shared = Path(comm.store.get("importing.saved").decode())
    model = imported()
    step = model.training_step(lambda y: y.pow(3).mean(), optimizer=partial(mf.optim.sgd, lr=0.1))
    running = step.start(model.load(checkpoint(tmp_path, comm.rank), comm=comm))
    running(mf.shard_tensor(x(), MESH, BATCH, rank=comm.rank).to(comm.device))
    assert model.save(shared, running.weights, comm=comm) == shared
    alone = encoder()
    alone(x()).pow(3).mean().backward()
    with torch.no_grad():
        for w in alone.parameters():
            w -= 0.1 * w.grad
    mesh = DeviceMesh.arange(fsdp=4)
    other = mf.from_torch(encoder(), (x(),), mesh=mesh, layouts={"*": {"fsdp": Shard(0)}})
    found = other.load(shared, comm=comm)
    wanted = other.load(alone.state_dict(), rank=comm.rank)
    for part, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(part.cpu(), want, rtol=1e-4, atol=1e-6)
    with pytest.raises(ProgramError, match="has a checkpoint"):
        model.save(shared, running.weights, comm=comm)


@pytest.mark.world(2)
def test_a_file_that_one_rank_lacks(comm: mf.Communicator, tmp_path: Path) -> None:
    module, mesh = nn.Linear(4, 6), DeviceMesh.arange(tp=2)
    layouts = {"weight": {"tp": Shard(0)}}
    model = mf.from_torch(module, (torch.zeros(2, 4),), mesh=mesh, layouts=layouts)
    path = tmp_path / "weights.safetensors"
    other = tmp_path / "gone.safetensors"
    save_file({name: w.detach() for name, w in module.named_parameters()}, path)
    text = "gone.safetensors cannot be read" if comm.rank else "rank 1 could not load Linear"
    with pytest.raises(ProgramError, match=text):
        model.load(other if comm.rank else path, comm=comm)
    found = model.load(path, comm=comm)  # and all go on
    assert found[0] is not None and found[0].shape == (3, 4)
