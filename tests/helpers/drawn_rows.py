"""Operands and attributes for any row of the op table, drawn by what it says of itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mdfuse.ir import dims, slopes
from mdfuse.ir.attributes import Attr
from mdfuse.ir.ops import TABLE, Op

Shape = tuple[int, ...]

#: What attributes may be beside lists of small numbers.
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 0.5, True, False, "none", "tanh", "sum", "bor", torch.float32, torch.int64,
)  # fmt: skip


def drawn_shape(drawn: random.Random, most: int = 4) -> Shape:
    return tuple(drawn.choice((1, 2, 3)) for _ in range(drawn.randrange(most + 1)))


def drawn_attr(drawn: random.Random, a: Attr, operand: Shape | None) -> Any:
    """One of the values that the attribute may have."""
    while True:
        x = drawn.choice(VALUES)
        if drawn.random() < 0.7:
            length = len(operand or ()) if drawn.random() < 0.7 else drawn.randrange(4)
            x = tuple(drawn.randrange(4) for _ in range(length))
        if operand and drawn.random() < 0.3:  # an end of the operand, or its dims in any order
            x = drawn.choice(
                (operand[-1:], operand[-2:], tuple(drawn.sample(operand, len(operand))))
            )
        more = len(x) if a.of == "result" and isinstance(x, tuple) else 0
        n = None if operand is None else len(operand) + more
        if a.holds(x, n) and not (isinstance(x, tuple) and a.is_shape and 0 in x):
            return x


def drawn_call(drawn: random.Random, row: Op) -> tuple[list[Any], dict[str, Any]]:
    """Operands and attributes; many of the operands have one shape, or the same last dims."""
    if row.name in _DRAWN:
        return _DRAWN[row.name](drawn)
    least, most = row.operands
    first, found = drawn_shape(drawn), []
    for at in range(drawn.randint(least, least + 2 if most is None else most)):
        kind = drawn.random()
        shape = first if kind < 0.4 else first[-2:] if kind < 0.6 else first[-1:]
        found.append(drawn_shape(drawn, 3) if kind > 0.7 and at else shape)
    whole = row.name.startswith("bitwise")
    tensors: list[Any] = [torch.ones(s, dtype=torch.int64 if whole else None) for s in found]
    if row.name == "where":
        tensors[0] = tensors[0].bool()
    if row.indexed is not None:
        tensors[0] = torch.zeros(found[0], dtype=torch.int64)
    if row.rule in (dims.creation, dims.likeness):
        tensors[row.rule is dims.likeness :] = [1.0] * (len(found) - (row.rule is dims.likeness))
    if row.name in ("uniform", "dropout"):  # seeds
        tensors[-1] = 1
    operand = found[0] if found else None
    given = (a for a in row.attrs if not a.is_local and (a.required or drawn.random() < 0.5))
    return tensors, {a.name: drawn_attr(drawn, a, operand) for a in given}


def _gradient_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """What attention takes and gives, and a cotangent, which does not always fit."""
    (q, k, v, *mask), attrs = _attention_call(drawn)
    try:
        out, sums = TABLE["attention"].call(q, k, v, *mask, **attrs)
    except (RuntimeError, TypeError, ValueError):
        out, sums = q, q
    ct = out if drawn.random() < 0.9 else torch.ones(drawn_shape(drawn))
    return [q, k, v, out, sums, ct, *mask], attrs


def _attention_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """Positions are those of all rows and keys, and windows mostly those of causal rows."""
    few = replace(TABLE["attention"], name="", attrs=TABLE["attention"].attrs[:3])
    operands, attrs = drawn_call(drawn, few)
    if drawn.random() < 0.2:
        operands[1:3] = operands[:1] * 2
    if len(operands) == 5 and drawn.random() < 0.8:  # numbers of documents, of rows and of keys
        operands[3:] = [torch.zeros(x.shape[:-1], dtype=torch.int64) for x in operands[:2]]
    if attrs.get("is_causal") or drawn.random() < 0.05:
        attrs |= {"window": drawn.randrange(1, 4), "q_offset": drawn.randrange(3)}
    return operands, attrs


def _parts_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    operands, attrs = _attention_call(drawn)
    return operands, {**attrs, "parts": drawn.randrange(1, 4)}


def _halo_gradient_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """Rows in chunks that a window reaches over."""
    rows, parts, window = (drawn.randrange(1, n) for n in (9, 4, 6))
    chunk = -(-rows // parts)
    halo = min(window - 1, (rows - 1) // chunk * chunk)
    q, k, v = torch.ones(2, 4, rows, 3), torch.ones(2, 2, rows, 3), torch.ones(2, 2, rows, 2)
    out, sums = torch.ones(2, 4, rows, 2), torch.ones(2, 4, rows)
    ct = out if drawn.random() < 0.9 else torch.ones(drawn_shape(drawn))
    attrs = {"is_causal": True, "enable_gqa": True, "window": window}
    cut = {"parts": -(-rows // chunk), "chunk": chunk, "halo": halo}
    return [q, k, v, out, sums, ct], {**attrs, **cut}


def _halos_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    parts, chunk = drawn.randrange(1, 4), drawn.randrange(1, 4)
    lead = drawn_shape(drawn, 2)
    blocks = [(drawn.randrange(1, 4), *lead, drawn.randrange(4), 2) for _ in range(parts)]
    return [torch.ones(*lead, drawn.randrange(9), 2), *map(torch.ones, blocks)], {"chunk": chunk}


def _lookup_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    indices, shape = torch.zeros(drawn_shape(drawn), dtype=torch.int64), (3, drawn.randrange(1, 4))
    ct = (*indices.shape, shape[1]) if drawn.random() < 0.7 else drawn_shape(drawn)
    return [indices, torch.ones(ct)], {"shape": shape}


def _slice_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """A cotangent that fits, or mostly does."""
    ct = drawn_shape(drawn)
    starts, steps = ([drawn.randrange(low, 3 + low) for _ in ct] for low in (0, 1))
    shape = [
        start + (n - 1) * step + drawn.randint(int(drawn.random() < 0.9), 2)
        for n, start, step in zip(ct, starts, steps, strict=True)
    ]
    return [torch.ones(ct)], {k: tuple(x) for k, x in
                              (("shape", shape), ("starts", starts), ("steps", steps))}  # fmt: skip


def _sum_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """What has an index in the place of a dim, and mostly fits."""
    shape, indices = (*drawn_shape(drawn, 2), 3), drawn_shape(drawn, 2)
    dim = drawn.randrange(len(shape))
    ct = (*shape[:dim], *indices, *shape[dim + 1 :]) if drawn.random() < 0.7 else drawn_shape(drawn)
    given = [torch.zeros(indices, dtype=torch.int64), torch.ones(ct)]
    return given, {"shape": shape, "along": dim}


def _scatter_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    shape = (*drawn_shape(drawn, 2), drawn.randrange(1, 4))
    dim = drawn.randrange(len(shape) + (drawn.random() < 0.1))
    made = tuple(drawn.randrange(1, 4) if d == dim else n for d, n in enumerate(shape))
    src = shape if drawn.random() < 0.8 else drawn_shape(drawn)
    reduce = drawn.choice(("sum", "prod", "max", "min"))
    given = [torch.zeros(shape, dtype=torch.int64), torch.ones(src)]
    return given, {"shape": made, "along": dim, "reduce": reduce}


def _copy_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    shape = (*drawn_shape(drawn, 2), drawn.randrange(1, 4))
    dim, n = drawn.randrange(len(shape) + (drawn.random() < 0.1)), drawn.randrange(1, 4)
    rows = tuple(n if d == dim else m for d, m in enumerate(shape))
    rows = rows if drawn.random() < 0.9 else drawn_shape(drawn)
    at = torch.zeros(n, dtype=torch.int64)
    return [at, torch.ones(rows), torch.ones(shape)], {"along": dim}


def _elements_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    (_, rows, x), attrs = _copy_call(drawn)
    few = [drawn.randint(1, n) if drawn.random() < 0.3 else n for n in rows.shape]
    at = torch.zeros(few, dtype=torch.int64)
    return [at, torch.ones(few) if drawn.random() < 0.9 else rows, x], attrs


def _put_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    shape, n = (*drawn_shape(drawn, 2), drawn.randrange(1, 4)), drawn.randrange(1, 4)
    dims = tuple(drawn.sample(range(len(shape)), drawn.randint(1, len(shape))))
    source = (n, *(m for d, m in enumerate(shape) if d not in dims))
    source = source if drawn.random() < 0.9 else drawn_shape(drawn)
    at = [torch.zeros(n, dtype=torch.int64) for _ in dims]
    how = {"dims": dims, "accumulate": drawn.random() < 0.3}
    return [*at, torch.ones(source), torch.ones(shape)], how


def _window_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    (source,), attrs = _slice_call(drawn)
    return [source, torch.ones(attrs.pop("shape"))], attrs


def _paged_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    b, k, e, f, rows, page, pages = (drawn.randrange(1, 4) for _ in range(7))
    heads = k * drawn.randrange(1, 3) + (drawn.random() < 0.1)
    table = torch.zeros(b, drawn.randrange(1, 4), dtype=torch.int64)
    lengths = torch.ones(b + (drawn.random() < 0.1), dtype=torch.int64)
    caches = (torch.ones(pages, page, k, n) for n in (e, f))
    return [torch.ones(b, heads, rows, e), *caches, table, lengths], {}


def _convolution_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """One that fits, or mostly does."""
    n, groups, is_transposed = drawn.randrange(1, 4), drawn.choice((1, 1, 2)), drawn.random() < 0.4
    i, o = groups * drawn.randrange(1, 3), groups * drawn.randrange(1, 3)
    x = (drawn.randrange(1, 3), i, *(drawn.randrange(2, 7) for _ in range(n)))
    channels = (i, o // groups) if is_transposed else (o, i // groups)
    weight = (*channels, *(drawn.randrange(1, 4) for _ in range(n)))
    if drawn.random() < 0.1:
        weight = (weight[1], weight[0], *weight[2:])
    how = {k: tuple(drawn.randrange(low, low + 3) for _ in range(n)) for k, low in
           (("stride", 1), ("padding", 0), ("dilation", 1))}  # fmt: skip
    given = [torch.ones(x), torch.ones(weight)]
    return given, {**how, "groups": groups, "transposed": is_transposed}


def _convolution_weight_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    (x, weight), attrs = _convolution_call(drawn)
    attrs["transposed"] = False
    try:
        ct = TABLE["convolution"].call(x, weight, **attrs)
    except (RuntimeError, TypeError, ValueError):
        ct = x
    del attrs["transposed"]
    return [ct, x], {**attrs, "shape": tuple(weight.shape)}


def _pool_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    n = drawn.randrange(1, 4)
    x = tuple(drawn.randrange(1, 7) for _ in range(n + drawn.choice((1, 2, 2, 2))))
    how = {k: tuple(drawn.randrange(low, low + 3) for _ in range(n)) for k, low in
           (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1))}  # fmt: skip
    return [torch.ones(x)], {**how, "ceil": drawn.random() < 0.5}


def _pool_grad_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    (x,), attrs = _pool_call(drawn)
    try:
        ct, _ = TABLE["max_pool"].call(x, **attrs)
    except (RuntimeError, TypeError, ValueError):
        ct = x
    return [torch.zeros_like(ct, dtype=torch.int64), ct], {**attrs, "shape": tuple(x.shape)}


def _mean_pool_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """Windows that mostly fit, also from the windows back."""
    n, is_back = drawn.randrange(1, 4), drawn.random() < 0.4
    kernel, stride = (tuple(drawn.randrange(1, 4) for _ in range(n)) for _ in range(2))
    padding = tuple(drawn.randint(0, k // 2 + (drawn.random() < 0.1)) for k in kernel)
    rows = tuple(drawn.randrange(1, 7) for _ in range(n))
    settings = zip(rows, kernel, stride, padding, strict=True)
    windows = tuple(max((m + 2 * p - k) // s + 1 + drawn.randrange(2), 1)
                    for m, k, s, p in settings)  # fmt: skip
    read, made = (windows, rows) if is_back else (rows, windows)
    x = (*(drawn.randrange(1, 3) for _ in range(drawn.choice((1, 2, 2)))), *read)
    how = {"kernel": kernel, "stride": stride, "padding": padding, "made": made}
    return [torch.ones(x)], {**how, "divisor": drawn.randrange(3), "transposed": is_back}


def _contract_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    extents = [drawn.randrange(1, 4) for _ in range(5)]
    left, right = (tuple(drawn.sample(range(5), drawn.randrange(4))) for _ in range(2))
    both = sorted({*left, *right})
    kept = tuple(drawn.sample(both, drawn.randint(0, len(both))))
    given = [torch.ones([extents[x] for x in labels]) for labels in (left, right)]
    if drawn.random() < 0.1 and left:
        given[0] = torch.ones([extents[x] + 1 for x in left])
    return given, {"left": left, "right": right, "kept": kept}


def _complex_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    return [torch.ones(drawn_shape(drawn), dtype=torch.complex64)], {}


def _square_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    n, batch = drawn.randrange(1, 4), drawn_shape(drawn, 2)
    rows = n if drawn.random() < 0.8 else n + 1
    return [torch.eye(rows, n).expand(*batch, rows, n)], {}


def _solve_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    ((square,), _), k = _square_call(drawn), drawn.randrange(1, 4)
    rows = square.shape[-1] + (drawn.random() < 0.1)
    return [square, torch.ones(*square.shape[:-2], rows, k)], {}


def _grouped_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    t, k, n, e = (drawn.randrange(1, 4) for _ in range(4))
    rows = k + (drawn.random() < 0.1)
    ends = torch.zeros(e + (drawn.random() < 0.1), dtype=torch.int64)
    return [torch.ones(t, k), torch.ones(e, rows, n), ends], {}


def _grouped_grad_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    (x, weight, ends), _ = _grouped_call(drawn)
    return [x, torch.ones(x.shape[0], weight.shape[2]), ends], {"shape": tuple(weight.shape)}


def _slope_call(name: str) -> Callable[[random.Random], tuple[list[Any], dict[str, Any]]]:
    """A cotangent, as a rule of the shape of what it comes back to."""

    def drawn_for(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
        shape = drawn_shape(drawn)
        other = shape if drawn.random() < 0.7 else drawn_shape(drawn)
        given = (a for a in TABLE[name].attrs if a.required or drawn.random() < 0.5)
        attrs = {a.name: drawn_attr(drawn, a, shape) for a in given}
        return [torch.ones(shape), torch.ones(other)], attrs

    return drawn_for


def _routed_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    t, k, n, p, e = (drawn.randrange(1, 4) for _ in range(5))
    rows = k + (drawn.random() < 0.1)
    front = (p,) if drawn.random() < 0.5 else ()
    ids = torch.zeros(t + (drawn.random() < 0.1), dtype=torch.int64)
    return [torch.ones(*front, t, k), torch.ones(p, e, rows, n), ids], {}


def _routed_grad_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    (x, weight, ids), _ = _routed_call(drawn)
    front = () if x.ndim == 3 else weight.shape[:1]
    ct = torch.ones(*front, x.shape[-2], weight.shape[3])
    return [x, ct, ids], {"shape": tuple(weight.shape)}


def _rows_call(name: str) -> Callable[[random.Random], tuple[list[Any], dict[str, Any]]]:
    """Rows of parts and experts, their counts, and what the operation reads beside them."""

    def drawn_for(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
        p, e, b, d, n, t, k = (drawn.randrange(1, 4) for _ in range(7))
        x, counts = torch.ones(p, e, b, d), torch.zeros(p, e, dtype=torch.int64)
        wrong = drawn.random() < 0.1
        operands = {
            "ungroup_rows": [x, torch.zeros(t, k, dtype=torch.int64), counts],
            "group_rows": [torch.ones(t + wrong, d), torch.zeros(t, k, dtype=torch.int64), counts],
            "line_up_rows": [torch.ones(t + wrong, d), torch.zeros(t, k).long(), counts],
            "put_back_rows": [x[:, 0], torch.zeros(t, k).long(), counts],
            "rows_mm": [x, torch.ones(e, d + wrong, n), counts],
            "rows_mm_grad": [x, torch.ones(p, e, b + wrong, n), counts],
            "sum_of_rows": [x, counts],
            "spread_rows": [torch.ones(1, e, d + wrong), x, counts],
            "mask_rows": [x, counts],
            "rows_to_experts": [x, counts],
            "rows_to_parts": [x, counts],
            "row_places": [torch.zeros(t, k).long(), counts],
        }
        return operands[name], {}

    return drawn_for


_ON_ROWS = (
    "ungroup_rows", "group_rows", "rows_mm", "rows_mm_grad", "sum_of_rows", "spread_rows",
    "mask_rows", "line_up_rows", "put_back_rows", "rows_to_experts", "rows_to_parts", "row_places",
)  # fmt: skip


def _counts_call(drawn: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """The experts of tokens, and now and then how many of these each part has, or other numbers."""
    tokens, parts = drawn.randint(0, 6), drawn.randint(1, 4)
    shape = [tokens, drawn.randint(1, 3)][: drawn.randint(1, 2)]
    attrs: dict[str, Any] = {"experts": drawn.randint(1, 4), "parts": parts}
    if drawn.random() < 0.5:
        ends = sorted(drawn.randint(0, tokens) for _ in range(parts - 1))
        sizes = [b - a for a, b in zip([0, *ends], [*ends, tokens], strict=True)]
        attrs["sizes"] = tuple(sizes if drawn.random() < 0.7 else [*sizes, 1])
    return [torch.zeros(shape, dtype=torch.int64)], attrs


_DRAWN = {
    "counts": _counts_call,
    **{name: _rows_call(name) for name in _ON_ROWS},
    **{f"{name}_grad": _slope_call(f"{name}_grad") for name in slopes.NAMES},
    "routed_mm": _routed_call,
    "routed_mm_grad": _routed_grad_call,
    "grouped_mm": _grouped_call,
    "grouped_mm_grad": _grouped_grad_call,
    **dict.fromkeys(("inverse", "cholesky"), _square_call),
    "solve": _solve_call,
    "imag": _complex_call,
    "view_as_real": _complex_call,
    "index_sum": _sum_call,
    "scatter_reduce": _scatter_call,
    "index_copy": _copy_call,
    "paged_attention": _paged_call,
    "scatter": _elements_call,
    "index_put": _put_call,
    "slice_scatter": _window_call,
    "convolution": _convolution_call,
    "convolution_weight": _convolution_weight_call,
    "max_pool_grad": _pool_grad_call,
    "max_pool": _pool_call,
    "mean_pool": _mean_pool_call,
    "contract": _contract_call,
    **dict.fromkeys(
        ("attention", "attention_terms", "scaled_dot_product_attention"), _attention_call
    ),
    "attention_grad": _gradient_call,
    "attention_parts": _parts_call,
    "attention_halo_grad": _halo_gradient_call,
    "add_halos": _halos_call,
    "embedding_grad": _lookup_call,
    "slice_grad": _slice_call,
}


def of_torch(call: Callable[..., Any], *operands: Any, **attrs: Any) -> tuple[Shape, ...] | None:
    """The shapes of the results by torch; None where it refuses."""
    try:
        made = call(*operands, **attrs)
        return tuple(tuple(x.shape) for x in (made if isinstance(made, tuple) else (made,)))
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
        return None
