"""Gradients of elementwise ops by torch's own kernels: one pass, without intermediate tensors.

The call takes the cotangent and the op's operand, or the op's result where that is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ATEN: Any = torch.ops.aten

#: name of an op -> (kernel, ct, x or y, attributes of the op, out) -> its call.
_CALLS: dict[str, Callable[..., Tensor]] = {
    "elu": lambda f, ct, x, alpha=1.0, scale=1.0, input_scale=1.0, **to: f(
        ct, alpha, scale, input_scale, False, x, **to
    ),
    "gelu": lambda f, ct, x, approximate="none", **to: f(ct, x, approximate=approximate, **to),
    "hardshrink": lambda f, ct, x, lambd=0.5, **to: f(ct, x, lambd, **to),
    "hardsigmoid": lambda f, ct, x, **to: f(ct, x, **to),
    "hardswish": lambda f, ct, x, **to: f(ct, x, **to),
    "hardtanh": lambda f, ct, x, min, max, **to: f(ct, x, min, max, **to),
    "leaky_relu": lambda f, ct, x, negative_slope=0.01, **to: f(ct, x, negative_slope, False, **to),
    "logit": lambda f, ct, x, eps=None, **to: f(ct, x, eps, **to),
    "mish": lambda f, ct, x, **to: f(ct, x, **to),
    "relu": lambda f, ct, y, **to: f(ct, y, 0, **to),
    "sigmoid": lambda f, ct, y, **to: f(ct, y, **to),
    "silu": lambda f, ct, x, **to: f(ct, x, **to),
    "softshrink": lambda f, ct, x, lambd=0.5, **to: f(ct, x, lambd, **to),
    "softplus": lambda f, ct, x, beta=1.0, threshold=20.0, **to: f(ct, x, beta, threshold, **to),
    "tanh": lambda f, ct, y, **to: f(ct, y, **to),
}

#: Ops with such a kernel; the row of it is called `NAME_grad`.
NAMES = tuple(_CALLS)
#: Those whose kernel reads the result.
OF_RESULT = ("relu", "sigmoid", "tanh")
#: What torch calls the kernel, and its `out=` form, where that is not usual.
_KERNELS, _FORMS = {"relu": "threshold"}, {"hardswish": None, "mish": None}


def slope(name: str) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return the row's call for an op, and its `out=` form if there is one."""
    kernel = getattr(_ATEN, f"{_KERNELS.get(name, name)}_backward")
    new, compute = kernel.default, _CALLS[name]
    form = _FORMS.get(name, "grad_input")

    def call(ct: Tensor, x: Tensor, **attrs: Any) -> Tensor:
        shape = getattr(x, "shape", ())  # some kernels repeat, some refuse
        if ct.shape != shape:
            raise ValueError(f"{tuple(ct.shape)} is no cotangent of {tuple(shape)}")
        return compute(new, ct, x, **attrs)

    call.__name__ = f"{name}_grad"
    if form is None:
        return call, None
    into = getattr(kernel, form)

    def write(ct: Tensor, x: Tensor, *, out: Tensor, **attrs: Any) -> None:
        compute(into, ct, x, **{form: out}, **attrs)

    write.__name__ = call.__name__
    return call, write
