"""Batches of one row and of few: rows that a reshape merges, or an operation makes, are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, LoweringError, Shard

POSITIONS, WIDTH = 3, 4
DTYPE = torch.float64


def _sum(h: Any, t: Any) -> Any:
    return (h * t).sum()


def _mean(h: Any, t: Any) -> Any:
    return ((h - t) * (h - t)).mean()


def _merged(h: Any, t: Any) -> Any:
    """As losses over tokens are: rows and positions are one dim."""
    return F.mse_loss(h.reshape(-1, WIDTH), t.reshape(-1, WIDTH))


def _flat(h: Any, t: Any) -> Any:
    return (h.reshape(-1) * t.reshape(-1)).mean()


LOSSES = {"sum": _sum, "mean": _mean, "merged": _merged, "flat": _flat}


def _linear(x: Any, w: Any) -> Any:
    return F.linear(x, w).tanh()


def _tokens(x: Any, w: Any) -> Any:
    """Through rows of tokens, and back."""
    return x + F.linear(x.reshape(-1, WIDTH), w).reshape(*x.shape).tanh()


def _heads(x: Any, w: Any) -> Any:
    rows, positions, _ = x.shape
    h = F.linear(x, w).reshape(rows, positions, 2, WIDTH // 2).permute(0, 2, 1, 3)
    h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
    return x + h.permute(0, 2, 1, 3).reshape(rows, positions, WIDTH)


def _scaled(x: Any, w: Any) -> Any:
    """By a row of factors, which is made of a weight."""
    return x * w.sum(0).reshape(1, 1, WIDTH)


def _shifted(x: Any, w: Any) -> Any:
    return x + w.mean(0).unsqueeze(0)


def _placed(x: Any, w: Any) -> Any:
    """With a table of positions, of which a part is read."""
    return x + w[:POSITIONS].unsqueeze(0)


def _classed(x: Any, w: Any) -> Any:
    """With a learned position in front, which is dropped again."""
    first = w[1:2].unsqueeze(0).expand(x.shape[0], 1, WIDTH)
    return torch.cat([first, x * w[0]], 1)[:, :-1]


def _stacked(x: Any, w: Any) -> Any:
    return torch.stack([x, x * w[0]]).sum(0)


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "linear": _linear, "tokens": _tokens, "heads": _heads, "scaled": _scaled,
    "shifted": _shifted, "placed": _placed, "classed": _classed, "stacked": _stacked,
}  # fmt: skip

PLACES: dict[str, tuple[DeviceMesh, ...]] = {
    "loop": (DeviceMesh([0], axes=("tp",)),),
    "tp": (DeviceMesh.arange(tp=2),),
    "stages": (DeviceMesh([0], axes=("tp",)), DeviceMesh([1], axes=("tp",))),
    "stages of two": (DeviceMesh([0, 1], axes=("tp",)), DeviceMesh([2, 3], axes=("tp",))),
}


def build(layer: str, loss: str, places: tuple[DeviceMesh, ...], rows: int) -> mf.FusionDefinition:
    with mf.FusionDefinition("few") as fd:
        shape = [rows, POSITIONS, WIDTH]
        h: Any = fd.define_tensor(shape, DTYPE, mesh=places[0], name="x")
        t = fd.define_tensor(shape, DTYPE, mesh=places[-1], name="t")
        weights = []
        for n, mesh in enumerate((places[0], places[-1])):
            layout = {"tp": Shard(0)}
            w = fd.define_tensor([WIDTH, WIDTH], DTYPE, mesh=mesh, layout=layout, name=f"w{n}")
            h = fd.ops.set(h).on(mesh, {}) if n and len(places) > 1 else h
            h = LAYERS[layer](h, w)
            weights.append(w)
        found = LOSSES[loss](h, t)
        fd.add_output(found)
        for dw in mf.grad(found, weights):
            fd.add_output(dw)
        fd.add_output(h)
    return fd


def of_torch(layer: str, loss: str, x: Tensor, t: Tensor, *weights: Tensor) -> list[Tensor]:
    leaves, h = [w.clone().requires_grad_() for w in weights], x
    for w in leaves:
        h = LAYERS[layer](h, w)
    found = LOSSES[loss](h, t)
    return [y.detach() for y in (found, *torch.autograd.grad(found, leaves), h)]


#: The positions of the batch's one row are split over ranks and become the rows of the loss: a rank
#: has no whole row of the batch.
SPLIT_ROW = ("placed", "stages of two", 1, 2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_few_rows(layer: str, place: str, rows: int, count: int) -> None:
    for loss in LOSSES if (rows, count) == (1, 1) else ("merged",):
        fd = build(layer, loss, PLACES[place], rows)
        generator = torch.Generator().manual_seed(0)
        shapes = [(rows, POSITIONS, WIDTH)] * 2 + [(WIDTH, WIDTH)] * 2
        given = [torch.randn(s, generator=generator, dtype=DTYPE) for s in shapes]
        options = mf.Options(poison=True, bucket_bytes=1 << 20 if place == "tp" else 0)
        batch = {"x": 0, "t": 0}
        if (layer, place, rows, count) == SPLIT_ROW:
            with pytest.raises(LoweringError, match=r"2 microbatches do not fall together in"):
                mf.pipeline(fd, microbatches=count, batch=batch, options=options)
            continue
        program = mf.pipeline(fd, microbatches=count, batch=batch, options=options)
        outputs = mf.simulate(program, given, options=options).outputs
        for got, want in zip(outputs, of_torch(layer, loss, *given), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("count", [1, 3])
def test_parts_that_are_joined_along_a_split_dim(count: int) -> None:
    """Each is a block of what they become; the batch is cut along another dim."""
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("joined") as fd:
        x = fd.define_tensor([6, 3], torch.float64, mesh, {"tp": Shard(1)}, name="x")
        fd.add_output(torch.cat([x, x * 2], 1) + 1.0)
    program = mf.pipeline(fd, microbatches=count, batch={"x": 0})
    x = torch.randn(6, 3, dtype=torch.float64)
    (got,) = mf.simulate(program, [x]).outputs
    assert torch.equal(got, torch.cat([x, x * 2], 1) + 1.0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("widths", [(3, 3), (5, 2, 2), (1, 1), (2, 1, 1, 4)], ids=str)
def test_blocks_that_are_taken_out_of_what_was_joined(widths: tuple[int, ...], ranks: int) -> None:
    """Gradients of joined parts, of which ranks have unequal pieces, or none."""
    mesh, total = DeviceMesh.arange(tp=ranks), sum(widths)
    with mf.FusionDefinition("taken") as fd:
        parts = [
            fd.define_tensor([8, n], torch.float64, mesh, {"tp": Shard(1)}, name=f"x{at}")
            for at, n in enumerate(widths)
        ]
        y = torch.cat(parts, 1)
        for slope in mf.grad((y * y * y).sum(), parts):
            fd.add_output(slope)
        fd.add_output(y.sum(0) + total)
    batch = {f"x{at}": 0 for at in range(len(widths))}
    program = mf.pipeline(fd, microbatches=4, batch=batch)
    xs = [torch.randn(8, n, dtype=torch.float64) for n in widths]
    found = mf.simulate(program, xs, options=mf.Options(poison=True)).outputs
    for got, x in zip(found, xs, strict=False):
        torch.testing.assert_close(got, 3 * x * x)
    torch.testing.assert_close(found[-1], torch.cat(xs, 1).sum(0) + total)


STAGES = [DeviceMesh(ranks, axes=("tp",)) for ranks in ([0, 1], [2, 3])]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_columns_that_are_summed_up_in_microbatches(count: int) -> None:
    """A rank's part of a slice is zero beside its columns; its rows are those of a microbatch."""
    with mf.FusionDefinition("columns") as fd:
        x = fd.define_tensor([6, 9], torch.float64, STAGES[0], {"tp": Shard(1)}, name="x")
        part = (x * 2)[:, :5].on(STAGES[0], {"tp": mf.Partial()})
        fd.add_output(fd.ops.set(part).on(STAGES[1]) + 1)
    program = mf.pipeline(fd, microbatches=count, batch={"x": 0})
    x = torch.randn(6, 9, dtype=torch.float64)
    (rows,) = mf.simulate(program, [x], options=mf.Options(poison=True)).outputs
    torch.testing.assert_close(rows, (x * 2)[:, :5] + 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p"])
def test_gradients_of_narrow_stages_are_reduced_wide(schedule: str) -> None:
    """A sum that is rounded and widened again may have a buffer of the backend."""
    with mf.FusionDefinition("wide") as fd:
        x = fd.define_tensor([8, 3, 2], torch.bfloat16, STAGES[0], {}, name="x")
        w = fd.define_tensor([1, 2], torch.bfloat16, STAGES[1], {"tp": Shard(0)}, name="w")
        h = fd.ops.set(x.exp()).on(STAGES[1])
        h = (h * 1.0).on(STAGES[1], {"tp": Shard(1)})
        y = fd.ops.linear(h, w).on(STAGES[1], {"tp": Shard(1)})
        (slope,) = mf.grad(y.mean(), [w])
        fd.add_output(slope)
    options = mf.Options(reduce_dtype=torch.float32, poison=True, backend="symmetric")
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0}, schedule=schedule, options=options)
    x, w = torch.randn(8, 3, 2).bfloat16(), torch.randn(1, 2).bfloat16()
    (slope,) = mf.simulate(program, [x, w]).outputs
    want = x.double().exp().mean((0, 1))[None]
    torch.testing.assert_close(slope.double(), want, rtol=0.02, atol=0.02)


def test_a_wide_sum_that_is_sent_in_another_memory_order() -> None:
    mesh = STAGES[1]
    with mf.FusionDefinition("orders") as fd:
        x = fd.define_tensor([4, 2, 2], torch.bfloat16, STAGES[0], {"tp": Shard(2)}, name="x")
        w = fd.define_tensor([2, 2], torch.bfloat16, mesh, {"tp": Shard(1)}, name="w")
        h = fd.ops.set(x * 1.0).on(mesh, {"tp": Shard(2)})
        y = fd.ops.linear(h, w).on(mesh, {"tp": Shard(1)})
        fd.add_output(mf.grad((y * y).sum(), [w])[0])
    options = mf.Options(reduce_dtype=torch.float32, poison=True)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0}, options=options)
    given = [torch.randint(-3, 4, shape).bfloat16() for shape in ((4, 2, 2), (2, 2))]
    (slope,) = mf.simulate(program, given).outputs
    a, b = (t.double() for t in given)
    b.requires_grad_()
    (a @ b.T).square().sum().backward()
    torch.testing.assert_close(slope.double(), b.grad, rtol=0.02, atol=0.5)
