"""Torch modules as definitions: `from_torch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from mdfuse.compiled.imported import ImportedModel
from mdfuse.errors import DefinitionError, LayoutError
from mdfuse.frontend import given
from mdfuse.frontend.importing.activations import Noted, places_of
from mdfuse.frontend.importing.block_patterns import blocks_of
from mdfuse.frontend.importing.budget import within
from mdfuse.frontend.importing.capture import ExportedModule, capture
from mdfuse.frontend.importing.fold import Folded, live_nodes
from mdfuse.frontend.importing.missing_buffers import numbers_of
from mdfuse.frontend.importing.place import Patterns, Placed
from mdfuse.frontend.importing.recomputed import recomputed
from mdfuse.frontend.importing.record_graph import Model, constants_of
from mdfuse.frontend.importing.staged import given_meshes, in_stages, patterns_by_mesh
from mdfuse.frontend.importing.unknown_ops import check_known
from mdfuse.interpreter.garbage import no_collection
from mdfuse.mesh import DeviceMesh
from mdfuse.plan.helper_pool import start_for_module
from mdfuse.plan.progress_bar import stage


def from_torch(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any = None,
    stages: Sequence[Any] | None = None,
    layouts: Mapping[str, Any] | None = None,
    blocks: Mapping[str, Any] | None = None,
    gather: Sequence[str] = (),
    recompute: str | Sequence[str] | Callable[[str], bool] | int | None = None,
    adapters: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    buffers: Mapping[str, Tensor] | None = None,
    skipped: Sequence[str] = (),
    capacity: int | None = None,
) -> ImportedModel:
    """Import a module: the operations of its forward, for arguments of these shapes and dtypes.

    Args:
        module: on any device; on "meta" its parameters have no numbers, and need none.
        args, kwargs: what `forward` is called with; of tensors (or `TensorSpec`s) only shapes and
            dtypes count, everything else is a constant of the program.
        mesh: where all of it lives.
        stages: instead of mesh, that of each stage: `[mesh_a, mesh_b]` for equal parts, or
            `[(mesh_a, ["embed", "layers.0"]), …]`. Layouts say of each what it has axes for.
        layouts: pattern -> axis -> placement, for names of parameters, for inputs (`"input:ids"`,
            `"input:0"`), outputs (`"output:0"`), and, word by word, tensors that submodules return
            (`"activation:layers.*"`) or take (`"argument:layers.*.attn:x"`). The pattern without
            wildcards counts, then that with the longest literal part; else all is replicated.
        blocks: pattern -> how many blocks of one size stand along the dim that the parameter is
            split by, or their extents: `{"*.c_attn.*": 3}`, `{dim: 3}`. Each is an input.
        gather: axes along which parameters are gathered before they are read, and again in the
            backward, as FSDP does. They split the parts of other axes, unless a `Layout` is given.
        recompute: what the backward computes again: patterns of submodules (`"layers.*"`, each
            layer), a function of an operation's name, or the bytes that a rank may keep instead.
        adapters: pattern of linear layers -> a rank, or (rank, alpha): steps train adapters alone.
        dynamic_shapes: argument -> dim -> a name: extents that runs choose; or as `torch.export`.
        buffers: name -> numbers, for buffers of a module on "meta" that are in no checkpoint.
        skipped: paths of a plan that lead nowhere, which `report()` lists.
        capacity: the most rows of a rank's tokens for an expert; all ranks refuse runs with more.

    Raises:
        DefinitionError: what cannot be exported, or imported, with lines; a wrong stage.
        LayoutError: a pattern that matches nothing, or does not fit; some that contradict.

    >>> import torch, mdfuse as mf
    >>> model = mf.from_torch(torch.nn.Linear(4, 6), (torch.zeros(1, 4),),
    ...     mesh=mf.DeviceMesh.arange(tp=2), layouts={"weight": {"tp": mf.Shard(1)}})
    >>> [c.kind for c in model.compile().communications]
    ['Allreduce']
    """
    _check_dicts(layouts, kwargs, blocks, adapters, buffers)
    meshes, gathered = given_meshes(mesh, stages), given.names("from_torch", "gather", gather)
    patterns = patterns_by_mesh(layouts or {}, meshes, gathered)
    first = patterns[meshes[0]]
    captured = _exported(module, first, args, kwargs, dynamic_shapes, adapters)
    model = in_stages(_model(captured, meshes[0], buffers or {}, gathered), stages, meshes)
    model = _with_blocks(_placed(model, patterns, blocks or {}), recompute, capacity)
    return ImportedModel(model, first, given.names("from_torch", "skipped", skipped))


def _exported(module: nn.Module, patterns: Patterns, *how: Any) -> ExportedModule:
    given.check_module("from_torch", module)
    start_for_module(sum(1 for _ in module.parameters()))
    noted = Noted.of(module, patterns)
    with stage(f"exporting {type(module).__name__}"), no_collection():
        return capture(module, *(*how, noted))


def _checked(capacity: Any) -> int | None:
    if capacity is None or (type(capacity) is int and capacity >= 0):
        return capacity
    because, hint = "it is a number of rows from 0 on", "capacity=64, or leave it out"
    raise given.refused("from_torch", "capacity", capacity, because=because, hint=hint)


#: What is by name, with the errors that say so.
_DICTS = {
    "layouts": LayoutError, "kwargs": DefinitionError, "blocks": DefinitionError,
    "adapters": DefinitionError, "buffers": DefinitionError,
}  # fmt: skip


def _check_dicts(*values: object) -> None:
    for value, (name, kind) in zip(values, _DICTS.items(), strict=True):
        given.by_name("from_torch", name, value, kind)


@stage("reading the exported module")
def _model(
    captured: ExportedModule,
    mesh: DeviceMesh,
    buffers: Mapping[str, Tensor],
    gather: tuple[str, ...],
) -> Model:
    live = live_nodes(captured)
    check_known(captured, live)
    folded = Folded(captured, live, numbers_of(captured, buffers))
    constants = constants_of(live, folded)
    first = dict.fromkeys(constants.values())
    return Model(
        captured=captured,
        live=live,
        folded=folded,
        mesh=mesh,
        placed={},
        outputs={},
        constants={n: captured.origins.get(n, f"constant.{n.name}") for n in first},
        same={n: same for n, same in constants.items() if n is not same},
        gather=gather,
    )


def _placed(
    model: Model, patterns: Mapping[DeviceMesh, Patterns], blocks: Mapping[str, Any]
) -> Model:
    placed, outputs = _places(model, patterns)
    captured = model.captured
    mesh_of = model.mesh_of
    passed = places_of(patterns, mesh_of, captured.passed, model.live, captured.module)
    model = replace(model, placed=placed, outputs=outputs, passed=passed)
    return replace(model, blocks=blocks_of(model, blocks))


def _with_blocks(model: Model, recompute: Any, capacity: Any) -> Model:
    """Return a model with its capacity, and the nodes that the backward computes again."""
    model = replace(model, capacity=_checked(capacity))
    if isinstance(recompute, int) and not isinstance(recompute, bool):
        return replace(model, again=within(model, recompute))
    return replace(model, again=recomputed(model.captured, model.live, recompute))


def _places(
    model: Model, by_mesh: Mapping[DeviceMesh, Patterns]
) -> tuple[dict[Node, Placed], dict[int, Placed]]:
    """Return the placements that patterns give parameters and inputs, and outputs by position."""
    captured, placed = model.captured, dict[Any, Placed]()
    asked = [(n, p.names, n) for n, p in captured.parameters.items()]
    asked += [
        (n, (f"input:{name}", f"input:{i}"), n)
        for i, (n, name) in enumerate(captured.inputs.items())
    ]
    results = captured.results
    asked_outputs = [
        (o.place, (f"output:{o.path}", f"output:{o.place}"), results[o.place])
        for o in captured.outputs
        if o.place is not None
    ]
    for key, names, node in (*asked, *asked_outputs):
        mesh = model.mesh_of(node) if isinstance(key, Node) else model.last_mesh
        place = by_mesh[mesh].find(names, node.meta["val"].ndim)
        if place is not None:
            placed[key] = place
    patterns = next(iter(by_mesh.values()))
    patterns.check_used([name for _, names, _ in (*asked, *asked_outputs) for name in names])
    _place_adapters(captured, patterns, placed)
    outputs = {key: place for key, place in placed.items() if isinstance(key, int)}
    return {key: place for key, place in placed.items() if isinstance(key, Node)}, outputs


def _place_adapters(
    captured: ExportedModule, patterns: Patterns, placed: dict[Any, Placed]
) -> None:
    """Place adapters as their matrices, unless a pattern matches `lora_` itself."""
    nodes = {name: n for n, p in captured.parameters.items() for name in p.names}
    for node, p in captured.parameters.items():
        said = placed.pop(node, None) if p.adapter is not None else None
        if p.adapter is None or (said is not None and "lora_" in said.pattern):
            placed |= {node: said} if said is not None else {}
            continue
        matrix = placed.get(nodes[p.adapter.of])
        if matrix is not None:
            layout = p.adapter.layout(p.name, matrix.layout)
            placed[node] = Placed(pattern=matrix.pattern, layout=layout)
