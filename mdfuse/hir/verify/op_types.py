"""Compare what a row of the op table makes of its operands with what is declared.

Compared are shape, dtype and layout of the whole, and shape and dtype on one rank: in a global
program on the first rank of the mesh, which has the largest part. Answers are cached.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.hir.expr_parts import expr_part
from mdfuse.hir.program import BufferType
from mdfuse.hir.verify.result_layouts import Contradiction, is_shown, may_be_said, result_layout
from mdfuse.ir.dims import pointwise
from mdfuse.ir.graph import Value, dtype_name
from mdfuse.ir.infer import as_results, infer, on_few_elements, scalar_sample
from mdfuse.ir.local_attributes import ExprPart
from mdfuse.ir.ops import TABLE, local_attrs
from mdfuse.ir.shapes import Shape, known_shapes
from mdfuse.layouts.layout import Layout

#: What an operand is for the inference: a buffer or scalar, the type of a number, or nothing.
Kind = BufferType | type
Attrs = tuple[tuple[str, Any], ...]
#: What an operand is when dtypes are inferred: (dtype, ndim), or the type of a number.
Sample = tuple[torch.dtype, int] | type


@lru_cache(maxsize=16384)
def row_problem(
    fn: str,
    attrs: Attrs,
    operands: tuple[Kind, ...],
    results: tuple[BufferType, ...],
    rank: int | None,
    numbers: frozenset[str] = frozenset(),
) -> str | None:
    """Why a row of the op table does not make the results of its operands; None where it does.

    Args:
        fn: the row.
        attrs: its attributes, global ones without a rank, else that rank's.
        operands: buffers, scalars, or the types of numbers.
        results: the declared types.
        rank: whose program it is; None for the global one.
        numbers: the axes along which a number among the operands may be another one.
    """
    result = results[0]
    buffers = [k for k in operands if isinstance(k, BufferType) and k.layout is not None]
    if result.layout is None:
        return "a buffer does not become a number" if buffers else None
    if not buffers and not TABLE[fn].is_creation:
        return f"{fn} of numbers is a number"
    if buffers and TABLE[fn].is_creation:
        return f"{fn} takes numbers, not buffers"
    if not all(_lies_plainly(fn, k, result) for k in (*results, *buffers)):
        return f"{fn} is for buffers that are neither padded nor flat: narrow them before"
    if any(r.layout is None or r.layout.mesh != result.layout.mesh for r in results):
        return f"{fn} computes all its results on one mesh"
    for k in buffers:
        if lack := lacks(k.placed, result.layout, rank):
            return lack
    if fn == "set" and is_said(buffers[0], result, rank):
        return None
    if problem := _dims_problem(fn, dict(attrs), buffers, result):
        return problem
    first = result.layout.mesh.first if rank is None else rank
    whole = global_attrs(fn, attrs, operands, result, rank)
    shapes = [_shape(k, None) for k in operands]
    return (
        _inferred(fn, whole, operands, shapes, results, tuple(r.shape for r in results))
        or _layout_problem(fn, whole, operands, results, numbers)
        or _problem_on(fn, attrs if rank is not None else None, whole, operands, results, first)
    )


def _lies_plainly(fn: str, kind: BufferType, result: BufferType) -> bool:
    """Return whether a row may take a buffer: not flat, nor padded otherwise than the result."""
    padded_alike = kind.padding == result.padding and kind.shape == result.shape
    is_padded = kind.padding is not None and not (TABLE[fn].rule is pointwise and padded_alike)
    return not kind.flat and not is_padded


def _dims_problem(
    fn: str, attrs: dict[str, Any], buffers: list[BufferType], result: BufferType
) -> str | None:
    """Return why attributes name a dim that is not there, or one twice; None where they do not."""
    for known in TABLE[fn].attrs:
        name, given = known.name, attrs.get(known.name)
        if name not in ("dims", "dim"):
            continue
        n = len(result.shape if known.of == "result" or not buffers else buffers[0].shape)
        n = max(n, 1) if name == "dim" else n  # a scalar has the dims 0 and -1, as in torch
        dims = (given,) if isinstance(given, int) else given or ()
        for d in dims:
            if not isinstance(d, int) or not -n <= d < n:
                return f"there is no dim {d} of {n}"
        if len({d % n for d in dims}) < len(dims):
            return f"{name}={list(dims)} names a dim twice"
    return None


def is_said(before: BufferType, after: BufferType, rank: int | None) -> bool:
    """Return whether a `set` may give its operand this type on the author's word alone.

    Each rank then holds what it held before; only the layout that describes it changes.
    """
    if before.layout is None or after.layout is None or before.dtype != after.dtype:
        return False
    if not may_be_said(before.layout, after.layout):
        return False
    mesh = after.layout.mesh
    ranks = [rank] if rank is not None else [mesh.first, mesh.rank_at([n - 1 for n in mesh.shape])]
    return all(before.local_shape(r) == after.local_shape(r) for r in ranks)


def global_attrs(
    fn: str, attrs: Attrs, operands: tuple[Kind, ...], result: BufferType, rank: int | None
) -> Attrs:
    """Return the attributes of an op on whole tensors, computed from those of one rank."""
    row = TABLE[fn]
    if row.globalize is not None and (rank is not None or not attrs):
        # the shape of an expand may be left out
        part = expr_part(operands, result, result.placed.mesh.first if rank is None else rank)
        attrs = tuple(row.globalize(dict(attrs), part).items())
    local = {a.name for a in row.attrs if a.is_local} if rank is not None else ()
    return tuple((k, v) for k, v in attrs if k not in local)


def _layout_problem(
    fn: str,
    attrs: Attrs,
    operands: tuple[Kind, ...],
    results: tuple[BufferType, ...],
    numbers: frozenset[str],
) -> str | None:
    """Return why a result has another layout than is declared; None where each has that one."""
    tensors = [k if isinstance(k, BufferType) and k.layout is not None else None for k in operands]
    for at, result in enumerate(results):
        if 0 in result.shape:
            continue  # there is nothing of which a rank could hold a wrong part
        try:
            layout = result_layout(
                fn,
                dict(attrs),
                [k.shape if k is not None else None for k in tensors],
                [k.layout if k is not None else None for k in tensors],
                results[0].shape,
                result.placed,
                numbers,
                [k is type(None) for k in operands],
                at,
            )
        except Contradiction as problem:
            return str(problem)
        if not is_shown(layout, result.placed, len(result.shape)):
            of = f" as result {at}" if at else ""
            return f"{fn} of these makes {layout}{of}"
    return None


def lacks(before: Layout, after: Layout, rank: int | None) -> str | None:
    """Return why a rank that has the result lacks the operand; None where none does."""
    if before.mesh is after.mesh or before.mesh == after.mesh:
        return None
    ranks = after.mesh.ranks if rank is None else (rank,)
    missing = [r for r in ranks if r not in before.mesh]
    return f"rank {missing[0]} has no part of an operand on {before.mesh}" if missing else None


def _problem_on(
    fn: str,
    given: Attrs | None,
    attrs: Attrs,
    operands: tuple[Kind, ...],
    results: tuple[BufferType, ...],
    rank: int,
) -> str | None:
    """Return what is wrong with a row on the parts and attributes of one rank; None: nothing.

    Args:
        fn: the row.
        given: the rank's attributes as the program states them, which must be right; None for a
            global program, which states none of a rank.
        attrs: the attributes on whole tensors.
        operands: buffers, scalars, or the types of numbers.
        results: the declared types.
        rank: whose parts are looked at.
    """
    part = expr_part(operands, results[0], rank)
    try:
        local = local_attrs(TABLE[fn], dict(attrs), part)
        mine = local if given is None else {**_left_out(fn, attrs, part), **dict(given)}
    except (AssertionError, TypeError, ValueError, LookupError):
        return f"{fn} does not take these operands"
    if mine != local:
        return f"rank {rank} runs {fn} with {_settings(local)}, not {_settings(mine)}"
    want = tuple(r.local_shape(rank) for r in results)
    if all(0 in shape for shape in want):
        return None  # a rank without elements calls nothing
    parts = [_shape(k, rank) for k in operands]
    problem = _inferred(fn, tuple(local.items()), operands, parts, results, want)
    return f"on rank {rank} {problem}" if problem is not None else None


def _left_out(fn: str, attrs: Attrs, part: ExprPart) -> dict[str, Any]:
    """Return the attributes of a rank for which a program states none: those of the whole."""
    operands = tuple(x and replace(x.whole, runs={}) for x in part.operands)
    return local_attrs(TABLE[fn], dict(attrs), ExprPart(operands, part.out.whole))


def _settings(attrs: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in attrs.items()) or "nothing"


def _shape(kind: Kind, rank: int | None) -> Shape | None:
    """Return the extents of an operand, globally or on a rank; None where the operand is absent."""
    if isinstance(kind, BufferType):
        return kind.shape if rank is None else kind.local_shape(rank)
    return None if kind is type(None) else ()


def _inferred(
    fn: str,
    attrs: Attrs,
    operands: tuple[Kind, ...],
    shapes: list[Shape | None],
    results: tuple[BufferType, ...],
    want: tuple[Shape, ...],
) -> str | None:
    """Return what is wrong with the results of a row on operands of given shapes; None: nothing.

    The meta device takes up to milliseconds per op, more than lowering it: it is asked where the
    row's own rule does not say that all is well, or some operand has no elements.
    """
    if TABLE[fn].meta is None and not any(shape and 0 in shape for shape in shapes):
        inferred = known_shapes(TABLE[fn].shape, shapes, dict(attrs))
        samples = tuple(map(_sample, operands, shapes))
        if inferred == want and _dtypes(fn, samples, attrs) == tuple(r.dtype for r in results):
            return None
    return _inferred_on_meta(fn, attrs, operands, shapes, results, want)


@lru_cache(maxsize=4096)
def _dtypes(fn: str, samples: tuple[Sample, ...], attrs: Attrs) -> tuple[torch.dtype, ...] | None:
    """The dtypes of a row's results; None where torch does not take these dtypes."""
    row = TABLE[fn]
    if row.is_view and isinstance(samples[0], tuple):
        return samples[0][:1]
    if row.is_creation:
        return (dict(attrs)["dtype"],)
    few = (x if isinstance(x, tuple) else _number(x) for x in samples)
    try:
        outputs = on_few_elements(row, few, dict(attrs))
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError):
        return None  # AttributeError: a number where only a tensor will do
    return tuple(x.dtype for x in as_results(outputs)) if _are_tensors(outputs) else None


