"""Blocks of an imported module that the backward computes again: counts, gradients, reports."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, LayoutError, Shard
from mdfuse.errors import RECOMPUTED
from mdfuse.seeing.backward_memory import backward_memory

RATE = 0.1
SPLIT = {"fsdp": Shard(0)}
FSDP: dict[str, Any] = {
    "mesh": DeviceMesh.arange(fsdp=2), "gather": "fsdp", "layouts": {"*": SPLIT, "input:*": SPLIT},
}  # fmt: skip
TP: dict[str, Any] = {
    "mesh": DeviceMesh.arange(tp=2),
    "layouts": {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}},
}
ALONE: dict[str, Any] = {"mesh": DeviceMesh([0])}


def squares(y: Any) -> Any:
    return y.square().sum()


class Layer(nn.Module):
    """A norm, two products, and what comes in."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Layers(nn.Module):
    """Layers, and a head; each layer is a checkpoint where it is said how."""

    def __init__(self, count: int = 3, **how: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.head, self.how = nn.Linear(8, 4), how

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, **self.how) if self.how else layer(x)
        return self.head(x)


def again(program: mf.Program) -> Counter[str]:
    """Operations that the backward computes again, without views and gathers."""
    exprs = (e for e in program.fusion.exprs if e.source is not None)
    return Counter(e.op for e in exprs if e.source is not None and e.source.note == RECOMPUTED)


def trained(
    module: nn.Module, x: Tensor, how: dict[str, Any] = ALONE, **asked: Any
) -> tuple[mf.Program, mf.Simulated]:
    """Take a step, compare it with torch's on whole tensors; return its program, and its run."""
    model = mf.from_torch(module, (x,), **how, **asked)
    step = model.training_step(squares, optimizer=partial(mf.optim.sgd, lr=RATE))
    weights = model.load()
    program = step.compile()
    ran = mf.simulate(program, step.arguments(weights, step.state(weights), x))
    updated = step.updated(ran.outputs)
    plain = x.clone().requires_grad_(x.is_floating_point())
    squares(module(plain)).backward()
    for name, w in module.named_parameters():
        if w.grad is None:
            assert name not in updated
            continue
        torch.testing.assert_close(updated[name], w.detach() - RATE * w.grad)
    module.zero_grad()
    return program, ran


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", [ALONE, FSDP, TP], ids=["alone", "fsdp", "tp"])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_are_computed_again(how: dict[str, Any], is_reentrant: bool) -> None:
    """All of a block is but its last product; its operand and its result are kept."""
    module, x = Layers(use_reentrant=is_reentrant).double(), drawn(6, 8)
    program, _ = trained(module, x, how)
    counts = again(program)
    assert (counts["layer_norm"], counts["linear"], counts["tanh"]) == (3, 3, 3)
    assert counts["add"] == 0


def test_a_recomputed_layer_is_in_memory_alone() -> None:
    x = drawn(64, 8)
    plain, less = (
        trained(Layers(8, **how).double(), x)[1].peak_bytes[0]
        for how in ({}, {"use_reentrant": False})
    )
    assert less < 0.55 * plain


def test_posts_of_recomputed_layers() -> None:
    """A layer gathers again all but its last bias; without recompute 3, the first of all but 2.

    The parameters of the last layer and of the head stay.
    """
    plain, _ = trained(Layers().double(), drawn(6, 8), FSDP)
    program, _ = trained(Layers(use_reentrant=False).double(), drawn(6, 8), FSDP)
    counts, before = (Counter(c.kind for c in p.communications) for p in (program, plain))
    assert counts["ReduceScatter"] == before["ReduceScatter"] == 20
    assert (before["Allgather"], counts["Allgather"]) == (20 + 3 + 2, 20 + 2 * 5)


