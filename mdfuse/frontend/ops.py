"""The operations of `fd.ops` and `mf.ops`, with the arguments that a torch user expects.

Every function takes handles (and numbers where torch takes numbers) and records one expression, or
a few where an operation is made of others. The result is always a value of its own, so that placing
it with `.on()` never places an operand.
"""

from __future__ import annotations

import builtins
import difflib
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents import Extent, are_same, is_symbolic, larger, smaller
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.stride_order import dims_of
from mdfuse.ir import ops as table

if TYPE_CHECKING:
    from mdfuse.frontend.definition import FusionDefinition

#: The definition whose `with` block runs; operations without operands go there.
current: ContextVar[FusionDefinition | None] = ContextVar("mdfuse.definition", default=None)

Dims = int | Sequence[int] | None


def _definition(*operands: Any) -> FusionDefinition:
    found = {id(x.definition): x.definition for x in operands if isinstance(x, Handle)}
    if len(found) > 1:
        names = ", ".join(f"@{d.name}" for d in found.values())
        raise DefinitionError(
            f"operands of different definitions: {names}",
            because="a fusion computes with its own values only",
            hint="define the value in this fusion as well, or make it an input of each",
        )
    definition = next(iter(found.values()), None) or current.get()
    if definition is None:
        raise DefinitionError(
            "an operation without operands needs a definition",
            hint="call it inside `with FusionDefinition() as fd:` or a traced function",
        )
    return definition


def _record(op: str, *operands: Any, **attrs: Any) -> Handle:
    return _definition(*operands).record(op, operands, **attrs)


def _dims(x: Handle, dims: Dims) -> tuple[int, ...] | None:
    """The dims as a tuple, each checked against x; None stays."""
    if dims is None:
        return None
    chosen = tuple(dims) if isinstance(dims, Sequence) else (dims,)
    rank = builtins.max(x.ndim, 1)  # torch lets a scalar have dims 0 and -1
    if not builtins.all(isinstance(d, int) and -rank <= d < rank for d in chosen):
        raise _out_of_range(x, chosen)
    if len({d % rank for d in chosen}) < len(chosen):
        raise DefinitionError(
            f"dims {chosen} of %{x.name}: {x.value.type_text()}",
            because="a dim is named once",
            hint="leave the repeated ones out",
        )
    return chosen if x.ndim else ()


# -- views and copies ----------------------------------------------------------------------------


def set(x: Handle) -> Handle:
    """The value itself, to be placed elsewhere: `set(x).on(mesh, {...})` is a reshard."""
    return _record("set", x)


def permute(x: Handle, dims: Sequence[int]) -> Handle:
    """Dims in another order: result dim i is dim `dims[i]` of x."""
    return _record("permute", x, dims=tuple(dims))


def transpose(x: Handle, dim0: int = -2, dim1: int = -1) -> Handle:
    """Two dims swapped."""
    dims = list(range(x.ndim))
    try:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    except IndexError:
        raise _out_of_range(x, (dim0, dim1)) from None
    return permute(x, dims)


def reshape(x: Handle, shape: int | Sequence[int]) -> Handle:
    """The same elements in row-major order in another shape; one extent may be -1."""
    shape = (shape,) if isinstance(shape, int | Extent) else tuple(shape)
    if shape.count(-1) == 1:
        known = -math.prod(shape)
        missing = x.value.size // known if known else 0
        shape = tuple(missing if n == -1 else n for n in shape)
    return _record("reshape", x, shape=shape)


view = reshape


def flatten(x: Handle, start_dim: int = 0, end_dim: int = -1) -> Handle:
    """Dims from start to end (inclusive) as one."""
    for dim in (start_dim, end_dim):
        _dims(x, dim)
    first, last = start_dim % builtins.max(x.ndim, 1), end_dim % builtins.max(x.ndim, 1)
    merged = math.prod(x.shape[first : last + 1])
    return reshape(x, (*x.shape[:first], merged, *x.shape[last + 1 :]))


def expand(x: Handle, shape: Sequence[int]) -> Handle:
    """Dims of extent 1 repeated without copies; -1 keeps an extent; new dims come in front."""
    skip = len(shape) - x.ndim
    kept = tuple(x.shape[d - skip] if n == -1 and d >= skip else n for d, n in enumerate(shape))
    return _record("expand", x, shape=kept)


broadcast_to = expand


def broadcast(x: Handle, dims: Sequence[bool] | Sequence[int]) -> Handle:
    """With a list of bools: a new dim of extent 1 where True. With a shape: `expand`."""
    if builtins.all(isinstance(d, bool) for d in dims):
        if builtins.sum(not d for d in dims) != x.ndim:
            raise DefinitionError(
                f"broadcast(%{x.name}, {list(dims)}) for {x.value.type_text()}",
                because="a new dim stands where True is, the dims of the value where False is",
                hint=f"pass {x.ndim} times False",
            )
        new = tuple(i for i, is_new in enumerate(dims) if is_new)
        return _record("unsqueeze", x, dims=new) if new else set(x)
    return expand(x, dims)


