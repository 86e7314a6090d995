"""Experts of transformers: rows go to the ranks of their experts and back, by a layout alone."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from helpers.expert_models import MODELS, SIZES, ids, inside_experts, module_of
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.instructions import counts_of

DEVICE = mf.Options(counts="device")
EP, SPLIT = DeviceMesh.arange(ep=2), {"ep": Shard(0)}
IDS = ids()


def imported(
    name: str, mesh: DeviceMesh, tokens: dict[str, Any], **how: Any
) -> tuple[nn.Module, Any]:
    module = module_of(name)
    layouts = {"*.experts.*": SPLIT, "input:*": tokens}
    kwargs = {"input_ids": IDS, "use_cache": False}
    return module, mf.from_torch(module, (), kwargs, mesh=mesh, layouts=layouts, **how)


def check_step(
    module: nn.Module, model: Any, options: mf.Options | None = None, **how: Any
) -> mf.Program:
    """Compare the gradients of a step with torch's; return its program."""

    def loss(y: Any) -> Any:
        return (y * y).mean()

    step = model.training_step(loss, optimizer=partial(mf.optim.sgd, lr=1.0), **how)
    program, weights = step.compile(options), model.load()
    given = step.arguments(weights, step.state(weights), IDS)
    state = step.updated(mf.simulate(program, given).outputs)
    logits: Tensor = module(input_ids=IDS, use_cache=False).logits
    loss(logits).backward()
    for name, w in module.named_parameters():
        if w.grad is not None:
            torch.testing.assert_close(state[name], (w - w.grad).detach(), rtol=1e-3, atol=1e-5)
    return program


def way_of(program: mf.Program) -> tuple[int, int]:
    """Return how often rows go to other ranks, and counts to the host."""
    every = [*program.host.walk()]
    return sum(counts_of(i) is not None for i in every), sum(i.op == "fetch" for i in every)


@pytest.mark.parametrize("name", MODELS)
def test_rows_go_to_their_experts(name: str) -> None:
    module, model = imported(name, EP, SPLIT)
    program = check_step(module, model)
    assert way_of(program) == (4, 1)
    assert "as they are counted in a run" in program.explain()


@pytest.mark.parametrize("name", MODELS)
def test_counts_on_the_device(name: str) -> None:
    """A whole step is captured: no host waits for counts."""
    program = check_step(*imported(name, EP, SPLIT), DEVICE)
    assert way_of(program) == (0, 0)
    assert "the whole program is captured" in program.explain()


