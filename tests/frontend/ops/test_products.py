"""Products of groups of rows with a matrix each: values, gradients, and what ranks send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, FusionDefinition, Shard
from mdfuse.ir import groups

MESH = DeviceMesh.arange(ep=3)
#: Five experts over three ranks: 2, 2 and 1. One has no row, and the last row has no expert.
X, W = torch.randn(10, 4, dtype=torch.float64), torch.randn(5, 4, 3, dtype=torch.float64)
ENDS = torch.tensor([2, 2, 5, 8, 9])

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, tuple[int, ...]]]] = {
    "experts": ({}, {"ep": Shard(0)}, ("Allreduce", (10, 3))),
    "rows": ({"ep": Shard(0)}, {}, ("Allreduce", (5, 4, 3))),
    "features": ({"ep": Shard(1)}, {"ep": Shard(1)}, ("Allreduce", (10, 3))),
    "columns": ({}, {"ep": Shard(2)}, ("Allreduce", (10, 4))),
}


def plain(x: Tensor, w: Tensor) -> Tensor:
    spans = zip([0, *ENDS.tolist()], ENDS.tolist(), strict=False)
    rows = [x[a:b] @ w[g] for g, (a, b) in enumerate(spans)]
    return torch.cat([*rows, torch.zeros(1, 3, dtype=torch.float64)])


@pytest.mark.parametrize("looks", [True, False], ids=["spans", "masks"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_by_their_experts(name: str, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "may_look", lambda x: looks)
    of_x, of_w, first = LAYOUTS[name]
    with FusionDefinition("experts") as fd:
        x = fd.define_tensor(X.shape, X.dtype, MESH, of_x)
        w = fd.define_tensor(W.shape, W.dtype, MESH, of_w)
        ends = fd.define_tensor(ENDS.shape, ENDS.dtype, MESH)
        y = F.grouped_mm(x, w, offs=ends)
        dx, dw = mf.grad(y.square().sum(), [x, w])
        (again,) = mf.grad((dw * dw).sum(), [x])
        for result in (y, dx, dw, again):
            fd.add_output(result)
    program = mf.compile(fd)
    a, b = X.clone().requires_grad_(), W.clone().requires_grad_()
    found = torch.autograd.grad(plain(a, b).square().sum(), [a, b], create_graph=True)
    (twice,) = torch.autograd.grad((found[1] * found[1]).sum(), a)
    expected = [plain(X, W), *(g.detach() for g in found), twice]
    check_everywhere(program, [X, W, ENDS], expected)
    assert first in [(c.kind, tuple(c.shape)) for c in program.communications]


def test_it_is_what_torch_computes() -> None:
    x, w = X.float(), W.float()
    ends = torch.tensor([2, 2, 5, 8, 10], dtype=torch.int32)
    with FusionDefinition("torch") as fd:
        given = [fd.define_tensor(t.shape, t.dtype) for t in (x, w, ends)]
        fd.add_output(F.grouped_mm(given[0], given[1], offs=given[2]))
    wide = F.pad(w, (0, 5, 0, 4)), F.pad(x, (0, 4))  # torch wants extents of whole 16 bytes
    wanted = F.grouped_mm(wide[1], wide[0], offs=ends)[:, :3]
    torch.testing.assert_close(mf.reference(fd, [x, w, ends])[0], wanted)


def test_what_is_wrong_is_said() -> None:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([10, 4]), fd.define_tensor([5, 4, 3])
        ends = fd.define_tensor([5], torch.int32)
        for wrong in ((x, w, ends[:4]), (x.T, w, ends), (x, w.double(), ends), (x, w, ends * 0.5)):
            with pytest.raises(DefinitionError, match="offs has e integers"):
                fd.ops.grouped_mm(*wrong)
        with pytest.raises(DefinitionError, match="takes it with 3 dims"):
            fd.ops.grouped_mm(x, w[0], ends)
        with pytest.raises(DefinitionError, match="without offs"):
            F.grouped_mm(x, w[0])
