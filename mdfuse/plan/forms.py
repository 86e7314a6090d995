"""Forms of tensors: all that prepared calls depend on but their elements and where they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Shape, strides, dtype, device.
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def form_of(x: Tensor) -> Form:
    """Return the form of a tensor."""
    return tuple(x.shape), tuple(x.stride()), x.dtype, x.device


def empty(form: Form) -> Tensor:
    """Return a new tensor of a form, whose elements are whatever lay there."""
    shape, strides, dtype, device = form
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def without_elements(x: Any) -> Any:
    """Return a tensor on no device that looks like one; what is no tensor is returned itself."""
    if not isinstance(x, Tensor):
        return x
    shape, strides, dtype, _ = form_of(x)
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return like.requires_grad_(x.requires_grad)
