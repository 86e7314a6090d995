"""Convolutions, pooling and resampling of split images: what ranks send, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.host_checks import refused
from helpers.layout_claims import Claim, check

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, FusionDefinition, Layout, Shard
from mdfuse.layouts.halo import Reach

X, W = (2, 4, 6, 5), (5, 4, 3, 2)  # over three ranks: 2, 2 and 0 channels; 2, 2 and 1 kernels

CLAIMS: dict[str, Claim] = {
    "kernels": Claim([(X, None), (W, 0)], lambda x, w: F.conv2d(x, w), []),
    "kernels and biases": Claim(
        [(X, None), (W, 0), ((5,), 0)], lambda x, w, b: F.conv2d(x, w, b, padding=1), []),
    "channels of the input": Claim(
        [(X, 1), (W, 1)], lambda x, w: F.conv2d(x, w), [("Allreduce", (2, 5, 4, 4))]),
    "channels of the input, split again": Claim(
        [(X, 1), (W, 1)], lambda x, w: F.conv2d(x, w), [("ReduceScatter", (2, 5, 4, 4))], 1),
    "batch": Claim([((5, 4, 6, 5), 0), (W, None), ((5,), None)], lambda x, w,
                   b: F.conv2d(x, w, b, stride=2), []),
    "whole groups": Claim(
        [((2, 6, 6, 5), 1), ((6, 2, 3, 2), 0)], lambda x, w: F.conv2d(x, w, groups=3), []),
    "fewer groups than ranks": Claim([(X, 1), ((6, 2, 3, 2), 0)], lambda x,
        w: F.conv2d(x, w, groups=2), [("Allgather", X), ("Allgather", (6, 2, 3, 2))]),
    "transposed, channels of the input": Claim([(X, 1), ((4, 6, 3, 2), 0)], lambda x,
        w: F.conv_transpose2d(x, w, stride=2), [("Allreduce", (2, 6, 13, 10))]),
    "transposed, kernels": Claim(
        [(X, None), ((4, 5, 3, 2), 1)], lambda x, w: F.conv_transpose2d(x, w), []),
    "one dim": Claim([((2, 4, 7), 1), ((5, 4, 3), 1)], lambda x, w: F.conv1d(x, w),
                     [("Allreduce", (2, 5, 5))]),
    "places": Claim([((2, 3, 11, 5), 2), ((4, 3, 4, 2), None)], lambda x,
                    w: F.conv2d(x, w, stride=(2, 1), padding=2), [("Exchange", (2, 3, 11, 5))]),
    "places of a window that is as wide as all": Claim([((2, 3, 5), 2), ((4, 3, 3), None)],
        lambda x, w: F.conv1d(x, w, padding=4, dilation=4), [("Exchange", (2, 3, 5))]),
    "places, one by one": Claim(
        [((2, 3, 6, 5), 2), ((4, 3, 1, 1), None)], lambda x, w: F.conv2d(x, w), []),
    "transposed, places": Claim([((2, 4, 7), 2), ((4, 6, 3), None)], lambda x,
        w: F.conv_transpose1d(x, w, stride=2, padding=1), [("Exchange", (2, 4, 7))]),
    "the largest, places": Claim(
        [((2, 3, 7, 5), 2)], lambda x: F.max_pool2d(x, 3, 2, 1), [("Exchange", (2, 3, 7, 5))]),
    "means, places": Claim([((2, 3, 7, 5), 2)], lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
                           [("Exchange", (2, 3, 7, 5))]),
    "means, windows that fall together": Claim(
        [((2, 3, 12, 5), 2)], lambda x: F.avg_pool2d(x, 2), []),
    "places, padded to the same": Claim([((2, 3, 11, 5), 2), ((4, 3, 5, 3), None)], lambda x,
        w: F.conv2d(x, w, padding="same"), [("Exchange", (2, 3, 11, 5))]),
    "the largest, windows that fall together": Claim(
        [((2, 3, 12, 5), 2)], lambda x: F.max_pool2d(x, 2), []),
    "the largest": Claim([(X, 1)], lambda x: F.max_pool2d(x, 3, 2, 1), []),
    "means": Claim([(X, 1)], lambda x: F.avg_pool2d(x, 3, 2, 1), []),
    "one mean": Claim([(X, 1)], lambda x: F.adaptive_avg_pool2d(x, 1), []),
    "linearly": Claim([(X, 1)], lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), []),
    "nearest": Claim([(X, 0)], lambda x: F.interpolate(x, size=(4, 9)), []),
    "windows": Claim([(X, 0)], lambda x: F.unfold(x, 2), []),
    "normalised in groups": Claim(
        [((2, 6, 6, 5), 1)], lambda x: F.group_norm(x, 3), []),
    "normalised by numbers": Claim(
        [(X, 1), ((4,), 1 - 1), ((4,), 0)], lambda x, m, v: F.batch_norm(x, m, v * v), []),
    "normalised over a split batch": Claim([(X, 0)],
        lambda x: F.batch_norm(x, None, None, training=True), [("Allreduce", (1, 4, 1, 1))] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_sent(name: str) -> None:
    assert check(CLAIMS[name]) == CLAIMS[name].sends


def test_data_parallel_training_reduces_the_gradients_of_the_kernels_alone() -> None:
    mesh = DeviceMesh.arange(dp=2)
    x, w = (torch.randn(s, dtype=torch.float64) for s in ((4, 3, 6, 6), (5, 3, 3, 3)))
    with FusionDefinition("step") as fd:
        hx = fd.define_tensor(x.shape, x.dtype, mesh, {"dp": Shard(0)})
        hw = fd.define_tensor(w.shape, w.dtype, mesh)
        (dw,) = mf.grad(F.max_pool2d(F.conv2d(hx, hw, padding=1).relu(), 2).square().sum(), [hw])
        fd.add_output(dw)
    program = mf.compile(fd)
    assert [(c.kind, tuple(c.shape)) for c in program.communications] == [("Allreduce", w.shape)]
    w.requires_grad_()
    F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 2).square().sum().backward()
    torch.testing.assert_close(mf.simulate(program, [x, w.detach()]).outputs[0], w.grad)


def _sent(
    function: Callable[..., Any],
    tensors: list[torch.Tensor],
    mesh: DeviceMesh,
    where: dict[str, Any],
) -> mf.Program:
    """Compare results and gradients with torch, x placed; return the program."""
    with FusionDefinition("places") as fd:
        handles = [fd.define_tensor(t.shape, t.dtype, mesh, where if t is tensors[0] else {})
                   for t in tensors]  # fmt: skip
        y = function(*handles)
        for made in (y, *mf.grad((y * y).sum(), handles)):
            fd.add_output(made)
    program = mf.compile(fd)
    assert mf.hir.parse(str(program.host)) == program.host
    given = [t.clone().requires_grad_() for t in tensors]
    y = function(*given)
    wanted = [y.detach(), *torch.autograd.grad((y * y).sum(), given)]
    torch.testing.assert_close(mf.simulate(program, tensors).outputs, wanted)
    return program


def test_neighbours_exchange_the_rows_that_windows_reach_and_no_more() -> None:
    x, w = (torch.randn(s, dtype=torch.float64) for s in ((2, 3, 16, 5), (4, 3, 3, 3)))
    mesh = DeviceMesh.arange(tp=4)
    program = _sent(lambda x, w: F.conv2d(x, w, padding=1), [x, w], mesh, {"tp": Shard(2)})
    forth, back, weight = program.communications
    row, made = 2 * 3 * 5 * 8, 2 * 4 * 5 * 8
    assert [forth.bytes_received(r) for r in range(4)] == [row, 2 * row, 2 * row, row]
    assert [back.bytes_received(r) for r in range(4)] == [made, 2 * made, 2 * made, made]
    assert [c.kind for c in (forth, back, weight)] == ["Exchange", "Exchange", "Allreduce"]


#: what is computed of x[2,4,11,6]; its gradients
SPLIT: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "strides": ((6, 4, 4, 2), lambda x, w: F.conv2d(x, w, stride=2, padding=(3, 1))),
    "dilation": ((6, 4, 3, 2), lambda x, w: F.conv2d(x, w, padding=4, dilation=(5, 1))),
    "groups": ((6, 2, 3, 3), lambda x, w: F.conv2d(x, w, groups=2, padding=1)),
    "strides without windows": ((6, 4, 1, 1), lambda x, w: F.conv2d(x, w, stride=3)),
    "transposed": ((4, 3, 4, 3), lambda x, w: F.conv_transpose2d(x, w, stride=3, padding=1)),
    "transposed, with more rows than strides": (
        (4, 3, 3, 3), lambda x, w: F.conv_transpose2d(
            x, w, padding=2, dilation=2, output_padding=1)),
    "the largest of overlapping windows": (
        (1,), lambda x, w: w * F.max_pool2d(x, (3, 2), (2, 1), 1, ceil_mode=True)),
    "means of overlapping windows": ((1,), lambda x, w: w * F.avg_pool2d(x, 3, 1, 1)),
    "means of what there is of windows": (
        (1,), lambda x, w: w * F.avg_pool2d(x, (4, 3), (3, 2), 1, True, False)),
    "means of windows much longer than what there is": (
        (1,), lambda x, w: w * F.avg_pool2d(x, (100_000, 90_000), ceil_mode=True)),
    "the mean of the largest": ((1,), lambda x, w: w * F.max_pool2d(x, 3, 2, 1).mean((2, 3))),
    "the largest of dilated windows": ((1,), lambda x, w: w * F.max_pool2d(x, 2, 1, 1, 3)),
}  # fmt: skip


@pytest.mark.parametrize("mesh", [{"tp": 4}, {"tp": 5}, {"dp": 2, "tp": 3}], ids=str)
@pytest.mark.parametrize("name", SPLIT)
def test_gradients_where_places_are_split(name: str, mesh: dict[str, int]) -> None:
    """Parts are uneven, empty, and shorter than what windows reach."""
    kernel, function = SPLIT[name]
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((2, 4, 11, 6), kernel)]
    for where in (
        {"tp": Shard(2)},
        {"tp": Shard(3), "dp": Shard(2)},
        {"dp": Shard(2), "tp": Shard(2)},
    ):
        here = {axis: p for axis, p in where.items() if axis in mesh}
        _sent(function, tensors, DeviceMesh.arange(**mesh), here)


def test_a_convolution_in_a_program_reads_the_rows_that_it_needs() -> None:
    """The verifier takes neither the parts alone, nor more or other rows."""
    x, w = (torch.randn(s, dtype=torch.float64) for s in ((1, 2, 8), (2, 2, 3)))
    mesh = DeviceMesh.arange(tp=2)
    text = str(_sent(lambda x, w: F.conv1d(x, w, padding=1), [x, w], mesh, {"tp": Shard(2)}).host)
    assert "(tp=S2, reach(2,8,1,1,-1,2))" in text
    wrong = text.replace("convolution(%in.halo", "convolution(%in")
    # of another row there is one less on the first rank
    other = text.replace("reach(2,8,1,1,-1,2)", "reach(2,8,1,1,0,3)").replace("[1,2,5]", "[1,2,6]")
    for program in (wrong, other):
        assert program != text
        refused(mf.hir.parse(program), "convolution reads reach(2,8,1,1,-1,2) of operand 0")


def test_users_state_parts_without_reaches() -> None:
    reach = Reach(of=8, up=1, down=1, first=-1, last=2)
    layout = Layout(DeviceMesh.arange(tp=2), {"tp": Shard(0)}, reaches={0: reach})
    with FusionDefinition() as fd:
        for state in (
            lambda: fd.define_tensor([8], layout=layout),
            lambda: fd.ops.set(fd.define_tensor([8])).on(layout),
        ):
            with pytest.raises(mf.LayoutError, match="parts that do not overlap") as caught:
                state()
            assert "test_convolutions.py:" in str(caught.value)


#: what is typed with x: f32[2,4,6,5] and w: f32[6,4,3,2] -> words that the error has
WRONG: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "dims": (lambda x, w: F.conv2d(x[0, 0], w), ("2 spatial dims", "[batch, channels")),
    "a weight of other dims": (lambda x, w: F.conv2d(x, w[0]), ("two dims of channels",)),
    "a bias of others": (lambda x, w: F.conv2d(x, w, w[0, :, 0, 0]), ("a bias a number for each",)),
    "channels": (lambda x, w: F.conv2d(x, w[:, :3]), ("torch says",)),
    "stride": (lambda x, w: F.conv2d(x, w, stride=0), ("stride=0", "from 1 on")),
    "strides": (lambda x, w: F.conv2d(x, w, stride=(1, 2, 3)), ("stride=(1, 2, 3)", "2 dims")),
    "padding": (lambda x, w: F.conv2d(x, w, padding="same", stride=2), ("'same'", "stride 1")),
    "a window too large": (lambda x, w: F.max_pool2d(x, 9), ("max_pool", "torch says")),
    "a mean over too much": (lambda x, w: F.avg_pool2d(x, 9), ("fewer than a window of 9",)),
    "a mean of integers": (lambda x, w: F.avg_pool2d(x.int(), 2), ("a mean is a fraction",)),
    "both sizes": (
        lambda x, w: F.interpolate(x, size=3, scale_factor=2), ("one of both",)),
    "no mode": (lambda x, w: F.interpolate(x, 3, mode="lanczos"), ("'lanczos'", "bilinear")),
    "no mean of nearest ones": (
        lambda x, w: F.interpolate(x, 3, antialias=True), ("antialiasing", "bilinear")),
    "a grid of another batch": (lambda x, w: F.grid_sample(x, w), ("[n,a,b,2]",)),
    "reflected": (lambda x, w: F.grid_sample(x, x, padding_mode="reflection"), ("'reflection'",)),
    "columns": (lambda x, w: F.fold(x[0], (4, 5), 2), ("a column for each window", "3 by 4")),
    "groups": (lambda x, w: F.group_norm(x, 3), ("3 groups", "a divisor")),
    "running ones in training": (
        lambda x, w: F.batch_norm(x, x[0, :, 0, 0], x[0, :, 0, 0], training=True),
        ("training=True", "not updated in place")),
    "factors": (lambda x, w: F.group_norm(x, 2, w[0, 0, 0]), ("vectors of 4",)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    typed, says = WRONG[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 4, 6, 5], name="x")
        w = fd.define_tensor([6, 4, 3, 2], name="w")
        with pytest.raises(DefinitionError) as caught:
            typed(x, w)
    for words in (*says, "test_convolutions.py:"):
        assert words in str(caught.value), caught.value
