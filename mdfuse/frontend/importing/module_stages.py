"""Stages of an imported module: which node is computed on which mesh.

    stages=[(a, ["embed", "layers.0"]), (b, ["layers.1", "head"])]

A node is in the stage of the submodule that calls it. What no stage names, as what a module
computes between its submodules, is in the last stage of what it reads: it is computed as soon as
it can be. Parameters, constants and arguments are in the first stage that reads them, and other
stages get them from there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch.fx import Node

from mdfuse.errors import DefinitionError, counted, listed, shown
from mdfuse.frontend.importing.capture import ExportedModule
from mdfuse.frontend.importing.submodules import SubmoduleCall, Submodules, calls_of
from mdfuse.layouts.layout import Layout, Shard
from mdfuse.mesh import DeviceMesh, as_mesh

#: Operations that read rows of a parameter, and multiply with none.
_LOOKUPS = ("aten.embedding", "aten.index", "aten._embedding_bag")


@dataclass(frozen=True, kw_only=True)
class ModelStages:
    """The stages of a module.

    Attributes:
        meshes: of each stage; a mesh may have several.
        of: node -> the number of its stage.
        names: stage -> the submodules in it.
    """

    meshes: tuple[DeviceMesh, ...]
    of: Mapping[Node, int]
    names: tuple[tuple[str, ...], ...]

    def mesh(self, node: Node) -> DeviceMesh:
        """Return the mesh of a node."""
        return self.meshes[self.of.get(node, 0)]

    def lines(self, parameters: Iterable[Node]) -> list[str]:
        """Return a line on each stage, for a report."""
        count = [0] * len(self.meshes)
        for node in parameters:
            count[self.of.get(node, 0)] += 1
        rows = enumerate(zip(self.meshes, count, self.names, strict=True))
        return [
            f"stage {n} on {mesh} (from rank {mesh.ranks[0]}): {counted(k, 'parameter')}"
            + (f", {listed(names)}" if names else "")
            for n, (mesh, k, names) in rows
        ]


def meshes_of(stages: object) -> tuple[DeviceMesh, ...]:
    """Return the mesh of each stage that a caller names.

    Raises:
        DefinitionError: no list of meshes, or of meshes with names of submodules.
        MeshError: a mesh that is none.
    """
    given = [*stages] if isinstance(stages, Sequence) and not isinstance(stages, str) else []
    pairs = [x for x in given if isinstance(x, tuple)]
    if not given or (pairs and len(pairs) != len(given)) or any(map(_is_strange, pairs)):
        raise DefinitionError(
            f"from_torch with stages={shown(stages)}",
            because="stages are meshes, or pairs of a mesh and patterns of submodules",
            hint='stages=[mesh_a, mesh_b], or [(mesh_a, ["embed", "layers.0"]), (mesh_b, [...])]',
        )
    return tuple(as_mesh(x[0] if isinstance(x, tuple) else x) for x in given)


def _is_strange(pair: tuple[Any, ...]) -> bool:
    if len(pair) != 2 or isinstance(pair[1], str) or not isinstance(pair[1], Sequence):
        return True
    return not all(isinstance(x, str) for x in pair[1])


def together(meshes: Iterable[DeviceMesh]) -> DeviceMesh:
    """Return a mesh of all ranks of some meshes: for numbers that all have."""
    return DeviceMesh(sorted({r for mesh in meshes for r in mesh.ranks}), axes=["stages"])


def carried(layout: Layout, mesh: DeviceMesh) -> Layout:
    """Return a layout on another mesh: axes of the same names split as before."""
    split = {
        a: layout.placement(a)
        for a in mesh.axes
        if a in layout.mesh.axes and isinstance(layout.placement(a), Shard)
    }
    order = {d: tuple(a for a in axes if a in split) for d, axes in layout.splits}
    return Layout(mesh, split, order)


def stages_of(
    captured: ExportedModule,
    live: Iterable[Node],
    known: Mapping[Node, Node],
    stages: Sequence[Any],
    meshes: tuple[DeviceMesh, ...],
) -> ModelStages:
    """Return the stages of the nodes of a graph.

    Args:
        captured: the graph.
        live: its nodes that runs compute, in order.
        known: constant that is an input -> the first one with an equal value.
        stages: as `meshes_of` takes them.
        meshes: that it returned.

    Raises:
        LayoutError: a pattern that matches no submodule.
        DefinitionError: a submodule in no stage, or in two; a stage that reads what a later one
            gives, or computes nothing; fewer parts than stages.
    """
    nodes = [n for n in live if n.op == "call_function"]
    if isinstance(stages[0], tuple):
        named = _named(captured, [patterns for _, patterns in stages])
        said = {n: k for n in nodes if (k := _innermost(n, named)) is not None}
        _check_all_named(captured, nodes, said)
    else:
        units, said = _equal_parts(captured, nodes, len(meshes))
        named = {units[n].name: said[n] for n in said}
    of = _placed(captured, nodes, said)
    idle = [k for k in range(len(meshes)) if k not in of.values()]
    if idle:
        raise DefinitionError(
            f"stage {idle[0]} of {captured.name} computes nothing",
            because="no operation of the module is in it",
            hint="leave the stage out, or give it submodules that the forward calls",
        )
    _place_inputs(nodes, known, of)
    names = tuple(tuple(x for x, k in named.items() if k == n) for n in range(len(meshes)))
    return ModelStages(meshes=meshes, of=of, names=names)


def _named(captured: ExportedModule, patterns: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return submodule -> the stage that names it."""
    submodules, named = Submodules(captured.module), dict[str, int]()
    for k, of in enumerate(patterns):
        chosen = submodules.chosen(f"stages[{k}]", dict.fromkeys(of, k))
        for name, (pattern, _) in chosen.items():
            if name in named:
                raise DefinitionError(
                    f"submodule {name} of {captured.name} is in stages {named[name]} and {k}",
                    because=f"{pattern!r} of stage {k} matches it, too",
                    hint="name each submodule in one stage",
                )
            named[name] = k
    return named


