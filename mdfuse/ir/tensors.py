"""Tell plain tensors, which a run takes, from the other things that torch calls tensors.

A program reads and writes the memory of what it is given, and hands it to communication libraries,
which know nothing but an address and a length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from mdfuse.torch_private import forward_level, is_transformed, is_zero_tensor

#: Classes of plain tensors. Others may compute something of their own, or have no memory.
PLAIN = frozenset({Tensor, Parameter})


def _lacks_memory(x: Tensor) -> bool:
    """Return whether the storage is too small for the elements, as after `resize_(0)`."""
    if not x.numel() or is_lazy(x):
        return False
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.untyped_storage().nbytes() < (x.storage_offset() + last + 1) * x.itemsize


#: What is no plain tensor, in the order in which the questions can be asked: (whether a tensor is
#: one, what messages call it, what to pass instead).
_OTHERS: tuple[tuple[Callable[[Tensor], bool], str, str], ...] = (
    (lambda x: x.is_nested, "a nested tensor", "pass x.to_padded_tensor(0.0), or its tensors"),
    (
        lambda x: type(x) not in PLAIN,
        "of class {0.__class__.__name__}",
        "pass x.as_subclass(torch.Tensor), or what it wraps",
    ),
    (
        is_transformed,
        "a tensor inside of a transform of torch.func",
        "call run outside of vmap, grad and the like",
    ),
    (lambda x: x.layout is not torch.strided, "a {0.layout} tensor", "pass x.to_dense()"),
    (lambda x: x.is_quantized, "a quantized tensor", "pass x.dequantize()"),
    (lambda x: x.is_meta, "a tensor on meta, which has no elements", "pass one that has"),
    (
        _lacks_memory,
        "a tensor whose memory was given up",
        "pass it while its storage has the size of its elements",
    ),
)


def why_not(x: Tensor) -> tuple[str, str] | None:
    """Return what a tensor is that is not plain, and what to do; None for a plain one.

    >>> why_not(torch.eye(2).to_sparse())
    ('a torch.sparse_coo tensor', 'pass x.to_dense()')
    """
    for is_so, what, hint in _OTHERS:
        if is_so(x):
            return what.format(x), hint
    return None


def no_gradient(x: Tensor) -> tuple[str, str] | None:
    """Return why autograd would record a tensor, and what to do; None where it would not."""
    if x.requires_grad and torch.is_grad_enabled():
        return "requires grad", "pass x.detach(), or run under torch.no_grad()"
    is_dual = forward_level() >= 0 and type(x) in PLAIN
    if is_dual and forward_ad.unpack_dual(x).tangent is not None:
        return "has a tangent", "pass torch.autograd.forward_ad.unpack_dual(x).primal"
    return None


def overlaps_itself(x: Tensor) -> bool:
    """Return whether several elements of a tensor may lie at one address.

    >>> overlaps_itself(torch.empty(3).expand(2, 3)), overlaps_itself(torch.empty(2, 3).t()[::2])
    (True, False)
    """
    end = 0
    for stride, n in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1):
        if stride <= end and n:
            return x.numel() > 0
        end += (n - 1) * stride
    return False


def are_writable(xs: Iterable[Tensor]) -> bool:
    """Return whether torch allows writes into tensors; those of inference mode need that mode."""
    return torch.is_inference_mode_enabled() or not any(x.is_inference() for x in xs)


# -- what is not yet computed ----------------------------------------------------------------------


def is_lazy(x: Tensor) -> bool:
    """True if memory has the elements negated or conjugated, or they are zeros without memory."""
    return x.is_neg() or x.is_conj() or is_zero_tensor(x)


def resolved(xs: Sequence[Any], unchanged: Collection[int] = ()) -> Sequence[Any]:
    """Return the arguments of a run, with the elements of each in its memory.

    Args:
        xs: arguments.
        unchanged: positions of the arguments that stay as they are.
    """
    lazy = {n for n, x in enumerate(xs) if type(x) in PLAIN and is_lazy(x)}.difference(unchanged)
    return [_resolved(x) if n in lazy else x for n, x in enumerate(xs)] if lazy else xs


def _resolved(x: Tensor) -> Tensor:
    return x.clone() if is_zero_tensor(x) else x.resolve_conj().resolve_neg()
