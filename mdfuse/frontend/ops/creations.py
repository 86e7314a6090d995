"""Tensors made of numbers: no rank sends anything for them, each makes its own part.

Without `mesh=`, `layout=` or `.on()`, the layout is inferred from the readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import (
    Integers,
    Operand,
    check_fill,
    definition_of,
    named,
    record,
    sequence,
)
from mdfuse.frontend.plain import brief, is_in_range
from mdfuse.layouts.layout import Layout

#: The most numbers of a constant; they stand in the program.
_LIMIT = 4096


def _placed(x: Handle, mesh: Any, layout: Any) -> Handle:
    if isinstance(layout, Layout):
        mesh, layout = layout, None
    return x if mesh is None and layout is None else x.on(mesh, layout)


def _default_dtype(value: Any) -> torch.dtype:
    kind = value.dtype if isinstance(value, Handle) else None
    if isinstance(value, bool) or kind == torch.bool:
        return torch.bool
    is_whole = isinstance(value, int | Extent) or (kind and not kind.is_floating_point)
    return torch.int64 if is_whole else torch.get_default_dtype()


def full(
    shape: Integers,
    fill_value: Operand,
    *,
    dtype: torch.dtype | None = None,
    mesh: Any = None,
    layout: Any = None,
) -> Handle:
    """One number everywhere; a scalar input may be that number.

    Args:
        shape: global extents.
        fill_value: a number, or a scalar input.
        dtype: by default that of the number: bool, int64, or torch's default.
        mesh: where it lives.
        layout: axis -> placement, or a `Layout`.
    """
    dtype = dtype or _default_dtype(fill_value)
    check_fill("full", fill_value, dtype)
    definition = definition_of(fill_value)
    attrs = {"shape": sequence(shape, ()), "dtype": dtype}
    return _placed(definition.record("full", (fill_value,), attrs), mesh, layout)


def _full_of(name: str, number: int, doc: str) -> Callable[..., Handle]:
    def function(
        shape: Integers,
        *further: int,
        dtype: torch.dtype | None = None,
        mesh: Any = None,
        layout: Any = None,
    ) -> Handle:
        dtype = dtype or torch.get_default_dtype()
        return full(sequence(shape, further), number, dtype=dtype, mesh=mesh, layout=layout)

    return named(name, doc, function)


zeros = _full_of("zeros", 0, "Zeros, of torch's default dtype.")
ones = _full_of("ones", 1, "Ones, of torch's default dtype.")
empty = _full_of("empty", 0, "Zeros, since a program computes the same in every run.")


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: torch.dtype | None = None,
    mesh: Any = None,
    layout: Any = None,
) -> Handle:
    """start, start + step, … below end; with one number 0, 1, … below it.

    Floats are computed in f64 and rounded once.
    """
    if end is None:
        start, end = 0, start
    span = end - start
    is_away = span < 0 if step > 0 else span > 0
    if not _is_finite(start, end, step) or step == 0 or is_away:
        raise DefinitionError(
            f"arange({brief(start)}, {brief(end)}, {brief(step)})",
            because="the steps lead from start to end",
            hint="a step of the sign of end - start",
        )
    is_whole = not any(isinstance(n, float) for n in (start, end, step))
    n = -(-span // step) if is_whole else math.ceil(span / step)
    dtype = dtype or (torch.int64 if is_whole else torch.get_default_dtype())
    if dtype == torch.bool or not is_in_range(n):
        raise DefinitionError(
            f"arange of {dtype} with {brief(n)} elements",
            because="it counts, in a dtype of numbers and in 64 bits",
            hint="arange(n) is of torch.int64",
        )
    attrs = {"shape": (n,), "dtype": dtype}
    return _placed(definition_of().record("arange", (start, step), attrs), mesh, layout)


def linspace(
    start: float,
    end: float,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    mesh: Any = None,
    layout: Any = None,
) -> Handle:
    """So many numbers from start to end (inclusive), equally far from each other."""
    dtype = dtype or torch.get_default_dtype()
    if steps < 0 or not _is_finite(start, end) or not dtype.is_floating_point:
        raise DefinitionError(
            f"linspace({brief(start)}, {brief(end)}, {steps}) of {dtype}",
            because="it is a number of floats from one number to another",
            hint="arange counts in integers",
        )
    step = (end - start) / (steps - 1) if steps > 1 else 0.0
    at = arange(steps, dtype=dtype)
    ahead, behind = at * step + start, end - ((steps - 1) - at) * step
    is_behind = record("ge", at, steps // 2 if steps > 1 else 1)
    return _placed(record("where", is_behind, behind, ahead), mesh, layout)


def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    mesh: Any = None,
    layout: Any = None,
) -> Handle:
    """A matrix of n rows and m columns (n by default) with ones along its diagonal."""
    rows = record("unsqueeze", arange(n), dims=(1,))
    is_there = record("eq", rows, arange(n if m is None else m))
    diagonal = record("cast", is_there, dtype=dtype or torch.get_default_dtype())
    return _placed(diagonal, mesh, layout)


def scalar_tensor(fill_value: Operand, *, dtype: torch.dtype | None = None) -> Handle:
    """A tensor of one number and no dims, of torch's default dtype."""
    return full((), fill_value, dtype=dtype or torch.get_default_dtype())


