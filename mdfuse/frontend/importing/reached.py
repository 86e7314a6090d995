"""Buffers that a module also reaches another way than by its own attributes: they stay buffers.

A static cache of transformers holds tensors that a module registers as buffers. While torch.export
traces, other tensors stand for these, but only where modules have them: what a cache holds would be
a constant of the program, and a write into a small one be done at once, while it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Reached(TorchFunctionMode):
    """Lets calls take what stands for a buffer now in the place of the buffer itself.

    Args:
        module: that is traced.
        buffers: its buffers before, by their names.
    """

    def __init__(self, module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._now = {id(x): module.get_buffer(name) for name, x in buffers.items()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function with the arguments that are meant."""
        return func(*self.meant(tuple(args)), **self.meant(dict(kwargs or {})))

    def meant(self, x: Any) -> Any:
        """Return an argument with what stands for buffers in it."""
        if isinstance(x, Tensor):
            return self._now.get(id(x), x)
        if type(x) in (list, tuple):
            return type(x)(map(self.meant, x))
        return {k: self.meant(v) for k, v in x.items()} if type(x) is dict else x
