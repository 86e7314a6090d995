"""Run a fusion on one device, ignoring layouts: what distributed runs are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mdfuse.errors import ProgramError, counted, listed, shown
from mdfuse.extents.extent import Extent
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.ir.calls import in_order
from mdfuse.ir.graph import Fusion
from mdfuse.ir.infer import as_results
from mdfuse.ir.ops import TABLE
from mdfuse.ir.scalars import as_number, scalar_call
from mdfuse.ir.symbolic import with_known_extents
from mdfuse.ir.tensors import resolved
from mdfuse.runs.arguments import check_global
from mdfuse.runs.extents import global_extents


def reference(definition: FusionDefinition | Fusion, inputs: Sequence[Any]) -> list[Tensor]:
    """Evaluate each expression with the torch call of its op, on whole tensors.

    Args:
        definition: the fusion.
        inputs: global tensors (numbers for scalars), in definition order.

    Returns:
        The global outputs.

    Raises:
        ProgramError: the inputs do not fit.
    """
    fusion = definition.fusion if isinstance(definition, FusionDefinition) else definition
    if not isinstance(fusion, Fusion):
        raise ProgramError(
            f"reference takes a FusionDefinition, not {type(definition).__name__}",
            hint="the definition of a program is what mf.compile was given",
        )
    if not isinstance(inputs, list | tuple):
        raise ProgramError(f"@{fusion.name}: inputs={shown(inputs)}", hint="pass a list of them")
    if len(inputs) != len(fusion.inputs):
        raise ProgramError(
            f"@{fusion.name}: {counted(len(inputs), 'argument')} for "
            f"{counted(len(fusion.inputs), 'input')}",
            hint="pass, in this order: " + listed(fusion.inputs),
        )
    fusion = _numbered(definition, fusion, inputs)
    known: dict[str, Any] = {}
    for name, x in zip(fusion.inputs, inputs, strict=True):
        value = fusion.values[name]
        check_global(fusion.name, name, x, value.shape if value.is_tensor else None, value.dtype)
        known[name] = x if value.is_tensor else as_number(x, value.dtype)
    known = dict(zip(known, resolved([*known.values()]), strict=True))
    device = next((x.device for x in inputs if isinstance(x, Tensor)), None)
    for expr in fusion.exprs:
        operands = [known[x] if isinstance(x, str) else x for x in expr.inputs]
        attrs = expr.kwargs
        if not fusion.values[expr.outputs[0]].is_tensor:
            known[expr.output] = scalar_call(lambda *a: TABLE[expr.op].call(*a, **attrs), operands)  # noqa: B023
            continue
        if TABLE[expr.op].is_creation:
            attrs["device"] = device
        outputs = as_results(TABLE[expr.op].call(*operands, **attrs))
        for name, x in zip(expr.outputs, outputs, strict=True):
            value = fusion.values[name]
            known[name] = in_order(x, order=value.order) if value.is_order_required else x
    return [known[name] for name in fusion.outputs]


def _numbered(
    definition: FusionDefinition | Fusion, fusion: Fusion, inputs: Sequence[Any]
) -> Fusion:
    """Return the fusion with the extents of the inputs in the place of symbols."""
    shapes = (fusion.values[name].shape for name in fusion.inputs)
    if not any(type(n) is Extent for shape in shapes for n in shape):
        return fusion
    extents = global_extents(fusion, inputs)
    if isinstance(definition, FusionDefinition):
        definition.check_extents(extents)
    return with_known_extents(fusion, extents)
