"""Record a captured module in a definition: its inputs, and each node from the module's line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from mdfuse.errors import DefinitionError
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.grad import recompute
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing import chosen, expert_routes
from mdfuse.frontend.importing.aten_table import (
    BY_VALUE,
    IGNORED,
    IN_CONTEXT,
    ROWS,
    TABLE,
    VIEWS,
)
from mdfuse.frontend.importing.batches import on_batches
from mdfuse.frontend.importing.capture import ExportedModule
from mdfuse.frontend.importing.constants import Distinct, as_value, is_made
from mdfuse.frontend.importing.deferred import KINDS, GraphCall, leaves
from mdfuse.frontend.importing.dispatch import parts_of_tokens
from mdfuse.frontend.importing.drawn import RecordingContext, draws
from mdfuse.frontend.importing.fold import Folded
from mdfuse.frontend.importing.handovers import HandOvers
from mdfuse.frontend.importing.indices import ramp_of
from mdfuse.frontend.importing.joined import GROUPED, RULES, JoinedTensors
from mdfuse.frontend.importing.module_lines import called_at, line_of
from mdfuse.frontend.importing.module_stages import ModelStages
from mdfuse.frontend.importing.place import Placed
from mdfuse.frontend.importing.recomputed import RecomputedNodes
from mdfuse.frontend.importing.view_chains import Views
from mdfuse.frontend.ops.recording import definition_of, in_block
from mdfuse.frontend.ops.views import set as set_
from mdfuse.layouts.boxes import Boxes, Rows, boxes_of
from mdfuse.layouts.layout import Layout, Shard
from mdfuse.mesh import DeviceMesh
from mdfuse.names import is_value_name


@dataclass(frozen=True, kw_only=True)
class Model:
    """The graph to record, with layouts, constants and blocks.

    Attributes:
        captured: the graph.
        live: its nodes that depend on inputs or parameters, in order.
        folded: the values of nodes that are not live.
        mesh: the mesh of all values; of several stages, all ranks.
        placed: placeholder -> its layout; placeholders without an entry are replicated.
        passed: node of what a call of a submodule takes or returns -> its layout.
        outputs: position of a result -> its layout; other results have inferred layouts.
        constants: nodes whose values are inputs, each with its name.
        same: node -> the constant with an equal value.
        blocks: placeholder of a parameter in blocks -> the dim, and their extents.
        gather: axes along which parameters are gathered before they are read.
        stages: on which meshes nodes are computed, where these are several.
        again: nodes that the backward computes again.
        capacity: the most rows of a part of the tokens that may go to an expert; None: any.
    """

    captured: ExportedModule
    live: Mapping[Node, None]
    folded: Folded
    mesh: DeviceMesh
    placed: Mapping[Node, Placed]
    outputs: Mapping[int, Placed]
    passed: Mapping[Node, Placed] = field(default_factory=dict)
    constants: Mapping[Node, str] = field(default_factory=dict)
    same: Mapping[Node, Node] = field(default_factory=dict)
    blocks: Mapping[Node, Blocks] = field(default_factory=dict)
    gather: tuple[str, ...] = ()
    stages: ModelStages | None = None
    again: RecomputedNodes = field(default_factory=RecomputedNodes)
    capacity: int | None = None

    @property
    def parameters(self) -> list[Node]:
        """The parameters and buffers that the graph reads, in the order of inputs."""
        return [n for n in self.captured.parameters if n.users or n in self.captured.mutated]

    def weight_names(self) -> list[str]:
        """The names of the inputs that are parameters and constants, in their order."""
        named = [(n, self.captured.parameters[n].name) for n in self.parameters]
        named += [*self.constants.items()]
        return [part for n, name in named for part, _, _ in self.parts(n, name)]

    def define_inputs(
        self,
        fd: FusionDefinition,
        arguments: Mapping[Node, Handle] | None = None,
        prefix: str = "",
    ) -> Inputs:
        """Define an input for each parameter that is read, each constant and each argument.

        Args:
            fd: the definition.
            arguments: existing values to use instead of inputs.
            prefix: of the names of parameters and constants.
        """
        captured = self.captured
        names = {n: prefix + captured.parameters[n].name for n in self.parameters}
        names |= {n: prefix + name for n, name in self.constants.items()}
        taken = {*names.values()}
        for node, name in captured.inputs.items() if arguments is None else ():
            names[node] = f"input.{name}" if name in taken else name
        symbols: dict[str, int] = {}
        given = {node: self._define(fd, name, node, symbols) for node, name in names.items()}
        calls = (n for n in self.live if n.op == "call_function")
        is_random = any(draws(str(n.target), n.args, n.kwargs) for n in calls)
        seed = fd.define_scalar(dtype=int, name=f"{prefix}seed") if is_random else None
        return Inputs(nodes={**given, **(arguments or {})}, seed=seed)

    def _define(
        self, fd: FusionDefinition, name: str, node: Node, symbols: dict[str, int]
    ) -> Handle | JoinedTensors:
        """Define the inputs of a node; equal extents that runs choose are one symbol."""
        value = self.folded[node] if node in self.constants else node.meta["val"]
        layout = self.layout(node)
        parts = []
        for part, shape, _ in self.parts(node, name):
            known = [symbols.get(str(value.shape[d]), n) if n == -1 else n
                     for d, n in enumerate(shape)]  # fmt: skip
            parts.append(fd.define_tensor(known, value.dtype, layout, name=_value_name(part)))
            for d, n in enumerate(shape):
                if n == -1:
                    symbols.setdefault(str(value.shape[d]), parts[-1].shape[d])
        return (
            JoinedTensors(tuple(parts), self.blocks[node].dim) if node in self.blocks else parts[0]
        )

    def layout(self, node: Node) -> Layout:
        """Return the layout of a parameter, a constant or an argument."""
        if node in self.placed:
            return self.placed[node].layout
        return Layout(self.mesh_of(node))

    def mesh_of(self, node: Node) -> DeviceMesh:
        """Return the mesh of a node's stage."""
        return self.mesh if self.stages is None else self.stages.mesh(node)

    @property
    def last_mesh(self) -> DeviceMesh:
        """The mesh of the module's results, and of its loss."""
        return self.mesh if self.stages is None else self.stages.meshes[-1]

    def parts(self, node: Node, name: str) -> list[tuple[str, tuple[int, ...], int]]:
        """Return name, shape and start along the blocks' dim of each input of a node."""
        value = self.folded[node] if node in self.constants else node.meta["val"]
        shape = tuple(n if type(n) is int else -1 for n in value.shape)
        if node not in self.blocks:
            return [(name, shape, 0)]
        dim, parts, start = self.blocks[node].dim, [], 0
        for i, size in enumerate(self.blocks[node].sizes):
            parts.append((f"{name}.{i}", (*shape[:dim], size, *shape[dim + 1 :]), start))
            start += size
        return parts

    def boxes(self, node: Node, rank: int | None) -> list[Boxes | None]:
        """Return a rank's boxes of each input of a parameter or constant; None outside its mesh.

        Each box comes with its place in the rank's part; inputs with blocked dims have several
        boxes.
        """
        layout, boxes = self.layout(node), list[Boxes | None]()
        for _, shape, start in self.parts(node, ""):
            if rank is not None and rank not in layout.mesh:
                boxes.append(None)
                continue
            rows: list[Rows] = [((0, n),) for n in shape]
            rows = rows if rank is None else [*layout.rows(shape, rank)]
            if node in self.blocks:
                dim = self.blocks[node].dim
                rows[dim] = tuple((start + first, start + last) for first, last in rows[dim])
            boxes.append(tuple(boxes_of(rows)))
        return boxes

    def gathered(
        self, node: Node, x: Handle | JoinedTensors, layout: Layout
    ) -> Handle | JoinedTensors:
        """Gather a parameter that lies so along the `gather` axes; the backward does so again."""
        if node not in self.placed:
            return x
        if isinstance(x, JoinedTensors):
            return x.mapped(lambda part: self._brought(layout, part))
        return self._brought(layout, x)

    def parts_of_rows(self, node: Node) -> int:
        """Return the number of ranks that split the first dim of a parameter where it is read."""
        layout = self.layout(node)
        split = [a for a in layout.mesh.axes if a not in self.gather]
        return math.prod(layout.mesh.axis_size(a) for a in split if layout.placement(a) == Shard(0))

    def parts_of_tokens(self) -> tuple[int, ...]:
        """Return how many rows of the batch each part has, where ranks have their experts apart."""
        given = {n: self.layout(n) for n in self.captured.inputs}
        tables = [self.layout(n) for n in self.parameters if n.meta["val"].ndim == 3]
        experts = {a for x in tables for a in x.split_axes(0) if a not in self.gather}
        meshes = {(x.mesh.axes, x.mesh.shape) for x in (*tables, *given.values())}
        if len(meshes) > 1:  # stages that split tokens in other ways
            return ()
        return parts_of_tokens(self.last_mesh, given, experts)

    def _brought(self, layout: Layout, x: Handle) -> Handle:
        axes = [a for a in self.gather if a in layout.mesh.axes]
        if not any(isinstance(layout.placement(a), Shard) for a in axes):
            return x
        placements = {a: p for a, p in zip(layout.mesh.axes, layout.placements, strict=True)
                if a not in self.gather}  # fmt: skip
        with recompute():
            whole = set_(x).on(layout.mesh, placements)
        return whole


