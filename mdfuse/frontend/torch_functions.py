"""Functions of torch that are called with handles: `torch.softmax(x, -1)` is `fd.ops.softmax`.

torch asks `Handle.__torch_function__`. A function for which there is no operation of the same
meaning is refused, and so are arguments that the operation does not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import resolve_name

from mdfuse.errors import DefinitionError
from mdfuse.frontend import ops
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.hints import hint_for, reason_for
from mdfuse.frontend.methods import Methods
from mdfuse.frontend.torch_adapters import ADAPTED

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: The namespaces of torch whose functions match operations by name.
_NAMESPACES = (torch, torch.nn.functional, torch.Tensor)

#: Operations whose name means something else in torch, or whose arguments do.
_OTHER_MEANING = {"dropout", "set", "slice", "broadcast", "cast", "index", "uniform"}

#: Operations that match torch.nn.functional only: torch's function of this name takes a reduction
#: as a number, or returns more.
_FUNCTIONAL = {
    "binary_cross_entropy_with_logits", "kl_div", "triplet_margin_loss", "margin_ranking_loss",
    "hinge_embedding_loss", "cosine_embedding_loss", "poisson_nll_loss", "batch_norm",
    "instance_norm", "adaptive_max_pool1d", "embedding_bag",
}  # fmt: skip

#: Functions with another name than the operation, or in another namespace.
_RENAMED: dict[Callable[..., Any], str] = {
    torch.linalg.vector_norm: "norm",
    torch.linalg.inv: "inverse",
    torch.linalg.solve: "linalg_solve",
    torch.special.expit: "sigmoid",
    torch.special.gammaln: "lgamma",
    **{getattr(torch, f"arc{name}"): f"a{name}" for name in ("cos", "sin", "tan")},
    **{getattr(torch.linalg, name): name for name in ("matmul", "cholesky")},
    **{
        getattr(torch.special, name): name
        for name in ("logsumexp", "softmax", "log_softmax", "i0", "i1", "sinc", "logit", "xlogy",
                     "digamma", "erfinv")
    },
}  # fmt: skip

#: Functions that ask for a fact -> the answer.
_FACTS: dict[Callable[..., Any], Callable[[Handle], Any]] = {
    torch.numel: Handle.numel,
    torch.is_floating_point: Handle.is_floating_point,
}

#: Names that torch gives the first argument.
_FIRST = ("input", "self")


@lru_cache(maxsize=1)
def equals() -> dict[Any, str]:
    """Return torch function -> the name of the equivalent operation."""
    names = ops.BY_NAME.keys() - _OTHER_MEANING
    by_function = {
        getattr(space, name): name
        for space in _NAMESPACES
        for name in names
        if hasattr(space, name) and not (space is torch and name in _FUNCTIONAL)
    }
    del by_function[torch.embedding]  # it takes the table first
    return by_function | _RENAMED


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the operation for a function of torch that was called with a handle."""
    if func in _FACTS:
        return _FACTS[func](*args)
    adapted, name = ADAPTED.get(func), equals().get(func)
    if adapted is None and name is None:
        raise _unknown(func)
    _refuse_tensors(func, (*args, *kwargs.values()))
    if adapted is not None:
        return adapted(*args, **kwargs)
    operation = ops.BY_NAME[str(name)]
    given, settings = _as_ours(func, operation, args, kwargs)
    _check(func, operation, given, settings)
    return operation(*given, **settings)


def _refuse_tensors(func: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Raise DefinitionError for tensors, because a fusion runs again with others."""
    for x in arguments:
        if isinstance(x, list | tuple):
            _refuse_tensors(func, x)
        elif isinstance(x, torch.Tensor):
            is_parameter = isinstance(x, torch.nn.Parameter)
            module = ", or the module: mf.from_torch(module, …).record(value)" * is_parameter
            raise DefinitionError(
                f"{_name(func)} of a value of a fusion and a {type(x).__name__}",
                because="operands are values of the definition and numbers",
                hint=f"make it an input with fd.define_tensor{module}",
            )


def _as_ours(
    func: Callable[..., Any],
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Arguments:
    """Return a call's arguments as the operation takes them, without None and defaults."""
    named = [kwargs[name] for name in _FIRST if name in kwargs]
    known = inspect.signature(operation).parameters
    usual = _defaults(func)
    settings = {
        name: x
        for name, x in kwargs.items()
        if name in known or not (name in _FIRST or _says_nothing(x, usual.get(name)))
    }
    return (*named, *args), settings


def _says_nothing(x: Any, usual: Any) -> bool:
    """Return whether an argument is None, or has its default value."""
    return x is None or (isinstance(x, bool | int | float | str) and x == usual)


def _defaults(func: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a function written in Python; those of others are unknown."""
    code = getattr(func, "__code__", None)
    if code is None:
        return {}
    return {name: p.default for name, p in inspect.signature(func).parameters.items()}


def _check(
    func: Callable[..., Any],
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    signature, name = inspect.signature(operation), operation.__name__
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DefinitionError(
            f"{_name(func)}: {error}",
            because=f"for values of a fusion it is {name}({', '.join(signature.parameters)})",
            hint="leave the argument out",
        ) from error


def _name(func: Callable[..., Any]) -> str:
    return resolve_name(func) or str(getattr(func, "__name__", func))


def _unknown(func: Callable[..., Any]) -> DefinitionError:
    name = str(getattr(func, "__name__", func))
    return DefinitionError(
        f"{_name(func)} of a value of a fusion", because=reason_for(name), hint=hint_for(name)
    )


Methods.torch_call = staticmethod(call)
