"""What is kept of the forward for the backward: no more than torch keeps; with `recompute` less."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.drawn import numbers
from torch import Tensor

import mdfuse as mf
from mdfuse.hir.rank.pipelines import project
from mdfuse.ir.ops import TABLE
from mdfuse.seeing.memory_use import memory_of

F = torch.nn.functional
LINKS = 4
IMAGE, ROWS = (4, 8, 6, 6), (16, 24)


def kept(program: mf.Program) -> int:
    """Bytes that the forward computes and the backward reads; views count as what they show."""
    fusion, of, found = program.fusion, dict[str, str](), set[str]()
    forward = [e for e in fusion.exprs if e.source is not None and not e.source.note]
    for e in forward:
        of.update({name: of.get(e.reads[0], "") if TABLE[e.op].is_view else name
                   for name in e.outputs})  # fmt: skip
    for e in fusion.exprs:
        if e not in forward:
            found.update(of[x] for x in e.reads if of.get(x))
    return sum(fusion.values[name].bytes for name in found)


def kept_by_torch(f: Callable[..., Any], xs: Sequence[Tensor]) -> int:
    """Bytes of what autograd saves, but for the leaves."""
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in xs]
    saved = {x.untyped_storage().data_ptr(): (0, x) for x in leaves}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        saved.setdefault(storage.data_ptr(), (storage.nbytes(), x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        chain(f, leaves)
    return sum(n for n, _ in saved.values())


def chain(f: Callable[..., Any], xs: Sequence[Any]) -> Any:
    h = xs[0] * 1.5
    for _ in range(LINKS):
        h = f(h, *xs[1:])
    return h


def defined(f: Callable[..., Any], xs: Sequence[Tensor]) -> mf.FusionDefinition:
    """A chain, and its gradients."""
    with mf.FusionDefinition("chain") as fd:
        handles = [fd.define_tensor(x.shape, x.dtype) for x in xs]
        y = chain(f, handles)
        fd.add_output(y)
        wrt = [h for h in handles if h.dtype.is_floating_point]
        seed = fd.define_tensor(y.shape, y.dtype)
        for g in mf.grad(y, wrt, seed=seed):
            fd.add_output(g)
    return fd


factor, other = numbers(8), numbers(*ROWS, seed=1)
places = torch.arange(16) % 24
LINK: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "batch_norm": (
        lambda h, g, b: F.batch_norm(h, None, None, g, b, training=True),
        [numbers(*IMAGE), factor, factor],
    ),
    "group_norm": (lambda h, g: F.group_norm(h, 2, g), [numbers(*IMAGE), factor]),
    "instance_norm": (lambda h: F.instance_norm(h), [numbers(*IMAGE)]),
    "layer_norm": (lambda h: F.layer_norm(h, (24,)), [numbers(*ROWS)]),
    "var": (lambda h: h / h.var(-1, keepdim=True), [numbers(*ROWS)]),
    "std": (lambda h: h / h.std(-1, keepdim=True), [numbers(*ROWS)]),
    "logsumexp": (lambda h: h - h.logsumexp(-1, keepdim=True), [numbers(*ROWS)]),
    "cross_entropy": (lambda h, t: h * F.cross_entropy(h, t), [numbers(*ROWS), places]),
    "nll_loss": (lambda h, t: h * F.nll_loss(h, t), [numbers(*ROWS), places]),
    "binary_cross_entropy": (
        lambda h, t: h * F.binary_cross_entropy(torch.sigmoid(h), torch.sigmoid(t)),
        [numbers(*ROWS), other],
    ),
    "with_logits": (
        lambda h, t: h * F.binary_cross_entropy_with_logits(h, t), [numbers(*ROWS), other]
    ),
    "huber_loss": (lambda h, t: h * F.huber_loss(h, t), [numbers(*ROWS), other]),
    "smooth_l1_loss": (lambda h, t: h * F.smooth_l1_loss(h, t), [numbers(*ROWS), other]),
    "selu": (F.selu, [numbers(*ROWS)]),
    "mish": (F.mish, [numbers(*ROWS)]),
    "hardswish": (F.hardswish, [numbers(*ROWS)]),
    "hardsigmoid": (F.hardsigmoid, [numbers(*ROWS)]),
    "celu": (lambda h: F.celu(h, 0.5), [numbers(*ROWS)]),
    "prelu": (lambda h, g: F.prelu(h, g), [numbers(*IMAGE), factor]),
    "glu": (lambda h: torch.cat([F.glu(h)] * 2, -1), [numbers(*ROWS)]),
    "gelu": (F.gelu, [numbers(*ROWS)]),
    "silu": (F.silu, [numbers(*ROWS)]),
    "gelu by tanh": (lambda h: F.gelu(h, approximate="tanh"), [numbers(*ROWS)]),
}  # fmt: skip


@pytest.mark.parametrize("name", LINK)
def test_no_more_than_torch_keeps(name: str) -> None:
    f, xs = LINK[name]
    fd = defined(f, xs)
    # two tables of one row's extent may be kept besides, and one end more of the chain
    slack = 1000 + xs[0].nbytes
    assert kept(mf.compile(fd)) <= kept_by_torch(f, xs) + slack
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in xs]
    y = chain(f, leaves)
    seed = numbers(*y.shape, seed=9)
    expected = torch.autograd.grad(y, [x for x in leaves if x.requires_grad], seed)
    for found, right in zip(mf.reference(fd, [*xs, seed])[1:], expected, strict=True):
        rough = 1e-6 if name.startswith("hard") else 1e-9  # torch rounds 1/6 to f32
        torch.testing.assert_close(found, right, rtol=rough, atol=rough)


def held(program: mf.Program) -> int:
    """The most bytes that its rank holds at once, inputs included."""
    return memory_of(project(program.host, 0)).peak


#: Losses of one kernel each: beside kept values there are the cotangent and its result.
@pytest.mark.parametrize(
    "name", ["gelu", "gelu by tanh", "hardsigmoid", "hardswish", "mish", "silu"]
)
def test_nothing_lies_between_a_cotangent_and_what_becomes_of_it(name: str) -> None:
    f, xs = LINK[name]
    fd = defined(f, xs)
    assert held(mf.compile(fd)) <= (2 + LINKS + 2) * xs[0].nbytes


def test_of_a_block_that_is_recomputed_its_operand_is_kept() -> None:
    """A quarter: of each layer tanh, exp, the sum and the logarithm; or the last alone."""
    rows, width = 32, 8

    def define(is_recomputed: bool) -> mf.Program:
        with mf.FusionDefinition("layers") as fd:
            h = fd.define_tensor([rows, width])
            weights = [fd.define_tensor([width, width]) for _ in range(6)]
            for w in weights:
                with mf.recompute() if is_recomputed else contextlib.nullcontext():
                    y = ((h @ w).tanh().exp() + 1).log()
                h = fd.ops.set(y)
            for g in mf.grad(h.sum(), weights):
                fd.add_output(g)
        return mf.compile(fd)

    each = math.prod((rows, width)) * 4
    # nothing reads what the last layer gives
    assert kept(define(False)) // each == 6 * 4 - 1
    assert kept(define(True)) // each == 5
