"""The batch of a step of training in microbatches: which dim of which inputs, and how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mdfuse.errors import DefinitionError, counted, listed, shown
from mdfuse.frontend import given
from mdfuse.frontend.importing.record_graph import Model
from mdfuse.frontend.importing.train import StepDefinition
from mdfuse.ir.graph import Fusion


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCut:
    """A batch in equal microbatches.

    Attributes:
        count: how many.
        batch: input -> its dim that is the batch's.
        schedule: of the stages, by name or as a table; None: the usual one, or a loop.
    """

    count: int
    batch: Mapping[str, int]
    schedule: Any = None


def microbatches_of(
    model: Model,
    step: StepDefinition,
    count: object,
    batch: Mapping[str, int] | None,
    schedule: Any,
) -> BatchCut | None:
    """Return the microbatches of a step; None where it takes its batch at once.

    Args:
        model: that is trained.
        step: of it.
        count: how many microbatches.
        batch: input -> its dim that is the batch's; by default the first dim of the first input.
        schedule: of the stages; with one, a single microbatch goes through them, too.

    Raises:
        DefinitionError: no whole number from 1 on; no such batch; rows of a rank that are not
            divisible by the number of microbatches.
    """
    call, fusion = f"training_step of {model.captured.name}", step.definition.fusion
    inputs = inputs_of(fusion, model.weight_names())
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise DefinitionError(
            f"{call}: microbatches={shown(count)}",
            because="it says in how many parts each rank takes its rows of the batch",
            hint="a number from 1 on",
        )
    if count == 1 and schedule is None:
        return None
    if batch is None:
        batch = {_first(call, fusion, inputs): 0}
    for name, dim in given.by_name(call, "batch", batch).items():
        _check_even(call, fusion, inputs, name, dim, count)
    return BatchCut(count=count, batch=dict(batch), schedule=schedule)


def inputs_of(fusion: Fusion, weights: Sequence[str]) -> tuple[str, ...]:
    """Return the names of what a run of a step passes: all inputs but weights and state."""
    known = {*weights, *fusion.reuse.values()}
    return tuple(name for name in fusion.inputs if name not in known)


def _first(call: str, fusion: Fusion, inputs: Sequence[str]) -> str:
    """Return the first input with dims."""
    name = next((n for n in inputs if fusion.values[n].shape), None)
    if name is None:
        raise DefinitionError(
            f"{call} with microbatches, and no input with rows",
            because=f"a run passes {listed(inputs) or 'nothing'}",
            hint="arguments of the module whose first dim is the batch's",
        )
    return name


def _check_even(
    call: str, fusion: Fusion, inputs: Sequence[str], name: object, dim: object, count: int
) -> None:
    """Raise DefinitionError unless each rank's rows are so many equal parts.

    Extents that a run chooses are compared by the run.
    """
    value = fusion.values[name] if isinstance(name, str) and name in inputs else None
    dims = 0 if value is None else len(value.shape)
    if value is None or not isinstance(dim, int) or not -dims <= dim < dims:
        raise DefinitionError(
            f"{call}: batch={{{name!r}: {shown(dim)}}}",
            because=f"a run passes {listed(inputs)}"
            if value is None
            else f"%{name} has {counted(dims, 'dim')}",
            hint="batch={input: dim}, of an input of the step",
        )
    extent, layout = value.shape[dim], value.layout
    if not isinstance(extent, int) or layout is None:
        return
    rows = {b - a for _, (a, b) in layout.chunks_of(dim % dims, extent)}
    if uneven := [n for n in rows if n % count or not n]:
        raise DefinitionError(
            f"{call}: {count} microbatches of {counted(uneven[0], 'row')}",
            because=f"dim {dim} of %{name} has {extent} rows in all, laid out as {layout}: "
            f"on ranks {' and '.join(map(str, sorted(rows)))}",
            hint=f"rows on each rank that are a multiple of {count}, or fewer microbatches",
        )
