"""A rank's boxes of checkpoints: files, indices, dtypes, tied names, blocks; what is missing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.tiny_models import MODELS, llama
from safetensors.torch import save_file
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, ProgramError, Shard
from mdfuse.compiled import imported
from mdfuse.compiled.imported import ImportedModel

TP = DeviceMesh.arange(tp=2)


class Two(nn.Module):
    """Two matrices, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


LAYOUTS = {"first.*": {"tp": Shard(0)}, "second.weight": {"tp": Shard(1)}}


def test_it_shows_on_rank_0_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter is one more; other ranks show nothing."""
    told: list[tuple[Any, ...]] = []

    @contextmanager
    def noted(what: str, total: int, shows: bool) -> Iterator[Callable[[], None]]:
        told.append((what, total, shows))
        yield lambda: told.append((what,))

    monkeypatch.setattr(imported, "progress", noted)
    for rank in (0, 1):
        two().load(rank=rank)
        assert told == [("loading", 3, rank == 0), *[("loading",)] * 3]
        told.clear()


def two(module: nn.Module | None = None) -> ImportedModel:
    return mf.from_torch(module or Two(), (torch.zeros(3, 4),), mesh=TP, layouts=LAYOUTS)


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"first.weight": (6, 4), "first.bias": (6,), "second.weight": (5, 6)}
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def save(tensors: dict[str, Tensor], path: Path) -> Path:
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    return path


def in_two_files(tensors: dict[str, Tensor], folder: Path) -> Path:
    names = sorted(tensors)
    files = {"a.safetensors": names[:1], "b.safetensors": names[1:]}
    for file, inside in files.items():
        save({name: tensors[name] for name in inside}, folder / file)
    index = folder / "model.safetensors.index.json"
    found = {name: file for file, inside in files.items() for name in inside}
    index.write_text(json.dumps({"metadata": {}, "weight_map": found}))
    return index


@pytest.mark.parametrize("kind", ["file", "folder", "index", "folder of files", "tensors"])
def test_boxes_of_a_rank(kind: str, tmp_path: Path) -> None:
    known = weights()
    source: Any = known
    if kind in ("file", "folder"):
        source = save(known, tmp_path / "model.safetensors")
        source = tmp_path if kind == "folder" else source
    elif kind != "tensors":
        index = in_two_files(known, tmp_path)
        source = index if kind == "index" else tmp_path
    for rank in range(2):
        found = two().load(source, rank=rank)
        half = slice(3 * rank, 3 * rank + 3)
        wanted = [
            known["first.weight"][half], known["first.bias"][half], known["second.weight"][:, half]
        ]  # fmt: skip
        for x, y in zip(found, wanted, strict=True):
            assert x is not None and torch.equal(x, y) and x.is_contiguous()


def test_a_folder_of_torch_s_own(tmp_path: Path) -> None:
    """As `torch.distributed.checkpoint` writes it; in it are other things as well."""
    known = {f"model.{name}": x for name, x in weights(torch.float64).items()}
    state = {**known, "step": 3, "other": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    model = two()
    for rank in range(2):
        found = model.load(tmp_path, rank=rank, rename=lambda name: f"model.{name}")
        part = known["model.second.weight"][:, 3 * rank : 3 * rank + 3].float()
        assert found[2] is not None and torch.equal(found[2], part)
        assert found[2].is_contiguous()
    assert "not read: 1: other" in model.report()
    (tmp_path / ".metadata").write_bytes(b"cut off")
    with pytest.raises(ProgramError, match="cannot be read"):
        model.load(tmp_path)


def test_what_is_read_runs(tmp_path: Path) -> None:
    known, x = weights(), torch.randn(3, 4)
    source = save(known, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = Two()
    model = two(module)
    (y,) = mf.simulate(model.compile(), [*model.load(source), x]).outputs
    wanted = (x @ known["first.weight"].T + known["first.bias"]).relu() @ known["second.weight"].T
    torch.testing.assert_close(y, wanted)


def test_halves_are_cast(tmp_path: Path) -> None:
    known = weights(torch.float16)
    found = two().load(save(known, tmp_path / "half.safetensors"), rank=1)
    assert [x.dtype for x in found if x is not None] == [torch.float32] * 3
    assert found[1] is not None and torch.equal(found[1], known["first.bias"][3:].float())


def test_the_module_itself_without_a_source() -> None:
    module = Two()
    found = two(module).load(rank=0)
    assert found[0] is not None and torch.equal(found[0], module.first.weight[:3])
    assert not found[0].requires_grad
    found[0].zero_()
    assert module.first.weight.abs().min() > 0  # a copy


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_in_memory_are_copied(rank: int | None, dtype: torch.dtype) -> None:
    """Also where a part is the whole, and where nothing is cast or moved."""
    source = weights(dtype)
    before = {name: x.clone() for name, x in source.items()}
    for x in two().load(source, rank=rank):
        assert x is not None and x.is_contiguous() and x.dtype is torch.float32
        x.zero_()
    assert all(torch.equal(x, before[name]) for name, x in source.items())


def test_a_rank_outside_of_the_mesh() -> None:
    assert two().load(rank=7) == [None, None, None]


def test_blocks(tmp_path: Path) -> None:
    """Each of three blocks is split by itself."""
    tiny = MODELS["gpt2"]
    module = tiny.module()
    model = mf.from_torch(
        module, tiny.args, mesh=TP, layouts=tiny.layouts(), blocks={"*.c_attn.*": 3}
    )
    # one name of the tied pair stands in the file
    known = {name: x.detach() for name, x in module.named_parameters()}
    source = save(known, tmp_path / "model.safetensors")
    parts = dict(zip(model.fusion.inputs, model.load(source, rank=1), strict=False))
    weight = known["transformer.h.1.attn.c_attn.weight"]
    for i in range(3):
        part = parts[f"transformer.h.1.attn.c_attn.weight.{i}"]
        assert part is not None
        assert torch.equal(part, weight[:, 32 * i + 16 : 32 * i + 32])


def test_the_other_name_of_a_tied_parameter(tmp_path: Path) -> None:
    tiny = MODELS["gpt2"]
    module = tiny.module()
    model = mf.from_torch(module, tiny.args, mesh=TP)
    known = {name: x.detach() for name, x in module.named_parameters()}
    known["lm_head.weight"] = known.pop("transformer.wte.weight")
    found = model.load(save(known, tmp_path / "model.safetensors"))
    assert found[0] is not None and torch.equal(found[0], known["lm_head.weight"])


def test_names_that_differ(tmp_path: Path) -> None:
    known = {f"model.{name}": x for name, x in weights().items()}
    source = save(known, tmp_path / "model.safetensors")
    found = two().load(source, rename=lambda name: f"model.{name}")
    assert found[1] is not None and torch.equal(found[1], known["model.first.bias"])
    with pytest.raises(ProgramError) as error:
        two().load(source)
    assert "lacks 3 of 3 tensors: first.weight, first.bias, second.weight" in str(error.value)
    assert "near first.weight it has model.first.weight" in str(error.value)


def test_what_is_not_read_is_reported() -> None:
    model = two()
    assert "not read" not in model.report()
    model.load({**weights(), "optimizer.step": torch.zeros(())})
    assert "not read: 1: optimizer.step" in model.report()


def test_constants_are_not_read() -> None:
    """Cosines and sines are the model's own."""
    tiny = MODELS["llama"]
    module = tiny.module()
    model = mf.from_torch(module, tiny.args, mesh=TP)
    found = model.load(dict(module.named_parameters()), rank=0)
    assert len(found) == 23 and "not read" not in model.report()
    rope = module.model.rotary_emb
    cos, sin = rope(torch.zeros(1, dtype=torch.float64), torch.arange(8)[None])
    assert torch.equal(found[-2], cos[:, None]) and torch.equal(found[-1], sin[:, None])


