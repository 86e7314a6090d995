"""Table of aten operations as functions of handles; most are operations of `mf.ops`.

A key is an overload as graphs name it. `SAME` has those with the arguments of the operation of that
name, `TABLE` has all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import are_same
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing import aten, bags, drawn, indices, recurrent
from mdfuse.frontend.importing.constants import as_value
from mdfuse.frontend.importing.joined import GROUPED
from mdfuse.frontend.importing.view_chains import Views

Call = Callable[..., Any]
ops: Any = operations

#: Arguments about memory, not about numbers.
IGNORED = frozenset(
    ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "implicit",
     "output_size", "cudnn_enable")
)  # fmt: skip

#: operation -> the overloads whose arguments it takes unchanged.
SAME: Mapping[str, str] = {
    **dict.fromkeys(
        ("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil", "cos",
         "cosh", "erf", "erfc", "exp", "exp2", "expm1", "floor", "frac", "hardsigmoid",
         "hardswish", "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2",
         "logical_not", "mish", "neg", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu",
         "sigmoid", "sign", "silu", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc",
         "leaky_relu", "hardtanh", "gelu", "softplus", "nan_to_num", "clamp_min", "clamp_max",
         "maximum", "minimum", "atan2", "logical_and", "logical_or", "logical_xor", "addcmul",
         "addcdiv", "floor_divide", "matmul", "bmm", "mv", "dot", "baddbmm",
         "linear", "view_as", "reshape_as", "t", "unsqueeze",
         "expand_as", "repeat", "narrow", "chunk", "stack", "type_as", "argmax", "argmin", "topk",
         "absolute", "negative", "fix", "sgn", "sinc", "erfinv", "digamma", "lgamma", "angle",
         "real", "imag", "conj", "deg2rad", "rad2deg", "signbit", "logit", "celu", "hardshrink",
         "softshrink", "threshold", "prelu", "glu", "arctan2", "fmax", "fmin", "hypot",
         "heaviside", "logaddexp", "clip", "addmv", "outer", "vdot", "inner", "cross", "kron",
         "vstack", "hstack", "dstack", "column_stack", "block_diag",
         "broadcast_to", "ravel", "tile", "flip", "fliplr", "flipud", "roll", "rot90", "unfold",
         "diag", "diag_embed", "diagonal", "diff", "trace", "tril", "triu", "take",
         "take_along_dim", "gather", "index_select", "index_add", "index_copy", "one_hot", "pad",
         "scatter_add", "masked_scatter", "select_scatter", "cumsum", "cumprod", "cummax",
         "cummin", "logcumsumexp", "histc", "count_nonzero", "aminmax", "mode", "kthvalue",
         "nansum", "nanmean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
         "adaptive_avg_pool2d", "adaptive_avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d",
         "conv_transpose1d", "pixel_shuffle", "pixel_unshuffle", "cosine_similarity",
         "pairwise_distance", "bilinear", "im2col", "col2im", "lstm_cell", "gru_cell",
         "rnn_tanh_cell", "rnn_relu_cell", "isclose", "tensordot", "view_as_complex",
         "view_as_real", "zeros_like", "ones_like", "full_like", "empty_like", "new_empty",
         "new_full", "new_zeros", "new_ones", "cholesky", "inverse", "complex", "polar",
         "nextafter", "renorm", "i0", "fake_quantize_per_tensor_affine"),
        "default",
    ),
    **dict.fromkeys(("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and",
                     "bitwise_or", "bitwise_xor", "remainder", "fmod"), "Tensor Scalar"),
    **dict.fromkeys(("multiply", "subtract", "greater", "greater_equal", "less", "less_equal",
                     "not_equal", "copysign"), "Tensor Scalar"),
    "divide": "Tensor Scalar Tensor_mode Scalar_mode",
    "true_divide": "Tensor Scalar",
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), "Tensor Tensor_Scalar"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "default padding"),
    **dict.fromkeys(("conv_transpose2d", "conv_transpose3d"), "input"),
    **dict.fromkeys(("median", "nanmedian"), "default dim"),
    "scatter": "value src reduce value_reduce",
    "scatter_reduce": "two",
    "index_fill": "int_Scalar int_Tensor",
    **dict.fromkeys(("bucketize", "searchsorted"), "Tensor"),
    "isin": "Tensor_Tensor",
    "quantile": "scalar",
    "tensor_split": "sections indices",
    "std_mean": "default dim correction",
    "norm": "Scalar ScalarOpt_dim ScalarOpt_dim_dtype",
    "moveaxis": "int intlist",
    "xlogy": "Tensor Scalar_Other Scalar_Self",
    "rsub": "Scalar Tensor",
    "div": "Tensor Scalar Tensor_mode Scalar_mode",
    "pow": "Tensor_Tensor Tensor_Scalar Scalar",
    "where": "self ScalarOther ScalarSelf Scalar",
    "masked_fill": "Scalar Tensor",
    "lerp": "Scalar Tensor",
    "clamp": "default Tensor",
    "squeeze": "default dim dims",
    "movedim": "int intlist",
    "repeat_interleave": "self_int",
    "select": "int",
    "split": "Tensor sizes",
    "unbind": "int",
    "softmax": "int",
    "log_softmax": "int",
    "sum": "default dim_IntList",
    "prod": "default dim_int",
    "mean": "default dim",
    "any": "default dim dims",
    "all": "default dim dims",
    "var": "default dim correction",
    "std": "default dim correction",
    "var_mean": "default dim correction",
    "logsumexp": "default",
    "max": "default dim other",
    "min": "default dim other",
    "sort": "default stable",
    "argsort": "default stable",
}  # fmt: skip


def _addmm(bias: Handle, x: Handle, weight: Handle, *, beta: float = 1, alpha: float = 1) -> Any:
    """`addmm`, whose rows may be several dims."""
    if x.ndim == 2:
        return ops.addmm(bias, x, weight, beta=beta, alpha=alpha)
    product = ops.matmul(x, weight)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else ops.add(bias if beta == 1 else bias * beta, product)


def _itself(x: Any, *_: Any, **__: Any) -> Any:
    """Return x, for operations that change no numbers."""
    return x


def _expand(x: Handle, shape: Sequence[int]) -> Any:
    unchanged = (are_same(n, -1) or are_same(n, m) for n, m in zip(shape, x.shape, strict=False))
    return x if len(shape) == x.ndim and all(unchanged) else ops.expand(x, shape)


def _broadcast(tensors: Sequence[Handle]) -> list[Any]:
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return [_expand(x, shape) for x in tensors]


def _slice(x: Handle, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    whole: list[Any] = [slice(None)] * x.ndim
    whole[dim] = slice(start, None if end == indices.END else end, step)
    return ops.index(x, tuple(whole))


def _to(x: Handle, *said: Any, dtype: torch.dtype | None = None) -> Any:
    """`to` in any of its overloads; the device is ignored, because layouts decide it."""
    for item in said:
        if isinstance(item, Handle | Tensor):
            dtype = item.dtype
        elif isinstance(item, torch.dtype):
            dtype = item
    return x if dtype is None or dtype == x.dtype else ops.cast(x, dtype)


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Join tensors without empty vectors, with which caches begin."""
    operands = [x for x in tensors if not is_nothing(x)]
    operands = [as_value(x) if isinstance(x, Tensor) else x for x in operands]
    return operands[0] if len(operands) == 1 else ops.cat(operands, dim)


