"""Readable reports of an import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from mdfuse.errors import counted
from mdfuse.frontend.importing.backwards import Backwards
from mdfuse.frontend.importing.place import Patterns
from mdfuse.frontend.importing.record_graph import Model
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.layout import Replicate
from mdfuse.passes.count_rows import dense

#: The most names in a line of the report.
_SHOWN = 3


def of_rows(capacity: int | None, fusion: Fusion) -> Iterator[str]:
    """Yield which rows of experts are dense, and which runs their stated capacity refuses."""
    yield from dense(fusion)
    if fusion.capacities:
        yield f"all ranks refuse runs with over {capacity} rows of a part for an expert"
    elif capacity is not None:
        yield f"capacity={capacity} bounds nothing: no rows go to ranks of experts and back"


def report(
    model: Model,
    patterns: Patterns,
    skipped: Sequence[str],
    unexpected: Sequence[str] | None,
    warnings: Sequence[str],
) -> str:
    """Return a table of the patterns' matches, with replicated inputs and notes."""
    captured = model.captured
    lines = [
        f"{captured.name} on {model.mesh}: {counted(len(model.parameters), 'parameter')}, "
        f"{counted(len(model.constants), 'constant')}, {counted(len(captured.inputs), 'input')}, "
        f"{counted(sum(o.place is not None for o in captured.outputs), 'output')}"
    ]
    if model.stages is not None:
        lines += [f"  {line}" for line in model.stages.lines(model.parameters)]
    nobody = "0: others count, or it is unused"
    rows = [(p, _placements(model, patterns, p), named(names) or nobody)
            for p, names in patterns.matched.items()]  # fmt: skip
    placed = {captured.parameters[n].name for n in model.parameters if n in model.placed}
    whole = [n.name for n in (captured.parameters[n] for n in model.parameters)
             if n.name not in placed]  # fmt: skip
    whole += [f"input:{name}" for n, name in captured.inputs.items() if n not in model.placed]
    if whole:
        rows.append(("(no pattern)", "replicated", named(whole)))
    rows += [(f"recompute:{p}", "again", named(n)) for p, n in model.again.patterns.items()]
    widths = [max((len(row[k]) for row in rows), default=0) for k in (0, 1)]
    lines += [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    notes = {
        "constants": named(model.constants.values()),
        "tied": "; ".join(
            " = ".join(p.names) for p in captured.parameters.values() if len(p.names) > 1
        ),
        "unused": named(p.name for p in captured.unused),
        "left out": named(
            f"{o.path} (no tensor)" for o in captured.outputs if o.place is None and o.is_other
        ),
        "not read": named(unexpected or ()),
        "skipped of the plan": ", ".join(skipped),
        "computed again": "; ".join(
            filter(None, (named(dict.fromkeys(model.again.region.values())), model.again.note))
        ),
    }
    lines += [f"  {name}: {text}" for name, text in notes.items() if text]
    uncaptured = [f"the backward of {name} is not captured: gradients are those of its forward"
           for name in captured.backwards.functions]  # fmt: skip
    uncaptured += _of_checkpoints(captured.module, captured.backwards)
    return "\n".join([*lines, *(f"  warning: {text}" for text in (*warnings, *uncaptured))])


def _of_checkpoints(module: nn.Module, backwards: Backwards) -> Iterator[str]:
    """Yield what checkpoints of a module ask for, and do not get."""
    is_asked = any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
    if is_asked and not backwards.checkpoints:
        yield "gradient checkpointing is on, and does nothing in eval() mode: module.train()"
    if backwards.nested:
        calls = counted(backwards.nested, "checkpoint")
        yield f"{calls} inside of another: part of its block, computed again with it, once"
    if backwards.selective:
        calls = counted(backwards.selective, "checkpoint")
        yield f"{calls} with context_fn: all of its block is computed again"


def _placements(model: Model, patterns: Patterns, pattern: str) -> str:
    """Return the placements of a pattern, with the order of axes that split one dim."""
    layout = next((x.layout for x in model.placed.values() if x.pattern == pattern), None)
    layout = layout or patterns[pattern]
    pairs = zip(layout.mesh.axes, layout.placements, strict=True)
    split = [f"{axis}={p}" for axis, p in pairs if not isinstance(p, Replicate)]
    orders = [f"dim {d} by {' then '.join(axes)}" for d, axes in layout.splits if len(axes) > 1]
    return ", ".join([*split, *orders]) or "replicated"


def named(names: Iterable[str]) -> str:
    """Return how many names there are, and the first of them; nothing where there are none."""
    all_ = [*names]
    ellipsis = ", …" if len(all_) > _SHOWN else ""
    return f"{len(all_)}: {', '.join(all_[:_SHOWN])}{ellipsis}" if all_ else ""
