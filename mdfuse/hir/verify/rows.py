"""What a row of the op table makes of its operands, against what is declared.

On the global shapes, and on those of one rank: of the first one of the mesh in a global program,
which has the largest part. Answers are kept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.hir.program import BufferType
from mdfuse.hir.verify.shapes import Sample, Shape, number, quick_dtype, quick_shape
from mdfuse.ir.graph import Value, dtype_name
from mdfuse.ir.infer import infer, scalar_sample
from mdfuse.ir.ops import TABLE, Part, local_attrs
from mdfuse.layout import Layout

#: What an operand is for the inference: a buffer or scalar, the type of a number, or nothing.
Kind = BufferType | type
Attrs = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=16384)
def row_problem(
    fn: str, attrs: Attrs, operands: tuple[Kind, ...], result: BufferType, rank: int | None
) -> str | None:
    """Why a row of the op table does not make the result of its operands; None where it does.

    Args:
        fn: the row.
        attrs: its attributes, global ones without a rank, else that rank's.
        operands: buffers, scalars, or the types of numbers.
        result: the declared type.
        rank: whose program it is; None for the global one.
    """
    buffers = [k for k in operands if isinstance(k, BufferType) and k.layout is not None]
    if result.layout is None:
        return "a buffer does not become a number" if buffers else None
    if not buffers and not TABLE[fn].is_creation:
        return f"{fn} of numbers is a number"
    for k in buffers:
        assert k.layout is not None
        if lack := lacks(k.layout, result.layout, rank):
            return lack
    if rank is not None:
        return _problem_on(fn, attrs, operands, result, rank)
    if any(k.layout is not None and _is_chunk(k.layout) for k in (result, *buffers)):
        return _problem_on_first(fn, attrs, operands, result, result.layout.mesh.first)
    shapes = [_shape(k, None) for k in operands]
    if fn == "expand" and not attrs:  # to the shape that the result has
        attrs = (("shape", result.shape),)
    problem = _inferred(fn, attrs, operands, shapes, result, result.shape)
    return problem or _problem_on_first(fn, attrs, operands, result, result.layout.mesh.first)


def _is_chunk(layout: Layout) -> bool:
    return layout.stream is not None and layout.stream.index is not None


def lacks(before: Layout, after: Layout, rank: int | None) -> str | None:
    """Whether a rank that has the result lacks the operand."""
    if before.mesh is after.mesh or before.mesh == after.mesh:
        return None
    ranks = after.mesh.ranks if rank is None else (rank,)
    missing = [r for r in ranks if r not in before.mesh]
    return f"rank {missing[0]} has no part of an operand on {before.mesh}" if missing else None


def _problem_on_first(
    fn: str, attrs: Attrs, operands: tuple[Kind, ...], result: BufferType, rank: int
) -> str | None:
    """The same on the first rank of a mesh; the attributes are still global."""
    tensors = [k if isinstance(k, BufferType) and k.layout is not None else None for k in operands]
    part = Part(
        shapes=tuple(k.shape if k is not None else None for k in tensors),
        boxes=tuple(k.box(rank) if k is not None else None for k in tensors),
        shape=result.shape,
        box=result.box(rank),
    )
    try:
        local = tuple(local_attrs(TABLE[fn], dict(attrs), part).items())
    except (AssertionError, TypeError, ValueError, LookupError):
        return f"{fn} does not take these operands"
    return _problem_on(fn, local, operands, result, rank)


def _problem_on(
    fn: str, attrs: Attrs, operands: tuple[Kind, ...], result: BufferType, rank: int
) -> str | None:
    want = result.local_shape(rank)
    if 0 in want:
        return None  # then nothing is called
    shapes = [_shape(k, rank) for k in operands]
    problem = _inferred(fn, attrs, operands, shapes, result, want)
    return f"on rank {rank} {problem}" if problem is not None else None


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
    assert isinstance(made, Tensor)
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
