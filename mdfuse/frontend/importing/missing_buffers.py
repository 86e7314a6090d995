"""Numbers for buffers of a module on the meta device that no checkpoint contains."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mdfuse.errors import DefinitionError
from mdfuse.frontend.given import why_no_numbers
from mdfuse.frontend.importing.capture import ExportedModule
from mdfuse.frontend.importing.place import nearest
from mdfuse.ir.dtype_limits import lowest


def numbers_of(captured: ExportedModule, said: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the numbers that a caller gives to buffers, by name.

    Raises:
        DefinitionError: an unknown name; a value that is no tensor, or has another shape.
    """
    tensors = dict(captured.module.named_buffers(remove_duplicate=False))
    tensors |= {name: captured.constants[node] for node, name in captured.origins.items()}
    buffers: dict[str, Tensor] = {}
    for name, x in said.items():
        if name not in tensors:
            raise DefinitionError(
                f"buffers[{name!r}] of {captured.name} is none of its buffers",
                because=f"near it are {', '.join(nearest(name, tensors)) or 'none'}",
                hint="buffers= gives numbers to buffers that no checkpoint has, by their names",
            )
        there, why = tensors[name], why_no_numbers(x)
        if why is None and x.shape != there.shape:
            why = f"it has the shape {list(x.shape)}, and the buffer {list(there.shape)}"
        if why is None and x.dtype != there.dtype:
            why = f"it is {x.dtype}, and the buffer {there.dtype}"
        if why is not None:
            raise DefinitionError(
                f"buffers[{name!r}] of {captured.name}",
                because=why,
                hint="a tensor of the shape and dtype of the buffer",
            )
        buffers[name] = x
    return buffers


def made_again(module: nn.Module, name: str) -> Tensor | None:
    """Return a buffer's numbers after the module's initialisation; None if it has no initialiser.

    The submodule is initialised as its library does it: by `_init_weights` of the model (as models
    of transformers have it), or by its own `reset_parameters`. Parameters stay where they are.
    """
    path, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:  # a tensor of the graph that does not belong to the module
        return None
    stand_in = copy.copy(owner)
    fresh = {n: None if x is None else _unset(x) for n, x in owner.named_buffers(recurse=False)}
    stand_in.__dict__["_buffers"] = fresh
    by_model = getattr(module, "_init_weights", None)
    by_itself = getattr(stand_in, "reset_parameters", None)
    if attribute not in fresh or not (by_model or by_itself):
        return None
    with torch.no_grad():
        if by_model:
            by_model(stand_in)
        elif by_itself:
            by_itself()
    tensor = fresh[attribute]
    return None if tensor is None or bool(_is_unset(tensor).any()) else tensor


def _unset(x: Tensor) -> Tensor:
    """Return a tensor on the CPU filled with a marker for unset elements."""
    mark = torch.nan if x.dtype.is_floating_point else lowest(x.dtype)
    return torch.full(tuple(x.shape), mark, dtype=x.dtype)


def _is_unset(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        return x.isnan()
    return torch.zeros_like(x) if x.dtype == torch.bool else x == torch.iinfo(x.dtype).min
