"""Nodes that the backward computes again, in blocks: what a block reads and returns is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import Node

from mdfuse.errors import DefinitionError, LayoutError, listed
from mdfuse.frontend.given import names as names_of
from mdfuse.frontend.given import refused
from mdfuse.frontend.importing.capture import ExportedModule
from mdfuse.frontend.importing.module_lines import mark_of
from mdfuse.frontend.importing.submodules import Submodules, blocks_by_call, calls_of, listing

#: The block of nodes outside of all layers.
_OUTSIDE = "the module itself"


@dataclass(frozen=True, slots=True)
class RecomputedNodes:
    """The nodes that the backward computes again.

    Attributes:
        region: node -> the name of its region, of which what is read elsewhere is kept.
        others: nodes of regions that are kept.
        patterns: pattern of submodules -> the names that it counts for.
        note: further words for reports.
    """

    region: Mapping[Node, str] = field(default_factory=dict)
    others: Set[Node] = frozenset()
    patterns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""


def recomputed(captured: ExportedModule, live: Iterable[Node], asked: Any) -> RecomputedNodes:
    """Return the nodes that the backward computes again.

    Checkpoints of the module count where nothing else is asked of a node.

    Args:
        captured: the module.
        live: its nodes, in order.
        asked: patterns of submodules, or a function of an operation's name; None: nothing.

    Raises:
        LayoutError: a pattern that matches no submodule, or none that is called.
        DefinitionError: a function that is True of no operation, or another argument.
    """
    nodes = [n for n in live if n.op == "call_function"]
    if callable(asked):
        return _selected(captured.module, nodes, asked)
    patterns = dict.fromkeys(_patterns(asked))
    marks = {n: mark_of(n) for n in nodes}
    block = {n: f"checkpoint {number}" for n, number in marks.items() if number is not None}
    chosen = Submodules(captured.module).chosen("recompute", patterns)
    for call, inside in blocks_by_call(nodes, chosen).items():
        block |= dict.fromkeys(inside, str(call))
    lines = listing(chosen)
    _check_called(lines, nodes)
    return RecomputedNodes(block, patterns=lines)


def _patterns(asked: Any) -> tuple[str, ...]:
    try:
        return names_of("from_torch", "recompute", asked)
    except DefinitionError:
        raise refused(
            "from_torch", "recompute", asked,
            because="it is patterns of submodules, a function of an operation's name, or how many "
            "bytes a rank may keep",
            hint='recompute="layers.*", or lambda op: op not in ("linear", "matmul"), or 8 << 30',
        ) from None  # fmt: skip


def _check_called(lines: Mapping[str, Sequence[str]], nodes: Sequence[Node]) -> None:
    """Raise LayoutError for a pattern of submodules that compute nothing, as lists of layers."""
    called = {call.name for n in nodes for call in calls_of(n)}
    for pattern, names in lines.items():
        if called.isdisjoint(names):
            raise LayoutError(
                f"recompute[{pattern!r}] matches {listed(names)}, which computes nothing",
                because="the forward does not call it, or no result depends on what it computes",
                hint=f"recompute={pattern + '.*'!r} for what is in it",
            )


def _selected(
    module: nn.Module, nodes: Sequence[Node], asked: Callable[[str], Any]
) -> RecomputedNodes:
    """Return all nodes by layer; kept are those of whose operation a function does not say True."""
    names = {n: operation(n) for n in nodes}
    again = {name for name in dict.fromkeys(names.values()) if asked(name)}
    if not again:
        raise DefinitionError(
            "from_torch: recompute=, a function, is True of no operation",
            because=f"the module has {listed([*dict.fromkeys(names.values())])}",
            hint='lambda op: op not in ("linear", "scaled_dot_product_attention")',
        )
    others = frozenset(n for n, name in names.items() if name not in again)
    note = f"kept of them: {', '.join(sorted({names[n] for n in others}))}"
    return RecomputedNodes(_layer_by_node(module, nodes), others, note=note)


def operation(node: Node) -> str:
    """Return the name of a node's operation, without overload: `linear` for aten.linear.default."""
    return str(node.target).removeprefix("aten.").split(".")[0].lstrip("_")


def _layer_by_node(module: nn.Module, nodes: Sequence[Node]) -> dict[Node, str]:
    """Return the layer around each node: the outermost entry of a list of modules."""
    lists = {n: part for n, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    layers = {f"{n}.{entry}".lstrip(".") for n, part in lists.items() for entry in part._modules}
    of = dict.fromkeys(nodes, _OUTSIDE)
    for call, inside in blocks_by_call(nodes, layers).items():
        of |= dict.fromkeys(inside, str(call))
    return of
