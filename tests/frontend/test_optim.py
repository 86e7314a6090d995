"""Steps of optimizers against torch's, on meshes, in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.drawn import drawn
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

F = torch.nn.functional
MESH = DeviceMesh.arange(dp=4)
STEPS = 6


def loss_of(x: Any, t: Any, w: Any, b: Any) -> Any:
    return F.mse_loss(torch.tanh(x @ w) + b, t)


def by_torch(make: Callable[[list[Tensor]], Any], clip: float | None = None) -> list[Tensor]:
    """Parameters after some steps, and the losses on the way."""
    w, b = (drawn(6, 5, seed=2).requires_grad_(), drawn(5, seed=3).requires_grad_())
    optimizer, losses = make([w, b]), []
    for i in range(STEPS):
        loss = loss_of(drawn(8, 6, seed=10 + i), drawn(8, 5, seed=50 + i), w, b)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([w, b], clip)
        optimizer.step()
        losses.append(loss.detach())
    return [w.detach(), b.detach(), torch.stack(losses)]


def define(update: str, decays: tuple[float, float], clip: float | None) -> mf.FusionDefinition:
    """A step of FSDP: parameters and their state are split, and written in place."""
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([8, 6], mesh=MESH, layout={"dp": Shard(0)})
        t = fd.define_tensor([8, 5], mesh=MESH, layout={"dp": Shard(0)})
        step = fd.define_tensor([], mesh=MESH)
        lr = fd.define_tensor([], mesh=MESH)
        shapes = {"w": [6, 5], "b": [5]}
        p, m, v = (
            [
                fd.define_tensor(s, mesh=MESH, layout={"dp": Shard(0)}, name=f"{kind}{name}")
                for name, s in shapes.items()
            ]
            for kind in ("", "m", "v")
        )
        with mf.recompute():
            whole = [fd.ops.set(q).on(MESH, {}) for q in p]
        loss = loss_of(x, t, *whole)
        grads = mf.grad(loss, p)
        if clip is not None:
            grads, _ = mf.optim.clip_by_global_norm(grads, clip)
        fd.add_output(loss)
        for q, dq, mq, vq, decay in zip(p, grads, m, v, decays, strict=True):
            if update == "adamw":
                new = mf.optim.adamw(q, dq, mq, vq, step, lr=lr, weight_decay=decay)
                olds = (q, mq, vq)
            else:
                is_nesterov = update == "nesterov"
                momentum = 0.0 if update == "plain" else 0.9
                velocity = None if update == "plain" else mq
                new = mf.optim.sgd(
                    q, dq, velocity, lr=lr, momentum=momentum, weight_decay=decay,
                    nesterov=is_nesterov,
                )  # fmt: skip
                olds = (q, mq)
            for result, old in zip(new, olds, strict=True):
                if result is not None:
                    fd.add_output(result, reuse=old)
    return fd


def by_mdfuse(program: mf.Program) -> list[Tensor]:
    state: dict[str, Tensor] = {
        "w": drawn(6, 5, seed=2), "b": drawn(5, seed=3),
        **{n: torch.zeros(6, 5) for n in ("mw", "vw")}, **{n: torch.zeros(5) for n in ("mb", "vb")},
    }  # fmt: skip
    losses, reuse = [], program.fusion.reuse
    for i in range(STEPS):
        given = {
            "x": drawn(8, 6, seed=10 + i), "t": drawn(8, 5, seed=50 + i),
            "step": torch.tensor(float(i + 1)), "lr": torch.tensor(0.05), **state,
        }  # fmt: skip
        names = program.fusion.inputs
        outputs = mf.simulate(program, [given[n].clone() for n in names]).outputs
        losses.append(outputs[0])
        for name, y in zip(program.fusion.outputs[1:], outputs[1:], strict=True):
            state[reuse[name]] = y
    return [state["w"], state["b"], torch.stack(losses)]


CASES: dict[str, tuple[str, tuple[float, float], float | None, Callable[..., Any]]] = {
    "plain": ("plain", (0.0, 0.0), None, lambda p: torch.optim.SGD(p, lr=0.05)),
    "momentum": ("momentum", (0.0, 0.0), None, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "nesterov": (
        "nesterov", (0.1, 0.1), None,
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    "adamw": ("adamw", (0.01, 0.01), None, lambda p: torch.optim.AdamW(p, 0.05)),
    "groups": (
        "adamw", (0.1, 0.0), None,
        lambda p: torch.optim.AdamW(
            [{"params": p[:1], "weight_decay": 0.1}, {"params": p[1:], "weight_decay": 0.0}], 0.05
        ),
    ),
    "clipped": ("adamw", (0.01, 0.01), 0.1, lambda p: torch.optim.AdamW(p, 0.05)),
    "not clipped": ("plain", (0.0, 0.0), 1e3, lambda p: torch.optim.SGD(p, lr=0.05)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_torch(name: str) -> None:
    update, decays, clip, make = CASES[name]
    program = mf.compile(define(update, decays, clip))
    for ours, theirs in zip(by_mdfuse(program), by_torch(make, clip), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_an_update_is_local_and_in_place() -> None:
    program = mf.compile(define("adamw", (0.01, 0.01), None))
    kinds = [i.comm.kind for i in program.host.walk() if i.comm is not None]
    assert sorted(kinds) == ["Allgather"] * 2 + ["Allreduce"] + ["ReduceScatter"] * 2
    text = str(program)
    for name in ("w", "b", "mw", "mb", "vw", "vb"):
        assert re.search(rf"^ +%{name} = (add|sub)\(", text, re.MULTILINE), (name, text)
    # what follows from the step alone is computed once for all parameters
    assert sum(i.fn == "pow" for i in program.host) == 2


def test_steps_of_other_numbers_share_nothing() -> None:
    """Three groups: with another rate, and with other betas."""
    shape, groups = (3,), ((0.1, (0.9, 0.99)), (0.2, (0.9, 0.99)), (0.1, (0.8, 0.9)))
    w, dw = drawn(*shape), drawn(*shape, seed=1)
    with mf.FusionDefinition("groups") as fd:
        h, dh = fd.define_tensor(shape), fd.define_tensor(shape)
        zeros, step = fd.define_tensor(shape), fd.define_tensor([])
        for lr, betas in (*groups, *groups):
            fd.add_output(mf.optim.adamw(h, dh, zeros, zeros, step, lr=lr, betas=betas)[0])
    program = mf.compile(fd)
    assert sum(i.fn == "pow" for i in program.host) == 6
    found = mf.simulate(program, [w, dw, torch.zeros(shape), torch.tensor(1.0)]).outputs
    for new, (lr, betas) in zip(found, (*groups, *groups), strict=True):
        right = w.clone().requires_grad_()
        right.grad = dw
        torch.optim.AdamW([right], lr, betas=betas).step()
        torch.testing.assert_close(new, right.detach())


def test_a_norm_of_all_is_one_small_all_reduce() -> None:
    program = mf.compile(define("plain", (0.0, 0.0), 0.1))
    posts = [i for i in program.host.walk() if i.comm is not None and i.comm.kind == "Allreduce"]
    assert len(posts) == 2  # the loss, and the norm
    assert all(program.host.types[i.reads[0]].shape == () for i in posts)


def test_masters_keep_what_sixteen_bits_lose() -> None:
    """Steps of 1e-4 vanish beside 1.0 in bf16, but add up in the master."""
    with mf.FusionDefinition("step") as fd:
        w = fd.define_tensor([8], torch.bfloat16, MESH, {"dp": Shard(0)})
        master = fd.define_tensor([8], torch.float32, MESH, {"dp": Shard(0)})
        (dw,) = mf.grad(w.sum(), [w])
        new, _ = mf.optim.sgd(master, dw, lr=1e-4)
        fd.add_output(new, reuse=master)
        fd.add_output(new.to(torch.bfloat16), reuse=w)
    program = mf.compile(fd)
    held, rounded = torch.ones(8), torch.ones(8, dtype=torch.bfloat16)
    for _ in range(100):
        held, rounded = mf.simulate(program, [rounded.clone(), held.clone()]).outputs
    expected = torch.ones(8)
    for _ in range(100):
        expected -= 1e-4
    torch.testing.assert_close(held, expected)
    assert torch.equal(rounded, expected.to(torch.bfloat16))
    lost = torch.ones(8, dtype=torch.bfloat16) - 1e-4
    assert torch.equal(lost, torch.ones(8, dtype=torch.bfloat16))


def test_a_parameter_of_sixteen_bits_is_rounded_once() -> None:
    with mf.FusionDefinition("step") as fd:
        w = fd.define_tensor([64], torch.bfloat16)
        dw = fd.define_tensor([64], torch.bfloat16)
        new, _ = mf.optim.sgd(w, dw, lr=0.3, weight_decay=0.01)
        fd.add_output(new)
    w, dw = (drawn(64, seed=i).to(torch.bfloat16) for i in range(2))
    (found,) = mf.reference(fd, [w, dw])
    exact = w.double() - 0.3 * (dw.double() + 0.01 * w.double())
    assert torch.equal(found, exact.float().to(torch.bfloat16))


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "momentum": (lambda w, g, s: mf.optim.sgd(w, g, lr=0.1, momentum=0.9), "no velocity"),
    "shape": (lambda w, g, s: mf.optim.sgd(w, g.sum(0), lr=0.1), "sgd of %w: f32[4,6] with"),
    "integers": (lambda w, g, s: mf.optim.sgd(w, g.long(), lr=0.1), "floating tensors"),
    "a number": (lambda w, g, s: mf.optim.sgd(w, 2.0, lr=0.1), "sgd with 2.0"),
    "step": (lambda w, g, s: mf.optim.adamw(w, g, g, g, 1, lr=0.1), "with step=1"),
    "step with dims": (lambda w, g, s: mf.optim.adamw(w, g, g, g, w, lr=0.1), "with step=%w"),
    "a scalar step": (lambda w, g, s: mf.optim.adamw(w, g, g, g, s, lr=0.1), "with step=%s"),
    "nothing": (lambda w, g, s: mf.optim.clip_by_global_norm([], 1.0), "of 0 gradients"),
    "integers to clip": (
        lambda w, g, s: mf.optim.clip_by_global_norm([g.long()], 1.0), "at least one"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    call, message = WRONG[name]
    with mf.FusionDefinition("wrong") as fd:
        w = fd.define_tensor([4, 6], name="w")
        g, s = fd.define_tensor([4, 6]), fd.define_scalar(name="s")
        with pytest.raises(mf.DefinitionError, match=re.escape(message)):
            call(w, g, s)
