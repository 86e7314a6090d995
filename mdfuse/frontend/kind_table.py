"""Kinds of arguments, and the kind of each parameter of operations: one table by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.plain import END, LEAST, is_in_range, plain_number

#: The marker that a kind returns for an argument that it refuses.
REFUSED: Any = object()
_NUMBERS = frozenset((int,))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of arguments.

    Attributes:
        words: its description in messages.
        usual: types that are accepted at once; integers only within 64 bits.
        take: converts an argument of any type, or returns `REFUSED`.
    """

    words: str
    usual: frozenset[type]
    take: Callable[[Any], Any]


# -- numbers -------------------------------------------------------------------------------------


def _integer(x: Any) -> Any:
    x = plain_number(x)
    is_integer = isinstance(x, int | Extent) and not isinstance(x, bool)
    return x if is_integer and is_in_range(x) else REFUSED


def _number(x: Any) -> Any:
    x = plain_number(x)
    return x if isinstance(x, bool | int | float | Extent) and is_in_range(x) else REFUSED


def _setting(x: Any) -> Any:
    """Take a number as an attribute: bools become ints, since False means no attribute."""
    x = _number(x)
    return int(x) if isinstance(x, bool) else x


def _flag(x: Any) -> Any:
    x = plain_number(x)
    return x if isinstance(x, bool) else REFUSED


