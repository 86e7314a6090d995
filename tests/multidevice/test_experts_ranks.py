"""Experts on GPUs, whose products of groups are kernels that a compiled launch calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard

TOKENS, WIDTH, HIDDEN, EXPERTS, EACH = 384, 64, 96, 8, 3
SPLIT = {"ep": Shard(0)}


class Experts(nn.Module):
    """Rows in the order of their experts, products of groups, rows in their own order again."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(EACH, -1)
        ids, places = ids.flatten().sort()
        ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = x[places // EACH]
        y = F.silu(F.grouped_mm(rows, self.gate, offs=ends))
        y = y * F.grouped_mm(rows, self.up, offs=ends)
        y = F.grouped_mm(y, self.down, offs=ends)
        y = y * weights.flatten()[places].unsqueeze(-1).to(x.dtype)
        return y[places.argsort()].unflatten(0, (-1, EACH)).sum(1)


def drawn() -> tuple[Experts, Tensor, Tensor]:
    """A module, rows and a cotangent; a token's scores are different whole numbers: no ties."""
    torch.manual_seed(5)
    module = Experts()
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0, 0.2)
        module.router.weight.copy_(torch.eye(EXPERTS, WIDTH))
    x, ct = torch.randn(2, TOKENS, WIDTH)
    x[:, :EXPERTS] = torch.rand(TOKENS, EXPERTS).argsort(1).float() - 4
    return module.bfloat16(), x.bfloat16(), ct.bfloat16()


def reference(module: Experts, x: Tensor, ct: Tensor) -> list[Tensor]:
    """The result and its gradients, in f64, one expert after the other."""
    x, router, gate, up, down = (
        t.detach().double().requires_grad_()
        for t in (x, module.router.weight, module.gate, module.up, module.down)
    )
    weights, ids = (x @ router.T).softmax(-1).topk(EACH, -1)
    y = torch.zeros_like(x)
    for n in range(EXPERTS):
        share = (weights * (ids == n)).sum(-1, keepdim=True)
        y = y + share * ((F.silu(x @ gate[n]) * (x @ up[n])) @ down[n])
    gradients = torch.autograd.grad(y, [x, router, gate, up, down], ct.double())
    return [y.detach(), *gradients]


@pytest.mark.world(2)
@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["auto", "always", "never"])
def test_experts_forward_and_backward(comm: mf.Communicator, compile: str) -> None:
    mesh = DeviceMesh.arange(ep=2)
    module, x, ct = drawn()
    layouts = dict.fromkeys(("gate", "up", "down", "input:x", "output:0"), SPLIT)
    model = mf.from_torch(module, (x,), mesh=mesh, layouts=layouts)
    with mf.FusionDefinition("experts") as fd:
        rows, seed = (
            fd.define_tensor([TOKENS, WIDTH], torch.bfloat16, mesh, SPLIT, name=name)
            for name in ("x", "ct")
        )
        y, weights = model.record(rows, name="m")
        names = ("router.weight", "gate", "up", "down")
        gradients = mf.grad(y, [rows, *(weights[f"m.{name}"] for name in names)], seed=seed)
        for result in (y, *gradients):
            fd.add_output(result)
    program = mf.compile(fd, options=Options(compile=compile))
    whole = {"x": x, "ct": ct, **{f"m.{k}": w.detach() for k, w in module.named_parameters()}}
    given = [
        mf.shard_tensor(whole[name], program.fusion.values[name].layout, rank=comm.rank).to(
            comm.device
        )
        for name in program.fusion.inputs
    ]
    wanted = reference(module, x, ct)
    for _ in range(4):
        results = program.run(*given)
        for name, got, want in zip(program.fusion.outputs, results, wanted, strict=True):
            part = mf.shard_tensor(want, program.fusion.values[name].layout, rank=comm.rank)
            error = (got.cpu().double() - part).norm() / part.norm()
            assert error < 0.02, f"%{name}: {error}"
