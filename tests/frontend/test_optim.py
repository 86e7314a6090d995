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
        assert re.search(rf"^ +%{name} = (sub|lerp|addcmul)\(", text, re.MULTILINE), (name, text)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99999999), (0.3, 0.5)], ids=str)
def test_moments_are_corrected_in_f64(dtype: torch.dtype, betas: tuple[float, float]) -> None:
    """Also where the step, the rate and the decay are tensors of 32 bits."""
    numbers = torch.tensor([0.125, 0.0625])  # a rate and a decay that have no other value in f64
    w = torch.tensor([1.0, -2.0], dtype=dtype)
    gradients = [torch.tensor([0.3, -1.0], dtype=dtype) / n for n in (1, 3, 1e5)]
    right = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW([right], 0.125, betas, weight_decay=0.0625, foreach=False)
    with mf.FusionDefinition("steps") as fd:
        given = [fd.define_tensor([2], dtype, MESH, {"dp": Shard(0)}) for _ in range(4)]
        step, lr, decay = (fd.define_tensor([], mesh=MESH) for _ in range(3))
        for x in mf.optim.adamw(*given, step, lr=lr, betas=betas, weight_decay=decay):
            fd.add_output(x)
    program, state = mf.compile(fd), [w, torch.zeros_like(w), torch.zeros_like(w)]
    for n, dw in enumerate(gradients):
        right.grad = dw.clone()
        optimizer.step()
        given = [state[0], dw, *state[1:], torch.tensor(n + 1.0), *numbers]
        state = mf.simulate(program, given).outputs
        assert [x.dtype for x in state] == [dtype] * 3
        rough = 1e-13 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(state[0], right.detach(), rtol=rough, atol=0)


@pytest.mark.parametrize("clip", [None, 0.5], ids=["as it is", "clipped"])
@pytest.mark.parametrize("update", ["sgd", "adamw"])
def test_what_has_no_gradient_is_left_alone(update: str, clip: float | None) -> None:
    """It does not decay, and its moments stay; what leads there by a step has zeros, and decays."""
    w = [torch.tensor([1.0, -2.0]) for _ in range(4)]

    def loss_of(a: Any, b: Any, c: Any, d: Any) -> Any:
        return (a * a).sum() + b.round().sum() + (c.detach() * a).sum() + (d > 0).float().sum()

    leaves = [x.clone().requires_grad_() for x in w]
    make = torch.optim.SGD if update == "sgd" else torch.optim.AdamW
    optimizer = make(leaves, 0.1, weight_decay=0.5)
    loss_of(*leaves).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(leaves, clip)
    optimizer.step()
    for _ in range(2):  # recorded, and then found
        with mf.FusionDefinition("step") as fd:
            handles = [fd.define_tensor([2], mesh=MESH, layout={"dp": Shard(0)}) for _ in w]
            kept = [fd.define_tensor([2], mesh=MESH, layout={"dp": Shard(0)}) for _ in w]
            step = fd.define_tensor([], mesh=MESH)
            gradients = mf.grad(loss_of(*handles), handles)
            if clip is not None:
                gradients, _ = mf.optim.clip_by_global_norm(gradients, clip)
            for x, dx, m in zip(handles, gradients, kept, strict=True):
                if update == "sgd":
                    made = mf.optim.sgd(x, dx, m, lr=0.1, weight_decay=0.5)
                else:
                    made = mf.optim.adamw(x, dx, m, m, step, lr=0.1, weight_decay=0.5)[:2]
                for new, old in zip(made, (x, m), strict=True):
                    fd.add_output(new, reuse=old)
        zeros = [torch.zeros(2) for _ in w]
        given = [*(x.clone() for x in w), *zeros[:2], torch.ones(2), torch.ones(2)]
        found = mf.simulate(mf.compile(fd), [*given, torch.tensor(1.0)]).outputs
        for ours, theirs in zip(found[::2], leaves, strict=True):
            torch.testing.assert_close(ours, theirs.detach())
        assert all(torch.equal(m, torch.ones(2)) for m in found[5::2])


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
