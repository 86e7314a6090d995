"""Shapes of results: one rule per row of the op table, over extents that may be symbolic.

A rule raises where the operands do not fit. Compared symbolic extents leave guards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mdfuse.extents.extent import are_same, example, larger, pinned, repeated, smaller
from mdfuse.ir.attention_dims import with_heads
from mdfuse.ir.dims import check_equal, present, reduced_dims
from mdfuse.layouts.boxes import runs_shape

Shape = tuple[int, ...]
#: Extents of the operands; None for what is absent, and None or () for a number.
Shapes = Sequence[Shape | None]
Attrs = Mapping[str, Any]
#: Gives the shape of the result; of a row with several results, a tuple of shapes.
ShapeRule = Callable[[Shapes, Attrs], Shape | tuple[Shape, ...]]

#: How a rule refuses operands; an assertion, that one is there.
_REFUSALS = (ValueError, TypeError, LookupError, ZeroDivisionError, AssertionError)


def _equal(a: int, b: int) -> int:
    """Return one of two equal extents, a number where one is a number; ValueError if unequal."""
    if a != b:
        raise ValueError(f"{a} is not {b}")
    return a if type(a) is int else b


def _check_expands(shape: Shape, to: Shape) -> None:
    """Raise ValueError unless `shape` can be repeated to become `to`."""
    if _broadcast(shape, to) != to:
        raise ValueError(f"{shape} does not expand to {to}")


def _broadcast(*shapes: Shape) -> Shape:
    result = shapes[0]
    for shape in shapes[1:]:
        longer, shorter = (result, shape) if len(result) >= len(shape) else (shape, result)
        skip = len(longer) - len(shorter)
        joined = map(repeated, longer[skip:], shorter)
        result = (*longer[:skip], *joined)
    return result


def broadcast(shapes: Shapes, attrs: Attrs) -> Shape:
    """Broadcast the operands: dims align from the right, their extents are equal or 1."""
    return _broadcast(*present(shapes))


def first(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the first operand."""
    return present(shapes)[0]