# -- what is wrong ---------------------------------------------------------------------------------


def broken(path: Path, **changes: Tensor) -> Path:
    return save(weights() | changes, path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("first.weight", torch.zeros(6, 5), r"shape \[6, 5\] in the checkpoint, \[6, 4\]"),
        ("first.bias", torch.zeros(6, dtype=torch.int32), "floats are cast to floats alone"),
    ],
)
def test_tensors_that_do_not_fit(name: str, tensor: Tensor, said: str, tmp_path: Path) -> None:
    source = broken(tmp_path, **{name: tensor})
    with pytest.raises(ProgramError, match=said):
        two().load(source, rank=0)


def test_a_file_of_the_index_is_missing(tmp_path: Path) -> None:
    index = in_two_files(weights(), tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ProgramError, match=r"names b\.safetensors, which is not there"):
        two().load(index, rank=0)


@pytest.mark.parametrize("text", [
    "", "{}", "3", '{"weight_map": 3}', '{"weight_map": [["a", "b"]]}', "not json",
    '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ""}}', "[" * 100_000,
    '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
])  # fmt: skip
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ProgramError, match="an index says which file has a tensor"):
        two().load(index)


@pytest.mark.parametrize("path", ["../secret.safetensors", "a/../../b.safetensors", "{}/x"])
def test_an_index_that_leads_out_of_its_folder(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save(weights(), tmp_path / "secret.safetensors")
    index = in_two_files(weights(), folder)
    files = dict.fromkeys(weights(), path.format(tmp_path))
    index.write_text(json.dumps({"weight_map": files}))
    for source in (folder, index):
        with pytest.raises(ProgramError, match="which is not in its folder"):
            two().load(source)


def test_links_are_followed(tmp_path: Path) -> None:
    """As in the cache of the Hub, where each file of a model is one."""
    for name in ("blobs", "model"):
        (tmp_path / name).mkdir()
    in_two_files(weights(), tmp_path / "blobs")
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    found = two().load(tmp_path / "model")
    assert found[0] is not None and torch.equal(found[0], weights()["first.weight"])


def test_two_files_with_the_same_tensor(tmp_path: Path) -> None:
    save(weights(), tmp_path / "a.safetensors")
    save({"first.bias": torch.zeros(6)}, tmp_path / "b.safetensors")
    with pytest.raises(ProgramError, match=r"b\.safetensors has first\.bias, and so has a\.s"):
        two().load(tmp_path)
    two().load(tmp_path / "a.safetensors")


@pytest.mark.parametrize("kind", ["cut off", "header", "long header", "beyond", "folder", "pipe"])
def test_files_that_are_damaged(kind: str, tmp_path: Path) -> None:
    path = save(weights(), tmp_path / "model.safetensors")
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["first.bias"]["data_offsets"] = [0, 1 << 40]
    text = json.dumps(header).encode()
    changed = {
        "cut off": whole[:-1],
        "header": whole[:8] + b"x" * length + whole[8 + length :],
        "long header": (1 << 62).to_bytes(8, "little") + whole[8:],
        "beyond": len(text).to_bytes(8, "little") + text + whole[8 + length :],
    }
    path.unlink()
    if kind in changed:
        path.write_bytes(changed[kind])
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)  # nobody waits for who might write into it
    with pytest.raises(ProgramError, match=re.escape(f"{path} cannot be read")):
        two().load(tmp_path)


def test_files_of_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(weights(), path)
    with pytest.raises(ProgramError, match=r"cannot be read(?s:.)*load\(torch\.load\(path, weight"):
        two().load(path)
    found = two().load(torch.load(path, weights_only=True, mmap=True), rank=1)
    assert found[1] is not None and torch.equal(found[1], weights()["first.bias"][3:])


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"cut off")
    with pytest.raises(ProgramError, match=re.escape(f"{path} cannot be read")):
        two().load(path)
    with pytest.raises(ProgramError, match="cannot be read"):
        two().load(tmp_path / "gone.safetensors")
    path.unlink()
    with pytest.raises(ProgramError, match="has no file of safetensors"):
        two().load(tmp_path)


def test_a_module_without_numbers() -> None:
    with torch.device("meta"):
        module = llama()
    model = mf.from_torch(module, MODELS["llama"].args, mesh=TP)
    with pytest.raises(ProgramError, match="21 of 21 parameters have no numbers"):
        model.load(rank=0)
