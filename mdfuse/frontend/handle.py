"""Handles: what a user computes with while a fusion is being defined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.frontend.stride_order import stride_order_of
from mdfuse.ir.graph import Value
from mdfuse.layout import Layout, Placement, Stream
from mdfuse.mesh import DeviceMesh

if TYPE_CHECKING:
    from mdfuse.frontend.definition import FusionDefinition


def _binary(op: str, swapped: bool = False) -> Callable[[Handle, Any], Handle]:
    def method(self: Handle, other: Any) -> Handle:
        operands = (other, self) if swapped else (self, other)
        return self.definition.record(op, operands)

    return method


class Handle:
    """A value of a definition: a tensor in global view, or a host scalar.

    Operators and methods record expressions; `.on(mesh, {...})` states where the value lives.
    """

    __slots__ = ("constant", "definition", "id", "name")

    def __init__(
        self,
        definition: FusionDefinition,
        name: str,
        id_: int,
        constant: float | int | bool | None = None,
    ) -> None:
        self.definition, self.name, self.id, self.constant = definition, name, id_, constant

    @property
    def value(self) -> Value:
        """The IR value that it stands for, as it is now."""
        return self.definition.values[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global extents."""
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def ndim(self) -> int:
        return len(self.value.shape)

    @property
    def layout(self) -> Layout | None:
        """The layout that the user stated, if any."""
        return self.value.layout

    @property
    def stride_order_requirement(self) -> tuple[int, ...] | None:
        """The memory order required of this value: each dim's place, 0 the fastest; or None."""
        return stride_order_of(self.value.order) if self.value.is_order_required else None

    def size(self, dim: int | None = None) -> Any:
        """Global extents, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    def on(
        self,
        mesh: DeviceMesh | Layout,
        layout: Mapping[str, Placement] | None = None,
        order: Mapping[int, Sequence[str]] | None = None,
        stream: Stream | None = None,
    ) -> Handle:
        """State this value's layout. It is a law: stated once, before the value is used.

        Args:
            mesh: a mesh (anything `DeviceMesh` takes), or a `Layout`.
            layout: axis -> placement; axes not named are replicated.
            order: dim -> the axes that split it, outermost first.
            stream: a host loop over chunks.

        Returns:
            This handle.

        Raises:
            LayoutError: a second layout, a layout after the first use, a dim out of range.
        """
        self.definition.place(self, mesh, layout, order, stream)
        return self

    __add__, __radd__ = _binary("add"), _binary("add", True)
    __sub__, __rsub__ = _binary("sub"), _binary("sub", True)
    __mul__, __rmul__ = _binary("mul"), _binary("mul", True)
    __truediv__, __rtruediv__ = _binary("div"), _binary("div", True)
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _binary("floor_divide", True)
    __mod__, __rmod__ = _binary("remainder"), _binary("remainder", True)
    __pow__, __rpow__ = _binary("pow"), _binary("pow", True)
    __matmul__, __rmatmul__ = _binary("matmul"), _binary("matmul", True)
    __and__, __rand__ = _binary("bitwise_and"), _binary("bitwise_and", True)
    __or__, __ror__ = _binary("bitwise_or"), _binary("bitwise_or", True)
    __xor__, __rxor__ = _binary("bitwise_xor"), _binary("bitwise_xor", True)
    __lt__, __le__, __gt__, __ge__ = map(_binary, ("lt", "le", "gt", "ge"))
    __eq__ = _binary("eq")  # type: ignore[assignment]
    __ne__ = _binary("ne")  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __neg__(self) -> Handle:
        return self.definition.record("neg", (self,))

    def __abs__(self) -> Handle:
        return self.definition.record("abs", (self,))

    def __invert__(self) -> Handle:
        return self.definition.record("bitwise_not", (self,))

    def __bool__(self) -> bool:
        raise DefinitionError(
            f"the truth of %{self.name} is not known while the fusion is defined",
            where=self.definition.fusion_where(),
            because="a handle stands for a tensor that does not exist yet",
            hint="use fd.ops.where(condition, a, b)",
        )

    def __iter__(self) -> Any:
        raise DefinitionError(f"%{self.name} cannot be iterated", hint="index it: x[0], x[1], …")

    def __getitem__(self, index: Any) -> Handle:
        from mdfuse.frontend import ops

        return ops.index(self, index)

    def __repr__(self) -> str:
        from mdfuse.ir.graph import value_text

        return value_text(self.value)

    # -- what a torch user would type ------------------------------------------------------------

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Handle:
        from mdfuse.frontend import ops

        return ops.BY_NAME[name](self, *args, **kwargs)

    def sum(self, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Handle:
        """Sum over dims (all by default)."""
        return self._call("sum", dims, keepdim, dtype)

    def mean(self, dims: Any = None, keepdim: bool = False) -> Handle:
        """Mean over dims (all by default)."""
        return self._call("mean", dims, keepdim)

    def reshape(self, *shape: Any) -> Handle:
        """The same elements in another shape; one extent may be -1."""
        return self._call("reshape", shape[0] if len(shape) == 1 else shape)

    view = reshape

    def permute(self, *dims: Any) -> Handle:
        """Dims in another order."""
        return self._call("permute", dims[0] if len(dims) == 1 else dims)

    def transpose(self, a: int, b: int) -> Handle:
        """Two dims swapped."""
        return self._call("transpose", a, b)

    @property
    def T(self) -> Handle:
        """All dims reversed."""
        return self._call("permute", tuple(reversed(range(self.ndim))))

    def unsqueeze(self, dim: int) -> Handle:
        """A new dim of extent 1."""
        return self._call("unsqueeze", dim)

    def squeeze(self, dims: Any = None) -> Handle:
        """Without dims of extent 1."""
        return self._call("squeeze", dims)

    def expand(self, *shape: Any) -> Handle:
        """Dims of extent 1 repeated without copies."""
        return self._call("expand", shape[0] if len(shape) == 1 else shape)

    def to(self, dtype: torch.dtype) -> Handle:
        """Another dtype."""
        return self._call("cast", dtype)
