"""What the arguments of operations may be: one table of kinds, by the names of parameters.

An operation is called through `taking_kinds`. Each argument is taken as its kind says (numbers of
numpy become Python's), or refused. Where all are of usual types, what is to be looked at is known
from their types: whether integers are of 64 bits, and what is in lists.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.plain import END, LEAST, brief, is_in_range, plain_number

F = TypeVar("F", bound=Callable[..., Any])

_REFUSED: Any = object()
_NUMBERS = frozenset((int,))

#: The most arguments of a call whose types are remembered; longer calls are always looked at.
_MOST = 8
_UNKNOWN: dict[Any, Any] = {}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of arguments.

    Attributes:
        words: what it is, for messages.
        usual: types that are taken at once; of integers, those of 64 bits.
        take: returns what is made of an argument of any type, or `_REFUSED`.
    """

    words: str
    usual: frozenset[type]
    take: Callable[[Any], Any]


# -- numbers -------------------------------------------------------------------------------------


def _integer(x: Any) -> Any:
    x = plain_number(x)
    is_integer = isinstance(x, int | Extent) and not isinstance(x, bool)
    return x if is_integer and is_in_range(x) else _REFUSED


def _number(x: Any) -> Any:
    x = plain_number(x)
    return x if isinstance(x, bool | int | float | Extent) and is_in_range(x) else _REFUSED


def _setting(x: Any) -> Any:
    """Take a number as an attribute: bools become ints, since False means no attribute."""
    x = _number(x)
    return int(x) if isinstance(x, bool) else x


def _flag(x: Any) -> Any:
    x = plain_number(x)
    return x if isinstance(x, bool) else _REFUSED


