"""Operators and methods of handles, as torch users write them.

The operations themselves are in `mdfuse.frontend.ops`, which cannot be imported here (its functions
take handles); it provides them when it is imported, before there can be a handle.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from mdfuse.errors import DefinitionError, counted
from mdfuse.frontend.hints import REASONS, hint_for, reason_for
from mdfuse.frontend.plain import brief, plain_number

if TYPE_CHECKING:
    from mdfuse.frontend.definition import FusionDefinition
    from mdfuse.frontend.handle import Handle

#: Every operation by name.
OPERATIONS: dict[str, Callable[..., Any]] = {}

#: Record a call of a function of torch: (function, arguments, keyword arguments) -> the result.
TorchCall = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]

Dims = int | Sequence[int] | None


class UnknownOperation(DefinitionError, AttributeError):
    """A name that is no operation."""


def _operator(op: str, swapped: bool = False) -> Callable[[Any, Any], Handle]:
    def method(self: Any, other: Any) -> Handle:
        operands = (other, self) if swapped else (self, other)
        result: Handle = self.definition.record(op, operands)
        return result

    return method


def _sign(op: str) -> Callable[[Any], Handle]:
    def method(self: Any) -> Handle:
        result: Handle = self.definition.record(op, (self,))
        return result

    return method


def _unknown_number(kind: str) -> Callable[[Any], NoReturn]:
    """Return a method that refuses to convert a handle to a Python number."""

    def method(self: Any) -> NoReturn:
        raise DefinitionError(
            f"{kind}(%{self.name}) is not known while the fusion is defined",
            where=self.definition.fusion_where(),
            because="a handle stands for a tensor that does not exist yet",
            hint="compute with the value itself, or run the program and look at its output",
        )

    return method


class Methods:
    """Operators and methods of handles; `Handle` adds the value."""

    __slots__ = ()

    #: `mdfuse.frontend.torch_functions` provides it.
    torch_call: ClassVar[TorchCall]

    if TYPE_CHECKING:  # of Handle
        definition: FusionDefinition

        @property
        def name(self) -> str: ...
        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> torch.dtype: ...
        @property
        def ndim(self) -> int: ...

    # -- operators -------------------------------------------------------------------------------

    __add__, __radd__ = _operator("add"), _operator("add", True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", True)
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _operator("floor_divide", True)
    __mod__, __rmod__ = _operator("remainder"), _operator("remainder", True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", True)
    __matmul__, __rmatmul__ = _operator("matmul"), _operator("matmul", True)
    __and__, __rand__ = _operator("bitwise_and"), _operator("bitwise_and", True)
    __or__, __ror__ = _operator("bitwise_or"), _operator("bitwise_or", True)
    __xor__, __rxor__ = _operator("bitwise_xor"), _operator("bitwise_xor", True)
    __lshift__, __rlshift__ = _operator("bitwise_left_shift"), _operator("bitwise_left_shift", True)
    __rshift__, __rrshift__ = (
        _operator("bitwise_right_shift"), _operator("bitwise_right_shift", True)
    )  # fmt: skip
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))
    __eq__ = _operator("eq")  # type: ignore[assignment]
    __ne__ = _operator("ne")  # type: ignore[assignment]
    __hash__ = object.__hash__
    __neg__, __abs__, __invert__, __pos__ = map(_sign, ("neg", "abs", "bitwise_not", "set"))

    #: numpy leaves `np.float64(2) * x` to x, instead of looking for an array in it.
    __array_ufunc__ = None

    # -- refused conversions ---------------------------------------------------------------------

    __float__, __int__, __index__, __complex__ = map(
        _unknown_number, ("float", "int", "operator.index", "complex")
    )

    def __bool__(self) -> bool:
        raise DefinitionError(
            f"the truth of %{self.name} is not known while the fusion is defined",
            where=self.definition.fusion_where(),
            because="a handle stands for a tensor that does not exist yet",
            hint="use fd.ops.where(condition, a, b)",
        )

    def __iter__(self) -> Any:
        if not self.shape:
            raise DefinitionError(
                f"%{self.name} cannot be iterated",
                because="it has no dims",
                hint="the value itself",
            )
        return iter(self._call("unbind", 0))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise DefinitionError(
            f"%{self.name}[…] = … writes into a value",
            because="a value of a fusion is computed once",
            hint="make another: fd.ops.where(mask, new, x), or fd.ops.cat([x[:2], new, x[3:]])",
        )

    def __getattr__(self, name: str) -> Any:
        """Raise an error with a replacement for a missing attribute."""
        if name.startswith("_") or hasattr(type(self), name):  # a slot that is not set yet
            raise AttributeError(name)
        if name.endswith("_") and name not in REASONS:
            raise UnknownOperation(
                f"%{self.name}.{name} writes into a value",
                because="a value of a fusion is computed once",
                hint=f"x = x.{name.rstrip('_')}(...)",
            )
        raise UnknownOperation(
            f"%{self.name} has no {name!r}", because=reason_for(name), hint=hint_for(name)
        )

    # -- facts -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        if not self.shape:
            raise DefinitionError(
                f"len(%{self.name})",
                because="it has no dims",
                hint="x.numel() is 1; torch.tensor(x) and the like need a tensor that exists",
            )
        return self.shape[0]

    def size(self, dim: int | None = None) -> Any:
        """Global extents, or one of them."""
        return self.shape if dim is None else self.shape[self._place(dim)]

    def _place(self, dim: Any) -> int:
        dim = plain_number(dim)
        is_dim = isinstance(dim, int) and not isinstance(dim, bool)
        if not is_dim or not -self.ndim <= dim < self.ndim:
            raise DefinitionError(
                f"size({brief(dim)}) of %{self.name}, which has {counted(self.ndim, 'dim')}",
                hint="a negative dim counts from the last one",
            )
        return int(dim)

    def dim(self) -> int:
        """The number of dims."""
        return self.ndim

    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Return whether the dtype is a floating one."""
        return self.dtype.is_floating_point

    # -- shapes ----------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Handle:
        return self._call("index", index)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Handle:
        result: Handle = OPERATIONS[name](self, *args, **kwargs)
        return result

    def view(self, *shape: Any, **named: Any) -> Handle:
        """`reshape`; it never fails for the memory order of x."""
        if shape and isinstance(shape[0], torch.dtype):
            raise DefinitionError(
                f"%{self.name}.view({shape[0]})",
                because="bits are not read as another dtype",
                hint=f"x.to({shape[0]}) converts the numbers",
            )
        return self._call("reshape", *shape, **named)

    @property
    def T(self) -> Handle:
        """All dims reversed."""
        return self._call("permute", tuple(reversed(range(self.ndim))))

    @property
    def mT(self) -> Handle:
        """The last two dims swapped."""
        return self._call("transpose", -2, -1)

    @property
    def H(self) -> Handle:
        """A matrix with its dims swapped, and conjugated if complex."""
        if self.ndim not in (0, 2):
            raise DefinitionError(
                f"%{self.name}.H", because="it is about matrices", hint="x.mH for batches of them"
            )
        return self.mH if self.ndim else self._call("set")

    @property
    def mH(self) -> Handle:
        """The last two dims swapped, and conjugated if complex."""
        return self._call("transpose", -2, -1)._call("conj")

    # -- numbers ---------------------------------------------------------------------------------

    def type(self, dtype: Any) -> Handle:
        """`x.to(dtype)`."""
        return self.to(dtype)

    def to(self, dtype: Any = None, *further: Any, **settings: Any) -> Handle:
        """Another dtype (or another value's); the value itself if it has it already."""
        if not isinstance(dtype, torch.dtype) and isinstance(dtype, Methods):
            dtype = dtype.dtype
        if settings.get("memory_format") == torch.channels_last and self.ndim == 4 and not further:
            self = self._call("stride_order", (3, 0, 2, 1))
            dtype, settings = self.dtype if dtype is None else dtype, {}
        if not isinstance(dtype, torch.dtype) or further or settings:
            raise DefinitionError(
                f"%{self.name}.to({', '.join(map(str, (dtype, *further, *settings)))})",
                because="to() takes a dtype; where a value lives is what its layout says",
                hint="x.to(torch.float32), or mf.ops.set(x).on(mesh, {...})",
            )
        return self._call("as_dtype", dtype)

    def where(self, condition: Handle, other: Any) -> Handle:
        """x where the condition holds, else other."""
        result: Handle = OPERATIONS["where"](condition, self, other)
        return result


