"""Buffers of a module on the meta device, of which no checkpoint has the numbers: made again."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def made_again(module: nn.Module, name: str) -> Tensor | None:
    """Return the numbers that a module gives a buffer when it is initialised; None where it cannot.

    The submodule is initialised as its library does it: by `_init_weights` of the model (as models
    of transformers have it), or by its own `reset_parameters`. Parameters stay where they are.
    """
    path, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:  # a tensor of the graph that is none of the module's
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
    found = fresh[attribute]
    return None if found is None or bool(_is_unset(found).any()) else found


def _unset(x: Tensor) -> Tensor:
    """A tensor on the CPU whose elements say that nothing has set them."""
    return torch.full(tuple(x.shape), _mark(x.dtype), dtype=x.dtype)


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def _is_unset(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        return x.isnan()
    return torch.zeros_like(x) if x.dtype == torch.bool else x == torch.iinfo(x.dtype).min
