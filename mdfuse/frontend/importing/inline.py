"""Inline blocks such as `with torch.no_grad():`, which export turns into submodules."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node


def inline(graph: GraphModule) -> None:
    """Inline the submodules of code under `no_grad`, or without autocast.

    Values computed under `no_grad` are detached.
    """
    left = [n for n in graph.graph.nodes if _block_of(n)]
    while left:
        node = left.pop()
        block = _block_of(node)
        assert block is not None
        _, before, inside = block
        inner = graph.get_submodule(str(inside.target))
        assert isinstance(inner, GraphModule)
        given = node.args[len(before) + 1 :]
        places = (n for n in inner.graph.nodes if n.op == "placeholder")
        known: dict[Node, Any] = dict(zip(places, given, strict=True))
        with graph.graph.inserting_before(node):
            results: Any = graph.graph.graph_copy(inner.graph, known)
            left += [known[n] for n in inner.graph.nodes if n in known and _block_of(n)]
            for sub in (n for n in inner.graph.nodes if n.op == "get_attr"):
                graph.add_submodule(str(known[sub].target), inner.get_submodule(str(sub.target)))
            is_detached = block[0] == "wrap_with_set_grad_enabled"
            results = [_detached(graph, x) if is_detached else x for x in results]
        for user in [*node.users]:
            assert user.target is operator.getitem and isinstance(user.args[1], int)
            user.replace_all_uses_with(results[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)


def _block_of(node: Node) -> tuple[str, tuple[Any, ...], Node] | None:
    """Return name, settings and submodule of a call that is a block; None for other calls."""
    name = str(node.target)
    if node.op != "call_function":
        return None
    if name == "wrap_with_set_grad_enabled" and node.args[0] is False:
        inside = node.args[1]
        return (name, node.args[:1], inside) if isinstance(inside, Node) else None
    if name == "wrap_with_autocast" and node.args[2] is False:
        inside = node.args[4]
        return (name, node.args[:4], inside) if isinstance(inside, Node) else None
    return None


def _detached(graph: GraphModule, x: Any) -> Any:
    if not isinstance(x, Node):
        return x
    detached = graph.graph.call_function(torch.ops.aten.detach.default, (x,))
    detached.meta = dict(x.meta)
    return detached


def part_detached(graph: GraphModule) -> None:
    """Replace detached values by copies where nothing else reads their memory.

    An in-place write into a detached value is not detached. But functionalisation recomputes values
    that share memory from the written one: by `detach`.
    """
    aten = torch.ops.aten
    for node in graph.graph.nodes:
        if node.target is aten.detach.default and _is_alone(node.args[0]):
            node.target = aten.detach_copy.default


def _is_alone(x: Any) -> bool:
    """Return whether only its one reader reads or writes the memory of a value."""
    while isinstance(x, Node) and x.op == "call_function" and len(x.users) == 1:
        schema = getattr(x.target, "_schema", None)
        if schema is None:
            return False
        if not any(result.alias_info for result in schema.returns):
            return True
        x = x.args[0]
    return False
