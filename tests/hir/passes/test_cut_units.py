"""Units that begin or end with another one are cut, and values stay what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Options, Shard, hir
from mdfuse.hir.passes import cut_units
from mdfuse.hir.passes.repeats import LEAST, keys
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify.check import verify

ALWAYS = Options(compile="always")
MESH = DeviceMesh.arange(t=2)

Work = Callable[[Any], Any]


def one(x: Any) -> Any:
    return x.sin()


def several(x: Any) -> Any:
    return (x.sin() * 0.5 + 1.0).cos()


def products(x: Any) -> Any:
    return x @ x.mT @ x


def inside(x: Any) -> Any:
    for _ in range(LEAST // 2):
        x = x.sin() * 1.5
    return x


def network(front: Work | None, layers: int) -> mf.Program:
    """Layers with sums over ranks between them, behind other work."""
    with FusionDefinition("network") as fd:
        x = fd.define_tensor([3, 5], torch.float32, MESH, {})
        y = x if front is None else front(x)
        for _ in range(layers):
            w = fd.define_tensor([5, 7], torch.float32, MESH, {"t": Shard(1)})
            v = fd.define_tensor([7, 5], torch.float32, MESH, {"t": Shard(0)})
            y = (inside(y @ w) @ v).on(MESH, {})
        fd.add_output(y)
    program = mf.compile(fd, options=ALWAYS)
    verify(program.host)
    assert hir.parse(str(program.host)) == program.host
    return program


def units(host: HostProgram) -> list[list[str]]:
    return [[j.fn or j.op for j in i.body] for i in host.walk() if i.op == "launch"]


def distinct(host: HostProgram) -> int:
    return len({tuple(keys(host, i.body)) for i in host.walk() if i.op == "launch"})


@pytest.mark.parametrize("front", [None, one, products, several])
def test_the_first_layer_is_a_unit_as_the_others(front: Work | None) -> None:
    program = network(front, 4)
    each = units(program.host)
    lengths = Counter(map(len, each))
    assert lengths[max(lengths)] == 4 and sum(lengths.values()) == 4 + (front is several)
    assert distinct(program.host) == 1 + (front is several)
    names = [i.fn for i in program.host.walk() if i.op == "launch"]
    assert names == [f"fused{n}" for n in range(len(names))]
    draw = torch.Generator().manual_seed(1)
    shapes = [program.fusion.values[x].shape for x in program.fusion.inputs]
    given = [torch.randn(shape, generator=draw) for shape in shapes]
    (result,) = mf.simulate(program, given).outputs
    y, *weights = (x.double() for x in given)
    y = y if front is None else front(y)
    for w, v in zip(weights[::2], weights[1::2], strict=True):
        y = inside(y @ w) @ v
    torch.testing.assert_close(result.double(), y, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_a_unit_once_is_not_cut_off() -> None:
    """Two layers, of which one is behind other work, are two units in any case."""
    each = units(network(several, 2).host)
    assert len(each) == 2 and len(each[0]) > len(each[1])


def test_what_is_cut_is_not_cut_again() -> None:
    host = network(several, 4).host
    assert cut_units.run(host, ALWAYS) is host
