"""Any tests with launches: bodies are traced as for Inductor, and run as they are.

pytest --launches tests/hir    # all programs are lowered with compile="always"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from helpers.stand_in_compiler import Compiled
from mdfuse import evaluator
from mdfuse.config import Options
from mdfuse.hir.passes import fill_outputs, large_values
from mdfuse.plan import inductor
from mdfuse.plan.context import Context
from mdfuse.plan.fusing import Fuser
from mdfuse.plan.inductor import TracedGraph
from mdfuse.plan.tensor_meta import form_of
from mdfuse.simulation import prepared

#: Why launches ran eagerly -> how often, in all tests.
REFUSED: Counter[str] = Counter()

#: How many launches were prepared, and how many functions they came to.
LAUNCHES: Counter[str] = Counter()


class Noting(Fuser):
    """Runs eagerly what cannot be compiled, and notes why."""

    def __call__(self, *given: Any) -> Any:
        LAUNCHES["launches"] += 1
        return super().__call__(*given)

    def refuse(self, i: Any, why: str, context: Context) -> None:
        REFUSED[why] += 1
        super().refuse(i, why, context)


def compiled(found: TracedGraph) -> Compiled:
    LAUNCHES["functions"] += 1
    return Compiled(found.graph, [form_of(x) for x in found.arguments], found.results)


@contextmanager
def launches() -> Iterator[None]:
    """In this context programs have launches, on the simulator and on ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "compiled", compiled)
        patch.setattr(inductor, "folder", lambda: None)
        patch.setattr(fill_outputs, "LEAST", 0)
        patch.setattr(large_values, "LEAST", 0)
        patch.setitem(Options.__init__.__kwdefaults__, "compile", "always")  # type: ignore[misc]
        patch.setattr(evaluator, "Fuser", lambda must, *rest: Noting(False, *rest))
        build = prepared.build

        def fused(*given: Any, **named: Any) -> Any:
            return partial(build, fuse=Noting(False))(*given, **named)

        patch.setattr(prepared, "build", fused)
        yield


def counted() -> list[dict[str, int]]:
    """What was counted in this process."""
    return [dict(LAUNCHES), dict(REFUSED)]


def add(found: list[dict[str, int]]) -> None:
    """Count what another process has counted."""
    for counter, more in zip((LAUNCHES, REFUSED), found, strict=True):
        counter.update(more)


def told() -> Iterator[str]:
    """Yield lines on what was compiled in all tests."""
    yield f"{LAUNCHES['launches']} launches, {LAUNCHES['functions']} functions"
    for why, n in REFUSED.most_common():
        yield f"{n} ran eagerly: {why}"