def _innermost(node: Node, named: Mapping[str, int]) -> int | None:
    """Return the stage of the innermost submodule that calls a node and is in one."""
    return next((named[c.name] for c in reversed(calls_of(node)) if c.name in named), None)


def _check_all_named(
    captured: ExportedModule, nodes: Iterable[Node], said: Mapping[Node, int]
) -> None:
    """Raise DefinitionError for a submodule with parameters that no stage names."""
    missing: dict[str, None] = {}
    for node in nodes:
        calls = calls_of(node)
        read = any(x in captured.parameters for x in node.all_input_nodes)
        if read and calls and node not in said:
            missing[calls[-1].name] = None
    if missing:
        raise DefinitionError(
            f"{listed([*missing])} of {captured.name}: in no stage",
            because="what reads parameters is in the stage that names it, or what is around it",
            hint=f"name {next(iter(missing))!r} in one of the stages",
        )


# -- equal parts -----------------------------------------------------------------------------------


def _equal_parts(
    captured: ExportedModule, nodes: Sequence[Node], count: int
) -> tuple[dict[Node, SubmoduleCall], dict[Node, int]]:
    """Return node -> its submodule, and node -> its stage.

    The largest part has as few elements to multiply with as can be.

    Raises:
        DefinitionError: the module has fewer parts than stages.
    """
    inner = {c.name.rpartition(".")[0] for n in nodes for c in calls_of(n)}
    for unit_of in (_unit, _leaf):
        units = {n: unit for n in nodes if (unit := unit_of(n, inner)) is not None}
        sizes = _sizes(captured, nodes, units)
        if sum(size > 0 for size in sizes.values()) >= count:
            ends = _cuts([*sizes.values()], count)
            stage = {u: sum(at >= end for end in ends) for at, u in enumerate(sizes)}
            return units, {n: stage[unit] for n, unit in units.items()}
    raise DefinitionError(
        f"{captured.name} in {count} stages",
        because=f"it has {counted(sum(s > 0 for s in sizes.values()), 'submodule')} with matrices",
        hint="fewer stages, or (mesh, [submodules]) for each of them",
    )