class Nested(nn.Module):
    """A checkpoint in a checkpoint, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def inside(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False).sin()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inside, x, use_reentrant=False)
        return checkpoint(self.layer, x, use_reentrant=False).cos()


def test_nested_checkpoints_are_one_block() -> None:
    module = Nested().double()
    program, _ = trained(module, drawn(4, 8), FSDP)
    counts = again(program)
    assert (counts["layer_norm"], counts["tanh"]) == (2, 2)
    assert counts["linear"] == 3  # what the inner one returns is read in the outer block
    report = mf.from_torch(module, (drawn(4, 8),), **FSDP).report().splitlines()
    assert "  computed again: 2: checkpoint 0, checkpoint 2" in report
    assert report[-1].startswith("  warning: 1 checkpoint inside of another")


def test_gradient_checkpointing_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(16, (2, 4))

    def program(is_asked: bool) -> mf.Program:
        module = LlamaForCausalLM(config).train()
        if is_asked:
            module.gradient_checkpointing_enable()
        model = mf.from_torch(module, (ids,), mesh=DeviceMesh([0]))
        step = model.training_step(
            lambda y, labels: mf.ops.cross_entropy(y.flatten(0, 1), labels.flatten()),
            extra={"labels": mf.TensorSpec((2, 4), torch.int64)}, optimizer=mf.optim.sgd,
        )  # fmt: skip
        return step.compile()

    module = LlamaForCausalLM(config).eval()
    module.gradient_checkpointing_enable()
    report = mf.from_torch(module, (ids,), mesh=DeviceMesh([0])).report()
    assert "gradient checkpointing is on, and does nothing in eval() mode" in report
    assert again(program(True))["linear"] == 3 * 6
    assert again(program(False))["linear"] == 0


# -- patterns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [ALONE, FSDP, TP], ids=["alone", "fsdp", "tp"])
def test_patterns_are_checkpoints(how: dict[str, Any]) -> None:
    module, x = Layers().double(), drawn(6, 8)
    program, _ = trained(module, x, how, recompute="layers.*")
    as_asked, _ = trained(Layers(use_reentrant=False).double(), x, how)
    assert again(program) == again(as_asked)


def test_patterns_go_word_by_word() -> None:
    """The inside of a block is part of it; the longest literal part counts."""
    module, x = Layers().double(), drawn(6, 8)
    model = mf.from_torch(module, (x,), **ALONE, recompute=["layers.0", "layers.*.up"])
    assert "  recompute:layers.0     again       1: layers.0" in model.report().splitlines()
    program, _ = trained(module, x, recompute=["layers.0", "layers.*.up"])
    counts = again(program)
    assert (counts["layer_norm"], counts["linear"], counts["tanh"]) == (1, 1, 1)  # results are kept


def test_a_submodule_that_is_called_twice_is_two_blocks() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    program, _ = trained(Twice().double(), drawn(4, 8), FSDP, recompute="layer")
    assert (again(program)["layer_norm"], again(program)["linear"]) == (2, 2)
    model = mf.from_torch(Twice().double(), (drawn(4, 8),), **FSDP, recompute="layer")
    assert "  computed again: 2: layer, layer (call 1)" in model.report().splitlines()


def test_products_are_kept_and_all_else_is_computed_again() -> None:
    module, x = Layers().double(), drawn(6, 8)
    program, _ = trained(module, x, recompute=lambda op: op != "linear")
    counts = again(program)
    assert (counts["layer_norm"], counts["linear"], counts["tanh"]) == (3, 0, 3)


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ("layer.*", LayoutError, "matches no submodule"),
        ("layers", LayoutError, "computes nothing"),
        (["layers.*", "nothing"], LayoutError, "matches no submodule"),
        (lambda op: False, DefinitionError, "True of no operation"),
        (True, DefinitionError, "patterns of submodules"),
        (1.5, DefinitionError, "patterns of submodules"),
    ],
)
def test_what_cannot_be_computed_again(asked: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        mf.from_torch(Layers(), (torch.zeros(2, 8),), **ALONE, recompute=asked)


# -- nasty cases -----------------------------------------------------------------------------------


def test_dropout_draws_the_same_mask_again() -> None:
    """The gradient is zero exactly where the forward dropped."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(64, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=False)

        def inside(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.w * x, 0.5, True).exp().sin()

    x = drawn(64)
    model = mf.from_torch(Dropped().train(), (x,), mesh=DeviceMesh.arange(dp=2),
                          layouts={"input:0": {"dp": Shard(0)}})  # fmt: skip
    step = model.training_step(
        lambda y: (y.sum(), y), optimizer=partial(mf.optim.sgd, lr=1.0)
    )  # fmt: skip
    program, weights = step.compile(), model.load()
    assert again(program)["exp"] == 1 and again(program)["dropout"] == 1
    ran = mf.simulate(program, step.arguments(weights, step.state(weights), x, 3))
    (new,) = step.updated(ran.outputs).values()
    y = ran.outputs[1]
    left, exp = y != torch.ones_like(y).sin(), (2 * x).exp()
    assert 16 < left.sum() < 48
    torch.testing.assert_close(1 - new, torch.where(left, 2 * x * exp * exp.cos(), 0))


