"""Parameters and buffers that a module also reaches another way than by its own attributes.

They stay parameters and buffers: a parameter in a list is trained.

A static cache of transformers holds tensors that a module registers as buffers. While torch.export
traces, other tensors stand for these, but only where modules have them: what a cache holds would be
a constant of the program, and a write into a small one be done at once, while it is traced.

A buffer that is assigned, as by `self.mean = 0.9 * self.mean + x.mean(0)`, is written, too, where a
next run would read it: torch exports such an assignment as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Calls that copy into a tensor -> the place of what they copy. Where they write the whole of a
#: buffer, torch exports neither a cast nor an expansion.
_SOURCES: dict[Any, int] = {
    Tensor.copy_: 1, torch.ops.aten.copy_: 1, torch.ops.aten.copy_.default: 1,
    Tensor.__setitem__: 2,
}  # fmt: skip


def _as_in(x: Tensor, source: Any, func: Callable[..., Any]) -> Any:
    """Return what is copied in the dtype of x; in its shape, too, where all of x is written."""
    if not isinstance(source, Tensor):
        return source
    source = source.to(x.dtype)
    return source if func is Tensor.__setitem__ else source.expand(x.shape)


def held(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by all of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


class Reached(TorchFunctionMode):
    """Lets calls take what stands for a parameter or buffer now in the place of the tensor itself.

    Args:
        module: that is traced.
        tensors: its parameters and buffers before, as `held` returns them.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._module, now = module, held(module)
        self._named = dict(module.named_buffers())
        self._now = {id(x): now[name] for name, x in tensors.items()}
        self._read: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function with the arguments that are meant."""
        if func.__name__ == "__get__":
            result = func(*(self._now.get(id(x), x) for x in args))
            if isinstance(result, Tensor):  # as x.T; shapes and dtypes are no elements
                self.meant(args)
            return result
        args, kwargs = self.meant(tuple(args)), self.meant(dict(kwargs or {}))
        at = _SOURCES.get(func)
        if at is not None and len(args) > at and any(args[0] is x for x in self._named.values()):
            args = (*args[:at], _as_in(args[0], args[at], func), *args[at + 1 :])
        return func(*args, **kwargs)

    def written(self, results: list[Tensor]) -> list[Tensor]:
        """Write what was assigned into its buffer, and return the results as they are before."""
        assigned = {name: (old, self._new(name)) for name, old in self._named.items()}
        assigned = {n: (old, new) for n, (old, new) in assigned.items() if old is not new}
        if not assigned:
            return results
        read = self._read | {id(x) for x in (*results, *(new for _, new in assigned.values()))}
        pairs = [
            (old, new.detach().clone())
            for old, new in assigned.values()
            if id(old) in read and new.shape == old.shape and new.dtype == old.dtype
        ]
        results = [x.clone() for x in results]
        for old, new in pairs:
            old.copy_(new)
        return results

    def _new(self, name: str) -> Tensor:
        """Return what a buffer's attribute is now; the buffer itself where it is no tensor."""
        path, _, attribute = name.rpartition(".")
        new = getattr(self._module.get_submodule(path), attribute, None)
        return new if isinstance(new, Tensor) else self._named[name]

    def meant(self, x: Any) -> Any:
        """Return an argument, which is read, with what stands for parameters and buffers in it."""
        if isinstance(x, Tensor):
            x = self._now.get(id(x), x)
            self._read.add(id(x))
            return x
        if isinstance(x, list | tuple):
            make = list if isinstance(x, list) else getattr(x, "_make", tuple)  # of named tuples
            return make(map(self.meant, x))
        return {k: self.meant(v) for k, v in x.items()} if isinstance(x, dict) else x
