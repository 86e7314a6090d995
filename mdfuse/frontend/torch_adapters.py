"""Functions of torch whose arguments differ in order from those of the operation.

Each has the signature of torch's function, and calls the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from mdfuse import torch_private
from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import BY_NAME


def _dropout(input: Handle, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace:
        raise DefinitionError(
            "dropout with inplace=True",
            because="a value of a fusion is computed once",
            hint="leave the argument out",
        )
    if training and p:
        raise DefinitionError(
            f"F.dropout of %{input.name} with p={p}",
            because="random numbers depend on a seed that you choose",
            hint=f"fd.ops.dropout(x, {p}, seed=1), or training=False",
        )
    return BY_NAME["set"](input)


def _embedding(
    input: Handle,
    weight: Handle,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    _no_scaled_rows("embedding", max_norm, False)
    return BY_NAME["embedding"](input, weight, padding_idx, scale_grad_by_freq)


def _no_scaled_rows(name: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    if max_norm is not None or scale_grad_by_freq:
        raise DefinitionError(
            f"{name} with max_norm={max_norm} and scale_grad_by_freq={scale_grad_by_freq}",
            because="rows are not scaled in place, nor their gradients by how often they are read",
            hint="renorm(weight, 2, 0, max_norm) before",
        )


def _embedding_bag(
    input: Handle,
    weight: Handle,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Handle | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    _no_scaled_rows("embedding_bag", max_norm, scale_grad_by_freq)
    if offsets is not None or padding_idx is not None:
        raise DefinitionError(
            "embedding_bag with offsets or padding_idx",
            because="bags are of one size, which is known when the fusion is defined",
            hint="indices of two dims",
        )
    return BY_NAME["embedding_bag"](input, weight, mode=mode, per_sample_weights=per_sample_weights)


def _matrix_or_vector_norm(
    A: Handle,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if ord is None or not _is_matrix(A, dim):
        return BY_NAME["norm"](A, 2 if ord is None else ord, dim, keepdim, dtype)
    return BY_NAME["matrix_norm"](A, ord, (-2, -1) if dim is None else dim, keepdim)


def _is_matrix(x: Handle, dim: Any) -> bool:
    return isinstance(dim, tuple | list) and len(dim) == 2 if dim is not None else x.ndim == 2


def _cross(input: Handle, other: Handle, *, dim: int = -1) -> Any:
    return BY_NAME["cross"](input, other, dim)


def _with_indices(pool: Callable[..., Any]) -> Callable[..., Any]:
    def adapted(
        input: Handle,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = True,
    ) -> Any:
        return pool(input, kernel_size, stride, padding, dilation, ceil_mode, True)

    return adapted


def _attention_of_heads(*args: Any, **kwargs: Any) -> Any:
    names = ("use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight",
             "static_k", "static_v")  # fmt: skip
    others = [name for name in names if kwargs.pop(name, None) not in (None, False)]
    if others:
        raise DefinitionError(
            f"multi_head_attention_forward with {', '.join(others)}",
            because="one weight projects query, key and value",
            hint="linear and scaled_dot_product_attention",
        )
    return BY_NAME["multi_head_attention_forward"](*args, **kwargs)


def _meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    return BY_NAME["meshgrid"](*tensors, indexing=indexing or "ij")


def _searchsorted(
    sorted_sequence: Handle,
    input: Handle,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    if sorter is not None:
        raise DefinitionError(
            "searchsorted with a sorter", because="the sequence is in order", hint="x[sorter]"
        )
    how = {"out_int32": out_int32, "right": right, "side": side}
    return BY_NAME["searchsorted"](sorted_sequence, input, **how)


def _grouped(
    mat_a: Handle, mat_b: Handle, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    if offs is None or bias is not None or out_dtype not in (None, mat_a.dtype):
        raise DefinitionError(
            "grouped_mm without offs, with a bias, or of another dtype",
            because="groups of rows are multiplied with a matrix each",
            hint="grouped_mm(x, weight, offs=...)",
        )
    return BY_NAME["grouped_mm"](mat_a, mat_b, offs)


#: Function of torch -> its adapter.
ADAPTED: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), _dropout),
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.unfold: BY_NAME["im2col"],
    F.fold: BY_NAME["col2im"],
    torch_private.GROUPED_MM: _grouped,
    F.multi_head_attention_forward: _attention_of_heads,
    F.max_pool1d_with_indices: _with_indices(BY_NAME["max_pool1d"]),
    F.max_pool2d_with_indices: _with_indices(BY_NAME["max_pool2d"]),
    F.max_pool3d_with_indices: _with_indices(BY_NAME["max_pool3d"]),
    torch.linalg.norm: _matrix_or_vector_norm,
    torch.linalg.matrix_norm: BY_NAME["matrix_norm"],
    torch.linalg.cross: _cross,
    torch.linalg.multi_dot: BY_NAME["chain_matmul"],
    torch.meshgrid: _meshgrid,
    torch_private.MESHGRID: _meshgrid,
    torch.searchsorted: _searchsorted,
    torch.take_along_dim: BY_NAME["take_along_dim"],
}
