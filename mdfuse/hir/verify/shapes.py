"""What the rows of the op table make, computed without torch's meta device.

Inference on the meta device costs up to milliseconds per op, more than lowering it. Here a shape is
computed in plain integers, and a dtype by one call on a few elements per combination of dtypes.
None stands for "not so simple": then the meta device is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mdfuse.ir.dims import reduced_dims
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.boxes import box_shape

Shape = tuple[int, ...]
#: Extents of the operands: () for numbers, None for what is absent.
Shapes = Sequence[Shape | None]
Attrs = Mapping[str, Any]
#: An operand: (dtype, number of dims) of a tensor, or the type of a number.
Sample = tuple[torch.dtype, int] | type


def quick_shape(fn: str, shapes: Shapes, attrs: Attrs) -> Shape | None:
    """The shape of a row's result, where the operands fit and it is simple to say."""
    rule = _RULES.get(TABLE[fn].host)
    try:
        return rule(shapes, attrs) if rule is not None else None
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def _present(shapes: Shapes) -> list[Shape]:
    return [s for s in shapes if s is not None]


def _broadcast(shapes: Shapes, attrs: Attrs) -> Shape | None:
    """Dims align from the right; each is equal everywhere or 1."""
    found = _present(shapes)
    if found.count(found[0]) == len(found):
        return found[0]
    result: list[int] = []
    for at in range(-max(map(len, found)), 0):
        extents = {s[at] for s in found if len(s) >= -at} - {1}
        if len(extents) > 1:
            return None
        result.append(extents.pop() if extents else 1)
    return tuple(result)


def _first(shapes: Shapes, attrs: Attrs) -> Shape | None:
    return shapes[0]


def _permute(shapes: Shapes, attrs: Attrs) -> Shape | None:
    (shape,) = _present(shapes)
    return tuple(shape[d] for d in attrs["dims"]) if len(attrs["dims"]) == len(shape) else None


def _reshape(shapes: Shapes, attrs: Attrs) -> Shape | None:
    (shape,), to = _present(shapes), tuple(attrs["shape"])
    return to if math.prod(to) == math.prod(shape) and min(to, default=0) >= 0 else None


def _expand(shapes: Shapes, attrs: Attrs) -> Shape | None:
    (shape,), to = _present(shapes), tuple(attrs["shape"])
    tail = to[len(to) - len(shape) :]
    fits = len(to) >= len(shape) and all(a in (1, b) for a, b in zip(shape, tail, strict=True))
    return to if fits and min(to, default=0) >= 0 else None


def _unsqueeze(shapes: Shapes, attrs: Attrs) -> Shape | None:
    (shape,) = _present(shapes)
    rank = len(shape) + len(attrs["dims"])
    made = list(shape)
    for d in sorted(d % rank for d in attrs["dims"]):
        made.insert(d, 1)
    return tuple(made)


def _squeeze(shapes: Shapes, attrs: Attrs) -> Shape | None:
    (shape,) = _present(shapes)
    gone = {d % len(shape) for d in attrs["dims"]} if shape else set()
    return tuple(n for d, n in enumerate(shape) if d not in gone or n != 1)


def _window(shapes: Shapes, attrs: Attrs) -> Shape | None:
    (shape,) = _present(shapes)
    taken = map(slice, attrs["starts"], attrs["ends"], attrs["steps"])
    return tuple(len(range(n)[s]) for n, s in zip(shape, taken, strict=True))


def _window_of_parts(shapes: Shapes, attrs: Attrs) -> Shape | None:
    return _window(shapes, attrs) if attrs.get("places") is None else tuple(attrs["shape"])


def _reduce(shapes: Shapes, attrs: Attrs) -> Shape | None:
    (shape,) = _present(shapes)
    dims = reduced_dims(attrs.get("dims"), len(shape))
    if any(shape[d] == 0 for d in dims):
        return None
    keeps = attrs.get("keepdim", False)
    kept = ((d, n) for d, n in enumerate(shape) if keeps or d not in dims)
    return tuple(1 if d in dims else n for d, n in kept)


