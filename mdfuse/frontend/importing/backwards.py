"""Find calls of a module that say how its backward goes: checkpoints are marked, others noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from mdfuse.frontend.importing.module_lines import mark
from mdfuse.frontend.importing.torch_tracing import checkpoints_entered, traced

_FUNCTION: Any = Function


@dataclass(slots=True)
class Backwards:
    """The parts of a module that say how their backward goes.

    Attributes:
        functions: the names of called functions of torch.autograd, each once; they are left out.
        checkpoints: the number of calls of `torch.utils.checkpoint.checkpoint`.
        nested: those of them inside of another one.
        selective: those of them with a `context_fn`, which is left out.
    """

    functions: dict[str, None] = field(default_factory=dict)
    checkpoints: int = 0
    nested: int = 0
    selective: int = 0
    _depth: int = 0

    @contextmanager
    def checkpoint(self, is_selective: bool = False) -> Iterator[None]:
        """Count a checkpoint, and mark the nodes that are traced in it with its number."""
        number, first = self.checkpoints, len(traced())
        self.checkpoints += 1
        self.nested += self._depth > 0
        self.selective += is_selective
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        for node in traced()[first:]:
            mark(node, number)


@contextmanager
def own_backwards() -> Iterator[Backwards]:
    """Note calls of `torch.autograd.Function`s, except torch's own, and mark checkpoints.

    A checkpoint calls its function, and does nothing else.
    """
    noted = Backwards()
    plain = vars(Function)["apply"]

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        if kind is CheckpointFunction:  # checkpoint(use_reentrant=True)
            function, _, *operands = args
            with noted.checkpoint():
                return function(*operands)
        if not kind.__module__.startswith("torch."):
            noted.functions[kind.__name__] = None
        return plain.__get__(None, kind)(*args, **kwargs)

    _FUNCTION.apply = classmethod(apply)
    try:
        with checkpoints_entered(noted.checkpoint):
            yield noted
    finally:
        _FUNCTION.apply = plain