@pytest.mark.parametrize("tokens", [SPLIT, {}], ids=["split", "whole"])
def test_ranks_that_split_experts_refuse_same_bits(tokens: dict[str, Any]) -> None:
    """Parts are as many as ranks, so that sums over them would have other bits on others."""
    same = mf.Options(same_bits=True)
    for name in ("Mixtral", "Llama 4") if tokens else ("Mixtral",):
        _, model = imported(name, EP, tokens)
        with pytest.raises(mf.LoweringError, match="parts, as ranks have them"):
            model.compile(same)
    module, model = imported("Mixtral", DeviceMesh.arange(ep=1), tokens)
    check_step(module, model, same)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_beside_a_loop_over_experts(name: str) -> None:
    """Logits and a step of AdamW beside the same module in f64 that loops over its experts."""
    module, model = imported(name, EP, SPLIT)
    exact = copy.deepcopy(module).double()
    exact.set_experts_implementation("eager")
    how: dict[str, Any] = {"lr": 0.1, "eps": 0.01, "weight_decay": 0.1}
    step = model.training_step(
        lambda y: ((y * y).mean(), y), optimizer=partial(mf.optim.adamw, **how)
    )
    program, weights = step.compile(), model.load()
    given = step.arguments(weights, step.state(weights), IDS)
    results = mf.simulate(program, given).outputs
    logits = exact(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(results[1].double(), logits.detach(), rtol=1e-4, atol=1e-5)
    (logits * logits).mean().backward()
    torch.optim.AdamW(exact.parameters(), **how).step()
    new = step.updated(results)
    for key, w in exact.named_parameters():
        torch.testing.assert_close(new[key].double(), w.detach(), rtol=1e-3, atol=1e-4)
    assert way_of(program) == (4, 1)


def test_tokens_are_split_by_another_axis_too() -> None:
    mesh = DeviceMesh.arange(dp=2, ep=2)
    program = check_step(*imported("GPT-OSS", mesh, {"dp": Shard(0), "ep": Shard(0)}))
    assert "as they are counted in a run" in program.explain()


@pytest.mark.parametrize("name", ["Mixtral", "Llama 4"])
def test_rows_stay_where_ranks_have_all_tokens(name: str) -> None:
    program = check_step(*imported(name, EP, {}))
    assert not any(i.op == "fetch" for i in program.host.walk())


@pytest.mark.parametrize("counts", ["host", "device"])
@pytest.mark.parametrize(
    "axes", [{"ep": 2, "tp": 2}, {"tp": 3, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}]
)
@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_split_inside_experts(name: str, axes: dict[str, int], counts: Any) -> None:
    """Rows go as they are counted, and the sum over tp follows their way back."""
    mesh = DeviceMesh.arange(**axes)
    tokens = {a: Shard(0) for a in axes if a != "tp"}
    module, layouts = module_of(name), {**inside_experts(name), "input:*": tokens}
    kwargs = {"input_ids": IDS, "use_cache": False}
    model = mf.from_torch(module, (), kwargs, mesh=mesh, layouts=layouts)
    program = check_step(module, model, mf.Options(counts=counts))
    if name != "GPT-OSS":
        assert " are dense" not in program.explain()
        assert way_of(program) == ((4, 1) if counts == "host" else (0, 0))


@pytest.mark.parametrize(
    ("name", "rows", "positions", "go"),
    [("Llama 4", 5, 1, True), ("Llama 4", 5, 2, False), ("Mixtral", 5, 2, False)],
)
def test_rows_of_an_uneven_batch(name: str, rows: int, positions: int, go: bool) -> None:
    """Rows of one token go to their experts; of several tokens they stay, and reports say so."""
    module, kwargs = module_of(name), {"input_ids": ids(rows, positions), "use_cache": False}
    layouts = {"*.experts.*": SPLIT, "input:*": SPLIT}
    model = mf.from_torch(module, (), kwargs, mesh=EP, layouts=layouts)
    program = model.compile()
    assert way_of(program) == ((2, 1) if go else (0, 0))
    said = "rows stay, and ranks compute those of their experts among all tokens"
    assert (said in model.report()) == (said in program.explain()) == (not go)
    (logits,) = mf.simulate(program, [*model.load(), kwargs["input_ids"]]).outputs
    with torch.no_grad():
        wanted = module(**kwargs).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-5)


