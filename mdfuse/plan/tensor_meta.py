"""Forms of tensors: all properties that prepared calls depend on, without values and addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mdfuse.torch_private import current_gpu, empty_on_gpu

#: Shape, strides, dtype, device.
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def form_of(x: Tensor) -> Form:
    """Return the form of a tensor."""
    return tuple(x.shape), tuple(x.stride()), x.dtype, x.device


def empty(form: Form) -> Tensor:
    """Return a new tensor of a form, without first values."""
    shape, strides, dtype, device = form
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def all_new(forms: Sequence[Form]) -> Callable[[], list[Tensor]]:
    """Return a function that makes new tensors of these forms, on a GPU past torch's dispatcher."""
    device = forms[0][3] if forms else torch.device("cpu")
    if device.type != "cuda" or any(form[3] != device for form in forms):
        return lambda: [empty(form) for form in forms]
    quick = [partial(empty_on_gpu, *form[:3]) for form in forms]

    def new() -> list[Tensor]:
        if current_gpu() == device.index:
            return [make() for make in quick]
        return [empty(form) for form in forms]

    return new


def without_elements(x: Any) -> Any:
    """Return a meta tensor like a tensor; other values are returned themselves."""
    if not isinstance(x, Tensor):
        return x
    shape, strides, dtype, _ = form_of(x)
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return like.requires_grad_(x.requires_grad)
