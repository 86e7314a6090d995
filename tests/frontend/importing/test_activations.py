"""Layouts of what submodules take and return."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from helpers import hand_plans
from torch import Tensor, nn
from torch.distributed import tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import mdfuse as mf
from mdfuse import DeviceMesh, LayoutError, Replicate, Shard
from mdfuse.compiled.imported import ImportedModel
from mdfuse.hir.traffic import received as arriving

TP = DeviceMesh.arange(tp=2)
SPLIT = {"tp": Shard(1)}
HEADS = {
    "*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)},
}  # fmt: skip


class Layer(nn.Module):
    """A norm and two matrices; activations are [batch, position, feature]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(8), nn.ReLU(inplace=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y if scale is None else y * scale


class Net(nn.Module):
    """Three layers of which the first is called again, under another name too."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.again, self.head = self.layers[0], nn.Linear(8, 16)
        self.same = nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.same(self.again(self.layers[0](x, scale=x.sigmoid())))
        logits: Tensor = self.head(x)
        return logits


def _net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


IDS = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))


def _agrees(model: ImportedModel, module: nn.Module, *args: Any, rtol: float = 1e-6) -> mf.Program:
    """Compare the forward and all gradients with torch's; return the program of the step."""
    with torch.no_grad():
        wanted = module(*args)
    found = model.outputs(mf.simulate(model.compile(), [*model.load(), *args]).outputs)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 100)
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    with mf.FusionDefinition("gradients") as fd:
        inputs = [fd.define_tensor(x.shape, x.dtype, model.model.mesh, name=f"in{i}")
                  for i, x in enumerate(args)]  # fmt: skip
        y, weights = model.record(*inputs)
        for g in mf.grad((y * y).sum(), [weights[n] for n in names]):
            fd.add_output(g)
    program = mf.compile(fd)
    found = mf.simulate(program, [*args, *model.load()]).outputs
    loss = module(*args).square().sum()
    wanted = torch.autograd.grad(loss, [p for n, p in module.named_parameters()])
    for name, x, y in zip(names, found, wanted, strict=True):
        torch.testing.assert_close(
            x, y, rtol=rtol, atol=rtol / 100, msg=lambda m, n=name: f"{n}: {m}"
        )
    return program


def _import(layouts: dict[str, Any], mesh: DeviceMesh = TP, module: Any = None) -> Any:
    return mf.from_torch(module or _net(), (IDS,), mesh=mesh, layouts={**HEADS, **layouts})


def test_values_and_gradients_are_torchs() -> None:
    module = _net()
    model = _import({
        "activation:layers.*": SPLIT, "activation:emb": SPLIT, "argument:layers.*.norm": SPLIT,
        "activation:*.*.act": {"tp": Shard(-1)}, "activation:same": {"tp": Replicate()},
    }, module=module)  # fmt: skip
    _agrees(model, module, IDS)
    sets = [model.fusion.values[e.output] for e in model.fusion.exprs if e.op == "set"]
    counts = Counter(x.name.rstrip("_0123456789") for x in sets)
    assert (counts["emb"], counts["same"], counts["layers"]) == (1, 1, 2)
    lines = model.report().splitlines()
    (line,) = (x for x in lines if x.strip().startswith("activation:layers.*"))
    assert (
        "tp=S1" in line
        and "4: activation:layers.0, activation:layers.1, activation:layers.0 (" in line
    )


def test_axes_that_are_not_named_stay_as_they_are() -> None:
    mesh, module = DeviceMesh.arange(dp=2, tp=2), _net()
    model = _import({"input:ids": {"dp": Shard(0)}, "activation:layers.*": SPLIT}, mesh, module)
    _agrees(model, module, IDS)
    program = model.compile()
    assert {axis for c in program.communications for axis in c.axes} == {"tp"}
    whole = _import(
        {"input:ids": {"dp": Shard(0)}, "activation:layers.*": mf.Layout(mesh, SPLIT)}, mesh
    )
    assert "dp" in {axis for c in whole.compile().communications for axis in c.axes}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_posts_and_bytes_of_sequence_parallelism_by_hand(ranks: int) -> None:
    """A gather and a scatter per half of a layer, each way, and a sum per factor of a norm."""
    mesh = DeviceMesh.arange(tp=ranks)
    (one, few), (two, many) = (_received(layers, mesh) for layers in (1, 2))
    assert two - one == {"Allgather": 4, "ReduceScatter": 4, "Allreduce": 2}
    each = 2 * 16 * 64 * hand_plans.BYTES * (ranks - 1) // ranks
    factors = 2 * 2 * 64 * 4 * (ranks - 1) // ranks  # summed in f32
    assert many - few == {"Allgather": 4 * each, "ReduceScatter": 4 * each, "Allreduce": factors}


