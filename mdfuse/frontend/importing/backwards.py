"""Find calls of a module that say how its backward goes, which export does not capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from mdfuse.torch_private import checkpoints_noted

_FUNCTION: Any = Function


@dataclass(slots=True)
class Backwards:
    """The parts of a module whose backward is left out.

    Attributes:
        functions: the names of called functions of torch.autograd, each once.
        checkpoints: the number of calls of `torch.utils.checkpoint.checkpoint`.
    """

    functions: dict[str, None] = field(default_factory=dict)
    checkpoints: int = 0

    def call(self) -> None:
        """Count a checkpoint."""
        self.checkpoints += 1


@contextmanager
def own_backwards() -> Iterator[Backwards]:
    """Note calls of `torch.autograd.Function`s, except torch's own, and of checkpoints."""
    noted = Backwards()
    plain = vars(Function)["apply"]

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        if kind is CheckpointFunction:  # checkpoint(use_reentrant=True)
            noted.call()
        elif not kind.__module__.startswith("torch."):
            noted.functions[kind.__name__] = None
        return plain.__get__(None, kind)(*args, **kwargs)

    _FUNCTION.apply = classmethod(apply)
    try:
        with checkpoints_noted(noted.call):
            yield noted
    finally:
        _FUNCTION.apply = plain
