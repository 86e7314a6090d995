"""Infer fusions with symbolic extents again, for other examples or for numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mdfuse.errors import DefinitionError
from mdfuse.extents.assumptions import Assumptions, assuming
from mdfuse.extents.extent import with_examples, with_numbers
from mdfuse.ir.graph import Fusion, Value
from mdfuse.ir.infer import inferred
from mdfuse.ir.ops import TABLE

Examples = Mapping[str, int]


def with_new_examples(fusion: Fusion, examples: Examples) -> Fusion:
    """Return the fusion with other examples, all shapes and memory orders inferred anew.

    Raises:
        DefinitionError: an op refuses extents like these.
    """
    return _inferred(with_examples(fusion, examples, {}))


def with_known_extents(fusion: Fusion, extents: Examples) -> Fusion:
    """Return the fusion for given extents, with numbers only.

    Raises:
        DefinitionError: an op refuses these extents.
    """
    return _inferred(with_numbers(fusion, extents))


def _inferred(fusion: Fusion) -> Fusion:
    """Return the fusion with the results of all expressions inferred anew."""
    values: dict[str, Value] = dict(fusion.values)
    for expr in fusion.exprs:
        if values[expr.outputs[0]].is_tensor:
            inferences = inferred(TABLE[expr.op], expr.inputs, expr.kwargs, values, expr.source)
            for name, fields in zip(expr.outputs, inferences, strict=True):
                values[name] = replace(values[name], **fields)
    return replace(fusion, values=values)


def is_possible(fusion: Fusion, examples: Examples) -> bool:
    """Return whether all ops of the fusion take the extents that these examples give."""
    try:
        with assuming(None):
            with_new_examples(fusion, examples)
    except (DefinitionError, ZeroDivisionError):
        return False
    return True


def unified(fusion: Fusion, examples: Examples, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield examples with one symbol changed, for which the fusion so far is possible.

    Args:
        fusion: what is defined so far.
        examples: those that an op refused.
        numbers: what to try for a symbol, besides the examples of the others.
    """
    candidates = sorted({*numbers} | {*examples.values()})
    for name in sorted(examples, reverse=True):
        for n in candidates:
            changed = {**examples, name: n}
            if n != examples[name] and is_possible(fusion, changed):
                yield changed


def check_definition(fusion: str, assumed: Assumptions, extents: Examples) -> None:
    """Raise DefinitionError where the definition's own code would decide otherwise."""
    broken = [g for g in assumed.guards if not g.holds(extents)]
    if broken:
        raise DefinitionError(
            f"@{fusion} for the extents {dict(extents)}",
            because="the definition looked at its extents, and went on for "
            + ", ".join(map(str, broken)),
            hint="extents for which that holds, or another definition for these",
        )
