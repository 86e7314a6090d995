"""Imported modules in definitions of one's own: the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

D = torch.float64
POISON = mf.Options(poison=True)
WORDS, LENGTH, WIDTH = 11, 5, 8


class Layers(nn.Module):
    """The first stage of a GPT, one in the middle, or the last one."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH) if is_first else None
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH)) if is_first else None
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, WORDS) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is not None:
            x = self.table(x) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=D)
        x = self.layer(x, src_mask=mask)
        return x if self.head is None else self.head(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y, _ = self.attention(x, x, x, need_weights=False)
        return {"sum": x + y}


def check(
    modules: list[nn.Module],
    x: Tensor,
    t: Tensor,
    loss_of: Callable[[Any, Any], Any],
    layouts: dict[str, Any],
    schedule: str,
) -> None:
    """Each module is a stage; loss and all gradients are torch's."""
    places = [DeviceMesh([2 * n, 2 * n + 1], axes=["tp"]) for n in range(len(modules))]
    models, h = [], x
    for module, place in zip(modules, places, strict=True):
        module.to(D)
        models.append(mf.from_torch(module, (h,), mesh=place, layouts=layouts))
        h = module(h)
        h = h["sum"] if isinstance(h, dict) else h
    given = [x, t]
    weights: list[Any] = []
    with mf.FusionDefinition("stages") as fd:
        v: Any = fd.define_tensor(x.shape, x.dtype, places[0], name="x")
        aim = fd.define_tensor(t.shape, t.dtype, places[-1], name="t")
        for n, model in enumerate(models):
            v, found = model.record(fd.ops.set(v).on(places[n], {}) if n else v, name=f"stage{n}")
            v = v["sum"] if isinstance(v, dict) else v
            given += [w for w in model.load() if w is not None]
            weights += [w for name, w in found.items() if "constant" not in name]
        loss = loss_of(v, aim)
        for y in (loss, *mf.grad(loss, weights)):
            fd.add_output(y)
    batch = {"x": 0, "t": 0}
    program = mf.pipeline(fd, microbatches=3, batch=batch, schedule=schedule, options=POISON)
    want = loss_of(h, t)
    leaves = [p for module in modules for p in module.parameters()]
    wanted = [want.detach(), *torch.autograd.grad(want, leaves)]
    assert len(wanted) == 1 + len(weights)
    for ours, theirs in zip(mf.simulate(program, given).outputs, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_a_gpt_in_stages(schedule: str) -> None:
    torch.manual_seed(0)
    split = {"layer.linear1.*": {"tp": Shard(0)}, "layer.linear2.weight": {"tp": Shard(1)}}
    words = torch.randint(WORDS, (2, 6, LENGTH))
    modules = [Layers(n == 0, n == 1) for n in range(2)]
    check(modules, *words, lambda y, t: F.cross_entropy(y.reshape(-1, WORDS), t.reshape(-1)),
          split, schedule)  # fmt: skip


def test_attention_whose_results_are_a_dict() -> None:
    torch.manual_seed(0)
    x, t = torch.randn(2, 6, 3, WIDTH, dtype=D)
    check([Attention(), Attention()], x, t, lambda y, t: F.mse_loss(y, t), {}, "1f1b")


def test_parameters_in_blocks_and_arguments_with_a_law() -> None:
    mesh = DeviceMesh.arange(tp=2)
    module, x = nn.Linear(4, 6), torch.randn(5, 4)
    layouts = {"weight": {"tp": Shard(0)}, "input:0": {"tp": Shard(1)}}
    model = mf.from_torch(module, (x,), mesh=mesh, layouts=layouts, blocks={"weight": 3})
    with mf.FusionDefinition("f") as fd:
        y, weights = model.record(fd.define_tensor([5, 4], mesh=mesh))
        fd.add_output(y)
    assert [*weights] == ["weight.0", "weight.1", "weight.2", "bias"]
    (found,) = mf.simulate(mf.compile(fd, POISON), [x, *model.load()]).outputs
    torch.testing.assert_close(found, module(x).detach())


def test_statistics_of_a_batch_are_refused_in_microbatches() -> None:
    places = [DeviceMesh([n]) for n in range(2)]
    model = mf.from_torch(nn.BatchNorm1d(4), (torch.randn(6, 4),), mesh=places[1])
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([6, 4], mesh=places[0], name="x")
        y, _ = model.record(fd.ops.set(x.exp()).on(places[1], {}))
        fd.add_output(y)
    with pytest.raises(mf.LoweringError, match="a sum over the whole batch") as raised:
        mf.pipeline(fd, microbatches=2, batch={"x": 0})
    assert "as layer_norm does" in str(raised.value)


WRONG: dict[str, tuple[Callable[[Any], tuple[Any, ...]], str, str]] = {
    "no value": (lambda x: (3.0,), "0 of its arguments", "tensors input"),
    "two values": (lambda x: (x, x), "Linear: arguments", "the same structure"),
    "another shape": (lambda x: (x[:3],), "Linear: input is", "imported with f32[6, 4]"),
    "another dtype": (lambda x: (x.double(),), "Linear: input is", "shapes and dtypes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    args, what, more = WRONG[name]
    mesh = DeviceMesh([0])
    model = mf.from_torch(nn.Linear(4, 4), (torch.randn(6, 4),), mesh=mesh)
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([6, 4], mesh=mesh)
        with pytest.raises(mf.DefinitionError, match=what) as raised:
            model.record(*args(x))
        assert more in str(raised.value)
        with pytest.raises(mf.DefinitionError, match="name='a b'"):
            model.record(x, name="a b")
        fd.add_output(x)


def test_a_module_that_is_called_on_a_value() -> None:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([6, 4], mesh=DeviceMesh([0]))
        with pytest.raises(mf.DefinitionError, match=r"from_torch\(module, …\).record\(value\)"):
            nn.Linear(4, 4)(x)
        fd.add_output(x)


@pytest.mark.parametrize("how", ["whole", "gathered", "in blocks", "adapted"])
def test_recorded_inside_of_recompute(how: str) -> None:
    """Its parameters are inputs; all else is computed again for the gradient."""
    mesh, split = DeviceMesh.arange(fsdp=2), {"fsdp": Shard(0)}
    settings: dict[str, dict[str, Any]] = {
        "whole": {},
        "gathered": {"layouts": {"*": split, "input:*": split}, "gather": "fsdp"},
        "in blocks": {"layouts": {"0.*": split}, "blocks": {"0.*": 2}},
        "adapted": {"layouts": {"*": split}, "adapters": {"0": 2}},
    }
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    rows = torch.randn(4, 8)

    def gradients(is_recomputed: bool) -> tuple[str, list[Tensor]]:
        model = mf.from_torch(module, (rows,), mesh=mesh, **settings[how])
        with mf.FusionDefinition("twice") as fd:
            x = fd.define_tensor([4, 8], mesh=mesh, name="x")
            with mf.recompute() if is_recomputed else nullcontext():
                y, weights = model.record(x, name="first")
                y, more = model.record(y, name="second")
            for g in mf.grad((y * y).sum(), [x, *weights.values(), *more.values()]):
                fd.add_output(g)
        program = mf.compile(fd)
        torch.manual_seed(0)
        given = [torch.randn(fd.fusion.values[name].shape) for name in fd.fusion.inputs]
        return str(program), mf.simulate(program, given, options=POISON).outputs

    (_, wanted), (text, found) = gradients(False), gradients(True)
    assert text.count("(recomputed)") > 7
    torch.testing.assert_close(found, wanted)
