"""Operations of a module that are not in the table: one error on all of them, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch.fx import Node

from mdfuse.errors import DefinitionError
from mdfuse.frontend.importing.aten_table import is_known
from mdfuse.frontend.importing.capture import ExportedModule
from mdfuse.frontend.importing.module_lines import line_of


def check_known(captured: ExportedModule, live: Mapping[Node, None]) -> None:
    """Raise DefinitionError that lists all operations that are not in the table."""
    unknown = [n for n in live if n.op == "call_function" and not is_known(str(n.target))]
    if not unknown:
        return
    counts = Counter(str(n.target) for n in unknown)
    first: dict[str, Node] = {}
    for node in unknown:
        first.setdefault(str(node.target), node)
    lines = [(f"{times} x", target, line_of(first[target].meta.get("stack_trace")))
             for target, times in counts.most_common()]  # fmt: skip
    reasons = {*map(_why_not, counts)}
    because, hint = reasons.pop() if len(reasons) == 1 else _NONE
    raise DefinitionError(
        f"{captured.name} calls {len(counts)} operations that cannot be imported",
        where=[f"{n} {target}   {source.quote() if source else ''}" for n, target, source in lines],
        because=because,
        hint=hint,
    )


def _why_not(target: str) -> tuple[str, str]:
    """Return why an operation is not in the table, and a replacement."""
    name = target.removeprefix("aten.").removeprefix("_")
    return next((why for names, why in _WHY.items() if name.startswith(names)), _NONE)


_NONE = (
    "no operation of mf.ops stands for them",
    "write them with other operations of torch; docs/importing.md lists what there is",
)
_WHY: Mapping[tuple[str, ...], tuple[str, str]] = {
    ("item", "local_scalar_dense", "nonzero", "masked_select", "unique", "bincount"): (
        "what follows, or its shape, depends on numbers that only a run knows",
        "where(mask, x, other) keeps the shape; experts of transformers have other forms: "
        'module.set_experts_implementation("grouped_mm")',
    ),
    ("cond", "while_loop", "map_impl", "scan"): (
        "which operations a program runs depends on no numbers",
        "where(condition, a, b) of both results; loops over a number of steps that is known",
    ),
    ("wrap_with_autocast",): (
        "a program has the dtypes of its operations, which autocast chooses as they run",
        "cast in the module, x.to(torch.bfloat16), or import all of it as module.bfloat16()",
    ),
    ("rand", "normal", "bernoulli", "multinomial", "exponential", "uniform"): (
        "only dropout draws numbers: others, computed once, would be the same in each run",
        "make what is drawn an argument of the module",
    ),
    ("fft",): (
        "there is no Fourier transform",
        "a product with its matrix, exp(-2j * pi * j * k / n), which is a constant",
    ),
}
