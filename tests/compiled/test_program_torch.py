"""Runs inside of functions that torch compiles: the graph breaks there, and nothing is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import mdfuse as mf

with mf.FusionDefinition("wave") as WAVE:
    x = WAVE.define_tensor([4, 3])
    WAVE.add_output(WAVE.ops.sin(x))


@pytest.fixture(autouse=True)
def counted(unjoined: None) -> Iterator[None]:
    """Counts of frames that begin at none."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


WAYS: dict[str, Callable[[Any], list[Any]]] = {
    "run": mf.compile(WAVE).run,
    "call": mf.compile(WAVE),
    "evaluator": mf.HostIrEvaluator(mf.compile(WAVE).host).run,
    "differentiable": mf.differentiable(WAVE),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_not_traced(way: str) -> None:
    def f(x: Tensor) -> Tensor:
        argument: Any = {"x": x * 2} if way == "evaluator" else x * 2
        y: Tensor = WAYS[way](argument)[0] * 3
        return y

    compiled = torch.compile(f, backend="eager")
    x = torch.randn(4, 3, requires_grad=way == "differentiable")
    for _ in range(2):
        got = compiled(x)
        torch.testing.assert_close(got, torch.sin(x * 2) * 3)
    if x.requires_grad:
        (grad,) = torch.autograd.grad(got.sum(), x)
        torch.testing.assert_close(grad, 6 * torch.cos(x * 2))
    assert counters["frames"]["total"] == 2, "f, and the rest of it"


def test_the_whole_graph_is_refused() -> None:
    """Torch says what it may not trace, and why."""
    compiled = torch.compile(lambda x: WAYS["run"](x)[0], backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="mdfuse has prepared what it calls"):
        compiled(torch.ones(4, 3))
