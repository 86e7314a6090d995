"""Traced functions: traced once for arguments of a kind, run on DTensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Replicate, Shard

GRID = DeviceMesh.arange(dp=2, tp=2)


@pytest.fixture
def alone(unjoined: None) -> Iterator[TorchMesh]:
    """A world of one rank, with torch's default group; its mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@mf.fusion
def scaled(x: Any, w: Any, factor: Any = 2.0, *, turn: bool = False) -> Any:
    """x @ w, scaled."""
    y = mf.ops.set(x @ w).on(GRID, {"dp": Shard(0)}) * factor
    return (y, mf.ops.transpose(y, 0, 1)) if turn else y


def specs() -> list[mf.TensorSpec]:
    return [
        mf.TensorSpec((8, 4), torch.float32, GRID, {"dp": Shard(0)}),
        mf.TensorSpec((4, 6), torch.float32, GRID, {"tp": Shard(0)}),
    ]


def test_a_function_is_traced_once_for_arguments_of_a_kind() -> None:
    counted: list[Any] = []

    @mf.fusion
    def add(x: Any, n: Any) -> Any:
        counted.append(n)
        return x + (n[0] if isinstance(n, tuple) else n)

    base = mf.TensorSpec((8, 4), torch.float32, GRID, {"dp": Shard(0)})
    fd = add.define(base, 1)
    for same in (
        mf.TensorSpec([8, 4], torch.float32, GRID, {"dp": Shard(-2), "tp": Replicate()}),
        mf.TensorSpec((8, 4), mesh=Layout(GRID, {"dp": Shard(0)})),
        mf.TensorSpec((8, 4), torch.float32, DeviceMesh([[0, 1], [2, 3]], ("dp", "tp")),
                      {"dp": Shard(0)}, {0: ("dp",)}),
    ):  # fmt: skip
        assert add.define(same, n=1) is fd
    assert counted == [1]
    others = [
        (base, True), (base, 1.0), (base, 0.0), (base, -0.0), (base, (1,)), (base, (1.0,)),
        (mf.TensorSpec((4, 8), torch.float32, GRID, {"dp": Shard(0)}), 1),
        (mf.TensorSpec((8, 4), torch.float64, GRID, {"dp": Shard(0)}), 1),
        (mf.TensorSpec((8, 4), torch.float32, GRID, {"tp": Shard(0)}), 1),
        (mf.TensorSpec((8, 4), torch.float32, GRID, {"dp": Shard(0)}, stride_order=(0, 1)), 1),
        (mf.TensorSpec((8, 4)), 1),
    ]  # fmt: skip
    made = [add.define(*other) for other in others]
    assert len({id(x) for x in (fd, *made)}) == len(others) + 1
    assert all(add.define(*other) is x for other, x in zip(others, made, strict=True))
    assert add.program(base, 1) is add.program(base, n=1)


def test_few_definitions_are_kept() -> None:
    spec = mf.TensorSpec((2,))
    double = mf.fusion(lambda x, n: x * n)
    first = double.define(spec, 0)
    for n in range(100):
        double.define(spec, n)
    assert double._traces.info().size == 64
    assert double.define(spec, 0) is not first


def test_threads_share_a_trace() -> None:
    counted: list[int] = []

    @mf.fusion
    def slow(x: Any) -> Any:
        counted.append(1)
        for _ in range(20):
            x = x + 1.0
        return x

    found: list[Any] = []
    define = [lambda: found.append(slow.define(mf.TensorSpec((2,)))) for _ in range(8)]
    threads = [threading.Thread(target=one) for one in define]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(counted) == 1
    assert len({id(fd) for fd in found}) == 1


def test_values_of_a_traced_function() -> None:
    x, w = torch.randn(8, 4), torch.randn(4, 6)
    y, t = mf.simulate(scaled.program(*specs(), 3.0, turn=True), [x, w]).outputs
    torch.testing.assert_close(y, x @ w * 3.0)
    torch.testing.assert_close(t, (x @ w * 3.0).t())
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "x @ w, scaled.")