def _several(one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what takes a list or tuple of items as `one` takes them, or a single item."""

    def take(x: Any) -> Any:
        if type(x) in (list, tuple) and _NUMBERS.issuperset(map(type, x)):
            is_usual = not x or (min(x) >= LEAST and max(x) < END)
            return x if is_usual and one is _integer else _all(one, x)
        if not isinstance(x, Sequence | torch.Tensor | Handle) and hasattr(x, "tolist"):
            x = x.tolist()  # an array of numpy
        return _all(one, x) if _is_several(x) else one(x)

    return take


def _is_several(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str | bytes)


def _all(one: Callable[[Any], Any], items: Iterable[Any]) -> Any:
    """Take each item by `one`; a list or tuple whose items all stay is returned itself."""
    found = tuple(map(one, items))
    if type(items) in (list, tuple) and all(map(operator.is_, found, items)):
        return items
    return _REFUSED if any(x is _REFUSED for x in found) else found


# -- values --------------------------------------------------------------------------------------


def _handle(x: Any) -> Any:
    return x if isinstance(x, Handle) else _REFUSED


def _tensors(x: Any) -> Any:
    if isinstance(x, str | bytes | Mapping | Handle):
        return _REFUSED
    try:
        return _all(_handle, x)
    except TypeError:  # it cannot be iterated
        return _REFUSED


def _or(*takes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def take(x: Any) -> Any:
        found = (t(x) for t in takes)
        return next((y for y in found if y is not _REFUSED), _REFUSED)

    return take


def _is(*kinds: type) -> Callable[[Any], Any]:
    return lambda x: x if isinstance(x, kinds) else _REFUSED


_none = _is(type(None))

# -- the table -----------------------------------------------------------------------------------


def _kind(words: str, take: Callable[[Any], Any], *usual: type) -> Kind:
    return Kind(words, frozenset(usual), take)


_N = type(None)
_TENSOR = _kind("a value of the fusion", _handle, Handle)
_TENSOR_OR_NONE = _kind("a value of the fusion, or None", _or(_none, _handle), Handle, _N)
_VALUE = _kind(
    "a value of the fusion, or a number", _or(_handle, _number), Handle, int, float, bool
)
_VALUE_OR_NONE = _kind(
    "a value of the fusion, a number, or None",
    _or(_none, _handle, _setting),
    Handle,
    int,
    float,
    _N,
)
_TENSORS = _kind("a list of values of the fusion", _tensors)
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
_LIST = _kind("a list of integers", lambda x: _several(_integer)(x) if _is_several(x) else _REFUSED)
#: `dim=()` is all dims for some functions of torch, and none for others.
_DIM = _kind(
    "an integer, a list of some integers, or None (dims=() stands for no dims)",
    _or(_none, lambda x: _REFUSED if isinstance(x, list | tuple) and not x else _INTEGERS.take(x)),
    int,
    _N,
)
_FLAG = _kind("True or False", _flag, bool)
_FLAG_OR_NONE = _kind("True, False or None", _or(_none, _flag), bool, _N)
_DTYPE = _kind("a torch dtype", _is(torch.dtype), torch.dtype)
_DTYPE_OR_NONE = _kind("a torch dtype, or None", _is(torch.dtype, _N), torch.dtype, _N)
_TEXT = _kind("a string", _is(str), str)
_TEXT_OR_NONE = _kind("a string, or None", _is(str, _N), str, _N)

#: Of any type: the code that uses the argument checks it.
_ANYTHING = _kind("anything", lambda x: x, Handle, int, float, bool, list, tuple, dict, _N)

#: parameter -> its kind, in every operation that has it.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        ("x", "condition", "mask", "tensor", "tensor1", "tensor2", "mat1", "mat2", "mat", "vec",
         "vec2", "batch1", "batch2", "indices", "query", "key", "target", "end", "test_elements",
         "values", "boundaries", "src", "source", "x1", "x2", "w_ih", "w_hh", "in_proj_weight",
         "out_proj_weight", "anchor", "positive", "negative", "grid", "offs"),
        _TENSOR,
    ),
    **dict.fromkeys(
        ("weight", "bias", "attn_mask", "prepend", "append", "running_mean", "running_var", "b_ih",
         "b_hh", "per_sample_weights", "in_proj_bias", "bias_k", "bias_v", "out_proj_bias",
         "key_padding_mask", "pos_weight"),
        _TENSOR_OR_NONE,
    ),
    **dict.fromkeys(("other", "fill_value", "alpha", "beta", "value"), _VALUE),
    **dict.fromkeys(("min", "max"), _VALUE_OR_NONE),
    "tensors": _TENSORS,
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
                     "count_include_pad", "antialias", "upper"), _FLAG),
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
    "seed": _VALUE,
    **dict.fromkeys(("mesh", "layout", "data", "hx"), _ANYTHING),
}  # fmt: skip

#: (operation, parameter) -> its kind, where it is not that of all others.
_SPECIAL: dict[tuple[str, str], Kind] = {
    **{(name, "x"): _VALUE for name in ("add", "sub", "rsub", "div", "where")},
    ("cast", "dtype"): _DTYPE,
    **{("movedim", key): _INTEGERS for key in ("source", "destination")},
    **{
        (name, key): _TENSOR
        for name in ("index_select", "gather", "scatter", "scatter_add", "scatter_reduce",
                     "index_add", "index_copy", "index_fill", "take")
        for key in ("index", "src", "source")
    },
    ("scatter", "src"): _VALUE,
    **{("index_put", key): kind for key, kind in (("indices", _TENSORS), ("values", _TENSOR))},
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
    ("lerp", "weight"): _VALUE,
    ("linear", "weight"): _TENSOR,
    ("grouped_mm", "weight"): _TENSOR,
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
        lambda x: _several(_or(_flag, _integer))(x) if _is_several(x) else _REFUSED,
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


# -- operations that look at their arguments -----------------------------------------------------


def taking_kinds(function: F, elementwise: bool = False) -> F:
    """Return the function with its arguments checked: those of other kinds are refused.

    Args:
        function: an operation.
        elementwise: its operands may be numbers.
    """
    name, signature = function.__name__, inspect.signature(function)
    kinds = {
        key: _VALUE if elementwise and key in ("x", "other") else kind_of(name, key)
        for key in signature.parameters
    }
    known: dict[Any, Any] = {}

    def looking(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        bound = taken(name, signature, kinds, args, kwargs)
        learn(known, signature, kinds, args, kwargs)
        return function(*bound.args, **bound.kwargs)

    @functools.wraps(function)
    def operation(*args: Any, **kwargs: Any) -> Any:
        at, lists = known, None
        try:
            for x in args:
                kind = type(x)
                at = at[kind]
                if kind is int and not LEAST <= x < END:
                    at = _UNKNOWN
            if kwargs:
                for key in kwargs:
                    x = kwargs[key]
                    kind = type(x)
                    at = at[key][kind]
                    if kind is int and not LEAST <= x < END:
                        at = _UNKNOWN
            lists = at[None]
        except KeyError:
            pass
        if lists is None:
            return looking(args, kwargs)
        for n, take in lists:
            x = kwargs[n] if type(n) is str else args[n]
            if take(x) is not x:
                return looking(args, kwargs)
        return function(*args, **kwargs) if kwargs else function(*args)

    return operation  # type: ignore[return-value]


def learn(
    known: dict[Any, Any],
    signature: inspect.Signature,
    kinds: Mapping[str, Kind],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Enter the types of a call, where usual arguments of these types are taken as they are.

    Args:
        known: a tree: from each argument to the next by its type; where it is named, by its name
            and then its type. Behind the last, under None, the places of lists, each with what
            takes it.
        signature, kinds: of the operation.
        args, kwargs: of the call.
    """
    if len(args) > _MOST:
        return
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    found: dict[Any, Kind] = {}
    for name, at in signature.bind(*range(len(args)), **{k: k for k in kwargs}).arguments.items():
        found |= dict.fromkeys(at if isinstance(at, tuple) else (at,), kinds[name])
    lists = [n for n, x in given.items() if type(x) in (list, tuple)]
    if not all(n in lists or type(x) in found[n].usual for n, x in given.items()):
        return
    for n, x in given.items():
        step = known.setdefault(n, {}) if isinstance(n, str) else known
        known = step.setdefault(type(x), {})
    known[None] = tuple((n, found[n].take) for n in lists)


def taken(
    name: str,
    signature: inspect.Signature,
    kinds: Mapping[str, Kind],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> inspect.BoundArguments:
    """Return a call's arguments, each as its kind takes it.

    Raises:
        DefinitionError: other arguments than the operation has, or of other kinds.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DefinitionError(
            f"{name}: {error}",
            because=f"it is {name}({', '.join(signature.parameters)})",
            hint="docs/operations.md lists operations and their arguments",
        ) from None
    for key, x in bound.arguments.items():
        is_more = signature.parameters[key].kind is inspect.Parameter.VAR_POSITIONAL
        kind = kinds[key]
        found = _all(kind.take, x) if is_more else kind.take(x)
        if found is _REFUSED:
            raise refused(name, key, x, kind)
        bound.arguments[key] = found
    return bound


def refused(name: str, key: str, x: Any, kind: Kind) -> DefinitionError:
    """Return the error for an argument of another kind."""
    if "value" in kind.words and not isinstance(x, Handle):
        return no_value(name, x)
    if isinstance(x, Handle) and kind is _TENSORS:
        return DefinitionError(
            f"{name}: {key} is %{x.name}, one value",
            because=f"{key} is {kind.words}",
            hint="[x], or x.unbind(0) for the places of its first dim",
        )
    if isinstance(x, Handle):
        return DefinitionError(
            f"{name}: {key} is %{x.name}, a value of the fusion",
            because=f"{key} is fixed when the fusion is defined",
            hint=f"pass {kind.words}",
        )
    return DefinitionError(
        f"{name}: {key} = {brief(x)}",
        because=f"{key} is {kind.words}" + (" of 64 bits" if type(x) is int else ""),
        hint="docs/operations.md lists operations and their arguments",
    )


def no_value(name: str, x: Any, where: Sequence[str] = ()) -> DefinitionError:
    """Return the error for what is no operand."""
    if isinstance(x, int):
        return DefinitionError(
            f"{name}: {brief(x)} is no operand",
            where=where,
            because="operands are values of the definition, and numbers of at most 64 bits where "
            "a number may stand",
            hint="fd.define_scalar, or fd.ops.full for a tensor",
        )
    return DefinitionError(
        f"{name}: {type(x).__name__} is no operand",
        where=where,
        because="operands are values of the definition and numbers",
        hint="make it an input with fd.define_tensor",
    )