def alike(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the one shape of all operands."""
    one, *others = present(shapes)
    for shape in others:
        one = tuple(_equal(n, m) for n, m in zip(one, shape, strict=True))
    return one


def along(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the operand, which must have the dim."""
    (shape,) = present(shapes)
    n = max(len(shape), 1)
    if not -n <= attrs["dim"] < n:
        raise ValueError(f"there is no dim {attrs['dim']}")
    return shape


def without_last(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the operand without its last dim, of extent 2."""
    (shape,) = present(shapes)
    _equal(shape[-1], 2)
    return shape[:-1]


def with_last(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the operand with one more dim, of extent 2."""
    (shape,) = present(shapes)
    return (*shape, 2)


def flipped(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the operand, which must have the dims, each once."""
    (shape,) = present(shapes)
    if any(not -len(shape) <= d < len(shape) for d in attrs["dims"]):
        raise ValueError(f"{shape} lacks some of the dims {attrs['dims']}")
    if len({d % len(shape) for d in attrs["dims"]}) < len(attrs["dims"]):
        raise ValueError(f"the dims {attrs['dims']} are not different")
    return shape


def ranked(shapes: Shapes, attrs: Attrs) -> tuple[Shape, Shape]:
    """Return twice the operand's shape, whose dim has k elements where that is said."""
    shape, k = along(shapes, attrs), attrs.get("k")
    if k is not None and shape:
        dim = attrs["dim"] % len(shape)
        if not 0 <= k <= shape[dim]:
            raise ValueError(f"there are {shape[dim]} elements along the dim, not {k}")
        shape = (*shape[:dim], k, *shape[dim + 1 :])
    elif k is not None and k > 1:
        raise ValueError(f"one element, not {k}")
    return shape, shape


# -- views ---------------------------------------------------------------------------------------


def permute(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the operand's extents in the order of `dims`."""
    (shape,) = present(shapes)
    return tuple(shape[d] for d, _ in zip(attrs["dims"], shape, strict=True))


def reshape(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the new shape, which has as many elements as the operand."""
    (shape,), to = present(shapes), tuple(attrs["shape"])
    _equal(math.prod(shape), math.prod(to))
    return to


def expand(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the new shape, to which the operand's dims of extent 1 are repeated."""
    (shape,), to = present(shapes), tuple(attrs["shape"])
    new = len(to) - len(shape)
    extents = (b if are_same(a, 1) else a if are_same(a, b) else b if a == 1 else _equal(a, b)
            for a, b in zip(shape, to[new:], strict=True))  # fmt: skip
    return (*to[:new], *extents)


def unsqueeze(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the operand's shape with 1 inserted at each of `dims`."""
    (shape,) = present(shapes)
    ndim = len(shape) + len(attrs["dims"])
    extents = list(shape)
    for d in sorted(d % ndim for d in attrs["dims"]):
        extents.insert(d, 1)
    return tuple(extents)


def squeeze(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the operand's shape without those of `dims` that have extent 1."""
    (shape,) = present(shapes)
    gone = {d % len(shape) for d in attrs["dims"]} if shape else set()
    return tuple(n for d, n in enumerate(shape) if d not in gone or n != 1)


def window(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of a slice; a rank's part of a `window` has the shape in its attributes."""
    if attrs.get("places") is not None:
        return tuple(attrs["shape"])
    (shape,) = present(shapes)
    if len(shape) == 2 and len(attrs["starts"]) == 4:  # rows that are there, of which columns
        column = window((shape[1:],), {k: attrs[k][3:] for k in ("starts", "ends", "steps")})
        return (shape[0], *column)
    taken = zip(shape, attrs["starts"], attrs["ends"], attrs["steps"], strict=True)
    return tuple(
        -(-larger(smaller(end, n) - smaller(start, n), 0) // step) for n, start, end, step in taken
    )


def times_of_heads(last: Shape, repeated: Shape, opened: Shape, first: Shape) -> int:
    """Return how often the heads of a value are repeated, one after the other; 0 if they are not.

    Args:
        last: [..., heads, rows, features], each head as often.
        repeated: with the times of each head as a dim behind that of heads.
        opened: with one time.
        first: without that dim.
    """
    if min(len(first), len(last)) < 3:
        return 0
    lead, (shared, *behind) = first[:-3], first[-3:]
    times = last[-3] // max(shared, 1)
    is_so = (last, repeated, opened) == (
        (*lead, shared * times, *behind),
        (*lead, shared, times, *behind),
        (*lead, shared, 1, *behind),
    )
    return times if is_so else 0


# -- reductions, contractions and composite ops --------------------------------------------------


def reduction(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the operand's shape with reduced dims left out, or 1 with `keepdim`."""
    (shape,) = present(shapes)
    dims, keeps = reduced_dims(attrs.get("dims"), len(shape)), attrs.get("keepdim", False)
    extents = ((d, n) for d, n in enumerate(shape) if keeps or d not in dims)
    return tuple(1 if d in dims else n for d, n in extents)


def matmul(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of `[…,m,k] @ […,k,n]`, as `torch.matmul` takes its operands."""
    a, b = present(shapes)
    _equal(a[-1], b[-2 if len(b) > 1 else 0])
    return (*_broadcast(a[:-2], b[:-2]), *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def linear(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape […,n] for `x[…,k], w[n,k], b[n]`."""
    x, w, *bias = present(shapes)
    _equal(x[-1], w[-1])
    if len(w) != 2 and (bias or len(w) != 1):
        raise ValueError("a weight is a matrix; without a bias also a vector")
    for b in bias:
        _check_expands(b, w[:-1])
    return (*x[:-1], *w[:-1])


def embedding(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape […,d] for `indices[…], table[v,d]`."""
    indices, (_, width) = present(shapes)
    return (*indices, width)


def embedding_grad(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of the table, or of a rank's part of it."""
    indices, ct = present(shapes)
    table = created(shapes, attrs)
    check_equal(ct, (*indices, table[1]))
    return table


def window_grad(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of what was sliced, or of a rank's part of it."""
    ((shape,), whole) = present(shapes), tuple(attrs["shape"])
    if len(shape) == 2 and len(whole) == 4:  # rows that are there: columns of them
        return (shape[0], created(shapes, attrs)[3])
    if attrs.get("box") is None:
        for n, start, step, end in zip(shape, attrs["starts"], attrs["steps"], whole, strict=True):
            if n and start + (n - 1) * step >= end:
                raise ValueError(f"{n} elements from {start} on by {step} are not in {end}")
    return created(shapes, attrs)


def layer_norm(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the operand's shape, whose last dims are those of weight and bias."""
    (x, *factors), inner = present(shapes), tuple(attrs["normalized_shape"])
    if not inner or len(inner) > len(x):
        raise ValueError(f"{inner} are not the last dims of {x}")
    for shape in (x[len(x) - len(inner) :], *factors):
        check_equal(shape, inner)
    return x


def attention(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape […,l,f] for `q[…,l,e], k[…,s,e], v[…,s,f]`.

    As in torch, a mask takes the place of is_causal; numbers of documents do not.
    """
    if len(present(shapes)) == 4 and attrs.get("is_causal"):
        raise ValueError("a mask takes the place of is_causal")
    return _attended(shapes, attrs)


def _attended(shapes: Shapes, attrs: Attrs) -> Shape:
    q, k, v, *hides = present(shapes)
    if attrs.get("enable_gqa"):
        k, v = with_heads(k, q), with_heads(v, q)
    _equal(q[-1], k[-1])
    _equal(k[-2], v[-2])
    lead = _broadcast(q[:-2], k[:-2], v[:-2])
    if attrs.get("window") is not None and not attrs.get("is_causal"):
        raise ValueError("a window is of a causal attention: the last keys that a row sees")
    for m in hides if len(hides) == 1 else ():
        if len(m) < 2:
            raise ValueError("a mask has rows and columns")
        _check_expands(m, (*lead, q[-2], k[-2]))
    for numbers, x in zip(hides, (q, k), strict=False) if len(hides) == 2 else ():
        if not numbers:
            raise ValueError("numbers of documents are of rows, or of keys")
        _equal(numbers[-1], x[-2])
        _check_expands(numbers, (*lead, x[-2]))
    return (*lead, q[-2], v[-1])


def attended(shapes: Shapes, attrs: Attrs) -> tuple[Shape, Shape]:
    """Return the shapes of attention and of a number per row; nothing broadcasts but the mask."""
    q, k, v = present(shapes)[:3]
    if min(map(len, (q, k, v))) < 2:
        raise ValueError("query, key and value have rows and features")
    attended = _attended(shapes, attrs)
    keys_and_values = (with_heads(k, q), with_heads(v, q)) if attrs.get("enable_gqa") else (k, v)
    for x in keys_and_values:
        check_equal(x[:-2], q[:-2])
    return attended, attended[:-1]


def attention_parts(shapes: Shapes, attrs: Attrs) -> tuple[Shape, Shape]:
    """Return the shapes of `attended` for each of some parts of the keys."""
    out, sums = attended(shapes, attrs)
    return (attrs["parts"], *out), (attrs["parts"], *sums)


def attention_terms(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of both results of `attended` side by side."""
    out, _ = attended(shapes, attrs)
    return (*out[:-1], out[-1] + 1)


def attention_grad(shapes: Shapes, attrs: Attrs) -> tuple[Shape, Shape, Shape]:
    """Return the shapes of query, key and value, checked with those of what attention gave.

    Numbers of rows may stand in the place of its first result.
    """
    q, k, v, out, sums, ct, *hides = present(shapes)
    of_ct, of_row = attended((q, k, v, *hides), attrs)
    of_out = of_row if len(out) == len(of_row) else of_ct
    for shape, wanted in ((out, of_out), (sums, of_row), (ct, of_ct)):
        check_equal(shape, wanted)
    return q, k, v


def cat(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of tensors joined along `dim`, in all other dims equal."""
    result, *others = present(shapes)
    if not -len(result) <= attrs["dim"] < len(result):
        raise IndexError(f"dim={attrs['dim']} of {len(result)} dims")
    at = attrs["dim"] % len(result)
    for shape in others:
        pairs = enumerate(zip(result, shape, strict=True))
        result = tuple(a + b if d == at else _equal(a, b) for d, (a, b) in pairs)
    return result


def created(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape in the attributes, or that of the rank's box."""
    return runs_shape(attrs["box"]) if attrs.get("box") is not None else tuple(attrs["shape"])


def numbered(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of a range of numbers, which has one dim."""
    (n,) = created(shapes, attrs)
    return (n,)


def listed(shapes: Shapes, attrs: Attrs) -> Shape:
    """Return the shape of a constant, which has as many elements as numbers are listed."""
    _equal(len(attrs["values"]), math.prod(attrs["shape"]))
    return created(shapes, attrs)


# -- who asks ------------------------------------------------------------------------------------


def known_shapes(rule: ShapeRule | None, shapes: Shapes, attrs: Attrs) -> tuple[Shape, ...] | None:
    """Return the shape of each result; None where there is no rule, or the operands do not fit."""
    try:
        result_shapes: Any = rule(shapes, attrs) if rule is not None else None
    except _REFUSALS:
        return None
    has_several = result_shapes and isinstance(result_shapes[0], tuple)
    return result_shapes if has_several or result_shapes is None else (result_shapes,)


def symbolic_shapes(
    rule: ShapeRule | None, shapes: Shapes, attrs: Attrs, numbers: tuple[Shape, ...]
) -> tuple[Shape, ...]:
    """Return the shapes of the results of an op whose operands have symbolic extents.

    Args:
        rule: of the op; None: it has none.
        shapes: of the operands.
        attrs: of the op.
        numbers: the results' shapes for the examples, by torch. Where the rule does not give the
            same, or there is none, the operands' extents are pinned to their examples.
    """
    results = known_shapes(rule, shapes, attrs)
    if results is None or tuple(tuple(map(example, shape)) for shape in results) != numbers:
        for shape in present(shapes):
            for n in shape:
                pinned(n)
        return numbers
    for shape in (*present(shapes), *results):
        _assume_regular(shape)
    return results


def _assume_regular(shape: Shape) -> None:
    """Leave guards on whether symbolic extents are 0 or, in tensors of several dims, 1.

    A dim of one element may have any stride, and some ops refuse empty tensors.
    """
    for n in shape:
        if type(n) is not int and not (len(shape) > 1 and n > 1):
            bool(n > 0)
