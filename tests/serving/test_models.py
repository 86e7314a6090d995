"""Folders with a checkpoint: each rank reads its parts, or what is read whole is said."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.causal import SIZES, drain, greedy, model_of, prompts, with_drawn
from torch import Tensor

import mdfuse as mf
from mdfuse.frontend.importing.load import InFiles
from mdfuse.layouts.boxes import Box, box_size
from mdfuse.serving import models


def written(folder: Path, model: Any, **sizes: Any) -> Path:
    model.save_pretrained(folder, **sizes)
    return folder


@pytest.mark.parametrize("ties", [False, True])
def test_a_folder_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ties: bool
) -> None:
    """In 16 bits, with files of several shards; the model's ends of a text are there, too."""
    model = model_of("llama", num_hidden_layers=1, tie_word_embeddings=ties).bfloat16()
    model.generation_config.eos_token_id = [5, 7]
    written(tmp_path, model, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    served = models.model_of(tmp_path)
    assert served.source == str(tmp_path) and not served.because
    for (name, x), y in zip(served.module.named_parameters(), model.parameters(), strict=True):
        assert (x.shape, x.dtype) == (y.shape, torch.bfloat16), name
    for x, y in zip(served.module.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)

    elements = Counter[str]()
    part = InFiles.part

    def counted(self: InFiles, name: str, box: Box) -> Tensor:
        elements[name] += box_size(box)
        return part(self, name, box)

    monkeypatch.setattr(InFiles, "part", counted)
    mesh, step = mf.DeviceMesh.arange(tp=2), {"max_batch": 1, "chunk": 0, "context": 16}
    engine = mf.generate(tmp_path, mesh, **step)
    assert engine.eos == (5, 7)
    assert f"bytes, read from {tmp_path}" in engine.report()
    elements.clear()
    engine.programs.models[False].load(str(tmp_path), rank=1)
    whole = dict(model.named_parameters())
    assert elements["model.layers.0.self_attn.q_proj.weight"] * 2 == 32 * 32
    assert elements["model.layers.0.mlp.down_proj.weight"] * 2 == 32 * 48
    assert sum(elements.values()) < 0.6 * sum(x.numel() for x in whole.values())
    (ids,) = prompts([6])
    asked = engine.submit(ids, 4, stop=[])
    drain(engine)
    model.generation_config.eos_token_id = None
    assert engine.result(asked).tokens == greedy(model, ids, 4)


def renamed(folder: Path) -> None:
    """As checkpoints of a model without its head are: "model." stands before no name."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): x for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def as_pickle(folder: Path) -> None:
    from safetensors.torch import load_file

    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()


def with_another(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({**load_file(file), "scale": torch.ones(1)}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (renamed, "has another name there"),
        (as_pickle, "it has no files of safetensors"),
        (with_another, "the module has no scale"),
    ],
)
def test_what_is_read_whole_is_said(tmp_path: Path, change: Any, why: str) -> None:
    model = model_of("llama", num_hidden_layers=1)
    change(written(tmp_path, model))
    served = models.model_of(tmp_path)
    assert served.source is None and why in served.because
    for x, y in zip(served.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_experts_in_matrices_of_their_own_are_converted(tmp_path: Path) -> None:
    """Checkpoints have a matrix for each expert, modules all of them in one."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=3, eos_token_id=None)
    model = with_drawn(transformers.MixtralForCausalLM(config))
    served = models.model_of(written(tmp_path, model))
    assert "another name there" in served.because and served.source is None
    for x, y in zip(served.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """Before the network is asked for it."""
    (tmp_path / "config.json").write_text("{}")
    for wrong, why in ((None, "no module of torch"), (tmp_path, "(?s)transformers says.*a folder")):
        with pytest.raises(mf.DefinitionError, match=why):
            mf.generate(wrong)  # type: ignore[arg-type]
    for mesh in (3, "tp=2"):
        with pytest.raises(mf.MdfuseError, match="mesh"):
            mf.generate(model_of("llama"), mesh)


def test_what_torch_has_compiled_is_served_as_it_was() -> None:
    model = model_of("llama", num_hidden_layers=1)
    assert models.model_of(torch.compile(model)).module is model  # type: ignore[arg-type]


def test_a_folder_without_a_dtype(tmp_path: Path) -> None:
    """Its configuration does not say it; the numbers do."""
    written(tmp_path, model_of("llama", num_hidden_layers=1).bfloat16())
    said = json.loads((tmp_path / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        said.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(said))
    served = models.model_of(tmp_path)
    assert served.source and {x.dtype for x in served.module.parameters()} == {torch.bfloat16}
