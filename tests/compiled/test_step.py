"""A step keeps its state between runs, and goes on from a file to the bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drawn import drawn
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh

MESH = DeviceMesh.arange(dp=1)


def program(width: int = 3) -> mf.Program:
    with mf.FusionDefinition("train") as fd:
        x = fd.define_tensor([8, 4], mesh=MESH)
        w = fd.define_tensor([4, width], mesh=MESH)
        t = fd.define_tensor([8, width], mesh=MESH)
        m = fd.define_tensor([4, width], mesh=MESH)
        v = fd.define_tensor([4, width], mesh=MESH)
        step = fd.define_tensor([], mesh=MESH)
        loss = fd.ops.mse_loss(fd.ops.tanh(x @ w), t)
        (dw,) = mf.grad(loss, [w])
        new = mf.optim.adamw(w, dw, m, v, step, lr=0.05)
        fd.add_output(loss)
        for result, old in zip((*new, step + 1), (w, m, v, step), strict=True):
            fd.add_output(result, reuse=old)
    return mf.compile(fd)


def state(width: int = 3) -> dict[str, Tensor | None]:
    w = drawn(4, width)
    return {"w": w, "m": torch.zeros_like(w), "v": torch.zeros_like(w), "step": torch.tensor(1.0)}


def batch(i: int) -> tuple[Tensor, Tensor]:
    return drawn(8, 4, seed=10 + i), drawn(8, 3, seed=20 + i)


def test_a_run_that_goes_on_from_a_file_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole = mf.Step(program(), state())
    losses = [whole(*batch(i)) for i in range(6)]
    first = mf.Step(program(), state())
    begun = [first(*batch(i)) for i in range(3)]
    file = first.save(tmp_path / "some" / "folder")
    assert file.name == "rank0000.pt"
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    fresh = mf.Step(
        program(), {n: torch.full_like(x, 9.0) for n, x in state().items() if x is not None}
    )
    fresh.load(file.parent)
    rest = [fresh(*batch(i)) for i in range(3, 6)]
    assert [x.item() for x in losses] == [x.item() for x in (*begun, *rest)]
    for name, x in whole.state.items():
        assert x is not None
        assert torch.equal(x, fresh.state[name])  # type: ignore[arg-type]


def test_against_torch() -> None:
    w = drawn(4, 3).requires_grad_()
    optimizer = torch.optim.AdamW([w], lr=0.05)
    step = mf.Step(program(), state())
    for i in range(6):
        x, t = batch(i)
        loss = torch.nn.functional.mse_loss(torch.tanh(x @ w), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x, t), loss.detach())
    torch.testing.assert_close(step.state["w"], w.detach(), rtol=1e-5, atol=5e-6)
    assert torch.equal(step.state["step"], torch.tensor(7.0))  # type: ignore[arg-type]


def test_the_state_is_what_was_passed() -> None:
    given = state()
    step = mf.Step(program(), given)
    before = given["w"].clone()  # type: ignore[union-attr]
    step(*batch(0))
    assert step.state["w"] is given["w"]
    assert not torch.equal(before, given["w"])  # type: ignore[arg-type]


def test_several_results_and_none() -> None:
    with mf.FusionDefinition("two") as fd:
        n = fd.define_tensor([2], name="n")
        fd.add_output(n * 2)
        fd.add_output(n + 1, reuse=n)
        fd.add_output(n * 3)
    first, second = mf.Step(mf.compile(fd), {"n": torch.ones(2)})()
    assert torch.equal(first, torch.full((2,), 2.0))
    assert torch.equal(second, torch.full((2,), 3.0))
    with mf.FusionDefinition("none") as fd:
        n = fd.define_tensor([2], name="n")
        fd.add_output(n + 1, reuse=n)
    assert mf.Step(mf.compile(fd), {"n": torch.ones(2)})() is None


def test_wrong_states() -> None:
    with pytest.raises(mf.ProgramError, match=re.escape("with the state w, m")) as error:
        mf.Step(program(), {n: x for n, x in state().items() if n in ("w", "m")})
    assert error.value.because == "its outputs are written into w, m, v, step"
    with pytest.raises(mf.ProgramError, match="with the state w, m, v, step, x"):
        mf.Step(program(), {**state(), "x": batch(0)[0]})
    with mf.FusionDefinition("pure") as fd:
        fd.add_output(fd.define_tensor([2]) + 1)
    with pytest.raises(mf.ProgramError, match="none of its outputs is written into an input"):
        mf.Step(mf.compile(fd), {})
    definition: Any = fd
    with pytest.raises(mf.ProgramError, match="Step of FusionDefinition"):
        mf.Step(definition, {})


def test_wrong_inputs() -> None:
    step = mf.Step(program(), state())
    with pytest.raises(mf.ProgramError, match="with 1 input") as error:
        step(batch(0)[0])
    assert error.value.hint == "pass, in this order: x, t"


def test_wrong_files(tmp_path: Path) -> None:
    step = mf.Step(program(), state())
    with pytest.raises(mf.ProgramError, match="cannot be read"):
        step.load(tmp_path)
    file = tmp_path / "rank0000.pt"
    file.write_bytes(b"no such thing")
    with pytest.raises(mf.ProgramError, match="cannot be read"):
        step.load(tmp_path)
    torch.save({"other": 1}, file)
    with pytest.raises(mf.ProgramError, match="cannot be read"):
        step.load(tmp_path)
    mf.Step(program(5), state(5)).save(tmp_path)
    before = step.state["w"].clone()  # type: ignore[union-attr]
    with pytest.raises(mf.ProgramError, match=re.escape("%w is torch.float32 [4, 5]")) as error:
        step.load(tmp_path)
    assert "[4, 3]" in (error.value.because or "")
    assert torch.equal(before, step.state["w"])  # type: ignore[arg-type]
