"""torch's own `out=` forms: how the rows of the op table write their results into a buffer.

Most of torch's loops compute an element otherwise where they go through memory in another way: a
sigmoid in vectors and one at a time, a product in blocks that start at an aligned address or not.
So a row says whether its form gives the same bits wherever it writes; `mdfuse/ir/writes.py` decides
by that where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Write = Callable[..., Any]

_ATEN: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """How the result of an op comes into a buffer.

    Attributes:
        form: `form(*operands, out=buffer, **attrs)`, the first operand a tensor; None: it is
            computed, and copied there.
        is_exact: IEEE arithmetic, or none, defines the result to the last bit, in whatever order
            the form goes through memory.
        is_product: it copies its operands into blocks before it computes.
        is_dense: of operands that are dense the result is.
    """

    form: Write | None
    is_exact: bool = False
    is_product: bool = False
    is_dense: bool = True


def exact(form: Write) -> Writes:
    """The same bits wherever it writes."""
    return Writes(form=form, is_exact=True)


def rounded(form: Write) -> Writes:
    """Bits that depend on how it goes through memory."""
    return Writes(form=form)


def product(form: Write) -> Writes:
    """A product of matrices."""
    return Writes(form=form, is_product=True)


#: No form, or one that computes and copies; how the result lies is known, or is not.
DENSE, ANYHOW = Writes(form=None), Writes(form=None, is_dense=False)


def on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A torch function that wants tensors, made to take a number on either side."""

    def call(a: Any, b: Any, **more: Any) -> Any:
        like = a if isinstance(a, Tensor) else b
        return function(_as_tensor(a, like), _as_tensor(b, like), **more)

    return call


def _as_tensor(x: Any, like: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x
    dtype = torch.result_type(like, x)
    return torch.full((), x, dtype=dtype, device=like.device)


def activation(name: str) -> Write:
    """An activation, whose Python function takes no buffer."""
    function = getattr(_ATEN, name).out

    def write(x: Tensor, *, out: Tensor, **attrs: Any) -> None:
        function(x, out=out, **attrs)

    write.__name__ = name
    return write


def where(condition: Tensor, a: Any, b: Any, *, out: Tensor) -> None:
    """Only two tensors have an `out=` form."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        torch.where(condition, a, b, out=out)
    else:
        out.copy_(torch.where(condition, a, b))


def matmul(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Of a vector and a matrix torch would make a matrix of the buffer and back."""
    if a.ndim == 1 and b.ndim > 1:
        out.copy_(torch.matmul(a, b))
    else:
        torch.matmul(a, b, out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """With a bias one fused product, as `torch.nn.functional.linear` does it of dense operands."""
    if bias is None:
        matmul(x, weight.t(), out=out)
    elif x.ndim == weight.ndim == 2:
        torch.addmm(bias, x, weight.t(), out=out)
    elif x.ndim > 2 and weight.ndim == 2 and x.is_contiguous():
        torch.addmm(bias, x.flatten(0, -2), weight.t(), out=out.flatten(0, -2))
    else:
        out.copy_(torch.nn.functional.linear(x, weight, bias))
