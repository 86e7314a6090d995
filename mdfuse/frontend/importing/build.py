"""Record a captured module in a definition: its inputs, and each node from the module's line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from mdfuse.errors import DefinitionError
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.grad import recompute
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.capture import Captured
from mdfuse.frontend.importing.constants import as_value, is_made
from mdfuse.frontend.importing.fold import Folded
from mdfuse.frontend.importing.lines import called_at, line_of
from mdfuse.frontend.importing.place import Placed
from mdfuse.frontend.importing.table import BY_VALUE, IGNORED, SEEDED, TABLE, draws, is_known
from mdfuse.frontend.ops.views import set as set_
from mdfuse.layouts.layout import Shard
from mdfuse.mesh import DeviceMesh
from mdfuse.names import is_value_name


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is recorded.

    Attributes:
        captured: the graph.
        live: its nodes that depend on inputs or parameters, in order.
        folded: the values of the others.
        mesh: where all of it lives.
        placed: placeholder -> where it lives; what is not there is replicated.
        outputs: place of a result -> where it lives; the others lie as it is inferred.
        constants: nodes whose values are inputs, each with its name.
        same: nodes with the value of one of these.
        gather: axes along which parameters are brought together where they are read.
    """

    captured: Captured
    live: Mapping[Node, None]
    folded: Folded
    mesh: DeviceMesh
    placed: Mapping[Node, Placed]
    outputs: Mapping[int, Placed]
    constants: Mapping[Node, str] = field(default_factory=dict)
    same: Mapping[Node, Node] = field(default_factory=dict)
    gather: tuple[str, ...] = ()

    @property
    def parameters(self) -> list[Node]:
        """Parameters that something reads, in the order of inputs."""
        return [n for n in self.captured.parameters if n.users]

    def define_inputs(self, fd: FusionDefinition) -> Inputs:
        """Define an input for each parameter that is read, each constant and each argument."""
        captured = self.captured
        names = {n: captured.parameters[n].name for n in self.parameters}
        names |= self.constants
        taken = {*names.values()}
        for node, name in captured.inputs.items():
            names[node] = f"input.{name}" if name in taken else name
        given = {node: self._define(fd, name, node) for node, name in names.items()}
        calls = (n for n in self.live if n.op == "call_function")
        is_random = any(draws(str(n.target), n.args, n.kwargs) for n in calls)
        seed = fd.define_scalar(dtype=int, name="seed") if is_random else None
        return Inputs(nodes=given, seed=seed)

    def _define(self, fd: FusionDefinition, name: str, node: Node) -> Handle:
        value = self.folded[node] if node in self.constants else node.meta["val"]
        layout = self.placed[node].layout if node in self.placed else self.mesh
        shape = tuple(value.shape)
        return fd.define_tensor(shape, value.dtype, layout, name=_value_name(name))

    def gathered(self, node: Node, x: Handle) -> Handle:
        """Bring a parameter together along the axes that are gathered; the backward does so too."""
        layout = self.placed[node].layout if node in self.placed else None
        if layout is None or not any(isinstance(layout.placement(a), Shard) for a in self.gather):
            return x
        kept = {a: p for a, p in zip(layout.mesh.axes, layout.placements, strict=True)
                if a not in self.gather}  # fmt: skip
        with recompute():
            whole = set_(x).on(layout.mesh, kept)
        return whole


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of a definition: by placeholder or constant, and the seed of random numbers."""

    nodes: Mapping[Node, Handle]
    seed: Handle | None


def _value_name(name: str) -> str | None:
    return name if is_value_name(name) else None


# -- before ----------------------------------------------------------------------------------------


def check_known(captured: Captured, live: Mapping[Node, None]) -> None:
    """Raise DefinitionError for operations that are not in the table: all of them at once."""
    unknown = [n for n in live if n.op == "call_function" and not is_known(str(n.target))]
    if not unknown:
        return
    counts = Counter(str(n.target) for n in unknown)
    first: dict[str, Node] = {}
    for node in unknown:
        first.setdefault(str(node.target), node)
    lines = [(f"{times} x", target, line_of(first[target].meta.get("stack_trace")))
             for target, times in counts.most_common()]  # fmt: skip
    raise DefinitionError(
        f"{captured.name} calls {len(counts)} operations that cannot be imported",
        where=[f"{n} {target}   {source.quote() if source else ''}" for n, target, source in lines],
        because="no operation of mf.ops stands for them",
        hint="write them with other operations of torch; docs/importing.md lists what there is",
    )


def constants_of(live: Mapping[Node, None], folded: Folded) -> dict[Node, Node]:
    """Return the nodes whose values must be inputs: what is known, and no rank can make.

    Each with the first one that has the same value.
    """
    found: dict[Node, Node] = {}
    for node in live:
        if node.op != "call_function":
            continue
        known = {n: folded[n] for n in node.all_input_nodes if n in folded}
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: known.get(n, _shape_of(n)))  # noqa: B023
        wanted = BY_VALUE.get(str(node.target))
        asked = [*_leaves(wanted(*args, **kwargs) if wanted else (args, kwargs))]
        for n, x in known.items():
            if isinstance(x, Tensor) and any(x is y for y in asked) and not is_made(x):
                same = (m for m in found.values() if _are_equal(folded[m], x))
                found[n] = found.get(n) or next(same, n)
    return found


@dataclass(frozen=True, slots=True)
class _Unknown:
    """What a run computes: of tensors the shape is known."""

    shape: Any


def _shape_of(node: Node) -> _Unknown:
    return _Unknown(getattr(node.meta.get("val"), "shape", None))


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list | dict):
        for x in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(x)
    else:
        yield tree


# -- recording -------------------------------------------------------------------------------------


def record(model: Model, inputs: Inputs) -> list[Any]:
    """Record the graph, and return its results: handles, and tensors that are known.

    Args:
        model: the graph, and where things live.
        inputs: of the definition.
    """
    given = inputs.nodes
    known: dict[Node, Any] = {**given, **{n: given[first] for n, first in model.same.items()}}
    made: dict[int, Handle] = {}

    gathered: dict[Node, Handle] = {}

    def read(node: Node) -> Any:
        if node not in known:
            return model.folded[node]
        if node in model.captured.parameters and node not in gathered:
            gathered[node] = model.gathered(node, known[node])
        return gathered.get(node, known[node])

    for node in model.live:
        if node.op == "call_function":
            known[node] = _recorded(node, read, made, inputs.seed)
    results: list[Any] = []
    for place, node in enumerate(model.captured.results):
        x = read(node)
        if isinstance(x, Handle) and place in model.outputs:
            x = set_(x).on(model.outputs[place].layout)
        results.append(x)
    return results


def _recorded(
    node: Node, read: Callable[[Node], Any], made: dict[int, Handle], seed: Handle | None
) -> Any:
    """Record a node, from its line in the module; `made` has the constants so far."""
    target = str(node.target)
    args, kwargs = map_arg((node.args, node.kwargs), read)
    kwargs = {key: x for key, x in kwargs.items() if key not in IGNORED}

    def as_handle(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = as_value(x)
        return made[id(x)]

    def call() -> Any:
        given, named = args, kwargs
        if target not in BY_VALUE:
            given, named = map_aggregate((args, kwargs), as_handle)
        if target in SEEDED:
            return SEEDED[target](seed, *map(_plain, given), **named)
        return TABLE[target](*map(_plain, given), **named)

    return called_at(line_of(node.meta.get("stack_trace")), node.name, call)()


def _plain(x: Any) -> Any:
    """Lists of a graph are of a type of their own."""
    return list(x) if isinstance(x, list) else x
