"""Layouts that were chosen once are found again, and only where they would be chosen again."""

from __future__ import annotations

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Replicate, Shard
from mdfuse.passes import strategy

MESH = DeviceMesh.arange(tp=2)


def layers(count: int) -> mf.FusionDefinition:
    with mf.FusionDefinition("layers") as fd:
        x = fd.define_tensor([8, 8], torch.float32, MESH, {})
        for _ in range(count):
            h = fd.ops.linear(x, fd.define_tensor([16, 8], torch.float32, MESH, {"tp": Shard(0)}))
            w = fd.define_tensor([8, 16], torch.float32, MESH, {"tp": Shard(1)})
            x = fd.ops.set(fd.ops.linear(fd.ops.gelu(h), w)).on(MESH, {})
        fd.add_output(x)
    return fd


def test_equal_layers_are_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = [0], strategy._chosen

    def counted(*arguments: object) -> object:
        asked[0] += 1
        return ask(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(strategy, "_chosen", counted)
    counts = []
    for n in (2, 9):
        strategy.CHOICES.empty()
        mf.FusionCache.reset()
        asked[0] = 0
        fusion = mf.compile(layers(n)).fusion
        counts.append(asked[0])
    assert counts[0] == counts[1] > 0
    produced = [str(fusion.layout(e.output)) for e in fusion.exprs[:4]]
    assert produced == ["(tp=S1)", "(tp=S1)", "(tp=P(sum))", "(tp=R)"]
    assert [str(fusion.layout(e.output)) for e in fusion.exprs[-4:]] == produced


@pytest.mark.parametrize("twice", [False, True])
def test_an_operand_that_is_read_twice_is_not_two_operands(twice: bool) -> None:
    """The square of a Partial needs it whole; its product with another value does not."""
    for _ in range(2):
        with mf.FusionDefinition("product") as fd:
            x = fd.define_tensor([4, 4], torch.float32, MESH, {"tp": Partial("sum")})
            r = fd.define_tensor([4, 4], torch.float32, MESH, {"tp": Replicate()})
            y = x * (x if twice else r)
            fd.add_output(fd.ops.set(y).on(MESH, {"tp": Partial("sum")}) if not twice else y)
        fusion = mf.compile(fd).fusion
        (product,) = (e for e in fusion.exprs if e.op == "mul")
        assert fusion.layout(product.output).partial_axes == (() if twice else ("tp",))
