"""The symbolic extents of a definition: their names, and their examples while defining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from mdfuse.extents.assumptions import Assumptions
from mdfuse.extents.extent import example, is_symbolic, symbolic, with_examples
from mdfuse.frontend.cache import Symbolic
from mdfuse.ir.graph import Expr, Fusion, Value, fresh_name
from mdfuse.ir.symbolic import unified, with_new_examples

T = TypeVar("T")

#: The first example of a symbolic extent: divisible by most mesh sizes.
_EXAMPLE = 1680

Recorded = tuple[dict[str, Value], list[Expr]]


class Symbols:
    """Names and examples of symbolic extents; both may change until the definition ends.

    An example changes if an operation refuses it, a name if `.on()` reveals the variable. Extents
    held by user code are updated when they are passed back (`current`).
    """

    def __init__(self, *assumed: Assumptions) -> None:
        self.examples: dict[str, int] = {}
        self._assumed = assumed
        #: old name -> current name of symbols and inputs
        self._renamed: dict[str, str] = {}

    @property
    def now(self) -> Symbolic | None:
        """The function that updates extents read earlier; None without symbols."""
        return Symbolic(self.examples, self._renamed) if self.examples else None

    def unused(self, name: str) -> str:
        """Return a name for an input that no input had before."""
        return fresh_name(self._renamed, name)

    def symbolic_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an input with symbols in the place of -1."""
        names = {f"{name}.{d}": d for d, n in enumerate(shape) if type(n) is int and n == -1}
        self.examples = {**self.examples, **dict.fromkeys(names, _EXAMPLE)}
        new = {d: symbolic(s, _EXAMPLE) for s, d in names.items()}
        return tuple(new.get(d, n) for d, n in enumerate(shape))

    def current(self, x: T) -> T:
        """Return operands or attributes with the names and examples that symbols have now."""
        if not self.examples or not is_symbolic(x):
            return x
        return with_examples(x, self.examples, self._renamed)

    def rename(self, old: str, new: str, values: dict[str, Value], exprs: list[Expr]) -> Recorded:
        """Return the definition after an input got another name."""
        names = {
            s: f"{new}.{s.removeprefix(old + '.')}"
            for s in self.examples
            if s.rpartition(".")[0] == old
        }
        if not names:
            return values, exprs
        self._renamed = {**self._renamed, old: new, **names}
        self.examples = {names.get(s, s): n for s, n in self.examples.items()}
        return with_examples((values, exprs), self.examples, names)

    def unified(
        self, values: Mapping[str, Value], exprs: Sequence[Expr], refused: Expr
    ) -> Recorded | None:
        """Return the definition with another example of a symbol that the operation takes.

        None where there is no such example.
        """
        trial = fresh_name(values, "trial")
        outputs = tuple(f"{trial}.{n}" for n in range(len(refused.outputs)))
        some = {name: Value(name=name, shape=(), dtype=torch.float32) for name in outputs}
        fusion = Fusion(
            name=trial,
            values={**values, **some},
            exprs=(*exprs, replace(refused, outputs=outputs)),
            inputs=(),
            outputs=(),
        )
        for examples in unified(fusion, self.examples, _numbers(values, refused)):
            if all(a.hold(examples) for a in self._assumed):
                updated = with_new_examples(fusion, examples)
                self.examples = examples
                remaining = {n: v for n, v in updated.values.items() if n not in some}
                return remaining, list(updated.exprs[:-1])
        return None


def _numbers(values: Mapping[str, Value], refused: Expr) -> list[int]:
    """Return the extents of an operation's operands and of the shape it is asked for."""
    shapes: list[Any] = [values[x].shape for x in refused.reads]
    shapes.append(refused.kwargs.get("shape", ()))
    return [example(n) for shape in shapes for n in shape]
