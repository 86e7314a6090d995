"""Values of a module that a rank keeps for the backward within some bytes; others come again."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import Node

from mdfuse.errors import DefinitionError, listed
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.joined import JoinedTensors
from mdfuse.frontend.importing.recomputed import RecomputedNodes, operation
from mdfuse.frontend.importing.record_graph import Model, record
from mdfuse.frontend.phases import Phases, phases
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.names import as_name
from mdfuse.seeing.backward_memory import LocalParts
from mdfuse.seeing.report.numbers import size_text

#: Operations of products that a GPU does while it moves a byte of its memory, and one of another's.
_PER_BYTE, _PER_BYTE_RECEIVED = 300, 2000


def within(model: Model, nbytes: int) -> RecomputedNodes:
    """Return the nodes to compute again so that the others need some bytes on a rank at most.

    Values go in the order of the work that they save per byte. Values that the loss keeps, and
    results of the module, do not count.

    Raises:
        DefinitionError: a negative number; extents that each run chooses; nothing to differentiate.
    """
    if nbytes < 0:
        raise DefinitionError(
            f"from_torch with recompute={nbytes}",
            because="it is how many bytes of values a rank may keep",
            hint="recompute=8 << 30",
        )
    values = _Values.of(model)
    total = left = sum(values.kept_bytes.values())
    again = dict[Node, None]()
    waiting = [(0.0, n, node) for n, node in enumerate(values.kept_bytes)]
    staying = dict.fromkeys(values.kept_bytes)
    while left > nbytes:
        _, n, node = heapq.heappop(waiting)
        added = [*values.leading_to(node, staying, again)]
        density = sum(map(values.cost, added)) / values.kept_bytes[node]
        if waiting and density > waiting[0][0]:  # another one may have become cheaper
            heapq.heappush(waiting, (density, n, node))
            continue
        again |= dict.fromkeys(added)
        left -= values.kept_bytes[node]
        del staying[node]
    return _nodes(model, again, f"{size_text(left)} of {size_text(total)} on a rank are kept")


def _nodes(model: Model, again: Mapping[Node, None], note: str) -> RecomputedNodes:
    nodes = [n for n in model.live if n.op == "call_function"]
    counts = Counter(operation(n) for n in again if n.op == "call_function")
    named = ", ".join(f"{count} × {name}" for name, count in counts.most_common())
    others = frozenset(n for n in nodes if n not in again)
    note = f"{note}; again: {named}" if named else f"{note}, all that the backward reads"
    return RecomputedNodes(dict.fromkeys(nodes, "all"), others, note=note)


@dataclass(frozen=True)
class _Values:
    """The values of a module by node, beside its gradients.

    Attributes:
        split: forward and backward.
        node_of: value of the forward -> its node.
    """

    split: Phases
    node_of: Mapping[str, Node]

    @staticmethod
    def of(model: Model) -> _Values:
        """Record a module, and the gradients of its parameters."""
        _check(model)
        known: dict[Node, Any] = {}
        with FusionDefinition(as_name(model.captured.name, "model")) as fd:
            inputs = model.define_inputs(fd)
            results = {x.id: x for x in record(model, inputs, known) if isinstance(x, Handle)}
            for x in results.values():
                fd.add_output(x)
        of = model.captured.parameters
        trained = (inputs.nodes[n] for n in model.parameters if of[n].tensor.requires_grad)
        ids = {x.id for w in trained for x in (w.parts if isinstance(w, JoinedTensors) else (w,))}
        wrt = [at for at, i in enumerate(fd.inputs) if i in ids]
        seeded = [at for at, x in enumerate(results.values()) if x.dtype.is_floating_point]
        split = phases(fd, wrt, seeded)
        return _Values(split, _nodes_by_value(split.joint, known))

    @cached_property
    def parts(self) -> LocalParts:
        """The parts of the first rank, which are the largest."""
        mesh = self.split.placed.layout(self.split.placed.outputs[0]).mesh
        return LocalParts(self.split.placed, mesh.ranks[0])

    @cached_property
    def exprs(self) -> Mapping[Node, list[Expr]]:
        """The expressions of each node."""
        exprs: dict[Node, list[Expr]] = {}
        for e in self.split.joint.exprs:
            if e.outputs[0] in self.node_of:
                exprs.setdefault(self.node_of[e.outputs[0]], []).append(e)
        return exprs

    @cached_property
    def kept_bytes(self) -> Mapping[Node, int]:
        """The nodes whose values the backward reads, each with the bytes of a rank."""
        producers, outputs = self.split.joint.producers, {*self.split.outputs}
        sizes: Counter[Node] = Counter()
        for name in self.split.saved:
            first = producers[name].outputs[0] if name in producers else name
            if first in self.node_of and name not in outputs:
                sizes[self.node_of[first]] += self.parts.nbytes(name)
        return {node: n for node, n in sizes.items() if n}

    def cost(self, node: Node) -> int:
        """Return the work of computing a node again, in operations of products."""
        work = 0
        for e in self.exprs.get(node, ()):
            moved = 0 if _is_view(e) else sum(map(self.parts.nbytes, {*e.reads, *e.outputs}))
            received = _PER_BYTE_RECEIVED * self.parts.received(e)
            work += self.parts.operations(e) + _PER_BYTE * moved + received
        return work

    def leading_to(self, node: Node, *there: Mapping[Node, Any]) -> Iterator[Node]:
        """Yield a node, and those that it is computed of, up to what is there."""
        left, seen = [node], {node}
        while left:
            of = left.pop()
            yield of
            read = {self.node_of.get(x) for e in self.exprs.get(of, ()) for x in e.reads}
            new = {n for n in read if n is not None and not any(n in x for x in there)} - seen
            seen |= new
            left += sorted(new, key=str)


def _check(model: Model) -> None:
    """Raise DefinitionError for a module whose bytes cannot be counted."""
    captured = model.captured
    written = [f"writes {captured.parameters[n].name}" for n in captured.mutated]
    chosen = [f"leaves an extent of {name} to runs" for n, name in captured.inputs.items()
              if any(type(extent) is not int for extent in n.meta["val"].shape)]  # fmt: skip
    if not (written or chosen):
        return
    raise DefinitionError(
        f"from_torch with bytes for recompute=: {captured.name} {listed([*written, *chosen])}",
        because="bytes are counted of one forward, which writes into no buffer",
        hint='patterns of submodules: recompute="layers.*"',
    )


def _is_view(expr: Expr) -> bool:
    return TABLE[expr.op].is_view and expr.op != "set"


def _nodes_by_value(joint: Fusion, known: Mapping[Node, Any]) -> dict[str, Node]:
    """Return the node of each value: nodes are recorded in turn, and values are counted."""
    names = {joint.ids[x]: x for e in joint.exprs for x in e.outputs}
    node_of, last = dict[str, Node](), -1
    for node, x in known.items():
        end = max((h.id for h in _handles(x)), default=-1)
        if node.op == "call_function" and end > last:
            node_of |= {names[i]: node for i in range(last + 1, end + 1) if i in names}
            last = end
    return node_of


def _handles(x: Any) -> list[Handle]:
    """Return the values among a node's results."""
    parts = x.parts if isinstance(x, JoinedTensors) else x if isinstance(x, list | tuple) else (x,)
    return [h for h in parts if isinstance(h, Handle)]
