"""What a row of the op table makes of its operands, against what is declared.

Its shape and dtype, its layout, and the same on one rank: on the first one of the mesh in a global
program, which has the largest part. Answers are kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.hir.program import BufferType
from mdfuse.hir.verify.layouts import Contradiction, is_shown, may_be_said, result_layout
from mdfuse.hir.verify.shapes import Sample, Shape, number, quick_dtype, quick_shape
from mdfuse.ir.dims import pointwise
from mdfuse.ir.graph import Value, dtype_name
from mdfuse.ir.infer import infer, scalar_sample
from mdfuse.ir.local_attributes import Part
from mdfuse.ir.ops import TABLE, local_attrs
from mdfuse.layouts.boxes import Box
from mdfuse.layouts.layout import Layout

#: What an operand is for the inference: a buffer or scalar, the type of a number, or nothing.
Kind = BufferType | type
Attrs = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=16384)
def row_problem(
    fn: str,
    attrs: Attrs,
    operands: tuple[Kind, ...],
    result: BufferType,
    rank: int | None,
    numbers: frozenset[str] = frozenset(),
) -> str | None:
    """Why a row of the op table does not make the result of its operands; None where it does.

    Args:
        fn: the row.
        attrs: its attributes, global ones without a rank, else that rank's.
        operands: buffers, scalars, or the types of numbers.
        result: the declared type.
        rank: whose program it is; None for the global one.
        numbers: the axes along which a number among the operands may be another one.
    """
    buffers = [k for k in operands if isinstance(k, BufferType) and k.layout is not None]
    if result.layout is None:
        return "a buffer does not become a number" if buffers else None
    if not buffers and not TABLE[fn].is_creation:
        return f"{fn} of numbers is a number"
    if not all(_lies_plainly(fn, k, result) for k in (result, *buffers)):
        return f"{fn} is for buffers that are neither padded nor flat: narrow them before"
    for k in buffers:
        assert k.layout is not None
        if lack := lacks(k.layout, result.layout, rank):
            return lack
    if fn == "set" and is_said(buffers[0], result, rank):
        return None
    if problem := _dims_problem(fn, dict(attrs), buffers, result):
        return problem
    first = result.layout.mesh.first if rank is None else rank
    whole = global_attrs(fn, attrs, operands, result, rank)
    shapes = [_shape(k, None) for k in operands]
    return (
        _inferred(fn, whole, operands, shapes, result, result.shape)
        or _layout_problem(fn, whole, operands, result, numbers)
        or _problem_on(fn, attrs if rank is not None else None, whole, operands, result, first)
    )


def _lies_plainly(fn: str, kind: BufferType, result: BufferType) -> bool:
    """Its dims are all there is; what pads it does no harm where the result is padded alike."""
    padded_alike = kind.padding == result.padding and kind.shape == result.shape
    is_padded = kind.padding is not None and not (TABLE[fn].rule is pointwise and padded_alike)
    return not kind.flat and not is_padded


def _dims_problem(
    fn: str, attrs: dict[str, Any], buffers: list[BufferType], result: BufferType
) -> str | None:
    """Why attributes do not name dims that there are, each once."""
    n = len(result.shape if fn == "unsqueeze" or not buffers else buffers[0].shape)
    for name in ("dims", "dim"):
        given = attrs.get(name)
        dims = (given,) if isinstance(given, int) else given or ()
        for d in dims:
            if not isinstance(d, int) or not -n <= d < n:
                return f"there is no dim {d} of {n}"
        if len({d % n for d in dims}) < len(dims):
            return f"{name}={list(dims)} names a dim twice"
    return None


def is_said(before: BufferType, after: BufferType, rank: int | None) -> bool:
    """A set may declare its operand so, on the author's word: each rank holds what it held."""
    if before.layout is None or after.layout is None or before.dtype != after.dtype:
        return False
    if not may_be_said(before.layout, after.layout):
        return False
    mesh = after.layout.mesh
    ranks = [rank] if rank is not None else [mesh.first, mesh.rank_at([n - 1 for n in mesh.shape])]
    return all(before.local_shape(r) == after.local_shape(r) for r in ranks)


#: Attributes that only a rank's part of an op has.
_LOCAL_ONLY = ("count", "identity", "part", "box")


def global_attrs(
    fn: str, attrs: Attrs, operands: tuple[Kind, ...], result: BufferType, rank: int | None
) -> Attrs:
    """The attributes of an op on whole tensors, where these are one rank's."""
    given = dict(attrs)
    if fn in ("reshape", "expand") and (rank is not None or not given):
        return (("shape", result.shape),)  # that of an expand may be left out
    source = operands[0] if operands else None
    if rank is None or TABLE[fn].localize is None or not isinstance(source, BufferType):
        return (
            tuple((k, v) for k, v in attrs if k not in _LOCAL_ONLY) if rank is not None else attrs
        )
    kept = {k: v for k, v in given.items() if k not in _LOCAL_ONLY}
    if fn == "slice":
        held = zip(given["ends"], source.local_shape(rank), source.shape, strict=True)
        kept["ends"] = tuple(n if end == local else end for end, local, n in held)
    if fn == "window" and "places" in kept and len(source.shape) == len(result.shape):
        kept = _whole_window(kept, source, result, rank)
    if fn == "dropout":
        kept.pop("shape", None)
    return tuple(kept.items())


