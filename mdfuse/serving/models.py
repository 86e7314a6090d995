"""Causal models of transformers: modules, or folders with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mdfuse.errors import message_of
from mdfuse.frontend.given import refused
from mdfuse.frontend.importing.load import Checkpoint, InFiles, opened


class GivenModel(NamedTuple):
    """A model to serve.

    Attributes:
        module: nobody has written its parameters where there is a source.
        source: where each rank reads its parts of the parameters; None: the module has them.
        because: why a folder was read whole by each process; "" where it was not.
    """

    module: Any
    source: Any = None
    because: str = ""


def model_of(module: Any) -> GivenModel:
    """Return the model that a caller of `generate` passes.

    Nothing but buffers is read yet of a folder of safetensors under the module's own names. Other
    folders are for `from_pretrained`, which converts names and shapes, and reads all.

    Raises:
        DefinitionError: it is neither a module nor such a folder.
    """
    if isinstance(module, nn.Module):  # what torch has compiled has no forward on fake tensors
        return GivenModel(getattr(module, "_orig_mod", module))
    from transformers import AutoConfig, AutoModelForCausalLM

    hint = "a causal model, or a folder with config.json, as save_pretrained writes it"
    if not isinstance(module, str | Path):
        because = "it is no module of torch, and no folder"
        raise refused("generate", "module", module, because=because, hint=hint)
    folder = str(module)
    try:
        config, why = AutoConfig.from_pretrained(folder), ""
    except (OSError, ValueError) as error:
        because = f"transformers says: {message_of(error)}"
        raise refused("generate", "module", folder, because=because, hint=hint) from error
    files = [*Path(folder).glob("*.safetensors")]
    if not files:
        why = "it has no files of safetensors"
    elif getattr(config, "quantization_config", None) is not None:
        why = "its numbers are quantised"
    else:
        checkpoint = opened(folder)
        assert isinstance(checkpoint, InFiles)
        model = _without_numbers(config, folder, checkpoint)
        why = _why_whole(model, checkpoint)
        if not why:
            return GivenModel(model, folder)
    return GivenModel(AutoModelForCausalLM.from_pretrained(folder), because=why)


def _without_numbers(config: Any, folder: str, checkpoint: InFiles) -> Any:
    """A model with buffers as `from_pretrained` has them, whose parameters nobody has written.

    The system gives memory to what is written, so parameters take none. On the meta device they
    could not meet buffers in a forward.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    dtype = getattr(config, "dtype", None) or _floating(checkpoint)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    state = model.state_dict(keep_vars=True)
    for name in {*state} & {*checkpoint.names}:
        if not isinstance(state[name], nn.Parameter):
            state[name].copy_(checkpoint.part(name, ()))
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _floating(checkpoint: InFiles) -> torch.dtype:
    """The dtype of the first floats of a checkpoint."""
    shapes = ((name, checkpoint.shape(name)) for name in checkpoint.names)
    firsts = (checkpoint.part(name, tuple((0, min(n, 1)) for n in s)) for name, s in shapes)
    return next((x.dtype for x in firsts if x.is_floating_point()), torch.float32)


def _why_whole(model: Any, checkpoint: Checkpoint) -> str:
    """Return why a checkpoint cannot be read in parts; "" if it can."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    there = {*checkpoint.names}
    for p, of in names.items():
        at = next((n for n in of if n in there), None)
        if at is None:
            return f"{of[0]} has another name there"
        if checkpoint.shape(at) != tuple(p.shape):
            return f"{of[0]} has another shape there"
    others = sorted(there - {n for of in names.values() for n in of} - {*model.state_dict()})
    if others:
        return f"the module has no {others[0]}"
    if getattr(model, "_keep_in_fp32_modules", None):
        return "some of its parameters stay f32"
    return ""
