"""Rows that move: what a slice takes, what is padded, joined or rolled, beside plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Replicate, Shard


def compiled(
    op: Callable[..., Any], mesh: DeviceMesh, tensors: list[torch.Tensor], layouts: list[Any]
) -> mf.Program:
    with mf.FusionDefinition("moved") as fd:
        handles = [
            fd.define_tensor(list(x.shape), x.dtype, mesh=mesh, layout=of)
            for x, of in zip(tensors, layouts, strict=True)
        ]
        for y in op(*handles):
            fd.add_output(y)
    return mf.compile(fd)


def drawn(draw: random.Random, s: int) -> Callable[[Any, Any], Any]:
    first = draw.randint(0, min(3, s - 1))
    last = s - draw.randint(0, min(3, s - 1 - first))
    before, behind, value = draw.randint(-1, 3), draw.randint(0, 3), draw.choice([0.0, 1.5])
    by = draw.randint(-2, 2)
    return draw.choice(
        [
            lambda x, y: x[:, first:last] * 2,
            lambda x, y: F.pad(x, (0, 0, before if s > 2 else 0, behind), value=value),
            lambda x, y: torch.roll(x, by, 1),
            lambda x, y: torch.cat([y, x], 1),
            lambda x, y: torch.cat([x, y], 1),
            lambda x, y: torch.cat([y, x, y], 1)[:, int(s > 1) :],
            lambda x, y: F.pad(x, (0, 0, 0, 1))[:, 1:],
        ]
    )


@pytest.mark.parametrize("seed", range(40))
def test_values_and_gradients(seed: int) -> None:
    """Against torch on whole tensors, for any parts: uneven, of one row, of none."""
    draw = random.Random(seed)
    s, is_zigzag = draw.randint(1, 14), draw.random() < 0.6
    layout = {"cp": Shard(1, zigzag=is_zigzag)}
    mesh = DeviceMesh.arange(cp=draw.choice([2, 3, 4]))
    if draw.random() < 0.4:
        mesh = DeviceMesh.arange(cp=2, tp=2)
        layout["tp"] = draw.choice([Replicate(), Shard(1), Shard(0), Shard(1, zigzag=is_zigzag)])
    op, generator = drawn(draw, s), torch.Generator().manual_seed(seed)
    x = torch.randn(3, s, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(3, draw.randint(0, 3), 2, dtype=torch.float64, generator=generator)
    law = draw.choice([None, None, {"cp": Shard(1, zigzag=draw.random() < 0.5)}, {}])

    def define(x: Any, y: Any) -> list[Any]:
        z = op(x, y) + 0
        if law is not None:
            z.on(mesh, law)
        return [z, mf.grad((z * z).sum(), [x])[0]]

    program = compiled(define, mesh, [x, y], [layout, {}])
    whole = x.clone().requires_grad_()
    z = op(whole, y)
    (grad,) = torch.autograd.grad((z * z).sum(), whole)
    check_everywhere(program, [x, y], [z.detach(), grad])
    for rank in mesh.ranks:
        mf.hir.verify.check.verify(mf.hir.parse(str(program.for_rank(rank))))


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "beside": lambda x, n: F.cross_entropy(x[:, :-1].transpose(1, 2), n[:, 1:]),
    "padded": lambda x, n: F.cross_entropy(
        x.reshape(-1, x.shape[-1]),
        F.pad(n, (0, 1), value=-100)[..., 1:].reshape(-1),
        ignore_index=-100,
    ),
    "rolled": lambda x, n: F.cross_entropy(x.reshape(-1, x.shape[-1]), n.roll(-1, 1).reshape(-1)),
}


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("s", [16, 13])
def test_a_loss_of_labels_shifted_by_one_moves_few_labels(name: str, zigzag: bool, s: int) -> None:
    """No logits are sent where parts fall together; labels, and numbers of the loss, are."""
    mesh, v = DeviceMesh.arange(cp=2), 50
    logits, labels = torch.randn(1, s, v, dtype=torch.float64), torch.randint(v, (1, s))
    split = {"cp": Shard(1, zigzag=zigzag)}

    def define(x: Any, n: Any) -> list[Any]:
        loss = LOSSES[name](x, n)
        return [loss, mf.grad(loss, [x])[0]]

    program = compiled(define, mesh, [logits, labels], [split, split])
    whole = logits.clone().requires_grad_()
    loss = LOSSES[name](whole, labels)
    check_everywhere(program, [logits, labels], [loss.detach(), *torch.autograd.grad(loss, whole)])
    rows = 2 * v * 8 * 2 * (s % 4 > 0)  # of logits, where chunks of one row fewer begin elsewhere
    assert max(map(program.bytes_received, mesh.ranks)) <= 20 * 8 + rows, f"{program}"


def test_a_shift_is_a_halo_of_one_row() -> None:
    mesh, n = DeviceMesh.arange(cp=4), torch.arange(32).reshape(1, 32)
    program = compiled(lambda n: [n[:, 1:]], mesh, [n], [{"cp": Shard(1)}])
    check_everywhere(program, [n], [n[:, 1:]], exact=True)
    assert [program.bytes_received(r) for r in range(4)] == [8, 8, 8, 0]
    zigzag = compiled(lambda n: [n[:, 1:]], mesh, [n], [{"cp": Shard(1, zigzag=True)}])
    check_everywhere(zigzag, [n], [n[:, 1:]], exact=True)
    assert [zigzag.bytes_received(r) for r in range(4)] == [8, 16, 16, 8]
