"""The layouts in which expressions read values: what one of them brings there serves the others.

Where an expression reads a view, what that is of may be brought there before it, and serves all of
its views. So each expression is noted at all values that its copy of one may be taken of:

    %y: f32[8,4] (tp=S0)                # %a reads it whole in a view, and so does %b
    %v: f32[32] (tp=S0) = reshape(%y)   # %a reads it whole, and %b what it is a view of
    %a: f32[32] = cumsum(%v)
    %b: f32[8,4] = cumsum(%y)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mdfuse.extents.extent import is_symbolic
from mdfuse.ir.graph import Expr, Value
from mdfuse.layouts.layout import Layout
from mdfuse.passes.prices import move_cost
from mdfuse.passes.strategy import viewed_as, viewed_from


@dataclass
class Readers:
    """Notes, in `Value.copies`, of who reads what in which layout; they are written in place."""

    values: dict[str, Value]
    #: a view -> the expression that yields it.
    views: dict[str, Expr] = field(default_factory=dict)
    #: a value -> the views of it.
    viewed: dict[str, list[Expr]] = field(default_factory=dict)
    #: a reader -> the values at which it is noted.
    noted: dict[str, dict[str, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            for reader, *_ in value.copies:
                self.noted.setdefault(reader, {})[name] = None

    def add(self, view: Expr) -> None:
        """Note a view, at which readers of its operand are noted then."""
        (operand,) = view.reads
        (name,) = view.outputs
        self.views[name] = view
        self.viewed.setdefault(operand, []).append(view)
        for reader, layout, _ in self.values[operand].copies:
            if name not in self.noted[reader]:
                self._at_view(view, reader, layout)

    def read(self, expr: Expr, wanted: Mapping[str, Layout]) -> None:
        """Note in which layouts an expression reads its operands, instead of what was noted."""
        reader, is_changed = expr.outputs[0], False
        for x, layout in wanted.items():
            value = self.values[x]
            if x in self.noted.get(reader, ()):
                is_changed = is_changed or (reader, layout, False) not in value.copies
            elif layout is not value.layout and layout != value.layout:
                is_changed = True
        if not is_changed:
            return
        for name in self.noted.pop(reader, ()):
            value = self.values[name]
            left = tuple([x for x in value.copies if x[0] != reader])
            self.values[name] = value.having(copies=left)
        for x, layout in wanted.items():
            self._note(x, reader, layout)

    def _note(self, name: str, reader: str, layout: Layout) -> None:
        """Note that an expression reads a value in a layout, at what that is a view of, too."""
        if not self._at(name, reader, layout):
            return
        for of in self.viewed.get(name, ()):
            self._at_view(of, reader, layout)
        view, copied = self.views.get(name), self.values[name]
        if view is None or is_symbolic(copied.shape):
            return
        (operand,) = view.reads
        before = viewed_from(view, self.values, layout)
        if before is not None and self._price(operand, before) <= self._price(name, layout):
            self._note(operand, reader, before)

    def _at_view(self, view: Expr, reader: str, layout: Layout) -> None:
        """Note a reader of a view's operand at the view, and at views of it."""
        viewed = viewed_as(view, self.values, layout)
        if viewed is not None and self._at(view.output, reader, viewed, is_viewed=True):
            for further in self.viewed.get(view.output, ()):
                self._at_view(further, reader, viewed)

    def _at(self, name: str, reader: str, layout: Layout, is_viewed: bool = False) -> bool:
        """Note that an expression reads a value in a layout; return whether that is news."""
        value = self.values[name]
        noted = [(reader, layout, x) in value.copies for x in {False, is_viewed}]
        if value.layout in (None, layout) or any(noted):
            return False
        if value.layout is not None and value.layout.partial_axes:
            return False
        self.values[name] = value.having(copies=(*value.copies, (reader, layout, is_viewed)))
        self.noted.setdefault(reader, {})[name] = None
        return True

    def _price(self, name: str, layout: Layout) -> int:
        """Return what the busiest rank receives where a value is brought into a layout."""
        value = self.values[name]
        return move_cost(value, value.layout, layout) if value.layout is not None else 0
