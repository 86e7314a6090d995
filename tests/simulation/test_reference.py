"""`mf.reference`: whole programs on one device, against the same programs in plain torch.

Every distributed run is compared with it, so it is compared with nothing of mdfuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere, is_close
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, ProgramError, Shard

MESH = DeviceMesh.arange(dp=2, tp=3)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


@dataclass(frozen=True)
class Model:
    """A program in both spellings.

    Attributes:
        inputs: its arguments.
        define: adds inputs (with layouts) and outputs to a definition.
        plain: the same in torch.
    """

    inputs: tuple[Tensor | float, ...]
    define: Callable[[mf.FusionDefinition], None]
    plain: Callable[..., list[Tensor]]


def two_stages(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([3, 4, 3, 5], torch.float64, DeviceMesh([0]))
    a = fd.ops.sum(x, dims=[3])
    b = fd.ops.set(a).on(DeviceMesh([0, 1, 2, 3]), {"x": Shard(1)})
    fd.add_output(b + b)


def mlp(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([5, 6], torch.float64, MESH, {"dp": Shard(0)})
    w1 = fd.define_tensor([8, 6], torch.float64, MESH, {"tp": Shard(0)})
    b1 = fd.define_tensor([8], torch.float64, MESH, {"tp": Shard(0)})
    w2 = fd.define_tensor([6, 8], torch.float64, MESH, {"tp": Shard(1)})
    b2 = fd.define_tensor([6], torch.float64, MESH)
    h = fd.ops.gelu(fd.ops.linear(x, w1, b1))
    y = fd.ops.linear(h, w2, b2)
    fd.add_output(x + y)
    fd.add_output(fd.ops.layer_norm(x + y).on(MESH, {"dp": Shard(0), "tp": Shard(1)}))


def plain_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> list[Tensor]:
    y = x + F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    return [y, F.layer_norm(y, [6])]


def attention(fd: mf.FusionDefinition) -> None:
    """Written out, heads over tp, rows over dp."""
    x = fd.define_tensor([4, 5, 6], torch.float64, MESH, {"dp": Shard(0)})
    w = fd.define_tensor([18, 6], torch.float64, MESH, {"tp": Shard(0)})
    qkv = fd.ops.linear(x, w).reshape(4, 5, 3, 3, 2).permute(3, 0, 2, 1, 4)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = fd.ops.softmax((q @ k.transpose(-1, -2)) / math.sqrt(2))
    fd.add_output((scores @ v).permute(1, 2, 0, 3).reshape(4, 5, 6))
    fd.add_output(fd.ops.scaled_dot_product_attention(q, k, v, is_causal=True))


def plain_attention(x: Tensor, w: Tensor) -> list[Tensor]:
    qkv = F.linear(x, w).reshape(4, 5, 3, 3, 2).permute(3, 0, 2, 1, 4)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = torch.softmax((q @ k.transpose(-1, -2)) / math.sqrt(2), -1)
    mixed = (scores @ v).permute(1, 2, 0, 3).reshape(4, 5, 6)
    return [mixed, F.scaled_dot_product_attention(q, k, v, is_causal=True)]


def loss(fd: mf.FusionDefinition) -> None:
    """A lookup in a table that is split by rows, and the mean cross entropy over a mask."""
    tokens = fd.define_tensor([7], torch.int64, MESH, {"dp": Shard(0)})
    table = fd.define_tensor([11, 4], torch.float64, MESH, {"tp": Shard(0)})
    mask = fd.define_tensor([7, 11], torch.bool, MESH, {"dp": Shard(0), "tp": Shard(1)})
    h = fd.ops.embedding(tokens, table)
    logits = h @ table.T
    picked = fd.ops.where(mask, fd.ops.log_softmax(logits), 0.0)
    fd.add_output(-fd.ops.sum(picked) / fd.ops.sum(mask))
    fd.add_output(fd.ops.amax(logits, -1))
    fd.add_output(fd.ops.any(mask & (logits > 0), 0))


def plain_loss(tokens: Tensor, table: Tensor, mask: Tensor) -> list[Tensor]:
    logits = F.embedding(tokens, table) @ table.T
    picked = torch.where(mask, torch.log_softmax(logits, -1), 0.0)
    return [-picked.sum() / mask.sum(), logits.amax(-1), (mask & (logits > 0)).any(0)]


def optimizer(fd: mf.FusionDefinition) -> None:
    """A step of Adam on a gradient that is still Partial; the rate is an input of each run."""
    layout = Layout(MESH, {"tp": Shard(0)})
    w = fd.define_tensor([7, 3], torch.float64, layout)
    m = fd.define_tensor([7, 3], torch.float64, layout)
    v = fd.define_tensor([7, 3], torch.float64, layout)
    g = fd.define_tensor([7, 3], torch.float64, MESH, {"dp": Partial(), "tp": Shard(0)})
    rate = fd.define_scalar()
    first, second = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    fd.add_output(w - rate * first / (fd.ops.sqrt(second) + 1e-8), reuse=w)
    fd.add_output(first, reuse=m)
    fd.add_output(second, reuse=v)


def plain_optimizer(w: Tensor, m: Tensor, v: Tensor, g: Tensor, rate: float) -> list[Tensor]:
    first, second = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return [w - rate * first / (second.sqrt() + 1e-8), first, second]


def statistics(fd: mf.FusionDefinition) -> None:
    """Reductions of reductions, over dims that two axes split."""
    x = fd.define_tensor([7, 5, 3], torch.float64, MESH, {"dp": Shard(0), "tp": Shard(0)})
    center = x - fd.ops.mean(x, (0, 2), keepdim=True)
    variance = fd.ops.mean(center * center, (0, 2))
    fd.add_output(variance)
    fd.add_output(center / fd.ops.sqrt(variance + 1e-5).unsqueeze(-1))
    fd.add_output(fd.ops.max(fd.ops.abs(x)) - fd.ops.min(x))
    fd.add_output(fd.ops.cat([x[:, 0], x[:, -1]], -1)[1:6:2])


def plain_statistics(x: Tensor) -> list[Tensor]:
    center = x - x.mean((0, 2), keepdim=True)
    variance = (center * center).mean((0, 2))
    return [
        variance,
        center / (variance + 1e-5).sqrt().unsqueeze(-1),
        x.abs().max() - x.min(),
        torch.cat([x[:, 0], x[:, -1]], -1)[1:6:2],
    ]


MODELS = {
    "two stages": Model((normal(3, 4, 3, 5),), two_stages, lambda x: [x.sum(3) + x.sum(3)]),
    "mlp": Model(tuple(normal(*s, seed=i) for i, s in enumerate([(5, 6), (8, 6), (8,), (6, 8), (6,
                 )])), mlp, plain_mlp),
    "attention": Model((normal(4, 5, 6), normal(18, 6, seed=1)), attention, plain_attention),
    "loss": Model((torch.tensor([0, 10, 3, 3, 7, 1, 9]), normal(11, 4), normal(7, 11, seed=2) > -1),
                  loss, plain_loss),
    "optimizer": Model((*(normal(7, 3, seed=i) for i in range(2)), normal(7, 3, seed=2).abs(),
                       normal(7, 3, seed=3), 0.01), optimizer, plain_optimizer),
    "statistics": Model((normal(7, 5, 3),), statistics, plain_statistics),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_reference_and_every_rank_give_what_torch_gives(model: Model) -> None:
    with mf.FusionDefinition("model") as fd:
        model.define(fd)
    expected = model.plain(*model.inputs)
    found = mf.reference(fd, model.inputs)
    assert len(found) == len(expected)
    assert all(is_close(a, b) for a, b in zip(found, expected, strict=True))
    check_everywhere(mf.compile(fd), model.inputs, expected)


def test_inputs_are_never_written() -> None:
    """Not even one that an output is to be written into: the caller's tensors are compared with."""
    model = MODELS["optimizer"]
    before = [x.clone() if isinstance(x, Tensor) else x for x in model.inputs]
    with mf.FusionDefinition() as fd:
        model.define(fd)
    mf.reference(fd, model.inputs)
    for x, y in zip(model.inputs, before, strict=True):
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(y))


def test_layouts_are_ignored() -> None:
    """The same definition with any placement, or none, gives the same bits."""
    x = normal(5, 3)
    results = []
    for layout in (None, Layout(DeviceMesh.arange(x=4), {"x": Shard(0)}), Layout(MESH)):
        with mf.FusionDefinition() as fd:
            h = fd.define_tensor([5, 3], torch.float64, layout)
            fd.add_output(fd.ops.softmax(h @ h.T))
        results.append(mf.reference(fd, [x])[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_fusion_is_as_good_as_its_definition() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([3])
        fd.add_output(x * 2)
    assert torch.equal(mf.reference(fd.fusion, [torch.ones(3)])[0], torch.full((3,), 2.0))


def test_a_wrong_number_of_arguments() -> None:
    with mf.FusionDefinition("pair") as fd:
        x = fd.define_tensor([3])
        y = fd.define_tensor([3])
        fd.add_output(x + y)
    with pytest.raises(ProgramError, match="@pair: 1 argument for 2 inputs") as caught:
        mf.reference(fd, [torch.ones(3)])
    assert "x, y" in str(caught.value)
