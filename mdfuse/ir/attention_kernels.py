"""The kernels by which torch computes attention, and their gradients.

Torch does not promise to keep them, as all that stands in `torch_private.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ATEN: Any = torch.ops.aten

Tensors = tuple[Tensor, ...]

#: Attention with the logarithms of its sums, and its gradient. Operands are [batch, heads, rows,
#: features]; then come what is added to the scores or None, is_causal, and scale. The gradient
#: takes the cotangent, and (query, key, value, output, sums), before these.
Kernels = tuple[Callable[..., Tensors], Callable[..., Tensors]]


def kernels(
    query: Tensor, key: Tensor, value: Tensor, has_bias: bool, is_causal: bool
) -> Kernels | None:
    """torch's kernels for such operands, which keep no scores; None where it has none.

    Under a causal mask the last row sees the last key. Where that is not the first square of the
    keys, there are also none if it pays to compute the keys that all rows see apart: see `_PAYS`.
    """
    dtype, features = query.dtype, query.shape[-1]
    is_square = not is_causal or query.shape[-2] == key.shape[-2]
    if query.device.type == "cpu":
        return (_on_cpu, _grad_on_cpu) if is_square else None
    if query.device.type != "cuda":
        return None
    is_narrow = dtype in (torch.float16, torch.bfloat16)
    is_new = torch.cuda.get_device_capability(query.device) >= (8, 0)
    may_flash = is_narrow and is_new and not has_bias
    if may_flash and features % 8 == 0 and features <= 256:
        # flash alone takes a query that is shorter than the keys for the last rows of a longer one,
        # and splits the keys of few rows also where it gives sums
        is_few = query.shape[-2] <= _FEW and not is_causal
        may_cudnn = not is_few and _may_cudnn(query, key, value, is_causal and is_square)
        if may_cudnn and not is_square and _pays_apart(query, key):
            return None
        if not (is_square and may_cudnn):
            return _flash, _flash_grad
        return _cudnn, _cudnn_grad if features <= _CUDNN_GRAD_FEATURES else _flash_grad
    if is_square and dtype != torch.float64 and features % (8 if is_narrow else 4) == 0:
        return _efficient, _efficient_grad
    return None


#: Rows of a head that do not fill a GPU.
_FEW = 16

#: Rows, and keys that all of them see, from which two of cuDNN's kernels, whose results are joined,
#: take less time than one of flash: some 550 TFLOP/s beside 350, on Hopper GPUs.
_PAYS = 1024, 4096


def _pays_apart(query: Tensor, key: Tensor) -> bool:
    rows, keys = query.shape[-2], key.shape[-2]
    return rows >= _PAYS[0] and keys - rows >= _PAYS[1]


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensors:
    forward = _ATEN._scaled_dot_product_flash_attention_for_cpu
    results: Tensors = forward(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return results


def _grad_on_cpu(
    ct: Tensor, saved: Tensors, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensors:
    backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    grads: Tensors = backward(ct, *saved, 0.0, is_causal, attn_mask=bias, scale=scale)
    return grads


def _may_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """True if cuDNN has the kernels: the fastest there are on the GPUs that torch takes them on."""
    shares_heads = q.shape[1] != k.shape[1]
    given = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, is_causal, shares_heads)
    is_fast = torch.cuda.get_device_capability(q.device)[0] >= 9
    return is_fast and torch.backends.cuda.can_use_cudnn_attention(given)


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensors:
    forward = _ATEN._scaled_dot_product_cudnn_attention
    out, sums, *_ = forward(q, k, v, bias, True, 0.0, is_causal, scale=scale)
    return out, sums


def _cudnn_grad(
    ct: Tensor, saved: Tensors, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensors:
    q, k, v, out, sums = saved
    backward, none = _ATEN._scaled_dot_product_cudnn_attention_backward, _no_seed(q)
    rows, sums = (q.shape[-2], k.shape[-2]), sums.unsqueeze(-1)
    # torch finds the kernel by how query, key and value lie, and would take one that was made for
    # another order of the output and its cotangent: so there is one order for each query
    out, ct = _lying_as(q, out), _lying_as(q, ct)
    grads: Tensors = backward(
        ct, q, k, v, out, sums, none, none, bias, None, None, *rows, 0.0, is_causal, scale=scale
    )
    return grads


def _lying_as(like: Tensor, x: Tensor) -> Tensor:
    """The same values in the order of memory that `empty_like` gives."""
    copy = torch.empty_like(like)
    lies = zip(x.stride(), copy.stride(), x.shape, strict=True)
    return x if all(a == b for a, b, n in lies if n > 1) else copy.copy_(x)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensors:
    forward = _ATEN._scaled_dot_product_flash_attention
    results: Tensors = forward(q, k, v, 0.0, is_causal, scale=scale)
    return results[:2]


def _flash_grad(
    ct: Tensor, saved: Tensors, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensors:
    backward, none = _ATEN._scaled_dot_product_flash_attention_backward, _no_seed(ct)
    rows = [x.shape[-2] for x in saved[:2]]
    grads: Tensors = backward(
        ct, *saved, None, None, *rows, 0.0, is_causal, none, none, scale=scale
    )
    return grads


def _no_seed(x: Tensor) -> Tensor:
    """The state of the random numbers of a dropout that there is not."""
    return torch.empty((), dtype=torch.int64, device=x.device)


#: The greatest number of features of a head that cuDNN has gradients for on all these GPUs.
_CUDNN_GRAD_FEATURES = 128

#: The memory-efficient kernels take the sums, and rows of what is added, in multiples of these.
_SUMS, _BIAS = 32, 16


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensors:
    k, v = (_repeated(x, q) for x in (k, v))
    forward = _ATEN._scaled_dot_product_efficient_attention
    out, sums, *_ = forward(q, k, v, _padded(bias, q), True, 0.0, is_causal, scale=scale)
    return out, sums[..., : q.shape[-2]]


def _efficient_grad(
    ct: Tensor, saved: Tensors, bias: Tensor | None, is_causal: bool, scale: float
) -> Tensors:
    q, k, v, out, sums = saved
    backward, none = _ATEN._scaled_dot_product_efficient_attention_backward, _no_seed(q)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # wrong where it lies otherwise
    heads = (_repeated(x, q) for x in (k, v))
    whole = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % _SUMS), value=float("inf"))
    wanted = [True, True, True, False]
    dq, dk, dv, _ = backward(
        ct, q, *heads, _padded(bias, q), out, whole, none, none, 0.0, wanted, is_causal,
        scale=scale,
    )  # fmt: skip
    return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values with a head for each of the query: these kernels share none."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _padded(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the bias for all batches and heads, in rows that begin at multiples of `_BIAS`."""
    if bias is None:
        return None
    n = bias.shape[-1]
    rows = torch.nn.functional.pad(bias, (0, -n % _BIAS))[..., :n]
    return rows.expand(*query.shape[:2], -1, -1)
