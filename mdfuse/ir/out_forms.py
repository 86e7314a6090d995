"""torch's own `out=` forms: how the rows of the op table write their results into a buffer.

Most of torch's loops compute an element otherwise where they go through memory in another way: a
sigmoid in vectors and one at a time, a product in blocks that start at an aligned address or not.
So a row says whether its form gives the same bits wherever it writes; `mdfuse/ir/writes.py` decides
by that where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Write = Callable[..., Any]

_ATEN: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """The ways in which the result of an op comes into a buffer.

    Attributes:
        form: `form(*operands, out=buffer, **attrs)`, the first operand a tensor; None: the result
            is computed elsewhere and copied.
        is_exact: whether the result is the same to the last bit however the form goes through
            memory: IEEE arithmetic defines it, or nothing is computed.
        is_product: whether this is a product of matrices, which copies its operands into blocks
            before it computes.
        is_dense: whether the op's own result is dense where its operands are.
    """

    form: Write | None
    is_exact: bool = False
    is_product: bool = False
    is_dense: bool = True


def exact(form: Write) -> Writes:
    """Return a form that gives the same bits wherever it writes."""
    return Writes(form=form, is_exact=True)


def rounded(form: Write) -> Writes:
    """Return a form whose bits depend on how it goes through memory."""
    return Writes(form=form)


def product(form: Write) -> Writes:
    """Return the form of a product of matrices."""
    return Writes(form=form, is_product=True)


#: No form is used: torch has none, or one that computes and copies. The op's own result is dense
#: where its operands are (DENSE), or lies in a way that is not known (ANYHOW).
DENSE, ANYHOW = Writes(form=None), Writes(form=None, is_dense=False)


def on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a torch function that wants two tensors take a number on either side."""

    def call(a: Any, b: Any, **kwargs: Any) -> Any:
        like = a if isinstance(a, Tensor) else b
        return function(as_tensor(a, like), as_tensor(b, like), **kwargs)

    return call


def as_tensor(x: Any, like: Tensor) -> Tensor:
    """Return a number as a tensor without dims, beside one of which it takes dtype and device."""
    if isinstance(x, Tensor):
        return x
    dtype = torch.result_type(like, x)
    if isinstance(x, float) and dtype.is_floating_point and abs(x) > torch.finfo(dtype).max:
        x = math.copysign(math.inf, x)  # as in torch's own operations with numbers
    return torch.full((), x, dtype=dtype, device=like.device)


def activation(name: str) -> Write:
    """Return the `out=` form of an activation, whose Python function has none."""
    function = getattr(_ATEN, name).out

    def write(x: Tensor, *, out: Tensor, **attrs: Any) -> None:
        function(x, out=out, **attrs)

    write.__name__ = name
    return write


def where(condition: Tensor, a: Any, b: Any, *, out: Tensor) -> None:
    """Write `torch.where` into a buffer; only with two tensors it has an `out=` form."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        torch.where(condition, a, b, out=out)
    else:
        out.copy_(torch.where(condition, a, b))


def matmul(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Write a product; of a vector and a matrix a copy, since torch would reshape the buffer."""
    if a.ndim == 1 and b.ndim > 1:
        out.copy_(torch.matmul(a, b))
    else:
        torch.matmul(a, b, out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """Write `linear`; with a bias as one fused product, as torch does with dense operands."""
    if bias is None:
        matmul(x, weight.t(), out=out)
    elif x.ndim == weight.ndim == 2:
        torch.addmm(bias, x, weight.t(), out=out)
    elif x.ndim > 2 and weight.ndim == 2 and x.is_contiguous():
        torch.addmm(bias, x.flatten(0, -2), weight.t(), out=out.flatten(0, -2))
    else:
        out.copy_(torch.nn.functional.linear(x, weight, bias))