@dataclass(frozen=True, slots=True)
class Blocks:
    """A parameter of several consecutive blocks along a dim."""

    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of a definition: by placeholder or constant, and the seed of random numbers."""

    nodes: Mapping[Node, Handle | JoinedTensors]
    seed: Handle | None


def _value_name(name: str) -> str | None:
    return name if is_value_name(name) else None


# -- constants -------------------------------------------------------------------------------------


def constants_of(live: Mapping[Node, None], folded: Folded) -> dict[Node, Node]:
    """Return known tensors that must be inputs, because no rank can make them.

    Each node maps to the first node with an equal value.
    """
    constants: dict[Node, Node] = {}
    distinct, nodes = Distinct(), dict[int, Node]()
    for node in live:
        if node.op != "call_function":
            continue
        known = {n: folded[n] for n in node.all_input_nodes if n in folded}
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: known.get(n, _shape_of(n)))  # noqa: B023
        wanted = BY_VALUE.get(str(node.target))
        asked = [*leaves(wanted(*args, **kwargs) if wanted else (args, kwargs))]
        for n, x in known.items():
            if isinstance(x, Tensor) and any(x is y for y in asked) and not is_made(x):
                constants[n] = constants.get(n) or nodes.setdefault(id(distinct.first(x)), n)
    return constants


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A value that a run computes; the shape of a tensor is known."""

    shape: Any


