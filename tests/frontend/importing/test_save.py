"""Parameters saved by each rank as its boxes, and read in other layouts, by torch's own loader."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.oracle import local_part
from helpers.tiny_models import MODELS
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, ProgramError, Shard
from mdfuse.frontend.importing import load as loading
from mdfuse.frontend.importing import save as saving

TP, FSDP = DeviceMesh.arange(tp=2), DeviceMesh.arange(dp=2, fsdp=3)


@cache
def gpt2(layout: str, device: str = "cpu") -> Any:
    """The model of transformers in a layout; on meta it has no numbers."""
    with torch.device(device):
        module = MODELS["gpt2"].module()
    tiny = MODELS["gpt2"]
    if layout == "tp":
        said: dict[str, Any] = {"layouts": tiny.layouts(), "blocks": tiny.blocks, "mesh": TP}
    elif layout == "fsdp":
        said = {"layouts": {"*": {"fsdp": Shard(0)}}, "gather": "fsdp", "mesh": FSDP}
    else:
        said = {"mesh": DeviceMesh([0])}
    return mf.from_torch(module, tiny.args, tiny.kwargs, **said)


def save(model: Any, folder: Path, ranks: int) -> None:
    """What ranks do, one after the other."""
    for rank in range(ranks):
        saving.write(folder, model.model, model.load(rank=rank), rank)
    saving.finish(folder, model.model, ranks)


def same(found: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    return len(found) == len(wanted) and all(
        x is None if y is None else x is not None and torch.equal(x, y)
        for x, y in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(("first", "ranks"), [("tp", 2), ("fsdp", 6), ("one", 1)])
def test_any_layout_is_read_in_any_other(first: str, ranks: int, tmp_path: Path) -> None:
    save(gpt2(first), tmp_path, ranks)
    for layout, size in (("tp", 2), ("fsdp", 6), ("one", 1)):
        for rank in (0, size - 1):
            found = gpt2(layout, "meta").load(tmp_path, rank=rank)
            assert same(found, gpt2(layout).load(rank=rank)), layout


def test_torch_reads_it_into_a_module(tmp_path: Path) -> None:
    """Under all names of what is tied; each number is written once."""
    module = MODELS["gpt2"].module()
    save(gpt2("fsdp"), tmp_path, 6)
    found = {n: torch.empty_like(x) for n, x in module.state_dict().items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    for name, x in module.state_dict().items():
        assert torch.equal(found[name], x), name
    size = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    numbers = sum(w.numel() * w.element_size() for w in module.parameters())
    parts = 3 * len([*module.parameters()])
    assert numbers < size < numbers + 3000 * parts  # each part is a file of torch's in the file
    assert not [*tmp_path.glob("*.written")]


def test_wholes_are_saved_without_ranks(tmp_path: Path) -> None:
    module, x = nn.Linear(5, 3), torch.zeros(2, 5)
    model = mf.from_torch(module, (x,), mesh=TP, layouts={"weight": {"tp": Shard(0)}})
    wanted = model.load()
    assert model.save(tmp_path / "a", wanted) == tmp_path / "a"
    module.weight.data.zero_()
    assert same(model.load(tmp_path / "a"), wanted)
    assert same(model.load(tmp_path / "a", rank=1), [wanted[0][2:], wanted[1]])


def test_what_was_trained_is_saved(tmp_path: Path) -> None:
    module, x = nn.Linear(5, 4), torch.randn(2, 5)
    one = DeviceMesh([0])
    model = mf.from_torch(module, (x,), mesh=one, adapters={"*": 2})
    step = model.training_step(lambda y: (y * y).sum(), optimizer=mf.optim.sgd)
    weights = model.load()
    given = step.arguments(weights, step.state(weights), x, torch.tensor(0.1))
    state = step.updated(mf.simulate(step.compile(), given).outputs)
    new = [state.get(n, w) for n, w in zip(model.fusion.inputs, weights, strict=False)]
    model.save(tmp_path / "a", new)
    assert same(model.load(tmp_path / "a"), new)
    assert not torch.equal(new[3], weights[3])  # lora_B


def _parts(fusion: Any, state: dict[str, Tensor], rank: int) -> dict[str, Tensor | None]:
    return {
        n: local_part(x, fusion.layout(n), rank) if rank in fusion.layout(n).mesh else None
        for n, x in state.items()
    }


def _mlp(mesh: DeviceMesh, layouts: Any, gather: Any = ()) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7)).bfloat16()
    model = mf.from_torch(module, (torch.zeros(2, 6, dtype=torch.bfloat16),), mesh=mesh,
                          layouts=layouts, gather=gather)  # fmt: skip
    adamw = partial(mf.optim.adamw, lr=0.1)
    return model, model.training_step(lambda y: y.square().sum(), optimizer=adamw, master=True)


def test_a_state_goes_on_in_any_other_layout(tmp_path: Path) -> None:
    """Parameters, their copies in f32, moments and the count: every bit of them."""
    layouts = {
        "tp": (TP, {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}),
        "blocks": (TP, {"0.*": {"tp": Shard(0, blocks=(4, 6))}}),
        "fsdp": (FSDP, {"*": {"fsdp": Shard(0)}}, "fsdp"),
        "one": (DeviceMesh([0]), {}),
        "zigzag": (DeviceMesh.arange(cp=3), {"*": {"cp": Shard(0, zigzag=True)}}, "cp"),
        "other zigzag": (DeviceMesh.arange(cp=2), {"0.*": {"cp": Shard(0, zigzag=True)}}),
    }
    made = {name: _mlp(*said) for name, said in layouts.items()}
    programs = {name: step.compile() for name, (_, step) in made.items()}
    x = torch.randn(2, 6).bfloat16()
    for first in ("blocks", "fsdp", "zigzag"):
        model, step = made[first]
        weights, fusion, folder = model.load(), programs[first].fusion, tmp_path / first
        given = step.arguments(weights, step.state(weights), x)
        state = step.updated(mf.simulate(programs[first], given).outputs)
        assert len(state) == 4 * 4 + 1 and state["count"] == 1
        ranks = layouts[first][0].size
        for rank in range(ranks):
            saving.write_parts(
                folder, saving.parts_of_state(fusion, _parts(fusion, state, rank), rank), rank
            )
        saving.finish_state(folder, fusion, state, ranks)
        for name, program in programs.items():
            for rank in range(layouts[name][0].size):
                wanted = _parts(program.fusion, state, rank)
                found = {n: torch.full_like(w, 7) for n, w in wanted.items() if w is not None}
                _read(folder, program.fusion, found, rank)
                assert all(torch.equal(found[n], w) for n, w in wanted.items() if w is not None)


def _read(folder: Path, fusion: Any, state: dict[str, Any], rank: int) -> None:
    loading.copy_state(loading.state_of(folder, fusion, [*state], False), fusion, state, rank)


def test_a_state_of_another_step(tmp_path: Path) -> None:
    model, step = _mlp(TP, {})
    fusion, state = step.compile().fusion, step.state(model.load())
    saving.write_parts(tmp_path, saving.parts_of_state(fusion, state, 0), 0)
    saving.finish_state(tmp_path, fusion, state, 1)
    few = dict([*state.items()][:5])
    with pytest.raises(ProgramError, match=r"of another state: it has(?s:.)*keeps nothing of 12"):
        _read(tmp_path, fusion, few, 0)
    with pytest.raises(ProgramError, match="the checkpoint lacks 1 of 18 tensors: more"):
        _read(tmp_path, fusion, {**state, "more": None}, 0)


def test_a_state_without_a_whole(tmp_path: Path) -> None:
    with mf.FusionDefinition("sum") as fd:
        x = fd.define_tensor([4], mesh=TP, layout={"tp": mf.Partial()}, name="x")
        fd.add_output(x + x, reuse=x)
    fusion = mf.compile(fd).fusion
    with pytest.raises(ProgramError, match=r"a checkpoint of %x(?s:.)*parts of wholes"):
        saving.of_state(fusion, ["x"])


# -- what is wrong -------------------------------------------------------------------------------


def linear() -> Any:
    layouts = {"weight": {"tp": Shard(0)}}
    return mf.from_torch(nn.Linear(4, 6), (torch.zeros(2, 4),), mesh=TP, layouts=layouts)


def test_a_folder_with_a_checkpoint(tmp_path: Path) -> None:
    model = linear()
    model.save(tmp_path, model.load())
    with pytest.raises(ProgramError, match=r"has a checkpoint(?s:.)*a folder of its own"):
        model.save(tmp_path, model.load())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProgramError, match="cannot be written"):
        linear().save(tmp_path / "file", linear().load())


def test_other_weights(tmp_path: Path) -> None:
    model = linear()
    with pytest.raises(ProgramError, match=r"with 1 weight(?s:.)*2 parameters and constants"):
        model.save(tmp_path / "a", model.load()[:1])
    with pytest.raises(ProgramError, match=r"weight of shape \[3, 4\](?s:.)*is \[6, 4\]"):
        model.save(tmp_path / "b", model.load(rank=0))


def test_a_rank_that_wrote_elsewhere(tmp_path: Path) -> None:
    model = linear()
    saving.write(tmp_path, model.model, model.load(rank=0), 0)
    with pytest.raises(ProgramError, match=r"rank0001\.written is not there(?s:.)*all ranks share"):
        saving.finish(tmp_path, model.model, 2)
    with pytest.raises(ProgramError):
        model.load(tmp_path)
