"""Shared helpers of operations: recording, dtypes and checks of dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from mdfuse.errors import DefinitionError, counted
from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.plain import brief

if TYPE_CHECKING:
    from mdfuse.frontend.definition import FusionDefinition

#: The definition whose `with` block runs; operations without operands go there.
current: ContextVar[FusionDefinition | None] = ContextVar("mdfuse.definition", default=None)

#: Operations return a handle, or several.
Operation = Callable[..., Any]
Elementwise = Callable[..., Handle]

# Annotations of arguments that `mdfuse.frontend.argument_kinds` explains.
Operand = Any
Integers = int | Sequence[int]
Numbers = float | Sequence[float]
Dims = Integers | None
Sizes = int | Sequence[int | None] | None
Flags = Sequence[bool] | Sequence[int]

_INTEGERS = (int, Extent)


def named(name: str, doc: str, function: Operation) -> Operation:
    """Return an operation with its name and its docstring."""
    function.__name__, function.__doc__ = name, doc
    return function


def definition_of(*operands: Any) -> FusionDefinition:
    """Return the definition of the first operand that is a value, else the open one."""
    for x in operands:
        if isinstance(x, Handle):
            return x.definition
    definition = current.get()
    if definition is None:
        raise DefinitionError(
            "an operation without operands needs a definition",
            hint="call it inside `with FusionDefinition() as fd:` or a traced function",
        )
    return definition


def record(op: str, *operands: Any, **attrs: Any) -> Handle:
    """Append one expression; that all operands are of one definition is checked there."""
    first = operands[0]
    definition = first.definition if type(first) is Handle else definition_of(*operands)
    return definition.record(op, operands, attrs)


def record_several(op: str, *operands: Any, **attrs: Any) -> tuple[Handle, ...]:
    """Append one expression with several results."""
    return definition_of(*operands).record_several(op, operands, attrs)


@contextmanager
def in_block(definition: FusionDefinition, begins: bool | str | None) -> Iterator[None]:
    """Recompute the values of the block in gradients; see `FusionDefinition.begin_recompute`."""
    definition.begin_recompute(begins)
    try:
        yield
    finally:
        definition.end_recompute()


def again(x: Handle, is_more: bool = False) -> AbstractContextManager[None]:
    """Recompute the values of the block in gradients, instead of keeping them.

    Use it for elementwise parts of composed operations; not for sums over dims.

    Args:
        x: a value of the definition.
        is_more: continue the last such block.
    """
    return in_block(x.definition, None if is_more else "")


def shown(x: Any) -> str:
    """Return a value with its type, for messages; refuse an argument that is no value."""
    if not isinstance(x, Handle):
        raise DefinitionError(
            f"{type(x).__name__} is no value of a fusion",
            because="operations take values of the definition, and numbers",
            hint="make it an input with fd.define_tensor",
        )
    return f"%{x.name}: {x.value.type_text()}"


def check_dtype(x: Handle, other: Handle, what: str, hint: str) -> None:
    """Raise DefinitionError unless two values have one dtype; texts have places for both, or it."""
    if other.dtype != x.dtype:
        raise DefinitionError(
            what.format(shown(x), shown(other)),
            because="both have one dtype",
            hint=hint.format(x.dtype),
        )


def listed(name: str, tensors: Sequence[Any]) -> tuple[Handle, ...]:
    """Return values passed one by one, or as one list; at least one."""
    is_list = len(tensors) == 1 and not isinstance(tensors[0], Handle)
    operands = tuple(tensors[0] if is_list else tensors)
    if not operands or not all(isinstance(x, Handle) for x in operands):
        raise DefinitionError(
            f"{name} of {counted(len(operands), 'operand')}",
            because="it takes values of the fusion, one by one or as one list, and at least one",
            hint=f"{name}(x, y)",
        )
    return operands


# -- dtypes --------------------------------------------------------------------------------------


def as_dtype(x: Handle, dtype: torch.dtype) -> Handle:
    """Return x in another dtype, without a copy if it has it already."""
    return record("set", x) if x.dtype == dtype else record("cast", x, dtype=dtype)


def is_narrow(x: Handle) -> bool:
    """Return whether x has 16 bits with fractions."""
    return x.dtype in (torch.float16, torch.bfloat16)


def in_f32(x: Handle) -> Handle:
    """Return f16 and bf16 in f32, which sums and squares need; other dtypes unchanged."""
    return record("cast", x, dtype=torch.float32) if is_narrow(x) else x


def with_fractions(x: Handle) -> Handle:
    """Return a value that has norms; raise DefinitionError for integers."""
    if not is_inexact(x):
        raise DefinitionError(
            f"a norm of {shown(x)}",
            because="a norm has fractions, which its dtype has not",
            hint="cast it to a float dtype before",
        )
    return x


def is_inexact(x: Handle) -> bool:
    """Return whether x has fractions: floating and complex dtypes."""
    return x.dtype.is_floating_point or x.dtype.is_complex


def floating(x: Handle) -> Handle:
    """Return integers and bools in torch's default dtype; other dtypes unchanged."""
    return x if is_inexact(x) else record("cast", x, dtype=torch.get_default_dtype())


