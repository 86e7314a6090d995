"""Masters, moments and gradients that are split where parameters are not (ZeRO).

w (dp=R), state (dp=S0):                        dw = grad(loss of a copy of w)   # (dp=P(sum))
                                                dw = set(dw).on(dp=S0)           # reduce-scatter
                                                new = update(set(w).on(dp=S0), dw, state)
                                                w = set(new).on(dp=R)            # all-gather
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from mdfuse.errors import LayoutError, MdfuseError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.joined import JoinedTensors
from mdfuse.frontend.importing.place import matching, unmatched
from mdfuse.frontend.importing.record_graph import Inputs, Model
from mdfuse.frontend.ops.views import set as set_
from mdfuse.layouts.layout import Layout, Shard


@dataclass(frozen=True, slots=True)
class StateLayouts:
    """The layouts of the state of trained parameters that have other layouts themselves.

    Attributes:
        model: whose parameters they are.
        of: parameter -> the layout of its masters, moments and gradients.
        patterns: pattern -> the names of the parameters that it places otherwise.
    """

    model: Model
    of: Mapping[Node, Layout]
    patterns: Mapping[str, tuple[str, ...]]

    def copied(self, inputs: Inputs) -> Inputs:
        """Return inputs in which such parameters are copies: their gradients are free of a law."""
        copies = {node: _each(inputs.nodes[node], _copy) for node in self.of}
        return replace(inputs, nodes={**inputs.nodes, **copies})

    def layout(self, node: Node) -> Layout:
        """Return the layout of a parameter's state."""
        return self.of.get(node) or self.model.layout(node)

    def moved(self, node: Node, x: Handle, is_back: bool = False) -> Handle:
        """Return a parameter or its gradient where its state is; or back where it was."""
        if node not in self.of:
            return x
        return set_(x).on(self.model.layout(node) if is_back else self.of[node])


def state_layouts_of(
    model: Model, said: Mapping[str, Any], trained: Sequence[Node]
) -> StateLayouts:
    """Return the layouts of states.

    Args:
        model: with layouts of parameters.
        said: pattern of names of parameters -> axis -> placement, or a `Layout`. Axes that are not
            named stay as the parameter has them; the others split its parts.
        trained: the parameters that have a state.

    Raises:
        LayoutError: a pattern that matches no trained parameter; a placement that does not fit.
    """
    of = model.captured.parameters
    names = [name for node in trained for name in of[node].names]
    patterns: dict[str, list[str]] = {}
    for pattern in said:
        if matching({pattern: None}, names, "state_layouts") is None:
            raise unmatched("state_layouts", pattern, names)
        patterns[pattern] = []
    layouts: dict[Node, Layout] = {}
    for node in trained:
        match = matching(said, of[node].names, "state_layouts")
        shape = node.meta["val"].shape
        if match is None or not shape:  # a number is the same on all ranks
            continue
        place = _axes_of(model, node, match[1])
        layout = _beside(model.layout(node), match[0], place, of[node].name, len(shape))
        if layout != model.layout(node).normalized(len(shape), singles=True):
            layouts[node] = layout
            patterns[match[0]].append(of[node].name)
    return StateLayouts(model, layouts, {p: tuple(n) for p, n in patterns.items()})


def _axes_of(model: Model, node: Node, said: Any) -> Any:
    """Return the placements along axes that the stage of a parameter has."""
    if model.stages is None or not isinstance(said, Mapping):
        return said
    known = {a for mesh in model.stages.meshes for a in mesh.axes}
    axes = model.stages.mesh(node).axes
    return {a: p for a, p in said.items() if a in axes or a not in known}


def _beside(w: Layout, pattern: str, said: Any, name: str, ndim: int) -> Layout:
    """Return the layout of a state: that of the parameter, whose parts named axes split further."""
    try:
        layout: Layout = said
        if not isinstance(said, Layout):
            asked = Layout(w.mesh, said).by_axis()
            named = {axis: p for axis, p in asked.items() if axis in said}
            layout = Layout(w.mesh, {**w.by_axis(), **named}).normalized(ndim, singles=True)
            held = dict(w.splits)
            order = {dim: _first(held.get(dim, ()), axes) for dim, axes in layout.splits}
            layout = Layout(w.mesh, layout.by_axis(), order)
        layout = layout.normalized(ndim, singles=True)
    except MdfuseError as error:
        raise LayoutError(
            f"state_layouts[{pattern!r}] for {name}: {error.what}",
            because=error.because,
            hint=error.hint,
        ) from error
    if not _is_inside(layout, w.normalized(ndim, singles=True)):
        raise LayoutError(
            f"state_layouts[{pattern!r}] for {name}: {layout} on {layout.mesh}",
            because=f"it is a part of what a rank has of the parameter: {w} on {w.mesh}",
            hint="name axes along which the parameter is whole",
        )
    return layout


def _first(outer: Sequence[str], axes: Sequence[str]) -> tuple[str, ...]:
    """Return axes in order, those that split the parameter first."""
    return tuple(dict.fromkeys([a for a in outer if a in axes] + [*axes]))


def _is_inside(state: Layout, w: Layout) -> bool:
    """Return whether each rank's part of a state is inside of its part of the parameter."""
    if state.mesh != w.mesh or state.partial_axes:
        return False
    outer, inner = dict(w.splits), dict(state.splits)
    if any(inner.get(d, ())[: len(axes)] != axes for d, axes in outer.items()):
        return False
    return all(p == state.placement(a) for a, p in w.by_axis().items() if isinstance(p, Shard))


def _each(x: Handle | JoinedTensors, f: Any) -> Any:
    return x.mapped(f) if isinstance(x, JoinedTensors) else f(x)


def _copy(x: Handle) -> Handle:
    return set_(x)
