"""Shapes of results whose operands have symbolic extents: the meta device knows numbers only.

One function per host instruction, over extents that may be symbolic. Where torch needs two extents
to be equal, or one to be 1, the comparison is recorded as a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mdfuse.extents.extent import example, larger, pinned, smaller
from mdfuse.ir.dims import reduced_dims

Shape = tuple[int, ...]
#: Extents of the operands; None for what is no tensor.
Shapes = Sequence[Shape | None]
Attrs = Mapping[str, Any]


def _present(shapes: Shapes) -> list[Shape]:
    return [s for s in shapes if s is not None]


def _broadcast(shapes: Shapes, attrs: Attrs) -> Shape:
    """Dims align from the right; each is equal everywhere or 1."""
    found = _present(shapes)
    result = found[0]
    for shape in found[1:]:
        longer, shorter = (result, shape) if len(result) >= len(shape) else (shape, result)
        skip = len(longer) - len(shorter)
        joined = (_joined(a, b) for a, b in zip(longer[skip:], shorter, strict=True))
        result = (*longer[:skip], *joined)
    return result


def _joined(a: int, b: int) -> int:
    """The extent of two dims that are aligned; torch has seen that they fit."""
    return b if a == 1 else a if b == 1 else _equal(a, b)


def _equal(a: int, b: int) -> int:
    """One of two extents that torch found equal; the one that is a number, if one is."""
    if a != b:
        raise ValueError(f"{a} is not {b}")
    return a if type(a) is int else b


def _first(shapes: Shapes, attrs: Attrs) -> Shape:
    return _present(shapes)[0]


def _permute(shapes: Shapes, attrs: Attrs) -> Shape:
    (shape,) = _present(shapes)
    return tuple(shape[d] for d in attrs["dims"])


def _reshape(shapes: Shapes, attrs: Attrs) -> Shape:
    (shape,), to = _present(shapes), tuple(attrs["shape"])
    before = after = 1
    for n in shape:
        before *= n
    for n in to:
        after *= n
    _equal(before, after)
    return to


def _expand(shapes: Shapes, attrs: Attrs) -> Shape:
    (shape,), to = _present(shapes), tuple(attrs["shape"])
    kept = to[len(to) - len(shape) :]
    joined = (b if a == 1 else _equal(a, b) for a, b in zip(shape, kept, strict=True))
    return (*to[: len(to) - len(shape)], *joined)


def _unsqueeze(shapes: Shapes, attrs: Attrs) -> Shape:
    (shape,) = _present(shapes)
    rank = len(shape) + len(attrs["dims"])
    made = list(shape)
    for d in sorted(d % rank for d in attrs["dims"]):
        made.insert(d, 1)
    return tuple(made)


def _squeeze(shapes: Shapes, attrs: Attrs) -> Shape:
    (shape,) = _present(shapes)
    gone = {d % len(shape) for d in attrs["dims"]} if shape else set()
    return tuple(n for d, n in enumerate(shape) if d not in gone or n != 1)


def _window(shapes: Shapes, attrs: Attrs) -> Shape:
    (shape,) = _present(shapes)
    taken = zip(shape, attrs["starts"], attrs["ends"], attrs["steps"], strict=True)
    return tuple(
        -(-larger(smaller(end, n) - smaller(start, n), 0) // step) for n, start, end, step in taken
    )


def _reduce(shapes: Shapes, attrs: Attrs) -> Shape:
    (shape,) = _present(shapes)
    dims, keeps = reduced_dims(attrs.get("dims"), len(shape)), attrs.get("keepdim", False)
    kept = ((d, n) for d, n in enumerate(shape) if keeps or d not in dims)
    return tuple(1 if d in dims else n for d, n in kept)


def _matmul(shapes: Shapes, attrs: Attrs) -> Shape:
    a, b = _present(shapes)
    _equal(a[-1], b[-2 if len(b) > 1 else 0])
    return (*_broadcast((a[:-2], b[:-2]), attrs), *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def _linear(shapes: Shapes, attrs: Attrs) -> Shape:
    x, w, *bias = _present(shapes)
    _equal(x[-1], w[-1])
    for b in bias:
        _broadcast((b, w[:-1]), attrs)
    return (*x[:-1], *w[:-1])


def _embedding(shapes: Shapes, attrs: Attrs) -> Shape:
    indices, table = _present(shapes)
    return (*indices, table[1])


def _layer_norm(shapes: Shapes, attrs: Attrs) -> Shape:
    x, inner = _present(shapes)[0], tuple(attrs["normalized_shape"])
    for shape in (x[len(x) - len(inner) :], *_present(shapes[1:])):
        for a, b in zip(shape, inner, strict=True):
            _equal(a, b)
    return x


def _attention(shapes: Shapes, attrs: Attrs) -> Shape:
    q, k, v, *mask = _present(shapes)
    _equal(q[-1], k[-1])
    _equal(k[-2], v[-2])
    lead = _broadcast((q[:-2], k[:-2], v[:-2]), attrs)
    for m in mask:
        _broadcast((m, (*lead, q[-2], k[-2])), attrs)
    return (*lead, q[-2], v[-1])


def _cat(shapes: Shapes, attrs: Attrs) -> Shape:
    first, *others = _present(shapes)
    at = attrs["dim"] % len(first)
    result = list(first)
    for shape in others:
        for d, n in enumerate(shape):
            result[d] = result[d] + n if d == at else _equal(result[d], n)
    return tuple(result)


def _created(shapes: Shapes, attrs: Attrs) -> Shape:
    return tuple(attrs["shape"])


#: host instruction -> the shape of its result.
_RULES: dict[str, Callable[[Shapes, Attrs], Shape]] = {
    "set": _first,
    "permute": _permute,
    "reshape": _reshape,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "slice": _window,
    "window": _window,
    "unary": _first,
    "binary": _broadcast,
    "where": _broadcast,
    "reduce": _reduce,
    "matmul": _matmul,
    "linear": _linear,
    "embedding": _embedding,
    "softmax": _first,
    "log_softmax": _first,
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


def symbolic_shape(host: str, shapes: Shapes, attrs: Attrs, numbers: Shape) -> Shape:
    """The shape of a result.

    Args:
        host: the host instruction of the op.
        shapes: of the operands.
        attrs: of the op.
        numbers: what torch says for the examples. Where no rule gives the same, the extents of the
            operands are those of the examples from then on.
    """
    rule = _RULES.get(host)
    try:
        result = rule(shapes, attrs) if rule is not None else None
    except (ValueError, IndexError, KeyError):
        result = None
    if result is None or tuple(map(example, result)) != numbers:
        for shape in _present(shapes):
            for n in shape:
                pinned(n)
        return numbers
    for shape in (*_present(shapes), result):
        _assume_regular(shape)
    return result


def _assume_regular(shape: Shape) -> None:
    """Dims of one element lie anyhow in memory, empty tensors are refused by some ops."""
    for n in shape:
        if type(n) is not int and not (len(shape) > 1 and n > 1):
            bool(n > 0)