def test_inside_a_definition_the_body_stands_there() -> None:
    x, w = torch.randn(8, 4), torch.randn(4, 6)
    with mf.FusionDefinition("outer") as fd:
        a = fd.define_tensor([8, 4], mesh=GRID)
        b = fd.define_tensor([4, 6], mesh=GRID)
        fd.add_output(scaled(a, b, factor=fd.define_scalar(0.5)) + 1.0)
    assert len(fd.fusion.exprs) == 4
    torch.testing.assert_close(mf.simulate(mf.compile(fd), [x, w]).outputs[0], x @ w / 2 + 1)
    with pytest.raises(mf.DefinitionError, match="@outer is not being defined"):
        scaled(a, b)


def test_tensors_among_other_arguments() -> None:
    """Each tensor of *args and **kwargs is an input, whatever the order of the names."""

    @mf.fusion
    def weighted(*terms: Any, bias: float = 0.0, **named: Any) -> Any:
        return terms[0] - terms[1] + named["a"] * named["b"] + bias

    one, two = mf.TensorSpec((2,)), mf.TensorSpec((1,))
    fd = weighted.define(one, one, b=two, a=one, bias=1.0)
    assert fd.fusion.inputs == ("terms_0", "terms_1", "named_a", "named_b")
    assert weighted.define(one, one, bias=1.0, a=one, b=two) is fd
    x, y, a, b = torch.randn(2), torch.randn(2), torch.randn(2), torch.randn(1)
    torch.testing.assert_close(mf.reference(fd, [x, y, a, b])[0], x - y + a * b + 1)