#: name -> mesh, how it splits the tokens, options of the step.
MICROBATCHES: dict[str, tuple[str, DeviceMesh, dict[str, Any], dict[str, Any]]] = {
    "ep": ("Mixtral", EP, SPLIT, {"microbatches": 2}),
    "chosen of all": ("Llama 4", EP, SPLIT, {"microbatches": 2}),
    "dp x ep": (
        "GPT-OSS", DeviceMesh.arange(dp=2, ep=2), {"dp": Shard(0), "ep": Shard(0)},
        {"microbatches": 1}),
    "ep x cp": (
        "Qwen3-MoE", DeviceMesh.arange(ep=2, cp=2), {"ep": Shard(0), "cp": Shard(1)},
        {"microbatches": 1}),
    "ep x cp in microbatches": (
        "Qwen3-MoE", DeviceMesh.arange(ep=2, cp=2), {"ep": Shard(0), "cp": Shard(1)},
        {"microbatches": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", MICROBATCHES)
def test_rows_of_microbatches_beside_other_axes(name: str) -> None:
    family, mesh, tokens, how = MICROBATCHES[name]
    program = check_step(*imported(family, mesh, tokens), **how)
    assert way_of(program) == (4, 1), program.explain()


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [(None, "host"), ("1f1b", "host"), ("zb1p", "host"), ("gpipe", "host"), ("1f1b", "device")],
)
def test_rows_in_stages(schedule: str | None, counts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages on two ranks each, which split the experts and the tokens of their layers."""
    monkeypatch.setitem(SIZES, "num_hidden_layers", 2)
    module = module_of("Mixtral")
    layouts = {"*.experts.*": SPLIT, "input:*": SPLIT}
    kwargs = {"input_ids": IDS, "use_cache": False}
    stages = [DeviceMesh(ranks, axes=["ep"]) for ranks in ([0, 1], [2, 3])]
    model = mf.from_torch(module, (), kwargs, stages=stages, layouts=layouts)
    how = {} if schedule is None else {"microbatches": 2, "schedule": schedule}
    program = check_step(module, model, mf.Options(counts=counts), **how)
    assert way_of(program) == ((8, 2) if counts == "host" else (0, 0))


class Shifted(nn.Module):
    """Experts whose rows are shifted between two products: exp makes something else of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.down = nn.Parameter(torch.randn(4, 8, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        ids, places = self.router(x).argmax(-1).sort()
        ends = torch.histc(ids.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        y = nn.functional.grouped_mm(x[places], self.up, offs=ends).exp()
        return nn.functional.grouped_mm(y, self.down, offs=ends)[places.argsort()]


def test_what_rows_do_not_take_is_named() -> None:
    """They come back before, the result is right, and report and explain say so with the line."""
    torch.manual_seed(0)
    module, x = Shifted().bfloat16(), torch.randn(12, 16).bfloat16()
    layouts = dict.fromkeys(("up", "down", "input:x"), SPLIT)
    model = mf.from_torch(module, (x,), mesh=EP, layouts=layouts)
    program = model.compile()
    (y,) = mf.simulate(program, [*model.load(), x]).outputs
    torch.testing.assert_close(y, module(x).detach(), rtol=2e-2, atol=2e-2)
    said = "rows come back from their experts for aten.exp.default: behind its rows"
    for text in (model.report(), program.explain()):
        assert said in text
        assert "test_dispatch.py" in text


def test_a_recorded_module_takes_microbatches() -> None:
    module, model = imported("Mixtral", EP, SPLIT)
    with mf.FusionDefinition("recorded") as fd:
        ids = fd.define_tensor([4, 6], torch.int64, mesh=EP, layout=SPLIT, name="ids")
        result, _ = model.record(input_ids=ids, use_cache=False)
        fd.add_output(result["logits"] if isinstance(result, dict) else result)
    with torch.no_grad():
        wanted = module(input_ids=IDS, use_cache=False).logits
    for program in (mf.compile(fd), mf.pipeline(fd, microbatches=2, batch={"ids": 0})):
        assert way_of(program) == (2, 1)
        (logits,) = mf.simulate(program, [IDS, *model.load()]).outputs
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["Mixtral", "Llama 4", "GPT-OSS"])
def test_a_capacity_is_that_of_each_layer(name: str) -> None:
    """Runs in the bound are right, others refused; report and explain say so."""
    module, model = imported(name, EP, SPLIT, capacity=12)
    said = "all ranks refuse runs with over 12 rows of a part for an expert"
    assert said in model.report()
    assert said in model.compile().explain()
    assert way_of(check_step(module, model)) == (4, 1)
    program = imported(name, EP, SPLIT, capacity=1)[1].compile()
    with pytest.raises(
        mf.CountsError, match=r"rows of part . for expert ., of which there may be 1"
    ):
        mf.simulate(program, [*model.load(), IDS])


def test_a_capacity_of_no_rows_is_reported() -> None:
    assert "capacity=3 bounds nothing" in imported("Mixtral", EP, {}, capacity=3)[1].report()
    with pytest.raises(mf.DefinitionError, match="a number of rows from 0 on"):
        imported("Mixtral", EP, SPLIT, capacity=-1)


def test_dense_rows_are_reported() -> None:
    """Every second column is a gate, so that ranks of tp bring columns together at the experts."""
    module, mesh = module_of("GPT-OSS"), DeviceMesh.arange(ep=2, tp=2)
    layouts = {
        "*.experts.*": SPLIT,
        "*.experts.gate_up_proj": SPLIT | {"tp": Shard(2)},
        "*.experts.gate_up_proj_bias": SPLIT | {"tp": Shard(1)},
        "*.experts.down_proj": SPLIT | {"tp": Shard(1)},
        "input:*": SPLIT,
    }
    kwargs = {"input_ids": IDS, "use_cache": False}
    model = mf.from_torch(module, (), kwargs, mesh=mesh, layouts=layouts)
    said = "counts are dense, with zeros behind them: %"
    assert said in model.report(), model.report()
    (logits,) = mf.simulate(model.compile(), [*model.load(), IDS]).outputs
    wanted = module(input_ids=IDS, use_cache=False).logits.detach()
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-5)