def _several(one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that takes a single item, or a list or tuple of items, by `one`."""

    def take(x: Any) -> Any:
        if type(x) in (list, tuple) and _NUMBERS.issuperset(map(type, x)):
            is_usual = not x or (min(x) >= LEAST and max(x) < END)
            return x if is_usual and one is _integer else all_of(one, x)
        if not isinstance(x, Sequence | torch.Tensor | Handle) and hasattr(x, "tolist"):
            x = x.tolist()  # an array of numpy
        return all_of(one, x) if _is_several(x) else one(x)

    return take


def _is_several(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str | bytes)


def all_of(one: Callable[[Any], Any], items: Iterable[Any]) -> Any:
    """Take each item by `one`; a list or tuple whose items all stay is returned itself."""
    taken = tuple(map(one, items))
    if type(items) in (list, tuple) and all(map(operator.is_, taken, items)):
        return items
    return REFUSED if any(x is REFUSED for x in taken) else taken


# -- values --------------------------------------------------------------------------------------


def _handle(x: Any) -> Any:
    return x if isinstance(x, Handle) else REFUSED


def _tensors(x: Any) -> Any:
    if isinstance(x, str | bytes | Mapping | Handle):
        return REFUSED
    try:
        return all_of(_handle, x)
    except TypeError:  # it cannot be iterated
        return REFUSED


def _or(*takes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def take(x: Any) -> Any:
        attempts = (t(x) for t in takes)
        return next((y for y in attempts if y is not REFUSED), REFUSED)

    return take


def _is(*kinds: type) -> Callable[[Any], Any]:
    return lambda x: x if isinstance(x, kinds) else REFUSED


_none = _is(type(None))

# -- the table -----------------------------------------------------------------------------------


def _kind(words: str, take: Callable[[Any], Any], *usual: type) -> Kind:
    return Kind(words, frozenset(usual), take)


_N = type(None)
_TENSOR = _kind("a value of the fusion", _handle, Handle)
_TENSOR_OR_NONE = _kind("a value of the fusion, or None", _or(_none, _handle), Handle, _N)
VALUE = _kind("a value of the fusion, or a number", _or(_handle, _number), Handle, int, float, bool)
_VALUE_OR_NONE = _kind(
    "a value of the fusion, a number, or None",
    _or(_none, _handle, _setting),
    Handle,
    int,
    float,
    _N,
)
TENSORS = _kind("a list of values of the fusion", _tensors)
_TENSOR_OR_SEVERAL = _kind(
    "a value of the fusion, or a list of them", _or(_handle, _tensors), Handle
)
_INTEGER = _kind("an integer", _integer, int)
_INTEGER_OR_NONE = _kind("an integer, or None", _or(_none, _integer), int, _N)
_NUMBER = _kind("a number", _setting, int, float)
_NUMBER_OR_NONE = _kind("a number, or None", _or(_none, _setting), int, float, _N)
_INTEGERS = _kind("an integer, or a list of integers", _several(_integer), int)
_INTEGERS_OR_NONE = _kind(
    "an integer, a list of integers, or None", _or(_none, _several(_integer)), int, _N
)
_LIST = _kind("a list of integers", lambda x: _several(_integer)(x) if _is_several(x) else REFUSED)
#: `dim=()` is all dims for some functions of torch, and none for others.
_DIM = _kind(
    "an integer, a list of some integers, or None (dims=() stands for no dims)",
    _or(_none, lambda x: REFUSED if isinstance(x, list | tuple) and not x else _INTEGERS.take(x)),
    int,
    _N,
)
_FLAG = _kind("True or False", _flag, bool)
_FLAG_OR_NONE = _kind("True, False or None", _or(_none, _flag), bool, _N)
_DTYPE = _kind("a torch dtype", _is(torch.dtype), torch.dtype)
_DTYPE_OR_NONE = _kind("a torch dtype, or None", _is(torch.dtype, _N), torch.dtype, _N)
_TEXT = _kind("a string", _is(str), str)
_TEXT_OR_NONE = _kind("a string, or None", _is(str, _N), str, _N)

#: Any type: the code that uses the argument checks it.
_ANYTHING = _kind("anything", lambda x: x, Handle, int, float, bool, list, tuple, dict, _N)

#: parameter -> its kind, in every operation that has it.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        ("x", "condition", "mask", "tensor", "tensor1", "tensor2", "mat1", "mat2", "mat", "vec",
         "vec2", "batch1", "batch2", "indices", "query", "key", "target", "end", "test_elements",
         "values", "boundaries", "src", "source", "x1", "x2", "w_ih", "w_hh", "in_proj_weight",
         "out_proj_weight", "anchor", "positive", "negative", "grid", "offs",
         "ids"),
        _TENSOR,
    ),
    **dict.fromkeys(
        ("weight", "bias", "attn_mask", "prepend", "append", "running_mean", "running_var", "b_ih",
         "b_hh", "per_sample_weights", "in_proj_bias", "bias_k", "bias_v", "out_proj_bias",
         "key_padding_mask", "pos_weight"),
        _TENSOR_OR_NONE,
    ),
    **dict.fromkeys(("other", "fill_value", "alpha", "beta", "value"), VALUE),
    **dict.fromkeys(("min", "max"), _VALUE_OR_NONE),
    "tensors": TENSORS,
    **dict.fromkeys(
        ("dim0", "dim1", "start_dim", "end_dim", "start", "length", "index", "chunks", "more",
         "k", "ignore_index", "dimension", "size", "step", "n", "upscale_factor",
         "downscale_factor", "diagonal", "offset", "dim2", "num_classes", "bins", "zero_point",
         "quant_min", "quant_max", "embed_dim_to_check", "num_heads", "num_groups", "groups",
         "steps", "rows", "columns"),
        _INTEGER,
    ),
    **dict.fromkeys(
        ("shape", "repeats", "split_size", "destination", "order", "indices_or_sections",
         "shifts", "dilation", "output_padding", "kernel_size"),
        _INTEGERS,
    ),
    **dict.fromkeys(("sizes", "start_indices", "end_indices", "broadcast_dims", "pad"), _LIST),
    **dict.fromkeys(("normalized_shape", "dims", "stride"), _INTEGERS_OR_NONE),
    **dict.fromkeys(("padding_idx", "m", "divisor_override"), _INTEGER_OR_NONE),
    "strides": _kind("a list of integers, or None", _or(_none, _LIST.take), _N),
    "dim": _DIM,
    **dict.fromkeys(
        ("nan", "p", "negative_slope", "threshold", "min_val", "max_val", "low", "high",
         "dropout_p", "label_smoothing", "rtol", "atol", "lambd", "q", "maxnorm", "momentum",
         "delta", "margin"),
        _NUMBER,
    ),
    **dict.fromkeys(("posinf", "neginf", "eps", "scale", "correction"), _NUMBER_OR_NONE),
    **dict.fromkeys(("keepdim", "is_causal", "enable_gqa", "training", "largest", "sorted",
                     "descending", "stable", "assume_unique", "invert", "out_int32", "right",
                     "equal_nan", "sparse_grad", "include_self", "accumulate", "use_input_stats",
                     "add_zero_attn", "need_weights", "average_attn_weights", "log_target",
                     "swap", "log_input", "full", "ceil_mode", "return_indices",
                     "count_include_pad", "antialias", "upper", "scale_grad_by_freq"), _FLAG),
    **dict.fromkeys(("unbiased", "align_corners", "recompute_scale_factor"), _FLAG_OR_NONE),
    "dtype": _DTYPE_OR_NONE,
    **dict.fromkeys(
        ("approximate", "reduction", "mode", "interpolation", "padding_mode", "indexing",
         "equation"),
        _TEXT,
    ),
    **dict.fromkeys(("rounding_mode", "side", "reduce"), _TEXT_OR_NONE),
    "ord": _kind("a number, or a string", _or(_number, _is(str)), int, float, str),
    "padding": _kind(
        "an integer, a list of integers, or a string", _or(_is(str), _several(_integer)), int, str
    ),
    "output_size": _kind(
        "an integer, a list of integers, or None",
        _or(_none, _several(_or(_none, _integer))), int, _N,
    ),
    "scale_factor": _kind(
        "a number, a list of numbers, or None", _or(_none, _several(_number)), int, float, _N
    ),
    "seed": VALUE,
    **dict.fromkeys(("mesh", "layout", "data", "hx"), _ANYTHING),
}  # fmt: skip

#: (operation, parameter) -> its kind, where it differs from the common table.
_SPECIAL: dict[tuple[str, str], Kind] = {
    **{(name, "x"): VALUE for name in ("add", "sub", "rsub", "div", "where")},
    ("cast", "dtype"): _DTYPE,
    **{("movedim", key): _INTEGERS for key in ("source", "destination")},
    **{
        (name, key): _TENSOR
        for name in ("index_select", "gather", "scatter", "scatter_add", "scatter_reduce",
                     "index_add", "index_copy", "index_fill", "take")
        for key in ("index", "src", "source")
    },
    ("scatter", "src"): VALUE,
    **{("index_put", key): kind for key, kind in (("indices", TENSORS), ("values", _TENSOR))},
    **{("slice_scatter", key): _INTEGER_OR_NONE for key in ("start", "end")},
    **{("histc", key): _NUMBER for key in ("min", "max")},
    **{("linspace", key): _NUMBER for key in ("start", "end")},
    ("threshold", "value"): _NUMBER,
    ("celu", "alpha"): _NUMBER,
    ("local_response_norm", "alpha"): _NUMBER,
    ("local_response_norm", "beta"): _NUMBER,
    ("local_response_norm", "k"): _NUMBER,
    **{(name, "beta"): _NUMBER for name in ("smooth_l1_loss",)},
    ("fake_quantize_per_tensor_affine", "scale"): _NUMBER,
    ("pad", "value"): _NUMBER_OR_NONE,
    ("interpolate", "size"): _INTEGERS_OR_NONE,
    ("tensordot", "dims"): _ANYTHING,
    **{(name, "output_size"): _INTEGERS for name in ("col2im",)},
    **{(name, "tensors"): _TENSOR_OR_SEVERAL for name in (
        "atleast_1d", "atleast_2d", "atleast_3d", "meshgrid", "broadcast_tensors", "chain_matmul",
    )},
    ("einsum", "operands"): _TENSOR_OR_SEVERAL,
    **{(name, "dims"): _INTEGERS for name in ("flip", "tile")},
    ("rot90", "dims"): _LIST,
    ("block_diag", "tensors"): _TENSOR,
    **{(name, "weight"): _TENSOR for name in (
        "prelu", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "embedding_bag",
    )},
    ("multi_head_attention_forward", "value"): _TENSOR,
    **{(name, "hx"): _TENSOR for name in ("gru_cell", "rnn_tanh_cell", "rnn_relu_cell")},
    ("uniform", "dtype"): _DTYPE,
    **{
        (name, "other"): _TENSOR
        for name in ("expand_as", "reshape_as", "type_as", "matmul", "view_as", "cross", "inner",
                     "isclose", "kron", "vdot", "tensordot",
                     "linalg_solve")
    },
    ("permute", "dims"): _INTEGERS,
    ("broadcast_in_dim", "shape"): _LIST,
    ("lerp", "weight"): VALUE,
    ("linear", "weight"): _TENSOR,
    ("grouped_mm", "weight"): _TENSOR,
    ("routed_mm", "weight"): _TENSOR,
    ("embedding", "weight"): _TENSOR,
    ("scaled_dot_product_attention", "value"): _TENSOR,
    ("attention", "value"): _TENSOR,
    **{("arange", key): _NUMBER for key in ("start", "step")},
    ("arange", "end"): _NUMBER_OR_NONE,
    ("elu", "alpha"): _NUMBER,
    ("softplus", "beta"): _NUMBER,
    ("norm", "p"): _kind('a number, or "fro"', _or(_number, _is(str)), int, float, str),
    ("broadcast", "dims"): _kind(
        "a list of bools, or of integers",
        lambda x: _several(_or(_flag, _integer))(x) if _is_several(x) else REFUSED,
    ),
    **{
        (name, "dim"): _kind(
            "a value of the fusion, an integer, a list of some integers, or None",
            _or(_none, _handle, _DIM.take), Handle, int, _N,
        )
        for name in ("max", "min")
    },
    **{(name, key): _INTEGER_OR_NONE for name in ("argmax", "argmin") for key in ("dim", "dims")},
    **{(name, "dim"): _INTEGER_OR_NONE
       for name in ("median", "nanmedian", "quantile", "aminmax", "take_along_dim", "cross")},
    **{
        (name, "dim"): _INTEGER
        for name in ("unsqueeze", "unflatten", "select", "narrow", "split", "chunk", "unbind",
                     "cat", "stack", "softmax", "log_softmax", "softmin", "glu",
                     "topk", "sort", "argsort", "cumsum", "cumprod", "logcumsumexp", "cummax",
                     "cummin", "kthvalue", "mode", "renorm", "diff", "tensor_split",
                     "cosine_similarity", "index_select", "gather", "scatter", "scatter_add",
                     "scatter_reduce", "index_add", "index_copy", "index_fill", "slice_scatter",
                     "select_scatter")
    },
    ("repeat_interleave", "dim"): _INTEGER_OR_NONE,
    ("repeat_interleave", "repeats"): _INTEGER,
}  # fmt: skip


def kind_of(operation: str, parameter: str) -> Kind:
    """Return the kind of an argument of an operation."""
    return _SPECIAL.get((operation, parameter)) or KINDS[parameter]
