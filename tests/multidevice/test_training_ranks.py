"""Steps of training in microbatches, in stages and with split states, on real ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, TensorSpec

ROWS = {"dp": Shard(0)}
FIRST, SECOND = (DeviceMesh([2 * n, 2 * n + 1], axes=["dp"]) for n in range(2))


class Tied(nn.Module):
    """A table that is the head, too, and layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


def module() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(11, (8, 5), generator=generator) for _ in range(2))
    return ids, labels


@pytest.mark.world(4)
@pytest.mark.parametrize("is_staged", [True, False])
def test_steps_begin_go_on_and_are_read(
    comm: mf.Communicator, tmp_path: Path, is_staged: bool
) -> None:
    """A pipeline of two stages, or one mesh: states are split, and saved, and go on to the bit."""
    everyone = DeviceMesh.arange(dp=4)
    how: dict[str, Any] = {"stages": [FIRST, SECOND]} if is_staged else {"mesh": everyone}
    first, last = (FIRST, SECOND) if is_staged else (everyone, everyone)
    ids, labels = batch()
    model = mf.from_torch(module(), (ids,), layouts={"input:0": ROWS}, **how)
    step = model.training_step(
        lambda y, labels: mf.ops.cross_entropy(y.flatten(0, 1), labels.flatten()),
        extra={"labels": TensorSpec((8, 5), torch.int64, last, ROWS)},
        optimizer=partial(mf.optim.adamw, lr=0.1),
        clip=0.5,
        microbatches=2,
        state_layouts={"*": ROWS},
    )
    options = mf.Options(overlap="never")
    running = step.start(model.load(comm=comm), options=options)
    local = [
        mf.shard_tensor(x, mesh, ROWS, rank=comm.rank).to(comm.device)
        if comm.rank in mesh
        else None
        for x, mesh in ((ids, first), (labels, last))
    ]
    alone = module()
    adamw = torch.optim.AdamW(alone.parameters(), 0.1)
    for n in range(3):
        loss, norm = running(*local)
        if n == 1:
            running.save(tmp_path)
        adamw.zero_grad()
        wanted = F.cross_entropy(alone(ids).flatten(0, 1), labels.flatten())
        wanted.backward()
        whole = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        adamw.step()
        torch.testing.assert_close((loss.cpu(), norm.cpu()), (wanted.detach(), whole))
    for name, w in alone.named_parameters():
        if (part := running.state.get(name)) is not None:
            torch.testing.assert_close(part.cpu(), w.detach(), rtol=1e-3, atol=1e-5)
    last_state = {n: x.clone() for n, x in running.state.items() if x is not None}
    running.load(tmp_path)
    running(*local)
    for name, part in last_state.items():
        assert torch.equal(part, running.state[name])