def _matmul(shapes: Shapes, attrs: Attrs) -> Shape | None:
    a, b = _present(shapes)
    if len(a) < 1 or len(b) < 1 or a[-1] != b[-2 if len(b) > 1 else 0]:
        return None
    batch = _broadcast((a[:-2], b[:-2]), attrs)
    return None if batch is None else (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def _linear(shapes: Shapes, attrs: Attrs) -> Shape | None:
    x, w, bias = (*shapes, None)[:3]
    if x is None or w is None or not x or not w or x[-1] != w[-1] or len(w) > 2:
        return None
    result = (*x[:-1], *w[:-1])
    return result if bias is None or bias == w[:-1] else None


def _embedding(shapes: Shapes, attrs: Attrs) -> Shape | None:
    indices, table = _present(shapes)
    return (*indices, table[1]) if len(table) == 2 else None


def _softmax(shapes: Shapes, attrs: Attrs) -> Shape | None:
    (shape,) = _present(shapes)
    return shape if -len(shape) <= attrs["dim"] < len(shape) else None


def _layer_norm(shapes: Shapes, attrs: Attrs) -> Shape | None:
    x, inner = shapes[0], tuple(attrs["normalized_shape"])
    fits = all(s == inner for s in _present(shapes[1:]))
    return x if x is not None and fits and x[len(x) - len(inner) :] == inner else None


def _attention(shapes: Shapes, attrs: Attrs) -> Shape | None:
    q, k, v, mask = (*shapes, None)[:4]
    if q is None or k is None or v is None or not q[:-2] == k[:-2] == v[:-2]:
        return None
    if q[-1] != k[-1] or k[-2] != v[-2]:
        return None
    scores = (*q[:-1], k[-2])
    if mask is not None and _broadcast((mask, scores), attrs) != scores:
        return None
    return (*q[:-1], v[-1])


def _cat(shapes: Shapes, attrs: Attrs) -> Shape | None:
    found = _present(shapes)
    at = attrs["dim"] % len(found[0])
    apart = {(*s[:at], *s[at + 1 :]) for s in found}
    if len(apart) > 1 or len({len(s) for s in found}) > 1:
        return None
    return (*found[0][:at], sum(s[at] for s in found), *found[0][at + 1 :])


def _created(shapes: Shapes, attrs: Attrs) -> Shape | None:
    return box_shape(attrs["box"]) if attrs.get("box") is not None else tuple(attrs["shape"])


#: host instruction -> the shape of its result.
_RULES: dict[str, Callable[[Shapes, Attrs], Shape | None]] = {
    "set": _first,
    "permute": _permute,
    "reshape": _reshape,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "slice": _window,
    "window": _window_of_parts,
    "unary": _first,
    "binary": _broadcast,
    "where": _broadcast,
    "reduce": _reduce,
    "matmul": _matmul,
    "linear": _linear,
    "embedding": _embedding,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "layer_norm": _layer_norm,
    "attention": _attention,
    "cat": _cat,
    "uniform": _created,
    "full": _created,
    "arange": _created,
    "constant": _created,
    "full_like": _first,
    "dropout": _first,
}

# -- dtypes --------------------------------------------------------------------------------------

#: Rows that keep the dtype where all operands have one floating dtype; a first call of some of them
#: takes milliseconds.
_KEEP_FLOATS = frozenset(
    {"matmul", "linear", "layer_norm", "scaled_dot_product_attention", "softmax", "log_softmax"}
    | {"gelu", "relu", "silu", "elu", "softplus", "leaky_relu"}
)
#: Attributes that are about extents, which a few elements do not have.
_ABOUT_EXTENTS = ("shape", "box", "part")


@lru_cache(maxsize=4096)
def quick_dtype(
    fn: str, samples: tuple[Sample, ...], attrs: tuple[tuple[str, Any], ...]
) -> torch.dtype | None:
    """The dtype of a row's result; None where torch does not take these dtypes."""
    row = TABLE[fn]
    if row.is_view and isinstance(samples[0], tuple):
        return samples[0][0]
    dtypes = {s[0] for s in samples if isinstance(s, tuple)}
    if fn in _KEEP_FLOATS and len(dtypes) == 1 and next(iter(dtypes)).is_floating_point:
        return dtypes.pop()
    kwargs = {k: v for k, v in attrs if k not in _ABOUT_EXTENTS}
    if row.is_creation:
        return kwargs["dtype"]  # type: ignore[no-any-return]
    if fn == "layer_norm":
        kwargs["normalized_shape"] = (2,) * len(kwargs["normalized_shape"])
    try:
        made = row.call(*map(_few_elements, samples), **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError):
        return None  # AttributeError: a number where only a tensor will do
    return made.dtype if isinstance(made, Tensor) else None


def _few_elements(sample: Sample) -> Any:
    """Ones, which may be divided by and are indices; two along each dim, so that shapes fit."""
    if isinstance(sample, tuple):
        dtype, ndim = sample
        return torch.ones((2,) * ndim, dtype=dtype)
    return number(sample)


def number(kind: type) -> Any:
    """A number that stands for all of its type; an index expression is an integer."""
    if kind is type(None):
        return None
    return kind(1) if kind in (bool, float) else 1