def broadcast_in_dim(x: Handle, shape: Sequence[int], broadcast_dims: Sequence[int]) -> Handle:
    """Dim i of x becomes dim `broadcast_dims[i]` of the result; the others are repeated."""
    new = [d not in builtins.set(broadcast_dims) for d in range(len(shape))]
    return expand(broadcast(x, new), shape)


def unsqueeze(x: Handle, dim: int) -> Handle:
    """A new dim of extent 1."""
    if not -x.ndim - 1 <= dim <= x.ndim:
        raise _out_of_range(x, (dim,))
    return _record("unsqueeze", x, dims=(dim % (x.ndim + 1),))


def squeeze(x: Handle, dims: Dims = None) -> Handle:
    """Without the given dims (all by default) where their extent is 1."""
    chosen = _dims(x, dims)
    return _record("squeeze", x, dims=tuple(range(x.ndim)) if chosen is None else chosen)


def slice(
    x: Handle,
    start_indices: Sequence[int],
    end_indices: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Handle:
    """The window from start to end (exclusive) with steps, one entry per dim."""
    steps = tuple(strides) if strides is not None else (1,) * x.ndim
    if not len(start_indices) == len(end_indices) == len(steps) == x.ndim:
        raise DefinitionError(
            f"slice(%{x.name}, {list(start_indices)}, {list(end_indices)}, {list(steps)})",
            because=f"%{x.name} has {x.ndim} dims, each with one start, end and step",
            hint="or index it: x[2:5, ...]",
        )
    return index(x, tuple(map(builtins.slice, start_indices, end_indices, steps)))


def index(x: Handle, where: Any) -> Handle:
    """`x[where]` with slices, integers, None and `...`."""
    items = list(where) if isinstance(where, tuple) else [where]
    if builtins.sum(i is Ellipsis for i in items) > 1:
        raise DefinitionError(
            f"%{x.name}[{where}]: two `...`",
            because="one stands for all dims that are not indexed",
            hint="write : for a dim that is taken whole",
        )
    used = builtins.sum(i is not None and i is not Ellipsis for i in items)
    if used > x.ndim:
        raise DefinitionError(
            f"%{x.name}[{where}]: {used} indices for {x.value.type_text()}",
            because=f"it has {x.ndim} dims",
            hint="None adds a dim",
        )
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = [builtins.slice(None)] * (x.ndim - used)
    windows: list[tuple[int, int, int]] = []
    gone: list[int] = []
    new: list[int] = []
    for item in items:
        dim = len(windows)
        if item is None:
            new.append(dim - len(gone) + len(new))
            continue
        windows.append(_window(x, item, dim))
        if not isinstance(item, builtins.slice):
            gone.append(dim)
    whole = [(0, n, 1) for n in x.shape]
    is_whole = builtins.all(
        are_same(a, b)
        for w, v in zip(windows, whole, strict=True)
        for a, b in zip(w, v, strict=True)
    )
    if not is_whole:
        starts, ends, steps = zip(*windows, strict=True)
        x = _record("slice", x, starts=starts, ends=ends, steps=steps)
    if gone:
        x = _record("squeeze", x, dims=tuple(gone))
    if new:
        x = _record("unsqueeze", x, dims=tuple(new))
    return set(x) if is_whole and not gone and not new else x


def _window(x: Handle, item: Any, dim: int) -> tuple[int, int, int]:
    extent = x.shape[dim]
    if isinstance(item, builtins.slice):
        start, end, step = _indices(item, extent)
        if step < 1:
            raise DefinitionError(
                f"%{x.name}[{item}]", because="steps are positive, as in torch", hint="x[::2]"
            )
        return start, larger(start, end), step
    if isinstance(item, bool) or not isinstance(item, int | Extent):
        raise DefinitionError(
            f"%{x.name} cannot be indexed with {item!r}",
            because="an index is an integer, a slice, None or `...`",
            hint="to gather rows by a tensor use fd.ops.embedding(indices, table)",
        )
    if not -extent <= item < extent:
        raise DefinitionError(
            f"index {item} is out of range for dim {dim} of %{x.name}: {x.value.type_text()}",
            because=f"its indices go from {-extent} to {extent - 1}",
            hint="slices, unlike indices, may reach beyond the end",
        )
    item = item if item >= 0 else item + extent
    return item, item + 1, 1


def _indices(item: builtins.slice, extent: int) -> tuple[int, int, int]:
    """`slice.indices`, which takes numbers only."""
    if not is_symbolic((extent, item.start, item.stop)):
        return item.indices(extent)

    def place(at: Any, default: int) -> int:
        if at is None:
            return default
        return larger(at + extent, 0) if at < 0 else smaller(at, extent)

    return place(item.start, 0), place(item.stop, extent), 1 if item.step is None else item.step


def cat(tensors: Sequence[Handle], dim: int = 0) -> Handle:
    """Tensors joined along a dim."""
    if not tensors:
        raise DefinitionError("cat of no tensors", hint="pass at least one")
    return _record("cat", *tensors, dim=dim)


def stride_order(x: Handle, order: Sequence[int]) -> Handle:
    """The value in a memory order that is kept: a new value, copied where it lies otherwise.

    Args:
        x: a tensor.
        order: the place of each dim in memory, 0 the fastest.

    Raises:
        DefinitionError: x is a scalar; the order is no permutation of its dims.

    >>> import mdfuse as mf
    >>> with mf.FusionDefinition() as fd:
    ...     x = fd.define_tensor([4, 6])
    ...     y = fd.ops.stride_order(x, (0, 1))  # column-major
    ...     fd.add_output(y)
    >>> mf.reference(fd, [torch.ones(4, 6)])[0].stride()
    (1, 4)
    """
    if not x.value.is_tensor:
        raise DefinitionError(
            f"stride_order={order!r} of %{x.name}, which is a scalar",
            where=x.definition.fusion_where(),
            because="a number has no dims",
            hint="require the order of a tensor",
        )
    where = x.definition.fusion_where()
    dims = dims_of(order, x.ndim, f"%{x.name}: {x.value.type_text()}", where)
    return _record("stride_order", x, order=dims)


def _out_of_range(x: Handle, dims: Sequence[int]) -> DefinitionError:
    return DefinitionError(
        f"dims {tuple(dims)} of %{x.name}: {x.value.type_text()}",
        because=f"its dims go from {-x.ndim} to {x.ndim - 1}" if x.ndim else "it has no dims",
        hint="a negative dim counts from the last one",
    )


# -- pointwise -----------------------------------------------------------------------------------


def cast(x: Handle, dtype: torch.dtype) -> Handle:
    """Another dtype."""
    return _record("cast", x, dtype=dtype)


def where(condition: Handle, a: Any, b: Any) -> Handle:
    """a where the condition holds, else b."""
    return _record("where", condition, a, b)


def gelu(x: Handle, approximate: str = "none") -> Handle:
    """Gaussian error linear unit; `approximate` "none" or "tanh"."""
    return _record("gelu", x, approximate=approximate)


def clamp(x: Handle, min: Any = None, max: Any = None) -> Handle:
    """Values limited to [min, max]."""
    return _record("clamp", x, min=min, max=max)


def leaky_relu(x: Handle, negative_slope: float = 0.01) -> Handle:
    """x where positive, else a fraction of it."""
    return _record("leaky_relu", x, negative_slope=negative_slope)


def _unary(name: str) -> Callable[[Any], Handle]:
    def function(x: Any) -> Handle:
        return _record(name, x)

    function.__name__, function.__doc__ = name, f"Elementwise `torch.{name}`."
    return function


def _binary(name: str) -> Callable[[Any, Any], Handle]:
    def function(a: Any, b: Any) -> Handle:
        return _record(name, a, b)

    function.__name__, function.__doc__ = name, f"Elementwise `torch.{name}`, broadcasting."
    return function


# -- reductions ----------------------------------------------------------------------------------


def sum(
    x: Handle, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Handle:
    """Sum over dims (all by default)."""
    return _record("sum", x, dims=_dims(x, dims), keepdim=keepdim, dtype=dtype)


def prod(
    x: Handle, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Handle:
    """Product over dims (all by default)."""
    return _record("prod", x, dims=_dims(x, dims), keepdim=keepdim, dtype=dtype)


def _reduction(name: str) -> Callable[..., Handle]:
    def function(x: Handle, dims: Dims = None, keepdim: bool = False) -> Handle:
        return _record(name, x, dims=_dims(x, dims), keepdim=keepdim)

    function.__name__, function.__doc__ = name, f"{name} over dims (all by default)."
    return function


# -- contractions and composite operations -------------------------------------------------------


def matmul(a: Handle, b: Handle) -> Handle:
    """`torch.matmul`: the last dim of a with the second to last of b, batch dims broadcast."""
    return _record("matmul", a, b)


def linear(x: Handle, weight: Handle, bias: Handle | None = None) -> Handle:
    """x[…,k] @ weight[n,k].T + bias[n]."""
    return _record("linear", x, weight, *(() if bias is None else (bias,)))


def embedding(indices: Handle, weight: Handle) -> Handle:
    """Rows of weight[v,d] at indices[…]. Indices are not checked against v."""
    return _record("embedding", indices, weight)


def softmax(x: Handle, dim: int = -1) -> Handle:
    """Softmax along a dim."""
    _dims(x, dim)
    return _record("softmax", x, dim=dim)


def log_softmax(x: Handle, dim: int = -1) -> Handle:
    """Logarithm of the softmax along a dim."""
    _dims(x, dim)
    return _record("log_softmax", x, dim=dim)


def layer_norm(
    x: Handle,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Handle | None = None,
    bias: Handle | None = None,
    eps: float = 1e-5,
) -> Handle:
    """Layer normalisation over the last dims (the last one by default)."""
    shape = normalized_shape if normalized_shape is not None else x.shape[-1:]
    shape = (shape,) if isinstance(shape, int | Extent) else tuple(shape)
    return _record("layer_norm", x, weight, bias, normalized_shape=shape, eps=eps)


def scaled_dot_product_attention(
    q: Handle,
    k: Handle,
    v: Handle,
    attn_mask: Handle | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Handle:
    """softmax(q k^T * scale + mask) v for q[…,l,e], k[…,s,e], v[…,s,f]."""
    if dropout_p:
        raise DefinitionError(
            f"dropout_p={dropout_p}", hint="write softmax, dropout and matmul as three operations"
        )
    return _record(
        "scaled_dot_product_attention", q, k, v, attn_mask, is_causal=is_causal, scale=scale
    )


def uniform(
    shape: Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: Any = 0,
) -> Handle:
    """Uniform random numbers in [low, high) that depend on seed and global index, on no mesh.

    Args:
        shape: global shape.
        low: lower bound.
        high: upper bound.
        dtype: a floating dtype.
        seed: an integer, or a scalar input for new numbers in each run.
    """
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise DefinitionError(
            f"uniform of {dtype}",
            because="f64, f32, f16 and bf16 are drawn",
            hint="draw torch.float32 and cast it",
        )
    _check_seed(seed)
    definition = _definition(seed)
    attrs = {"shape": tuple(shape), "dtype": dtype, "low": low, "high": high}
    return definition.record("uniform", (seed,), **attrs, stream=definition.next_stream())


def dropout(x: Handle, p: float = 0.5, seed: Any = 0, training: bool = True) -> Handle:
    """Each element zero with probability p, the others times 1 / (1 - p); the same on any mesh.

    Args:
        x: a floating tensor.
        p: probability in [0, 1].
        seed: an integer, or a scalar input for a new mask in each run.
        training: without it x itself.
    """
    if not 0.0 <= p <= 1.0:
        raise DefinitionError(
            f"dropout with p={p}", because="p is a probability", hint="a number from 0 to 1"
        )
    _check_seed(seed)
    if not training or p == 0.0:
        return set(x)
    return _record("dropout", x, seed, p=p, stream=_definition(x).next_stream())


def _check_seed(seed: Any) -> None:
    is_number = isinstance(seed, int)
    if isinstance(seed, Handle):
        is_number = not seed.value.is_tensor and not seed.dtype.is_floating_point
    if not is_number:
        raise DefinitionError(
            f"seed={seed!r}",
            because="a seed is an integer, or an integer scalar",
            hint="define_scalar(dtype=int) makes it an input of each run",
        )


_UNARY = (*table.UNARY, "relu", "silu", "elu", "softplus")
_BINARY = tuple(name for name, row in table.TABLE.items() if row.host == "binary")
_REDUCTIONS = ("max", "min", "mean", "any", "all")
_SPELLED: tuple[Callable[..., Handle], ...] = (
    set, permute, transpose, reshape, flatten, expand, broadcast, broadcast_in_dim, unsqueeze,
    squeeze, slice, cat, stride_order, cast, where, gelu, clamp, leaky_relu, sum, prod, matmul,
    linear, embedding, softmax, log_softmax, layer_norm, scaled_dot_product_attention, uniform,
    dropout,
)  # fmt: skip

#: Every operation by name.
BY_NAME: dict[str, Callable[..., Handle]] = {
    **{name: _unary(name) for name in _UNARY},
    **{name: _binary(name) for name in _BINARY},
    **{name: _reduction(name) for name in _REDUCTIONS},
    **{f.__name__: f for f in _SPELLED},
}
BY_NAME |= {"view": reshape, "broadcast_to": expand, "mod": BY_NAME["remainder"]}
globals().update(BY_NAME)


class UnknownOperation(DefinitionError, AttributeError):
    """A name that is no operation."""


def __getattr__(name: str) -> Callable[..., Handle]:
    close = difflib.get_close_matches(name, BY_NAME)
    raise UnknownOperation(
        f"there is no operation {name!r}",
        hint=" or ".join(close) or "one of " + ", ".join(sorted(BY_NAME)),
    )
