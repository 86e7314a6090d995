"""Handles: the values of a fusion while it is being defined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mdfuse.errors import LayoutError
from mdfuse.frontend.methods import Methods
from mdfuse.frontend.placing import placed
from mdfuse.ir.graph import Value, value_text
from mdfuse.layouts.layout import Layout, Placement
from mdfuse.layouts.stream import Stream
from mdfuse.mesh import DeviceMesh

if TYPE_CHECKING:
    from mdfuse.frontend.cache import Fact
    from mdfuse.frontend.definition import FusionDefinition


class ValueId(int):
    """The id of a value; the type distinguishes it from operands that are numbers."""


class Handle(Methods):
    """A value of a definition: a tensor in global view, or a host scalar.

    Operators and methods (`Methods`) record expressions; `.on(mesh, {...})` states the layout.
    """

    __slots__ = ("definition", "fact", "id")

    def __init__(self, definition: FusionDefinition, id_: int, fact: Fact) -> None:
        self.definition = definition
        self.id = id_
        self.fact = fact

    @property
    def name(self) -> str:
        """The name of the value in printed programs."""
        return self.value.name

    @property
    def value(self) -> Value:
        """The IR value that this handle stands for; later calls may rename it."""
        return self.definition.value_of(self.id)

    @property
    def constant(self) -> float | int | bool | None:
        """The number, if the handle is a constant of the definition; else None."""
        return self.fact.constant

    @property
    def is_tensor(self) -> bool:
        """Return whether this is a tensor, and not a number that the host holds."""
        return self.fact.is_tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape: one extent per dim."""
        return self.definition.current(self.fact.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.fact.dtype

    @property
    def ndim(self) -> int:
        return len(self.fact.shape)

    @property
    def layout(self) -> Layout | None:
        """The layout that the user stated, if any."""
        return self.value.layout

    @property
    def stride_order_requirement(self) -> tuple[int, ...] | None:
        """The memory order required of this value: each dim's place, 0 the fastest; or None."""
        return self.fact.required

    def on(
        self,
        mesh: DeviceMesh | Layout | Handle,
        layout: Mapping[str, Placement] | None = None,
        order: Mapping[int, Sequence[str]] | None = None,
        stream: Stream | None = None,
    ) -> Handle:
        """State this value's layout: a law, stated once, before the value is used.

        Args:
            mesh: a mesh (anything `DeviceMesh` takes), or a `Layout`, or another value: this one
                gets its layout, replicated along Partial axes and without its stream.
            layout: axis -> placement; axes not named are replicated, or as in the other value: then
                a cotangent that comes back through this value is split as this one is.
            order: dim -> the axes that split it, outermost first.
            stream: a host loop over chunks.

        Returns:
            This handle.

        Raises:
            LayoutError: a second layout, a layout after the first use, a dim out of range; a value
                with another number of dims, or one whose own place depends on this one.
        """
        if not isinstance(mesh, Handle):
            self.definition.place(self, mesh, layout, order, stream)
        elif (order, stream) == (None, None):
            self.definition.place_like(self, mesh, placed(None, layout, None, None)[1])
        else:
            raise LayoutError(
                f"%{self.name} lies as %{mesh.name}, and has an order or a stream of its own",
                hint=".on(x, {axis: placement}), or .on(mesh, {axis: placement}, order, stream)",
            )
        return self

    def __repr__(self) -> str:
        return value_text(self.value)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record a function of torch that is called with handles: `torch.softmax(x, -1)`."""
        return cls.torch_call(func, args, kwargs or {})