def real_only(name: str, *operands: Handle) -> None:
    """Raise DefinitionError for complex operands of an op on real numbers."""
    for x in operands:
        if x.dtype.is_complex:
            raise DefinitionError(
                f"{name} of {shown(x)}",
                because="it is of real numbers",
                hint="torch.view_as_real(x), or the abs of x",
            )


def squared(x: Handle) -> Handle:
    """Return the squares of absolute values: real numbers, also for complex x."""
    if not x.dtype.is_complex:
        return x * x
    real, imag = record("real", x), record("imag", x)
    return real * real + imag * imag


def back(y: Handle, x: Handle, is_real: bool = False) -> Handle:
    """Return a result in x's dtype; a real result of complex x in the dtype of its parts."""
    dtype = x.dtype.to_real() if is_real else x.dtype
    return y if y.dtype == dtype else record("cast", y, dtype=dtype)


def check_fill(name: str, value: Any, dtype: torch.dtype) -> None:
    """Raise DefinitionError for a number that a dtype cannot hold; inputs are checked in runs."""
    if isinstance(value, Handle):
        if value.is_tensor:
            raise DefinitionError(
                f"{name} with %{value.name}: {value.value.type_text()}",
                because="one number fills the tensor",
                hint=f"expand(%{value.name}, shape) repeats a value",
            )
        return
    number = value.number if isinstance(value, Extent) else value
    try:
        torch.full((2,), number, dtype=dtype)  # torch takes more for a single element
    except (RuntimeError, TypeError, OverflowError) as error:
        raise DefinitionError(
            f"{name} with {brief(value)} of {dtype}",
            because=f"torch says: {str(error).splitlines()[0]}",
            hint="a number that the dtype has",
        ) from error


def check_factor(name: str, value: Any, x: Any, is_wide: bool = False) -> None:
    """Raise DefinitionError for a number that is too large for the dtype of x.

    Args:
        name: of the operation, and of the number.
        value: a number; other values are not checked.
        x: the floats; other dtypes are not checked.
        is_wide: torch computes with the number in f32 where these have 16 bits.
    """
    if isinstance(value, float) and isinstance(x, Handle) and x.dtype.is_floating_point:
        check_fill(name, value, torch.float32 if is_wide and is_narrow(x) else x.dtype)


# -- dims ----------------------------------------------------------------------------------------


def chosen(dim: Dims, dims: Dims) -> Dims:
    """Return the argument `dim=` (torch's name) or `dims=`."""
    if dims is None:
        return dim
    if dim is None:
        return dims
    raise DefinitionError(
        f"dim={dim} and dims={dims}",
        because="they are two names of one argument",
        hint="leave one of them out",
    )


def checked(x: Handle, dim: Dims, dims: Integers | None = None) -> tuple[int, ...] | None:
    """Return `dim=` or `dims=` as a tuple, each checked against x; None stays."""
    dims = dim if dims is None else chosen(dim, dims)
    if dims is None:
        return None
    if type(dims) is int and type(x) is Handle:  # the usual case, at once
        ndim = len(x.fact.shape)
        if -ndim <= dims < ndim:
            return (dims,)
    given = tuple(dims) if isinstance(dims, Sequence) else (dims,)
    ndim = max(x.ndim, 1)  # torch lets a scalar have dims 0 and -1
    if not all(_is_dim(d) and -ndim <= d < ndim for d in given):
        raise out_of_range(x, given)
    if len({d % ndim for d in given}) < len(given):
        raise DefinitionError(
            f"dims {given} of {shown(x)}",
            because="a dim is named once",
            hint="leave the repeated ones out",
        )
    return given if x.ndim else ()


def _is_dim(dim: Any) -> bool:
    """Return whether dim is an integer; a bool is some other argument at a wrong place."""
    return isinstance(dim, int) and not isinstance(dim, bool)


def place(x: Handle, dim: int, new: int = 0) -> int:
    """Return a dim of x counted from the first; new=1 also allows the place after the last."""
    ndim = len(x.fact.shape) + new or 1
    if type(dim) is int and -ndim <= dim < ndim:  # the usual case, at once
        return dim % ndim
    if not _is_dim(dim) or not -ndim <= dim < ndim:
        raise out_of_range(x, (dim,))
    return dim % ndim


def own_place(x: Handle, dim: int) -> int:
    """Return an existing dim of x, counted from the first; a value without dims has none."""
    if not x.ndim:
        raise out_of_range(x, (dim,))
    return place(x, dim)


def out_of_range(x: Handle, dims: Sequence[Any]) -> DefinitionError:
    """Return the error for dims that x does not have."""
    return DefinitionError(
        f"dims {tuple(dims)} of {shown(x)}",
        because=f"its dims go from {-x.ndim} to {x.ndim - 1}" if x.ndim else "it has no dims",
        hint="a negative dim counts from the last one",
    )


def sequence(first: Any, further: Sequence[Any]) -> tuple[Any, ...]:
    """Return extents or dims passed one by one, or as one sequence."""
    if further:
        return (first, *further)
    return (first,) if isinstance(first, _INTEGERS) else tuple(first)
