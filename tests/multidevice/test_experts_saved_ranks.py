"""States of experts, saved on one mesh and read on the next, and experts split inside, on ranks."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # defines the operation of `grouped`
from helpers.expert_models import ids, inside_experts, module_of
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

grouped = torch.ops.transformers.grouped_mm_fallback


class Routed(nn.Module):
    """A table, and five experts of which each token takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.router = nn.Linear(6, 5, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(5, 6, 6) / 3) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).flatten(0, 1)
        weights, of = self.router(x).softmax(-1).topk(2, -1)
        of, places = of.flatten().sort()
        ends = torch.histc(of.float(), 5, 0, 4).cumsum(0, dtype=torch.int32)
        y = grouped(F.silu(grouped(x[places // 2], self.up, ends)), self.down, ends)
        y = y * weights.flatten()[places].unsqueeze(-1)
        return x + y[places.argsort()].unflatten(0, (-1, 2)).sum(1)


def routed_step(mesh: DeviceMesh, ids: Tensor) -> tuple[Any, Any]:
    torch.manual_seed(0)
    experts: dict[str, Any] = {"ep": Shard(0)}
    rows = {a: Shard(0) for a in mesh.axes}
    inside = {"fsdp": Shard(1)} if "fsdp" in mesh.axes else {}
    layouts = {"up": experts | inside, "down": experts | inside, "input:0": rows}
    gather = [*inside]
    model = mf.from_torch(Routed(), (ids,), mesh=mesh, layouts=layouts, gather=gather)
    adamw = partial(mf.optim.adamw, lr=0.1, eps=0.01)
    return model, model.training_step(lambda y: (y * y).mean(), optimizer=adamw)


MESHES_OF_EXPERTS = [
    DeviceMesh([3, 1], axes=["ep"]), DeviceMesh.arange(ep=4), DeviceMesh.arange(fsdp=2, ep=2),
    DeviceMesh([2], axes=["ep"]),
]  # fmt: skip


@pytest.mark.world(4)
def test_experts_go_on_on_other_meshes(comm: mf.Communicator, tmp_path: Path) -> None:
    """Saved behind each step and read on the next mesh; ranks without parts take part."""
    if comm.rank == 0:
        comm.store.set("experts.saved", str(tmp_path))
    folder = Path(comm.store.get("experts.saved").decode())
    ids = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    alone = Routed().double()
    adamw = torch.optim.AdamW(alone.parameters(), 0.1, eps=0.01, weight_decay=0.01)
    for n, mesh in enumerate(MESHES_OF_EXPERTS):
        model, step = routed_step(mesh, ids)
        running = step.start(model.load(comm=comm))
        if n:
            running.load(folder / str(n - 1))
        if comm.rank in mesh:
            here = mf.shard_tensor(ids, mesh, {a: Shard(0) for a in mesh.axes}, rank=comm.rank)
            running(here.to(comm.device))
        else:
            running(None)
        running.save(folder / str(n), portable=True)
        adamw.zero_grad()
        by_loop(alone, ids).square().mean().backward()
        adamw.step()
        for name, w in alone.named_parameters():
            part = running.state[name]
            assert (part is not None) == (comm.rank in mesh)
            if part is not None:
                layout = model.fusion.layout(name)
                want = mf.shard_tensor(w.detach(), layout, rank=comm.rank)
                torch.testing.assert_close(part.cpu().double(), want, rtol=1e-3, atol=1e-4)


def by_loop(module: Routed, ids: Tensor) -> Tensor:
    """The module, one expert after the other."""
    x = module.table(ids).flatten(0, 1)
    weights, of = module.router(x).softmax(-1).topk(2, -1)
    y = x
    for e in range(5):
        share = (weights * (of == e)).sum(-1, keepdim=True)
        y = y + share * (F.silu(x @ module.up[e]) @ module.down[e])
    return y


@pytest.mark.world(4)
@pytest.mark.parametrize(("name", "counts"), [("Qwen3-MoE", "host"), ("Llama 4", "device")])
def test_experts_that_tp_splits_inside(comm: mf.Communicator, name: str, counts: Any) -> None:
    """Two steps on ep=2 x tp=2 beside the module in f64, by a loop over its experts."""
    mesh, given = DeviceMesh.arange(ep=2, tp=2), ids()
    module: Any = module_of(name)
    kwargs = {"input_ids": given, "use_cache": False}
    layouts = {**inside_experts(name), "input:*": {"ep": Shard(0)}}
    model = mf.from_torch(module, (), kwargs, mesh=mesh, layouts=layouts)
    sgd = partial(mf.optim.sgd, lr=1.0)
    step = model.training_step(lambda y: (y * y).mean(), optimizer=sgd)
    running = step.start(model.load(comm=comm), options=mf.Options(counts=counts))
    exact = copy.deepcopy(module).double()
    exact.set_experts_implementation("eager")
    plain = torch.optim.SGD(exact.parameters(), lr=1.0)
    for _ in range(2):
        running(*running.shard(given))
        plain.zero_grad()
        logits = exact(**kwargs).logits
        (logits * logits).mean().backward()
        plain.step()
    for key, w in exact.named_parameters():
        part = running.state[key]
        assert part is not None
        want = mf.shard_tensor(w.detach(), model.fusion.layout(key), rank=comm.rank)
        torch.testing.assert_close(part.cpu().double(), want, rtol=1e-3, atol=1e-4)