def _triangle(name: str) -> Callable[..., Handle]:
    def function(rows: int, columns: int, offset: int = 0) -> Handle:
        if rows < 0 or columns < 0:
            raise DefinitionError(
                f"{name}({rows}, {columns})", because="extents start at 0", hint="0 or more"
            )
        return tensor(getattr(torch, name)(rows, columns, offset))

    which = "a lower" if name.startswith("tril") else "an upper"
    doc = f"Rows and columns of the elements of {which} triangle, as a constant."
    return named(name, doc, function)


tril_indices, triu_indices = _triangle("tril_indices"), _triangle("triu_indices")


def _is_finite(*numbers: Any) -> bool:
    return all(math.isfinite(n) for n in numbers if isinstance(n, float))


def tensor(
    data: Any, *, dtype: torch.dtype | None = None, mesh: Any = None, layout: Any = None
) -> Handle:
    """A constant: up to 4096 numbers that stand in the program.

    Args:
        data: a number, nested lists of numbers, or a small tensor, which is copied now.
        dtype: by default the one that `torch.tensor` takes.
        mesh: where it lives.
        layout: axis -> placement, or a `Layout`.
    """
    whole = _numbers(data, dtype)
    if whole.numel() > _LIMIT:
        raise DefinitionError(
            f"a constant of {whole.numel()} numbers",
            because=f"its numbers stand in the program, {_LIMIT} at most",
            hint="make it an input with fd.define_tensor",
        )
    attrs = {
        "values": tuple(whole.flatten().tolist()),
        "shape": tuple(whole.shape),
        "dtype": whole.dtype,
    }
    definition = definition_of()
    constant = definition.record("constant", (), attrs)
    definition.numbers[constant.id] = whole
    return _placed(constant, mesh, layout)


def _numbers(data: Any, dtype: torch.dtype | None) -> torch.Tensor:
    given = data if isinstance(data, torch.Tensor) else None
    is_plain = given is None or (
        given.layout == torch.strided
        and not (given.is_nested or given.is_quantized or given.is_meta or given.requires_grad)
        and type(given) is torch.Tensor
    )
    try:
        converted = (
            given.detach().to(dtype or given.dtype) if given is not None and is_plain else None
        )
        converted = torch.tensor(data, dtype=dtype) if given is None else converted
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise DefinitionError(
            f"a constant of {brief(data)}",
            because=f"torch says: {str(error).splitlines()[0]}",
            hint="a number, or nested lists of numbers of one length",
        ) from error
    if converted is None or converted.is_complex():
        raise DefinitionError(
            f"a constant of {brief(data)}",
            because="a constant is a dense tensor of real numbers that nothing trains",
            hint="make it an input with fd.define_tensor",
        )
    return converted


# -- like another --------------------------------------------------------------------------------


def full_like(x: Handle, fill_value: Operand, *, dtype: torch.dtype | None = None) -> Handle:
    """One number everywhere, in the shape and the layout of x, which is not read."""
    dtype = dtype or x.dtype
    check_fill("full_like", fill_value, dtype)
    return record("full_like", x, fill_value, dtype=dtype)


def zeros_like(x: Handle, *, dtype: torch.dtype | None = None) -> Handle:
    """Zeros in the shape and the layout of x."""
    return full_like(x, 0, dtype=dtype)


def ones_like(x: Handle, *, dtype: torch.dtype | None = None) -> Handle:
    """Ones in the shape and the layout of x."""
    return full_like(x, 1, dtype=dtype)


def new_full(
    x: Handle, shape: Integers, fill_value: Operand, *, dtype: torch.dtype | None = None
) -> Handle:
    """One number everywhere, in the dtype of x."""
    return full(shape, fill_value, dtype=dtype or x.dtype)


def new_zeros(
    x: Handle, shape: Integers, *further: int, dtype: torch.dtype | None = None
) -> Handle:
    """Zeros in the dtype of x."""
    return zeros(shape, *further, dtype=dtype or x.dtype)


def new_ones(x: Handle, shape: Integers, *further: int, dtype: torch.dtype | None = None) -> Handle:
    """Ones in the dtype of x."""
    return ones(shape, *further, dtype=dtype or x.dtype)


def empty_like(x: Handle, *, dtype: torch.dtype | None = None) -> Handle:
    """Zeros in the shape and the layout of x."""
    return zeros_like(x, dtype=dtype)


def new_empty(
    x: Handle, shape: Integers, *further: int, dtype: torch.dtype | None = None
) -> Handle:
    """Zeros in the dtype of x."""
    return new_zeros(x, shape, *further, dtype=dtype)
