"""Record an imported module in an existing definition, on its values, as pipeline stages do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.joined import JoinedTensors
from mdfuse.frontend.importing.record_graph import Model, record
from mdfuse.frontend.ops.views import set as set_
from mdfuse.ir.graph import dtype_name
from mdfuse.names import is_value_name
from mdfuse.trees import flattened, unflattened


def called(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str
) -> tuple[Any, dict[str, Handle]]:
    """Record a module's operations on values; see `ImportedModel.record`."""
    captured = model.captured
    leaves, structure = flattened((args, dict(kwargs)))
    values = [x for _, x in leaves if isinstance(x, Handle)]
    if structure != captured.structure[0]:
        raise DefinitionError(
            f"{captured.name}: arguments {structure}",
            because=f"it was imported with {captured.structure[0]}",
            hint="pass arguments of the same structure, with the same names",
        )
    if not values or len(values) != len(captured.inputs):
        raise DefinitionError(
            f"{captured.name}: {len(values)} of its arguments are values of a definition",
            because=f"it was imported with the tensors {', '.join(captured.inputs.values())}",
            hint="pass a value of the definition for each of them",
        )
    if prefix and not is_value_name(prefix):
        raise DefinitionError(
            f"{captured.name}: name={prefix!r}",
            because="names of parameters begin with it, and are those of values of the definition",
            hint='for example name="first"',
        )
    given = {node: _placed(model, node, x)
             for node, x in zip(captured.inputs, values, strict=True)}  # fmt: skip
    start = f"{prefix}." if prefix else ""
    inputs = model.define_inputs(values[0].definition, given, start)
    results = record(model, inputs)
    returned = [o.constant if o.place is None else results[o.place] for o in captured.outputs]
    weights: dict[str, Handle] = {}
    for node in (*model.parameters, *model.constants):
        x = inputs.nodes[node]
        weights |= {part.name: part for part in (x.parts if isinstance(x, JoinedTensors) else (x,))}
    return unflattened(returned, captured.structure[1]), weights


def _placed(model: Model, node: Node, x: Handle) -> Handle:
    """Return an argument with the layout of its pattern.

    Raises:
        DefinitionError: it has another shape or dtype than the module was imported with.
    """
    wanted = node.meta["val"]
    same = len(x.shape) == len(wanted.shape) and all(
        n == m for n, m in zip(x.shape, wanted.shape, strict=True) if type(m) is int
    )
    if not same or x.dtype != wanted.dtype:
        raise DefinitionError(
            f"{model.captured.name}: {model.captured.inputs[node]} is {x!r}",
            because=f"it was imported with {dtype_name(wanted.dtype)}{list(wanted.shape)}",
            hint="import it with arguments of the shapes and dtypes that it gets",
        )
    return set_(x).on(model.placed[node].layout) if node in model.placed else x
