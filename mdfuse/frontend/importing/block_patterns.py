"""Select parameters by patterns that consist of several consecutive blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Node

from mdfuse.errors import LayoutError
from mdfuse.frontend.importing.place import matching, unmatched
from mdfuse.frontend.importing.record_graph import Blocks, Model
from mdfuse.frontend.plain import brief


def blocks_of(model: Model, said: Mapping[str, Any]) -> dict[Node, Blocks]:
    """Return the blocks of each parameter that a pattern matches.

    Raises:
        LayoutError: a pattern that matches nothing, or blocks that do not fit the parameter.
    """
    blocks: dict[Node, Blocks] = {}
    used: set[str] = set()
    names: list[str] = []
    for node in model.parameters:
        parameter = model.captured.parameters[node]
        if parameter.adapter is not None:
            continue
        names += parameter.names
        match = matching(said, parameter.names, "blocks")
        if match is not None:
            used.add(match[0])
            blocks[node] = _blocks(model, node, parameter.name, *match)
    for pattern in said:
        if pattern not in used:
            raise unmatched("blocks", pattern, names)
    return blocks | dict(_of_adapters(model, blocks))


def _of_adapters(model: Model, by_node: Mapping[Node, Blocks]) -> Iterator[tuple[Node, Blocks]]:
    """Yield the blocks of adapters whose matrix has blocks along that dim."""
    known = {model.captured.parameters[node].name: blocks for node, blocks in by_node.items()}
    for node in model.parameters:
        p = model.captured.parameters[node]
        blocks = known.get(p.adapter.of) if p.adapter is not None else None
        if p.adapter is not None and blocks is not None and p.adapter.dim(p.name) == blocks.dim:
            yield node, Blocks(p.adapter.own_dim(p.name), blocks.sizes)


def _blocks(model: Model, node: Node, name: str, pattern: str, said: Any) -> Blocks:
    shape = tuple(node.meta["val"].shape)
    if isinstance(said, Mapping) and len(said) == 1:
        ((dim, sizes),) = said.items()
    else:
        split = [d for d, _ in model.layout(node).splits]
        dim, sizes = (split[0] if len(split) == 1 else None), said
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise LayoutError(
            f"blocks[{pattern!r}] = {brief(said)} for {name} of shape {list(shape)}",
            because="blocks stand along one dim: the one that layouts split, or {dim: blocks}",
            hint="for example {0: 3}",
        )
    dim = dim % len(shape)
    if isinstance(sizes, int) and sizes > 0 and shape[dim] % sizes == 0:
        sizes = (shape[dim] // sizes,) * sizes
    is_list = isinstance(sizes, list | tuple) and all(isinstance(n, int) and n > 0 for n in sizes)
    if not is_list or sum(sizes) != shape[dim]:
        raise LayoutError(
            f"blocks[{pattern!r}] = {brief(said)} for {name} of shape {list(shape)}",
            because=f"the blocks make up dim {dim}, which has {shape[dim]} places",
            hint="how many equal ones, or a list of their extents",
        )
    return Blocks(dim, tuple(sizes))
