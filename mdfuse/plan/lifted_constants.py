"""Constants of compiled functions: operands that no caller gives, which a file has beside the code.

The compiler takes constants of a graph for operands, too, but a function that it reads from a file
has none of them.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node


def lifted(graph: GraphModule, arguments: Sequence[Any]) -> tuple[GraphModule, list[Tensor]]:
    """Return a graph that takes its constants behind its arguments, and these constants.

    Args:
        graph: stays as it is.
        arguments: tensors without elements.
    """
    if not _reads(graph, graph.graph):
        return graph, []
    calls = copy.deepcopy(graph.graph)
    last = next(reversed(calls.find_nodes(op="placeholder")), None)
    taken = dict[Any, Node]()
    for x in _reads(graph, calls):
        if x.target not in taken:
            with calls.inserting_after(last) if last else calls.inserting_before():
                last = taken[x.target] = calls.placeholder(f"constant{len(taken)}")
            last.meta["val"] = without_elements(_value(graph, x), arguments)
        x.replace_all_uses_with(taken[x.target])
        calls.erase_node(x)
    return GraphModule(graph, calls), [getattr(graph, name) for name in taken]


def without_elements(constant: Tensor, arguments: Sequence[Any]) -> Tensor:
    """Return a constant in the form of the arguments of a trace, which has no elements."""
    if not arguments:
        return constant
    form: Tensor = arguments[0].fake_mode.from_tensor(constant, static_shapes=True)
    return form


def _reads(graph: GraphModule, calls: Graph) -> list[Node]:
    return [x for x in calls.find_nodes(op="get_attr") if isinstance(_value(graph, x), Tensor)]


def _value(graph: GraphModule, node: Node) -> Any:
    return getattr(graph, str(node.target), None)


def encoded(constants: Sequence[Tensor]) -> list[Any]:
    """Return constants as values of JSON."""
    return [
        [[*x.shape], str(x.dtype)[len("torch.") :], str(x.device), _text_of(x)] for x in constants
    ]


def _text_of(x: Tensor) -> str:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()


def decoded(values: Sequence[Any]) -> list[Tensor]:
    """Return the constants that `encoded` took."""
    return [_constant(*x) for x in values]


def _constant(shape: list[int], dtype: str, device: str, text: str) -> Tensor:
    data, kind = bytearray(base64.b64decode(text)), getattr(torch, dtype)
    flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
    return flat.reshape(shape).to(device)
