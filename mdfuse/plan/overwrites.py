"""Check which writes over a value that is also read a compiler may get.

The compiler may fuse the read and the write into one kernel, whose threads run in any order. This
is right only where each thread reads the element that it writes, and its results stay at that
element: so a value that is written over may have only elementwise users of its own shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tag, fx

from mdfuse.plan.inductor import shared_by, writes_of

#: Elementwise ops that torch does not mark so.
_ALSO = frozenset({
    "aten._to_copy", "aten.alias", "aten.complex", "aten.copy_", "aten.detach",
    "aten.elu_backward", "aten.floor_divide", "aten.hardshrink_backward",
    "aten.hardsigmoid_backward", "aten.hardswish", "aten.hardswish_backward",
    "aten.leaky_relu_backward", "aten.mish_backward", "aten.polar", "aten.softplus_backward",
    "aten.softshrink_backward",
})  # fmt: skip


def is_tangled(graph: fx.Graph) -> bool:
    """Tell whether an argument is written over, and read at other elements than those written.

    Args:
        graph: of torch's ops, traced, so that a read behind a write reads the write's result; with
            an example of each value.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    base = {node: node for node in graph.nodes}
    for node in nodes:
        shared = [base[x] for x in shared_by(node)]
        base[node] = shared[0] if shared else node
    written = dict.fromkeys(x for node in nodes for x in writes_of(node))
    in_part = {x for node in nodes if _name(node) == "aten.index_copy_" for x in writes_of(node)}
    return any(
        _is_read(nodes, base, base[x])
        if x in in_part or x is not base[x]
        else _is_tangled(nodes, x)
        for x in written
        if base[x].op == "placeholder" and not writes_of(x)
    )


def _is_tangled(nodes: Sequence[fx.Node], value: fx.Node) -> bool:
    lying = {value}
    for node in nodes:
        if lying.isdisjoint(_read(node)):
            continue
        if not _is_elementwise(node) or _shape(node) != _shape(value):
            return True
        lying.add(node)
    return False


def _is_read(nodes: Sequence[fx.Node], base: Mapping[fx.Node, fx.Node], value: fx.Node) -> bool:
    """Tell whether a value that is partly written has users other than views."""
    users = (node for node in nodes if base[node] is node and not _writes_back(node))
    return any(base[x] is value for node in users for x in _read(node))


def _writes_back(node: fx.Node) -> bool:
    """Tell whether rows are read only to be written where they lie, all of them or none.

    That is the read in `x.index_copy_(dim, at, where(one_bool, rows, x.index_select(dim, at)))`.
    """
    choice = next(iter(node.users), None)
    write = None if choice is None else next(iter(choice.users), None)
    if choice is None or write is None or len(node.users) != 1 or len(choice.users) != 1:
        return False
    names = tuple(map(_name, (node, choice, write)))
    if names != ("aten.index_select", "aten.where", "aten.index_copy_"):
        return False
    condition, rows, before = choice.args
    is_one = isinstance(condition, fx.Node) and _shape(condition) == ()
    return is_one and rows is not before is node and write.args == (*node.args, choice)


def _read(node: fx.Node) -> set[fx.Node]:
    """Return the values that a call reads, without those that a copy or `out=` fills.

    Torch names that argument `grad_input` in derivatives.
    """
    args = node.args[1:] if _name(node) == "aten.copy_" else node.args
    schema = getattr(node.target, "_schema", None)
    filled = {x.name for x in schema.arguments if x.is_out} if schema is not None else set()
    return {*_nodes([*args, *(x for key, x in node.kwargs.items() if key not in filled)])}


def _nodes(given: object) -> Iterator[fx.Node]:
    if isinstance(given, fx.Node):
        yield given
    elif isinstance(given, list | tuple):
        for x in given:
            yield from _nodes(x)


def _is_elementwise(node: fx.Node) -> bool:
    packet, form = getattr(node.target, "overloadpacket", None), str(node.target).split(".")[-1]
    usual = [getattr(packet, x, None) for x in ("default", form.removesuffix("_out"))]
    marks = (getattr(x, "tags", ()) for x in (node.target, *usual))  # torch marks not every form
    return any(Tag.pointwise in tags for tags in marks) or _name(node) in _ALSO


def _name(node: fx.Node) -> str:
    """Return the name of an op of torch's, without its overload."""
    return str(getattr(node.target, "overloadpacket", ""))


def _shape(node: fx.Node) -> object:
    return getattr(node.meta.get("val"), "shape", None)