def _shape_of(node: Node) -> _Unknown:
    return _Unknown(getattr(node.meta.get("val"), "shape", None))


# -- recording -------------------------------------------------------------------------------------


def record(model: Model, inputs: Inputs, known: dict[Node, Any] | None = None) -> list[Any]:
    """Record the graph, and return its results: handles, and known tensors.

    New values of buffers become outputs that reuse the buffers.

    Args:
        model: the graph and its layouts.
        inputs: of the definition.
        known: takes the value of each node.
    """
    recording = _Recording(model, inputs)
    for node in model.live:
        if node.op == "call_function":
            recording.record(node)
    recording.leave()
    (known if known is not None else {}).update(recording.known)
    for buffer, node in model.captured.written:
        recording.handed.enter(buffer)
        new = whole(recording.read(node))
        if not isinstance(new, Handle):
            new = as_value(new)
        old = whole(recording.known[buffer])
        new.definition.add_output(set_(new).on(model.layout(buffer)), reuse=old)
    results: list[Any] = []
    recording.handed.enter(None)
    for place, node in enumerate(model.captured.results):
        x = whole(recording.read(node))
        if x is None:
            raise _not_made(model, place, node)
        if isinstance(x, Handle) and place in model.outputs:
            x = set_(x).on(model.outputs[place].layout)
        results.append(x)
    return results