def test_statistics_that_a_block_writes_are_written_once() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.norm(x).tanh())

    module, x = nn.Sequential(Normed(), Normed()).double(), drawn(6, 8)
    model = mf.from_torch(module, (x,), **ALONE, recompute="*")
    step = model.training_step(squares, optimizer=partial(mf.optim.sgd, lr=RATE))
    weights = model.load()
    ran = mf.simulate(step.compile(), step.arguments(weights, step.state(weights), x))
    squares(module(x)).backward()
    updated = step.updated(ran.outputs)
    for name, w in module.named_parameters():
        torch.testing.assert_close(updated[name], w.detach() - RATE * w.grad)
    buffers, reused = dict(module.named_buffers()), step.definition.fusion.reuse
    written = zip(step.definition.fusion.outputs, ran.outputs, strict=True)
    new = {reused[name]: y for name, y in written if reused.get(name) in buffers}
    assert len(new) == 6
    for name, y in new.items():
        torch.testing.assert_close(y, buffers[name])


class Tied(nn.Module):
    """Words, layers, and the words again: the table is read in one block, or in two."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(12, 8), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("asked", ["layers.*", ["layers.*", "words", "head"], ["layers.0", "head"]])
def test_a_tied_table_in_blocks_or_not(asked: Any) -> None:
    ids = torch.randint(12, (4, 6))
    trained(Tied().double(), ids, FSDP, recompute=asked)
    trained(Tied().double(), ids, recompute=asked)


def test_frozen_layers_and_several_dtypes() -> None:
    module = Layers().double()
    module.layers[0].requires_grad_(False)
    module.layers[1].up.bias.requires_grad_(False)
    program, _ = trained(module, drawn(6, 8), FSDP, recompute="layers.*")
    assert again(program)["layer_norm"] == 2  # of a frozen layer nothing is computed again

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 8).double(), nn.Parameter(torch.tensor(1.5))

        def inside(self, x: Tensor) -> Tensor:
            return (self.layer(x).float().tanh() * self.scale).double().sin()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=False) + x

    program, _ = trained(Mixed(), drawn(6, 8), ALONE)
    assert again(program)["tanh"] == 1


def test_adapters_beside_frozen_matrices() -> None:
    """Losses of two steps are those without recompute; matrices are gathered, never reduced."""
    x = drawn(6, 8)

    def losses(**asked: Any) -> tuple[list[float], mf.Program]:
        torch.manual_seed(0)
        module = Layers().double()
        model = mf.from_torch(module, (x,), **FSDP, adapters={"*.up": 2}, **asked)
        step = model.training_step(squares, optimizer=partial(mf.optim.sgd, lr=RATE))
        weights, program = model.load(), step.compile()
        ran = mf.simulate(program, step.arguments(weights, step.state(weights), x))
        new = step.updated(ran.outputs)
        return [float(ran.outputs[0]), *(float(w.sum()) for w in new.values())], program

    plain, _ = losses()
    less, program = losses(recompute="layers.*")
    assert less == pytest.approx(plain, rel=1e-12)
    assert sum(c.kind == "ReduceScatter" for c in program.communications) == 3


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [ALONE, FSDP, TP], ids=["alone", "fsdp", "tp"])
def test_a_rank_keeps_no_more_than_it_may(how: dict[str, Any]) -> None:
    """What the loss keeps comes besides: the result, and a number."""
    module, x = Layers().double(), drawn(6, 8)
    before = 0
    for nbytes in (0, 500, 1000, 2500, 1 << 30):
        program, _ = trained(module, x, how, recompute=nbytes)
        held = sum(backward_memory(program.fusion, 0).held.values())
        assert before <= held <= nbytes + 6 * 4 * 8 + 8
        before = held
    assert not again(program)["linear"] and again(program)["layer_norm"] == 0


def test_what_is_cheap_per_byte_goes_first() -> None:
    module, x = Layers().double(), drawn(6, 8)
    report = mf.from_torch(module, (x,), **ALONE, recompute=4000).report()
    assert "3.75 KiB of 4.5 KiB on a rank are kept; again: 2 × layer_norm" in report


def test_bytes_that_cannot_be_counted() -> None:
    with pytest.raises(DefinitionError, match="recompute=-1"):
        mf.from_torch(Layers(), (torch.zeros(2, 8),), **ALONE, recompute=-1)
    with pytest.raises(DefinitionError, match="writes running_mean"):
        mf.from_torch(nn.BatchNorm1d(8), (torch.zeros(2, 8),), **ALONE, recompute=8)
    with pytest.raises(DefinitionError, match="leaves an extent of x"):
        mf.from_torch(Layers(), (torch.zeros(2, 8),), **ALONE, recompute=8,
                      dynamic_shapes={"x": {0: "batch"}})  # fmt: skip
