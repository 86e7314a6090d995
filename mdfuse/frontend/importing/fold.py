"""Constant folding: values of a graph that depend on neither inputs nor parameters.

Masks, positions and tables of cosines are examples; they are computed once, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from mdfuse.errors import DefinitionError
from mdfuse.frontend.importing.aten_table import IN_CONTEXT
from mdfuse.frontend.importing.capture import ExportedModule
from mdfuse.frontend.importing.constants import Distinct
from mdfuse.frontend.importing.drawn import draws
from mdfuse.frontend.importing.missing_buffers import made_again
from mdfuse.frontend.importing.module_lines import line_of

#: Operations that read only shape and dtype of their first operand.
_SHAPE_ONLY = {
    f"aten.{name}.default"
    for name in ("zeros_like", "ones_like", "full_like", "new_full", "new_zeros", "new_ones")
}

_CPU = torch.device("cpu")


def live_nodes(captured: ExportedModule) -> dict[Node, None]:
    """Return the nodes that depend on an input or a parameter and lead to a result, in order."""
    live: dict[Node, None] = dict.fromkeys([*captured.parameters, *captured.inputs])
    for node in captured.graph.graph.nodes:
        if node.op == "call_function" and any(n in live for n in _read_by(node)):
            live[node] = None
    results = (*captured.results, *(new for _, new in captured.written))
    used = {n for n in results if isinstance(n, Node)}
    for node in reversed(captured.graph.graph.nodes):
        if node in used and node in live:
            used |= {*node.all_input_nodes}
    return {n: None for n in live if n in used or n.op == "placeholder"}


def _read_by(node: Node) -> list[Node]:
    """The nodes whose numbers a node reads."""
    if str(node.target) in _SHAPE_ONLY and _is_static(node.args[0]):
        return [n for n in node.all_input_nodes if n is not node.args[0]]
    return node.all_input_nodes


def _is_static(x: Any) -> bool:
    value = x.meta.get("val") if isinstance(x, Node) else None
    return isinstance(value, Tensor) and all(type(n) is int for n in value.shape)


class Folded:
    """The values of nodes that depend on nothing, computed when they are asked for.

    What is computed alike, or has equal numbers, is one tensor: each layer may make its own mask.

    Args:
        captured: the graph.
        live: its nodes that depend on inputs or parameters.
        buffers: name -> numbers of a buffer that has none in the module.
    """

    def __init__(
        self, captured: ExportedModule, live: Mapping[Node, None], buffers: Mapping[str, Tensor]
    ) -> None:
        self.captured = captured
        self._live = live
        self.buffers = buffers
        self._known: dict[Node, Any] = {}
        self._by_form: dict[str, Any] = {}
        self._distinct = Distinct()
        self._order = {n: i for i, n in enumerate(captured.graph.graph.nodes)}

    def __contains__(self, node: Node) -> bool:
        return node not in self._live

    def __getitem__(self, node: Node) -> Any:
        if node not in self._known:
            for step in self._before(node):
                self._known[step] = self._run_once(step)
        return self._known[node]

    def share(self, node: Node, new: Node) -> None:
        """Give a new node the value of another one."""
        self._known[new] = self[node]

    def _before(self, node: Node) -> list[Node]:
        """Return the nodes to compute for a node, in the order of the graph."""
        wanted, left = {node}, [node]
        while left:
            new = [n for n in _read_by(left.pop()) if n not in self._known and n not in wanted]
            wanted.update(new)
            left += new
        return sorted(wanted, key=self._order.__getitem__)

    def _run_once(self, node: Node) -> Any:
        """Return the value of a node that is computed alike; run it only where there is none."""

        def name(n: Node) -> str:
            return f"%{id(self._known[n]) if n in self._known else n.name}"

        form = f"{node.target} {map_arg((node.args, node.kwargs), name)}"
        if form not in self._by_form or node.op != "call_function":
            value = self._run(node)
            is_tensor = isinstance(value, Tensor)
            self._by_form[form] = (
                self._distinct.first(value, value.stride()) if is_tensor else value
            )
        return self._by_form[form]

    def _run(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._held(node)
        if _draws(node):
            raise _frozen(node)

        def known(n: Node) -> Any:
            return self._known[n] if n in self._known else _blank(n.meta["val"])

        with torch.no_grad():
            return run_node(node, known)

    def _held(self, node: Node) -> Tensor:
        """Return a buffer, or a tensor that the graph holds."""
        name, tensor = self.captured.origins[node], self.captured.constants[node]
        if name in self.buffers:
            tensor = self.buffers[name]
        elif tensor.is_meta and not tensor.numel():
            return _blank(tensor)
        elif tensor.is_meta:
            numbers = made_again(self.captured.module, name)
            if numbers is None:
                raise DefinitionError(
                    f"the buffer {name} has no numbers",
                    because="the module is on the meta device, what is computed of this buffer is "
                    "known when the program is made, and neither _init_weights nor "
                    "reset_parameters sets it",
                    hint=f"from_torch(..., buffers={{{name!r}: tensor}})",
                )
            tensor = numbers
        return tensor.detach().cpu()


def _draws(node: Node) -> bool:
    """Return whether a node draws random numbers: marked by torch, and not excluded by `draws`."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    target = str(node.target)
    return target not in IN_CONTEXT or draws(target, node.args, node.kwargs)


def _frozen(node: Node) -> DefinitionError:
    line = line_of(node.meta.get("stack_trace"))
    return DefinitionError(
        f"{node.target} of neither inputs nor parameters",
        where=[line.quote()] if line else [],
        because="what depends on neither is computed once, and each run would have the same draw",
        hint="make what is drawn an argument of the module",
    )


def _blank(value: Tensor) -> Tensor:
    """Return a tensor of which only shape and dtype are read."""
    return torch.zeros(tuple(value.shape), dtype=value.dtype)


def run_node(node: Node, known: Callable[[Node], Any]) -> Any:
    """Run a node on the CPU."""
    args, kwargs = map_arg((node.args, node.kwargs), known)
    args, kwargs = map_aggregate((args, kwargs), _on_cpu)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _on_cpu(x: Any) -> Any:
    return _CPU if isinstance(x, torch.device) else x
