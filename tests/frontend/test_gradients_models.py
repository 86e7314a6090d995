"""Gradients and training of a whole language model on a mesh, against torch on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.oracle import check_everywhere, simulate_shares
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

F = torch.nn.functional
MESH = DeviceMesh.arange(dp=2, tp=2)
#: 37 words over 2 ranks are 19 and 18.
BATCH, LENGTH, WIDTH, HEADS, HIDDEN, WORDS, LAYERS = 4, 6, 16, 4, 24, 37, 2

Where = dict[str, Any]
ROWS, COLUMNS = {"tp": Shard(0)}, {"tp": Shard(1)}
LAYER: dict[str, tuple[tuple[int, ...], Where]] = {
    "g1": ((WIDTH,), {}), "wq": ((WIDTH, WIDTH), ROWS), "wk": ((WIDTH, WIDTH), ROWS),
    "wv": ((WIDTH, WIDTH), ROWS), "wo": ((WIDTH, WIDTH), COLUMNS), "g2": ((WIDTH,), {}),
    "w1": ((HIDDEN, WIDTH), ROWS), "w3": ((HIDDEN, WIDTH), ROWS), "w2": ((WIDTH, HIDDEN), COLUMNS),
}  # fmt: skip
PARAMETERS: dict[str, tuple[tuple[int, ...], Where]] = {
    "table": ((WORDS, WIDTH), ROWS), "places": ((LENGTH, WIDTH), {}), "g": ((WIDTH,), {}),
    **{f"{name}{i}": of for i in range(LAYERS) for name, of in LAYER.items()},
}  # fmt: skip


def loss_of(p: dict[str, Any], tokens: Any, wanted: Any) -> Any:
    """Next-token loss of a decoder with the table tied to the output; for tensors and handles."""
    h = F.embedding(tokens, p["table"]) + p["places"]
    for i in range(LAYERS):
        x = F.rms_norm(h, (WIDTH,), p[f"g1{i}"], 1e-5)
        q, k, v = (
            F.linear(x, p[f"w{n}{i}"]).view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
            for n in "qkv"
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + F.linear(a.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH), p[f"wo{i}"])
        x = F.rms_norm(h, (WIDTH,), p[f"g2{i}"], 1e-5)
        h = h + F.linear(F.silu(F.linear(x, p[f"w1{i}"])) * F.linear(x, p[f"w3{i}"]), p[f"w2{i}"])
    logits = F.linear(F.rms_norm(h, (WIDTH,), p["g"], 1e-5), p["table"])
    return -torch.sum(torch.log_softmax(logits, -1) * wanted) / (BATCH * LENGTH)


def numbers(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 0.3


def parameters(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        n: numbers(i, dtype, *shape) + (1.0 if n.startswith("g") else 0.0)
        for i, (n, (shape, _)) in enumerate(PARAMETERS.items())
    }


def batch(i: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens, and the next ones as rows of a unit matrix; some words come often."""
    generator = torch.Generator().manual_seed(1000 + i)
    words = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator) // 3 * 3
    return words[:, :-1], F.one_hot(words[:, 1:], WORDS).to(dtype)


def inputs(fd: mf.FusionDefinition, dtype: torch.dtype) -> tuple[Any, Any, dict[str, Any]]:
    tokens = fd.define_tensor([BATCH, LENGTH], torch.int64, MESH, {"dp": Shard(0)})
    where = {"dp": Shard(0), "tp": Shard(2)}
    wanted = fd.define_tensor([BATCH, LENGTH, WORDS], dtype, MESH, where)
    p = {
        name: fd.define_tensor(shape, dtype, MESH, where, name=name)
        for name, (shape, where) in PARAMETERS.items()
    }
    return tokens, wanted, p


@pytest.mark.parametrize("schedule", [None, 1, 2, 3])
def test_gradients_of_all_parameters(schedule: int | None) -> None:
    with mf.FusionDefinition("lm") as fd:
        tokens, wanted, p = inputs(fd, torch.float64)
        loss = loss_of(p, tokens, wanted)
        fd.add_output(loss)
        for g in mf.grad(loss, list(p.values())):
            fd.add_output(g)
    given = parameters(torch.float64)
    leaves = {n: w.clone().requires_grad_() for n, w in given.items()}
    words = batch(0, torch.float64)
    whole = loss_of(leaves, *words)
    expected = [whole.detach(), *torch.autograd.grad(whole, list(leaves.values()))]
    program = mf.compile(fd)
    check_everywhere(program, [*words, *given.values()], expected, schedule=schedule)


def test_training_stays_beside_torch() -> None:
    """Updates in place, at each step the loss of one device."""
    given = parameters(torch.float64)
    leaves = {n: w.clone().requires_grad_() for n, w in given.items()}
    optimizer = torch.optim.AdamW(list(leaves.values()), lr=0.003)
    with mf.FusionDefinition("step") as fd:
        tokens, wanted, p = inputs(fd, torch.float64)
        means, squares = (
            {n: fd.define_tensor(w.shape, w.dtype, name=f"{kind}.{n}").on(w) for n, w in p.items()}
            for kind in ("m", "v")
        )
        step = fd.define_tensor([], torch.float64, MESH)
        loss = loss_of(p, tokens, wanted)
        grads, norm = mf.optim.clip_by_global_norm(mf.grad(loss, list(p.values())), 1.0)
        fd.add_output(loss)
        fd.add_output(norm)
        for (name, w), dw in zip(p.items(), grads, strict=True):
            olds = w, means[name], squares[name]
            for new, old in zip(
                mf.optim.adamw(w, dw, *olds[1:], step, lr=0.003), olds, strict=True
            ):
                fd.add_output(new, reuse=old)
    program = mf.compile(fd)
    state = {**given, **{f"{k}.{n}": torch.zeros_like(w) for k in "mv" for n, w in given.items()}}
    losses = []
    for i in range(sampling.of(80, 30)):
        words = batch(i % 3, torch.float64)
        whole = loss_of(leaves, *words)
        optimizer.zero_grad()
        whole.backward()
        norm_of_torch = torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        optimizer.step()
        rest = [state[n] for n in program.fusion.inputs[2:-1]]
        found = simulate_shares(
            program, [*words, *rest, torch.tensor(i + 1, dtype=torch.float64)]
        ).outputs
        for name, y in zip(program.fusion.outputs[2:], found[2:], strict=True):
            state[program.fusion.reuse[name]] = y
        torch.testing.assert_close(found[0], whole.detach(), rtol=0, atol=1e-9)
        torch.testing.assert_close(found[1], norm_of_torch, rtol=1e-2, atol=1e-9)
        losses.append(whole.item())
    assert losses[-1] < losses[0] - 0.5