def refused(call: Callable[[], Any], *texts: str) -> None:
    with pytest.raises(mf.DefinitionError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


def test_traces_that_are_refused() -> None:
    spec, plain = mf.TensorSpec((2,)), torch.ones(2)
    same = mf.fusion(lambda x, n=None: x)
    refused(lambda: same.define(spec, {1}), "set for n", "told from others")
    refused(lambda: same.define(spec, [{}]), "dict for n")
    refused(lambda: same.define(plain), "a tensor for x", "pass TensorSpec")
    refused(lambda: same.define(spec, (plain,)), "a tensor for n.0", "pass TensorSpec")
    refused(lambda: same.define(spec, {"a": [spec, plain]}), "a tensor for n.a.1")
    refused(lambda: same.define(), "missing a required argument: 'x'", "(x, n=None)")
    refused(lambda: same.define(mf.TensorSpec(3)), "shape 3")  # type: ignore[arg-type]
    refused(lambda: mf.fusion(lambda x: 3.0).define(spec), "returns float", "tuple of them")
    refused(lambda: mf.fusion(lambda x: (x, None)).define(spec), "returns NoneType")
    refused(lambda: same(plain), "a plain tensor for x", "distribute_tensor(x, mesh")
    refused(lambda: same(3.0), "outside of a definition, with no tensor")
    refused(lambda: same(spec), "outside of a definition, with a TensorSpec for x")
    with mf.FusionDefinition("open") as fd:
        x = fd.define_tensor([2])
        refused(lambda: same.define(x), "%x of @open for x", "call the function inside")


@dataclass
class Pair:
    """Two tensors, or what else stands for them."""

    first: Any
    second: Any


torch.export.register_dataclass(Pair)


@dataclass
class Own:
    """A pair that torch knows nothing of."""

    first: Any
    second: Any


def paired(x: Any, more: Any, scale: float = 1.0) -> Any:
    """Trees in, a tree out."""
    y = more["pair"].first * scale + x
    kind = type(more["pair"])
    return {"sum": y, "rest": [kind(y * more["pair"].second, more["list"][1])]}


@pytest.mark.parametrize("kind", [Pair, Own])
def test_trees_of_arguments_and_results(alone: TorchMesh, kind: Any) -> None:
    traced, spec = mf.fusion(paired), mf.TensorSpec((2, 3), mesh=alone)
    specs = {"list": [2.0, spec], "pair": kind(spec, 3.0)}
    fd = traced.define(spec, specs, scale=2.0)
    assert fd.fusion.inputs == ("x", "more_list_1", "more_pair_first")
    assert fd is traced.define(spec, {"list": [2.0, spec], "pair": kind(spec, 3.0)}, scale=2.0)
    others = ({**specs, "list": (2.0, spec)}, {**specs, "pair": kind(spec, 4.0)})
    assert all(traced.define(spec, other, scale=2.0) is not fd for other in others)
    x, y, z = torch.randn(3, 2, 3)
    placed = [TorchReplicate(), TorchReplicate()]
    a, b, c = (DTensor.from_local(t, alone, placed) for t in (x, y, z))
    given = {"list": [2.0, c], "pair": kind(b, 3.0)}
    for call in (traced, mf.differentiable(traced)):
        found = call(a, given, scale=2.0)
        pair = found["rest"][0]
        assert type(pair) is kind
        torch.testing.assert_close(found["sum"].full_tensor(), y * 2 + x)
        torch.testing.assert_close(pair.first.full_tensor(), (y * 2 + x) * 3)
        torch.testing.assert_close(pair.second.full_tensor(), z)
    with mf.FusionDefinition("inside") as fd:
        h = fd.define_tensor([2, 3])
        assert paired(h, {"pair": kind(h, 3.0), "list": [0, h]})["sum"].shape == (2, 3)
        assert traced(h, {"pair": kind(h, 3.0), "list": [0, h]})["sum"].shape == (2, 3)


def test_calls_on_dtensors(alone: TorchMesh) -> None:
    counted: list[Any] = []

    @mf.fusion
    def layer(x: Any, w: Any, n: float = 1.0, split: bool = False) -> Any:
        counted.append(n)
        y = mf.ops.set(x @ w).on(alone, {"tp": Shard(1)}) * n
        return [y, mf.ops.sum(y, dims=[0])] if split else y

    placed = [TorchReplicate(), TorchReplicate()]
    for _ in range(3):
        x, w = torch.randn(3, 4), torch.randn(4, 6)
        a, b = (DTensor.from_local(t, alone, placed) for t in (x, w))
        y = layer(a, w=b)
        assert type(y) is DTensor
        assert y.device_mesh is alone
        torch.testing.assert_close(y.full_tensor(), x @ w)
        found = layer(a, b, 2.0, split=True)
        assert type(found) is list
        torch.testing.assert_close(found[1].full_tensor(), (x @ w * 2).sum(0))
    assert counted == [1.0, 2.0]
    assert layer.program(mf.spec_of(a), mf.spec_of(b)).plans.info().hits == 2
    refused(lambda: layer(a, torch.ones(4, 6)), "a plain tensor for w")
    refused(lambda: layer(a, b, n=[torch.ones(2)]), "a plain tensor for n.0")
    grow = mf.fusion(lambda x: x + 1.0).program(mf.TensorSpec((-1, 4), mesh=alone))
    for rows in (2, 3):
        z = DTensor.from_local(torch.zeros(rows, 4), alone, placed)
        assert torch.equal(grow.run(z)[0].full_tensor(), torch.ones(rows, 4))
    turned = DTensor.from_local(torch.randn(4, 3).t(), alone, placed)
    assert mf.fusion(lambda x: x * 2.0)(turned).stride() == (1, 3)
    with mf.FusionDefinition("other") as fd:
        fd.add_output(fd.define_tensor([2]) * 2.0)
        assert type(layer(a, b)) is DTensor


def test_an_object_that_holds_tensors_is_no_constant() -> None:
    @mf.fusion
    def scaled(x: Any, by: Any) -> Any:
        return x * by.scale

    spec = mf.TensorSpec((4,))
    assert scaled.define(spec, _Scale(2.0)).outputs
    with pytest.raises(mf.DefinitionError, match="its scale holds a tensor"):
        scaled.define(spec, _Scale(torch.ones(4)))


class _Scale:
    def __init__(self, scale: Any) -> None:
        self.scale = scale