def _unit(node: Node, inner: Container[str]) -> SubmoduleCall | None:
    """Return the outermost submodule with a number for a name that calls a node, or the leaf."""
    numbered = (c for c in calls_of(node) if c.name.rpartition(".")[2].isdigit())
    return next(numbered, None) or _leaf(node, inner)


def _leaf(node: Node, inner: Container[str]) -> SubmoduleCall | None:
    """Return the innermost submodule that calls a node, unless it calls submodules itself."""
    calls = calls_of(node)
    return calls[-1] if calls and calls[-1].name not in inner else None


def _sizes(
    captured: ExportedModule, nodes: Iterable[Node], units: Mapping[Node, SubmoduleCall]
) -> dict[SubmoduleCall, int]:
    """Return unit, in order -> the elements of the matrices that it multiplies with."""
    read: dict[SubmoduleCall, dict[Node, int]] = {}
    for node in nodes:
        if node not in units:
            continue
        matrices = read.setdefault(units[node], {})
        if not str(node.target).startswith(_LOOKUPS):
            for x in node.all_input_nodes:
                if x in captured.parameters and x.meta["val"].ndim > 1:
                    matrices[x] = x.meta["val"].numel()
    return {unit: sum(matrices.values()) for unit, matrices in read.items()}


def _cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Return where parts end, each with something, so that the largest is as small as can be.

    >>> _cuts([0, 4, 4, 4, 0, 7], 2)
    [3]
    """
    ends = [0, *accumulate(sizes)]
    best: list[tuple[int, list[int]]] = [(size, []) for size in ends]
    for k in range(1, count):
        best = [
            min(
                (
                    (max(best[j][0], ends[n] - ends[j]), [*best[j][1], j])
                    for j in range(k, n)
                    if ends[n] > ends[j] and best[j][0] > 0
                ),
                default=(0, []),
            )
            for n in range(len(ends))
        ]
    return best[-1][1]


# -- the other nodes -------------------------------------------------------------------------------


def _placed(
    captured: ExportedModule, nodes: Sequence[Node], said: Mapping[Node, int]
) -> dict[Node, int]:
    """Return the stage of each node.

    Raises:
        DefinitionError: a stage reads what a later one gives.
    """
    of: dict[Node, int] = {}
    for node in nodes:
        before = [x for x in node.all_input_nodes if x in of]
        last = max(before, key=lambda x: of[x], default=None)
        if node in said:
            of[node] = said[node]
            if last is not None and of[last] > said[node]:
                raise _backwards(captured, node, last, of)
        elif last is not None:
            of[node] = of[last]
    for node in reversed(nodes):  # what inputs alone lead to is computed where it is read first
        if node not in of:
            of[node] = min((of[x] for x in node.users if x in of), default=0)
    return of


def _backwards(
    captured: ExportedModule, node: Node, read: Node, of: Mapping[Node, int]
) -> DefinitionError:
    names = [str(calls[-1]) if (calls := calls_of(n)) else str(n.name) for n in (node, read)]
    return DefinitionError(
        f"{names[0]} of {captured.name} is in stage {of[node]}, and reads what {names[1]} gives "
        f"in stage {of[read]}",
        because="a microbatch goes through the stages in their order",
        hint="put it into the same stage, or a later one",
    )


def _place_inputs(nodes: Iterable[Node], known: Mapping[Node, Node], of: dict[Node, int]) -> None:
    """Add the stages of parameters, constants and arguments: the first that reads them."""
    for node in nodes:
        for x in node.all_input_nodes:
            first = known.get(x, x)
            if first.op != "call_function" or x in known:
                of[first] = min(of[node], of.get(first, of[node]))
    of.update({x: of[first] for x, first in known.items() if first in of})