#: Methods that are named after a dtype.
_DTYPES = {
    "bool": torch.bool, "char": torch.int8, "byte": torch.uint8, "short": torch.int16,
    "int": torch.int32, "long": torch.int64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "float": torch.float32, "double": torch.float64,
}  # fmt: skip


def _conversion(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    def method(self: Methods) -> Any:
        return OPERATIONS["as_dtype"](self, dtype)

    method.__name__, method.__doc__ = name, f"`x.to({dtype})`."
    return method


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that other arguments than it has raise an error that names its own."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except TypeError:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise DefinitionError(
                    f"{method.__name__}: {error}",
                    because=f"it is x.{method.__name__}({', '.join([*signature.parameters][1:])})",
                    hint="leave the argument out, or name it as there",
                ) from None
            raise

    return explained


for _name in ("size", "dim", "numel", "is_floating_point", "where", "type"):
    setattr(Methods, _name, _explained(getattr(Methods, _name)))
for _name, _dtype in _DTYPES.items():
    setattr(Methods, _name, _explained(_conversion(_name, _dtype)))
for _name, _other in {"nelement": "numel", "ndimension": "dim"}.items():
    setattr(Methods, _name, getattr(Methods, _other))


def provide(operations: Mapping[str, Callable[..., Any]]) -> None:
    """Register operations; those named as methods of torch's tensors become methods unchanged."""
    OPERATIONS.update(operations)
    for name, operation in operations.items():
        if hasattr(torch.Tensor, name) and name not in vars(Methods):
            setattr(Methods, name, operation)
