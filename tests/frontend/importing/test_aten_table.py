"""Operations of aten beside torch: what a module calls is what the program computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, Shard
from mdfuse.frontend.importing.aten_table import BY_VALUE, IN_CONTEXT, ROWS, TABLE, VIEWS, is_known
from mdfuse.trees import flattened

TP = DeviceMesh.arange(tp=2)


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


A, B, ROW = numbers(4, 6), numbers(4, 6).flip(0), numbers(6)
CUBE, IMAGE = numbers(4, 3, 6), numbers(4, 3, 6, 6)
IDS = torch.tensor([[0, 2, 1], [3, 0, 2], [1, 1, 3], [2, 0, 0]])
KNOWN = torch.tensor([2, 0, 1])
STEPS = torch.tensor([-1.0, -0.5, 0.25, 0.75], dtype=torch.float64)
TURNS = torch.polar(torch.ones(4, dtype=torch.float64), torch.arange(4, dtype=torch.float64))

#: name -> function, and its arguments.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "unary": (lambda x: [x.exp(), -x, x.abs(), x.sin(), x.sigmoid(), x.tanh(), x.floor()], (A,)),
    "activations": (
        lambda x: [F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.elu(x, 0.5), F.celu(x),
                   F.leaky_relu(x, 0.2), F.hardtanh(x), F.softplus(x), F.mish(x), F.relu6(x),
                   F.logsigmoid(x), F.hardswish(x), F.selu(x), F.softshrink(x), F.glu(x, 1)],
        (A,),
    ),
    "prelu": (lambda x, w: F.prelu(x, w), (CUBE, numbers(3))),
    "binary": (
        lambda x, y: [x + y, x - y, x * y, x / (y + 9), x.maximum(y), torch.atan2(x, y), 2 - x,
                      torch.add(x, y, alpha=0.5), x**2, 2.0**x, x // (y.abs() + 1), x % 2,
                      torch.div(x, y + 9, rounding_mode="trunc"), torch.fmod(x, 0.7)],
        (A, B),
    ),
    "comparisons": (
        lambda x, y: [x > y, x <= 0, (x > 0) & (y > 0), (x > 0) ^ (y > 0), ~(x > 0),
                      torch.logical_or(x > 0, y > 0), x.eq(y), x.ne(0)],
        (A, B),
    ),
    "choices": (
        lambda x, y: [torch.where(x > 0, x, y), torch.where(x > 0, x, 0.0), x.clamp(-0.5, 0.5),
                      x.masked_fill(y > 0, 7.0), x.clamp(min=0), torch.lerp(x, y, 0.25),
                      torch.nan_to_num(x / 0.0), x.clamp_max(0.1)],
        (A, B),
    ),
    "sums": (
        lambda x: [x.sum(), x.sum(0), x.mean(-1, keepdim=True), x.prod(1), x.amax(1), x.amin(),
                   x.var(1), x.std(0, unbiased=False), x.logsumexp(1), x.max(1), x.min(),
                   x.argmax(1), x.any(), (x > 9).all(1), torch.var_mean(x, 0), x.norm(),
                   torch.linalg.vector_norm(x, 2, 1), x.count_nonzero(), x.median(1)],
        (A,),
    ),
    "orders": (lambda x: [x.topk(2, 1), x.sort(1), x.argsort(1), x.cumsum(1), x.cumprod(0)], (A,)),
    "shapes": (
        lambda x: [x.view(2, 2, 6), x.reshape(-1), x.t(), x.flatten(), x.unflatten(1, (2, 3)),
                   x.unsqueeze(1), x[:, None].squeeze(1), x.expand(3, 4, 6), x.repeat(2, 1),
                   x.transpose(0, 1).contiguous(), x.permute(1, 0), x.movedim(0, 1),
                   x.repeat_interleave(2, 1), x.clone().detach(), x.swapaxes(0, 1)],
        (A,),
    ),
    "parts": (
        lambda x: [x[1:3], x[:, ::2], x[2], x[..., -1], x.split(4, 1), x.split([1, 3], 0),
                   x.chunk(2, 1), x.unbind(0), x.narrow(1, 2, 3), x.select(1, 0), x.tril(),
                   x.triu(1), x.diagonal(), x.flip(0), x.roll(1, 1), F.pad(x, (1, 2)),
                   x.tensor_split(3, 1)],
        (A,),
    ),
    "joins": (
        lambda x, y: [torch.cat([x, y], 1), torch.stack([x, y]), torch.hstack([x, y]),
                      torch.vstack((x, y)), x.mT, torch.concat([x, torch.zeros(0), y]),
                      torch.cat([x, torch.ones(4, 2, dtype=x.dtype)], 1)],
        (A, B),
    ),
    "products": (
        lambda x, y, z: [x @ y.T, torch.mm(x, y.T), x @ z, torch.outer(z, z), z.dot(z),
                         torch.addmm(x, x @ x.T, y, beta=0.5, alpha=2), F.linear(x, y, y.sum(1)),
                         torch.bmm(x[None], y.T[None]), torch.einsum("ij,kj->ik", x, y),
                         torch.addmv(z, x.T, y[:, 0])],
        (A, B, ROW),
    ),
    "networks": (
        lambda x, w: [F.softmax(x, -1), F.log_softmax(x, 0), F.layer_norm(x, (6,), w, w),
                      F.rms_norm(x, (6,), w, 1e-6), F.softmax(x, 1, dtype=torch.float32),
                      F.normalize(x, dim=1), F.dropout(x, 0.5, training=False)],
        (A, ROW),
    ),
    "losses": (
        lambda x, y: [F.mse_loss(x, y), F.l1_loss(x, y, reduction="sum"), F.huber_loss(x, y),
                      F.smooth_l1_loss(x, y, beta=0.5), F.kl_div(x, y.softmax(1), reduction="sum"),
                      F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="none"),
                      F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), F.soft_margin_loss(x, y)],
        (A, B),
    ),
    "margins": (
        lambda x, y: [F.cosine_embedding_loss(x, y, torch.ones(4)), F.hinge_embedding_loss(x, y),
                      F.margin_ranking_loss(x, y, y.sign(), margin=0.5), F.triplet_margin_loss(
                          x, y, x.flip(0), swap=True), F.poisson_nll_loss(x, y.exp(), full=True),
                      torch.cdist(x, y), F.bilinear(x, y, x[:, :, None] * y[:, None])],
        (A, B),
    ),
    "in eval mode": (
        lambda x: [F.rrelu(x), F.dropout2d(x, training=False), F.alpha_dropout(x),
                   F.dropout(torch.ones(4, 6), training=False) * x],
        (A,),
    ),
    "class losses": (
        lambda x, i: [F.cross_entropy(x, i), F.nll_loss(x, i, reduction="sum"),
                      F.cross_entropy(x, i, ignore_index=2, label_smoothing=0.1),
                      F.cross_entropy(x, i, reduction="none"),
                      F.cross_entropy(x, i, torch.linspace(1, 2, 6, dtype=x.dtype))],
        (A, torch.tensor([1, 2, 0, 5])),
    ),
    "weights of classes": (
        lambda x, i: [F.cross_entropy(x, i, ROW, label_smoothing=0.1, reduction=how, **more)
                      for how in ("none", "mean", "sum") for more in ({}, {"ignore_index": 2})]
        + [F.cross_entropy(x, x.softmax(1).flip(1), ROW, label_smoothing=smoothed, reduction=how)
           for how in ("none", "mean", "sum") for smoothed in (0.0, 0.2)]
        + [F.cross_entropy(x[:, :, None] * x[:, None, 1:], i[:, None].expand(4, 5), ROW,
                           ignore_index=5, label_smoothing=0.3)],
        (A, torch.tensor([1, 2, 0, 5])),
    ),
    "convolutions": (
        lambda x, w: [F.conv2d(x, w), F.conv2d(x, w, padding=1, stride=2), F.max_pool2d(x, 2),
                      F.avg_pool2d(x, 3, 1), F.adaptive_avg_pool2d(x, 1), F.group_norm(x, 3),
                      F.conv2d(x, w, stride=3), F.interpolate(x, scale_factor=2.0),
                      F.interpolate(x, (3, 3), mode="bilinear")],
        (IMAGE, numbers(2, 3, 3, 3)),
    ),
    "attention": (
        lambda q, m: [F.scaled_dot_product_attention(q, q, q),
                      F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5),
                      F.scaled_dot_product_attention(q, q, q, m),
                      F.scaled_dot_product_attention(q, q, q, m > 0),
                      F.scaled_dot_product_attention(q, q, q, torch.ones(6, 6).tril().bool()),
                      F.scaled_dot_product_attention(q, q, q, torch.ones(6, 6, dtype=torch.bool)),
                      F.scaled_dot_product_attention(
                          q, q, q, torch.full((6, 6), -math.inf, dtype=q.dtype).triu(1)),
                      F.scaled_dot_product_attention(
                          q, q, q, torch.ones(6, 6).tril(-1).bool() | torch.eye(6).bool())],
        (numbers(4, 2, 6, 8), numbers(6, 6)),
    ),
    "lookups": (
        lambda i, w: [F.embedding(i, w), w.index_select(0, i[0]), torch.gather(w, 0, i),
                      F.one_hot(i, 4), torch.take_along_dim(w, i, 0)],
        (IDS, numbers(4, 3)),
    ),
    "known indices": (
        lambda x: [x[KNOWN], x[:, KNOWN], x[:, :, KNOWN], x[KNOWN, :, KNOWN[:, None]][..., 0],
                   x[KNOWN, torch.tensor([0, 2, 1])], x[torch.arange(4)[:, None], torch.arange(3)],
                   x[torch.tensor([-1, 0])], x[:, torch.tensor([[0, 1], [2, -1]])],
                   x[:, torch.arange(3)], x[torch.arange(4)]],
        (CUBE,),
    ),
    "likes": (
        lambda x: [torch.zeros_like(x), torch.full_like(x, 2.5), x.new_ones(2, 3), x * x.size(0),
                   torch.ones_like(x, dtype=torch.int64), torch.arange(4)[:, None] * x.double()],
        (A,),
    ),
    "dtypes": (
        lambda x: [x.float(), x.to(torch.int64), x.to(torch.float32).to(x), x.half().float(),
                   x.type_as(IDS), x.bool()],
        (A,),
    ),
    "matrices": (
        lambda x: [*factored(x @ x.mT + 8 * torch.eye(4).to(x)),
                   torch.linalg.matrix_norm(x), torch.linalg.matrix_norm(x, 1)],
        (A,),
    ),
    "places": (
        lambda x, row: [torch.bucketize(x, STEPS), torch.searchsorted(STEPS, x, right=True),
                        torch.isin(IDS, KNOWN[:2]), torch.quantile(x, 0.3, 1),
                        torch.special.i0(x), torch.special.i1(x), torch.renorm(x, 2, 0, 0.5),
                        torch.view_as_real(torch.complex(x, row.expand_as(x))),
                        torch.view_as_real(torch.polar(x, row.expand_as(x)))],
        (A, ROW),
    ),
    "rotations": (
        lambda x: torch.view_as_real(torch.view_as_complex(x) * TURNS).flatten(1),
        (numbers(4, 4, 2),),
    ),
    "broadcasts": (lambda x, y: [*torch.broadcast_tensors(x, y), x + y], (A, ROW)),
}  # fmt: skip


def factored(x: Tensor) -> list[Tensor]:
    """What is made of a positive definite matrix."""
    side = x[:, :2]
    return [torch.linalg.cholesky(x), torch.linalg.cholesky(x, upper=True), torch.linalg.inv(x),
            torch.linalg.solve(x, side), torch.linalg.solve(x, side.mT, left=False),
            torch.linalg.solve(x, side[:, 0])]  # fmt: skip


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Tensor) -> Any:
        return self.call(*args)


@pytest.mark.parametrize("split", ["whole", "rows", "columns"])
@pytest.mark.parametrize("name", CALLS)
def test_beside_torch(name: str, split: str) -> None:
    call, args = CALLS[name]
    module = Calls(call)
    layouts = {} if split == "whole" else {"input:0": {"tp": Shard(0 if split == "rows" else 1)}}
    model = mf.from_torch(module, args, mesh=TP, layouts=layouts)
    given = [*model.load(), *args]
    found = flattened(model.outputs(mf.simulate(model.compile(), given).outputs))[0]
    wanted = flattened(call(*args))[0]
    for (path, x), (_, y) in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, p=path: f"{name} {p}: {text}")


def test_what_the_table_names_is_there() -> None:
    """Each key is an overload of the torch of this process."""
    for key in {*TABLE, *VIEWS, *IN_CONTEXT, *BY_VALUE, *ROWS}:
        if key.startswith("aten."):
            _, name, overload = key.split(".")
            assert overload in getattr(torch.ops.aten, name).overloads(), key
    assert all(is_known(key) for key in {*BY_VALUE, *ROWS})


@pytest.mark.parametrize(
    ("call", "said"),
    [(lambda x: x + torch.randn(4, 6), "aten.randn.default of neither inputs nor parameters"),
     (lambda x: x * F.dropout(torch.ones(4, 6)), "each run would have the same draw"),
     (lambda x: F.rrelu(x, training=True), "rrelu in training"),
     (lambda x: F.dropout1d(x, training=True), "dropout of whole channels")]
)  # fmt: skip
def test_what_is_refused(call: Callable[..., Any], said: str) -> None:
    with pytest.raises(DefinitionError, match=said) as error:
        mf.from_torch(Calls(call), (A,), mesh=TP).compile()
    assert "test_aten_table.py" in str(error.value)