def _not_made(model: Model, place: int, node: Node) -> DefinitionError:
    line = line_of(node.meta.get("stack_trace"))
    return DefinitionError(
        f"the tensor {place} that {model.captured.name} returns cannot be imported",
        where=[line.quote()] if line else [],
        because="it is a result of an operation of which mf.ops gives the first one alone",
        hint="return the first one; of pools that return places, windows are of one size",
    )


def whole(x: Any) -> Any:
    """Return a value as one handle: joined parts are concatenated, deferred sorts are done."""
    while isinstance(x, (JoinedTensors, *KINDS)):
        x = x.whole()
    return x


def _counted(definition: FusionDefinition) -> int:
    """Return the number of the next module that is recorded in a definition."""
    (count,) = definition.shared.get("modules", (0,))
    definition.shared["modules"] = (count + 1,)
    return int(count)


class _Recording:
    """The values of a graph that are recorded so far."""

    def __init__(self, model: Model, inputs: Inputs) -> None:
        given = inputs.nodes
        self.model, self.views = model, Views()
        self.context = RecordingContext(inputs.seed)
        self.known: dict[Node, Any] = {**given, **{n: given[m] for n, m in model.same.items()}}
        self.handed = HandOvers(model.stages)
        self._gathered: dict[tuple[Node, int, str | None], Any] = {}
        self._region: str | None = None
        self._definition = definition_of(*given.values())
        self._number = _counted(self._definition)
        self._made: dict[tuple[int, int], Handle] = {}
        self._parts: dict[int, int] = {}
        self._constants: dict[int, Any] = {
            x.id: model.folded[n] for n in model.constants if isinstance(x := given[n], Handle)
        }
        targets = {str(n.target) for n in model.live}
        self._is_routed = chosen.is_in(targets) or not targets.isdisjoint(GROUPED)

    def read(self, node: Node) -> Any:
        """Return the value of a node; parameters are gathered at their first read in each block."""
        if node not in self.known:
            return self.model.folded[node]
        if node not in self.model.captured.parameters:
            return self.handed.read(node, self.known[node])
        key = node, self.handed.stage, self._region
        if key not in self._gathered:
            there = self.handed.read(node, self.known[node])
            layout = self.handed.layout(self.model.layout(node))
            gathered = self._gathered[key] = self.model.gathered(node, there, layout)
            for x in gathered.parts if isinstance(gathered, JoinedTensors) else [gathered]:
                self._parts[x.id] = self.model.parts_of_rows(node)
        return self._gathered[key]

    def keep(self, node: Node, value: Any) -> None:
        """Note the value of a node, and the number of ranks that split experts' matrices."""
        self.known[node] = value
        if not self._is_routed or not isinstance(value, Handle):
            return
        if ramp := ramp_of(node, self.read):
            self._constants[value.id] = ramp
        operand = self.read(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        is_same = str(node.target) in expert_routes.MAPPED or expert_routes.is_pointwise(node)
        if is_same and isinstance(operand, Handle) and operand.shape == value.shape:
            self._parts.setdefault(value.id, self._parts_of(operand))

    def _parts_of(self, x: Handle) -> int:
        """Return the number of ranks that split experts' matrices."""
        return self._parts.get(self.views.beginning(x).id, 1)

    def record(self, node: Node) -> None:
        """Record a node, in its region, and in the block of it if it is computed again."""
        again = self.model.again
        region = f"{self._number} {again.region[node]}" if node in again.region else None
        if region != self._region:
            self._definition.region(region)
        self.handed.enter(node)
        for x in node.all_input_nodes:  # outside of the block: what is handed over is kept
            if x in self.known:
                self.handed.read(x, self.known[x])
        self._region, is_again = region, region is not None and node not in again.others
        with in_block(self._definition, region) if is_again else nullcontext():
            self.keep(node, self.call(node))

    def leave(self) -> None:
        """Leave the last region."""
        if self._region is not None:
            self._definition.region(None)

    def call(self, node: Node) -> Any:
        """Record a node, from its line in the module."""
        args, kwargs = map_arg((node.args, node.kwargs), self.read)
        if str(node.target) == "aten.index.Tensor":
            asked: Any = node.args[1]
            indices: Any = args[1]
            pairs = zip(asked, indices, strict=True)
            args = args[0], [self._index(i, x) for i, x in pairs]
        kwargs = {key: x for key, x in kwargs.items() if key not in IGNORED}
        line = line_of(node.meta.get("stack_trace"))
        call = called_at(line, node.name, self._call)
        if node not in self.model.passed:
            return call(node, args, kwargs)
        place = self.model.passed[node]
        return called_at(line, place.value_name, place.brought)(whole(call(node, args, kwargs)))

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Apply a node; rows that are sorted by their experts stay unsorted."""
        target = str(node.target)
        if not self._is_routed:
            return self._apply(target, args, kwargs)
        call = GraphCall(
            target=target,
            is_pointwise=expert_routes.is_pointwise(node),
            apply=self._apply,
            parts=self._parts_of,
            tokens=self.model.parts_of_tokens,
            known=lambda x: self._constants.get(x.id, x) if isinstance(x, Handle) else x,
            capacity=self.model.capacity,
        )
        for rules in (chosen.on_chosen, expert_routes.on_rows):
            if (routed := rules(call, args, kwargs)) is not None:
                return routed
        return self._apply(target, *map_aggregate((args, kwargs), expert_routes.sorted_again))

    def _index(self, node: Any, x: Any) -> Any:
        """Return an index; if a run computes it as a count from 0, the `Ramp`."""
        return (ramp_of(node, self.read) or x) if isinstance(x, Handle) else x

    def _apply(self, target: str, args: Any, kwargs: Any) -> Any:
        if target not in BY_VALUE:
            args, kwargs = map_aggregate((args, kwargs), self._as_handle)
        batched = on_batches(self.views, target, args, kwargs, self._dispatch)
        return self._on_rows(target, args, kwargs) if batched is None else batched

    def _on_rows(self, target: str, args: Any, kwargs: Any) -> Any:
        """Apply a linear map to rows of several dims, without merging these."""
        at = ROWS.get(target)
        x = args[at] if at is not None else None
        is_matrix = isinstance(x, Handle) and (at == 0 or args[0].ndim == 1)
        apart = self.views.rows(x) if isinstance(x, Handle) and is_matrix else None
        if at is None or apart is None or not isinstance(x, Handle):
            return self._dispatch(target, args, kwargs)
        product = self._dispatch(target, (*args[:at], apart, *args[at + 1 :]), kwargs)
        n = x.shape[0]
        if isinstance(product, JoinedTensors):
            return product.mapped(lambda part: self.views.reshape(part, (n, part.shape[-1])), 1)
        return self.views.reshape(product, (n, product.shape[-1]))

    def _dispatch(self, target: str, args: Any, kwargs: Any) -> Any:
        if any(isinstance(x, JoinedTensors) for x in leaves((args, kwargs))):
            rule = RULES.get(target)
            joined = rule(self.views, *args, **kwargs) if rule else None
            if joined is not None:
                return joined
            args, kwargs = map_aggregate((args, kwargs), whole)
        args = [list(x) if isinstance(x, list) else x for x in args]  # a graph has its own lists
        if target in VIEWS:
            return VIEWS[target](self.views, *args, **kwargs)
        if target in IN_CONTEXT:
            return IN_CONTEXT[target](self.context, *args, **kwargs)
        return TABLE[target](*args, **kwargs)

    def _as_handle(self, x: Any) -> Any:
        """Return a known tensor as a value, made once."""
        if not isinstance(x, Tensor):
            return x
        key = id(x), self.handed.stage
        if key not in self._made:
            self._made[key] = as_value(x)
        return self._made[key]
