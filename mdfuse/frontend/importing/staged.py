"""Models in stages, on several meshes: their patterns, and the numbers that all stages have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from torch.fx import Node

from mdfuse.errors import DefinitionError
from mdfuse.frontend import given
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.module_stages import ModelStages, meshes_of, stages_of, together
from mdfuse.frontend.importing.place import Patterns
from mdfuse.frontend.importing.record_graph import Model
from mdfuse.frontend.ops.views import set as set_
from mdfuse.frontend.optim import all_finite, clip_factor
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh, as_mesh

ops: Any = operations


def given_meshes(mesh: Any, stages: Any) -> tuple[DeviceMesh, ...]:
    """Return the mesh of a module, or that of each of its stages.

    Raises:
        DefinitionError: both, or neither; stages that are none.
    """
    if (mesh is None) == (stages is None):
        raise DefinitionError(
            f"from_torch with {'neither' if mesh is None else 'both'} mesh= and stages=",
            because="a module lives on one mesh, or in stages that each have one",
            hint="mesh=mf.DeviceMesh.arange(dp=2), or stages=[mesh_a, mesh_b]",
        )
    return (Layout(as_mesh(mesh)).mesh,) if stages is None else meshes_of(stages)


def in_stages(model: Model, stages: Sequence[Any] | None, meshes: tuple[DeviceMesh, ...]) -> Model:
    """Return a model, without layouts so far, in stages; as it is where there are none."""
    if stages is None:
        return model
    known = {n: n for n in model.constants} | {**model.same}
    placed = stages_of(model.captured, model.live, known, stages, meshes)
    constants, of = {**model.constants}, {**placed.of}
    for user in [n for n in model.live if n.op == "call_function"]:
        for x in user.all_input_nodes:
            if x in known:
                user.replace_input_with(
                    x, _on_mesh_of(model, placed, known[x], user, constants, of)
                )
    return replace(
        model, mesh=together(meshes), stages=replace(placed, of=of), constants=constants, same={}
    )


def _on_mesh_of(
    model: Model,
    placed: ModelStages,
    constant: Node,
    user: Node,
    constants: dict[Node, str],
    of: dict[Node, int],
) -> Node:
    """Return a constant on the mesh of a node that reads it: a new one where there is none yet."""
    mesh, name = placed.mesh(user), model.constants[constant]
    if placed.mesh(constant) == mesh:
        return constant
    name = f"{name}.stage{placed.meshes.index(mesh)}"
    node = next((n for n, known in constants.items() if known == name), None)
    if node is None:
        graph = model.captured.graph.graph
        with graph.inserting_before(constant):
            node = graph.create_node(
                "get_attr", constant.name, name=f"{constant.name}_{mesh.ranks[0]}"
            )
        node.meta = dict(constant.meta)
        model.folded.share(constant, node)
        constants[node], of[node] = name, placed.meshes.index(mesh)
    return node


def patterns_by_mesh(
    layouts: Mapping[str, Any], meshes: Sequence[DeviceMesh], gather: Sequence[str]
) -> dict[DeviceMesh, Patterns]:
    """Return the patterns of each mesh: they say what it has axes for; matches are counted once.

    Raises:
        LayoutError: a pattern that does not fit; an axis that no mesh has.
    """
    known = {axis for mesh in meshes for axis in mesh.axes}
    patterns: dict[DeviceMesh, Patterns] = {}
    for mesh in dict.fromkeys(meshes):
        axes = {*mesh.axes}
        said = {
            p: {a: x for a, x in said.items() if a in axes or a not in known}
            if isinstance(said, Mapping)
            else said
            for p, said in layouts.items()
        }
        patterns[mesh] = Patterns(said, mesh, [a for a in gather if a in axes or a not in known])
    first, *others = patterns.values()
    for other in others:
        other.matched = first.matched
    return patterns


def near(model: Model, node: Node, x: Handle) -> Handle:
    """Return a number that all ranks have as the stage of a parameter has it."""
    if model.stages is None:
        return x
    mesh, shared = model.stages.mesh(node), x.definition.shared
    key = "near", x.id, mesh
    if key not in shared:
        shared[key] = (set_(x).on(mesh, {}),)
    there: Handle = shared[key][0]
    return there


def everywhere(model: Model, x: Handle) -> Handle:
    """Return a number of one stage as all ranks have it."""
    return x if model.stages is None else set_(x).on(model.mesh, {})


def clip_factor_of(
    model: Model, nodes: Sequence[Node], gradients: Sequence[Handle], most: float
) -> tuple[Handle, Handle]:
    """Return what to scale gradients by, so that the norm of all is at most a number, and the norm.

    Args:
        model: whose parameters they are the gradients of.
        nodes: the parameters.
        gradients: theirs, in the same order.
        most: the norm that they may have.

    Raises:
        DefinitionError: it is no such number.
    """
    if not isinstance(most, int | float) or isinstance(most, bool) or not most >= 0:
        call, because = f"training_step of {model.captured.name}", "it is a norm of gradients"
        raise given.refused(call, "clip", most, because=because, hint="clip=1.0")
    if model.stages is None:
        return clip_factor(gradients, most)
    norms = [clip_factor(of, most)[1] for of in _by_mesh(model, nodes, gradients)]
    norm = ops.norm(ops.stack([everywhere(model, x) for x in norms]))
    return ops.clamp(most / (norm + 1e-6), None, 1.0), norm


def all_finite_of(model: Model, nodes: Sequence[Node], gradients: Sequence[Handle]) -> Handle:
    """Return whether all elements of all gradients are finite, on all ranks."""
    if model.stages is None:
        return all_finite(gradients)
    each = [everywhere(model, all_finite(of)) for of in _by_mesh(model, nodes, gradients)]
    return reduce(lambda a, b: a & b, each)


def _by_mesh(
    model: Model, nodes: Sequence[Node], gradients: Sequence[Handle]
) -> Iterable[list[Handle]]:
    by_mesh: dict[DeviceMesh, list[Handle]] = {}
    for node, g in zip(nodes, gradients, strict=True):
        by_mesh.setdefault(model.mesh_of(node), []).append(g)
    return by_mesh.values()
