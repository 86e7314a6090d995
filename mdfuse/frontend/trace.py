"""Fusions from plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.handle import Handle
from mdfuse.layout import Layout, Placement
from mdfuse.mesh import DeviceMesh


@dataclass(frozen=True)
class TensorSpec:
    """An argument of a traced function: the arguments of `FusionDefinition.define_tensor`."""

    shape: Sequence[int]
    dtype: torch.dtype = torch.float32
    mesh: DeviceMesh | Layout | None = None
    layout: Mapping[str, Placement] | None = None
    order: Mapping[int, Sequence[str]] | None = None
    stride_order: Sequence[int] | None = None


class TracedFunction:
    """A function whose body defines a fusion."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.signature = inspect.signature(function)
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside another definition: the body, as if it stood there."""
        return self.function(*args, **kwargs)

    def define(self, *args: Any, **kwargs: Any) -> FusionDefinition:
        """Trace the function with a `TensorSpec` per tensor; numbers become constants.

        Returns:
            The definition; a tuple that the function returns gives several outputs.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DefinitionError(f"{self.__name__}: {error}") from error
        bound.apply_defaults()
        with FusionDefinition(self.__name__) as fd:
            given = {name: _argument(fd, name, x) for name, x in bound.arguments.items()}
            result = self.function(**given)
            for output in result if isinstance(result, tuple | list) else (result,):
                if not isinstance(output, Handle):
                    raise DefinitionError(f"{self.__name__} returns {type(output).__name__}")
                fd.add_output(output)
        return fd


def _argument(fd: FusionDefinition, name: str, x: Any) -> Any:
    if not isinstance(x, TensorSpec):
        return x
    return fd.define_tensor(x.shape, x.dtype, x.mesh, x.layout, x.order, x.stride_order, name=name)


def fusion(function: Callable[..., Any]) -> TracedFunction:
    """Make a function a fusion: `f.define(x=TensorSpec(...), ...)` traces it.

    >>> import torch, mdfuse as mf
    >>> @mf.fusion
    ... def double(x):
    ...     return x + x
    >>> double.define(x=mf.TensorSpec((4,), torch.float32)).outputs
    [1]
    """
    return TracedFunction(function)