def _whole_window(
    given: dict[str, Any], source: BufferType, result: BufferType, rank: int
) -> dict[str, Any]:
    """Where a window lies in the whole, of which a rank says where it lies in its part."""
    starts, ends = [], []
    dims = zip(source.shape, result.shape, source.box(rank), strict=True)
    for d, (n, taken, (here, _)) in enumerate(dims):
        step, (first, _) = given["steps"][d], given["places"][d]
        is_all = step == 1 and taken == n  # split likewise, or whole
        start = 0 if is_all else here + given["starts"][d] - first * step
        starts.append(start)
        ends.append(start + taken * step)
    kept = {k: v for k, v in given.items() if k not in ("places", "shape")}
    return {**kept, "starts": tuple(starts), "ends": tuple(ends)}


def _layout_problem(
    fn: str,
    attrs: Attrs,
    operands: tuple[Kind, ...],
    result: BufferType,
    numbers: frozenset[str],
) -> str | None:
    """Why the result has another layout than is declared."""
    assert result.layout is not None
    if 0 in result.shape:
        return None  # there is nothing of which a rank could hold a wrong part
    tensors = [k if isinstance(k, BufferType) and k.layout is not None else None for k in operands]
    try:
        made = result_layout(
            fn,
            dict(attrs),
            [k.shape if k is not None else None for k in tensors],
            [k.layout if k is not None else None for k in tensors],
            result.shape,
            result.layout,
            numbers,
            [k is type(None) for k in operands],
        )
    except Contradiction as problem:
        return str(problem)
    ndim = len(result.shape)
    return None if is_shown(made, result.layout, ndim) else f"{fn} of these makes {made}"


def lacks(before: Layout, after: Layout, rank: int | None) -> str | None:
    """Whether a rank that has the result lacks the operand."""
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
    result: BufferType,
    rank: int,
) -> str | None:
    """The same on one rank's parts, with its attributes: those given, if any, are just these."""
    tensors = [k if isinstance(k, BufferType) and k.layout is not None else None for k in operands]
    shapes = tuple(k.shape if k is not None else None for k in tensors)
    boxes = tuple(k.box(rank) if k is not None else None for k in tensors)
    part = Part(shapes=shapes, boxes=boxes, shape=result.shape, box=result.box(rank))
    try:
        local = local_attrs(TABLE[fn], dict(attrs), part)
        mine = local if given is None else {**_left_out(fn, attrs, part), **dict(given)}
    except (AssertionError, TypeError, ValueError, LookupError):
        return f"{fn} does not take these operands"
    if mine != local:
        return f"rank {rank} runs {fn} with {_settings(local)}, not {_settings(mine)}"
    want = result.local_shape(rank)
    if 0 in want:
        return None  # then nothing is called
    parts = [_shape(k, rank) for k in operands]
    problem = _inferred(fn, tuple(local.items()), operands, parts, result, want)
    return f"on rank {rank} {problem}" if problem is not None else None


def _left_out(fn: str, attrs: Attrs, part: Part) -> dict[str, Any]:
    """What a rank's attributes are where they are not written: those of the whole."""
    boxes = tuple(_whole(s) if s is not None else None for s in part.shapes)
    whole = replace(part, boxes=boxes, box=_whole(part.shape))
    return local_attrs(TABLE[fn], dict(attrs), whole)


def _whole(shape: Shape) -> Box:
    return tuple((0, n) for n in shape)


def _settings(attrs: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in attrs.items()) or "nothing"


def _shape(kind: Kind, rank: int | None) -> Shape | None:
    """The extents of an operand, globally or on a rank; None where it is absent."""
    if isinstance(kind, BufferType):
        return kind.shape if rank is None else kind.local_shape(rank)
    return None if kind is type(None) else ()


def _inferred(
    fn: str,
    attrs: Attrs,
    operands: tuple[Kind, ...],
    shapes: list[Shape | None],
    result: BufferType,
    want: Shape,
) -> str | None:
    """What is wrong with the result of a row on operands of some shapes."""
    samples = tuple(map(_sample, operands, shapes))
    is_quick = quick_shape(fn, shapes, dict(attrs)) == want
    if is_quick and quick_dtype(fn, samples, attrs) == result.dtype:
        return None
    return _inferred_on_meta(fn, attrs, operands, shapes, result, want)


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
    result: BufferType,
    want: Shape,
) -> str | None:
    """The same by torch's own answer, which counts."""
    values = {
        str(n): _value(str(n), k, shape or ())
        for n, (k, shape) in enumerate(zip(operands, shapes, strict=True))
        if isinstance(k, BufferType)
    }
    inputs = [str(n) if isinstance(k, BufferType) else number(k) for n, k in enumerate(operands)]
    described = ", ".join(str(list(s)) for s in shapes if s is not None)
    try:
        made = infer(TABLE[fn], inputs, dict(attrs), values, None)
    except DefinitionError as error:
        return f"{fn} of {described} means nothing: {error.because}"
    except AttributeError:  # a number where only a tensor will do
        return f"{fn} does not take these operands"
    if not isinstance(made, Tensor):  # as of a comparison with nothing
        return f"{fn} does not take these operands"
    if tuple(made.shape) == want and made.dtype == result.dtype:
        return None
    return f"{fn} of {described} is {dtype_name(made.dtype)}{list(made.shape)}"


def _value(name: str, kind: BufferType, shape: Shape) -> Value:
    return Value(
        name=name,
        shape=shape,
        dtype=kind.dtype,
        kind="tensor" if kind.layout is not None else "scalar",
        order=tuple(range(len(shape))),
    )