def _are_tensors(results: Any) -> bool:
    return isinstance(results, Tensor | tuple)  # else a number, as of a comparison with nothing


def _number(kind: type) -> Any:
    """Return a number that stands for all of its type; an index expression is an integer."""
    if kind is type(None):
        return None
    return kind(1) if kind in (bool, float) else 1


def _sample(kind: Kind, shape: Shape | None) -> Sample:
    if not isinstance(kind, BufferType):
        return kind
    if kind.layout is None:
        return type(scalar_sample(kind.dtype))
    return kind.dtype, len(shape or ())


def _inferred_on_meta(
    fn: str,
    attrs: Attrs,
    operands: tuple[Kind, ...],
    shapes: list[Shape | None],
    results: tuple[BufferType, ...],
    want: tuple[Shape, ...],
) -> str | None:
    """Return what is wrong with a row's results by torch's meta device, whose answer counts."""
    values = {
        str(n): _value(str(n), k, shape or ())
        for n, (k, shape) in enumerate(zip(operands, shapes, strict=True))
        if isinstance(k, BufferType)
    }
    inputs = [str(n) if isinstance(k, BufferType) else _number(k) for n, k in enumerate(operands)]
    described = ", ".join(str(list(s)) for s in shapes if s is not None)
    try:
        inferred = infer(TABLE[fn], inputs, dict(attrs), values, None)
    except DefinitionError as error:
        return f"{fn} of {described} means nothing: {error.because}"
    except AttributeError:  # a number where only a tensor will do
        return f"{fn} does not take these operands"
    if not _are_tensors(inferred):
        return f"{fn} does not take these operands"
    for x, result, shape in zip(as_results(inferred), results, want, strict=True):
        if tuple(x.shape) != shape or x.dtype != result.dtype:
            return f"{fn} of {described} is {dtype_name(x.dtype)}{list(x.shape)}"
    return None


def _value(name: str, kind: BufferType, shape: Shape) -> Value:
    return Value(
        name=name,
        shape=shape,
        dtype=kind.dtype,
        kind="tensor" if kind.layout is not None else "scalar",
        order=tuple(range(len(shape))),
    )