#: Overloads that join tensors.
_JOINS = ("aten.cat.default", "aten.concat.default", "aten.concatenate.default")


def is_nothing(x: Any) -> bool:
    """Return whether `cat` leaves an operand out."""
    return isinstance(x, Tensor) and tuple(x.shape) == (0,)


def _over(name: str) -> Call:
    """A reduction that aten writes with no dims for all of them."""
    operation = ops.BY_NAME[name]
    return lambda x, dim=(), keepdim=False: operation(x, tuple(dim) or None, keepdim)


def _elu(x: Handle, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    y = ops.elu(x if input_scale == 1 else x * input_scale, alpha)
    return y if scale == 1 else y * scale


def _embedding(
    weight: Handle,
    indices: Handle,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of a table; the padding row gets no gradient. `sparse` only concerns torch's dw."""
    padding = padding_idx if padding_idx >= 0 else None
    return ops.embedding(indices, weight, padding, scale_grad_by_freq)


def _grouped_mm(x: Handle, weight: Handle, offs: Any = None, bias: Any = None, *how: Any) -> Any:
    """Rows of groups times a matrix each, with torch's or transformers' arguments."""
    if offs is None or bias is not None or x.ndim != 2 or how not in ((), (None,), (x.dtype,)):
        raise DefinitionError(
            "grouped_mm without offs, with a bias, of groups of columns, or of another dtype",
            because="groups of rows are multiplied with a matrix each",
            hint="grouped_mm(x, weight, offs=...) of rows [t,k] and matrices [e,k,n]",
        )
    return ops.grouped_mm(x, weight, offs)


#: loss -> the names of its arguments behind the first two, in the order of aten.
LOSSES: Mapping[str, str] = {
    **dict.fromkeys(("mse_loss", "l1_loss", "soft_margin_loss", "kl_div"), "reduction"),
    "huber_loss": "reduction delta",
    "smooth_l1_loss": "reduction beta",
    "cosine_embedding_loss": "target margin reduction",
    "margin_ranking_loss": "target margin reduction",
    "hinge_embedding_loss": "margin reduction",
    "triplet_margin_loss": "negative margin p eps swap reduction",
    "poisson_nll_loss": "log_input full eps reduction",
    "binary_cross_entropy": "weight reduction",
    "binary_cross_entropy_with_logits": "weight pos_weight reduction",
}

#: overload -> function of handles. Those of `BY_VALUE` also take tensors that are known.
TABLE: dict[str, Call] = {
    **{f"aten.{name}.{overload}": ops.BY_NAME[name]
       for name, overloads in SAME.items() for overload in overloads.split()},
    **dict.fromkeys(
        ("aten.alias.default", "aten.contiguous.default", "aten.clone.default",
         "aten.lift_fresh_copy.default", "aten.positive.default"),
        _itself,
    ),
    **{f"aten.{name}.default": ops.detach for name in ("detach", "detach_", "detach_copy")},
    "aten.expand.default": _expand,
    **dict.fromkeys(
        ("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other",
         "aten._to_copy.default"),
        _to,
    ),
    **{f"aten.__{name}__.Tensor": ops.BY_NAME[f"bitwise_{name}"] for name in ("and", "or", "xor")},
    "aten.slice.Tensor": _slice,
    "aten.broadcast_tensors.default": _broadcast,
    "aten.split_with_sizes.default": ops.split,
    **dict.fromkeys(_JOINS, _cat),
    "aten.group_norm.default": lambda x, groups, w=None, b=None, eps=1e-5, *_: (
        ops.group_norm(x, groups, w, b, eps)),
    "aten.addmm.default": _addmm,
    "aten.mm.default": ops.matmul,
    "aten.layer_norm.default": lambda x, shape, w=None, b=None, eps=1e-5, *_: (
        ops.layer_norm(x, shape, w, b, eps)),
    "aten.rms_norm.default": ops.rms_norm,
    "aten.elu.default": _elu,
    "aten.log_sigmoid.default": ops.logsigmoid,
    "aten._softmax.default": lambda x, dim, half_to_float=False: ops.softmax(x, dim),
    "aten._log_softmax.default": lambda x, dim, half_to_float=False: ops.log_softmax(x, dim),
    "aten.amax.default": _over("amax"),
    "aten.amin.default": _over("amin"),
    **{f"aten.{name}.default": aten.loss(name, *names.split()) for name, names in LOSSES.items()},
    **dict.fromkeys(
        ("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default"),
        aten.loss("nll_loss", "weight", "reduction", "ignore_index"),
    ),
    "aten.linalg_vector_norm.default": lambda x, ord=2, dim=None, keepdim=False, **how: (
        ops.vector_norm(x, ord, dim, keepdim, **how)),
    "aten.linalg_norm.default": aten.linalg_norm,
    "aten.linalg_matrix_norm.default": ops.matrix_norm,
    "aten.linalg_matrix_norm.str_ord": ops.matrix_norm,
    **{f"aten.special_{name}.default": ops.BY_NAME[name] for name in ("i0", "i1")},
    "aten.linalg_cholesky.default": ops.cholesky,
    "aten.linalg_inv.default": ops.inverse,
    "aten.linalg_solve.default": lambda x, y, left=True: (
        ops.linalg_solve(x, y) if left else ops.linalg_solve(x.mT, y.mT).mT),
    "aten.max_pool2d_with_indices.default": lambda *a, **k: (
        ops.max_pool2d(*a, **k, return_indices=True)),
    **{f"aten.adaptive_max_pool{n}d.default": aten.adaptive_max(n) for n in (1, 2, 3)},
    **{f"aten.upsample_{mode}{n}d.vec": aten.resized(mode)
       for mode, n in (("nearest", 1), ("nearest", 2), ("nearest", 3), ("linear", 1),
                       ("bilinear", 2), ("trilinear", 3), ("bicubic", 2))},
    **{f"aten._upsample_nearest_exact{n}d.vec": aten.resized("nearest-exact") for n in (1, 2, 3)},
    **{f"aten._upsample_{mode}2d_aa.vec": aten.resized(mode, antialias=True)
       for mode in ("bilinear", "bicubic")},
    "aten.grid_sampler.default": aten.grid_sample,
    "aten.affine_grid_generator.default": aten.affine_grid,
    "aten.channel_shuffle.default": aten.channel_shuffle,
    "aten.embedding.default": _embedding,
    "aten.embedding_bag.padding_idx": bags.embedding_bag,
    **{f"aten.{name}.input": recurrent.network(name)
       for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "aten.cdist.default": lambda x, y, p=2.0, mode=None: ops.cdist(x, y, p),
    "aten.rrelu.default": drawn.rrelu,
    **{f"aten.{name}.default": drawn.other_dropout
       for name in ("feature_dropout", "alpha_dropout", "feature_alpha_dropout")},
    **dict.fromkeys(GROUPED, _grouped_mm),
    "aten.einsum.default": lambda equation, tensors, **_: ops.einsum(equation, *tensors),
    "aten.meshgrid.default": lambda tensors: ops.meshgrid(*tensors),
    "aten.meshgrid.indexing": lambda tensors, indexing: ops.meshgrid(*tensors, indexing=indexing),
    **{f"aten.{name}.default": ops.BY_NAME[name] for name in ("full", "zeros", "ones")},
    "aten.cross_entropy_loss.default": aten.cross_entropy,
    "aten.zero.default": ops.zeros_like,
    "aten.fill.Scalar": aten.fill,
    "aten.fill.Tensor": aten.fill,
    "aten.copy.default": aten.copy,
    "aten.slice_scatter.default": aten.slice_scatter,
    "aten.select_scatter.default": aten.select_scatter,
    "aten.batch_norm.default": lambda x, w, b, mean, var, training, momentum, eps, *_: (
        ops.batch_norm(x, mean, var, w, b, training, momentum, eps)),
    "aten._native_batch_norm_legit_no_training.default": (
        lambda x, w, b, mean, var, momentum, eps: (
            ops.batch_norm(x, mean, var, w, b, False, momentum, eps), None, None)),
    "aten.instance_norm.default": lambda x, w, b, mean, var, *how: (
        ops.instance_norm(x, mean, var, w, b, *how[:3])),
    "aten._weight_norm.default": aten.weight_norm,
    "aten._native_batch_norm_legit_functional.default": aten.batch_norm_of_training,
    "aten.index.Tensor": indices.take,
    "aten.index_put.default": indices.put,
    **{
        str(call): call
        for call in (
            operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv,
            operator.mod, operator.neg,
        )
    },
    "aten.sym_size.int": lambda x, dim: x.shape[dim],
    "aten.arange.default": ops.arange,
    "aten.arange.start": ops.arange,
    "aten.arange.start_step": ops.arange,
}  # fmt: skip


def is_known(target: str) -> bool:
    """Return whether the table has an operation."""
    return target in TABLE or target in IN_CONTEXT or target in VIEWS


#: overload -> method of `Views`.
VIEWS: dict[str, Call] = {
    **dict.fromkeys(
        ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"), Views.reshape
    ),
    "aten.flatten.using_ints": Views.flatten,
    "aten.unflatten.int": Views.unflatten,
    "aten.permute.default": Views.permute,
    "aten.numpy_T.default": lambda views, x: views.permute(x, tuple(reversed(range(x.ndim)))),
    "aten.mT.default": lambda views, x: views.transpose(x, -2, -1),
    **dict.fromkeys(
        ("aten.transpose.int", "aten.swapaxes.default", "aten.swapdims.default"), Views.transpose
    ),
}

#: overload -> position of the matrix whose rows may stay several dims.
ROWS: Mapping[str, int] = {
    "aten.linear.default": 0,
    "aten.mm.default": 0,
    "aten.addmm.default": 1,
}

#: overload -> function of a context and handles.
IN_CONTEXT: dict[str, Call] = {
    "aten.dropout.default": drawn.dropout,
    "aten.scaled_dot_product_attention.default": drawn.attention,
}

#: overload -> the arguments that must be handles; others stay tensors.
BY_VALUE: Mapping[str, Call] = {
    **dict.fromkeys(_JOINS, lambda tensors, *_: [x for x in tensors if not is_nothing(x)]),
    "aten.index.Tensor": lambda x, indices: [x],
    "aten.index_put.default": lambda x, indices, values, *_: [
        x,
        values,
        *(i for i in indices if not (isinstance(i, Tensor) and i.dtype == torch.bool)),
    ],
    "aten.embedding_bag.padding_idx": bags.wanted,
    "aten.scaled_dot_product_attention.default": drawn.wanted_of_attention,
}