def _received(layers: int, mesh: DeviceMesh) -> tuple[Counter[str], Counter[str]]:
    """The posts of a step, and the bytes that arrive, by kind."""
    module, ids = _llama(layers), torch.zeros(2, 16, dtype=torch.int64)
    planned = mf.from_plan(module, sequence=1)
    model = mf.from_torch(module, (ids,), {"use_cache": False}, mesh=mesh, **planned)
    step = model.training_step(
        lambda y: y.float().square().mean(), optimizer=partial(mf.optim.sgd, lr=0.1)
    )
    program, sizes = step.compile(mf.Options(overlap="never")), Counter[str]()
    for instruction, size in arriving(program.host, 0):
        sizes[instruction.comm.kind] += size
    return Counter(c.kind for c in program.communications), sizes


def _llama(layers: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


# -- plans -----------------------------------------------------------------------------------------


#: Kinds of transformers: settings, and posts of the gradients of two layers.
KINDS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "qwen3": ({}, {"Allgather": 10, "ReduceScatter": 10, "Allreduce": 5 + 4}),
    "gemma3_text": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        {"Allgather": 10, "ReduceScatter": 10, "Allreduce": 9 + 4},
    ),
    # queries and keys are gathered for their norms
    "olmo2": ({}, {"Allgather": 10 + 4, "ReduceScatter": 10, "Allreduce": 5 + 8}),
    # one norm for both halves of a layer, with a factor and an addend; both are reduced together
    "phi": ({}, {"Allgather": 6, "ReduceScatter": 6, "Allreduce": 6}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_transformers_in_one_line(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0, **KINDS[kind][0],
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config).eval().double()
    model = mf.from_torch(
        _Logits(module), (IDS[:2],), mesh=TP,
        **mf.from_plan(_Logits(module), {f"module.{p}": s for p, s in module.tp_plan.items()},
                       sequence=1),
    )  # fmt: skip
    program = _agrees(model, _Logits(module), IDS[:2], rtol=1e-3)  # norms are in f32
    assert Counter(c.kind for c in program.communications) == KINDS[kind][1]


class _Logits(nn.Module):
    """A language model that returns its logits alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.module(ids, use_cache=False).logits
        return logits


# -- styles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "wanted"), [
    (SequenceParallel(),
     {"argument:layers.*.norm": Shard(1), "activation:layers.*.norm": Shard(1)}),
    (SequenceParallel(sequence_dim=0),
     {"argument:layers.*.norm": Shard(0), "activation:layers.*.norm": Shard(0)}),
    ("sequence_parallel",
     {"argument:layers.*.norm": Shard(1), "activation:layers.*.norm": Shard(1)}),
    (PrepareModuleInput(input_layouts=tensor.Shard(1), desired_input_layouts=tensor.Replicate()),
     {"argument:layers.*.norm:input": Replicate()}),
    (PrepareModuleInput(input_kwarg_layouts={"input": tensor.Replicate()},
                        desired_input_kwarg_layouts={"input": tensor.Shard(1)}),
     {"argument:layers.*.norm:input": Shard(1)}),
    (PrepareModuleOutput(output_layouts=tensor.Shard(1), desired_output_layouts=tensor.Replicate(),
                         use_local_output=False),
     {"activation:layers.*.norm:0": Replicate()}),
    (PrepareModuleInputOutput(
        input_layouts=(tensor.Replicate(),), desired_input_layouts=(tensor.Shard(1),),
        output_layouts=(tensor.Shard(1), None), desired_output_layouts=(tensor.Shard(2), None)),
     {"argument:layers.*.norm:input": Shard(1), "activation:layers.*.norm:0": Shard(2)}),
])  # fmt: skip
def test_styles_of_what_submodules_take_and_return(style: Any, wanted: dict[str, Any]) -> None:
    said = mf.from_plan(_net(), {"layers.*.norm": style})
    assert said["layouts"] == {pattern: {"tp": p} for pattern, p in wanted.items()}


def test_layouts_of_products_that_are_not_a_styles_own() -> None:
    said = mf.from_plan(_net(), {
        "emb": RowwiseParallel(input_layouts=tensor.Replicate(), output_layouts=tensor.Shard(1)),
        "layers.*.up": ColwiseParallel(input_layouts=tensor.Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=tensor.Shard(1)),
        "head": ColwiseParallel(output_layouts=tensor.Replicate()),
    })["layouts"]  # fmt: skip
    activations = {name: p for name, p in said.items() if ":" in name}
    assert activations == {
        "activation:emb": SPLIT, "activation:layers.*.down": SPLIT,
        "activation:head": {"tp": Replicate()},
    }  # fmt: skip


def test_a_plan_of_sequences_written_for_torch() -> None:
    """Torch's own form posts as the short one does."""
    module = _net()
    matrices = {"emb": RowwiseParallel(), "layers.*.up": ColwiseParallel(),
                "layers.*.down": RowwiseParallel(), "head": ColwiseParallel()}  # fmt: skip
    split, whole = tensor.Shard(1), tensor.Replicate()
    long = matrices | {
        "emb": RowwiseParallel(output_layouts=split),
        "layers.*.norm": SequenceParallel(),
        "layers.*.down": RowwiseParallel(output_layouts=split),
        "layers.*.up": ColwiseParallel(input_layouts=split),
        "head": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
    }  # fmt: skip
    said = mf.from_plan(module, long)
    said["layouts"] |= mf.from_plan(module, {"head": ColwiseParallel()})["layouts"]
    one = mf.from_torch(module, (IDS,), mesh=TP, **said)
    two = mf.from_torch(module, (IDS,), mesh=TP, **mf.from_plan(module, matrices, sequence=1))
    posts = [Counter(c.kind for c in _agrees(x, module, IDS).communications) for x in (one, two)]
    assert posts[0] == posts[1]


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layouts", "what", "because"), [
    ({"activation:layer.*": SPLIT}, "'activation:layer.*'] matches no submodule", "layers.*.norm"),
    ({"argument:layers": SPLIT}, "'argument:layers'] places no tensor", "ModuleList"),
    ({"activation:layers.*:1": SPLIT}, "'activation:layers.*:1'] places no tensor", "returns 0"),
    ({"argument:layers.*:y": SPLIT}, "'argument:layers.*:y'] places no tensor", "takes x, scale"),
    ({"activation:emb": {"tp": Shard(3)}}, "for activation:emb: axis tp: Shard(dim=3)", ""),
    ({"activation:emb": {"dp": Shard(0)}}, "layouts['activation:emb']", "tp"),
    ({"activation:emb": {"tp": mf.Partial("sum")}}, "activation:emb is Partial", ""),
    ({"activation:layers.*": SPLIT, "activation:*layers.?": {}}, "both match activation:", ""),
])  # fmt: skip
def test_errors(layouts: dict[str, Any], what: str, because: str) -> None:
    with pytest.raises(LayoutError) as error:
        _import(layouts)
    assert what in error.value.what
    assert because in str(error.value)


def test_a_gather_behind_a_layout_is_named_with_its_cost() -> None:
    class Folds(nn.Module):
        """Rows of positions that are counted anew: a rank's are in no one piece."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.first(x).reshape(3, 8, 8)).softmax(1)
            return y

    module, x = Folds(), torch.randn(4, 6, 8)
    model = mf.from_torch(module, (x,), mesh=TP, layouts={"activation:first": SPLIT})
    (warning,) = (line for line in model.report().splitlines() if "warning" in line)
    assert "is brought together (test_activations.py:" in warning
    assert "activation:first places it, 384 bytes to a rank" in warning


def test_the_module_stays_as_it_was() -> None:
    module = _net()
    _import({"activation:layers.*": SPLIT, "argument:emb": {}}, module=module)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
