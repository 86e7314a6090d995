"""An operation of extents that a run chooses takes each that the operation itself takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

MESH = DeviceMesh.arange(x=2)


def several(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def _rows(x: Any) -> Any:
    return torch.ones_like(x[:, 0]).cumsum(0) - 1.0


#: name -> a function of x [n, 4] and y [n, 4], whose n is one symbol.
CASES: dict[str, Callable[[Any, Any], Any]] = {
    "einsum, summed over": lambda x, y: torch.einsum("ni,nj->ij", x, y),
    "einsum, kept": lambda x, y: torch.einsum("ni,ni->n", x, y),
    "einsum of ones": lambda x, y: torch.einsum("ni,nj->nij", x, y[:, :1]),
    "chain_matmul": lambda x, y: torch.linalg.multi_dot([x.T, y, x.T]),
    "tensordot": lambda x, y: torch.tensordot(x, y, ([0], [0])),
    "bilinear": lambda x, y: F.bilinear(x, y, x.new_ones(3, 4, 4)),
    "diff": lambda x, y: x.diff(dim=0),
    "diff, twice": lambda x, y: torch.diff(x, 2, 0),
    "diff, with more": lambda x, y: torch.diff(x, dim=0, prepend=y[:1], append=y),
    "diagonal": lambda x, y: (x.diagonal(), x.diagonal(2), x.diagonal(-1)),
    "diag": lambda x, y: (x.diag(), x.trace()),
    "diag_embed": lambda x, y: torch.diag_embed(x.T, 1),
    "triangles": lambda x, y: (x.tril(), x.triu(1)),
    "roll": lambda x, y: (x.roll(1, 0), x.roll(-3, 0), x.roll(5)),
    "tensor_split": lambda x, y: x.tensor_split(3),
    "tensor_split at places": lambda x, y: x.tensor_split([1, 3]),
    "broadcast_tensors": lambda x, y: torch.broadcast_tensors(x, y[:, :1], y.new_ones(4)),
    "repeated": lambda x, y: (x[:, :1].expand_as(y), x[:, :1] + y, y * x[:, 1:2]),
    "slices": lambda x, y: (x[1:], x[:-1], x[:2], x[1:3] * 2.0, y[-1:]),
    "slices of one extent": lambda x, y: x[1:] - y[:-1],
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[1:], 0, 1),
    "masked_scatter": lambda x, y: x.masked_scatter(y > 2.0, y),
    "isin": lambda x, y: torch.isin(x, y),
    "take_along_dim": lambda x, y: torch.take_along_dim(x, y.argsort(0), 0),
    "searchsorted": lambda x, y: torch.searchsorted(x.new_ones(3).cumsum(0), y),
    "counts": lambda x, y: _rows(x),
    "variances": lambda x, y: (x.var(0), x.var(0, correction=0), x.var(0, correction=3), x.std()),
    "means": lambda x, y: (x.mean(), x.mean(0), F.mse_loss(x, y), F.l1_loss(x, y)),
    "norms": lambda x, y: (x.norm(dim=0), F.normalize(x, dim=1)),
    "cross_entropy": lambda x, y: F.cross_entropy(x, y.softmax(1), label_smoothing=0.25),
    "cross_entropy of classes": lambda x, y: F.cross_entropy(x, y.argmax(1), reduction="none"),
    "cumsum": lambda x, y: x.cumsum(0),
    "flip": lambda x, y: x.flip(0),
    "kron": lambda x, y: torch.kron(x, y[:, :2]),
    "block_diag": lambda x, y: torch.block_diag(x, y),
    "cdist": lambda x, y: torch.cdist(x, y, 1.0),
    "matmul": lambda x, y: (x @ y.T, x.T @ y),
    "joined": lambda x, y: (torch.cat([x, y]), torch.stack([x, y], 1)),
    "softmax": lambda x, y: x.softmax(0),
    "logsumexp": lambda x, y: (x.logsumexp(0), y.logsumexp(1, keepdim=True)),
    "flattened": lambda x, y: (x.flatten(), x.reshape(-1, 2), x.unflatten(1, (2, 2))),
}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_each_extent_that_torch_takes(name: str, split: bool) -> None:
    """No row, one, fewer than there are ranks would have more, and uneven parts."""
    layout = {"x": Shard(0)} if split else {}
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([-1, 4], mesh=MESH, layout=layout, name="x")
        y = fd.define_tensor([x.shape[0], 4], mesh=MESH, layout=layout, name="y")
        for z in several(CASES[name](x, y)):
            fd.add_output(z)
    program = mf.compile(fd)
    for n in (0, 1, 3):
        given = [torch.rand(n, 4, generator=torch.Generator().manual_seed(s)) * 4 for s in (0, 1)]
        try:
            expected = several(CASES[name](*given))
        except (RuntimeError, IndexError):  # torch takes no such extent
            continue
        got = mf.simulate(program, given).outputs
        torch.testing.assert_close(got, [*expected], equal_nan=True)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("split", [True, False])
def test_gradients_of_attention_of_few_rows(n: int, split: bool) -> None:
    """Attention that gives its sums, which the gradient reads, is one operation as others are."""
    with mf.FusionDefinition("attention") as fd:
        x = fd.define_tensor([-1, 4], mesh=MESH, layout={"x": Shard(0)} if split else {})
        y = F.scaled_dot_product_attention(x[None], x[None], x[None])
        fd.add_output(mf.grad(y.square().sum(), [x])[0])
    given = torch.linspace(-1.0, 1.0, n * 4).reshape(n, 4)
    leaf = given.clone().requires_grad_()
    z = F.scaled_dot_product_attention(leaf[None], leaf[None], leaf[None])
    (expected,) = torch.autograd.grad(z.square().sum(), leaf)
    torch.testing.assert_close(mf.simulate(mf.compile(fd), [given]).outputs[0], expected)
